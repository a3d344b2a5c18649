# SPDX-License-Identifier: Apache-2.0
"""Memory that the package allocates without filling arrives full of NaN and guarded on both sides.

    with poisoned() as guards:
        pytransformer.attention(...)
    # on leaving, a write outside any such tensor raises StrayWrite

An output that a kernel forgets to write stays NaN and fails its check, instead of holding what the allocator
last had there. All such memory is kept until leaving. Only calls made from inside `pytransformer` (this folder apart) are touched, and what
the C++ fast path allocates.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from pytransformer.ops._core import fast_path

from .guarded import Guard, guarded_output

PATCHED = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch, "empty_permuted"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)


class StrayWrite(AssertionError):
    """Something wrote outside a tensor that the package allocated."""


def _from_package(frame: Any) -> bool:
    name = frame.f_globals.get("__name__", "")
    return (name.startswith("pytransformer.") or name == "pytransformer") and not name.startswith("pytransformer.testing")


@contextlib.contextmanager
def poisoned() -> Iterator[list[Guard]]:
    """Poison and guard what `pytransformer` gets from torch.empty and its kin; yields the guards made so
    far."""
    guards: list[Guard] = []

    def guarded(tensor: Tensor) -> Tensor:
        replacement, guard = guarded_output(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        guards.append(guard)
        return replacement

    def wrap(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(allocate)
        def poison(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            if type(tensor) is not Tensor or tensor.device.type == "meta" or not _from_package(sys._getframe(1)):
                return tensor
            return guarded(tensor)

        return poison

    _device_constructors()  # fills its cache with the originals, else torch.device("meta") would not know them
    originals = [(owner, name, getattr(owner, name)) for owner, name in PATCHED]
    for owner, name, original in originals:
        setattr(owner, name, wrap(original))
    fast_path.replace_memory(guarded)
    try:
        yield guards
    finally:
        fast_path.replace_memory(None)
        for owner, name, original in originals:
            setattr(owner, name, original)
    broken = [tuple(g.buffer.shape) for g in guards if not g.intact()]
    if broken:
        raise StrayWrite(f"{len(broken)} of {len(guards)} outputs were written beyond their ends; buffers {broken}")
