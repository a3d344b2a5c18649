# SPDX-License-Identifier: Apache-2.0
"""The ``python`` blocks of README and docs run unchanged, those of a page in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
OPTIONAL = {
    "transformers": "transformers",
    "import viz": "matplotlib",
}  # text of a page -> the module it needs


def pages() -> dict[str, list[str]]:
    """Return the blocks of each page that has one."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {
        str(path.relative_to(ROOT)): BLOCK.findall(path.read_text(encoding="utf-8"))
        for path in paths
    }
    return {page: blocks for page, blocks in found.items() if blocks}


def run(page: str) -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    for number, block in enumerate(pages()[page], 1):
        exec(compile(block, f"{page}, block {number}", "exec"), names)


@pytest.mark.unpoisoned
@pytest.mark.falls_back
@pytest.mark.parametrize("page", sorted(pages()))
def test_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text, module in OPTIONAL.items():
        if any(text in block for block in pages()[page]):
            pytest.importorskip(module, reason=f"the page shows {module}")
    run(page)
