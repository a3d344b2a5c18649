# SPDX-License-Identifier: Apache-2.0
"""The emulator against the layouts of the PTX ISA manual, derived independently of the kernels.

Kernel and emulator share assumptions: if both were wrong, every kernel test would pass. The tables
below come from the manual's figures, and plain matrix products give the results.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

Answers = dict[str, Tensor]
SHAPES_OF = Path(__file__).resolve().parents[2] / "csrc" / "cuda" / "tile" / "product_shapes.h"
SHAPES = re.compile(r"\bproduct_of_(?:tiles|weights)\(\d")  # in the table of shapes

# mma.m16n8k16, figures "layout for the matrix fragment": lane -> the (row, column) of each of its
# elements, in order.
A_FRAGMENT = {
    0: [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)],
    1: [(0, 2), (0, 3), (8, 2), (8, 3), (0, 10), (0, 11), (8, 10), (8, 11)],
    5: [(1, 2), (1, 3), (9, 2), (9, 3), (1, 10), (1, 11), (9, 10), (9, 11)],
    31: [(7, 6), (7, 7), (15, 6), (15, 7), (7, 14), (7, 15), (15, 14), (15, 15)],
}
B_FRAGMENT = {
    0: [(0, 0), (1, 0), (8, 0), (9, 0)],
    1: [(2, 0), (3, 0), (10, 0), (11, 0)],
    5: [(2, 1), (3, 1), (10, 1), (11, 1)],
    31: [(6, 7), (7, 7), (14, 7), (15, 7)],
}
C_FRAGMENT = {
    0: [(0, 0), (0, 1), (8, 0), (8, 1)],
    1: [(0, 2), (0, 3), (8, 2), (8, 3)],
    5: [(1, 2), (1, 3), (9, 2), (9, 3)],
    31: [(7, 6), (7, 7), (15, 6), (15, 7)],
}
# wgmma.m64nNk16, figure "fragment layout for the accumulator D": thread -> the (row, column) of its
# first six elements.
D_FRAGMENT = {
    0: [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9)],
    3: [(0, 6), (0, 7), (8, 6), (8, 7), (0, 14), (0, 15)],
    4: [(1, 0), (1, 1), (9, 0), (9, 1), (1, 8), (1, 9)],
    31: [(7, 6), (7, 7), (15, 6), (15, 7), (7, 14), (7, 15)],
    32: [(16, 0), (16, 1), (24, 0), (24, 1), (16, 8), (16, 9)],
    127: [(55, 6), (55, 7), (63, 6), (63, 7), (55, 14), (55, 15)],
}
# The 128-byte swizzle: for each of eight rows, the 16-byte chunk of the row at position 0, 1, ...,
# 7.
SWIZZLE_128B = [
    [0, 1, 2, 3, 4, 5, 6, 7],
    [1, 0, 3, 2, 5, 4, 7, 6],
    [2, 3, 0, 1, 6, 7, 4, 5],
    [3, 2, 1, 0, 7, 6, 5, 4],
    [4, 5, 6, 7, 0, 1, 2, 3],
    [5, 4, 7, 6, 1, 0, 3, 2],
    [6, 7, 4, 5, 2, 3, 0, 1],
    [7, 6, 5, 4, 3, 2, 1, 0],
]


def floats(words: Tensor) -> Tensor:
    return words.to(torch.uint32).view(torch.float32)


def halves(words: Tensor, dtype: torch.dtype = torch.uint16) -> Tensor:
    """Return the 16-bit elements of the words, low half first."""
    return words.to(torch.uint32).view(dtype)


def fragment(kind: str, lane: int) -> list[tuple[int, int]]:
    """Return the manual's formulas for element i: group = lane >> 2, thread_in_group = lane % 4."""
    group, q = lane >> 2, lane % 4
    if kind == "A":
        return [
            (group + (8 if i in (2, 3, 6, 7) else 0), 2 * q + i % 2 + (8 if i >= 4 else 0))
            for i in range(8)
        ]
    if kind == "B":
        return [(2 * q + i % 2 + (8 if i >= 2 else 0), group) for i in range(4)]
    return [(group + (8 if i >= 2 else 0), 2 * q + i % 2) for i in range(4)]


