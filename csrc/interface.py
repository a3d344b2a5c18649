# SPDX-License-Identifier: Apache-2.0
"""What the Python code and a library must agree on, as one word: a digest of the bindings, the sources that register the raw ops and
read their arguments; of the C++ fast path, of all its sources. The build puts it into the library (csrc/cpu/core/library.cpp) or beside it
(fast_path_build.py); a checkout compares it when it loads the library."""

from __future__ import annotations

import hashlib
from pathlib import Path

CSRC = Path(__file__).resolve().parent


def bindings(csrc: Path = CSRC) -> list[Path]:
    return sorted(path for path in csrc.glob("cpu/**/*.cpp") if path.stem != "kernels")


def digest(csrc: Path = CSRC, part: str = "cpu") -> str:
    found = hashlib.sha256()
    sources = bindings(csrc) if part == "cpu" else sorted(csrc.glob(f"{part}/*"))
    for path in [*sources, *sorted(csrc.glob("common/activation.h"))]:  # which gives names their numbers
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def compiled(csrc: Path = CSRC) -> str:
    """Return a digest of all sources of the op libraries, on which a verification result depends."""
    found = hashlib.sha256()
    for path in sorted(path for part in ("common", "cpu", "cuda") for path in (csrc / part).rglob("*") if path.is_file()):
        found.update(path.relative_to(csrc).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


# Folders of csrc/cuda by op family; all other files there belong to every family.
CUDA_FAMILIES = {
    "attention": ("attention",),
    "cross_entropy": ("cross_entropy",),
    "feed_forward": ("feed_forward",),
    "layer_norm": ("layer_norm",),
    "rotary": ("rotary", "layer_norm"),
}


def cuda_sources(csrc: Path = CSRC) -> dict[str, str]:
    """Return a digest of each op family's CUDA sources, with those that all families include."""
    digests = {}
    files = sorted(p for part in ("common", "cuda") for p in (csrc / part).rglob("*") if p.is_file())
    for family, folders in CUDA_FAMILIES.items():
        others = {folder for both in CUDA_FAMILIES.values() for folder in both} - {*folders}
        found = hashlib.sha256()
        for path in files:
            name = path.relative_to(csrc)
            if name.parts[1] not in others:
                found.update(name.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
        digests[family] = found.hexdigest()[:16]
    return digests
