# SPDX-License-Identifier: Apache-2.0
"""rotary and append_kv of the interpreted Triton backend, through the public API."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checks import check_found, every_third
from kernel_mutants import mutated

import pytransformer as pt
from pytransformer.cli.benchmark import check, exact
from pytransformer.cli.providers import Problem, prepare_ours
from pytransformer.testing.cases import Case, cases
from support import rotary_eight_bits
from support.models import ELEMENT, assert_same_gradient


@pytest.mark.parametrize("case", [*cases("rotary"), *cases("append_kv")], ids=lambda c: c.name)
def test_case_within_the_bound(case: Case) -> None:
    """Check outputs, caches and all gradients of the shared cases in every dtype."""
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        problem = Problem.make(case, dtype, "cpu", seed=0, grad=True)
        grads = check.upstream(problem, seed=1)
        found = check.compute(problem, prepare_ours("triton", problem), grads)
        assert check.judge(problem, found, exact.solve(problem, grads), peer=False).wrong is None, (
            dtype
        )


def test_rotation_equals_other_backends() -> None:
    """The model is (B, L, H, D), tables are bfloat16, and rows exceed one tile."""
    x = torch.randn(2, 50, 6, 96, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    cos, sin = pt.RotaryPositions(64).tables(torch.arange(50), dtype=torch.bfloat16)
    weight, grad = (
        torch.randn(96, requires_grad=True),
        torch.randn(2, 6, 50, 96, dtype=torch.bfloat16),
    )
    results = []
    for backend in ("triton", "cpu"):
        out = pt.rotary(x, cos=cos, sin=sin, dims=64, weight=weight, backend=backend)
        results.append([out, *torch.autograd.grad(out, (x, weight), grad)])
    assert results[0][0].stride() == results[0][1].stride() == x.stride()
    for mine, other in zip(*results):
        if mine.dtype == torch.float32:
            assert_same_gradient(mine, other)
        else:  # both round once, from sums with float32 differences
            torch.testing.assert_close(mine, other, rtol=torch.finfo(mine.dtype).eps, atol=ELEMENT)


def test_single_gradients_equal_those_of_all() -> None:
    x, weight, positions = (
        torch.randn(2, 3, 9, 40, requires_grad=True),
        torch.randn(40, requires_grad=True),
        torch.arange(9),
    )
    grad = torch.randn(2, 3, 9, 40)
    together = torch.autograd.grad(
        pt.rotary(x, positions, weight=weight, backend="triton"), (x, weight), grad
    )
    for i, leaves in enumerate(((x, weight.detach()), (x.detach(), weight))):
        out = pt.rotary(leaves[0], positions, weight=leaves[1], backend="triton")
        assert torch.equal(torch.autograd.grad(out, leaves[i], grad)[0], together[i])


def test_positions_outside_the_cache_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gets positions and pages outside the cache, unchecked as on a GPU."""
    monkeypatch.setattr(
        "pytransformer.ops._backends.gpu.rotary.looks_at_values", lambda device: False
    )
    store = torch.full((6, 2, 4, 16), 5.0)
    cache = pt.KeyValues(
        store[1:5], torch.full((4, 2, 4, 16), 5.0), torch.tensor([[0, 9], [-3, 2]])
    )
    rows = [torch.randn(2, heads, 3, 16) for heads in (4, 2, 2)]
    positions = torch.tensor([[1, 5, 8], [2, 1 << 40, -(1 << 40)]])
    pt.append_kv(*rows, cache, positions, backend="triton")
    assert torch.equal(store[1, :, 1], rows[1][0, :, 0])
    store[1, :, 1] = 5.0
    assert (store == 5.0).all()


