"""The native library of the tier ``cpu``: raw ops in the namespace ``pytransformer_C``, free of Python, loaded on first use."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parent.parent
LIBRARY_NAME = "libpytransformer_cpu.so"


@functools.cache
def build_info() -> dict[str, Any] | None:
    """What the build wrote about itself: what it built, what not and why; None if no build ever ran here."""
    path = PACKAGE / "_build_info.json"
    return json.loads(path.read_text()) if path.is_file() else None


@functools.cache
def why_not(op: str) -> str | None:
    """None if the library is loaded and holds the raw op `op`, else the reason why it cannot be called."""
    path = PACKAGE / LIBRARY_NAME
    if not path.exists():
        info = build_info()
        reason = info["cpu"]["reason"] if info else "this checkout was never built (make build)"
        return f"the native library was not built: {reason}"
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"the native library does not load: {error}"
    if not hasattr(torch.ops.pytransformer_C, op):
        return f"the native library has no op {op}: it is older than this code (make build)"
    return None
