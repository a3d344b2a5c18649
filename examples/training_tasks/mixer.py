# SPDX-License-Identifier: Apache-2.0
"""MLP-Mixer: classify handwritten digits, with MLPs or separable convolutions.

One model mixes patches by MLPs and one by separable convolutions. Both learn
from scikit-learn's 1,200 digits of 8 x 8 pixels (extra corpora), beside
logistic regression on the same images.
"""

from __future__ import annotations

import argparse

from ._digits import add_shift, add_sizes, classify, digits, image_collates
from ._run import Figure, Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, steps=1000, width=64, layers=4, batch=32, rate=2e-3)
    add_shift(parser, 1)
    parser.add_argument(
        "--kernel",
        type=int,
        default=3,
        help="of the convolutions, patches a side, odd (default %(default)s)",
    )


def train(run: Run) -> int:
    from pytransformer.models import Mixer, MixerConfig

    from .data.digits import CLASSES, SIDE, logistic_regression

    a = run.arguments
    learned, held_out = digits(run)
    linear = logistic_regression(learned, held_out)
    figures = []
    for stage, what, kernel in (
        ("network", "a network", 0),
        ("convolution", "separable convolutions", a.kernel),
    ):
        run.seed(stage)
        config = MixerConfig(
            image_size=SIDE, patch_size=2, channels=1, d_model=a.width, num_layers=a.layers,
            token_hidden=a.width // 2,
            hidden=2 * a.width, dropout=a.dropout, num_labels=CLASSES, label_smoothing=0.1,
            kernel_size=kernel,
        )  # fmt: skip
        told = classify(run, stage, Mixer(config), learned, held_out, image_collates(run))
        what = f"digits classified correctly, patches mixed by {what}"
        figures.append(
            Figure(what, told, linear, "logistic regression", 1 / CLASSES, len(held_out))
        )
    return run.report(figures)
