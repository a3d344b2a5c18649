# SPDX-License-Identifier: Apache-2.0
"""Block masks: constructors, errors, and attention against float64 and against the dense mask."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pytransformer as pt
from pytransformer import BlockMask
from pytransformer.ops import block_mask as source
from pytransformer.ops._block_lists import PAIRS_AT_ONCE
from pytransformer.ops._core import native
from pytransformer.ops._problem.blocks import entry_rows
from pytransformer.ops.attention import attention_op
from pytransformer.testing import bounds, oracle

flex = pytest.importorskip("torch.nn.attention.flex_attention")
BACKENDS = ["reference"] + ["cpu"] * (native.why_not("attention_fwd") is None)
L = 321  # not a multiple of a block


def pairs(rule: Callable[[Tensor, Tensor], Tensor], length: int = L) -> Tensor:
    return rule(torch.arange(length)[:, None], torch.arange(length))


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q // (50 + 20 * h) == k // (50 + 20 * h)) & (q - k < 40)


PATTERNS: dict[str, tuple[Callable[[], BlockMask], Callable[[], Tensor]]] = {
    "sliding window": (
        lambda: BlockMask.sliding_window(L, (70, 10)),
        lambda: pairs(lambda i, j: (j >= i - 70) & (j <= i + 10)),
    ),
    "strided": (
        lambda: BlockMask.strided(L, 17),
        lambda: pairs(lambda i, j: (j <= i) & ((i - j < 17) | ((i - j) % 17 == 0))),
    ),
    "strided both ways": (
        lambda: BlockMask.strided(L, 90, causal=False, block_size=32),
        lambda: pairs(lambda i, j: ((i - j).abs() < 90) | ((i - j) % 90 == 0)),
    ),
    "longformer": (
        lambda: BlockMask.longformer(L, 40, 2, block_size=32),
        lambda: pairs(lambda i, j: ((i - j).abs() <= 20) | (i < 2) | (j < 2)),
    ),
    "longformer, global tokens by place": (
        lambda: BlockMask.longformer(L, 64, [3, 200]),
        lambda: pairs(
            lambda i, j: ((i - j).abs() <= 32) | (i == 3) | (i == 200) | (j == 3) | (j == 200)
        ),
    ),
    "function by head": (
        lambda: BlockMask.from_function(documents, None, 2, L, L, block_size=(32, 64)),
        lambda: documents(
            torch.zeros(()),
            torch.arange(2)[:, None, None],
            torch.arange(L)[:, None],
            torch.arange(L),
        ),
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(
    "rows, keys",
    [(range(64, 192), range(128)), (range(5, 230), range(31, 290)), (range(300, L), range(3))],
)
def test_sliced_mask_equals_the_mask_of_the_slice(name: str, rows: range, keys: range) -> None:
    """Block boundaries may lie anywhere; no listed block is empty."""
    mask = PATTERNS[name][0]()
    heads = range(mask.shape[1] - 1, mask.shape[1])
    expected = mask.to_dense()[:, heads.start :, rows.start : rows.stop, keys.start : keys.stop]
    found = mask.part(heads, rows, keys)
    assert found.shape == tuple(expected.shape)
    for got, want in zip(
        found.blocks, BlockMask.from_dense(expected, block_size=mask.block_size).blocks
    ):
        assert torch.equal(got, want)


def test_slices_outside_the_mask_raise() -> None:
    with pytest.raises(
        ValueError,
        match=r"keys must be a range within range\(321\), of step 1, got range\(0, 322\)",
    ):
        BlockMask.strided(L, 17).part(range(1), range(10), range(322))


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns_equal_their_dense_masks(name: str) -> None:
    make, rule = PATTERNS[name]
    mask = make()
    assert torch.equal(mask.to_dense(), rule().expand(mask.shape))


def test_big_bird_equals_its_definition() -> None:
    mask = BlockMask.big_bird(
        640, heads=2, window_blocks=3, global_blocks=1, random_blocks=2, seed=4
    )
    small = mask.to_dense()[0, :, ::64, ::64]
    assert torch.equal(
        mask.to_dense()[0], small.repeat_interleave(64, 1).repeat_interleave(64, 2)
    )  # full blocks
    q, k = torch.arange(10)[:, None], torch.arange(10)
    always = ((q - k).abs() <= 1) | (q == 0) | (k == 0)
    assert bool(small[:, always].all()) and mask.blocks.bits.shape[0] == 0
    more = (small & ~always)[:, 1:].sum(-1)
    assert int(more.max()) == 2 and not torch.equal(small[0], small[1])
    again = BlockMask.big_bird(
        640, heads=2, window_blocks=3, global_blocks=1, random_blocks=2, seed=4
    )
    assert torch.equal(again.to_dense(), mask.to_dense())


def random_masks() -> list[Tensor]:
    torch.manual_seed(5)
    return [
        torch.rand(2, 3, L, L + 77) < 0.001,
        torch.rand(2, 1, L, L + 77) < 0.5,
        torch.rand(1, 3, L, L + 77) < 0.002,
        torch.ones(1, 1, L, L + 77, dtype=torch.bool),
        torch.zeros(2, 3, L, L + 77, dtype=torch.bool),
    ]


@pytest.mark.parametrize("block_size", (32, 64, 512, (32, 128), (128, 32)))
def test_dense_mask_round_trips(block_size: Any) -> None:
    for dense in random_masks():
        mask = BlockMask.from_dense(dense, block_size=block_size)
        assert torch.equal(mask.to_dense(), dense)
        b = mask.blocks
        forward, backward = set(), set()
        for offsets, entries, found in (
            (b.offsets, b.entries, forward),
            (b.key_offsets, b.key_entries, backward),
        ):
            lists = offsets.shape[2] - 1
            rows, entry = entry_rows(offsets)
            for row, (column, place) in zip(rows.tolist(), entries[entry].tolist()):
                outer, inner = divmod(row, lists)
                found.add(
                    (outer, inner, column, place)
                    if found is forward
                    else (outer, column, inner, place)
                )
        assert forward == backward and len(forward) == len(
            b.entries
        )  # the transpose lists the same blocks and bits


def test_and_and_or_equal_those_of_dense_masks() -> None:
    masks = random_masks()
    for x in masks:
        for y in masks:
            a, b = BlockMask.from_dense(x), BlockMask.from_dense(y)
            assert torch.equal((a & b).to_dense(), x & y) and torch.equal((a | b).to_dense(), x | y)
    rest = BlockMask.from_dense(~masks[1])
    whole = BlockMask.from_dense(masks[1]) | rest
    # Known full blocks need no read of their bits.
    assert whole.share == 1.0 and whole.blocks.bits.shape[0] == 0
    assert (BlockMask.from_dense(masks[1]) & rest).share == 0.0


def test_default_block_size_depends_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> list[BlockMask]:
        return [
            BlockMask.from_dense(torch.ones(9, 9, dtype=torch.bool)),
            BlockMask.from_function(lambda b, h, q, k: q >= k, None, None, 9, 9),
            BlockMask.sliding_window(9, (1, 1)),
            BlockMask.strided(9, 2),
            BlockMask.longformer(9, 2, 1),
            BlockMask.big_bird(9),
        ]

    assert {mask.block_size for mask in made()} == {(64, 64)}
    assert source._sizes(None, "cuda:1") == source._sizes(None, torch.device("cuda")) == (128, 128)
    monkeypatch.setitem(source.BLOCK_SIZE, "cpu", 32)
    assert {mask.block_size for mask in made()} == {(32, 32)}
    assert BlockMask.strided(9, 2, block_size=128).block_size == (128, 128)


def test_mask_function_is_evaluated_in_parts() -> None:
    asked = []

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        asked.append(1)
        return q >= k

    mask = BlockMask.from_function(mod, None, None, 4096, 4096)
    assert len(asked) == 4096 * 4096 // PAIRS_AT_ONCE
    assert mask.share == pytest.approx((64 + 1) / (2 * 64))


def test_flex_masks_are_converted_once_and_only_partial_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = flex.create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 300), 2, None, 512, 700, device="cpu"
    )
    asked: list[int] = []
    mod = made.mask_mod
    made.mask_mod = lambda b, h, q, k: (asked.append(1), mod(b, h, q, k))[1]
    evaluated: list[int] = []
    inner = source.evaluate

    def counting(f: Any, shape: Any, sizes: Any, device: Any, candidates: Tensor) -> Any:
        evaluated.append(candidates.numel())
        return inner(f, shape, sizes, device, candidates)

    monkeypatch.setattr(source, "evaluate", counting)
    mask = BlockMask.from_flex(made)
    i, j = torch.arange(512)[:, None], torch.arange(700)
    assert torch.equal(mask.to_dense(), ((i >= j) & (i - j < 300)).expand(2, 1, 512, 700))
    assert evaluated == [int(made.kv_num_blocks.sum())] and asked
    assert BlockMask.from_flex(made) is mask and len(evaluated) == 1


# ---- attention


def run(t: dict[str, Tensor], grad_out: Tensor, **keywords: Any) -> dict[str, Tensor]:
    leaves = {name: x.detach().requires_grad_() for name, x in t.items()}
    out, lse = pt.attention(**leaves, return_lse=True, strict=True, **keywords)
    return {"out": out, "lse": lse} | dict(
        zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad_out))
    )


KEYWORDS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal lengths": dict(causal="bottom_right", query_lengths=torch.tensor([L, 77]),
        key_lengths=torch.tensor([301, 190])),
    "window bias": dict(window=(150, 40), bias=torch.randn(1, 2, L, L)),
    "segments softcap": dict(query_segments=torch.arange(L).expand(2, L) // 40 % 3,
                             key_segments=torch.arange(L).expand(2, L) // 90 % 3, softcap=10.0),
    "dropout alibi": dict(dropout_p=0.3, dropout_seed=11,
        bias=pt.AlibiBias(torch.tensor([0.1, 0.01]))),
}  # fmt: skip


@pytest.mark.parametrize("keywords", KEYWORDS)
@pytest.mark.parametrize("name", [*PATTERNS, "big bird", "own bits"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_and_gradients_within_the_bound(backend: str, name: str, keywords: str) -> None:
    torch.manual_seed(len(name))
    if name == "big bird":
        mask = BlockMask.big_bird(L, heads=2, random_blocks=1, block_size=32)
    elif name == "own bits":
        mask = BlockMask.from_dense(torch.rand(2, 2, L, L) < 0.005, block_size=(64, 32))
    else:
        mask = PATTERNS[name][0]()
    dtype = torch.bfloat16 if (len(name) + len(keywords)) % 3 == 0 else torch.float32
    t = {n: torch.randn(2, h, L, 16).to(dtype) for n, h in (("query", 2), ("key", 1), ("value", 1))}
    grad_out = torch.randn(2, 2, L, 16).to(dtype)
    exact = oracle.solve(**t, grad_out=grad_out, attn_mask=mask.to_dense(), **KEYWORDS[keywords])
    found = run(t, grad_out, attn_mask=mask, backend=backend, **KEYWORDS[keywords])
    wrong = [str(c) for c in bounds.check(exact, found, dtype) if not c.ok]
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_few_queries_and_hidden_nan(backend: str) -> None:
    dense = torch.rand(2, 1, 5, 900).repeat_interleave(1, 3) < 0.05
    dense[..., 300:600] = False
    t = {
        "query": torch.randn(2, 4, 5, 24),
        "key": torch.randn(2, 2, 900, 24),
        "value": torch.randn(2, 2, 900, 24),
    }
    t = {name: x.double() for name, x in t.items()}
    grad_out = torch.randn(2, 4, 5, 24).double()
    expected = run(t, grad_out, attn_mask=dense, backend="reference")
    t["key"][:, :, 300:600] = t["value"][:, :, 300:600] = float("nan")
    found = run(t, grad_out, attn_mask=BlockMask.from_dense(dense), backend=backend)
    for n in expected:
        torch.testing.assert_close(found[n], expected[n])


def test_flex_masks_in_attention() -> None:
    made = flex.create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < 300), None, None, 512, 512, device="cpu"
    )
    q = torch.randn(1, 2, 512, 16)
    out = pt.attention(q, q, q, attn_mask=made)
    torch.testing.assert_close(
        out, pt.attention(q, q, q, attn_mask=BlockMask.from_flex(made).to_dense())
    )


def test_weights_of_chosen_rows_and_heads() -> None:
    mask = BlockMask.from_dense(torch.rand(1, 2, L, L) < 0.02)
    q, k = torch.randn(2, 2, L, 8), torch.randn(2, 2, L, 8)
    _, lse = pt.attention(q, k, k, attn_mask=mask, return_lse=True)
    for chosen in ({}, {"rows": [3, 200, 320]}, {"heads": [1], "rows": [64]}):
        found = pt.attention_weights(q, k, lse, attn_mask=mask, **chosen)
        torch.testing.assert_close(
            found, pt.attention_weights(q, k, lse, attn_mask=mask.to_dense(), **chosen)
        )


def test_explain_reports_the_visible_share() -> None:
    mask = BlockMask.sliding_window(1024, (64, 64))
    q = torch.randn(1, 1, 1024, 8)
    found = pt.explain("attention", q, q, q, attn_mask=mask)
    assert any(
        "17.97% of" in n or "18.0% of the 256 blocks of 64 x 64 pairs run" in n for n in found.notes
    ), found.notes
    for name in ("cuda", "torch"):
        if name in found.reasons:
            assert found.reasons[name], name


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the backend cpu is not built")
def test_compiles_to_one_graph() -> None:
    mask = BlockMask.longformer(200, 40, 2)

    def f(q: Tensor) -> Tensor:
        return pt.attention(q, q, q, attn_mask=mask).square()

    q = torch.randn(1, 2, 200, 16, requires_grad=True)
    found = torch.compile(f, backend="aot_eager", fullgraph=True)(q)
    torch.testing.assert_close(found, f(q))
    for one, two in zip(torch.autograd.grad(found.sum(), q), torch.autograd.grad(f(q).sum(), q)):
        torch.testing.assert_close(one, two)


def test_second_derivatives_use_the_reference() -> None:
    mask = BlockMask.from_dense(torch.rand(40, 40) < 0.3, block_size=32)
    t = [torch.randn(1, 1, 40, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(
        lambda *x: pt.attention(*x, attn_mask=mask).mean(2), t, fast_mode=True
    )


def test_vmap() -> None:
    mask = BlockMask.strided(70, 9)
    q = torch.randn(3, 1, 2, 70, 8)
    found = torch.func.vmap(lambda x: pt.attention(x, x, x, attn_mask=mask))(q)
    torch.testing.assert_close(found[1], pt.attention(q[1], q[1], q[1], attn_mask=mask))


# ---- errors


def broken(**changes: Any) -> Callable[[], BlockMask]:
    mask = BlockMask.sliding_window(200, (30, 30))
    return lambda: BlockMask(
        mask.shape,
        mask.blocks._replace(**{n: f(getattr(mask.blocks, n)) for n, f in changes.items()}),
    )


def changed(place: tuple[int, ...], value: int) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t[place] = value
        return t

    return change


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: BlockMask.sliding_window(200, (3, 3), block_size=48),
            "block size must be one or two of 32, 64, 128, 256, 512, got 48",
        ),
        (lambda: BlockMask.sliding_window(200, (-1, 3)), "window must be ints of at least 0"),
        (lambda: BlockMask.strided(200, 0), "stride must be an int of at least 1, got 0"),
        (lambda: BlockMask.longformer(200, 10, [200]), "global_tokens must be between 0 and 199"),
        (lambda: BlockMask.from_dense(torch.ones(3, 4)), "mask must be bool"),
        (broken(entries=changed((0, 0), 4)), "entries names block 4; there are 4"),
        (
            broken(entries=changed((0, 1), 99)),
            "entries names bits 99; there are [0-9]+ partial blocks",
        ),
        (broken(key_entries=changed((0, 0), -1)), "key_entries names block -1"),
        (broken(offsets=changed((0, 0, 1), 9)), "offsets must rise"),
        (
            broken(offsets=lambda t: t[..., 1:]),
            r"offsets must have shape \(1, 1, 5\), got \(1, 1, 4\)",
        ),
        (broken(entries=lambda t: t.flip(0)), "entries of a list must rise"),
        (broken(bits=lambda t: t.long()), "bits must be an int32 tensor, got torch.int64"),
        (
            lambda: BlockMask.strided(200, 3) & BlockMask.strided(201, 3),
            "lengths and block sizes must be equal",
        ),
        (
            lambda: BlockMask.strided(200, 3) | BlockMask.strided(200, 3, block_size=32),
            "lengths and block sizes must be equal",
        ),
    ],
)
def test_bad_block_masks_are_named_in_the_error(
    make: Callable[[], BlockMask], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_shapes_that_do_not_match_the_call_raise() -> None:
    q = torch.randn(2, 3, 200, 8)
    for mask in (
        BlockMask.strided(201, 3),
        BlockMask.from_dense(torch.ones(2, 2, 200, 200, dtype=torch.bool)),
    ):
        with pytest.raises(ValueError, match="attn_mask must be a block mask of"):
            pt.attention(q, q, q, attn_mask=mask)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the backend cpu is not built")
def test_kernel_checks_block_lists() -> None:
    """Tensors changed after the Python check cannot make the kernel read outside its inputs."""
    mask = BlockMask.sliding_window(200, (30, 30))
    q = torch.randn(1, 1, 200, 8)
    for name, place, value in (
        ("entries", (0, 0), 4),
        ("entries", (0, 1), 99),
        ("offsets", (0, 0, 4), 99),
    ):
        bad = BlockMask(mask.shape, mask.blocks)
        bad.blocks = mask.blocks._replace(
            **{name: changed(place, value)(getattr(mask.blocks, name))}
        )
        with pytest.raises(RuntimeError, match="ValueError: block_"):
            pt.attention(q, q, q, attn_mask=bad, backend="cpu")


def test_repr_and_to_device() -> None:
    mask = BlockMask.sliding_window(128, (0, 0))
    assert (
        repr(mask)
        == "BlockMask(shape=(1, 1, 128, 128), blocks of 64 x 64: 50.0% run, 2 of them hide some"
        " pairs, cpu)\n▒ \n ▒"
    )
    assert mask.to("cpu").share == mask.share and str(mask.to("meta").device) == "meta"
    assert attention_op.num_tensors >= 18


MEMORY = """
import sys, torch
from pytransformer import BlockMask, attention
from pytransformer.cli.benchmark.memory import measure_rise
torch.set_num_threads(1)
length = int(sys.argv[1])
def step(length):
    leaves = [torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3)]
    mask = BlockMask.sliding_window(length, (256, 256))
    attention(*leaves, attn_mask=mask).sum().backward()
    return leaves
step(512)
print(measure_rise(lambda: step(length)))
"""


@pytest.mark.skipif("cpu" not in BACKENDS, reason="the backend cpu is not built")
def test_memory_is_linear_at_65536_tokens() -> None:
    """Twice the tokens take twice the bytes. (L, L) booleans alone would need 4 GiB."""
    from pytransformer.cli.benchmark.memory import ENVIRONMENT, why_not

    if (reason := why_not()) is not None:
        pytest.skip(reason)

    def peak(length: int) -> int:
        command = [sys.executable, "-c", MEMORY, str(length)]
        return int(
            subprocess.run(
                command,
                env={**os.environ, **ENVIRONMENT},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )

    small, large = peak(32768), peak(65536)
    assert large < 2.2 * small, (small, large)
    assert (
        large < 24 * 65536 * 64 * 4
    )  # inputs, their gradients, out and its gradient are eight of these; 16 were measured
