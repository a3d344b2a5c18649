# SPDX-License-Identifier: Apache-2.0
"""The metrics of a training run: JSON lines and a plot of the losses."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..models._files import parse, write_text

Row = dict[str, Any]
# The fields of a row that `series` leaves out.
_NO_RESULTS = {"step", "epoch", "epochs", "learning_rate", "milliseconds_a_step", "tokens_a_second"}


class Metrics:
    """The rows of a run, such as {"step": 50, "loss": 4.2}, in order; also written to `path`."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.rows: list[Row] = []

    def resume(self, step: int) -> None:
        """Drop rows after `step`, which the resumed run computes and writes again."""
        if self.path is None:
            return
        self.rows = (
            [row for row in read_metrics(self.path) if row["step"] <= step]
            if self.path.exists()
            else []
        )
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())


def read_metrics(path: Path) -> list[Row]:
    """Return the rows of a file without an incomplete last line.

    Raises:
        ValueError: another line is not a JSON object; the message has its number.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [parse(line, "the line")] if line else []
        except ValueError as error:
            if number < len(lines):  # the last line lacks its line break
                raise ValueError(f"{path}, line {number}: no JSON object: {line[:60]!r}") from error
    return rows


def is_loss(name: str) -> bool:
    return name.endswith("loss")


def series(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Return the points (step, value) of each result, without times, rates and distances.

    Distances have another scale; viz draws them.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in _NO_RESULTS and not name.startswith("distance"):
                found.setdefault(name, []).append((row["step"], value))
    return found


def plot_losses(rows: Sequence[Row], path: Path, title: str = "") -> Path:
    """Draw every "...loss" of the rows over the steps.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from ..viz import draw_lines, figure, save

    fig = figure(7, 4.4)
    losses = {n.replace("_", " "): curve for n, curve in series(rows).items() if is_loss(n)}
    draw_lines(fig.subplots(), losses, "step", "loss, nats per token")
    fig.suptitle(title)
    return save(fig, path)


def plot_epochs(rows: Sequence[Row], path: Path, title: str = "") -> Path:
    """Draw the epochs that `Recipe.epoch_steps` recorded: losses left, masked accuracies right.

    Masked accuracy is the share of tokens, without padding, that the likeliest token matches under
    teacher forcing.

    Raises:
        ValueError: no row is an epoch's.
        ImportError: matplotlib is not installed.
    """
    from ..viz import draw_lines, figure, save

    epochs = [row for row in rows if "epoch_loss" in row]
    if not epochs:
        raise ValueError("plot_epochs: no epoch among the rows; train with Recipe(epoch_steps=...)")
    panels = {
        "loss, nats per token": {"epoch_loss": "training", "validation_loss": "held out"},
        "masked accuracy": {
            "training_accuracy": "training sentences, without dropout",
            "accuracy": "held out",
        },
    }
    fig = figure(10, 4.4)
    for axis, (what, names) in zip(fig.subplots(1, len(panels)), panels.items()):
        curves = {
            label: [(row["epochs"], row[name]) for row in epochs if name in row]
            for name, label in names.items()
        }
        draw_lines(axis, {k: v for k, v in curves.items() if v}, "epoch", what)
    fig.suptitle(title)
    return save(fig, path)


def plot_runs(runs: Mapping[str, Sequence[Row]], path: Path, title: str = "") -> Path:
    """Draw several runs: losses left, other results of `evaluate` right, a line per run and name.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from ..viz import draw_lines, figure, save

    fig = figure(11, 4.4)
    for axis, loss in zip(fig.subplots(1, 2), (True, False)):
        curves = {
            f"{run}: {name.replace('_', ' ')}" if run else name.replace("_", " "): points
            for run, rows in runs.items()
            for name, points in series(rows).items()
            if is_loss(name) == loss
        }
        draw_lines(axis, curves, "step", "loss, nats" if loss else "held out")
    fig.suptitle(title)
    return save(fig, path)
