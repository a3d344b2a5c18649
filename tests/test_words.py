# SPDX-License-Identifier: Apache-2.0
"""Code, tests and docs use the field's words (docs/glossary.md); decisions are exempt."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PLACES = (
    "csrc",
    "kernels",
    "pytransformer",
    "tests",
    "bench",
    "docs",
    "examples",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
)
KINDS = {".py", ".h", ".cpp", ".cuh", ".cu", ".md", ".sh"}
# Old words without another use here, and their replacements.
WORDS = {
    r"\blookups?\b|\blooks_up\b|\bLookups\b": "elementwise mask, MaskLoader",
    r"\b(is|are|be|been|was) made again\b|\bmakes? \w+ again\b|\bmake_tiles\b|\bredo\b": (
        "recompute"
    ),
    r"\bSeenPairs\b": "visible mask",
    r"\bKeyWords\b|\bkey_words\b": "key-padding bitmap",
    r"\bbwd_(queries|keys)\b": "bwd_dq, bwd_dkdv",
    r"\bbwd_dense\b": "bwd_dbias",
    r"\bwide_keys\b": "bwd_dkdv_hdim256",
    r"\bawait_full\b": "consumer_wait",
    r"ptx::(again|pin)\b": "opaque, fence_operand",
    r"\bown_split\b": "kv_range",
    r"\bby_library\b": "use_cublas",
    r"\b(plain|general) kernels?\b": "bounds-only kernel, kernel with a score_mod",
    r"\bstream_out\b|\b(ffn|ce|norm)_(fwd|bwd|forward|backward|backend|kernels?)\b": (
        "residual_out; the op's family"
    ),
    r"\bdear(er|est)?\b": "expensive",
    r"(?i)(?<![a-z])tiers?(?![a-z])": "backend",
}


FIRST = re.compile(r"(Of|Those|What|Whether|Where|As)\b")


def sources() -> list[Path]:
    """Return the files of PLACES except decisions and this file."""
    files = [
        p
        for place in PLACES
        for p in ([ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*")))
    ]
    files = [
        p
        for p in files
        if p.suffix in KINDS and "decisions" not in p.parts and p != Path(__file__).resolve()
    ]
    assert len(files) > 500
    return files


def lines_with(pattern: str, files: list[Path]) -> list[str]:
    lines = (
        (p, n, line)
        for p in files
        for n, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1)
    )
    return [
        f"{p.relative_to(ROOT)}:{n}: {line.strip()}"
        for p, n, line in lines
        if re.search(pattern, line)
    ]


@pytest.mark.parametrize("words", WORDS, ids=WORDS.values())
def test_old_words_are_absent(words: str) -> None:
    matches = lines_with(words, sources())
    assert not matches, f"write {WORDS[words]}:\n" + "\n".join(matches)


def test_messages_say_expected() -> None:
    assert lines_with(r"[\"'].*[;:] wanted ", sources()) == []


def relative_clauses(path: Path) -> list[str]:
    """Return the docstrings and comment blocks of a file that start with a relative clause."""
    text = path.read_text(encoding="utf-8")
    starts = re.findall(r'^\s*r?"""(.+)', text, re.M)
    lines = [line.strip() for line in text.splitlines()]
    sign = "#" if path.suffix == ".py" else "//"
    starts += [
        line.removeprefix(sign).strip()
        for before, line in itertools.pairwise(lines)
        if line.startswith(f"{sign} ")
        and (not before.startswith(sign) or "SPDX-License-Identifier" in before)
    ]
    return [f"{path.relative_to(ROOT)}: {start[:80]}" for start in starts if FIRST.match(start)]


def test_docstrings_and_comments_start_with_the_subject() -> None:
    code = [p for p in sources() if p.suffix not in (".md", ".sh")]
    assert [start for p in code for start in relative_clauses(p)] == []


def test_relative_clauses_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (file := tmp_path / "x.py").write_text('"""What it does."""\nx = 1\n# Of the rest.\n# As is.\n')
    assert relative_clauses(file) == ['x.py: What it does."""', "x.py: Of the rest."]
    (file := tmp_path / "x.h").write_text("// SPDX-License-Identifier: A\n// What is shared.\n")
    assert relative_clauses(file) == ["x.h: What is shared."]
