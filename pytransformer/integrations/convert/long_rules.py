# SPDX-License-Identifier: Apache-2.0
"""Block-mask attention for the long-document models Longformer, LED, BigBird and BigBird-Pegasus.

*Longformer and LED* have two attentions, which become two calls. Queries of local tokens see a
window and the keys of global tokens. Queries of global tokens have separate projections and see all
keys. Masked queries give 0, as in eager code.

*BigBird* sees a window of three blocks, the first and the last block, and random blocks. Its eager
code counts a key that is drawn twice twice in the softmax. In eval mode it draws block 0 for every
row, even if the row already sees it. This module appends copies of such keys, and the block mask
shows each copy to the rows that count it.

Calls that request attention weights run eager code, because transformers' layouts differ.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from ...nn.patterns import Pattern
from ...ops._block_lists import band, counts, evaluate
from ...ops._problem.blocks import SIZES
from ...ops.attention import attention
from ...ops.block_mask import BlockMask
from ...ops.options import MaskAndBias
from .hugging_face_rules import _rule, weights_wanted
from .modules import droppable, probability
from .rules import Converted, Rule, find_rule, update_cache

BLOCK = 64  # of Longformer's masks, whose windows are not aligned to blocks


def _split(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return (B, H, L, D) from (B, L, H D)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def _merge(x: torch.Tensor) -> torch.Tensor:
    """Return (B, L, H D) from (B, H, L, D)."""
    return x.transpose(1, 2).flatten(2)


def _hidden(queries: torch.Tensor, keys: torch.Tensor) -> MaskAndBias:
    """Return segments that hide the queries (B, Lq) bool and the keys (B, Lk) bool; {} if none."""
    if queries.device.type == "cpu" and not bool(queries.any()) and not bool(keys.any()):
        return {}
    return {"query_segments": queries.to(torch.int32) * 2, "key_segments": keys.to(torch.int32)}


class WindowAndGlobal:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        is_index_masked: Any = None,
        is_index_global_attn: Any = None,
        is_global_attn: Any = None,
        output_attentions: bool = False,
    ) -> Any:
        if output_attentions:
            return NotImplemented
        half = self.one_sided_attn_window_size
        p = self.dropout if self.training else 0.0
        query, key, value = (
            _split(f(hidden_states), self.head_dim) for f in (self.query, self.key, self.value)
        )
        seen: MaskAndBias = {"window": (half, half), "scale": self.head_dim**-0.5}
        if is_global_attn:
            pattern = _window_and_columns(half, _columns(is_index_global_attn))
            seen["window"], seen["attn_mask"] = (
                None,
                pattern(hidden_states.shape[1], hidden_states.device),
            )
        seen |= _hidden(is_index_masked, is_index_masked)
        out = _merge(attention(query, key, value, dropout_p=p, **seen))
        if is_global_attn:
            out = _with_global_rows(
                self, out, hidden_states, is_index_global_attn, ~is_index_masked, p
            )
        return (out,)


def _columns(is_global: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the positions of each sequence's global tokens; one tuple if all are equal."""
    found = [tuple(row.nonzero().flatten().tolist()) for row in is_global.cpu()]
    return tuple(found if len(set(found)) > 1 else found[:1])


