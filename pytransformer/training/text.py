# SPDX-License-Identifier: Apache-2.0
"""Texts from files: sentence pairs from two columns, or one text per line."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    source: str
    target: str


def read_pairs(path: str | Path) -> list[Pair]:
    """Return the sentence pairs of a UTF-8 file with two tab-separated columns; skip empty lines.

    Raises:
        ValueError: a line is not two texts with a tab between them (the message has its number),
            there is no pair, or the file is not UTF-8.
        OSError: the file cannot be read.
    """
    pairs = []
    for number, line in _lines(Path(path)):
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != 2 or not all(columns):
            got = (
                "an empty column"
                if len(columns) == 2
                else f"{len(columns)} column{'s' * (len(columns) != 1)}"
            )
            raise ValueError(
                f"{path}, line {number}: expected two texts with a tab between them, got {got}:"
                f" {line[:60]!r}"
            )
        pairs.append(Pair(*columns))
    if not pairs:
        raise ValueError(
            f"{path} is empty: expected sentence pairs, one a line, with a tab between the two"
        )
    return pairs


def read_texts(path: str | Path) -> list[str]:
    """Return the nonempty lines of a UTF-8 file.

    Raises:
        ValueError: no line, or not UTF-8.
        OSError: the file cannot be read.
    """
    texts = [line.strip() for _, line in _lines(Path(path))]
    if not texts:
        raise ValueError(f"{path} is empty: expected texts, one a line")
    return texts


def write_pairs(path: str | Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Write a file for :func:`read_pairs`.

    Raises:
        ValueError: a text is empty or contains a tab or a line break.
    """
    lines = []
    for pair in pairs:
        if any(not text.strip() or any(mark in text for mark in "\t\n\r") for text in pair):
            raise ValueError(
                f"write_pairs: expected two texts without tabs and line breaks, got {pair!r}"
            )
        lines.append("\t".join(pair) + "\n")
    Path(path).write_text("".join(lines), encoding="utf-8")


def split_pairs(
    pairs: list[Pair], every: int = 20, key: Callable[[str], str] | None = None
) -> tuple[list[Pair], list[Pair]]:
    """Return (training, held-out) pairs; one source in `every` is held out with all translations.

    The choice depends on the sentence only, so equal pairs are on the same side.

    Args:
        key: sentences with the same key count as one, and no held-out target is a training target.
            Pairs connected by sources or targets, directly or indirectly, are held out together or
            not at all.
    """
    import zlib

    names = [pair.source for pair in pairs] if key is None else _connected(pairs, key)
    train: list[Pair] = []
    held_out: list[Pair] = []
    for pair, name in zip(pairs, names):
        (held_out if zlib.crc32(name.encode()) % every == 0 else train).append(pair)
    return train, held_out


def _connected(pairs: list[Pair], key: Callable[[str], str]) -> list[str]:
    """Return the min key of each pair's group, connected by sources or targets (union-find)."""
    parent: dict[tuple[int, str], tuple[int, str]] = {}

    def root(node: tuple[int, str]) -> tuple[int, str]:
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for pair in pairs:
        ends = sorted(root((side, key(text))) for side, text in enumerate(pair))
        parent[ends[1]] = ends[0]
    return [root((0, key(pair.source)))[1] for pair in pairs]


def _lines(path: Path) -> list[tuple[int, str]]:
    """Return (number, line) of the lines that are not blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
