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
import functools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..console import Console
from ..models import _files
from ..training.checkpoint import checkpoints
from ..training.distributed import World
from . import WRONG, UsageError, train_translate

_OF_NO_CONSEQUENCE = {"argv", "command", "run", "out", "resume", "threads", "device", "save_every",
    "epochs"} | {
    # Options for how processes split a batch; the checkpoint stores how many make a step.
    "mesh", "shard", "timeout", "accumulate",
}  # fmt: skip
_COUNTS = ("layers", "width", "batch", "vocabulary", "epochs")  # options of at least 1

TASKS: Mapping[str, Any] = {"translate": train_translate}


class Run:
    """The context a task trains in.

    Attributes:
        arguments: the options of the task and of every task.
        world: this process and its peers.
        console: the output for progress.
        started: time.monotonic() at the start.
    """

    def __init__(self, arguments: argparse.Namespace, world: World) -> None:
        self.arguments, self.world = arguments, world
        self.console, self.started = Console(), time.monotonic()

    @property
    def out(self) -> Path:
        return self.arguments.out

    def say(self, text: str = "") -> None:
        """Print a line in the first process only."""
        if self.world.first:
            self.console.print(text)

    def begin(self) -> None:
        """Check the options and the folder.

        Raises:
            ValueError: a stage has no steps, the folder has checkpoints and --resume is missing, or
                the checkpoints belong to other options.
        """
        for name, value in vars(self.arguments).items():
            counted = name.endswith("steps") or name in _COUNTS
            if counted and value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        options = {
            name: str(value) for name, value in vars(self.arguments).items() if self._matters(name)
        }
        path = self.out / "run.json"
        if self.arguments.resume and path.exists():
            then = _files.read_json(path)
            other = [
                f"{n}={then.get(n)} instead of {value}"
                for n, value in options.items()
                if then.get(n) != value
            ]
            if other:
                raise ValueError(
                    f"--resume: {self.out} was begun with {', '.join(other)}: use those, or another"
                    " --out"
                )
        if not self.arguments.resume and (
            checkpoints(self.out) or any(self.out.glob("*/checkpoint-*.safetensors"))
        ):
            raise ValueError(
                f"{self.out} has checkpoints already: resume with --resume, or name another folder"
                " with --out"
            )
        self._options = options

    def write_options(self) -> None:
        """Write the options that a resumed run must share to run.json, once the data has loaded."""
        if self.world.first:
            self.out.mkdir(parents=True, exist_ok=True)
            _files.write_text(self.out / "run.json", json.dumps(self._options, indent=2) + "\n")

    @staticmethod
    def _matters(name: str) -> bool:
        """Return True if a resumed run must share the option; the training length may change."""
        return name not in _OF_NO_CONSEQUENCE and not name.endswith("steps")


def add_arguments(
    parser: argparse.ArgumentParser, tasks: Mapping[str, Any] = TASKS, kind: type[Run] = Run
) -> None:
    """Add the tasks, each a module with a docstring and two functions.

    The docstring's first line is the summary and its full text the help. `add_arguments(parser)`
    adds the task's options, and `train(run)`, with `run` of class `kind`, trains.
    """
    found = parser.add_subparsers(dest="task", metavar="TASK", title="tasks", required=True)
    for name, task in tasks.items():
        about = (task.__doc__ or "").strip()
        sub = found.add_parser(
            name,
            help=about.partition("\n")[0].rstrip("."),
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        task.add_arguments(sub)
        _add_common(sub, Path("results") / name)
        sub.set_defaults(run=functools.partial(_run, task, kind))


def _add_common(parser: argparse.ArgumentParser, out: Path) -> None:
    """Add the options shared by every task."""
    how = parser.add_argument_group("every task")
    # fmt: off
    how.add_argument("--accumulate", type=int, default=1, metavar="N",
        help="batches a step (default %(default)s)")
    how.add_argument("--bf16", action="store_true",
        help="matrix products and attention in bfloat16")
    how.add_argument("--seed", type=int, default=0, help="default %(default)s")
    how.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    how.add_argument("--threads", type=int, help="of the CPU (default: torch's choice)")
    how.add_argument("--out", type=Path, default=out, metavar="DIR", help="default %(default)s")
    how.add_argument("--save-every", type=int, default=500, metavar="N",
        help="steps between checkpoints (default %(default)s)")
    how.add_argument("--mesh", metavar="data=N,context=N,tensor=N",
        help="split torchrun's processes: data groups have different batches; processes of a "
        "group share one and split its sequences (context), or heads, hidden layer and vocabulary "
        "(tensor) (default: data only)")
    how.add_argument("--shard", action="store_true",
        help="split parameters and optimizer state over the data too (FSDP2)")
    how.add_argument("--timeout", type=float, metavar="SECONDS",
        help="max time that a process waits for another; must exceed an evaluation and a "
        "checkpoint (default 600)")
    how.add_argument("--resume", action="store_true",
        help="resume from the newest checkpoint in --out")
    # fmt: on


def _run(task: Any, kind: type[Run], arguments: argparse.Namespace) -> int:
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
            training = kind(arguments, world)
            training.begin()
            return task.train(training)
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
