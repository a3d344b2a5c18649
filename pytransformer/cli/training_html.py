# SPDX-License-Identifier: Apache-2.0
"""report.html of `pytransformer train`: curves, results, samples and settings in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import _html
from ..models import _files
from ..training.metrics import Row, is_loss, series

PAGE = "report.html"
Samples = tuple[Sequence[str], Sequence[Sequence[object]]]  # columns and rows


def write(
    out: Path,
    title: str,
    runs: Mapping[str, Sequence[Row]],
    report: Mapping[str, Any],
    settings: Mapping[str, Any],
    samples: Samples | None = None,
) -> None:
    """Write report.html.

    Args:
        runs: the metrics of each stage.
        report: the content of report.json; lists of mappings become tables.
        settings: the options of the run.
        samples: some outputs of the model.
    """
    parts = []
    for loss in (True, False):
        curves = {
            f"{run}: {name.replace('_', ' ')}".lstrip(": "): points
            for run, rows in runs.items()
            for name, points in series(rows).items()
            if is_loss(name) == loss
        }
        if curves:
            parts.append(_html.heading("Losses" if loss else "Held out"))
            parts.append(_html.lines(curves, "step", "loss, nats" if loss else "value"))
    if samples is not None and samples[1]:
        parts += [_html.heading("Samples"), _html.table(*samples)]
    tables = {k: v for k, v in report.items() if _is_table(v)}
    for name, rows in tables.items():
        columns = list(dict.fromkeys(column for row in rows for column in row))
        cells = [[_shown(row.get(column, "")) for column in columns] for row in rows]
        parts += [_html.heading(name.capitalize()), _html.table(columns, cells)]
    plain = [(k, _shown(v)) for k, v in report.items() if k not in tables]
    parts += [_html.heading("Report"), _html.table(("entry", "value"), plain)]
    options = _html.table(("setting", "value"), [(k, _shown(v)) for k, v in settings.items()])
    parts.append(_html.details("Settings", options))
    _files.write_text(out / PAGE, _html.page(f"pytransformer train {title}", parts))


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(entry)}" for name, entry in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
