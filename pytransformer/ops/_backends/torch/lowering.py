# SPDX-License-Identifier: Apache-2.0
"""Lowering of attention's arguments to PyTorch's kernels.

The kernels take query, key and value, at most one floating mask, and a causal flag. Our contract
reads a row without a visible key, and a key that no query sees, as zero. PyTorch's kernels multiply
them by zero, so this module zeroes them first. It never allocates an (Lq, Lk) tensor larger than
one from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import pad

from ....reference._attention import additive_terms, visible_parts
from ..._core.dispatch import NotLaunched
from ..._core.tensors import last_contiguous
from ..._problem.attention import compact

# Terms this large absorb the log of the sum in float32, and with it the gradient of a row whose
# terms are all large: PyTorch's kernels store only the total.
LOST = 2.0**100


_Masks = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # mask, dead, unseen


@dataclass(frozen=True)
class Lowered:
    """The arguments of the kernels.

    - ``dead`` (b, h, Lq): rows without a visible key, or None.
    - ``unseen`` (b, h, Lk): keys that no query sees, or None.

    b is B or 1, and h is the number of heads or 1.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool
    dead: torch.Tensor | None
    unseen: torch.Tensor | None


def why_not_lowered(a: Any) -> str | None:
    """Return why PyTorch's kernels do not support a padded problem, by its shapes, or None."""
    if a.query_start or a.key_start:
        return "needs query_start and key_start to be 0"
    dense = [compact(t) for t in (a.mask, a.bias) if t is not None]
    floating = [t for t in dense if t.dtype != torch.bool]
    num_queries, num_keys = a.query.shape[2], a.key.shape[2]
    if floating and a.query.device.type != "cpu":
        return (
            "does not support floating masks and biases on a GPU, where PyTorch rounds them to"
            " query's dtype"
        )
    if any(t.requires_grad for t in floating):
        return "gives no gradient of masks and biases"
    if any(t.shape[3] == 1 < num_keys for t in floating):
        return "does not support a mask or bias of one number for all keys"
    own, others = _part_shapes(a)
    if not any(_has_pairs(shape) for shape in (*own, *(t.shape for t in dense))):
        return None
    wanted = math.prod(torch.broadcast_shapes(*own, *others, *(t.shape for t in dense)))
    if a.causal != "none":
        wanted = max(wanted, num_queries * num_keys)
    if wanted <= max((t.numel() for t in dense), default=0):
        return None
    return "needs a mask for the pairs of queries and keys, larger than any that was given"


