# SPDX-License-Identifier: Apache-2.0
"""FNet: classify handwritten digits from sequences of gray levels.

FNet mixes tokens by Fourier transforms. A digit of scikit-learn (extra corpora)
is 64 tokens, row by row, after a start token that predicts the class; the model
has no notion of an image. The baselines are a BERT of the same size and steps,
and logistic regression on the pixels.
"""

from __future__ import annotations

import argparse

from ._digits import add_sizes, classify, digits
from ._run import Figure, Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, steps=1500, width=64, layers=2, batch=32, rate=3e-3)


def train(run: Run) -> int:
    from pytransformer.models import BERT, BERTConfig, FNet, FNetConfig

    from .data.digits import CLASSES, LEVELS, SIDE, level_collate, logistic_regression

    a = run.arguments
    learned, held_out = digits(run)
    shape = dict(
        vocab_size=LEVELS + 1, d_model=a.width, num_layers=a.layers, num_heads=4,
        hidden=2 * a.width, dropout=a.dropout,
        attention_dropout=0.0, max_length=SIDE * SIDE + 1, num_segments=1,
        heads=("classification",), num_labels=CLASSES,
    )  # fmt: skip
    told = {}
    for stage, made in (
        ("fnet", lambda: FNet(FNetConfig(**shape))),
        ("bert", lambda: BERT(BERTConfig(**shape))),
    ):
        run.seed(stage)
        told[stage] = classify(
            run, stage, made(), learned, held_out, (level_collate(), level_collate())
        )
    linear = logistic_regression(learned, held_out)
    about = ("digits classified correctly from 64 gray levels", told["fnet"])
    return run.report([
        Figure(*about, told["bert"], "BERT of the same size", 1 / CLASSES, len(held_out)),
        Figure(*about, linear, "logistic regression on the pixels", 1 / CLASSES, len(held_out)),
    ])  # fmt: skip
