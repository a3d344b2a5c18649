# SPDX-License-Identifier: Apache-2.0
"""Texts and summaries from the docstrings of installed packages, read in place.

A docstring's first line summarizes the rest (PEP 257, "Multi-line Docstrings"). A pair has the
following prose as source and the first line as target. Files are parsed, never imported, and
nothing is copied. Each package's license still applies and is reported.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from pytransformer.training.text import Pair

from .catalogues import Corpus, licence_of
from .cleaning import LONGEST, clean_text, has_word, sentence_key

_SHORTEST = 12  # min words of a source
_FEWEST, _MOST = 3, 24  # min and max words of a summary
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Prose ends at a section name alone on its line, a field, a directive, an example or an underline.
_END = re.compile(r"^(?:[A-Z][\w ]{2,24}:?$|:\w+|\.\. |>>>|[-=~*]{3,}|@\w+|[-*] )")
_ROLE = re.compile(r":[\w:]+:`~?([^`<]*?)(?: <[^`]*>)?`")  # :class:`~torch.Tensor`


def docstring_pairs(packages: Iterable[str]) -> Corpus:
    """Return (prose, summary) of each docstring that has both, given packages' pip names.

    Each prose occurs once. The result counts by reason what is left out: one-line docstrings, texts
    and summaries of unsuitable length, summaries contained in their text, and duplicates.

    Raises:
        ValueError: a package is not installed, has no record of its files, or has no such
            docstring.
    """
    kept: dict[str, Pair] = {}
    left_out: Counter[str] = Counter()
    described = []
    for package in packages:
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError as error:
            raise ValueError(
                f"docstrings:{package}: no such package is installed; pip install {package}"
            ) from error
        if found.files is None:
            raise ValueError(
                f"docstrings:{package}: its installation has no record of its files; install it"
                " from a wheel"
            )
        before = len(kept)
        for file in found.files:
            if file.suffix == ".py":
                for text in docstrings(Path(str(found.locate_file(file)))):
                    pair = summed_up(text)
                    if isinstance(pair, str):
                        left_out[pair] += 1
                    elif kept.setdefault(sentence_key(pair.source), pair) is not pair:
                        left_out["a duplicate"] += 1
        described.append(
            f"{found.metadata['Name']} {found.version}, licence {licence_of(found.metadata)}:"
            f" {len(kept) - before} pairs"
        )
        if len(kept) == before:
            raise ValueError(
                f"docstrings:{package}: no docstring with a summary and a text of {_SHORTEST} words"
                " that is new"
            )
    if not kept:
        raise ValueError("docstrings: names no package")
    return Corpus(list(kept.values()), described, dict(left_out))


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a file's module, classes and functions; none if it does not parse."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


def summed_up(docstring: str) -> Pair | str:
    """Return (prose after the first paragraph, first paragraph), or why there is no pair.

    The prose ends at the first section, field or example.
    """
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(docstring))
    summary, prose = _plain(paragraphs[0]), []
    if _END.match(paragraphs[0]) or not has_word(summary):
        return "no summary"
    for paragraph in paragraphs[1:]:
        if any(_END.match(line) for line in paragraph.splitlines()) or paragraph[:1].isspace():
            break
        prose.append(_plain(paragraph))
    text = " ".join(prose).split()
    if len(text) < _SHORTEST:
        return "no text, or a short one"
    if not _FEWEST <= len(summary.split()) <= _MOST:
        return "a summary of other length"
    source = " ".join(text[:LONGEST])
    return (
        "the text contains the summary"
        if sentence_key(summary) in sentence_key(source)
        else Pair(source, summary)
    )


def _plain(text: str) -> str:
    """Return the text without markup of code and references, with single spaces."""
    return clean_text(_ROLE.sub(r"\1", text).replace("`", ""))
