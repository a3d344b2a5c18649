# SPDX-License-Identifier: Apache-2.0
"""Weights of linear layers packed once for inference on the CPU, on request.

A packed copy is used while the weight's version counter, address, shape, strides, dtype and a
digest of one cache line per row are those of the time of packing; otherwise the weight is packed
again. The counter alone is not enough: writes through ``weight.data``, NumPy, DLPack and
``AdamW(fused=True)`` leave it unchanged. The digest detects a change of all elements, of full rows
and of most columns, but not every change of single elements, so nothing is packed by default.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import Any

import torch
from torch import nn

from ..ops._backends.cpu import linear as cpu
from ..ops._core import native

DEFAULT_BYTES = 1 << 30
_MATRICES = ("weight", "in_proj_weight")  # of nn.Linear, Conv1D and nn.MultiheadAttention


class _Weight:
    """A weight to pack, and its packed copy with the state it was made from."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.reference = weakref.ref(weight, functools.partial(_forget, id(weight)))
        self.held: tuple[tuple[Any, ...], torch.Tensor] | None = None
        self.refused = False  # beyond the bytes allowed


weights: dict[int, _Weight] = {}  # by id
_lock = threading.RLock()  # a weak reference's callback may run inside


def pack_weights(model: nn.Module) -> int:
    """Let linear layers of the model pack their weights at their first inference call.

    Calls of more than 8 rows without gradient then skip the packing (docs/linear.md). The copies
    take the weights' bytes, twice as many for 16-bit weights on CPUs without 16-bit products, up to
    ``PYTRANSFORMER_PACKED_BYTES`` in the process (1 GiB by default). They follow every change that
    the version counter or a digest of one cache line per row shows. Call
    :func:`drop_packed_weights` after other changes, such as single elements through ``.data``.

    Returns:
        The number of weights registered.
    """
    found = [
        weight
        for module in model.modules()
        if isinstance(module, (nn.Linear, nn.MultiheadAttention))
        or type(module).__name__ == "Conv1D"
        for name, weight in module.named_parameters(recurse=False)
        if name in _MATRICES and _packable(weight)
    ]
    with _lock:
        for weight in found:
            entry = weights.get(id(weight))
            if entry is None or entry.refused or entry.reference() is not weight:
                weights[id(weight)] = _Weight(weight)
    return len({id(weight) for weight in found})


def drop_packed_weights(model: nn.Module | None = None) -> None:
    """Forget the packed weights of the model, or of all models, and free their memory."""
    with _lock:
        if model is None:
            weights.clear()
        else:
            for weight in model.parameters():
                weights.pop(id(weight), None)


def packed_bytes() -> int:
    """Return the bytes that packed weights hold in this process."""
    with _lock:
        return sum(entry.held[1].numel() for entry in weights.values() if entry.held is not None)


def panels_of(weight: torch.Tensor, along_k: bool) -> torch.Tensor | None:
    """Return the packed copy of a registered weight, or None.

    Args:
        along_k: weight is (k, n).
    """
    entry = weights.get(id(weight))
    if entry is None or entry.refused or entry.reference() is not weight or not _packable(weight):
        return None
    matrix = weight.detach()
    matrix = matrix.t() if along_k else matrix
    state = _state(weight, matrix)
    held = entry.held
    if held is not None and held[0] == state:
        return held[1]
    if state is None:
        return None
    with _lock:
        entry.held = None
        size = torch.ops.pytransformer_C.feed_forward_linear_panels.default(matrix)
        entry.refused = packed_bytes() + size > _max_bytes()
        if entry.refused:
            return None
        panels = cpu.pack(matrix)
        entry.held = (state, panels)
    return panels


def _state(weight: torch.Tensor, matrix: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what a packed copy depends on, or None for a weight that the kernels cannot read."""
    raw = torch.ops.pytransformer_C
    try:
        digest = raw.feed_forward_linear_digest.default(matrix)
    except RuntimeError:  # another layout, or freed storage
        return None
    return (
        weight._version,
        matrix.data_ptr(),
        matrix.shape,
        matrix.stride(),
        matrix.dtype,
        raw.cpu_isa.default(),
        digest,
    )


def _packable(weight: torch.Tensor) -> bool:
    return (
        type(weight) in (nn.Parameter, torch.Tensor)
        and weight.device.type == "cpu"
        and weight.dim() == 2
        and weight.numel() > 0
        and weight.dtype in cpu.DTYPES
        and not weight.is_inference()
        and native.why_not("feed_forward_linear_digest") is None
    )


def _max_bytes() -> int:
    return int(os.environ.get("PYTRANSFORMER_PACKED_BYTES") or DEFAULT_BYTES)


def _forget(key: int, reference: weakref.ref[torch.Tensor]) -> None:
    with _lock:
        entry = weights.get(key)
        if entry is not None and entry.reference is reference:
            del weights[key]
