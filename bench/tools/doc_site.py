# SPDX-License-Identifier: Apache-2.0
"""Complete the documentation site: mkdocs loads this file as a hook, mkdocstrings as an extension.

The site has the layout of the repository, so relative links work unchanged. It has README.md, docs/
and every page, file and folder that a page links to. The tables of docs/index.md determine the
navigation. Docstrings become the API reference; griffe reads the sources and does not import the
package.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "index.md"
WORKER = ROOT / "bench" / "tools" / "iframe-worker.js"
MODULES = ("", ".nn", ".models", ".training", ".viz", ".distributed")
MODULES += (".integrations", ".integrations.transformers", ".reference")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.S | re.M)
SECTION = re.compile(r"^## (.+?)$(.*?)(?=^## |\Z)", re.S | re.M)
LINK = re.compile(r"(\]\()([^)#\s]+)")
FENCE = re.compile(r"^```(\w+) (\S.*)$", re.M)  # a block that a how-to puts into a file
ROLE = re.compile(r":\w+:`[~.]*([^`]+)`")


def uri(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def links(page: Path, text: str) -> list[Path]:
    """Return the files and folders of the repository that a page's text links to, in order."""
    targets = [target for _, target in LINK.findall(CODE.sub("`code`", text))]
    return [(page.parent / target).resolve() for target in targets if ":" not in target]


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.is_file())


def sources() -> list[Path]:
    """Return the files and folders that can be reached from README.md and docs/, each once."""
    reached: list[Path] = []
    pending = [WORKER, ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for path in pending:  # grows while it is read
        if path not in reached and path.exists():  # mkdocs reports a link to a missing file
            reached.append(path)
            pending += [path / name for name in names(path)] if path.is_dir() else []
            pending += links(path, path.read_text(encoding="utf-8")) if path.suffix == ".md" else []
    return reached


def on_config(config: MkDocsConfig) -> None:
    """Set the navigation: the sections of docs/index.md, pages of a folder grouped."""
    config.nav = ["README.md", {"Contents": uri(INDEX)}]
    for title, text in SECTION.findall(INDEX.read_text(encoding="utf-8")):
        entries: list[Any] = []
        rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
        pages = [PurePosixPath(uri(path)) for path in dict.fromkeys(links(INDEX, rows))]
        for folder, group in itertools.groupby(pages, lambda page: page.parent.name):
            named = [str(page) for page in group]
            name = {"cuda": "CUDA"}.get(folder, folder.capitalize())
            entries += named if folder == "docs" or len(named) == 1 else [{name: named}]
        config.nav.append({title: entries})
    api = [{f"pytransformer{module}": f"api/pytransformer{module}.md"} for module in MODULES]
    config.nav += [{"API": api}, "CONTRIBUTING.md", "CHANGELOG.md"]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of `sources`, and add the generated pages."""
    site = Files([file for file in files if file.src_dir != config.docs_dir])
    pages = {f"api/pytransformer{module}.md": f"::: pytransformer{module}\n" for module in MODULES}
    pages["api/pytransformer.reference.md"] += "    options: {members: false}\n"  # those of the ops
    for path in sources():
        if path.is_dir():
            listed = "".join(f"- [{name}]({name})\n" for name in names(path))
            pages[f"{uri(path)}/index.md"] = f"# {uri(path)}\n\n{listed}"
        else:
            site.append(File(uri(path), str(ROOT), config.site_dir, config.use_directory_urls))
    for page, text in pages.items():
        site.append(File.generated(config, page, content=text))
    return site


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Link the page of a folder, not the folder, and put a block's file name above the block."""
    here = (ROOT / page.file.src_uri).parent
    markdown = LINK.sub(lambda m: m[0] + "/index.md" * (here / m[2]).is_dir(), markdown)
    return FENCE.sub(lambda m: f"```{m[1]} title='{m[2]}'", markdown)


class Docstrings(griffe.Extension):
    """Adapts the package's docstrings and names to mkdocstrings."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Link names in docstrings; let `pytransformer.explain` be the function, not its module."""

        def link(match: re.Match[str]) -> str:
            name = match[1]
            try:
                target = name if name.startswith("pytransformer.") else obj.resolve(name)
            except griffe.NameResolutionError:
                return f"`{name}`"
            return f'<autoref identifier="{target}" optional><code>{name}</code></autoref>'

        objects: list[Any] = [pkg]
        for obj in objects:  # grows while it is read
            objects += [member for member in obj.members.values() if not member.is_alias]
            if obj.docstring:
                obj.docstring.value = ROLE.sub(link, obj.docstring.value)
        for name, obj in [(obj.name, obj) for obj in objects if obj.is_module and obj.parent]:
            if name in (obj.parent.exports or ()) and name in obj.members:
                obj.parent.members[name] = griffe.Alias(name, obj.members[name], parent=obj.parent)
