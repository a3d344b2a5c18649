# SPDX-License-Identifier: Apache-2.0
"""Attention as flash-attn defines it: (B, L, H, D), aligned at the bottom right."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..ops.attention import attention
from ..ops.attention_varlen import attention_varlen
from ..ops.masks import AlibiBias

OutLse = tuple[torch.Tensor, torch.Tensor]
Visible = dict[str, torch.Tensor | None]


class Scores(NamedTuple):
    """The arguments that all functions share, in the form of :func:`lower_scores`."""

    dropout_p: float
    scale: float | None
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    slopes: torch.Tensor | None
    deterministic: bool

    @property
    def uses_distance(self) -> bool:
        """Return whether a pair's score depends on its distance, and so on the alignment."""
        return self.window is not None or self.slopes is not None

    def keywords(self) -> dict[str, Any]:
        """Return the keywords of :func:`pytransformer.attention` except the alignment."""
        bias = None if self.slopes is None else AlibiBias(self.slopes)
        return {
            "window": self.window, "softcap": self.softcap, "bias": bias, "scale": self.scale,
            "dropout_p": self.dropout_p, "deterministic": self.deterministic,
        }  # fmt: skip


def lower_scores(
    function: str, dropout_p: float, scale: float | None, causal: bool, window_size: Any,
    softcap: float,
    alibi_slopes: torch.Tensor | None, deterministic: bool,
) -> Scores:  # fmt: skip
    """Check and translate flash-attn's arguments: -1 is unbounded, and softcap 0 is off."""
    if causal not in (True, False):
        raise TypeError(
            f"{function}: causal must be a bool, got {causal!r}; True aligns at the bottom right"
        )
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2 or None in window_size:
        raise TypeError(
            f"{function}: window_size must be (left, right), got {window_size!r}; write -1 for"
            " unbounded"
        )
    left, right = (None if side < 0 else side for side in window_size)
    window = (
        None if left is None and (right is None or causal) else (left, None if causal else right)
    )
    if alibi_slopes is not None:
        if not isinstance(alibi_slopes, torch.Tensor) or alibi_slopes.dim() not in (1, 2):
            got = (
                tuple(alibi_slopes.shape)
                if isinstance(alibi_slopes, torch.Tensor)
                else type(alibi_slopes).__name__
            )
            raise TypeError(
                f"{function}: alibi_slopes must be a tensor (H,) or (B, H), got {got}; reshape it"
            )
        alibi_slopes = alibi_slopes.detach()
    cap = None if softcap == 0.0 else softcap
    return Scores(dropout_p, scale, bool(causal), window, cap, alibi_slopes, deterministic)


def attend(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    **visible: torch.Tensor | None,
) -> OutLse:
    """Attend in (B, L, H, D).

    Args:
        visible: tensors (B, ...) that :func:`pytransformer.attention` accepts by these names. k and
        v
            are pools of pages beside a ``page_table``.
    """
    slopes = scores.slopes
    if slopes is not None and slopes.dim() == 2:
        if slopes.shape[0] != q.shape[0]:
            expected, got = f"(H,) or (B, H) with B = {q.shape[0]}", tuple(slopes.shape)
            raise ValueError(f"{function}: alibi_slopes must be {expected}, got {got}; expand it")
        if len(slopes):
            return _attend_one_by_one(function, q, k, v, scores, visible)
        scores = scores._replace(slopes=None)  # no sequence
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    alignment = align(scores, q, k, visible)
    keywords: dict[str, Any] = {**alignment, **visible, **scores.keywords()}
    out, lse = attention(q, k, v, **keywords, return_lse=True)
    return out.transpose(1, 2), lse


def _attend_one_by_one(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    visible: Visible,
) -> OutLse:
    """Attend with slopes (B, H), one call per sequence: an AlibiBias has slopes (H,)."""
    parts = []
    for b, slopes in enumerate(scores.slopes if scores.slopes is not None else ()):
        one = {name: None if t is None else t[b : b + 1] for name, t in visible.items()}
        keys, values = (k, v) if one.get("page_table") is not None else (k[b : b + 1], v[b : b + 1])
        parts.append(
            attend(function, q[b : b + 1], keys, values, scores._replace(slopes=slopes), **one)
        )
    outs, lses = zip(*parts)
    return torch.cat(outs), torch.cat(lses)


