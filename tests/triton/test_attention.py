# SPDX-License-Identifier: Apache-2.0
"""Attention of the interpreted Triton backend on CPU tensors, through the public API."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checks import check_found, every_third
from kernel_mutants import mutated

import pytransformer as pt
from pytransformer.ops.attention import attention_op
from pytransformer.reference.philox import keep_mask
from pytransformer.testing import bounds, oracle
from pytransformer.testing.cases import Case, cases, leaves
from support.attention_check import check_slices, check_starts

CASES = [c.resize(B=min(c.shape["B"], 2), Hq=2) for c in cases("attention", "small")]
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case_within_the_bound(case: Case) -> None:
    """Check outputs, lse and all gradients of the shared cases."""
    dtype = DTYPES[CASES.index(case) % 3]
    args, kwargs = case.make("cpu", dtype, seed=0, requires_grad=True)
    out, lse = pt.attention(*args, **kwargs, return_lse=True, backend="triton", strict=True)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    inputs = leaves(case.op, args, kwargs)
    grads = torch.autograd.grad([out, lse], list(inputs.values()), [grad_out, grad_lse])
    with torch.no_grad():
        exact = oracle.solve(*args, grad_out, grad_lse, **kwargs)
    checks = bounds.check(
        exact, {"out": out, "lse": lse, **dict(zip(inputs, grads))}, dtype, "zero_mean"
    )
    assert all(c.ok for c in checks), "\n".join(map(str, checks))


@pytest.mark.parametrize("query_start, key_start", [(0, 0), (5, 0), (70, 45), (2**27, 2**27 - 40)])
def test_dropout_mask_equals_the_reference(query_start: int, key_start: int) -> None:
    """Value as the identity exposes the mask, for all starts in the sequence."""
    heads, num_queries, num_keys, p, seed = 2, 37, 90, 0.3, torch.tensor(-(2**62) + 12345)
    query, key = torch.zeros(2, heads, num_queries, 16), torch.zeros(2, heads, num_keys, 16)
    value = torch.eye(num_keys).expand(2, heads, -1, -1)
    a, _, _ = attention_op.prepare(query, key, value, dropout_p=p, dropout_seed=seed)
    a = a._replace(query_start=query_start, key_start=key_start)
    out, _ = attention_op.fwd(*a, "triton", True)
    assert torch.equal(
        out != 0, keep_mask(seed, p, 2, heads, num_queries, num_keys, query_start, key_start)
    )


@pytest.mark.parametrize("packed", [False, True])
def test_slices_equal_the_full_call(packed: bool) -> None:
    check_slices("triton", packed=packed)


@pytest.mark.parametrize(
    "line, fault",
    [
        ("from_start(column(i_h, C), p.head_start)", "column(i_h, C)"),
        ("from_start(i_b, p.batch_start)", "i_b"),
    ],
)
def test_ignored_starts_are_detected(line: str, fault: str, tmp_path: Path) -> None:
    with (
        mutated("attention", "softmax.py", line, fault, tmp_path),
        pytest.raises(AssertionError, match="result 0 of sequences"),
    ):
        check_slices("triton")


@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_starts_select_a_tile_of_a_larger_problem(causal: str) -> None:
    check_starts("triton", causal)


def test_empty_inputs() -> None:
    for batch, num_queries, num_keys in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        query, key = torch.randn(batch, 2, num_queries, 16), torch.randn(batch, 2, num_keys, 16)
        mask = torch.zeros(1, 1, 1, 1)
        inputs = [t.requires_grad_() for t in (query, key, mask)]
        out, lse = pt.attention(query, key, key, attn_mask=mask, return_lse=True, backend="triton")
        assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -torch.inf).all())
        for grad in torch.autograd.grad(out.sum(), inputs):
            assert not grad.count_nonzero()


def test_unsupported_arguments_give_a_reason() -> None:

    def reason(t: torch.Tensor) -> str | None:
        return pt.explain("attention", t, t, t).reasons["triton"]

    assert reason(torch.zeros(1, 1, 1, 16)) is None
    assert "float64" in reason(torch.zeros(1, 1, 1, 16, dtype=torch.float64))
    assert "256" in reason(torch.zeros(1, 1, 1, 257))
    assert "positions below" in reason(torch.zeros(1, 1, 1, 1).expand(1, 1, 2**28, 1))
    with pytest.raises(pt.BackendError, match="head sizes up to 256, got 300"):
        pt.attention(*[torch.zeros(1, 1, 1, 300)] * 3, backend="triton")


# Faults of other kernels, each in a line of ours: (file, line, replacement), and the problem that
# detects it.
MUTANTS = {
    "diagonal_hidden": (
        "mask.py",
        "below = i + seq.offset + 1",
        "below = i + seq.offset",
        "causal",
    ),
    "window_one_short": (
        "mask.py",
        "i + seq.offset + p.right + 1)",
        "i + seq.offset + p.right)",
        "window",
    ),
    "bounds_of_keys_exchanged": (
        "mask.py",
        "j - seq.offset + p.left + 1",
        "j - seq.offset + p.right + 1",
        "window",
    ),
    "distance_without_the_offset": (
        "score_mod.py",
        "of_keys(j - offset, C) - of_queries(i, C)).to",
        "of_keys(j, C) - of_queries(i, C)).to",
        "alibi",
    ),
    "dropout_of_the_next_group": (
        "softmax.py",
        "j0 = tl.min(j, 0) + p.key_start",
        "j0 = tl.min(j, 0) + p.key_start + 32",
        "dropout_p",
    ),
    "sum_not_rescaled": ("softmax.py", "b_l * alpha + tl.sum(", "b_l + tl.sum(", "scale"),
    "lse_of_another_gradient": (
        "bwd.py",
        "b_delta -= tl.load(DLSE",
        "b_delta -= 0.0 * tl.load(DLSE",
        "return_lse",
    ),
    "softcap_without_slope": ("bwd.py", "b_ds * (1.0 - capped * capped)", "b_ds", "softcap"),
    "sinks_gradient_sign": (
        "bwd.py",
        "b_ds = -b_delta * power(",
        "b_ds = b_delta * power(",
        "sinks",
    ),
    "sinks_of_the_first_head": (
        "softmax.py",
        "tl.load(p.sinks + i_h)",
        "tl.load(p.sinks + i_h * 0)",
        "sinks",
    ),
    "outputs_not_rescaled_by_the_sink": (
        "fwd.py",
        "b_scale = alpha * p.keep_scale",
        "b_scale = p.keep_scale",
        "sinks",
    ),
    "lse_without_its_sink": (
        "fwd.py",
        "b_m, b_l, alpha = with_sink",
        "_b_m, b_l, alpha = with_sink",
        "sinks",
    ),
    "keys_of_one_query_head": ("bwd.py", "i_h = i_hk * p.group + g", "i_h = i_hk * p.group", "gqa"),
    "last_diagonals_lost": ("bwd.py", "run.last > run.first:", "run.last > run.first + 1:", "t5"),
    "dense_gradient_of_one_head": ("bwd.py", "i_h = i_head + h", "i_h = i_head", "dense"),
}


@pytest.mark.parametrize("name", every_third(MUTANTS))
def test_fuzzer_detects_planted_faults(name: str, tmp_path: Path) -> None:
    *fault, feature = MUTANTS[name]
    check_found("attention", tuple(fault), tmp_path, feature)
