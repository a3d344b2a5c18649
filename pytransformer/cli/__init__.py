# SPDX-License-Identifier: Apache-2.0
"""The command line: `pytransformer COMMAND` or `python -m pytransformer COMMAND`.

Every command uses the same exit codes:

    0    success
    1    the command ran and reports a fault (a kernel outside its bound, a
         failed self-check)
    2    the command line is invalid or cannot be carried out here
    130  interrupted
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

OK, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """The command cannot be carried out as given; the message states what it got and expected."""


class _Command(NamedTuple):
    module: str
    summary: str


# A command's module has `add_arguments(parser)` and `run(arguments) -> int`.
_COMMANDS = {
    "demo": _Command(
        "pytransformer.cli.demo",
        "attention and models, checked and timed beside PyTorch, in minutes",
    ),
    "doctor": _Command(
        "pytransformer.cli.doctor", "what works on this machine, and why the rest does not"
    ),
    "explain": _Command(
        "pytransformer.cli.explain", "which backend one call would use, and why not the others"
    ),
    "bench": _Command(
        "pytransformer.cli.benchmark.command",
        "speed, memory and error beside PyTorch and naive code",
    ),
    "verify": _Command(
        "pytransformer.cli.verify",
        "check and time every backend here; the results are stored and used",
    ),
    "train": _Command(
        "pytransformer.cli.train", "train a translator in minutes, or on torchrun's processes"
    ),
    "translate": _Command(
        "pytransformer.cli.translate", "translate a sentence, and draw what each word attended to"
    ),
    "attention-map": _Command("pytransformer.cli.attention_map", "draw what a model attended to"),
}

# Commands of two words, whose modules parse their own arguments: `run(argv) -> int`.
_DELEGATED = {
    "bench models": _Command(
        "pytransformer.cli.benchmark.models", "full models: ours, PyTorch's sdpa and eager code"
    ),
}

_EPILOG = """\
examples:
  pytransformer demo               check ops, time them beside PyTorch
  pytransformer doctor             list the backends that work here
  pytransformer explain attention --case t5_bias --shape B=2,Hq=8,L=1024
  pytransformer bench --quick      time every op; ./results/bench-DATE/
  pytransformer verify             verify every backend, two minutes
  pytransformer train translate --data FILE          ./results/translate/
  pytransformer translate "a casa preta custa vinte reais."
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of everything except the delegated commands' options."""
    from pytransformer import __version__

    parser = argparse.ArgumentParser(
        prog="pytransformer",
        description="Fused attention, normalization and feed-forward kernels for PyTorch.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pytransformer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in _COMMANDS.items():
        module = importlib.import_module(command.module)
        sub = commands.add_parser(
            name,
            help=command.summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=getattr(module, "run", None))
        module.add_arguments(sub)
    for name, command in _DELEGATED.items():
        # run() above handles two-word commands; this entry only lists them
        commands.add_parser(name, help=command.summary, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run one command and return its exit code; invalid input never raises.

    `parser` is another command line, such as the one of examples/train.py.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        for words in (1, 2):
            if parser is None and (name := " ".join(argv[:words])) in _DELEGATED:
                return int(importlib.import_module(_DELEGATED[name].module).run(argv[words:]) or OK)
        parser = build_parser() if parser is None else parser
        arguments = parser.parse_args(argv)
        arguments.argv = argv
        if getattr(arguments, "run", None) is None:
            parser.print_help()
            return OK
        return arguments.run(arguments)
    except UsageError as error:
        print(f"pytransformer: error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("pytransformer: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, a closed pager) is gone. Exit quietly and keep Python from flushing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
