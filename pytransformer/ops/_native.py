"""The native library of the tier ``cpu``: raw ops in the namespace ``pytransformer_C``, free of Python, loaded on first use."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

LIBRARY_NAME = "_cpu.so"


@functools.cache
def why_not() -> str | None:
    """None if the library is loaded, else the reason why it cannot be."""
    path = Path(__file__).resolve().parent.parent / LIBRARY_NAME
    if not path.exists():
        return "the native library was not built at installation (pytransformer doctor says why)"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"the native library does not load: {error}"
    return None
