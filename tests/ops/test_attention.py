# SPDX-License-Identifier: Apache-2.0
"""Attention's values: worked examples, the named cases on every backend, and PyTorch's function."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import pytransformer as pt
from pytransformer.testing.cases import cases
from support.attention_check import check_attention, check_slices

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def rows(*values: float) -> torch.Tensor:
    """Return values of shape (1, 1, n, 1)."""
    return torch.tensor(values)[None, None, :, None]


# ---- worked examples


def test_similarities_weigh_the_values(backend: str) -> None:
    """Scores 0.05, 0.45, 0.45 over the values 1, 20, 22 give 18.95 / 0.95."""
    scores = torch.tensor([0.05, 0.45, 0.45]).log().tolist()
    out = pt.attention(rows(1.0), rows(*scores), rows(1.0, 20.0, 22.0), scale=1.0, backend=backend)
    assert out.item() == pytest.approx(18.95 / 0.95, rel=1e-6)


def test_a_permutation_matrix_permutes_rows(backend: str) -> None:
    """Scores that are a sharp permutation matrix select rows 2, 1, 3 of the values."""
    permutation = torch.eye(3)[[1, 0, 2]]
    value = torch.arange(12.0).reshape(3, 4)
    out = pt.attention(
        permutation[None, None],
        torch.eye(3)[None, None],
        value[None, None],
        scale=200.0,
        backend=backend,
    )
    assert torch.equal(out[0, 0], value[[1, 0, 2]])


def test_causal_weights_are_lower_triangular(backend: str) -> None:
    """With the identity as value the output is the matrix of weights."""
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    weights = pt.attention(
        q, k, torch.eye(9).expand(1, 2, 9, 9), causal="top_left", backend=backend
    )
    assert torch.equal(weights, weights.tril())
    assert torch.allclose(weights.sum(-1), torch.ones(1, 2, 9))


def test_equal_scores_give_the_mean_and_the_log_of_the_count(backend: str) -> None:
    value = torch.randn(1, 1, 40, 16)
    out, lse = pt.attention(
        torch.zeros(1, 1, 3, 8), torch.randn(1, 1, 40, 8), value, return_lse=True, backend=backend
    )
    assert torch.allclose(out, value.mean(2, keepdim=True).expand_as(out), atol=1e-6)
    assert torch.allclose(lse, torch.full((1, 1, 3), math.log(40.0)))


def test_alibi_is_linear_in_the_distance(backend: str) -> None:
    """Zero scores and slope s give weights proportional to exp(-s |j - i|)."""
    zeros = torch.zeros(1, 1, 6, 4)
    bias = pt.AlibiBias(torch.tensor([0.7]))
    weights = pt.attention(zeros, zeros, torch.eye(6)[None, None], bias=bias, backend=backend)[0, 0]
    i = torch.arange(6.0)
    want = torch.softmax(-0.7 * (i[:, None] - i).abs(), -1)
    assert torch.allclose(weights, want, atol=1e-6)


def test_decoding_step_equals_the_last_row(backend: str) -> None:
    """Decoding with a cache needs only bottom_right, with window, ALiBi and T5."""
    q, k, v = torch.randn(3, 2, 4, 37, 16).unbind(0)
    table = torch.randn(32, 4)
    for bias in (pt.AlibiBias(torch.rand(4)), pt.RelativePositionBias(table, False), None):
        keywords = {
            "causal": "bottom_right",
            "window": (20, None),
            "bias": bias,
            "backend": backend,
        }
        whole = pt.attention(q, k, v, **keywords)
        step = pt.attention(q[:, :, -1:], k, v, **keywords)
        assert torch.allclose(step, whole[:, :, -1:], atol=1e-6)


# ---- the named cases


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("case", cases("attention"), ids=lambda c: c.name)
def test_case_within_the_bound(case, dtype: torch.dtype, backend: str) -> None:
    """Check outputs, lse and gradients of every benchmark case at small odd shapes."""
    args, kwargs = case.make("cpu", dtype, seed=1)
    check_attention(args, kwargs, backend)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 130), (130, 1), (64, 64), (129, 255), (257, 63)])
def test_tile_edges_within_the_bound(lengths: tuple[int, int], backend: str) -> None:
    for dtype in DTYPES:
        q, k = (torch.randn(1, 2, n, 40, dtype=dtype) for n in lengths)
        check_attention((q, k, torch.randn_like(k)), {"causal": "bottom_right"}, backend)


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (2, 2, 0, 0)])
def test_empty_inputs_give_zero_output(shape: tuple[int, int, int, int], backend: str) -> None:
    """Without keys the output is 0, lse is -inf and the gradients are zeros."""
    b, h, lq, lk = shape
    q, k, v = torch.randn(b, h, lq, 8), torch.randn(b, h, lk, 8), torch.randn(b, h, lk, 8)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = pt.attention(q, k, v, return_lse=True, backend=backend, strict=True)
    assert out.shape == (b, h, lq, 8) and not out.any()
    assert bool((lse == -math.inf).all())
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves)):
        assert grad.shape == leaf.shape and not grad.any()


def test_outputs_keep_the_memory_order_of_the_inputs(backend: str) -> None:
    """A (B, L, H, D) model never copies: outputs and gradients have the inputs' strides."""
    leaves = [torch.randn(2, 5, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    out = pt.attention(*leaves, backend=backend)
    assert out.transpose(1, 2).is_contiguous()
    for grad in torch.autograd.grad(out.square().sum(), leaves):
        assert grad.transpose(1, 2).is_contiguous()


# ---- PyTorch's function


def sdpa_arguments():
    mask = torch.rand(2, 1, 7, 9) > 0.3
    mask[:, :, :, 0] = True
    yield "plain", {}
    yield "scale", {"scale": 0.3}
    yield "causal", {"is_causal": True}
    yield "bool mask", {"attn_mask": mask}
    yield "float mask", {"attn_mask": torch.randn(7, 9, dtype=torch.float64)}
    yield (
        "minus infinity",
        {"attn_mask": torch.zeros(2, 4, 7, 9).masked_fill(~mask, -math.inf).double()},
    )
    yield "grouped", {"enable_gqa": True}


@pytest.mark.parametrize(
    "name, kwargs", list(sdpa_arguments()), ids=lambda x: x if isinstance(x, str) else ""
)
def test_equals_torch_in_float64(name: str, kwargs: dict, backend: str) -> None:
    q = torch.randn(2, 4, 7, 16, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2 if name == "grouped" else 4, 9, 16, dtype=torch.float64).unbind(0)
    with pt.use_backend(attention=backend):
        ours = pt.scaled_dot_product_attention(q, k, v, **kwargs)
    assert torch.allclose(ours, F.scaled_dot_product_attention(q, k, v, **kwargs), atol=1e-12)


def test_opinfo_samples_of_pytorch(backend: str) -> None:
    """Run PyTorch's samples of its function, except dropout, whose random bits differ."""
    from torch.testing._internal.common_methods_invocations import op_db

    opinfo = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    seen = 0
    with pt.use_backend(attention=backend):
        for sample in opinfo.sample_inputs("cpu", torch.float64, requires_grad=True):
            if sample.kwargs.get("dropout_p", 0.0) > 0:
                continue
            tensors = [sample.input, *sample.args]
            ours = pt.scaled_dot_product_attention(*tensors, **sample.kwargs)
            want = F.scaled_dot_product_attention(*tensors, **sample.kwargs)
            assert torch.allclose(ours, want, atol=1e-9), sample
            leaves = [t for t in tensors[:3] if t.requires_grad]
            for a, b in zip(*(torch.autograd.grad(o.sin().sum(), leaves) for o in (ours, want))):
                assert torch.allclose(a, b, atol=1e-9), sample
            seen += 1
    assert seen >= 8


# ---- dropout


def test_dropout_scales_a_binomial_share_of_the_weights(backend: str) -> None:
    """The remaining weights are 1/(1-p) times those without dropout."""
    n, p = 512, 0.3
    q = torch.zeros(1, 1, n, 8)
    eye = torch.eye(n)[None, None]
    weights = pt.attention(q, q, eye, dropout_p=p, dropout_seed=5, backend=backend)
    kept = weights > 0
    t = round(65536 * p)
    assert torch.allclose(weights[kept], torch.tensor(65536 / (65536 - t) / n), rtol=1e-5)
    share, sigma = kept.float().mean().item(), (p * (1 - p) / n**2) ** 0.5
    assert abs(share - (1 - t / 65536)) < 4 * sigma


def test_dropout_bits_match_the_oracle(backend: str) -> None:
    """Sizes are odd, heads and sequences several, and some seeds negative."""
    from pytransformer.testing.oracle import keep_factor

    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 1 << 40):
        q, k = torch.zeros(3, 2, 13, 4), torch.zeros(3, 2, 77, 4)
        value = torch.eye(77).expand(3, 2, 77, 77)
        weights = pt.attention(q, k, value, dropout_p=0.4, dropout_seed=seed, backend=backend)
        keep = keep_factor(seed, 0.4, 3, 2, torch.arange(13), torch.arange(77))
        assert torch.equal(weights > 0, keep > 0), seed


def test_drawn_seed_follows_the_torch_generator(backend: str) -> None:
    q = torch.randn(1, 1, 16, 8)
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        draws.append(pt.attention(q, q, q, dropout_p=0.5, backend=backend))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


# ---- absolute indices


def test_starts_select_a_tile_of_a_larger_problem(backend: str) -> None:
    """Rows from query_start and keys from key_start equal a larger problem with the rest hidden."""
    from pytransformer.ops.attention import _prepare, attention_op

    q, k, v = torch.randn(3, 2, 2, 24, 8).unbind(0)
    i0, j0 = 5, 8
    bias = pt.RelativePositionBias(torch.randn(8, 2), False, 20)
    for causal in ("top_left", "bottom_right"):
        kwargs = {
            "causal": causal,
            "window": (12, 3),
            "bias": bias,
            "dropout_p": 0.25,
            "dropout_seed": 9,
        }
        hidden = (torch.arange(24) >= j0)[None, None, None]
        whole = pt.attention(q, k, v, attn_mask=hidden, backend=backend, **kwargs)
        a, _, _ = _prepare(q[:, :, i0:], k[:, :, j0:], v[:, :, j0:], **kwargs)
        tile, _ = attention_op(a._replace(query_start=i0, key_start=j0), backend, True)
        assert torch.allclose(tile, whole[:, :, i0:], atol=1e-6), causal


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_batch_and_heads_have_the_dropout_of_the_full_call(
    backend: str, dtype: torch.dtype, packed: bool
) -> None:
    check_slices(backend, dtype, packed)
