# SPDX-License-Identifier: Apache-2.0
"""Wrong rotary positions and caches; see `faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import faults
from .faults import (
    FAITHFUL,
    Fault,
    Outputs,
    as_contiguous,
    different_every_time,
    outputs,
    replacing,
    value_of,
)

Forward = Callable[[Any], Outputs]


def _rest_of_the_head_lost(a: Any, forward: Forward) -> Outputs:
    out, *rest = forward(a)
    turned = out.shape[-1] if a.cos is None else a.cos.shape[-1]
    return torch.cat((out[..., :turned], 0 * out[..., turned:]), -1), *rest


def _norm_after_the_turning(a: Any, forward: Forward) -> Outputs:
    if getattr(a, "weight", None) is None:
        return forward(a)
    turned = forward(a._replace(weight=None))[0]
    return forward(a._replace(x=turned, cos=torch.ones_like(a.cos), sin=torch.zeros_like(a.sin)))


def _norm_of_turned_columns_alone(a: Any, forward: Forward) -> Outputs:
    if getattr(a, "weight", None) is None or a.cos.shape[-1] == a.x.shape[-1]:
        return forward(a)
    out, rstd = forward(a)
    wrong = (a.x[..., : a.cos.shape[-1]].to(rstd.dtype).square().mean(-1) + a.eps).rsqrt() / rstd
    return (out * wrong[..., None]).to(out.dtype), rstd


def _backward_turns_forward(a: Any, forward: Forward) -> Outputs:
    out, *rest = forward(a)
    return out if hasattr(a, "key_cache") else value_of(
        out, forward(a._replace(sin=-a.sin))[0]
    ), *rest


def _norm_taken_for_a_constant(a: Any, forward: Forward) -> Outputs:
    out, *rest = forward(a)
    if getattr(a, "weight", None) is None:
        return out, *rest
    work = rest[0].dtype
    y = a.x.to(work) * rest[0].detach()[..., None] * (a.weight.to(work) + a.weight_offset)
    return value_of(out, forward(a._replace(x=y, weight=None))[0].to(out.dtype)), *rest


def _of_keys(**change: Callable[[Any], Any]) -> Fault:
    """Return a fault in the cached rows only, not in the query."""

    def fault(a: Any, forward: Forward) -> Outputs:
        if not hasattr(a, "key_cache"):
            return forward(a)
        found = forward(
            a._replace(key_cache=a.key_cache.clone(), value_cache=a.value_cache.clone())
        )
        forward(a._replace(**{n: f(a) for n, f in change.items() if getattr(a, n) is not None}))
        return found

    return fault


def _halves_alike(t: Tensor) -> Tensor:
    half = t.shape[-1] // 2
    return torch.cat((t[..., :half], t[..., :half]), -1)


FAULTS: dict[str, Fault] = {
    "faithful": FAITHFUL,
    "scale_off_by_0.4_percent": outputs(lambda y: y * 1.004),
    "turned_the_other_way": replacing(sin=lambda a: -a.sin),
    "the_other_layout": replacing(interleaved=lambda a: not a.interleaved),
    "one_position_late": replacing(cos=lambda a: a.cos.roll(1, 1), sin=lambda a: a.sin.roll(1, 1)),
    "first_sequence_for_all": replacing(
        cos=lambda a: a.cos[:1].expand_as(a.cos), sin=lambda a: a.sin[:1].expand_as(a.sin)
    ),
    "halves_of_tables_alike": replacing(
        cos=lambda a: _halves_alike(a.cos), sin=lambda a: _halves_alike(a.sin)
    ),
    "tables_rounded_to_half": replacing(
        cos=lambda a: a.cos.half().to(a.cos.dtype), sin=lambda a: a.sin.half().to(a.sin.dtype)
    ),
    "rest_of_the_head_lost": _rest_of_the_head_lost,
    "norm_after_the_turning": _norm_after_the_turning,
    "norm_of_turned_columns_alone": _norm_of_turned_columns_alone,
    "eps_ignored": replacing(eps=lambda a: 0.0),
    "weight_ignored": replacing(weight=lambda a: value_of(torch.ones_like(a.weight), a.weight)),
    "weight_offset_ignored": replacing(weight_offset=lambda a: 0.0),
    "weight_gradient_dropped": replacing(weight=lambda a: a.weight.detach()),
    "backward_turns_forward": _backward_turns_forward,
    "norm_taken_for_a_constant": _norm_taken_for_a_constant,
    "x_read_as_contiguous": replacing(x=lambda a: value_of(as_contiguous(a.x), a.x)),
    "keys_one_slot_late": _of_keys(
        positions=lambda a: torch.where(a.positions < 0, a.positions, a.positions + 1)
    ),
    "padding_written": _of_keys(positions=lambda a: a.positions.clamp(min=0)),
    "page_table_ignored": _of_keys(
        page_table=lambda a: torch.arange(a.page_table.numel()).view(a.page_table.shape)
    ),
    "keys_not_turned": _of_keys(
        cos=lambda a: torch.ones_like(a.cos), sin=lambda a: torch.zeros_like(a.sin)
    ),
    "norm_of_queries_for_keys": _of_keys(k_norm=lambda a: a.q_norm),
    "different_every_time": different_every_time,
}
BACKWARD_FAULTS = {n: f for n, f in faults.BACKWARD_FAULTS.items() if "dropout" not in n}
