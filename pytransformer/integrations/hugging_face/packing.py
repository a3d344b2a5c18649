# SPDX-License-Identifier: Apache-2.0
"""Packed batches: several sequences per row, by restarting ``position_ids`` or offsets.

Offsets are the keywords ``cu_seq_lens_*``.

transformers turns restarting ``position_ids`` into a mask function that compares the sequence
number of query and key. :func:`unpack_mask_function` reads the numbers back, so no (L, L) mask is
built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils as masking

KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _cells(function: Any) -> dict[str, Any]:
    """Return the closure variables of a function, by name."""
    code = getattr(function, "__code__", None)
    closure = getattr(function, "__closure__", None)
    return (
        {}
        if code is None or not closure
        else dict(zip(code.co_freevars, (c.cell_contents for c in closure)))
    )


def _codes() -> tuple[Any, Any, Any]:
    """Return the code objects of ``and_masks``, the packed mask and the position map, or Nones.

    transformers before 5.23 has no position map; its packed mask compares indices.
    """
    numbers, positions = torch.tensor([[0, 0, 1]]), torch.tensor([[0, 1, 0]])
    packed = masking.packed_sequence_mask_function(numbers)
    both = masking.and_masks(packed, masking.causal_mask_function)
    remap = getattr(masking, "remap_positions_for_packed_sequence", None)
    mapped = None if remap is None else remap(masking.causal_mask_function, positions)
    known = [[type(v) for v in _cells(f).values()] for f in (packed, both)] == [
        [torch.Tensor],
        [tuple],
    ]
    first, q, k = torch.tensor(0), torch.arange(3)[:, None], torch.arange(3)[None]
    expected = (numbers[0, q] == numbers[0, k]) & (k <= q)
    if not known or not torch.equal(both(first, first, q, k), expected):
        return None, None, None
    if mapped is not None and not torch.equal(
        mapped(first, first, q, k), positions[0, k] <= positions[0, q]
    ):
        mapped = None
    return both.__code__, packed.__code__, getattr(mapped, "__code__", None)


_BOTH, _PACKED, _MAPPED = _codes()


def unpack_mask_function(
    function: Callable[..., Any],
) -> tuple[Callable[..., Any], torch.Tensor | None]:
    """Split a mask function of a packed batch into the function per sequence and sequence numbers.

    Within a sequence, positions and indices differ by a constant, because transformers starts a new
    sequence if positions do not grow by one. There a mask by position equals the mask by index.

    Returns:
        The function and (B, L) integers; the argument and None if the batch is not packed.
    """
    if (
        torch.compiler.is_compiling()
        or _BOTH is None
        or getattr(function, "__code__", None) is not _BOTH
    ):
        return function, None
    (parts,) = _cells(function).values()
    packed = [part for part in parts if getattr(part, "__code__", None) is _PACKED]
    others = [part for part in parts if getattr(part, "__code__", None) is not _PACKED]
    if len(packed) != 1 or len(others) != 1:
        return function, None
    (numbers,), inner = _cells(packed[0]).values(), others[0]
    if _MAPPED is not None and getattr(inner, "__code__", None) is _MAPPED:
        inner = _cells(inner)["mask_function"]
    return inner, numbers


def sequence_bounds(numbers: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the (sequences + 1,) offsets of the flattened batch and the longest sequence."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    end = torch.tensor([numbers.numel()], device=numbers.device)
    offsets = torch.cat((starts.flatten().nonzero()[:, 0], end)).to(torch.int32)
    return offsets, int(offsets.diff().max())


def given_bounds(
    name: str, kwargs: dict[str, Any], batch: int, q_length: int, k_length: int
) -> tuple[torch.Tensor, int] | None:
    """Return offsets and longest sequence by the ``cu_seq_lens_*`` of a batch, or None.

    Raises:
        ValueError: they do not describe self-attention of all tokens.
    """
    offsets = kwargs.get("cu_seq_lens_q")
    others = kwargs.get("cu_seq_lens_k")
    if offsets is None and others is None:
        return None
    if offsets is None or others is None or not (offsets is others or torch.equal(offsets, others)):
        raise ValueError(
            f"pytransformer: {name} must get equal cu_seq_lens_q and cu_seq_lens_k; pass both"
        )
    total = int(offsets[-1])
    if q_length != k_length or total != batch * q_length:
        raise ValueError(
            f"pytransformer: cu_seq_lens_q must end at the number of tokens, got {total} for"
            f" {batch} x {q_length} queries and {k_length} keys in {name}; pack without padding and"
            " without a cache"
        )
    return offsets.to(torch.int32), int(offsets.diff().max())


def numbers_of(offsets: torch.Tensor, batch: int) -> torch.Tensor:
    """Return the (batch, L) sequence numbers of offsets over the flattened batch."""
    index = torch.arange(int(offsets[-1]), device=offsets.device)
    return torch.searchsorted(offsets[1:].contiguous(), index, right=True, out_int32=True).view(
        batch, -1
    )
