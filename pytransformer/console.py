# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: tables and progress as plain text.

Names come from outside (a CPU's name, an exception's text), so every cell passes through `clean`,
and each writer escapes the signs that its format interprets.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

EXTRA_HINT = "pip install matplotlib   (the `bench` extra of pytransformer-kernels)"

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def clean(text: object) -> str:
    """Return one line of text without control characters or terminal escapes."""
    return _CONTROL.sub("", " ".join(str(text).replace("\t", " ").splitlines()))


def escape_markdown(text: object) -> str:
    """Return `text` as literal characters of a Markdown table cell, HTML included."""
    text = re.sub(r"([\\`*_{}\[\]|~#])", r"\\\1", clean(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escape_csv(text: object) -> str:
    """Return `text` such that no spreadsheet reads it as a formula."""
    text = clean(text)
    return "'" + text if text[:1] in ("=", "+", "-", "@") else text


def escape_plot(text: object) -> str:
    """Return `text` such that matplotlib does not read it as mathematics."""
    return clean(text).replace("\\", "/").replace("$", r"\$")


class Console:
    """Prints to one stream; on a terminal the progress is a bar."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"

    @property
    def width(self) -> int | None:
        """Return the terminal's columns, or None if lines may have any length."""
        return shutil.get_terminal_size().columns if self.terminal else None

    def print(self, text: str = "") -> None:
        print(text, file=self.stream, flush=True)

    def heading(self, text: str) -> None:
        self.print(f"\n{text}")

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()
    ) -> None:
        """Print `rows` under `columns`; the columns in `right` are aligned to the right."""
        cells = [[clean(cell) for cell in row] for row in rows]
        widths = _widths(columns, cells)
        for line in (columns, ["-" * w for w in widths], *cells):
            padded = (
                text.rjust(w) if name in right else text.ljust(w)
                for text, w, name in zip(line, widths, columns, strict=True)
            )
            self.print("  ".join(padded).rstrip())

    @contextmanager
    def progress(
        self, total: int, *, seconds: float | None = None, weights: Sequence[float] = ()
    ) -> Iterator[Progress]:
        """Show progress over `total` steps of relative cost `weights`, planned for `seconds`."""
        progress = Progress(self, total, seconds, weights or [1.0] * total)
        try:
            yield progress
        finally:
            progress.close()


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max([len(column), *(len(row[i]) for row in rows)]) for i, column in enumerate(columns)]


def table_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return the characters in a line of the table, with two spaces between columns."""
    return sum(_widths(columns, rows)) + 2 * (len(columns) - 1)


class Progress:
    """A bar with the remaining time on a terminal, else one line per step.

    `Console.progress` creates it.
    """

    def __init__(
        self, console: Console, total: int, seconds: float | None, weights: Sequence[float]
    ) -> None:
        self.console, self.total, self.seconds, self.weights = console, total, seconds, weights
        self.done, self.start = 0, time.monotonic()
        self._width = 0

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
        """Print what begins now."""
        if self.console.terminal:
            bar = "#" * (20 * self.done // max(1, self.total))
            head = f"[{bar:<20}] {self.done}/{self.total} {self.time_left()}"
            self._overwrite(f"{head}  {clean(text)}")
        else:
            self.console.print(f"[{self.done + 1}/{self.total}] {clean(text)}")

    def advance(self) -> None:
        """Count one step as done."""
        self.done += 1

    def close(self) -> None:
        if self.console.terminal:
            self._overwrite("")

    def _overwrite(self, line: str) -> None:
        line = line[: (self.console.width or 100) - 1]
        self.console.stream.write("\r" + line.ljust(self._width) + ("" if line else "\r"))
        self.console.stream.flush()
        self._width = len(line)
