# SPDX-License-Identifier: Apache-2.0
"""Train the project's models on texts and images of installed packages.

    python examples/train.py --help                        # the tasks
    python examples/train.py bert --data gettext:Django,Sphinx,wagtail
    torchrun --nproc-per-node=2 examples/train.py gpt --data pairs.tsv --mesh tensor=2

Each task trains from random weights, compares held-out results with a simple
baseline and writes models, metrics, a report and a picture to --out. --resume
continues an interrupted run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from pytransformer import cli
from pytransformer.cli import train

sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH
from training_tasks._run import Run

TASKS = {
    name: importlib.import_module(f"training_tasks.{name}")
    for name in "bert conformer fnet gpt mixer moe spanbert t5 translate vit".split()
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="examples/train.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_arguments(parser, TASKS, Run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(argv, build_parser())


if __name__ == "__main__":
    sys.exit(main())
