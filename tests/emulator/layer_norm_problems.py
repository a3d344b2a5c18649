# SPDX-License-Identifier: Apache-2.0
"""Problems that cover every path of the norm kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch

from pytransformer.testing import bounds, oracle
from pytransformer.testing.case import Problem
from support import fuzz_layer_norm

RAW_OP = "layer_norm_fwd"
LOW = (torch.float32, torch.bfloat16, torch.float16)

# (op, rows, columns, x, residual, norm, dropout): short, middle and long rows, blocks of one and
# several warps, the fallback kernel with columns that are no multiple of eight and rows too wide
# for registers; each pair of dtypes with special kernels, and one without; more rows than blocks
# run at once.
SHAPES = (
    ("layer_norm", 70, 64, torch.float32, None, "layer", 0.0),
    ("layer_norm", 37, 136, torch.bfloat16, None, "layer", 0.0),
    ("rms_norm", 9, 1024, torch.float16, None, "rms", 0.0),
    ("add_norm", 133, 96, torch.bfloat16, torch.float32, "layer", 0.1),
    ("add_norm", 21, 768, torch.float16, torch.float32, "rms", 0.5),
    ("add_norm", 5, 1024, torch.bfloat16, torch.bfloat16, "layer", 1.0),
    ("layer_norm", 35, 1032, torch.float32, None, "layer", 0.0),
    ("add_norm", 9, 2176, torch.bfloat16, torch.float32, "layer", 0.3),
    ("add_norm", 19, 2056, torch.bfloat16, torch.bfloat16, "layer", 0.2),
    ("rms_norm", 5, 4096, torch.float16, None, "rms", 0.0),
    ("layer_norm", 13, 33, torch.bfloat16, None, "layer", 0.0),
    ("add_norm", 9, 263, torch.float32, torch.bfloat16, "rms", 0.2),
    ("layer_norm", 2, 12304, torch.bfloat16, None, "layer", 0.0),
)


def problems() -> Iterator[Problem]:
    """Yield a problem per entry of SHAPES with every gradient.

    Unaligned rows and rows of two strides follow.
    """
    for number, (op, rows, columns, x, residual, kind, p) in enumerate(SHAPES):
        torch.manual_seed(number)
        normal = lambda *shape, dtype=x: torch.randn(shape, dtype=torch.float64).to(dtype)
        tensors = {"x": normal(rows, columns)}
        if residual is not None:
            tensors["residual"] = normal(rows, columns, dtype=residual)
        tensors["weight"] = 1 + normal(columns, dtype=LOW[number % 3])
        if op != "rms_norm":
            tensors["bias"] = normal(columns, dtype=LOW[(number + 1) % 3])
        expected = list(tensors)
        tensors["grad_out"] = normal(rows, columns)
        keywords = {}
        if op == "add_norm":
            tensors["grad_residual_out"] = normal(rows, columns, dtype=residual or x)
            keywords = {"kind": kind} | (
                {"dropout_p": p, "dropout_seed": random.Random(number).getrandbits(63)} if p else {}
            )
        layouts = dict.fromkeys(tensors, "contiguous")
        problem = Problem(op, x, "zero_mean", tensors, layouts, keywords, expected)
        yield problem
        if number == 0:  # rows that do not begin at a multiple of 16 bytes
            yield replace(problem, layouts=problem.layouts | {"x": "offset"})
        if rows == 35:  # rows of two strides, several per block
            grid = {n: t.reshape(5, 7, columns) if t.dim() == 2 else t for n, t in tensors.items()}
            yield replace(problem, tensors=grid, layouts=problem.layouts | {"x": "rows_first"})


def drawn(seed: int, count: int) -> Iterator[tuple[int, Problem]]:
    """Yield (number, problem) of the fuzzer, without float64, which the kernels refuse."""
    case = 0
    while count:
        problem = fuzz_layer_norm.draw(seed, case)
        if torch.float64 not in (t.dtype for t in problem.tensors.values()):
            yield case, problem
            count -= 1
        case += 1


def wrong(problem: Problem) -> list[str]:
    """Return the errors of the backend "cuda" on this problem."""
    try:
        results, record = fuzz_layer_norm.run(problem, "cuda")
    except (RuntimeError, AssertionError) as error:
        return [f"{type(error).__name__}: {error}"]
    solution = oracle.Solution(
        fuzz_layer_norm.solve(problem, results.get("residual_out")),
        1,
        torch.empty(0),
        torch.empty(0),
    )
    coarse = problem.coarse_dtype
    checks = bounds.check(
        solution, results, coarse, "zero_mean" if problem.data == "zero_mean" else "any"
    )
    found = [str(c) for c in checks if not c.ok]
    return found + [f"ran {record}"] * ({b for _, b in record} != {"cuda"})


def unaligned(problem: Problem) -> Problem:
    """Return the problem with tensors that begin off 16 bytes, for the fallback kernel."""
    return replace(problem, layouts=dict.fromkeys(problem.layouts, "offset"))
