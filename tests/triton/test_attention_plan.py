# SPDX-License-Identifier: Apache-2.0
"""The plan of a call: compiled variants per mask, memory between launches, and explain's report."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.kernels import _lang
from pytransformer.kernels.attention.configs import plan_backward, plan_forward
from pytransformer.ops.attention import attention_op
from support.attention_check import check_attention

B, H, LK = 2, 4, 300
KEYS = torch.arange(LK) % 7 != 2
BY_HEAD = torch.arange(LK) % 7 > torch.arange(H)[:, None, None]
# name -> (mask for this many queries, if prefill and backward read it once per key, and if decode
# does)
MASKS = {
    "keys": (lambda n: KEYS, True, True),
    "expanded": (lambda n: KEYS.expand(B, H, n, LK), True, True),
    "heads": (lambda n: BY_HEAD, True, False),
    "heads, expanded": (lambda n: BY_HEAD.expand(B, H, n, LK), True, False),
    "queries": (lambda n: torch.arange(n)[:, None] >= torch.arange(LK) - 250, False, False),
    "floating": (lambda n: torch.where(KEYS, 0.0, -torch.inf).expand(B, H, n, LK), False, False),
}


def _inputs(num_queries: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, h, n, 16) for h, n in ((H, num_queries), (H // 2, LK), (H // 2, LK))]


def _problem(num_queries: int, **kwargs: Any) -> Any:
    return attention_op.prepare(*_inputs(num_queries), **kwargs)[0]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("num_queries", [2, 40])
def test_masks_shared_by_all_queries_are_read_once_per_key(name: str, num_queries: int) -> None:
    make, by_key, decoded = MASKS[name]
    a = _problem(num_queries, attn_mask=make(num_queries))
    plan = plan_forward(a)
    assert [step.kind.KEY_MASK for step in (plan.prefill, plan.decode) if step] == [
        decoded if num_queries == 2 else by_key
    ]
    assert all(by_key == step.kind.KEY_MASK for step in plan_backward(a, ())[:2])
    check_attention(tuple(_inputs(num_queries)), {"attn_mask": make(num_queries)}, "triton")


def test_plan_memory_equals_the_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    a, allocated = _problem(2), []
    plan, empty = plan_forward(a), torch.empty

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        allocated.append(t := empty(*args, **kwargs))
        return t

    with monkeypatch.context() as patch, _lang.observed(lambda *_: None):
        patch.setattr(torch, "empty", counted)
        attention_op.backends["triton"].forward(a)
    assert plan.bytes > 0 and sum(4 * t.numel() for t in allocated if t.dim() == 2) == plan.bytes
    assert plan_forward(_problem(40)).bytes == 0


def test_explain_reports_the_plan() -> None:
    output = str(pt.explain("attention", *_inputs(2), backend="triton"))
    assert "triton: decoded, their keys split over 3" in output
    output = str(pt.explain("attention", *_inputs(40), backend="triton"))
    assert (
        "triton: forward by tiles of 32 queries and 64 keys" in output and "decoded" not in output
    )
    lengths = torch.tensor([40, 1])
    assert "; sequences of at most 32 rows decoded" in str(
        pt.explain("attention", *_inputs(40), query_lengths=lengths, backend="triton")
    )