def unfold(kind: str, shape: tuple[int, int], elements: Tensor) -> Tensor:
    """Return the matrix of these fragments, lane by lane."""
    matrix = torch.full(shape, float("nan"))
    for lane, row in enumerate(elements.view(32, -1).float()):
        for place, value in zip(fragment(kind, lane), row):
            matrix[place] = value
    return matrix


def swizzled(tile: Tensor) -> Tensor:
    """Return a tile of rows of 128 bytes, 64 elements each, as TMA writes it."""
    rows = tile.view(-1, 8, 8)
    return torch.stack([row[SWIZZLE_128B[r % 8]] for r, row in enumerate(rows)]).flatten()


@pytest.mark.parametrize(
    ("kind", "table"), [("A", A_FRAGMENT), ("B", B_FRAGMENT), ("C", C_FRAGMENT)]
)
def test_formulas_match_the_figures(kind: str, table: dict[int, list[tuple[int, int]]]) -> None:
    for lane, places in table.items():
        assert fragment(kind, lane) == places


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mma_equals_a_product(dtype: torch.dtype, answers: Answers) -> None:
    name = "mma_bf16" if dtype == torch.bfloat16 else "mma_f16"
    a = unfold("A", (16, 16), halves(answers[f"a:{name}"], dtype))
    b = unfold("B", (16, 8), halves(answers[f"b:{name}"], dtype))
    c, d = (unfold("C", (16, 8), floats(answers[key])) for key in (f"c:{name}", name))
    assert torch.equal(d, a @ b + c)


def test_ldmatrix_reads_the_layout_of_the_manual(answers: Answers) -> None:
    """It reads row l / 4, elements 2 (l % 4) and the next, of four matrices, or their transpose."""
    matrices = halves(answers["in:ldmatrix"]).view(4, 8, 8)
    plain, transposed = (
        halves(answers["ldmatrix"].view(32, 8)[:, part]).view(32, 4, 2)
        for part in (slice(0, 4), slice(4, 8))
    )
    for lane in range(32):
        row, column = divmod(lane, 4)
        for m in range(4):
            assert plain[lane, m].tolist() == matrices[m, row, 2 * column : 2 * column + 2].tolist()
            assert (
                transposed[lane, m].tolist()
                == matrices[m, 2 * column : 2 * column + 2, row].tolist()
            )


def test_stmatrix_writes_the_swizzled_layout(answers: Answers) -> None:
    assert torch.equal(
        halves(answers["stmatrix"]).int(),
        swizzled(halves(answers["in:stmatrix"]).view(64, 64).int()),
    )


@pytest.mark.parametrize(("x", "y"), [(0, 0), (64, 0), (0, 24), (8, 30), (-8, -3), (128, 8)])
def test_tma_reads_swizzled_boxes(x: int, y: int, answers: Answers) -> None:
    """Read 24 rows of 64 elements of a tensor of 40 x 72; outside are zeros."""
    source = torch.zeros(100, 300, dtype=torch.int32)
    source[20:60, 50:122] = halves(answers["in:tma"]).view(40, 72).int()
    box = source[20 + y : 44 + y, 50 + x : 114 + x]
    assert torch.equal(halves(answers[f"tma_2d({x},{y})"]).int(), swizzled(box.contiguous()))


def test_tma_does_not_swizzle_narrow_boxes(answers: Answers) -> None:
    """Read 24 rows of 8 elements of a tensor of 40 x 72; outside are zeros."""
    source = torch.zeros(44, 76, dtype=torch.int32)
    source[:40, :72] = halves(answers["in:tma"]).view(40, 72).int()
    box = halves(answers["tma_narrow"]).view(24, 8).int()
    assert torch.equal(box, source[20:, 68:]) and box[:20, :4].any()


def test_tma_reads_rank_3(answers: Answers) -> None:
    source = torch.zeros(4, 30, 200, dtype=torch.int32)
    source[:, :10, :72] = halves(answers["in:tma"]).view(4, 10, 72).int()
    assert torch.equal(
        halves(answers["tma_3d"]).int(), swizzled(source[2, 5:13, 8:72].contiguous())
    )


def test_tma_reads_rank_4(answers: Answers) -> None:
    source = torch.zeros(2, 2, 30, 200, dtype=torch.int32)
    source[:, :, 10:20, :72] = halves(answers["in:tma"]).view(2, 2, 10, 72).int()
    assert torch.equal(
        halves(answers["tma_4d"]).int(), swizzled(source[1, 1, 7:15, 8:72].contiguous())
    )


