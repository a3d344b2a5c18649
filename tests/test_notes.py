# SPDX-License-Identifier: Apache-2.0
"""tests/notes.md: the files, tests and commands of its tables exist, with their options."""

from __future__ import annotations

import argparse
import ast
import functools
import re
import runpy
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from pytransformer.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "tests" / "notes.md"
TRAIN = "examples/train.py"
MISSING = "nobody/wrote/this.py"


def rows(page: str) -> list[list[str]]:
    """Return the cells of each row of each table, without the tables' heads."""
    found = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return [row for row in found if row[1] != "file"]


@functools.cache
def names_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def wrong(row: list[str]) -> list[str]:
    """Return the row's references that do not exist.

    The second cell has files, the third tests, and the fourth, which may be empty, commands.
    """
    files, tests, *commands = (re.findall(r"`([^`]+)`", cell) for cell in row[1:])
    lacking = [name for name in files if not (ROOT / name).is_file()]
    if not files or not tests:
        lacking.append(f"no file or no test in {row}")
    for name in tests:
        path, _, test = name.partition("::")
        if not (ROOT / path).is_file() or test not in names_of(ROOT / path):
            lacking.append(name)
    for command in commands[0] if commands else []:
        if not runs(*shlex.split(command)):
            lacking.append(command)
    return lacking


def runs(program: str, *words: str) -> bool:
    """Return True if the command's parser accepts it, or its script names its options."""
    if program == "pytransformer":
        return parses(build_parser(), words)
    if program != "python" or not (ROOT / words[0]).is_file():
        return False
    if words[0] == TRAIN:
        return parses(runpy.run_path(str(ROOT / TRAIN))["build_parser"](), words[1:])
    return options_there(ROOT / words[0], words[1:])


def options_there(script: Path, words: Sequence[str]) -> bool:
    return all(
        f'"{word}"' in script.read_text(encoding="utf-8") for word in words if word.startswith("--")
    )


def parses(parser: argparse.ArgumentParser, words: Sequence[str]) -> bool:
    try:
        return hasattr(parser.parse_args(words), "run")
    except SystemExit:
        return False


def test_references_exist() -> None:
    assert [
        lacking for row in rows(PAGE.read_text(encoding="utf-8")) for lacking in wrong(row)
    ] == []


def test_tables_have_every_system_and_number() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = "Transformer BERT SpanBERT GPT T5 ViT FNet Mixer GShard Conformer Linformer".split()
    assert [name for name in names if name not in page] == [] and len(rows(page)) >= 40


@pytest.mark.parametrize(
    "row",
    [
        ["a", f"`{MISSING}`", "`tests/test_notes.py::test_references_exist`"],
        ["a", "`setup.py`", "`tests/test_notes.py::test_of_nobody`"],
        ["a", "`setup.py`", "`tests/test_notes.py::parses`"],
        ["a", "`setup.py`", ""],
        [
            "a",
            "`setup.py`",
            "`tests/test_notes.py::test_references_exist`",
            "`pytransformer train nothing`",
        ],
        [
            "a",
            "`setup.py`",
            "`tests/test_notes.py::test_references_exist`",
            "`python examples/train.py vit --sharse 1`",
        ],
        [
            "a",
            "`setup.py`",
            "`tests/test_notes.py::test_references_exist`",
            "`python examples/gpt.py --perfix`",
        ],
    ],
)
def test_missing_references_are_detected(
    row: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(wrong(row)) == 1
