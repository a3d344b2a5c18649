# SPDX-License-Identifier: Apache-2.0
"""Attention of sequences split over several processes, on torch.distributed. See
docs/distributed.md.

Submodules load on first use: nn needs only the experts, and torch.compiler.disable imports the
compiler, which takes a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .layout import gather_sequence, shard_sequence
    from .ring import ring_attention
    from .ulysses import ulysses_attention

__all__ = ["gather_sequence", "ring_attention", "shard_sequence", "ulysses_attention"]
_MODULES = {
    "gather_sequence": "layout",
    "ring_attention": "ring",
    "shard_sequence": "layout",
    "ulysses_attention": "ulysses",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
