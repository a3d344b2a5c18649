# SPDX-License-Identifier: Apache-2.0
"""attention and attention_varlen on the emulated backend "cuda", through the public API."""

from __future__ import annotations

import attention_problems
import pytest
import torch
from run_problems import Share

import pytransformer as pt
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._core import fast_path
from pytransformer.ops.attention import attention_op
from pytransformer.reference.philox import keep_mask
from pytransformer.testing.cases import Case, cases
from support.attention_check import (
    check_attention,
    check_no_sequences,
    check_packed,
    check_slices,
    check_starts,
)
from support.draw_attention import draw
from support.fuzz import fuzz
from support.raw_calls import arguments

FUZZ_CASES, FUZZ_SEED = 30, 23
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
CASES = [c.resize(B=min(c.shape["B"], 2), Hq=2) for c in cases("attention", "small")]
PACKED = list(cases("attention_varlen", "small"))

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


def test_every_path_is_right(share: Share) -> None:
    for problem in share(attention_problems.problems()):
        assert (found := attention_problems.wrong(problem)) == [], f"{problem.name}: {found}"


def test_random_problems(schedule: int, share: Share) -> None:
    """Memory is guarded and poisoned; every keyword, packed and padded, gives equal bits twice."""
    cases = [
        n
        for n in range(schedule * 1000, schedule * 1000 + FUZZ_CASES)
        if draw(FUZZ_SEED, n).dtype != torch.float64
    ]
    report = fuzz("attention", ["cuda"], FUZZ_SEED, share(cases), stop_after=3)
    print(report.table())
    assert not report.failures, "\n".join(report.failures)


@pytest.mark.parametrize("schedule", [1], indirect=True)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_case_within_the_bound(case: Case, schedule: int) -> None:
    """Each shared named case runs in the next dtype in turn."""
    args, keywords = case.make("cpu", DTYPES[CASES.index(case) % 3], seed=0)
    check_attention(args, keywords, "cuda")


@pytest.mark.parametrize("schedule", [1], indirect=True)
@pytest.mark.parametrize("case", PACKED, ids=lambda c: c.name)
def test_packed_case_within_the_bound(case: Case, schedule: int) -> None:
    dtype = DTYPES[PACKED.index(case) % 3]
    check_packed(*case.make("cpu", dtype, seed=0), "cuda")


@pytest.mark.parametrize("query_start, key_start", [(0, 0), (70, 45), (2**27, 2**27 - 40)])
@pytest.mark.parametrize(
    "dtype, path",
    [(torch.bfloat16, "portable"), (torch.float32, "portable"), (torch.bfloat16, "sm90")],
)
@pytest.mark.parametrize("padded", [False, True])
def test_dropout_mask_equals_the_reference(
    dtype: torch.dtype,
    path: str,
    query_start: int,
    key_start: int,
    padded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each pass has the reference's bits, for all starts and padding.

    With zero queries all weights of a row are equal. Value as the identity exposes them in out, a
    gradient of ones in d_value, and the keys, also the identity, expose their share of delta in
    d_query.
    """
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", path)
    heads, num_queries, num_keys, p, seed = 2, 37, 90, 0.3, torch.tensor(-(2**62) + 12345)
    visible = (
        attention_problems.padding(num_keys, (3, 90), (0, 85), holes=torch.arange(num_keys) % 7)
        if padded
        else None
    )
    eye = torch.eye(num_keys, dtype=dtype).expand(2, heads, -1, -1)
    query = torch.zeros(2, heads, num_queries, num_keys, dtype=dtype)
    a, _, _ = attention_op.prepare(
        query, eye, eye, attn_mask=visible, dropout_p=p, dropout_seed=seed
    )
    a = a._replace(query_start=query_start, key_start=key_start)
    keep = keep_mask(seed, p, 2, heads, num_queries, num_keys, query_start, key_start)
    keep = keep if visible is None else keep & visible
    out, lse = attention_op.fwd(*a, "cuda", True)
    assert torch.equal(out != 0, keep)
    # d_value[j, c] = weight of query c for key j, if the gradient of out selects query c in column
    # c.
    grad = torch.eye(num_queries, num_keys, dtype=dtype).expand(2, heads, -1, -1)
    gradients = attention_op.bwd(grad, None, *a, out, lse, [True] * 3 + [False] * 5, "cuda", True)
    assert torch.equal(gradients[2][..., :num_queries].mT != 0, keep)
    # A gradient of lse cancels delta: d_query[i, j] = scale * weight * keep * keep_scale * grad[i,
    # j].
    ones = torch.ones_like(query)
    delta = (out.double() * ones.double()).sum(-1).float()
    gradients = attention_op.bwd(ones, delta, *a, out, lse, [True] * 3 + [False] * 5, "cuda", True)
    assert torch.equal(gradients[0].abs() > 1e-4, keep)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype, path", [(torch.float32, "portable"), (torch.bfloat16, "sm90")])
def test_slices_equal_the_full_call(
    dtype: torch.dtype, path: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", path)
    check_slices("cuda", dtype, packed)


@pytest.mark.parametrize("mask", ["none", "padding", "floating"])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
def test_starts_select_a_tile_of_a_larger_problem(causal: str, mask: str) -> None:
    check_starts("cuda", causal, mask_kind=mask)


@pytest.mark.parametrize("path", ["portable", "sm90"])
def test_padding_tiles_cost_no_products(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 visible keys of 700 cost the products of 128 of 128, forward and backward.

    The padding contains NaN.
    """
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", path)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, n, 64).bfloat16() for n in (40, 700, 700))
    counts, results = [], []
    for start, size in ((0, 128), (384, 700), (0, 700)):  # 384: a multiple of every tile
        inputs = [
            query.clone(),
            torch.full((1, 1, size, 64), torch.nan).bfloat16(),
            torch.full((1, 1, size, 64), torch.nan).bfloat16(),
        ]
        for t, of in zip(inputs[1:], (key, value)):
            t[:, :, start : start + 128] = of[:, :, :128]
        inputs = [t.requires_grad_() for t in inputs]
        before = [torch.ops.pytransformer_C.emulator_products(warps) for warps in (False, True)]
        with fast_path.off():  # the second call of a key computes twice, to record it
            out = pt.attention(
                *inputs,
                attn_mask=attention_problems.padding(size, (start, start + 128)),
                backend="cuda",
            )
            gradients = torch.autograd.grad(out.float().square().sum(), inputs)
        counts.append(
            [
                torch.ops.pytransformer_C.emulator_products(warps) - n
                for warps, n in zip((False, True), before)
            ]
        )
        results.append([out, gradients[0], *(g[:, :, start : start + 128] for g in gradients[1:])])
        assert all(
            g.count_nonzero() == g[:, :, start : start + 128].count_nonzero() for g in gradients[1:]
        )
    assert counts[0] == counts[1] == counts[2] and sum(counts[0])
    for first, *others in zip(*results):
        assert all(torch.equal(first, other) for other in others)


def test_sequence_gives_the_same_bits_alone() -> None:
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(2, 2, 45, 40, dtype=torch.bfloat16) for _ in range(4))
    keywords = {
        "causal": "bottom_right",
        "bias": pt.AlibiBias(torch.tensor([0.1, 0.3])),
        "backend": "cuda",
    }
    results = []
    for sequences in (slice(2), slice(1)):
        inputs = [t[sequences].clone().requires_grad_() for t in (query, key, value)]
        out = pt.attention(*inputs, **keywords)
        results.append([t[:1] for t in (out, *torch.autograd.grad(out, inputs, grad[sequences]))])
    for both, alone in zip(*results):
        assert torch.equal(both, alone)


