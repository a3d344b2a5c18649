"""Problems that reach every path of the attention kernels for sm_90a, run in the emulator through the public API; also a script for
planted faults.

PYTRANSFORMER_EMULATE=<library> python tests/emulator/sm90.py [SCHEDULE]      prints the first thing wrong, and exits with 1
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import pytransformer as pt
from pytransformer.testing import bounds, oracle

BF16, F16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Problem:
    """query (B, Hq, Lq, D) and the rest; `backward`: whether its passes have kernels too. Rows past the lengths hold NaN."""

    dtype: torch.dtype
    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    keywords: dict[str, Any]
    backward: bool = True
    blhd: bool = False  # (B, L, H, D) in memory


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


# Blocks of 128 rows; tiles of 128 streamed rows, 64 or 96 in some passes. More tiles than the emulated GPU has multiprocessors, and full
# attention, give persistent blocks. Head sizes of each class, whole and not.
PROBLEMS = (
    Problem(BF16, 1, 2, 1, 150, 300, 64, {}, blhd=True),
    Problem(F16, 1, 2, 2, 200, 140, 128, {}),
    Problem(F16, 1, 1, 1, 70, 140, 256, {}, backward=False),
    Problem(BF16, 1, 1, 1, 300, 300, 128, {"causal": "top_left"}),
    Problem(F16, 1, 4, 2, 150, 180, 40, {"causal": "bottom_right"}),
    Problem(
        BF16, 3, 1, 1, 130, 300, 64, {"query_lengths": integers(130, 40, 60), "key_lengths": integers(300, 77, 0)}, blhd=True
    ),
    Problem(
        BF16,
        2,
        1,
        1,
        200,
        300,
        96,
        {
            "query_lengths": integers(200, 130),
            "key_lengths": integers(290, 150),
            "window": (40, 30),
            "causal": "bottom_right",
        },
    ),
    Problem(F16, 2, 1, 1, 140, 150, 64, {"window": (50, None)}),
    Problem(BF16, 2, 1, 1, 150, 200, 64, {"causal": "top_left", "prefix_lengths": integers(100, 10)}),
    Problem(BF16, 1, 1, 1, 20, 20, 72, {"scale": 0.05}),
    Problem(BF16, 1, 2, 1, 130, 260, 128, {"causal": "bottom_right", "alibi": True}, backward=False),
    Problem(F16, 1, 2, 2, 140, 150, 64, {"t5": True, "dropout_p": 0.3, "dropout_seed": 77}, backward=False),
    Problem(BF16, 1, 1, 1, 40, 200, 64, {"softcap": 3.0, "scale": -0.3}, backward=False),
)


def problems() -> Iterator[Problem]:
    yield from PROBLEMS


def _rows(problem: Problem, heads: int, length: int) -> torch.Tensor:
    if problem.blhd:
        return torch.randn(problem.B, length, heads, problem.D).to(problem.dtype).transpose(1, 2)
    return torch.randn(problem.B, heads, length, problem.D).to(problem.dtype)


def _spoiled(t: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """The same memory order, NaN in rows past the lengths."""
    spoiled = t.clone()
    if lengths is not None:
        for b, n in enumerate(lengths.tolist()):
            spoiled[b, :, n:] = math.nan
    return spoiled


def wrong(problem: Problem) -> list[str]:
    """What is wrong with the kernels for sm_90a on this problem."""
    torch.manual_seed(PROBLEMS.index(problem) if problem in PROBLEMS else 0)
    keywords = dict(problem.keywords)
    if keywords.pop("alibi", False):
        keywords["bias"] = pt.AlibiBias(torch.rand(problem.Hq))
    if keywords.pop("t5", False):
        keywords["bias"] = pt.RelativePositionBias(torch.randn(8, problem.Hq), bidirectional=True, max_distance=20)
    tensors = [
        _rows(problem, *shape)
        for shape in ((problem.Hq, problem.Lq), (problem.Hkv, problem.Lk), (problem.Hkv, problem.Lk), (problem.Hq, problem.Lq))
    ]
    grad_lse = torch.randn(problem.B, problem.Hq, problem.Lq)
    exact = oracle.solve(*tensors, grad_lse, **keywords)
    lengths = [keywords.get(f"{name}_lengths") for name in ("query", "key", "key", "query")]
    query, key, value, grad_out = map(_spoiled, tensors, lengths)
    results, ran = {}, {}
    before = torch.ops.pytransformer_C.emulator_products()
    try:
        inputs = [t.requires_grad_(problem.backward) for t in (query, key, value)]
        out, lse = pt.attention(*inputs, **keywords, return_lse=True, backend="cuda", strict=True)
        results = {"out": out.detach(), "lse": lse.detach()}
        ran["forward"] = torch.ops.pytransformer_C.emulator_products() - before
        if problem.backward:
            grads = torch.autograd.grad([out, lse], inputs, [grad_out, grad_lse])
            results |= dict(zip(("query", "key", "value"), grads))
            ran["backward"] = torch.ops.pytransformer_C.emulator_products() - before - ran["forward"]
    except RuntimeError as error:
        return [f"{type(error).__name__}: {error}"]
    checks = bounds.check(exact, results, problem.dtype, "zero_mean")
    found = [str(c) for c in checks if not c.ok]
    return found + [f"{name} computed no product of a warpgroup" for name, products in ran.items() if not products]


def main() -> int:
    torch.set_num_threads(1)
    os.environ["PYTRANSFORMER_CUDA_PATH"] = "sm90"
    from pytransformer.ops import _cuda

    assert (reason := _cuda.why_not("attention_fwd", torch.device("cpu"))) is None, reason
    torch.ops.pytransformer_C.emulator_schedule(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    for problem in problems():
        if found := wrong(problem):
            print(f"{problem}\n{found[0]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
