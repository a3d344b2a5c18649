# SPDX-License-Identifier: Apache-2.0
"""Packed sequences give the bits of the padded call and read nothing outside the sequences."""

from __future__ import annotations

import math

import pytest
import torch

import pytransformer as pt
from pytransformer.testing.cases import cases, leaves

LENGTHS = ((0, 5, 33), (7, 0, 70), (64, 1, 129), (16,), (1, 1, 1, 1))


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def pad(x: torch.Tensor, lengths: tuple[int, ...], longest: int) -> torch.Tensor:
    """Pad (total, H, D) to (B, H, longest, D)."""
    out = x.new_zeros(len(lengths), x.shape[1], longest, x.shape[2])
    for b, (start, n) in enumerate(zip(offsets(lengths).tolist(), lengths)):
        out[b, :, :n] = x[start : start + n].transpose(0, 1)
    return out


def unpad(x: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.cat([x[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)])


def keywords(heads: int):
    yield "plain", {}
    yield "causal", {"causal": "bottom_right", "window": (20, None)}
    yield "alibi", {"causal": "top_left", "bias": pt.AlibiBias(torch.rand(heads))}
    yield "t5", {"bias": pt.RelativePositionBias(torch.randn(32, heads)), "softcap": 20.0}
    yield "dropout", {"dropout_p": 0.2, "dropout_seed": 3, "scale": 0.3}


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    "name, kwargs", list(keywords(4)), ids=lambda x: x if isinstance(x, str) else ""
)
def test_packed_equals_padded_bit_for_bit(
    name: str, kwargs: dict, lengths: tuple[int, ...], backend: str
) -> None:
    """Compare output, lse and the gradients of query, key and value."""
    if backend == "torch":
        pytest.skip(
            "PyTorch's kernels choose their tiles by the padded length: within the bound"
            " (test_fuzz), not bit for bit"
        )
    lengths_k = lengths[::-1]
    packed = [
        torch.randn(sum(n), h, 24).bfloat16()
        for n, h in ((lengths, 4), (lengths_k, 2), (lengths_k, 2))
    ]
    longest = max(lengths), max(lengths_k)
    padded = [
        pad(x, n, m)
        for x, n, m in zip(
            packed, (lengths, lengths_k, lengths_k), (longest[0], longest[1], longest[1])
        )
    ]
    for leaf in (*packed, *padded):
        leaf.requires_grad_()
    common = {**kwargs, "backend": backend, "strict": True, "return_lse": True}
    out, lse = pt.attention_varlen(
        *packed, offsets(lengths), offsets(lengths_k), *longest, **common
    )
    want, want_lse = pt.attention(
        *padded, query_lengths=torch.tensor(lengths), key_lengths=torch.tensor(lengths_k), **common
    )
    assert torch.equal(out, unpad(want, lengths))
    assert torch.equal(lse.mT, unpad(want_lse[..., None], lengths)[..., 0])
    grad = torch.randn_like(want)
    grads = torch.autograd.grad(out, packed, unpad(grad, lengths))
    expected = torch.autograd.grad(want, padded, grad)
    for name_, ours, theirs, n in zip("qkv", grads, expected, (lengths, lengths_k, lengths_k)):
        # Plain PyTorch sums a batch in another order than a single sequence.
        if backend == "reference":
            assert torch.allclose(ours.float(), unpad(theirs, n).float(), atol=2e-2), name_
        else:
            assert torch.equal(ours, unpad(theirs, n)), name_


@pytest.mark.parametrize("case", cases("attention_varlen"), ids=lambda c: c.name)
def test_case_runs_forward_and_backward(case, backend: str) -> None:
    args, kwargs = case.make("cpu", torch.float32, seed=1, requires_grad=True)
    out = pt.attention_varlen(*args, **kwargs, backend=backend, strict=True)
    named = leaves(case.op, args, kwargs)
    for name, grad in zip(named, torch.autograd.grad(out.square().sum(), list(named.values()))):
        assert bool(grad.isfinite().all()) and bool(grad.any()), name


def test_rows_outside_the_sequences_are_not_read(backend: str) -> None:
    """NaN rows behind the last sequence have no effect.

    Their output is 0, their lse -inf and their gradient 0.
    """
    x = torch.randn(3, 20, 2, 8)
    x[:, 15:] = math.nan
    q, k, v = (t.requires_grad_() for t in x.unbind(0))
    cu = torch.tensor([0, 4, 15])
    out, lse = pt.attention_varlen(
        q, k, v, cu, cu, 11, 11, return_lse=True, backend=backend, strict=True
    )
    assert bool(out[:15].isfinite().all()) and not out[15:].any()
    assert bool((lse[:, 15:] == -math.inf).all())
    grad = torch.ones_like(out)
    grad[15:] = math.nan
    for g in torch.autograd.grad(out, (q, k, v), grad):
        assert bool(g[:15].isfinite().all()) and not g[15:].any()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"cu_seqlens_q": torch.tensor([0, 5, 3, 10])},
            "cu_seqlens_q must start at 0, never decrease",
        ),
        ({"cu_seqlens_k": torch.tensor([1, 5, 8, 10])}, "cu_seqlens_k must start at 0"),
        ({"cu_seqlens_k": torch.tensor([0, 5, 8, 11])}, "end at most at 10"),
        ({"cu_seqlens_k": torch.tensor([0, 5, 10])}, "must have the same length"),
        ({"cu_seqlens_q": torch.tensor([0.0, 5.0, 8.0, 10.0])}, "integer dtype"),
        ({"max_seqlen_q": 2}, "max_seqlen_q is 2 but the longest sequence has 5"),
        ({"max_seqlen_k": -1}, "max_seqlen_k must be an int >= 0"),
        ({"query": torch.randn(10, 8)}, "query must have 3 dimensions"),
        ({"bias": torch.zeros(10, 10)}, "dense bias has no packed form"),
    ],
)
def test_bad_input_is_named_in_the_error(change: dict, message: str, backend: str) -> None:
    x, cu = torch.randn(10, 2, 8), torch.tensor([0, 5, 8, 10])
    arguments = {
        "query": x,
        "key": x,
        "value": x,
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu,
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    with pytest.raises((ValueError, TypeError), match=message):
        pt.attention_varlen(**(arguments | change), backend=backend)
