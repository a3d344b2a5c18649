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


def plot_losses(rows: Sequence[Row], path: Path, title: str = "") -> Path:
    """Draw every "...loss" of the rows over the steps.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from ..viz import figure, save

    names = list(dict.fromkeys(name for row in rows for name in row if name.endswith("loss")))
    fig = figure(7, 4)
    axis = fig.subplots()
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        axis.plot(
            *zip(*points), label=name.replace("_", " "), marker="." if len(points) < 30 else None
        )
    axis.set_xlabel("step")
    axis.set_ylabel("loss, nats a token")
    axis.set_title(title)
    axis.grid(color="0.9")
    if names:
        axis.legend(frameon=False)
    return save(fig, path)


def plot_epochs(rows: Sequence[Row], path: Path, title: str = "") -> Path:
    """Draw the epochs that `Recipe.epoch_steps` recorded: losses left, masked accuracies right.

    Masked accuracy is the share of tokens, without padding, that the likeliest token matches under
    teacher forcing.

    Raises:
        ValueError: no row is an epoch's.
        ImportError: matplotlib is not installed.
    """
    from ..viz import figure, save

    epochs = [row for row in rows if "epoch_loss" in row]
    if not epochs:
        raise ValueError("plot_epochs: no epoch among the rows; train with Recipe(epoch_steps=...)")
    panels = {
        "loss, nats a token": {"epoch_loss": "training", "validation_loss": "held out"},
        "masked accuracy": {
            "training_accuracy": "training sentences, without dropout",
            "accuracy": "held out",
        },
    }
    fig = figure(10, 4)
    for axis, (what, names) in zip(fig.subplots(1, len(panels)), panels.items()):
        for name, label in names.items():
            points = [(row["epochs"], row[name]) for row in epochs if name in row]
            if points:
                axis.plot(*zip(*points), label=label, marker="." if len(points) < 30 else None)
        axis.set_xlabel("epoch")
        axis.set_ylabel(what)
        axis.grid(color="0.9")
        if axis.has_data():
            axis.legend(frameon=False)
    fig.suptitle(title)
    return save(fig, path)


def plot_runs(runs: Mapping[str, Sequence[Row]], path: Path, title: str = "") -> Path:
    """Draw several runs: losses left, other results of `evaluate` right, a line per run and name.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from ..viz import figure, save

    passed = {"step", "epoch", "epochs", "learning_rate", "milliseconds_a_step", "tokens_a_second"}
    fig = figure(11, 4)
    for axis, loss in zip(fig.subplots(1, 2), (True, False)):
        for run, rows in runs.items():
            told = dict.fromkeys(
                name
                for row in rows
                for name in row
                if name not in passed and name.endswith("loss") == loss
            )
            # Distances have another scale; viz draws them.
            names = [name for name in told if not name.startswith("distance")]
            for name in names:
                points = [(row["step"], row[name]) for row in rows if name in row]
                shown = f"{run}: {name.replace('_', ' ')}" if run else name.replace("_", " ")
                axis.plot(*zip(*points), label=shown, marker="." if len(points) < 30 else None)
        axis.set_xlabel("step")
        axis.set_ylabel("loss, nats" if loss else "held out")
        axis.grid(color="0.9")
        if axis.has_data():
            axis.legend(frameon=False, fontsize="small")
    fig.suptitle(title)
    return save(fig, path)
