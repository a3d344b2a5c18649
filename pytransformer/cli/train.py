# SPDX-License-Identifier: Apache-2.0
"""Train a model; progress, metrics and checkpoints go to one folder.

--resume continues an interrupted run. Each task has its own options:
`pytransformer train TASK --help`. Under `torchrun`, training runs in several
processes, one GPU each if available. The processes split the batches and, with
--mesh, parts of the model too.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import torch

from . import WRONG, UsageError, tasks
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
    """Add the options shared by every task."""
    how = parser.add_argument_group("every task")
    how.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="batches a step (default %(default)s)",
    )
    how.add_argument(
        "--bf16", action="store_true", help="matrix products and attention in bfloat16"
    )
    how.add_argument("--seed", type=int, default=0, help="default %(default)s")
    how.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    how.add_argument("--threads", type=int, help="of the CPU (default: torch's choice)")
    how.add_argument("--out", type=Path, default=out, metavar="DIR", help="default %(default)s")
    how.add_argument(
        "--save-every",
        type=int,
        default=500,
        metavar="N",
        help="steps between checkpoints (default %(default)s)",
    )
    how.add_argument(
        "--mesh", metavar="data=N,context=N,tensor=N",
        help="split torchrun's processes: data groups have different batches; processes of a "
        "group share one and split its sequences (context), or heads, hidden layer and vocabulary "
        "(tensor) (default: data only)",
    )  # fmt: skip
    how.add_argument(
        "--shard",
        action="store_true",
        help="split parameters and optimizer state over the data too (FSDP2)",
    )
    how.add_argument(
        "--timeout", type=float, metavar="SECONDS",
        help="max time that a process waits for another; must exceed an evaluation and a "
        "checkpoint (default 600)",
    )  # fmt: skip
    how.add_argument(
        "--resume", action="store_true", help="resume from the newest checkpoint in --out"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..training.checkpoint import locked
    from ..training.distributed import LostProcess, distributed
    from ..training.trainer import Diverged

    if arguments.threads is not None:
        if arguments.threads < 1:
            raise UsageError(f"--threads must be at least 1, got {arguments.threads}")
        torch.set_num_threads(arguments.threads)
    try:
        with (
            contextlib.ExitStack() as stack,
            distributed(arguments.device, **_mesh_options(arguments)) as world,
        ):
            stack.enter_context(locked(arguments.out) if world.first else contextlib.nullcontext())
            training = Run(arguments, world)
            training.begin()
            return tasks.module(arguments.task).train(training)
    except Diverged as error:
        print(f"pytransformer train: error: {error}", file=sys.stderr, flush=True)
        return WRONG
    except LostProcess as error:
        print(
            f"pytransformer train: error: {error}: start all again, with --resume",
            file=sys.stderr,
            flush=True,
        )
        return WRONG
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(str(error)) from error


def _mesh_options(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.timeout is not None and arguments.timeout <= 0:
        raise UsageError(f"--timeout must be more than 0 seconds, got {arguments.timeout:g}")
    if arguments.mesh is None and not arguments.shard:
        return {"timeout": arguments.timeout}
    import logging
    import warnings

    from ..training.mesh import parse_mesh

    # The first warning concerns blocks that return views, which nothing here writes into; the
    # second, gathering over one mesh dimension after the other.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    sizes = None if arguments.mesh is None else parse_mesh(arguments.mesh)
    return {"mesh": sizes, "shard": arguments.shard, "timeout": arguments.timeout}
