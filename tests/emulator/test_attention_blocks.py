# SPDX-License-Identifier: Apache-2.0
"""Block masks on the emulated backend "cuda": cost, lists, errors.

Values and gradients are in attention_problems.py and the fuzzer.
"""

from __future__ import annotations

from typing import Any

import block_list_problems
import pytest
import torch
from attention_problems import in_blocks
from run_problems import Share
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._core import fast_path
from pytransformer.ops._problem.attention import BLOCKS
from pytransformer.testing import bounds, oracle
from support import fuzz_attention
from support.draw_attention import draw
from support.fuzz import fuzz
from support.raw_calls import arguments

FUZZ_CASES, FUZZ_SEED = 24, 29
BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("emulated", "one_thread")


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def results(inputs: list[Tensor], **keywords: Any) -> list[Tensor]:
    """Return out and the gradients of all inputs."""
    inputs = [t.detach().clone().requires_grad_() for t in inputs]
    out = pt.attention(*inputs, **keywords, backend="cuda", strict=True)
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]


def products(inputs: list[Tensor], **keywords: Any) -> tuple[list[Tensor], int]:
    """Return out, the gradients and the number of matrix products."""
    count = lambda: sum(
        torch.ops.pytransformer_C.emulator_products(warps) for warps in (False, True)
    )
    before = count()
    with fast_path.off():  # the second call of a key computes twice, to record it
        found = results(inputs, **keywords)
    return found, count() - before


def test_empty_blocks_cost_no_products() -> None:
    """Two documents as full blocks give the bits and the products of two sequences.

    The contents of other blocks do not matter.
    """
    torch.manual_seed(0)
    inputs = [normal(2, 1, 128, 32) for _ in range(3)]
    ids = torch.arange(256) // 128
    mask = pt.BlockMask.from_dense(ids[:, None] == ids, block_size=128)
    assert mask.share == 0.5
    joined = [t.transpose(0, 1).flatten(1, 2)[None] for t in inputs]
    apart, fewest = products(
        inputs, bias=pt.AlibiBias(torch.zeros(1))
    )  # the kernels with score_mod
    together, made = products(joined, attn_mask=mask)
    assert made == fewest > 0
    for one, two in zip(together, apart):
        assert torch.equal(one, two.transpose(0, 1).flatten(1, 2)[None])
    poisoned = [t.clone() for t in joined]
    for t in poisoned[1:]:
        t[..., 128:, :] = torch.nan
    for clean, other in zip(together, results(poisoned, attn_mask=mask)):
        assert torch.equal(clean[..., :128, :], other[..., :128, :])


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("head_size", [32, 256])
@pytest.mark.parametrize(("size", "forward"), [(128, True), ((128, 64), False)])
def test_sm90_forward_walks_block_lists(size: Any, forward: bool, head_size: int) -> None:
    """The sm_90a forward does if a block's rows of bits fit TMA; else the portable kernels run."""
    generator = torch.Generator().manual_seed(1)
    rows, keys = (size, size) if isinstance(size, int) else size
    mask = in_blocks(lambda *s: torch.randn(*s, generator=generator), (1, 1, 300, 520), rows, keys)
    leaves = [normal(1, 1, n, head_size).requires_grad_() for n in (300, 520, 520)]
    grad_out = normal(1, 1, 300, head_size)
    count = torch.ops.pytransformer_C.emulator_products
    before = count()
    out = pt.attention(*leaves, attn_mask=mask, backend="cuda", strict=True)
    assert (count() > before) == forward
    found = {
        "out": out,
        **dict(zip(("query", "key", "value"), torch.autograd.grad(out, leaves, grad_out))),
    }
    solution = oracle.solve(
        *(t.detach() for t in leaves), grad_out, None, attn_mask=mask.to_dense()
    )
    assert not [str(c) for c in bounds.check(solution, found, BF16, "zero_mean") if not c.ok]


