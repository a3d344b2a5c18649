# SPDX-License-Identifier: Apache-2.0
"""Verification results that come with the package, from our GPU runs.

verified.json lists, by compute capability, backend and op family, the tested commit and a digest of
its kernel sources. An entry is valid if the kernels here have the same digest; the Triton version
must match too. bench/tools/verified.py writes the file. See docs/design/verification.md.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from . import native, verification_file
from .table import OPS

TABLE = Path(__file__).with_name("verified.json")


@functools.cache
def table() -> dict[str, Any]:
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))


def names(device: torch.device) -> list[tuple[str, str, str]]:
    """Return (op, backend, dtype) of everything that is known to be correct on the device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return []
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return [
        (op.name, backend, dtype)
        for backend, entry in table().get(capability, {}).items()
        if entry.get("triton") in (None, verification_file.triton_version())
        for op in OPS.values()
        if is_current(backend, op.family, entry["families"].get(op.family))
        for dtype in entry["dtypes"]
    ]


def is_current(backend: str, family: str, result: dict[str, Any] | None) -> bool:
    """Return whether the tested kernels equal the kernels that run here."""
    return result is not None and sources(backend).get(family) == result["sources"]


@functools.cache
def sources(backend: str) -> dict[str, str]:
    """Return digests of the kernels' sources by op family.

    They cover the sources of the CUDA build, or the installed Triton kernels.
    """
    if backend == "cuda":
        return dict((native.build_info() or {}).get("cuda_sources", {}))
    return {
        family: digest(folder, [folder / family, *folder.glob("*.py")])
        for folder in verification_file.kernel_folders()
        for family in dict.fromkeys(op.family for op in OPS.values())
    }


def digest(root: Path, places: list[Path]) -> str:
    """Return a digest of the files, and of all files below the folders."""
    hashed = hashlib.sha256()
    files = [f for place in places for f in ([place] if place.is_file() else place.rglob("*"))]
    for path in sorted(f for f in files if f.is_file() and f.suffix != ".pyc"):
        hashed.update(
            path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return hashed.hexdigest()[:16]