def test_masked_rows_do_not_affect_results() -> None:
    """Hidden keys and values, padding, and queries without visible keys contain NaN."""
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(1, 1, 40, 64, dtype=torch.bfloat16) for _ in range(4))
    mask = torch.rand(1, 1, 40, 40) > 0.3
    mask[..., 11] = mask[..., 9, :] = False
    lengths = torch.tensor([35])
    results = []
    for hidden in (0.0, torch.nan):
        inputs = [t.clone() for t in (query, key, value)]
        for t, row in zip(inputs, (9, 11, 11)):
            t[..., row, :] = t[..., 35:, :] = hidden
        upstream = grad.clone()
        upstream[..., 9, :] = upstream[..., 35:, :] = hidden
        inputs = [t.requires_grad_() for t in inputs]
        out = pt.attention(
            *inputs, attn_mask=mask, query_lengths=lengths, key_lengths=lengths, backend="cuda"
        )
        results.append([out, *torch.autograd.grad(out, inputs, upstream)])
    for clean, poisoned in zip(*results):
        assert torch.equal(clean, poisoned) and bool(clean.isfinite().all())


def test_single_unaligned_operand_is_copied() -> None:
    """A float32 head dim of 20 is a multiple of 16 bytes.

    The copy of the unaligned query has as many columns as key.
    """
    query, key, value = (torch.randn(1, 1, 30, 20) for _ in range(3))
    shifted = torch.cat([query, query[..., :1]], -1).roll(1, -1)[..., 1:]
    check_attention((shifted, key, value), {}, "cuda")


def test_empty_inputs() -> None:
    for batch, num_queries, num_keys in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        query, key = torch.randn(batch, 2, num_queries, 16), torch.randn(batch, 2, num_keys, 16)
        inputs = [t.requires_grad_() for t in (query, key, torch.zeros(1, 1, 1, 1))]
        out, lse = pt.attention(
            query, key, key, attn_mask=inputs[2], return_lse=True, backend="cuda"
        )
        assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -torch.inf).all())
        for grad in torch.autograd.grad(out.sum(), inputs):
            assert not grad.count_nonzero()


def test_empty_packed_batch() -> None:
    check_no_sequences("cuda", "cpu")


def test_unsupported_arguments_give_a_reason() -> None:
    def reason(t: torch.Tensor) -> str | None:
        return pt.explain("attention", t, t, t).reasons["cuda"]

    assert reason(torch.zeros(1, 1, 1, 16)) is None
    assert "got float64" in reason(torch.zeros(1, 1, 1, 16, dtype=torch.float64))
    assert "head sizes up to 256, got 257" in reason(torch.zeros(1, 1, 1, 257))
    assert "positions below" in reason(torch.zeros(1, 1, 1, 1).expand(1, 1, 2**28, 1))


def test_binding_checks_preconditions() -> None:
    """A caller without the public function gets the kernels' preconditions as errors."""
    query, out, lse = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5)
    assert cuda_library.why_not("attention_fwd", query.device) is None
    raw = cuda_library.raw("attention_fwd")
    numbers = {"left": -1, "right": -1, "num_queries": 5, "num_keys": 5, "scale": 1.0}
    call = lambda q, o: raw(
        *arguments(raw, query=q, key=query, value=query, out=o, lse=lse, **numbers)
    )
    call(query, out)
    with pytest.raises(RuntimeError, match="out has the wrong shape"):
        call(query, torch.zeros(1, 2, 4, 8))
    with pytest.raises(RuntimeError, match="rows of query are no multiples of 16 bytes"):
        call(torch.zeros(1, 2, 5, 9)[..., 1:], out)
