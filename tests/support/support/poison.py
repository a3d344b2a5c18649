# SPDX-License-Identifier: Apache-2.0
"""Fills memory that the package allocates uninitialized with NaN, between guards.

    with poisoned() as guards:
        pytransformer.attention(...)
    # on exit, a write outside any such tensor raises StrayWrite

An output that a kernel fails to write stays NaN and fails its check; otherwise it would hold stale
data. All such memory lives until exit. Only allocations by `pytransformer` (except this folder) and
by the C++ fast path are affected.
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
    """A write outside a tensor that the package allocated."""


def _from_package(frame: Any) -> bool:
    name = frame.f_globals.get("__name__", "")
    return (name.startswith("pytransformer.") or name == "pytransformer") and not name.startswith(
        "pytransformer.testing"
    )


@contextlib.contextmanager
def poisoned() -> Iterator[list[Guard]]:
    """Poison and guard `pytransformer`'s torch.empty allocations; yield the guards."""
    guards: list[Guard] = []

    def guarded(tensor: Tensor) -> Tensor:
        replacement, guard = guarded_output(
            tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        )
        guards.append(guard)
        return replacement

    def wrap(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(allocate)
        def poison(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            if (
                type(tensor) is not Tensor
                or tensor.device.type == "meta"
                or not _from_package(sys._getframe(1))
            ):
                return tensor
            return guarded(tensor)

        return poison

    # Fill its cache with the originals; otherwise torch.device("meta") would not know them.
    _device_constructors()
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
        raise StrayWrite(
            f"{len(broken)} of {len(guards)} outputs were written beyond their ends; buffers"
            f" {broken}"
        )
