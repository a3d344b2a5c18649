# SPDX-License-Identifier: Apache-2.0
"""The attention kernels for sm_90a (TMA and wgmma) in the emulator, through the public API."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import sm90_problems
import torch
from attention_problems import in_blocks
from run_problems import Share

import pytransformer as pt
from support.attention_check import check_packed, check_starts
from support.draw_attention import draw
from support.fuzz import fuzz
from support.fuzz_attention import judge, run
from support.paths import bits

FUZZ_SEED, FUZZ_CASES, DRAWN = 31, 20, 250

pytestmark = pytest.mark.usefixtures("emulated", "one_thread", "sm90")


def test_every_path_is_right(share: Share) -> None:
    """Only warpgroup kernels run; float64 is the reference."""
    for problem in share(sm90_problems.problems()):
        assert (found := sm90_problems.wrong(problem)) == [], f"{problem.name}: {found}"


def test_random_problems() -> None:
    """Run the fuzzer's 16-bit problems: packed, padded, strided, poisoned; equal bits twice."""
    numbers = [
        n for n in range(DRAWN) if draw(FUZZ_SEED, n).dtype in (torch.bfloat16, torch.float16)
    ]
    before = torch.ops.pytransformer_C.emulator_products()
    report = fuzz("attention", ["cuda"], FUZZ_SEED, numbers[:FUZZ_CASES], stop_after=5)
    assert not report.failures, "\n".join(report.failures)
    assert report.cases == FUZZ_CASES and torch.ops.pytransformer_C.emulator_products() > before