def test_wgmma_accumulators_have_the_layout_of_the_manual(answers: Answers) -> None:
    """The operands also cover the core-matrix layout without swizzle."""
    rows, columns = (floats(answers[f"wgmma_{name}"]).view(128, 32) for name in ("rows", "columns"))
    for thread, places in D_FRAGMENT.items():
        assert list(zip(rows[thread, :6].tolist(), columns[thread, :6].tolist())) == places
    seen = {
        (row, column) for row, column in zip(rows.flatten().tolist(), columns.flatten().tolist())
    }
    assert len(seen) == 64 * 64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wgmma_equals_a_product(dtype: torch.dtype, answers: Answers) -> None:
    """Run every shape of the kernels by name: widths 32 to 256, panels of 32 to 176 rows."""
    names = [key.removeprefix("a:") for key in answers if key.startswith("a:wgmma_")]
    names = [name for name in names if name.endswith("_f16") == (dtype == torch.float16)]
    assert len(names) == len(SHAPES.findall(SHAPES_OF.read_text())) > 15
    for name in names:
        a, b = (halves(answers[f"{key}:{name}"], dtype).float() for key in ("a", "b"))
        panel = re.search(r"_p(\d+)", name)
        depth = int(panel[1]) // 128 if panel else 64
        a = a.view(depth, 64).T if "_ta" in name else a.view(64, depth)
        b = b.view(depth, -1) if "_tb" in name else b.view(-1, depth).T
        assert torch.equal(floats(answers[name]).view(64, -1), a @ b), name


def test_ring_buffers_deliver_their_tiles(answers: Answers) -> None:
    """Seven steps of 64 columns use two buffers; one product clears rows of B."""
    a, b = (
        halves(answers[f"{key}:steps"], torch.bfloat16).float().view(64, 448) for key in ("a", "b")
    )
    assert torch.equal(floats(answers["multiply_steps"]).view(64, 64), a @ b.T)
    kept = (torch.arange(64) >= 5) & (torch.arange(64) < 50)
    assert torch.equal(
        floats(answers["multiply_cleared"]).view(64, 64), a[:, :64] @ (b[:, :64] * kept[:, None]).T
    )
    read = (
        halves(answers["read_steps"], torch.bfloat16).float().view(7, 2, 2, 4, 32, 8)
    )  # step, matrix, half, warp, lane
    for matrix, source in enumerate((a, b)):
        tiles = source.view(4, 16, 7, 2, 32)[
            ..., :16
        ]  # warp, row, step, half, the first 16 columns
        for lane in range(32):
            expected = torch.stack(
                [tiles[:, row, :, :, column] for row, column in fragment("A", lane)], -1
            )
            assert torch.equal(read[:, matrix, :, :, lane], expected.permute(1, 2, 0, 3))


def test_descriptor_fields_match_the_manual(answers: Answers) -> None:
    """Bits 0-13: address / 16; 16-29: LBO / 16; 32-45: SBO / 16; 62-63: swizzle.

    LBO and SBO are the leading and stride byte offsets.
    """
    words = answers["descriptors"].view(-1, 2)[:3].tolist()
    assert words == [
        [0x0001_0040, 0x4000_0040],  # address 0x400, LBO 16, SBO 1024, 128 bytes
        [0x0200_2001, 0x4000_0040],  # address 0x20010, LBO 8192, SBO 1024, 128 bytes
        [0x0008_3FFF, 0x0000_0010],  # address 0x3fff0, LBO 128, SBO 256, none
    ]


def test_cp_async_copies_and_fills_with_zeros(answers: Answers) -> None:
    """128 copies of 16 bytes run in reversed order, then of t % 17 bytes and zeros.

    A thread reads its neighbor's bytes.
    """
    source, got = (
        answers["in:cp_async"].to(torch.uint32).view(torch.uint8),
        answers["cp_async"].to(torch.uint32).view(torch.uint8),
    )
    whole, got = source[:2048].view(128, 16), got.view(128, 32)
    assert torch.equal(got[:, :16], whole.flip(0))
    for t in range(128):
        expected = source[2048:].view(128, 16)[t ^ 1].clone()
        expected[(t ^ 1) % 17 :] = 0
        assert torch.equal(got[t, 16:], expected)


