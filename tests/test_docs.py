# SPDX-License-Identifier: Apache-2.0
"""docs/: short pages, valid links, every page reachable from docs/index.md, source comments."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytransformer.ops._core import native

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MAX_WORDS = 1500
# A generated part of a page.
TABLE = re.compile(r"<!-- [^>]*: start, written by .*?: end -->", re.S)
CODE = re.compile(r"^```.*?^```$", re.S | re.M)
VARIABLE = re.compile(r"PYTRANSFORMER_[A-Z][A-Z0-9_]*[A-Z0-9]\b")
SOURCES = (
    "pytransformer",
    "kernels",
    "csrc",
    "bench",
    "tests",
    "Makefile",
    "setup.py",
    ".ci",
    "examples",
)


def links(page: Path) -> list[Path]:
    """Return the files of the tree that a page links to."""
    targets = re.findall(
        r"\]\(([^)#\s]*)[^)]*\)|<img src=\"([^\"]+)\"",
        CODE.sub("", page.read_text(encoding="utf-8")),
    )
    named = [first or second for first, second in targets]
    return [(page.parent / name).resolve() for name in named if name and "://" not in name]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def test_pages_are_short() -> None:
    words = {relative(page): len(TABLE.sub("", page.read_text()).split()) for page in PAGES}
    assert {page: count for page, count in words.items() if count > MAX_WORDS} == {}


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES],
    ids=relative,
)
def test_links_are_valid(page: Path) -> None:
    assert [relative(target) for target in links(page) if not target.exists()] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES],
    ids=relative,
)
def test_anchors_name_headings(page: Path) -> None:
    linked = re.findall(
        r"\]\(([^)#\s]*)#([^)\s]+)\)", CODE.sub("", page.read_text(encoding="utf-8"))
    )
    local = [
        ((page.parent / name).resolve() if name else page, anchor)
        for name, anchor in linked
        if "://" not in name
    ]
    assert [
        (relative(t), anchor)
        for t, anchor in local
        if t.suffix == ".md" and anchor not in anchors(t)
    ] == []


def test_every_page_is_reached_from_the_index() -> None:
    reached, pending = set(), [DOCS / "index.md"]
    while pending:
        page = pending.pop()
        if (
            page.suffix == ".md"
            and page.is_relative_to(DOCS)
            and page.is_file()
            and page not in reached
        ):
            reached.add(page)
            pending += links(page)
    assert [relative(page) for page in PAGES if page not in reached] == []
    assert DOCS / "index.md" in links(ROOT / "README.md")


def variables_of_the_sources() -> set[str]:
    found: set[str] = set()
    for name in SOURCES:
        for path in [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"):
            text = (
                path.suffix in {".py", ".h", ".cpp", ".cuh", ".cu", ".sh", ""}
                and path.is_file()
                and "results" not in path.relative_to(ROOT).parts
            )
            if text and path != Path(__file__).resolve():
                found |= set(VARIABLE.findall(path.read_text(encoding="utf-8", errors="replace")))
    return found


def test_every_environment_variable_is_documented() -> None:
    rows = [
        line.split("|")[1]
        for line in (DOCS / "environment.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    named = {variable for cell in rows for variable in VARIABLE.findall(cell)}
    assert named == variables_of_the_sources()


def test_architecture_picture_is_current() -> None:
    script = ROOT / "bench" / "tools" / "architecture.py"
    drawn = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
        cwd="/",
    ).stdout
    assert drawn == (DOCS / "images" / "architecture.svg").read_text(encoding="utf-8"), (
        f"run: python {relative(script)} --write"
    )


@pytest.mark.skipif(
    native.why_not("attention_fwd") is not None, reason=f"{native.why_not('attention_fwd')}"
)
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None
    or importlib.util.find_spec("pytransformer.kernels") is None,
    reason="needs Triton and an installed pytransformer.kernels, to query the Triton backend",
)
def test_support_table_matches_the_op_registry() -> None:
    script = ROOT / "bench" / "tools" / "support_table.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=True, cwd="/"
    )
    page = (DOCS / "fallbacks.md").read_text()
    assert done.stdout.strip() in page, "run: python bench/tools/support_table.py --write"