def hidden_by(kind: str, row: int, rows: int) -> dict[str, Any]:
    """Return keywords that hide one key from every query."""
    visible = torch.ones(1, 1, rows, rows, dtype=torch.bool)
    visible[..., row] = False
    if kind == "mask":
        return {"attn_mask": visible}
    if kind == "bias":
        return {"bias": torch.zeros(1, 1, rows, rows).masked_fill(~visible, -torch.inf)}
    return {
        "query_segments": torch.zeros(1, rows, dtype=torch.int64),
        "key_segments": (~visible[0, :, 0]).long(),
    }


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["mask", "bias", "segments"])
def test_hidden_pairs_do_not_affect_forward(
    kind: str, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portable kernels recompute the affected tiles, to their own bits; other tiles stay."""
    torch.manual_seed(0)
    rows, row = 300, 200  # queries before 128 do not reach it
    query, key, value = (torch.randn(1, 2, rows, 64, dtype=torch.bfloat16) for _ in range(3))
    keywords: dict[str, Any] = {
        "causal": "top_left",
        "return_lse": True,
        "backend": "cuda",
    } | hidden_by(kind, row, rows)
    clean = pt.attention(query, key, value, **keywords)
    poisoned = key.clone(), value.clone()
    for t in poisoned:
        t[:, 1, row] = poison
    found = pt.attention(query, *poisoned, **keywords)
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
    again = pt.attention(query, key, value, **keywords)
    for ours, first, second in zip(found, clean, again):
        assert torch.equal(ours[:, 0], first[:, 0]) and torch.equal(
            ours[:, 1, :128], first[:, 1, :128]
        )
        assert torch.equal(ours[:, 1, 128:], second[:, 1, 128:]) and bool(ours.isfinite().all())


@pytest.mark.parametrize("kind", ["mask", "bias", "segments"])
def test_hidden_pairs_do_not_affect_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hidden key and value, a query without visible keys and its upstream gradient are NaN.

    Portable kernels recompute the affected tiles of both passes, to their own bits; other tiles
    stay.
    """
    torch.manual_seed(0)
    rows, key_row, query_row = (
        300,
        200,
        140,
    )  # queries before 128 do not reach that key, keys from 192 on not that query
    tensors = [torch.randn(1, 2, rows, 64, dtype=torch.bfloat16) for _ in range(4)]
    keywords: dict[str, Any] = {"causal": "top_left", "backend": "cuda"} | hidden_by(
        kind, key_row, rows
    )
    if kind == "segments":
        keywords["query_segments"][0, query_row] = 7
    else:
        name = "attn_mask" if kind == "mask" else kind
        keywords[name][..., query_row, :] = False if kind == "mask" else -torch.inf

    def gradients(poisoned: bool, path: str) -> tuple[torch.Tensor, ...]:
        query, key, value, grad_out = (t.clone() for t in tensors)
        if poisoned:
            query[:, 1, query_row], grad_out[:, 1, query_row] = torch.nan, torch.nan
            key[:, 1, key_row], value[:, 1, key_row] = torch.nan, torch.nan
        inputs = [t.requires_grad_() for t in (query, key, value)]
        monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
        out = pt.attention(*inputs, **keywords)
        monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", path)
        return torch.autograd.grad(out, inputs, grad_out)

    found, clean, again = (
        gradients(True, "sm90"),
        gradients(False, "sm90"),
        gradients(False, "portable"),
    )
    for ours, first, second in zip(found, clean, again):
        assert (
            bool(ours.isfinite().all())
            and torch.equal(ours[:, 0], first[:, 0])
            and not torch.equal(first, second)
        )
        for tile in (slice(0, 128), slice(128, 256), slice(256, rows)):
            assert any(torch.equal(ours[:, 1, tile], t[:, 1, tile]) for t in (first, second))
    (d_query, d_key, d_value), (first, _, _), (second, *others) = found, clean, again
    assert torch.equal(d_query[:, 1, :128], first[:, 1, :128]) and torch.equal(
        d_query[:, 1, 128:], second[:, 1, 128:]
    )
    for ours, theirs in zip((d_key, d_value), others):
        assert torch.equal(ours[:, 1, :128], theirs[:, 1, :128])
    assert (
        not d_query[:, :, query_row].any()
        and not d_key[:, :, key_row].any()
        and not d_value[:, :, key_row].any()
    )


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_masked_backward_computes_requested_gradients(wanted: tuple[int, ...]) -> None:
    """The fused backward runs for any of them, because no other kernel has masks alone."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 140, 64, dtype=torch.bfloat16) for _ in range(3)]
    keywords: dict[str, Any] = {
        "attn_mask": torch.rand(140, 140) > 0.5,
        "dropout_p": 0.2,
        "dropout_seed": 3,
        "backend": "cuda",
    }

    def gradients(of: tuple[int, ...]) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_(i in of) for i, t in enumerate(inputs)]
        out = pt.attention(*leaves, **keywords)
        return list(torch.autograd.grad(out.float().square().sum(), [leaves[i] for i in of]))

    every = gradients((0, 1, 2))
    before = torch.ops.pytransformer_C.emulator_products(True)
    assert all(torch.equal(x, every[i]) for x, i in zip(gradients(wanted), wanted))
    assert torch.ops.pytransformer_C.emulator_products(True) == before  # no portable kernel


def test_visible_nan_reaches_every_row_that_sees_it() -> None:
    """The tile is computed twice; other heads are unaffected."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 140, 64, dtype=torch.float16) for _ in range(3))
    mask = torch.rand(1, 1, 140, 140) > 0.5
    mask[..., 0] = True
    value[:, 1, 30] = torch.nan
    out = pt.attention(query, key, value, attn_mask=mask, backend="cuda")
    assert bool(out[:, 1][mask[:, 0, :, 30]].isnan().all()) and bool(out[:, 0].isfinite().all())


@pytest.mark.parametrize("schedule", [1], indirect=True)
def test_small_float16_weights_count(schedule: int) -> None:
    """Weights below 2^-24 matter for a large dP, as in these heavy-tailed problems."""
    report = fuzz("attention", ["cuda"], 5, [3147, 3718, 4566, 4680, 5367], stop_after=5)
    assert not report.failures and report.cases == 5, "\n".join(report.failures)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bias_tiles_equal_loads(head_dim: int) -> None:
    """A bias in rows that TMA can address gives the bits of the same bias in other rows."""
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    generator = torch.Generator().manual_seed(head_dim)
    query, key, value = (draw(1, 1, n, head_dim).bfloat16() for n in (140, 200, 200))
    bias = draw(1, 1, 140, 200).half()
    bias.masked_fill_(draw(1, 1, 140, 200) > 1, -torch.inf)
    bias[0, 0, 5, 17], bias[0, 0, 70, 199] = torch.inf, torch.nan
    in_pairs = draw(1, 1, 140, 202).half()[..., :200].copy_(bias)
    segments = {"query_segments": torch.arange(140) // 50, "key_segments": torch.arange(200) // 60}
    for keywords in (
        {"causal": "bottom_right", "window": (90, 40), "softcap": 5.0},
        {"attn_mask": draw(1, 1, 140, 200) > -0.5, "dropout_p": 0.2, "dropout_seed": 3},
        {"attn_mask": in_blocks(draw, (1, 1, 140, 200), 128, 128)},
        {name: ids[None] for name, ids in segments.items()},
    ):
        tiles, loads = (
            pt.attention(
                query, key, value, bias=b, **keywords, return_lse=True, backend="cuda", strict=True
            )
            for b in (bias, in_pairs)
        )
        for a, b in zip(tiles, loads):
            assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("mask", ["none", "padding", "floating", "tiles"])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_starts_select_a_tile_of_a_larger_problem(causal: str, mask: str) -> None:
    """KV tiles begin at dropout groups before the first key, as do words of key padding."""
    check_starts("cuda", causal, torch.float16, mask)


@pytest.mark.parametrize("schedule", [1], indirect=True)
def test_packed_dropout_equals_padded(schedule: int) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (
        torch.randn(n, 2, 64, generator=generator).bfloat16() for n in (230, 300, 300)
    )
    offsets = (torch.tensor([0, 150, 150, 230]), torch.tensor([0, 37, 140, 300]))
    keywords = {
        "bias": pt.AlibiBias(torch.tensor([0.1, 0.4])),
        "dropout_p": 0.3,
        "dropout_seed": 5,
        "softcap": 4.0,
    }
    check_packed((query, key, value, *offsets, 150, 160), keywords, "cuda")


def test_three_consumers_give_the_bits_of_two() -> None:
    """Packed sequences whose mean fills three consumers equal padded ones with two."""
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(n, 2, 64, generator=generator).half() for n in (330, 430, 430))
    offsets = (torch.tensor([0, 130, 330]), torch.tensor([0, 150, 430]))
    check_packed((query, key, value, *offsets, 200, 280), {"causal": "bottom_right"}, "cuda")


@pytest.mark.parametrize("schedule", [1], indirect=True)
def test_packed_wide_heads_equal_padded(schedule: int) -> None:
    """Tiles of 80 keys start at each packed sequence."""
    generator = torch.Generator().manual_seed(6)
    query, key, value = (
        torch.randn(n, h, d, generator=generator).bfloat16()
        for n, h, d in ((230, 2, 256), (400, 1, 256), (400, 1, 192))
    )
    offsets = (torch.tensor([0, 150, 150, 230]), torch.tensor([0, 75, 171, 400]))
    check_packed((query, key, value, *offsets, 150, 229), {"causal": "bottom_right"}, "cuda")


def test_random_problems_unordered() -> None:
    """Bounds-only problems run on the kernel that adds d_query across blocks.

    Equal bits are not required.
    """
    found, taken, numbers = [], 0, iter(range(10**6))
    while taken < FUZZ_CASES:
        problem = draw(FUZZ_SEED, number := next(numbers))
        terms = {"attn_mask", "bias", "segments", "softcap", "dropout_p"} & problem.features
        if (
            problem.dtype not in (torch.bfloat16, torch.float16)
            or terms
            or set(problem.wanted) != {"query", "key", "value"}
        ):
            continue
        problem.keywords["deterministic"] = False
        taken += 1
        found += [
            f"{number}: {w}"
            for w in judge(problem, problem.solve(), run(problem, "cuda"), "cuda")[1]
        ]
    assert found == []


def test_fused_backward_computes_fewer_products() -> None:
    """With all gradients, deterministic=False runs the fused backward: 5 products, not 7."""
    torch.manual_seed(2)
    tensors = [torch.randn(1, 1, n, 128).half() for n in (128, 256, 256)]
    counts = {}
    for deterministic, expected in ((True, 3), (False, 3), (True, 1), (False, 1)):
        inputs = [t.clone().requires_grad_(i < expected) for i, t in enumerate(tensors)]
        out = pt.attention(*inputs, deterministic=deterministic, backend="cuda")
        before = torch.ops.pytransformer_C.emulator_products()
        torch.autograd.grad(out.float().square().sum(), inputs[:expected])
        counts[deterministic, expected] = torch.ops.pytransformer_C.emulator_products() - before
    assert (
        counts[False, 3] < counts[True, 3]
        and counts[False, 1] == counts[True, 1] < counts[False, 3]
    )


def test_schedules_give_equal_bits() -> None:
    torch.manual_seed(1)
    inputs = [
        torch.randn(2, 2, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in (200, 150, 150)
    ]
    inputs.append(torch.randn(8, 2, requires_grad=True))
    runs = []
    for schedule in (1, 2):
        torch.ops.pytransformer_C.emulator_schedule(schedule)
        bias = pt.RelativePositionBias(inputs[3], False, 50)
        out = pt.attention(
            *inputs[:3], causal="top_left", bias=bias, dropout_p=0.1, dropout_seed=2, backend="cuda"
        )
        runs.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@pytest.mark.skipif(
    importlib.util.find_spec("pytransformer._C") is None,
    reason="_C was not built (_build_info.json says why)",
)
def test_explain_reports_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.zeros(1, 2, 40, 64, dtype=torch.float16)
    taken = pt.explain("attention", query, query, query, backend="cuda").notes[-1]
    assert taken.count("by the kernels for sm_90a") == 3
    wide = torch.zeros(1, 2, 40, 256, dtype=torch.float16)
    assert pt.explain("attention", wide, wide, wide, backend="cuda").notes[-1] == taken
    fused = "d_query, added across blocks, d_key and d_value by the kernels for sm_90a"
    visible = torch.ones(40, 40, dtype=torch.bool)
    masked = pt.explain("attention", query, query, query, attn_mask=visible, backend="cuda")
    assert masked.notes[-1] == taken.split("; ")[0] + f"; {fused}"
    for mask, more in (
        (torch.zeros(40, 20), "; d_mask by the kernels for sm_90a"),
        (torch.zeros(40, 21).bfloat16(), "; d_mask by the kernels for sm_90a"),
        (
            torch.zeros(2, 1, 24).half(),
            "; d_mask by the portable kernels: the gradient is a sum over queries or keys",
        ),
    ):
        key = torch.zeros(1, 2, mask.shape[-1], 64, dtype=torch.float16)
        assert (
            pt.explain("attention", query, key, key, attn_mask=mask, backend="cuda").notes[-1]
            == taken + more
        )
    for mask in (
        torch.zeros(40, 40, dtype=torch.float64),
        torch.zeros(40, 1),
        torch.zeros(40, 40).mT,
        torch.zeros(1601)[1:].view(40, 40),
    ):
        partly = pt.explain("attention", query, query, query, attn_mask=mask, backend="cuda").notes[
            -1
        ]
        assert (
            "forward by the kernels for sm_90a; d_query by the portable kernels: the backward"
            " kernels copy" in partly
        )
    unordered = pt.explain("attention", query, query, query, deterministic=False, backend="cuda")
    assert unordered.notes[-1].endswith(fused)
    ordered = pt.explain("attention", query, query, query, backend="cuda")
    assert unordered.extra_bytes["cuda"] - ordered.extra_bytes["cuda"] == 4 * 2 * 128 * 64
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
    assert "sm_90a" not in " ".join(
        pt.explain("attention", query, query, query, backend="cuda").notes
    )


def test_portable_kernels_run_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 and PYTRANSFORMER_CUDA_PATH=portable run no warpgroup product."""
    query, key = torch.randn(1, 1, 40, 64).half(), torch.randn(1, 1, 30, 64).half()
    products = torch.ops.pytransformer_C.emulator_products
    before = products()
    pt.attention(query.float(), key.float(), key.float(), backend="cuda")
    assert products() == before
    ours = pt.attention(query, key, key, backend="cuda")
    assert products() > before
    before = products()
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
    theirs = pt.attention(query, key, key, backend="cuda")
    assert products() == before
    assert (ours.float() - theirs.float()).norm() <= 2e-3 * theirs.float().norm()
