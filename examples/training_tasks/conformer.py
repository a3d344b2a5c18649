# SPDX-License-Identifier: Apache-2.0
"""A Conformer that reads strips of handwritten digits from left to right.

A strip has 2 to 6 of scikit-learn's digits (extra corpora), randomly stretched,
with gaps between them and noise everywhere. A frame is one column of 16 pixels.
The target is the digit sequence without positions, learned by CTC on a quarter
of the frames. Evaluation strips have digits that occur in no training strip.
The baselines are the same subsampling with a linear layer and no blocks, and
the same Conformer without relative positions.
"""

from __future__ import annotations

import argparse
from functools import partial

from ._digits import add_sizes, digits, on_device, schedule
from ._run import Figure, Run

_ROWS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser, steps=400, width=64, layers=2, batch=16, rate=2e-3)
    data = parser.add_argument_group("data")
    data.add_argument(
        "--strips", type=int, default=4000, help="to learn from (default %(default)s)"
    )
    data.add_argument(
        "--held-out",
        type=int,
        default=200,
        metavar="N",
        help="strips to measure with (default %(default)s)",
    )
    data.add_argument("--longest", type=int, default=6, help="digits a strip (default %(default)s)")


def train(run: Run) -> int:
    from pytransformer.models import Conformer, ConformerConfig
    from pytransformer.training import Batches

    from .data.digits import CLASSES, make_strips, reading_errors, strip_collate

    a = run.arguments
    learned, held_out = (
        make_strips(part, count, run.seed(name), longest=a.longest, rows=_ROWS)
        for part, count, name in zip(digits(run), (a.strips, a.held_out), ("strips", "held out"))
    )
    collate = strip_collate()
    measured = on_device(
        run, [collate(held_out[i : i + 50], run.seed()) for i in range(0, len(held_out), 50)]
    )
    found = {}
    stages = {
        "conformer": (a.layers, True),
        "no-positions": (a.layers, False),
        "no-blocks": (0, False),
    }
    for stage, (layers, relative) in stages.items():
        run.seed(stage)
        config = ConformerConfig(
            input_dim=_ROWS, d_model=a.width, num_layers=layers, num_heads=4, hidden=2 * a.width,
            kernel_size=7,
            dropout=a.dropout, relative=relative, vocab_size=CLASSES + 1, ctc=True,
        )  # fmt: skip
        model = Conformer(config)
        batches = Batches(
            learned, a.batch, collate, lengths=[len(s.features) for s in learned], seed=a.seed
        )
        run.fit(
            stage,
            model,
            batches,
            schedule(run, a.steps),
            a.steps,
            evaluate=partial(reading_errors, batches=measured),
        )
        found[stage] = reading_errors(model, measured)
    figures = []
    for name, what, chance in (
        ("digit_errors", "edits a digit", 1.0),
        ("exact", "strips read without an error", 0.0),
    ):
        for other, by in (
            ("no-blocks", "subsampling and a linear layer"),
            ("no-positions", "without relative positions"),
        ):
            figures.append(
                Figure(
                    what, found["conformer"][name], found[other][name], by, chance, len(held_out)
                )
            )
    return run.report(figures, found=found)