@functools.lru_cache(maxsize=32)
def _window_and_columns(half: int, columns: tuple[tuple[int, ...], ...]) -> Pattern:
    """Return the pattern ``|i - j| <= half``, or j is a global column, per sequence."""

    def make(length: int, device: torch.device) -> BlockMask:
        sizes, shape = (BLOCK, BLOCK), (len(columns), 1, length, length)
        is_column = torch.zeros(len(columns), length, dtype=torch.bool, device=device)
        for row, places in zip(is_column, columns):
            row[torch.tensor(places, dtype=torch.long, device=device)] = True
        down, across = counts(length, length, sizes)
        window = band(length, half, half, sizes, device)
        rows = torch.arange(down, device=device)[:, None] * across
        blocks = [
            torch.cat([window, (rows + row.nonzero().flatten() // BLOCK).flatten()]).unique()
            + b * down * across
            for b, row in enumerate(is_column)
        ]
        mod = lambda b, h, i, j: ((i - j).abs() <= half) | is_column[b, j]
        return BlockMask(
            shape, evaluate(mod, shape, sizes, device, torch.cat(blocks), vectorized=True)
        )

    return Pattern(make)


def _with_global_rows(
    m: Any,
    out: torch.Tensor,
    hidden: torch.Tensor,
    is_global: torch.Tensor,
    keep: torch.Tensor,
    p: float,
) -> torch.Tensor:
    """Return ``out``, (B, L, H D), with the global tokens' rows from their projections."""
    many = is_global.sum(1)
    slots = torch.arange(int(many.max()), device=hidden.device) < many[:, None]
    picked = hidden.new_zeros(*slots.shape, hidden.shape[-1])
    picked[slots] = hidden[is_global]
    query, key, value = (
        _split(f(x), m.head_dim)
        for f, x in ((m.query_global, picked), (m.key_global, hidden), (m.value_global, hidden))
    )
    found = attention(
        query,
        key,
        value,
        scale=m.head_dim**-0.5,
        dropout_p=p,
        attn_mask=keep[:, None, None, :],
        query_lengths=many,
    )
    return out.masked_scatter(is_global[..., None], _merge(found)[slots].to(out.dtype))


_rule(
    Rule("attention", "attention by a block mask, and of the global rows", WindowAndGlobal,
        digests=("5a7ffc6af498", "0afe43567d0f"), by_probe=False),
    longformer="LongformerSelfAttention", led="LEDEncoderSelfAttention",
)  # fmt: skip


_PLANS: weakref.WeakKeyDictionary[Any, dict[tuple[int, bool], tuple[Pattern, list[int]]]] = (
    weakref.WeakKeyDictionary()
)
_LENGTHS = 8  # maximum number of cached plans per module


class BlockSparse:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        band_mask: Any = None,
        from_mask: Any = None,
        to_mask: Any = None,
        from_blocked_mask: Any = None,
        to_blocked_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        length, size = hidden_states.shape[1], self.block_size
        if length % size or weights_wanted(kwargs):
            return NotImplemented
        pattern, again = plan(self, length)

        def repeated(t: torch.Tensor, dim: int) -> torch.Tensor:
            return (
                torch.cat([t, *(t.narrow(dim, size * block, size) for block in again)], dim)
                if again
                else t
            )

        query, key, value = (
            _split(f(hidden_states), self.attention_head_size)
            for f in (self.query, self.key, self.value)
        )
        seen = _hidden(from_mask[:, 0, :, 0] == 0, repeated(to_mask[:, 0, 0] == 0, 1))
        seen["attn_mask"] = pattern(length, hidden_states.device)
        return _merge(attention(query, repeated(key, 2), repeated(value, 2), **seen)), None


def plan(m: Any, length: int) -> tuple[Pattern, list[int]]:
    """Return the mask of L queries and L + copied keys, and the copied key blocks in order."""
    kept = _PLANS.setdefault(m, {})
    found = kept.get((length, m.training))
    if found is None:
        many = times_counted(m, length)
        most = many.amax((0, 1))  # per key block
        again = [(block, n) for block in range(len(most)) for n in range(2, int(most[block]) + 1)]
        copies = [many[..., block] >= n for block, n in again]
        seen = torch.stack([*(many >= 1).unbind(-1), *copies], -1)
        if len(kept) >= _LENGTHS:
            kept.clear()
        found = kept[length, m.training] = (
            _pattern_of_blocks(seen, m.block_size),
            [block for block, _ in again],
        )
    return found


def times_counted(m: Any, length: int) -> torch.Tensor:
    """Return how often eager code counts each key block in the softmax.

    The result is int (H or 1, query blocks, key blocks).
    """
    n = length // m.block_size
    q, k = torch.arange(n)[:, None], torch.arange(n)
    always = ((q - k).abs() <= 1) | (q == 0) | (k == 0) | (q == n - 1) | (k == n - 1)
    # [H, n - 2, blocks drawn], without the first and last row.
    drawn = torch.from_numpy(_drawn(m, length)).long()
    if (drawn == drawn[:1]).all():
        drawn = drawn[:1]
    many = always.long().repeat(drawn.shape[0], 1, 1)
    many[:, 1:-1].scatter_add_(2, drawn, torch.ones_like(drawn))
    return many


def _drawn(m: Any, length: int) -> Any:
    """Return the random blocks that eager code draws; numpy's RNG state is restored."""
    import numpy

    size, blocks, heads = m.block_size, m.num_random_blocks, m.num_attention_heads
    before = numpy.random.get_state()
    if m.training:
        numpy.random.seed(m.seed)
    try:
        if length in (1024, 3072, 4096):
            rows = [
                m._bigbird_block_rand_mask(
                    m.max_seqlen, m.max_seqlen, size, size, blocks, last_idx=1024
                )[: length // size - 2]
                for _ in range(heads)
            ]
        else:
            ends, many = m._get_rand_attn_plan(length, size, blocks)
            rows = m._bigbird_block_rand_mask_with_head(
                from_seq_length=length, to_seq_length=length, from_block_size=size,
                to_block_size=size, num_heads=heads,
                plan_from_length=ends, plan_num_rand_blocks=many,
            )  # fmt: skip
    finally:
        numpy.random.set_state(before)
    return numpy.stack(rows)


def _pattern_of_blocks(seen: torch.Tensor, size: int) -> Pattern:
    """Return the pattern of bool (H, query blocks, key blocks) with blocks of any size."""

    def make(length: int, device: torch.device) -> BlockMask:
        table = seen.to(device)
        shape = (1, table.shape[0], size * table.shape[1], size * table.shape[2])
        whole = size in SIZES
        blocks = table.flatten().nonzero().flatten() if whole else None
        mod = lambda b, h, i, j: table[h, i // size, j // size]
        sizes = (size, size) if whole else (BLOCK, BLOCK)
        return BlockMask(shape, evaluate(mod, shape, sizes, device, blocks, vectorized=True))

    return Pattern(make)


class Full:
    """BigBird's ``original_full`` attention: causal by the mask, cached, or cross."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        if weights_wanted(kwargs):
            return NotImplemented
        cross, cache = encoder_hidden_states is not None, past_key_values
        if cross and cache is not None and cache.get_seq_length(self.layer_idx) > 0:
            key, value = cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
        else:
            source = encoder_hidden_states if cross else hidden_states
            key, value = (
                _split(f(source), self.attention_head_size) for f in (self.key, self.value)
            )
            if cache is not None:
                key, value = update_cache(self, self.layer_idx, cache, key, value, kwargs)
        query = _split(self.query(hidden_states), self.attention_head_size)
        # A Mask if the model uses our attention interface, else additive.
        mask = encoder_attention_mask if cross else attention_mask
        out, _ = _on_the_interface()(
            self, query, key, value, mask, dropout=probability(self.dropout, self.training)
        )
        return out.flatten(2), None


def _on_the_interface() -> Any:
    from ..hugging_face import attention_forward

    return attention_forward


class KeepsOurs:
    """Conversion across a change of the attention type, for which models create a new module."""

    def set_attention_type(self: Any, value: str, *args: Any, **kwargs: Any) -> None:
        was_ours = isinstance(self.self, Converted)
        super().set_attention_type(value, *args, **kwargs)  # type: ignore[misc]
        rule = find_rule(type(self.self))
        if was_ours and rule is not None and rule.why_not(self.self) is None:
            self.self.__class__ = rule.subclass(type(self.self))


_rule(
    Rule(
        "attention", "attention by a block mask", BlockSparse,
        digests=("be55e5acbb91", "5e31e63b4e9e"), by_probe=False,
    ),
    big_bird="BigBirdBlockSparseAttention", bigbird_pegasus="BigBirdPegasusBlockSparseAttention",
)  # fmt: skip
_rule(
    Rule(
        "attention", "attention", Full, lambda m: droppable(m.dropout), ("102cefeb6c2c",),
        by_probe=False,
    ),
    big_bird="BigBirdSelfAttention", bigbird_pegasus="BigBirdPegasusSelfAttention",
)  # fmt: skip
_rule(
    Rule(
        "attention", "ours when its type changes", KeepsOurs,
        digests=("082128cca62d", "3deb8888fe3a"), method="set_attention_type", by_probe=False
    ),
    big_bird="BigBirdAttention", bigbird_pegasus="BigBirdPegasusEncoderAttention",
)  # fmt: skip


class DecoderAttention:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        past_key_values: Any = None,
        attention_mask: Any = None,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        if output_attentions:
            return NotImplemented
        cross, cache, layer = key_value_states is not None, past_key_values, self.layer_idx
        updated = getattr(cache, "is_updated", None)  # only a cache with two parts has it
        if updated is not None:
            cache = cache.cross_attention_cache if cross else cache.self_attention_cache
        if cross and updated is not None and updated.get(layer):
            key, value = cache.layers[layer].keys, cache.layers[layer].values
        else:
            source = key_value_states if cross else hidden_states
            key, value = (_split(f(source), self.head_dim) for f in (self.k_proj, self.v_proj))
            if cache is not None:
                key, value = update_cache(self, self.layer_idx, cache, key, value, kwargs)
                if cross and updated is not None:
                    updated[layer] = True
        out = attention(
            _split(self.q_proj(hidden_states), self.head_dim), key, value, scale=self.scaling,
            attn_mask=attention_mask,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.out_proj(_merge(out)), None, past_key_values


_rule(
    Rule("attention", "attention", DecoderAttention, digests=("9a629bc60b41",), by_probe=False),
    led="LEDDecoderAttention",
)
