# SPDX-License-Identifier: Apache-2.0
"""Tensors that are not dense raise an error with the argument's name, in every public op."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch

import pytransformer as pt

pytestmark = pytest.mark.unpoisoned

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse_coo": torch.Tensor.to_sparse,
    "sparse_csr": torch.Tensor.to_sparse_csr,
    "sparse_csc": torch.Tensor.to_sparse_csc,
    "sparse_bsr": lambda t: t.to_sparse_bsr((1, 1)),
    "sparse_bsc": lambda t: t.to_sparse_bsc((1, 1)),
    "mkldnn": torch.Tensor.to_mkldnn,
    "nested": lambda t: torch.nested.nested_tensor([t]),
    "nested, jagged": lambda t: torch.nested.nested_tensor([t], layout=torch.jagged),
}


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


Q, LSE, OFFSETS = zeros(1, 2, 4, 4), zeros(1, 2, 4), torch.tensor([0, 4])
PACKED = (OFFSETS, OFFSETS, 4, 4)
W, B = zeros(4, 4), zeros(4)
# Each op with all of its tensor arguments.
CALLS: dict[str, dict[str, object]] = {
    "attention": dict(
        query=Q, key=Q, value=Q, attn_mask=W, bias=W, query_lengths=torch.tensor([4]),
        key_lengths=torch.tensor([4]),
        prefix_lengths=torch.tensor([4]), query_segments=OFFSETS[None, [0, 0, 1, 1]],
        key_segments=OFFSETS[None, [0, 0, 1, 1]],
        causal="top_left",
    ),
    "attention_varlen": dict(
        query=Q[0], key=Q[0], value=Q[0], cu_seqlens_q=OFFSETS // 2, cu_seqlens_k=OFFSETS // 2,
        max_seqlen_q=2, max_seqlen_k=2
    ),
    "attention_weights": dict(query=Q, key=Q, lse=LSE),
    "attention_summary": dict(query=Q, key=Q, lse=LSE),
    "layer_norm": dict(x=W, normalized_shape=4, weight=B, bias=B),
    "rms_norm": dict(x=W, normalized_shape=4, weight=B),
    "add_norm": dict(x=W, residual=W, weight=B, bias=B),
    "feed_forward": dict(x=W, w1=W, b1=B, w2=W, b2=B, gate_weight=W, gate_bias=B),
    "linear_cross_entropy": dict(
        x=W, weight=W, target=torch.tensor([0, 1, 2, 3]), bias=B, class_weight=B
    ),
    "rotary": dict(x=Q, positions=torch.arange(4), weight=B),
    "append_kv": dict(
        query=Q, key=Q, value=Q, cache=pt.KeyValues(zeros(1, 2, 8, 4), zeros(1, 2, 8, 4)),
        positions=torch.arange(4)[None], q_norm=B,
        k_norm=B,
    ),
}  # fmt: skip
PLACES = [
    (op, name)
    for op, given in CALLS.items()
    for name, value in given.items()
    if isinstance(value, torch.Tensor)
]


def in_layout(name: str, t: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor in that layout, or None if PyTorch does not support shape or dtype."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "Sparse CSR tensor support is in beta state"
        try:
            return LAYOUTS[name](t)
        except (RuntimeError, IndexError):
            return None


@pytest.mark.parametrize("op, argument", PLACES)
def test_other_layouts_are_refused_by_name(op: str, argument: str) -> None:
    given = CALLS[op]
    getattr(pt, op)(**given)  # valid without the change
    tried = set()
    for layout in LAYOUTS:
        if (other := in_layout(layout, given[argument])) is None:
            continue
        tried.add(layout)
        with pytest.raises(
            TypeError,
            match=rf"{argument} must be a dense tensor, got a {layout.partition(',')[0]} one",
        ):
            getattr(pt, op)(**{**given, argument: other})
    assert "sparse_coo" in tried and (given[argument].dim() < 2 or len(tried) >= 3), tried


@pytest.mark.parametrize(
    "layout", [layout for layout in LAYOUTS if not layout.startswith("nested")]
)
@pytest.mark.parametrize("dimensions", [2, 3, 4])
def test_scaled_dot_product_attention_refuses_other_layouts(layout: str, dimensions: int) -> None:
    """Nested tensors are supported: see test_nested.py."""
    dense = Q[(0,) * (4 - dimensions)]
    other = in_layout(layout, dense)
    assert other is not None
    match = rf"must be a dense tensor, got a {layout} one"
    for place in range(4):
        arguments = [other if i == place else dense for i in range(4)]
        with pytest.raises(
            TypeError, match=rf"{('query', 'key', 'value', 'attn_mask')[place]} {match}"
        ):
            pt.scaled_dot_product_attention(*arguments)


def test_biases_in_other_layouts_are_refused() -> None:
    for bias in (
        pt.AlibiBias(zeros(2).to_sparse()),
        pt.RelativePositionBias(zeros(32, 2).to_sparse()),
    ):
        with pytest.raises(
            TypeError, match=r"bias\.(slopes|table) must be a dense tensor, got a sparse_coo one"
        ):
            pt.attention(Q, Q, Q, bias=bias)
    with pytest.raises(TypeError, match="bias must be a dense tensor, got a sparse_coo one"):
        pt.attention(Q, Q, Q, bias=W.to_sparse())


def test_every_op_is_covered() -> None:
    ops = {
        n
        for n in pt.__all__
        if inspect.isfunction(getattr(pt, n))
        and "backend" in inspect.signature(getattr(pt, n)).parameters
    }
    assert ops <= CALLS.keys(), ops - CALLS.keys()
