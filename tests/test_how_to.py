# SPDX-License-Identifier: Apache-2.0
"""The how-to of docs/contributing/op.md and cpu-kernel.md works in a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "docs" / "contributing" / name for name in ("op.md", "cpu-kernel.md")]
BLOCK = re.compile(r"^```\w+ (\S+)(?: after ([^\n]*))?\n(.*?)^```$", re.S | re.M)
MAX_EDITED = 2
# The kernel sources of other ops; the copy builds only the new op's.
OTHER_KERNELS = ("attention", "layer_norm", "feed_forward", "cross_entropy", "rotary")
NOTHING_ELSE = {
    "PYTRANSFORMER_CUDA": "0",
    "PYTRANSFORMER_FAST_PATH": "0",
    "PYTRANSFORMER_BINDINGS": "0",
}

pytestmark = pytest.mark.unpoisoned


class Block(NamedTuple):
    path: str
    after: str | None  # insert the text after this line of an existing file; None: a new file
    text: str


def blocks() -> list[Block]:
    return [
        Block(path, after or None, text)
        for page in PAGES
        for path, after, text in BLOCK.findall(page.read_text())
    ]


def apply(block: Block, tree: Path) -> None:
    file = tree / block.path
    if block.after is None:
        assert not file.exists(), (
            f"{block.path} is there already: the how-to must say behind which line its text goes"
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text)
        return
    old = file.read_text()
    assert old.count(block.after + "\n") == 1, (
        f"{block.path} has no line {block.after!r}, or several"
    )
    file.write_text(old.replace(block.after + "\n", block.after + "\n" + block.text))


def run(tree: Path, *command: str, **environment: str) -> str:
    """Return the command's output; the copy's package precedes an installed one."""
    variables = (
        os.environ
        | {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
        | environment
    )
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the tree with the how-to's files.

    Its CPU library has the generic instruction set and the new op only.
    """
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the tree is copied by git, and this is no checkout")
    copy = tmp_path_factory.mktemp("how_to") / "tree"
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "-co", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() and not name.startswith("bench/results/"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    if not (copy / "pytransformer" / "kernels").exists():
        (copy / "pytransformer" / "kernels").symlink_to(copy / "kernels")
    for block in blocks():
        apply(block, copy)
    for family in OTHER_KERNELS:
        for path in (copy / "csrc" / "cpu" / family).glob("*.cpp"):
            path.unlink()
    run(
        copy,
        "setup.py",
        "-q",
        "build_ext",
        "--inplace",
        PYTRANSFORMER_CPU="1",
        PYTRANSFORMER_CPU_ISAS="generic",
        **NOTHING_ELSE,
    )
    return copy


def test_a_new_op_edits_few_files() -> None:
    assert len(blocks()) > 10
    edited = {block.path for block in blocks() if block.after is not None}
    assert len(edited) <= MAX_EDITED, f"a new op edits {', '.join(sorted(edited))}"
    assert all((ROOT / path).is_file() for path in edited)


def test_tests_of_a_new_op_pass_on_every_backend(tree: Path) -> None:
    output = run(
        tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/test_scale_rows.py"
    )
    assert re.search(r"scale_rows_fwd +cpu +\d", output) and re.search(
        r"scale_rows_bwd +cpu +\d", output
    ), output


def test_tools_support_a_new_op(tree: Path) -> None:
    explained = run(tree, "-m", "pytransformer", "explain", "scale_rows", "--shape", "rows=4,d=8")
    assert explained.startswith("scale_rows 4x8 float32: cpu"), explained
    assert "scale_rows" in run(tree, "-m", "pytransformer", "bench", "scale_rows", "--list")
    run(
        tree,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/test_layout.py",
        "tests/test_docs.py",
        "-k",
        "scale_rows or index",
    )