def align(scores: Scores, q: torch.Tensor, k: torch.Tensor, visible: Visible) -> dict[str, Any]:
    """Return the keywords that align windows, distances and causality at the bottom right.

    pytransformer aligns a call that is not causal at the top left. A prefix of all keys undoes the
    causality of ``causal="bottom_right"`` and leaves its alignment.
    """
    if scores.causal:
        return {"causal": "bottom_right"}
    lengths = visible.get("key_lengths")
    if not scores.uses_distance or (q.shape[2] == k.shape[2] and lengths is None):
        return {}
    if lengths is None:
        lengths = torch.full((q.shape[0],), k.shape[2], device=q.device)
    return {"causal": "bottom_right", "prefix_lengths": lengths}


def attend_packed(
    function: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    offsets: tuple[torch.Tensor, torch.Tensor | None],
    longest: tuple[int, int], scores: Scores, page_table: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
) -> OutLse:  # fmt: skip
    """Attend in packed rows, (total, H, D).

    ``attention_varlen`` has no slopes per sequence, no bottom-right alignment without causality and
    no key_lengths without pages. Calls with one of them are padded to the longest sequence.

    Args:
        offsets: (B + 1,) of queries and of keys; None for keys beside key_lengths and page_table.
        key_lengths: keys in use, (B,); by default all between the offsets.
    """
    cu_q, cu_k = offsets
    same = key_lengths is None and page_table is None
    plain = scores.slopes is None or scores.slopes.dim() == 1
    aligned = scores.causal or not scores.uses_distance or (same and _equal(cu_q, cu_k))
    causal = "bottom_right" if scores.causal else None
    keywords: dict[str, Any] = {"causal": causal, **scores.keywords(), "return_lse": True}
    if same and plain and aligned:
        return attention_varlen(q, k, v, cu_q, cu_k, *longest, **keywords)
    if key_lengths is None:
        key_lengths = cu_k.diff()  # type: ignore[union-attr]
    if page_table is not None and plain and aligned:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        keywords |= {"page_table": page_table, "key_lengths": key_lengths}
        return attention_varlen(q, k, v, cu_q, None, longest[0], None, **keywords)
    if page_table is None:
        k, v = (pad_rows(t, cu_k, longest[1]) for t in (k, v))  # type: ignore[arg-type]
    out, lse = attend(
        function, pad_rows(q, cu_q, longest[0]), k, v, scores,
        query_lengths=cu_q.diff(), key_lengths=key_lengths, page_table=page_table,
    )  # fmt: skip
    total = q.shape[0]
    return unpad_rows(out, cu_q, total, 0.0), unpad_rows(lse.mT, cu_q, total, -torch.inf).T


def _equal(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    return a is b or (b is not None and a.shape == b.shape and bool((a == b).all()))


def pad_rows(x: torch.Tensor, offsets: torch.Tensor, length: int) -> torch.Tensor:
    """Return packed rows (total, H, D) as (B, length, H, D), with zeros at the padding."""
    places = torch.arange(length, device=x.device)
    index = offsets[:-1, None] + places
    index = torch.where(places < offsets.diff()[:, None], index, x.shape[0])
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))[index]


def unpad_rows(x: torch.Tensor, offsets: torch.Tensor, total: int, fill: float) -> torch.Tensor:
    """Return (B, L, ...) as packed rows (total, ...), with ``fill`` outside every sequence."""
    batch, length = x.shape[:2]
    rows = torch.arange(total, device=x.device)
    sequence = torch.searchsorted(offsets[1:].to(rows.dtype).contiguous(), rows, right=True)
    index = sequence * length + rows - offsets[sequence]
    index = torch.where(sequence < batch, index, batch * length)
    return torch.cat((x.flatten(0, 1), x.new_full((1, *x.shape[2:]), fill)))[index]
