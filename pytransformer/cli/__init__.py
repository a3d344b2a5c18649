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

OK, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """The command cannot be carried out as given; the message states what it got and expected."""


# Command -> (module, summary). The module has `add_arguments(parser)` and `run(arguments) -> int`.
_COMMANDS = {
    "doctor": ("doctor", "what works on this machine, and why the rest does not"),
    "explain": ("explain", "which backend one call would use, and why not the others"),
    "bench": ("benchmark.command", "speed, memory and error beside PyTorch and naive code"),
    "verify": ("verify", "check and time every backend here; the results are stored and used"),
    "train": ("train", "train a translator in minutes, or on torchrun's processes"),
    "translate": ("translate", "translate a sentence, and draw what each word attended to"),
    "attention-map": ("attention_map", "draw what a model attended to"),
}

_EPILOG = """\
examples:
  pytransformer doctor             list the backends that work here
  pytransformer explain attention --case t5_bias --shape B=2,Hq=8,L=1024
  pytransformer bench --quick      time every op; ./results/bench-DATE/
  pytransformer verify             verify every backend, two minutes
  pytransformer train translate --data FILE          ./results/translate/
  pytransformer translate "a casa preta custa vinte reais."
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    from pytransformer import __version__

    parser = argparse.ArgumentParser(
        prog="pytransformer",
        description="Fused attention, normalization and feed-forward kernels for PyTorch.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pytransformer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (place, summary) in _COMMANDS.items():
        module = importlib.import_module(f"pytransformer.cli.{place}")
        sub = commands.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=getattr(module, "run", None))
        module.add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Run one command and return its exit code; invalid input never raises.

    `parser` is another command line, such as the one of examples/train.py.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
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
