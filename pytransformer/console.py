# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: tables and progress, with `rich` on a terminal and plain text
elsewhere.

Names come from outside (a CPU's name, an exception's text), so every cell passes through `clean`,
and each writer escapes the signs that its format interprets.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

EXTRA_HINT = "pip install rich matplotlib   (the `bench` extra of pytransformer-kernels)"

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def clean(text: object) -> str:
    """One line of text without control characters: no terminal escape or line break gets into a
    report."""
    return _CONTROL.sub("", " ".join(str(text).replace("\t", " ").splitlines()))


def escape_markdown(text: object) -> str:
    """`text` as literal characters inside a Markdown table cell, HTML included."""
    text = re.sub(r"([\\`*_{}\[\]|~#])", r"\\\1", clean(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escape_csv(text: object) -> str:
    """`text` that no spreadsheet takes for a formula."""
    text = clean(text)
    return "'" + text if text[:1] in ("=", "+", "-", "@") else text


def escape_plot(text: object) -> str:
    """`text` that matplotlib does not take for mathematics."""
    return clean(text).replace("\\", "/").replace("$", r"\$")


def have_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


class Console:
    """Prints to one stream. On a terminal with `rich` installed: coloured tables and a progress
    bar; else plain.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.rich = None
        if self.terminal and have_rich():
            from rich.console import Console as RichConsole

            self.rich = RichConsole(file=self.stream, highlight=False)

    @property
    def width(self) -> int | None:
        """Columns of the terminal; None where lines may be of any length."""
        return shutil.get_terminal_size().columns if self.terminal else None

    def print(self, text: str = "") -> None:
        if self.rich is not None:
            self.rich.print(text, markup=False, soft_wrap=True)
        else:
            print(text, file=self.stream, flush=True)

    def heading(self, text: str) -> None:
        if self.rich is not None:
            self.rich.print()
            self.rich.print(text, style="bold", markup=False)
        else:
            self.print(f"\n{text}")

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()
    ) -> None:
        """Prints `rows` under `columns`; the columns named in `right` are aligned right."""
        cells = [[clean(cell) for cell in row] for row in rows]
        if self.rich is None:
            self.print(plain_table(columns, cells, right=right))
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(
                column, justify="right" if column in right else "left", overflow="fold"
            )
        for row in cells:
            table.add_row(*(Text(cell, style=_style(cell)) for cell in row))
        self.rich.print(table)

    @contextmanager
    def progress(
        self, total: int, *, seconds: float | None = None, weights: Sequence[float] = ()
    ) -> Iterator[Progress]:
        """Progress over `total` steps; `seconds` is the time they are planned to take together, if
        that is known, `weights` how long each takes beside the others.
        """
        progress = Progress(self, total, seconds, weights or [1.0] * total)
        try:
            yield progress
        finally:
            progress.close()


def _style(cell: str) -> str:
    if cell.startswith("WRONG") or cell == "no":
        return "bold red"
    return "green" if cell in ("yes", "works", "chosen") else ""


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max([len(column), *(len(row[i]) for row in rows)]) for i, column in enumerate(columns)]


def table_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Characters in a line of the table, two spaces between columns."""
    return sum(_widths(columns, rows)) + 2 * (len(columns) - 1)


def plain_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
) -> str:
    """A table in plain text, two spaces between columns."""
    widths = _widths(columns, rows)

    def line(cells: Sequence[str]) -> str:
        padded = (
            c.rjust(w) if name in right else c.ljust(w)
            for c, w, name in zip(cells, widths, columns, strict=True)
        )
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * w for w in widths]), *(line(row) for row in rows)])


class Progress:
    """A bar with the time left on a terminal, one line per step otherwise. Use through
    `Console.progress`."""

    def __init__(
        self, console: Console, total: int, seconds: float | None, weights: Sequence[float]
    ) -> None:
        self.console, self.total, self.seconds, self.weights = console, total, seconds, weights
        self.done, self.start = 0, time.monotonic()
        self._width = 0
        self._live = None
        if console.rich is not None:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            self._live = RichProgress(
                BarColumn(bar_width=30),
                TextColumn(
                    "{task.completed:.0f}/{task.total:.0f}  {task.fields[left]}  ", markup=False
                ),
                TextColumn("{task.description}", markup=False),
                console=console.rich,
                transient=True,
            )
            self._task = self._live.add_task("", total=total, left="")
            self._live.start()

    def time_left(self) -> str:
        elapsed = time.monotonic() - self.start
        guesses = [] if self.seconds is None else [self.seconds - elapsed]
        if self.done:
            guesses.append(
                elapsed / sum(self.weights[: self.done]) * sum(self.weights[self.done :])
            )
        if not guesses:
            return ""
        left = min(guesses)
        return f"about {max(1, round(left))} s left" if left > 0 else "nearly done"

    def step(self, text: str) -> None:
        """Says what begins now."""
        text = clean(text)
        if self._live is not None:
            self._live.update(self._task, description=text, left=self.time_left())
        elif self.console.terminal:
            bar = "#" * (20 * self.done // max(1, self.total))
            self._overwrite(f"[{bar:<20}] {self.done}/{self.total} {self.time_left()}  {text}")
        else:
            print(f"[{self.done + 1}/{self.total}] {text}", file=self.console.stream, flush=True)

    def advance(self) -> None:
        """Counts one step as done."""
        self.done += 1
        if self._live is not None:
            self._live.update(self._task, completed=self.done, left=self.time_left())

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        elif self.console.terminal:
            self._overwrite("")

    def _overwrite(self, line: str) -> None:
        line = line[:100]
        self.console.stream.write("\r" + line.ljust(self._width) + ("" if line else "\r"))
        self.console.stream.flush()
        self._width = len(line)
