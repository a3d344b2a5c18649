# SPDX-License-Identifier: Apache-2.0
"""Code, tests and docs use the field's words (docs/glossary.md); decisions are exempt."""

from __future__ import annotations

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


@pytest.mark.parametrize("words", WORDS, ids=WORDS.values())
def test_no_word_of_before(words: str) -> None:
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
    lines = (
        (p, n, line)
        for p in files
        for n, line in enumerate(p.read_text(encoding="utf-8").splitlines(), 1)
    )
    found = [
        f"{p.relative_to(ROOT)}:{n}: {line.strip()}"
        for p, n, line in lines
        if re.search(words, line)
    ]
    assert not found, f"write {WORDS[words]}:\n" + "\n".join(found)
