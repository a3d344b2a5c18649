# SPDX-License-Identifier: Apache-2.0
"""Print which backend a call would use, the reasons, and the memory it needs.

The call does not run. Its arguments are those of a benchmark case
(`pytransformer bench OP --list`), at the shape that --shape gives.
"""

from __future__ import annotations

import argparse

import torch

from pytransformer.cli import OK, UsageError
from pytransformer.cli.benchmark import options, plan, report
from pytransformer.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    # fmt: off
    add("op", metavar="OP", choices=plan.OPS, help=", ".join(plan.OPS))
    add("--case", metavar="NAME", help="such as causal or t5_bias (default: the op's first case)")
    add("--shape", type=options.shape, default={}, metavar="Lq=4096,...",
        help="change dimensions of the case; L is Lq and Lk")
    add("--dtype", choices=sorted(plan.DTYPES), default="float32", metavar="NAME",
        help="float32 (default), bfloat16, float16, float64")
    add("--device", choices=("cpu", "cuda"), default="cpu",
        help="where the tensors are (default cpu)")
    add("--backend", default=None, metavar="NAME", help="explain a call that forces this backend")
    add("--grad", action="store_true", help="the inputs require gradients")
    # fmt: on


def run(arguments: argparse.Namespace) -> int:
    import pytransformer as pt

    op, dtype = arguments.op, arguments.dtype
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: torch sees no CUDA GPU here; `pytransformer doctor` gives the reason"
        )
    name = arguments.case or plan.cases(op)[0].name
    case = plan.chosen([op], [name], "medium", arguments.shape, [dtype], ["fwd"])[0].case
    try:
        args, kwargs = case.make(
            arguments.device, plan.DTYPES[dtype], seed=0, requires_grad=arguments.grad
        )
        with pt.use_backend(**({op: arguments.backend} if arguments.backend else {})):
            found = pt.explain(op, *args, **kwargs)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    rows = []
    for backend, reason in found.reasons.items():
        verdict = "chosen" if backend == found.backend else "possible" if reason is None else "no"
        extra = found.extra_bytes.get(backend)
        rows.append((backend, verdict, reason or "", "" if extra is None else _amount(extra)))
    console = Console()
    call = [*([] if op in name else [op]), name, report.shape_text(case.shape)]
    console.print(
        f"{' '.join(call)} {plan.dtype_name(plan.DTYPES[dtype])}:"
        f" {found.backend or 'no backend can do this'}"
    )
    memory = "memory beyond inputs and outputs"
    console.table(("backend", "", "why not", memory), rows, right=(memory,))
    for note in found.notes:
        console.print(f"note: {note}")
    return OK


def _amount(size: int) -> str:
    """Return a byte count in a readable unit."""
    for unit, step in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= step:
            return f"{size / step:.3g} {unit}"
    return f"{size} B"
