"""Both lanes, Python's and the one in C++, on one problem."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._core import lane

needs_lane = pytest.mark.skipif(lane.why_not() is not None, reason=f"no C++ lane: {lane.why_not()}")
OPTIONS = (
    "attn_mask causal window query_lengths key_lengths prefix_lengths query_segments key_segments bias softcap scale dropout_p "
    "dropout_seed return_lse deterministic backend strict"
).split()
DEFAULTS = dict.fromkeys(OPTIONS) | {"dropout_p": 0.0, "return_lse": False, "deterministic": True, "strict": False}


def taken(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> bool:
    """Whether the C++ lane itself does the call."""
    return lane.attention(query, key, value, *(DEFAULTS | options).values()) is not NotImplemented


def norm_taken(x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None) -> bool:
    return lane.layer_norm(x, shape, weight, bias, 1e-5, None, False) is not NotImplemented


def qkv(
    dtype: torch.dtype = torch.float32, *, kv_heads: int = 2, grad: bool = True, lq: int = 8, lk: int = 8, dv: int = 16
) -> list[Tensor]:
    shapes = (2, 2, lq, 16), (2, kv_heads, lk, 16), (2, kv_heads, lk, dv)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def results(
    function: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    """Outputs and gradients, with the same random numbers each time."""
    torch.manual_seed(1)
    found = function(*inputs, **options)
    outs = found if isinstance(found, tuple) else (found,)
    if not wanted:
        return outs
    torch.manual_seed(2)
    return (*outs, *torch.autograd.grad(outs, wanted, [torch.randn_like(o) for o in outs]))


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        assert torch.equal(x, y), (x - y).abs().max()


def same_in_both(function: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[Tensor], **options: Any) -> None:
    """The function gives the same bits with the C++ lane and without."""
    got = []
    for which in (contextlib.nullcontext, lane.off):
        with which():
            got.append(results(function, inputs, wanted, **options))
    same(*got)


def attention_in_both(inputs: Sequence[Any], wanted: Sequence[Tensor], **options: Any) -> None:
    same_in_both(pt.attention, inputs, wanted, **options)