@pytest.mark.usefixtures("sm90")
def test_empty_blocks_cost_no_sm90_products() -> None:
    """Forward of two documents as full blocks equals two sequences, in bits and products."""
    torch.manual_seed(0)
    inputs = [normal(2, 1, 256, 32) for _ in range(3)]
    ids = torch.arange(512) // 256
    joined = [t.transpose(0, 1).flatten(1, 2)[None] for t in inputs]
    dense = ids[:, None] == ids
    count, made, found = torch.ops.pytransformer_C.emulator_products, [], []
    same = torch.zeros(2, 256, dtype=torch.int64)  # the kernels with an elementwise mask
    for given, keywords in (
        (inputs, {"query_segments": same, "key_segments": same}),
        (joined, {"attn_mask": pt.BlockMask.from_dense(dense, block_size=128)}),
        (joined, {"attn_mask": dense}),
    ):
        with fast_path.off(), torch.no_grad():
            before = count()
            found.append(pt.attention(*given, **keywords, backend="cuda", strict=True))
            made.append(count() - before)
    assert made[0] == made[1] == made[2] > 0
    assert torch.equal(found[1], found[0].transpose(0, 1).flatten(1, 2)[None]) and torch.equal(
        found[1], found[2]
    )


def test_empty_masks_give_zeros() -> None:
    mask = pt.BlockMask.from_dense(torch.zeros(130, 200, dtype=torch.bool), block_size=128)
    inputs = [normal(1, 2, n, 32) for n in (130, 200, 200)]
    found, made = products(inputs, attn_mask=mask)
    assert made == 0 and all(not t.count_nonzero() for t in found)


@pytest.mark.parametrize("problem", list(block_list_problems.problems()), ids=str)
def test_bad_lists_read_nothing_outside(problem: block_list_problems.Problem) -> None:
    assert block_list_problems.wrong(problem) == []


def test_flex_masks_equal_block_masks() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    made = flex.create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 150), None, None, 300, 300, device="cpu"
    )
    inputs = [normal(1, 1, 300, 32, dtype=torch.float32) for _ in range(3)]
    keywords = {"causal": "top_left", "window": (149, None)}
    for ours, want in zip(results(inputs, attn_mask=made), results(inputs, **keywords)):
        torch.testing.assert_close(ours, want)


def test_masks_of_equal_shape_are_not_confused() -> None:
    """Each call reads its mask's tensors; a recorded program stores none of them."""
    generator = torch.Generator().manual_seed(1)
    masks = [
        in_blocks(lambda *s: torch.randn(*s, generator=generator), (1, 2, 140, 260), 128, 64)
        for _ in range(2)
    ]
    inputs = [normal(1, 2, n, 64) for n in (140, 260, 260)]
    expected = []
    with fast_path.off():
        expected = [results(inputs, attn_mask=mask) for mask in masks]
    for _ in range(3):
        for mask, want in zip(masks, expected):
            assert all(
                torch.equal(ours, their)
                for ours, their in zip(results(inputs, attn_mask=mask), want)
            )
    assert not torch.equal(expected[0][0], expected[1][0])


# ---- unsupported calls and explain


def explained(size: Any, dtype: torch.dtype = BF16, head_dim: int = 64) -> Any:
    query, mask = (
        torch.zeros(1, 1, 300, head_dim, dtype=dtype),
        torch.ones(300, 300, dtype=torch.bool).tril(),
    )
    return pt.explain(
        "attention",
        query,
        query,
        query,
        attn_mask=pt.BlockMask.from_dense(mask, block_size=size),
        backend="cuda",
    )


