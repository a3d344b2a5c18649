# SPDX-License-Identifier: Apache-2.0
"""The documentation site: strict build, pages of docs/index.md, API names, no other hosts."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import pytransformer

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("mkdocs", "material", "mkdocstrings_handlers.python")
LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href"}  # loaded unasked
WITHOUT_ENTRY = {"__version__"}  # a string, which has no docstring


def is_installed(module: str) -> bool:
    parts = module.split(".")
    return all(importlib.util.find_spec(".".join(parts[: n + 1])) for n in range(len(parts)))


MISSING = [module for module in NEEDED if not is_installed(module)]
REASON = f"needs the extra docs: no {', '.join(MISSING)}"
pytestmark = pytest.mark.skipif(bool(MISSING), reason=REASON)


class Page(HTMLParser):
    """The ids, the links and the loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.hrefs: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "a" and "href" in values:
            self.hrefs.append(values["href"])
        if LOADS.get(tag, "") in values:
            self.loaded.append(values[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_site_has_the_pages_of_the_index_in_its_order(site: Path) -> None:
    index = ROOT / "docs" / "index.md"
    targets = re.findall(r"\]\(([^)#\s]+)\.md", index.read_text(encoding="utf-8"))
    paths = [(index.parent / f"{target}.html").resolve() for target in targets]
    pages = dict.fromkeys(str(path.relative_to(ROOT)) for path in paths)
    expected = [page for page in pages if page != "README.html"]  # index.html
    assert len(expected) > 40 and [page for page in expected if not (site / page).is_file()] == []
    linked = list(dict.fromkeys(Page(site / "index.html").hrefs))
    assert [page for page in linked if page in expected] == expected


def test_site_documents_every_public_name(site: Path) -> None:
    ids = set().union(*(Page(path).ids for path in (site / "api").iterdir()))
    expected = set(pytransformer.__all__) - WITHOUT_ENTRY
    assert {name for name in expected if f"pytransformer.{name}" not in ids} == set()
    text = (site / "api" / "pytransformer.html").read_text(encoding="utf-8")
    assert "key_lengths" in text and not re.search(r":(func|class|meth|mod|attr):", text)


def test_site_loads_nothing_from_other_hosts(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    loaded = {(page, target) for page in pages for target in Page(page).loaded}
    assert [target for _, target in loaded if target.startswith(("http:", "https:", "//"))] == []
    files = {(page.parent / target).resolve() for page, target in loaded if page.name != "404.html"}
    assert [str(file) for file in files if not file.is_file()] == []


def test_site_renders_lists_and_tables(site: Path) -> None:
    """Python-Markdown needs an empty line before a list or table where GitHub needs none."""
    paragraph = re.compile(r"<p>[^<]*(?:<(?!/p>)[^<]*)*</p>")
    shown = [
        f"{page.relative_to(site)}: {text}"
        for page in sorted(site.rglob("*.html"))
        for text in paragraph.findall(page.read_text(encoding="utf-8"))
        if re.search(r"^\s*([-*] |1\. |\|.*\|$)|```|\]\(", text, re.M)
    ]
    assert shown == []


def test_site_search_has_the_pages_and_the_api(site: Path) -> None:
    text = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert '"docs/ops/attention.html#sinks"' in text
    assert '"api/pytransformer.html#pytransformer.attention"' in text
