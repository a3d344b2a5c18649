# SPDX-License-Identifier: Apache-2.0
"""Ring attention of one rank with several sequence chunks: a backend's tiles, one process."""

from __future__ import annotations

from typing import Any

import torch

from pytransformer.distributed.call import RingCall
from pytransformer.distributed.plan import Pattern, RingPlan
from pytransformer.distributed.ring import ring_backward, ring_forward
from pytransformer.ops.attention import attention_op
from pytransformer.ops.masks import RelativePositionBias
from pytransformer.testing import bounds, oracle

from .split_attention import within

NAMES = ("query", "key", "value", "attn_mask", "bias", "slopes", "table", "sinks")
CHUNKS = (range(9), range(9, 40))


def _keywords(kind: str, length: int) -> dict[str, Any]:
    by_kind: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": "top_left", "dropout_p": 0.3, "dropout_seed": 5},
    }
    by_kind["causal"] |= {
        "bias": RelativePositionBias(torch.randn(8, 2), False, 20),
        "window": (20, None),
    }
    by_kind["mask"] = {
        "attn_mask": torch.randn(2, 1, length, length),
        "key_lengths": torch.tensor([length, 25]),
        "softcap": 5.0,
    }
    lowest = torch.zeros(1, 1, length, length)
    lowest[..., 5::3, :] = torch.finfo(torch.float32).min
    by_kind["extreme"] = {
        "attn_mask": lowest,
        "causal": "top_left",
        "bias": RelativePositionBias(torch.randn(8, 2), False, 20),
    }
    return by_kind[kind]


def check_tiles(kind: str, backend: str, dtype: torch.dtype) -> None:
    """Assert that the merged and differentiated tiles of CHUNKS equal the full attention."""
    length = CHUNKS[-1].stop
    query, key, value, grad_out = (
        torch.randn(2, heads, length, 16).to(dtype) for heads in (2, 1, 1, 2)
    )
    keywords = _keywords(kind, length)
    a, _, _ = attention_op.prepare(query, key, value, **keywords)
    pattern = Pattern(a.causal != "none", a.left, a.right)
    call = RingCall(a, RingPlan(pattern, (CHUNKS,), (CHUNKS,)), None, 0, backend, True, True)
    out, lse = ring_forward(call)
    wanted = tuple(t is not None and t.is_floating_point() for t in a[: len(NAMES)])
    grads = ring_backward(call, out, lse, (grad_out, None), wanted)
    results = {
        "out": out,
        "lse": lse.total,
        **{name: g for name, g, want in zip(NAMES, grads, wanted) if want},
    }
    solution = oracle.solve(query, key, value, grad_out, None, **keywords)
    wrong = [
        str(c)
        for c in bounds.check(solution, results, dtype, "zero_mean")
        if not within(c, dtype, "ring")
    ]
    assert not wrong, "\n".join(wrong)
