# SPDX-License-Identifier: Apache-2.0
"""Trains a model, with its progress, metrics and checkpoints in one folder; again with --resume where it stopped.

Each task has its own options: `pytransformer train TASK --help`. Started by `torchrun` it trains in several processes, each on its GPU
if there are any.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from . import UsageError, tasks
from .training_run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    found = parser.add_subparsers(dest="task", metavar="TASK", title="tasks", required=True)
    for name in tasks.names():
        task = tasks.module(name)
        about = (task.__doc__ or "").strip()
        sub = found.add_parser(
            name,
            help=about.partition("\n")[0].rstrip("."),
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        task.add_arguments(sub)
        _add_common(sub, Path("results") / name)


def _add_common(parser: argparse.ArgumentParser, out: Path) -> None:
    """The options of every task."""
    how = parser.add_argument_group("every task")
    how.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches a step (default %(default)s)")
    how.add_argument("--bf16", action="store_true", help="matrix products and attention in bfloat16")
    how.add_argument("--seed", type=int, default=0, help="default %(default)s")
    how.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    how.add_argument("--threads", type=int, help="of the CPU (default: torch's choice)")
    how.add_argument("--out", type=Path, default=out, metavar="DIR", help="default %(default)s")
    how.add_argument(
        "--save-every", type=int, default=500, metavar="N", help="steps between checkpoints (default %(default)s)"
    )
    how.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")


def run(arguments: argparse.Namespace) -> int:
    from ..training.distributed import distributed

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise UsageError(f"--threads must be at least 1, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    try:
        with distributed(arguments.device) as world:
            training = Run(arguments, world)
            training.begin()
            return tasks.module(arguments.task).train(training)
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(str(error)) from error