def _part_shapes(a: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the shapes of the terms that hide pairs, and of those that hide full rows or keys.

    Masks and biases are excluded.
    """
    batch, _, num_queries, _ = a.query.shape
    num_keys = a.key.shape[2]
    lengths = a.query_lengths is not None or a.key_lengths is not None
    causal = not (a.causal == "none" or kernels_causal(a) or sees_all(a))
    own: list[tuple[int, ...]] = []
    if causal or a.left >= 0 or a.right >= 0 or a.query_segments is not None:
        per_sequence = (
            (lengths and a.causal == "bottom_right")
            or a.prefix_lengths is not None
            or a.query_segments is not None
        )
        own.append((batch if per_sequence else 1, 1, num_queries, num_keys))
    others: list[tuple[int, ...]] = (
        [(batch, 1, num_queries, 1)] if a.query_lengths is not None else []
    )
    return own, others + ([(batch, 1, 1, num_keys)] if a.key_lengths is not None else [])


def kernels_causal(a: Any) -> bool:
    """Return true if the kernels' causal flag, aligned top left, equals the problem's causality."""
    square = (
        a.query.shape[2] == a.key.shape[2] and a.query_lengths is None and a.key_lengths is None
    )
    return a.prefix_lengths is None and (
        a.causal == "top_left" or (a.causal == "bottom_right" and square)
    )


def sees_all(a: Any) -> bool:
    """Return true if causality hides nothing, as for one query after all keys in decoding."""
    last = a.query.shape[2] == 1 and a.query_lengths is None and a.key_lengths is None
    return bool(a.causal == "bottom_right" and last)


def lower(a: Any) -> Lowered:
    """Return the kernels' arguments.

    Raises:
        NotLaunched: a row's terms are so large that PyTorch's kernels would lose the log of its
            sum.
    """
    n = SimpleNamespace(**a._asdict()) if hasattr(a, "_asdict") else a
    n.mask, n.bias = (None if t is None else compact(t) for t in (n.mask, n.bias))
    # On the CPU the lse of 16-bit inputs errs by 5e-5, because their exponential is a short
    # polynomial.
    work = torch.float32 if n.query.device.type == "cpu" and n.query.element_size() == 2 else None
    is_causal = kernels_causal(n)
    parts = [_four(p) for p in visible_parts(n, causal=not (is_causal or sees_all(n)))]
    terms = [_four(t) for t in additive_terms(n, torch.float64)]
    if any(_has_pairs(t.shape) for t in (*parts, *terms)):
        parts, is_causal = [_four(p) for p in visible_parts(n)], False
        visible = reduce(and_, parts)
        found: _Masks = _mask(n, visible, terms), ~visible.any(-1), ~visible.any(-2)
    else:
        found = _by_rows_and_keys(n, parts, terms, is_causal)
    mask, dead, unseen = found[0], _if_any(found[1]), _if_any(_of_key_heads(n, found[2]))
    query, key, value = (
        last_contiguous(t if work is None else t.to(work)) for t in (n.query, n.key, n.value)
    )
    query, key, value = (
        _read_as_zero(query, dead),
        _read_as_zero(key, unseen),
        _read_as_zero(value, unseen),
    )
    query, key, value = equal_widths(query, key, value)
    return Lowered(query, key, value, mask, is_causal, dead, unseen)


def _by_rows_and_keys(
    n: Any, parts: Sequence[torch.Tensor], terms: Sequence[torch.Tensor], is_causal: bool
) -> _Masks:
    """Return (mask, dead, unseen) in memory linear in the lengths.

    Only full rows and full keys are hidden, and pairs by causality.
    """
    device, num_queries, num_keys = n.query.device, n.query.shape[2], n.key.shape[2]
    by_row = [p for p in parts if p.shape[2] > 1]
    by_key = [p for p in parts if p.shape[2] == 1]
    rows = reduce(and_, by_row)[..., 0] if by_row else None
    keys = reduce(and_, by_key).expand(-1, -1, 1, num_keys) if by_key else None
    mask, dead, unseen = None, None, None
    if keys is not None or terms:
        keys = (
            torch.ones(1, 1, 1, num_keys, dtype=torch.bool, device=device) if keys is None else keys
        )
        mask = _mask(n, keys, terms)
        dead, unseen = ~keys.any(-1), ~keys[:, :, 0]
        if is_causal:  # query i sees keys up to i: none if the first visible key is later
            last = torch.arange(num_queries, device=device).clamp(max=num_keys - 1)
            dead = (keys[:, :, 0].cumsum(-1) == 0)[..., last]
    if rows is not None:
        dead = ~rows if dead is None else dead | ~rows
    if rows is not None or (is_causal and num_keys > num_queries):
        live = (
            torch.ones(1, 1, num_queries, dtype=torch.bool, device=device) if rows is None else rows
        )
        queries = (
            torch.arange(1, num_queries + 1, device=device)
            if is_causal
            else torch.tensor(num_keys, device=device)
        )
        past = torch.arange(num_keys, device=device) >= (live * queries).amax(-1, keepdim=True)
        unseen = past if unseen is None else unseen | past
    return mask, dead, unseen


def _mask(n: Any, visible: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mask that is added to the scores, with -inf for hidden pairs.

    On a GPU it has query's dtype and 16-byte aligned rows.
    """
    work = torch.float64 if n.query.dtype == torch.float64 else torch.float32
    if terms:
        total = torch.where(visible, reduce(torch.add, terms), -math.inf)
        top = total.amax(-1)
        if bool(((top.abs() >= LOST) | top.isnan()).logical_and(visible.any(-1)).any()):
            raise NotLaunched(
                f"the terms added to the scores of a row are all beyond {LOST:.0e}, where PyTorch's"
                " gradient is wrong"
            )
        return total.to(work)
    if n.query.device.type == "cpu":
        return torch.zeros(visible.shape, dtype=work).masked_fill_(~visible, -math.inf)
    batch, heads, num_queries, _ = n.query.shape
    *lead, num_keys = visible.shape
    mask = torch.zeros(*lead, -(-num_keys // 16) * 16, dtype=n.query.dtype, device=n.query.device)[
        ..., :num_keys
    ]
    return mask.masked_fill_(~visible, -math.inf).expand(batch, heads, num_queries, num_keys)


def _has_pairs(shape: Sequence[int]) -> bool:
    return shape[-2] > 1 and shape[-1] > 1


def _four(t: torch.Tensor) -> torch.Tensor:
    return t[(None,) * (4 - t.dim())]


def _of_key_heads(n: Any, unseen: torch.Tensor | None) -> torch.Tensor | None:
    """Return, per key head, the keys that no query head of its group sees."""
    heads = n.key.shape[1]
    if unseen is None or unseen.shape[1] in (1, heads):
        return unseen
    return unseen.unflatten(1, (heads, -1)).all(2)


def _if_any(rows: torch.Tensor | None) -> torch.Tensor | None:
    """Return None if no row is set; on a GPU return ``rows`` unchecked, without waiting."""
    return None if rows is None or (rows.device.type == "cpu" and not rows.any()) else rows


def _read_as_zero(t: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return t if rows is None else t.masked_fill(rows[..., None], 0.0)


def equal_widths(*tensors: torch.Tensor, more: int = 0) -> list[torch.Tensor]:
    """Return all tensors padded with zeros to the maximum width plus ``more`` columns."""
    width = max(t.shape[3] for t in tensors) + more
    return [t if t.shape[3] == width else pad(t, (0, width - t.shape[3])) for t in tensors]
