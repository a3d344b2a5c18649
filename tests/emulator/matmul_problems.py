# SPDX-License-Identifier: Apache-2.0
"""Problems that cover every path of the warpgroup gemm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.testing import bounds
from support import fuzz_feed_forward

RAW_OP = "matmul"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


class Problem(NamedTuple):
    name: str
    dtype: torch.dtype
    layout: str  # layouts of a and b: n is (rows, k) and (k, columns), t transposed
    rows: int
    columns: int
    depth: int
    second: int = 0  # the depth of a second pair of operands
    bias: torch.dtype | None = None
    gap: int = 0  # elements between the rows of operands and of the result


# Tiles of 128 x 256, or 128 x 128 for up to two wide ones, steps of 64, four stages; the emulated
# GPU has two multiprocessors.
PROBLEMS = (
    Problem("rows with rows", BF16, "nt", 200, 264, 328, bias=F32, gap=8),
    Problem("rows with columns", F16, "nn", 130, 520, 72, bias=F16),
    Problem("columns with columns", BF16, "tn", 264, 136, 100, gap=24),
    Problem("two loops", F16, "nn", 64, 72, 130, second=200),
    Problem("more tiles than blocks", BF16, "nt", 400, 520, 64, bias=BF16),
    Problem("two groups", F16, "nt", 2126, 264, 16),  # in rows of tiles
    Problem(
        "led", BF16, "nt", 300, 500, 384, bias=F32
    ),  # more steps than stages, in three wide tiles per block
    Problem("led, columns with columns", F16, "tn", 520, 200, 256, gap=8),
    Problem("one tile", BF16, "nn", 128, 128, 320, bias=BF16),
    Problem("narrow", F16, "tn", 70, 8, 16),
    Problem("odd sizes", BF16, "nt", 5, 13, 9, bias=F32),
)


def problems() -> Iterator[Problem]:
    yield from PROBLEMS


def laid(logical: torch.Tensor, transposed: bool, gap: int) -> torch.Tensor:
    """Return a copy whose rows or columns begin at multiples of 16 bytes, with NaN between them."""
    t = logical.t() if transposed else logical
    memory = torch.full(
        (t.shape[0], -(-t.shape[1] // 8) * 8 + gap), torch.nan, dtype=t.dtype, device=t.device
    )
    memory[:, : t.shape[1]] = t
    view = memory[:, : t.shape[1]]
    return view.t() if transposed else view


def operands(problem: Problem, device: str = "cpu") -> list[torch.Tensor]:
    """Return a, b and, if present, the second pair."""
    torch.manual_seed(problem.rows)
    found = []
    for depth in filter(None, (problem.depth, problem.second)):
        for i, shape in enumerate(((problem.rows, depth), (depth, problem.columns))):
            values = torch.randn(shape, dtype=torch.float64).to(device, problem.dtype)
            found.append(laid(values, problem.layout[i] == "t", problem.gap))
    return found


def multiply(
    problem: Problem, given: list[torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the kernels' result with the padding columns of its rows."""
    width = -(-problem.columns // 8) * 8
    out = torch.full(
        (problem.rows, width + problem.gap), torch.nan, dtype=problem.dtype, device=given[0].device
    )
    if bias is not None:
        bias = torch.cat([bias, bias.new_full((-problem.columns % 8,), torch.nan)])
    a2, b2 = given[2:] or (None, None)
    cuda_library.call(RAW_OP, given[0].device, *given[:2], a2, b2, bias, out[:, :width])
    return out


def compare(
    out: torch.Tensor, given: list[torch.Tensor], *terms: torch.Tensor | None
) -> bounds.Check:
    """Compare the sum of a @ b of each pair and the terms with float64.

    The kernel sums in float32 and rounds to out's dtype.
    """
    exact = size = torch.zeros((), dtype=torch.float64, device=given[0].device)
    for a, b in zip(given[::2], given[1::2]):
        exact, size = exact + a.double() @ b.double(), size + a.double().abs() @ b.double().abs()
    for term in terms:
        if term is not None:
            exact, size = exact + term.double(), size + term.double().abs()
    exact, size = exact.cpu(), size.cpu()
    S = exact.abs() + torch.finfo(F32).eps / torch.finfo(out.dtype).eps * size
    allowed = bounds.limit(out.dtype, False, "zero_mean", limits=fuzz_feed_forward.LIMITS)
    return bounds.compare("out", out, exact, S, 0.0, out.dtype, allowed)


def differences(problem: Problem, device: str = "cpu") -> list[str]:
    """Return differences from float64 beyond the bound, and writes behind the result."""
    given = operands(problem, device)
    bias = None if problem.bias is None else torch.randn(problem.columns).to(device, problem.bias)
    try:
        out = multiply(problem, given, bias).cpu()
    except RuntimeError as error:
        return [str(error)]
    check = compare(out[:, : problem.columns], given, bias)
    found = [] if check.ok else [str(check)]
    if problem.gap and not out[:, -problem.gap :].isnan().all():
        found.append("columns behind the result were written")
    return found


def wrong(problem: Problem) -> list[str]:
    """Return the errors of the kernels on this problem."""
    before = torch.ops.pytransformer_C.emulator_products()
    if found := differences(problem):
        return found
    steps = sum(-(-depth // 64) for depth in (problem.depth, problem.second))
    least = -(-problem.rows // 64) * -(-problem.columns // 256) * steps * 4
    most = -(-problem.rows // 128) * -(-problem.columns // 128) * steps * 8
    if not least <= (products := torch.ops.pytransformer_C.emulator_products() - before) <= most:
        found.append(f"{products} products of warpgroups; expected {least} to {most}")
    return found