@pytest.mark.parametrize(
    ("size", "dtype", "head_dim", "least"),
    [
        (128, BF16, 64, None),
        ((128, 64), torch.float16, 128, None),
        (512, BF16, 256, None),
        (64, BF16, 64, "128 x 64"),
        ((128, 32), BF16, 64, "128 x 64"),
        (64, BF16, 256, None),
        (32, BF16, 256, "64 x 64"),
        (32, torch.float32, 64, None),
        (32, torch.float32, 256, None),
    ],
)
def test_blocks_smaller_than_a_tile_give_a_reason(
    size: Any, dtype: torch.dtype, head_dim: int, least: str | None
) -> None:
    reason = explained(size, dtype, head_dim).reasons["cuda"]
    assert (
        reason is None
        if least is None
        else f"{least} pairs or more" in reason and "block_size of 128" in reason
    )


def test_explain_reports_the_kernel_and_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(
        "66.7% of the 9 blocks of 128 x 128 pairs run" in note for note in explained(128).notes
    )
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "sm90")
    (note,) = (note for note in explained(128).notes if note.startswith("cuda:"))
    assert (
        "forward by the kernels for sm_90a; d_query by the portable kernels: block masks are lists"
        in note
        and "66.7%" in note
    )


def test_binding_checks_shapes() -> None:
    query, lse = torch.zeros(1, 2, 200, 64, dtype=BF16), torch.zeros(1, 2, 200)
    mask = pt.BlockMask.from_dense(torch.ones(200, 200, dtype=torch.bool).tril(), block_size=128)
    dense = torch.ones(1, 1, 200, 200, dtype=torch.bool)

    raw = cuda_library.raw("attention_fwd")
    given: dict[str, Any] = {
        "query": query, "key": query, "value": query, "out": torch.empty_like(query), "lse": lse,
        "left": -1, "right": -1, "num_queries": 200, "num_keys": 200, "scale": 1.0,
        **dict(zip(BLOCKS, mask.blocks, strict=True)),
    }  # fmt: skip
    call = lambda **changed: raw(*arguments(raw, **given | changed))

    call()
    for message, wrong in {
        r"\(B or 1, Hq or 1, 3\)": {"block_offsets": mask.blocks.offsets[..., 1:].contiguous()},
        r"offsets of a block mask": {"key_block_offsets": mask.blocks.key_offsets.repeat(1, 3, 1)},
        r"must be contiguous int32": {"block_entries": mask.blocks.entries.long()},
        r"entries of a block mask": {"key_block_entries": mask.blocks.key_entries.flatten()},
        r"blocks of 64 x 128 pairs; expected 128 x 64 or more": {
            "block_bits": mask.blocks.bits[:, :64].contiguous()
        },
        r"blocks of 96 x 128 pairs; expected powers of two": {
            "block_bits": mask.blocks.bits[:, :96].contiguous()
        },
        r"goes with no other mask": {"mask": dense},
        r"a key_start that is a multiple of 32": {"key_start": 40},
    }.items():
        with pytest.raises(RuntimeError, match=message):
            call(**wrong)


# ---- random problems


def test_random_problems_with_block_masks(
    schedule: int, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These are the fuzzer's problems with a block mask; some must use list-walking kernels."""
    drawn = ((n, draw(FUZZ_SEED, n)) for n in range(schedule * 1000, schedule * 1000 + 1000))
    fits = lambda problem: problem.block_size and problem.dtype != torch.float64
    found = share([n for n, problem in drawn if fits(problem)][:FUZZ_CASES])
    given: list[tuple[int, int]] = []  # the block sizes of the masks in the calls
    inner = fuzz_attention.in_blocks
    monkeypatch.setattr(fuzz_attention, "in_blocks", lambda *a: (given.append(a[2]), inner(*a))[1])
    report = fuzz("attention", ["cuda"], FUZZ_SEED, found, stop_after=3)
    print(report.table())
    assert not report.failures, "\n".join(report.failures)
    assert (
        report.cases - report.declined["cuda"]
        == len(found)
        == report.features["blocks"]
        >= FUZZ_CASES // 3
    )
    assert len(given) >= len(found) and len(set(given)) > 1
