# SPDX-License-Identifier: Apache-2.0
"""Print which backend a call would use, the reasons, and the memory it needs.

Nothing runs: the tensors have shapes but no contents, so any shape that fits
the address space works.
"""

from __future__ import annotations

import argparse

import torch

from pytransformer.cli import OK, UsageError, explained
from pytransformer.cli.benchmark.plan import DTYPES, OPS
from pytransformer.console import Console

_EXAMPLES = """
examples:
  pytransformer explain attention --shape 2,8,1024,64 --bias t5 --dropout 0.1
  pytransformer explain attention --shape 1,32,1,8192,128 --kv-heads 8
  pytransformer explain feed_forward --shape 4096,1024,4096 --gated
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shapes = "\n".join(f"  {op:<21} {shape}" for op, shape in explained.shapes().items())
    parser.epilog = f"shapes:\n{shapes}\n{_EXAMPLES}"
    add = parser.add_argument
    add("op", metavar="OP", choices=OPS, help=", ".join(OPS))
    add("--shape", type=_integers, required=True, metavar="N,N,...", help="see below")
    add(
        "--dtype",
        choices=sorted(DTYPES),
        default="float32",
        metavar="NAME",
        help="float32 (default), bfloat16, float16, float64",
    )
    add(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the tensors are (default cpu)",
    )
    add("--backend", default=None, metavar="NAME", help="explain a call that forces this backend")
    add("--dropout", type=float, default=0.0, metavar="P")
    add("--grad", action="store_true", help="the inputs require gradients")
    explained.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    import pytransformer as pt

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: torch sees no CUDA GPU here; `pytransformer doctor` gives the reason"
        )
    try:
        args, kwargs = explained.call(arguments)
        with pt.use_backend(**({arguments.op: arguments.backend} if arguments.backend else {})):
            found = pt.explain(arguments.op, *args, **kwargs)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    rows = []
    for backend, reason in found.reasons.items():
        verdict = "chosen" if backend == found.backend else "possible" if reason is None else "no"
        extra = found.extra_bytes.get(backend)
        rows.append((backend, verdict, reason or "", "" if extra is None else amount(extra)))
    console = Console()
    shape = "x".join(map(str, arguments.shape))
    console.print(
        f"{arguments.op} {shape} {arguments.dtype}: {found.backend or 'no backend can do this'}"
    )
    console.table(
        ("backend", "", "why not", "memory beyond inputs and outputs"),
        rows,
        right=("memory beyond inputs and outputs",),
    )
    for note in found.notes:
        console.print(f"note: {note}")
    return OK


def amount(size: int) -> str:
    """Return a byte count in a readable unit."""
    for unit, step in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= step:
            return f"{size / step:.3g} {unit}"
    return f"{size} B"


def _integers(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not numbers with commas between, as 2,8,1024,64"
        )
    return tuple(int(word) for word in words)
