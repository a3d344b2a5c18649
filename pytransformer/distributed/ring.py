# SPDX-License-Identifier: Apache-2.0
"""Ring attention: the sequence is split over the ranks of a group, and keys and values rotate.

Every rank keeps its queries and computes with its current keys while it receives the next. Memory
per rank is 1/n, and no rank holds all keys. See docs/distributed.md for bytes and FLOPs,
:mod:`.plan`
for the messages, :mod:`.tile` for the arithmetic.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023);
the zigzag order is that of Brandon et al., "Striped Attention" (2023) by chunks, as in
zhuzilin/ring-flash-attention.
"""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from ..ops.options import AttentionOptions
from .call import PLACES, RingCall, prepare
from .exchange import Exchange, Payload
from .gradients import Gradients
from .group import outside_graphs
from .layout import Layout
from .plan import Message
from .sinks import add_sinks, lse_of_queries, sinks_gradient
from .tile import Grads, Lse, Merged, tile_backward, tile_forward


@overload
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "zigzag",
    sum_gradients: bool = True,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...
@overload
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "zigzag",
    sum_gradients: bool = True,
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@outside_graphs
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "zigzag",
    sum_gradients: bool = True,
    return_lse: bool = False,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`pytransformer.attention` of a sequence split over the ranks of ``group``.

    Each rank calls with its rows. The result equals one process's within the error bound, with the
    same dropout mask. Every rank must call forward and backward.

    Args:
        query: (B, Hq, Lq / n, D), this rank's rows of the sequence; see :func:`shard_sequence`.
        key, value: (B, Hkv, Lk / n, D), (B, Hkv, Lk / n, Dv), this rank's rows.
        group: the n ranks that share the sequence; None means the default group.
        layout: the rows of a rank: ``"zigzag"`` (chunks r and 2n - 1 - r of 2n, which balances
            causal work) or ``"contiguous"``.
        sum_gradients: sum the gradients of replicated arguments (slopes, table, sinks; a mask or
            bias with query dimension 1) over the group. False returns this rank's share, for
            callers that sum all parameters' gradients.
        return_lse: also return (B, Hq, Lq / n), float32, differentiable.
        options: options of attention for the full sequence. Lengths and prefixes count from its
            start. A dense ``attn_mask`` or ``bias`` has this rank's queries and all Lk keys, in
            sequence order, broadcastable to (B, Hq, Lq / n, Lk). A block mask covers the full
            sequence and is the same on every rank. Segments are (B, L / n), split like query and
            key. If ``dropout_seed`` is None, the first rank draws it.

    Returns:
        (B, Hq, Lq / n, Dv) in query's dtype and memory order; with return_lse a pair.

    Raises:
        TypeError, ValueError: an invalid argument, group or length. On the CPU, and everywhere with
            PYTRANSFORMER_CHECK=1, also if the ranks' arguments differ.
    """
    call, tensors = prepare(query, key, value, group, layout, sum_gradients, options)
    out, lse = _Ring.apply(call, *tensors)
    return (out, lse) if return_lse else out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: RingCall, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        call = call.with_tensors(tensors)
        out, lse = ring_forward(call)
        ctx.call = call.with_tensors([None] * len(tensors))
        ctx.save_for_backward(*tensors, out, lse.shift, lse.rest)
        ctx.set_materialize_grads(False)
        return out, lse_of_queries(lse, call.a.sinks, call.queries_within)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        *tensors, out, shift, rest = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1 : 1 + len(PLACES)]
        grads = ring_backward(
            ctx.call.with_tensors(tensors), out, Lse(shift, rest), (d_out, d_lse), wanted
        )
        return (None, *grads, *(None for _ in tensors[len(PLACES) :]))


def ring_forward(call: RingCall) -> tuple[torch.Tensor, Lse]:
    """Return out, in query's dtype and order, and the lse of rows that see a key."""
    plan, rank = call.plan, call.rank
    merged = Merged(call.a.query, call.a.value.shape[3])
    held: dict[Message, Payload] = {}
    for step in range(plan.ranks):
        exchange = Exchange(call.group, rank)
        arriving = _pass_keys(call, exchange, step, held)
        exchange.post()
        for i, j in plan.tiles(rank, step):
            out, lse = tile_forward(
                call.tile(i, j, step, _keys_at(call, held, j)), call.backend, call.strict
            )
            merged.add(out, lse, *call.rows(i))
        exchange.wait()
        held = arriving
    if call.a.sinks is not None:
        add_sinks(merged, call.a.sinks)
    return call.empty_out().copy_(merged.out), merged.lse


def ring_backward(
    call: RingCall,
    out: torch.Tensor,
    lse: Lse,
    grads: Grads,
    wanted: tuple[bool, ...],
) -> list[torch.Tensor | None]:
    """Return the gradients of PLACES.

    Keys rotate again; the gradients of a chunk follow one step behind and return to its owner.
    """
    plan, rank = call.plan, call.rank
    total = Gradients(call, wanted)
    held: dict[Message, Payload] = {}
    for step in range(plan.ranks + 1):
        exchange = Exchange(call.group, rank)
        arriving = _pass_keys(call, exchange, step, held)
        coming = total.pass_on(exchange, step - 1)
        exchange.post()
        for i, j in plan.tiles(rank, step):
            tile = call.tile(i, j, step, _keys_at(call, held, j))
            first, last = call.rows(i)
            of_rows = tuple(None if g is None else g[:, :, first:last] for g in grads)
            found = tile_backward(
                tile,
                out[:, :, first:last],
                lse.rows(first, last),
                of_rows,
                total.wanted_of_tiles,
                call.backend,
                call.strict,
            )
            total.add(i, j, step, found)
        exchange.wait()
        total.receive(coming)
        held = arriving
    if total.wanted[PLACES.index("sinks")]:
        total.of["sinks"] = sinks_gradient(call.a.sinks, lse, out, grads, call.queries_within)
    return total.finished()


def _pass_keys(
    call: RingCall, exchange: Exchange, step: int, held: dict[Message, Payload]
) -> dict[Message, Payload]:
    """Send the next step's keys during a step, and return the receive buffers."""

    def sent(m: Message) -> Payload:
        return (
            call.own_keys(m.chunk, to_send=True)
            if m.owner == call.rank
            else _keys_at(call, held, m.chunk)
        )

    return exchange.add(call.plan.key_messages(step + 1), sent, lambda m: call.empty_keys(m.chunk))


def _keys_at(call: RingCall, held: dict[Message, Payload], chunk: int) -> Payload:
    """Return a chunk received for this step, or this rank's local one in the first step."""
    return next(
        (payload for m, payload in held.items() if m.chunk == chunk), None
    ) or call.own_keys(chunk)
