# SPDX-License-Identifier: Apache-2.0
"""The native library of the backend ``cpu``: raw ops in the namespace ``pytransformer_C``, free of Python, loaded on first use."""

from __future__ import annotations

import functools
import json
import runpy
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parents[2]
LIBRARY_NAME = "libpytransformer_cpu.so"
LIBRARY = "the native library"  # how the reasons start that say it is not there
OLDER = "rebuild it with make build"


@functools.cache
def build_info() -> dict[str, Any] | None:
    """What the build wrote about itself: what it built, what not and why; None if no build ever ran here."""
    path = PACKAGE / "_build_info.json"
    return json.loads(path.read_text()) if path.is_file() else None


@functools.cache
def why_not(op: str) -> str | None:
    """None if the library is loaded and holds the raw op `op`, else the reason why it cannot be called."""
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

    The build information, which lies inside the package, decides. A folder beside an installed
    package may belong to anyone, and nothing in it is run.
    """
    return package.parent / "csrc" if info.get("checkout") == str(package.parent) else None


def _why_not_current(csrc: Path) -> str | None:
    """None unless the package is a checkout whose library was built from other sources than those beside it: its ops may read
    arguments that the code does not pass any more."""
    if not (csrc / "interface.py").is_file():
        return None  # an installed package: the library came with this code
    raw = torch.ops.pytransformer_C
    with untraced():
        built = raw.cpu_interface() if hasattr(raw, "cpu_interface") else None
    if built == runpy.run_path(str(csrc / "interface.py"))["digest"](csrc):
        return None
    return f"{LIBRARY} was built from other sources than this code: {OLDER}"


def untraced() -> Any:
    """Return a context in which torch.jit.trace records nothing: it refuses an op that returns a string."""
    tracer = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("Tracer"))
    return torch._C._ExcludeDispatchKeyGuard(tracer)


def why_not_nvidia() -> str | None:
    """Why no kernel of ours for GPUs runs on what this torch calls cuda devices: on ROCm they are AMD's. None if they are NVIDIA's."""
    return None if torch.version.hip is None else f"needs an NVIDIA GPU, and this torch is built for ROCm {torch.version.hip}"
