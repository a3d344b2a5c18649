# SPDX-License-Identifier: Apache-2.0
"""Digests that the Python code and a native library must agree on.

The CPU digest covers the bindings, which register the raw ops and read their arguments; the digest
of the C++ fast path covers all its sources. The build compiles the first into the library
(csrc/cpu/core/library.cpp) and writes the second beside it (fast_path_build.py). A checkout
compares them when it loads a library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

CSRC = Path(__file__).resolve().parent
# numbers of activations, and the arguments of attention's raw ops
SHARED = ("activation.h", "attention_arguments.h")


def bindings(csrc: Path = CSRC) -> list[Path]:
    return sorted(path for path in csrc.glob("cpu/**/*.cpp") if path.stem != "kernels")


def digest(csrc: Path = CSRC, part: str = "cpu") -> str:
    found = hashlib.sha256()
    sources = bindings(csrc) if part == "cpu" else sorted(csrc.glob(f"{part}/*"))
    for path in [*sources, *(csrc / "common" / name for name in SHARED)]:
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def compiled(csrc: Path = CSRC) -> str:
    """Return a digest of the op libraries' sources. Verification results depend on it."""
    found = hashlib.sha256()
    for path in sorted(
        path
        for part in ("common", "cpu", "cuda")
        for path in (csrc / part).rglob("*")
        if path.is_file()
    ):
        found.update(path.relative_to(csrc).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


# Folders of csrc/cuda per op family. All other files there belong to every family.
CUDA_FAMILIES = {
    "attention": ("attention",),
    "cross_entropy": ("cross_entropy",),
    "feed_forward": ("feed_forward",),
    "layer_norm": ("layer_norm",),
    "rotary": ("rotary", "layer_norm"),
}


def cuda_sources(csrc: Path = CSRC) -> dict[str, str]:
    """Return a digest of each op family's CUDA sources, shared sources included."""
    digests = {}
    files = sorted(
        p for part in ("common", "cuda") for p in (csrc / part).rglob("*") if p.is_file()
    )
    for family, folders in CUDA_FAMILIES.items():
        others = {folder for both in CUDA_FAMILIES.values() for folder in both} - {*folders}
        found = hashlib.sha256()
        for path in files:
            name = path.relative_to(csrc)
            if name.parts[1] not in others:
                found.update(name.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
        digests[family] = found.hexdigest()[:16]
    return digests
