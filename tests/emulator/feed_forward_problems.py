# SPDX-License-Identifier: Apache-2.0
"""Problems that cover every path of the feed-forward kernels for sm_90a."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from named import Named

from pytransformer.testing import bounds, oracle
from pytransformer.testing.case import Problem
from support import fuzz_feed_forward

RAW_OP = "hidden_fwd"
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
WEIGHTS, BIASES = ("x", "w1", "w2"), ("b1", "b2")
GATE = ("gate_weight", "gate_bias")


def problem(
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    names: Sequence[str],
    biases: torch.dtype | None = None,
    wanted: Sequence[str] | None = None,
    layout: str = "contiguous",
    **keywords: Any,
) -> Problem:
    """Return a problem of rows, d, hidden and d_out with the tensors in `names`.

    It has the gradients in `wanted`, and biases have their own dtype.
    """
    rows, d, hidden, out = sizes
    torch.manual_seed(rows + hidden)
    shapes = {
        "x": (rows, d), "w1": (hidden, d), "b1": (hidden,), "w2": (out, hidden), "b2": (out,),
        "gate_weight": (hidden, d),
        "gate_bias": (hidden,),
    }  # fmt: skip
    tensors = {}
    for name in names:
        values = (
            torch.randn(shapes[name], dtype=F64)
            / (d if "weight" in name or name == "w1" else hidden if name == "w2" else 1) ** 0.5
        )
        tensors[name] = values.to(biases or dtype) if len(shapes[name]) == 1 else values.to(dtype)
    wanted = list(names if wanted is None else wanted)
    tensors["grad_out"] = torch.randn(rows, out, dtype=F64).to(dtype)
    return Problem(
        "feed_forward",
        dtype,
        "zero_mean",
        tensors,
        dict.fromkeys(tensors, layout),
        {"activation": "relu", **keywords},
        wanted,
    )


# Tiles of 128 rows and 256 columns of hidden, 128 of each gemm if gated, or half as many if two
# blocks have too few of these.
PROBLEMS = {
    "relu": problem(BF16, (200, 72, 528, 40), (*WEIGHTS, *BIASES), dropout_p=0.3,
        dropout_seed=-(2**62) + 5),
    "gated": problem(F16, (140, 40, 200, 72), (*WEIGHTS, *BIASES, *GATE), F32, activation="silu",
        dropout_p=0.5, dropout_seed=11),
    # more steps than stages
    "led": problem(BF16, (140, 264, 300, 264), (*WEIGHTS, *BIASES, *GATE), activation="gelu_tanh"),
    "odd sizes": problem(BF16, (37, 33, 70, 17), (*WEIGHTS, *BIASES), F64, activation="gelu",
        recompute=True),
    "no biases": problem(F16, (130, 64, 136, 24), (*WEIGHTS, GATE[0]), activation="gelu_tanh",
        recompute=True),
    "everything dropped": problem(BF16, (20, 16, 40, 16), (*WEIGHTS, *BIASES), dropout_p=1.0,
        dropout_seed=1),
    "strides": problem(BF16, (50, 24, 72, 24), (*WEIGHTS, *BIASES, *GATE), F16, layout="step",
        activation="gelu"),
    "only w2": problem(F16, (20, 16, 40, 16), WEIGHTS, wanted=["w2"], activation="gelu_tanh"),
    "only biases": problem(BF16, (300, 16, 40, 8), (*WEIGHTS, *BIASES, *GATE),
        wanted=["b1", "gate_bias"], activation="relu"),
    "one row": problem(F16, (1, 9, 1, 1), (*WEIGHTS, *BIASES), activation="silu"),
    "one of each": problem(BF16, (1, 1, 1, 1), (*WEIGHTS, *BIASES, *GATE), activation="silu"),
}  # fmt: skip


def problems() -> Iterator[Named]:
    yield from (Named(name, found) for name, found in PROBLEMS.items())


def wrong(named: Named) -> list[str]:
    """Return the errors of the backend "cuda" on this problem."""
    before = torch.ops.pytransformer_C.emulator_products()
    found = differences(named.problem)
    if not found and torch.ops.pytransformer_C.emulator_products() == before:
        found.append("no product of a warpgroup")
    return found


def differences(problem: Problem, device: str = "cpu") -> list[str]:
    """Return differences from float64 beyond the bound, for tensors on a device."""
    moved = dataclasses.replace(
        problem, tensors={n: t.to(device) for n, t in problem.tensors.items()}
    )
    try:
        results, record = fuzz_feed_forward.run(moved, "cuda")
    except (RuntimeError, AssertionError) as error:
        return [f"{type(error).__name__}: {error}"]
    solution = oracle.Solution(fuzz_feed_forward.solve(problem), 1, torch.empty(0), torch.empty(0))
    results = {n: None if r is None else r.detach().cpu() for n, r in results.items()}
    checks = bounds.check(solution, results, problem.dtype, "zero_mean", fuzz_feed_forward.LIMITS)
    return [str(c) for c in checks if not c.ok] + [f"ran {record}"] * (
        {b for _, b in record} != {"cuda"}
    )