def test_memory_operations_and_shuffles(answers: Answers) -> None:
    words = answers["in:memory"].view(128, 4)
    mixed = words ^ words.flip(0)
    assert torch.equal(answers["memory"][:512].view(128, 4), mixed)
    assert torch.equal(answers["memory"][1024:1536].view(128, 4), mixed[torch.arange(128) ^ 1])
    single = (words.flatten()[:32, None] >> torch.arange(0, 32, 8) & 0xFF).flatten()
    shifted = sum(single[torch.arange(128) ^ 37 * i] << 8 * i for i in range(4))
    assert torch.equal(answers["memory"][1536:1664], shifted)
    assert torch.equal(answers["memory"][1664:1920].view(128, 2), mixed[torch.arange(128) ^ 3, 1:3])
    rows = torch.arange(128)[:, None]
    expected = words[rows[:, 0] ^ 9].where(
        (rows % 3 > 0) & (rows % 5 > 0),
        0,
        # Zeros if the predicate of the load or the store is false.
    )
    assert torch.equal(answers["memory"][1920:].view(128, 4), expected)
    lanes = answers["in:meetings"]
    shuffled = answers["meetings"].view(64, 8)
    t = torch.arange(64)
    for i, distance in enumerate((1, 2, 4, 8, 16)):
        assert torch.equal(shuffled[:, i], lanes[t ^ distance])
    assert torch.equal(shuffled[:, 5], lanes[t ^ 31]) and torch.equal(shuffled[:32, 6], lanes[32:])
    assert torch.equal(
        shuffled[:, 7], lanes[t // 32 * 32 + 5 * t % 32] ^ lanes[t // 32 * 32 + 7 * t % 32]
    )


def test_arithmetic_and_conversions(answers: Answers) -> None:
    inputs, results = (
        floats(answers["in:arithmetic"]).view(256, 3),
        answers["arithmetic"].view(256, 10),
    )
    a, b, c = inputs.unbind(1)
    exact = [a.double().sqrt().float(), (a.double() / b.double()).float()]
    for i, want in enumerate(exact):
        torch.testing.assert_close(floats(results[:, i]), want, rtol=0, atol=0, equal_nan=True)
    fused = (
        a.double() * b.double() + c.double()
        # It rounds once more than the instruction if the product is long.
    ).float()
    torch.testing.assert_close(floats(results[:, 2]), fused, rtol=2e-7, atol=1e-44, equal_nan=True)
    for i, dtype in ((3, torch.bfloat16), (4, torch.float16)):
        packed = halves(results[:, i], dtype).view(256, 2)
        torch.testing.assert_close(
            packed, torch.stack([a.to(dtype), b.to(dtype)], 1), rtol=0, atol=0, equal_nan=True
        )
    for i, x in ((7, a), (8, b)):
        finite = x.clamp(-65504, 65504).half().float()
        torch.testing.assert_close(floats(results[:, i]), finite, rtol=0, atol=0, equal_nan=True)
    low = halves(answers["in:arithmetic"]).view(256, 6)[:, 0]
    for i, dtype in ((5, torch.bfloat16), (6, torch.float16)):
        torch.testing.assert_close(
            floats(results[:, i]), low.view(dtype).float(), rtol=0, atol=0, equal_nan=True
        )
    # prmt with selector 0x81b2: bytes 2 and 1, and the signs of bytes 3 and 0
    bytes_of = lambda t: t.contiguous().view(torch.uint8).view(256, 4)
    given, permuted = bytes_of(a), bytes_of(floats(results[:, 9]))
    signs = given.view(torch.int8) >> 7
    assert torch.equal(permuted[:, [0, 2]], given[:, [2, 1]])
    assert torch.equal(permuted[:, [1, 3]].view(torch.int8), signs[:, [3, 0]])


def test_atomics_and_reductions(answers: Answers) -> None:
    assert answers["atomics"].tolist() == [50 * sum(range(i, 64, 4)) for i in range(4)]
    values, sums = floats(answers["in:reductions"]), floats(answers["reductions"])
    assert torch.equal(sums[:256], 20 * values) and (sums[256:] == 20).all()
    want = 0.0
    for ticket in range(14):
        want = 3 * want + ticket
    assert floats(answers["tickets"]).tolist() == [want] * 4
    handed = answers["in:mbarrier"].cumsum(0) % 2**32
    assert torch.equal(answers["mbarrier"], handed)
