# SPDX-License-Identifier: Apache-2.0
"""Time the CPU's norms as a share of `copy_` of the same bytes into an existing tensor.

    OMP_NUM_THREADS=1 python bench/tools/layer_norm_copy.py [--rounds 30]
        [--shape 8192x1024 2048x768] [--dtype float32 bfloat16]

Each round measures in turn, for each op and direction: `copy_`, the native calls alone with
existing output tensors, and the public call with new outputs. The copy has the op's dtype and as
much traffic as the kernel's tensors, each read or written once. The clock is this thread's CPU time
with one thread and wall time otherwise; the minimum counts. The target is 90 % of the copy's rate
for the kernels. The rest of a call is dispatch and, mostly, page faults.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import pytransformer as pt
from pytransformer.cli.benchmark.limits import native_calls
from pytransformer.cli.machine import cpu_name

OPS = ("layer_norm", "rms_norm", "add_norm")


def clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def problem(
    op: str, rows: int, columns: int, dtype: torch.dtype
) -> tuple[Callable[[], Any], list[torch.Tensor]]:
    """Return the public call and its leaves."""
    x, residual = (torch.randn(rows, columns).to(dtype).requires_grad_() for _ in range(2))
    weight, bias = (torch.randn(columns).to(dtype).requires_grad_() for _ in range(2))
    if op == "layer_norm":
        return lambda: (pt.layer_norm(x, (columns,), weight, bias),), [x, weight, bias]
    if op == "rms_norm":
        return lambda: (pt.rms_norm(x, (columns,), weight),), [x, weight]
    return lambda: pt.add_norm(x, residual, weight, bias), [x, residual, weight, bias]


def tensor_bytes(calls: list[Any]) -> int:
    return sum(
        t.numel() * t.element_size() for call in calls for t in call.args if torch.is_tensor(t)
    )


def minima(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, call in contenders.items():
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
    return best


def measure(op: str, rows: int, columns: int, dtype: torch.dtype, rounds: int) -> None:
    call, leaves = problem(op, rows, columns, dtype)
    upstream = tuple(torch.randn(rows, columns).to(dtype) for _ in call())

    def both() -> None:
        torch.autograd.grad(call(), leaves, upstream)

    def forward() -> None:
        with torch.no_grad():
            call()

    outputs = call()
    recorded = native_calls(op, "cpu", both)
    directions = {
        "fwd": (native_calls(op, "cpu", forward), forward),
        "bwd": (
            [native for native in recorded if "bwd" in str(native.func)],
            lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True),
        ),
    }
    for direction, (kernels, whole) in directions.items():
        size = tensor_bytes(kernels)
        source = torch.randn(size // 2 // dtype.itemsize).to(dtype)
        target = torch.empty_like(source)

        def alone(kernels: list[Any] = kernels) -> None:
            for native in kernels:
                native()

        best = minima(
            {
                "copy": lambda target=target, source=source: target.copy_(source),
                "alone": alone,
                "call": whole,
            },
            rounds,
        )
        copy, kernel, full = (1e6 * best[name] for name in ("copy", "alone", "call"))
        print(
            f"| {op} | {rows} x {columns} | {str(dtype)[6:]} | {direction} | {size / 1e6:.0f} | "
            f"{copy:.0f} | {kernel:.0f} | "
            f"{copy / kernel:.0%} | {full:.0f} | {(full - kernel) / full:.0%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", default=["8192x1024", "2048x768"])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    print(
        f"{cpu_name()}, {torch.get_num_threads()} threads; microseconds, minima of"
        f" {arguments.rounds} interleaved rounds\n"
    )
    print(
        "| op | shape | dtype | direction | MB | `copy_` | kernel | of `copy_` | call | beyond the"
        " kernel |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for shape in arguments.shape:
        rows, columns = (int(n) for n in shape.split("x"))
        for dtype in arguments.dtype:
            for op in OPS:
                measure(op, rows, columns, getattr(torch, dtype), arguments.rounds)


if __name__ == "__main__":
    main()
