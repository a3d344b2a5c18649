# SPDX-License-Identifier: Apache-2.0
"""What the Python code and a library must agree on, as one word: a digest of the edges, the sources that register the raw ops and
read their arguments; of the C++ lane, of all its sources. The build puts it into the library (csrc/cpu/core/library.cpp) or beside it
(lane_build.py); a checkout compares it when it loads the library."""

from __future__ import annotations

import hashlib
from pathlib import Path

CSRC = Path(__file__).resolve().parent


def edges(csrc: Path = CSRC) -> list[Path]:
    return sorted(path for path in csrc.glob("cpu/**/*.cpp") if path.stem != "kernels")


def digest(csrc: Path = CSRC, part: str = "cpu") -> str:
    found = hashlib.sha256()
    sources = edges(csrc) if part == "cpu" else sorted(csrc.glob(f"{part}/*"))
    for path in [*sources, *sorted(csrc.glob("common/activation.h"))]:  # which gives names their numbers
        found.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def compiled(csrc: Path = CSRC) -> str:
    """A digest of all that the libraries of ops are compiled from: a verdict on them holds as long as it is the same."""
    found = hashlib.sha256()
    for path in sorted(path for part in ("common", "cpu", "cuda") for path in (csrc / part).rglob("*") if path.is_file()):
        found.update(path.relative_to(csrc).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]
