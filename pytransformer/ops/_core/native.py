# SPDX-License-Identifier: Apache-2.0
"""The native library of the backend ``cpu``: raw ops in the namespace ``pytransformer_C``.

It does not depend on Python and loads on first use.
"""

from __future__ import annotations

import functools
import json
import runpy
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[2]
LIBRARY_NAME = "libpytransformer_cpu.so"
LIBRARY = "the native library"  # prefix of the reasons that it is unavailable
OLDER = "rebuild it with make build"


@functools.cache
def build_info() -> dict[str, Any] | None:
    """Return the build's record of what it built and why not, or None without a build."""
    path = PACKAGE / "_build_info.json"
    return json.loads(path.read_text()) if path.is_file() else None


@functools.cache
def why_not(op: str) -> str | None:
    """Return None if the library is loaded and has the raw op ``op``, else the reason."""
    if (reason := _why_not_loaded()) is not None:
        return reason
    return None if hasattr(torch.ops.pytransformer_C, op) else f"{LIBRARY} has no op {op}: {OLDER}"


@functools.cache
def _why_not_loaded() -> str | None:
    path = PACKAGE / LIBRARY_NAME
    if not path.exists():
        info = build_info()
        reason = info["cpu"]["reason"] if info else "this checkout was never built (make build)"
        return f"{LIBRARY} was not built: {reason}"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{LIBRARY} does not load: {error}"
    csrc = sources(build_info() or {})
    return None if csrc is None else _why_not_current(csrc)


def sources(info: dict[str, Any], package: Path = PACKAGE) -> Path | None:
    """Return the folder of the sources if the package was built inside its checkout, else None.

    The build information inside the package decides. A folder beside an installed package may
    belong to anyone, so nothing in it runs.
    """
    return package.parent / "csrc" if info.get("checkout") == str(package.parent) else None


def _why_not_current(csrc: Path) -> str | None:
    """Return why the library does not match the checkout's sources, or None.

    Ops of an older library may read arguments that the code no longer passes.
    """
    if not (csrc / "interface.py").is_file():
        return None  # an installed package contains the matching library
    raw = torch.ops.pytransformer_C
    with untraced():
        built = raw.cpu_interface() if hasattr(raw, "cpu_interface") else None
    if built == runpy.run_path(str(csrc / "interface.py"))["digest"](csrc):
        return None
    return f"{LIBRARY} was built from other sources than this code: {OLDER}"


def untraced() -> Any:
    """Return a context in which torch.jit.trace records nothing.

    torch.jit.trace refuses an op that returns a string.
    """
    tracer = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("Tracer"))
    return torch._C._ExcludeDispatchKeyGuard(tracer)


def why_not_nvidia() -> str | None:
    """Return why no GPU kernel of ours runs on this torch's cuda devices, or None.

    On ROCm they are AMD GPUs.
    """
    return (
        None
        if torch.version.hip is None
        else f"needs an NVIDIA GPU, and this torch is built for ROCm {torch.version.hip}"
    )