@pytest.mark.parametrize(
    "dims, page, turned", [((64, 24), 4, 32), ((34, 5), 1, 10), ((13, 18), None, 0)]
)
@pytest.mark.parametrize("eight", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bit_caches_equal_quantize_kv(
    eight: torch.dtype, dims: tuple[int, int], page: int | None, turned: int
) -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        assert rotary_eight_bits.wrong("triton", eight, dtype, dims, page, turned) == []


def test_empty_inputs() -> None:
    for shape in ((0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)):
        x, weight = torch.randn(shape, requires_grad=True), torch.ones(8, requires_grad=True)
        out = pt.rotary(
            x, torch.zeros(shape[2], dtype=torch.int64), weight=weight, backend="triton"
        )
        assert out.shape == shape and not torch.autograd.grad(out.sum(), weight)[0].any()


def test_unsupported_arguments_give_a_reason() -> None:
    positions = torch.arange(3)
    assert pt.explain("rotary", torch.zeros(1, 1, 3, 8), positions).reasons["triton"] is None
    assert (
        "x in float64"
        in pt.explain("rotary", torch.zeros(1, 1, 3, 8).double(), positions).reasons["triton"]
    )
    wide = pt.explain("rotary", torch.zeros(1, 1, 3, 4098), positions).reasons["triton"]
    assert wide == "last dimensions of at most 4,096, and x has 4,098"


# Faults of similar kernels, each in a line of ours: (file, line, replacement).
MUTANTS = {
    "eps_ignored": ("fwd.py", ", dim) + p.eps)", ", dim))"),
    "turned_the_other_way": ("fwd.py", "-(b_2 * s_1)", "b_2 * s_1"),
    "second_half_of_tables": ("fwd.py", "b_2, c_2, y_1 * s_2", "b_2, c_1, y_1 * s_1"),
    "one_head_for_all": ("rows.py", "b * s.b + h * s.h + l * s.l", "b * s.b + l * s.l"),
    "rest_not_in_the_norm": ("rows.py", "        b_sum += tl.sum(b_rest, 1)\n",
        "        b_sum += 0.0\n"),
    "rest_at_the_pairs": ("rows.py", "return 2 * half + tl.arange", "return half + tl.arange"),
    "offset_ignored": ("rows.py", "return b_1 + p.offset, b_2 + p.offset",
        "return b_1, b_2 + p.offset"),
    "turned_back_forward": ("bwd.py", "g_1 * c_1 + b_2 * s_2", "g_1 * c_1 - b_2 * s_2"),
    "mean_ignored": ("bwd.py", "(b_2 - x_2 * b_mean[:, None])", "b_2"),
    "weight_gradient_of_the_first_tile": ("bwd.py", "dw_1 += b_1 * x_1", "dw_1 = b_1 * x_1"),
    "padding_written": ("append.py", "(position >= 0) & (position < cache.limit)",
        "(position < cache.limit)"),
    "page_of_the_first_sequence": ("append.py", "PAGES + b * cache.pages + position",
        "PAGES + position"),
    "row_of_the_page_lost": ("append.py", "position = position % cache.page_size",
        "position = position * 0"),
    "keys_with_the_norm_of_queries": (
        "append.py",
        "o.k_norm",
        "o.q_norm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", every_third(MUTANTS))
def test_planted_faults_are_detected(name: str, tmp_path: Path) -> None:
    check_found("rotary", MUTANTS[name], tmp_path)


EIGHT_BITS = {
    "not_rounded_before": (
        "append.py",
        "narrow(b_1, row_dtype), narrow(b_2, row_dtype)",
        "b_1, b_2",
    ),
    "the_rest_not_in_the_largest": (
        "append.py",
        "tl.maximum(largest, tl.max(sizes(b_rest), 1))",
        "largest",
    ),
    "ties_up": ("append.py", "0x7FFFF + ((size >> 20) & 1)", "0x80000"),
    "subnormals_by_the_other_rule": ("append.py", "size < 0x3C800000", "size < 0"),
    "a_row_that_is_not_finite_kept": ("append.py", "largest < 0x7F800000", "largest >= 0"),
    "scales_of_keys_for_values": ("append.py", "o.value_scale, p_scale", "o.key_scale, p_scale"),
}


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_planted_8_bit_faults_are_detected(name: str, tmp_path: Path) -> None:
    with mutated("rotary", *EIGHT_BITS[name], tmp_path):
        assert rotary_eight_bits.wrong(
            "triton", torch.float8_e4m3fn, torch.bfloat16, (34, 25), 4, 10
        )
