# SPDX-License-Identifier: Apache-2.0
"""An encoder-decoder that translates sentences.

It learns from any file with two tab-separated columns, such as the one that
`python examples/portuguese.py` writes, or from the translations of installed
packages: --data gettext:Django,Sphinx --from pt --to en.
"""

from __future__ import annotations

import argparse

from pytransformer.cli import train_translate

from ._run import Run
from ._text import add_pairs, pairs_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pairs(parser)
    train_translate.add_sizes(parser)


def train(run: Run) -> int:
    return train_translate.train(run, pairs_of(run))
