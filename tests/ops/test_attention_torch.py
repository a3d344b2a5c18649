# SPDX-License-Identifier: Apache-2.0
"""The backend torch: supported cases, declined cases, and its place before the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import fast_path
from pytransformer.ops._core.registry import OPS, trace
from pytransformer.testing import bounds, oracle
from pytransformer.testing.cases import cases
from support.attention_check import check_attention, run_attention

pytestmark = pytest.mark.usefixtures("one_thread")
# The named cases with gradients; docs/ops/attention-torch.md and docs/fallbacks.md list them.
TAKEN = {
    "full", "causal", "causal_bottom_right", "key_padding", "padding", "left_padding", "bool_mask",
    "gqa", "cross", "decode", "value_dim",
    "varlen", "varlen_causal",
}  # fmt: skip


def reason(op: str, *args: Any, **kwargs: Any) -> str | None:
    return pt.explain(op, *args, **kwargs).reasons["torch"]


def without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable all native and Triton kernels."""
    op = OPS["attention"]
    monkeypatch.setattr(
        op, "backends", {name: op.backends[name] for name in ("torch", "reference")}
    )


def qkv(
    *shape: int, num_keys: int | None = None, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    keys = (*shape[:2], num_keys or shape[2], shape[3])
    return [torch.randn(size, dtype=dtype) for size in (shape, keys, keys)]


def test_supported_cases_match_the_documented_list() -> None:
    everything = [*cases("attention"), *cases("attention_varlen")]
    taken = set()
    for case in everything:
        args, kwargs = case.make("cpu", torch.float32, seed=0, requires_grad=True)
        if reason(case.op, *args, **kwargs) is None:
            taken.add(case.name)
    assert taken == TAKEN


def test_torch_precedes_the_reference_and_is_not_a_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = OPS["attention"]
    assert list(op.backends)[-2:] == ["torch", "reference"]
    without_ours(monkeypatch)
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 5, 8))
    with trace() as ran, fast_path.off():
        pt.attention(q, k, v, strict=True).sum().backward()
        with pt.activate():
            torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert {name for _, name in ran} == {"torch"} and len(ran) == 3 and not pt.fallbacks()


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("kind", ["bool", "float", "both"])
def test_dense_masks_combine_with_windows_segments_and_lengths(
    kind: str, causal: str | None
) -> None:
    """Rows without a key and hidden positions hold NaN."""
    q, k, v = qkv(2, 4, 33, 16, num_keys=40)
    keywords: dict[str, Any] = {
        "causal": causal,
        "window": (20, 9),
        "key_lengths": torch.tensor([40, 17]),
    }
    keywords["query_lengths"] = torch.tensor([30, 33])
    segments = torch.arange(40) // 15
    keywords |= {
        "query_segments": segments[:33].expand(2, -1),
        "key_segments": segments.expand(2, -1),
    }
    keep = torch.rand(2, 4, 33, 40) > 0.3
    if kind != "float":
        keywords["attn_mask"] = keep
    if kind != "bool":
        name = "attn_mask" if kind == "float" else "bias"
        keywords[name] = torch.randn(2, 4, 33, 40).masked_fill(~keep, -math.inf)
    out, lse = pt.attention(q, k, v, **keywords, return_lse=True, backend="torch", strict=True)
    solution = oracle.solve(q, k, v, **keywords)
    assert solution.dead_queries.any()
    found = bounds.check(solution, {"out": out, "lse": lse}, torch.float32, "zero_mean")
    assert all(c.ok for c in found), found
    if kind == "bool":  # without a floating mask gradients are supported too
        check_attention((q, k, v), keywords, "torch", poisoned=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("causal", [None, "top_left"])
def test_hidden_rows_and_keys_need_no_dense_mask(dtype: torch.dtype, causal: str | None) -> None:
    keep = torch.rand(3, 1, 1, 50) > 0.4
    keep[..., :5] = False  # causal rows before the first key
    keywords: dict[str, Any] = {
        "attn_mask": keep,
        "causal": causal,
        "query_lengths": torch.tensor([0, 31, 64]),
    }
    keywords["key_lengths"] = torch.tensor([50, 50, 23])
    check_attention(
        tuple(qkv(3, 2, 64, 24, num_keys=50, dtype=dtype)), keywords, "torch", poisoned=True
    )


def test_gradient_of_lse_alone() -> None:
    """Cover float16 and a value narrower than query."""
    for dtype in (torch.float32, torch.float16):
        q, k, v = qkv(2, 2, 19, 16, dtype=dtype)
        v = v[..., :8]
        grad_out, grad_lse = torch.zeros(2, 2, 19, 8, dtype=dtype), torch.randn(2, 2, 19)
        solution = oracle.solve(q, k, v, grad_out, grad_lse)
        found = bounds.check(
            solution, run_attention((q, k, v), {}, "torch", grad_out, grad_lse), dtype, "zero_mean"
        )
        assert all(c.ok for c in found), found


@pytest.mark.falls_back
def test_rows_of_finfo_min_go_to_the_next_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's gradient is wrong there: each key gets the full weight."""
    mask = torch.zeros(1, 1, 6, 6)
    mask[..., 2, :] = torch.finfo(torch.float32).min
    q, k, v = (t.requires_grad_() for t in qkv(1, 1, 6, 8))
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    want = torch.autograd.grad(
        pt.attention(q, k, v, attn_mask=mask, backend="reference")[..., 2, :].sum(), v
    )[0]
    assert not torch.allclose(torch.autograd.grad(theirs[..., 2, :].sum(), v)[0], want), (
        "PyTorch's fault is mended: take these rows"
    )
    with pytest.raises(pt.BackendError, match=r"did not run.*gradient is wrong"):
        pt.attention(q, k, v, attn_mask=mask, backend="torch")
    without_ours(monkeypatch)
    with (
        fast_path.off(),
        pytest.warns(RuntimeWarning, match=r"runs on the reference.*gradient is wrong"),
    ):
        out = pt.attention(q, k, v, attn_mask=mask)
    assert torch.equal(torch.autograd.grad(out[..., 2, :].sum(), v)[0], want)


def test_unsupported_calls_give_a_reason() -> None:
    q, k, v = qkv(1, 2, 4, 8, num_keys=6)
    output = {
        "dropout": dict(dropout_p=0.1),
        "softcap": dict(softcap=5.0),
        "ALiBi": dict(bias=pt.AlibiBias(torch.ones(2))),
        "scale": dict(scale=0.0),
        "pairs": dict(window=(2, 0)),
        "gradient": dict(bias=torch.zeros(4, 6, requires_grad=True)),
        "one number": dict(bias=torch.zeros(4, 1)),
    }
    for word, keywords in output.items():
        why = reason("attention", q, k, v, **keywords)
        assert why is not None and word in why, (word, why)
        with pytest.raises(pt.BackendError, match="cannot do this"):
            pt.attention(q, k, v, **keywords, backend="torch")
    assert "pairs" in str(reason("attention", q, k, v, causal="bottom_right"))
    assert "pairs" in str(
        reason(
            "attention",
            q,
            k,
            v,
            attn_mask=torch.ones(1, 2, 1, 6, dtype=torch.bool).expand(1, 2, 4, 6),
            window=(2, 0),
        )
    )
    assert reason("attention", q[:, :, :1], k, v, causal="bottom_right", window=(2, 0)) is None


def test_backward_runs_on_another_backend_than_forward() -> None:
    """Every backend saves the same tensors, out and lse among them."""
    keep = torch.rand(2, 1, 1, 21) > 0.5
    keep[1] = False
    leaves = [t.requires_grad_() for t in qkv(2, 2, 21, 16)]
    a, _, _ = OPS["attention"].prepare(*leaves, attn_mask=keep)
    a = a._replace(query=leaves[0].detach(), key=leaves[1].detach(), value=leaves[2].detach())
    grad = torch.randn(2, 2, 21, 16)
    expected = [True] * 3 + [False] * 5
    found = {}
    for forward, backward in (("cpu", "torch"), ("torch", "cpu"), ("reference", "reference")):
        out, lse = OPS["attention"].fwd(*a, forward, True)
        found[forward] = OPS["attention"].bwd(grad, None, *a, out, lse, expected, backward, True)[
            :3
        ]
    for name in ("cpu", "torch"):
        for mine, theirs in zip(found[name], found["reference"]):
            assert bounds.agree(mine, theirs)
