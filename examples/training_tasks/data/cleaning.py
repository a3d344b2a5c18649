# SPDX-License-Identifier: Apache-2.0
"""Cleans a program's messages into sentences and rejects pairs that are no translations.

Cleaning removes markup, placeholder names and shortcut marks.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence

from pytransformer.training.text import Pair

LONGEST = 60  # max words of a text; longer ones are help paragraphs
# %(name)s, %(n).1f, %s, %1$d, {name}, {0:.2f}, {}, ${name}, {{ name }}; and %%, which is not a
# placeholder
_PLACEHOLDER = re.compile(r"%%|%(?:\(\w*\)|\d+\$)?[-+#0]*\d*(?:\.\d+)?[sdifrxgu]|\$?\{+[^{}]*\}+")
_PERCENT = "%%"
_TAG = re.compile(r"</?\s*([a-zA-Z][a-zA-Z0-9]*)(?:\s[^<>]*)?/?>")


def clean_pair(source: str, target: str) -> Pair | str:
    """Return the pair as sentences, or the reason to drop it.

    - Tags are removed if both sides have the same ones, and character references are resolved.
    - Placeholders become {0}, {1}, ... in the order of the source, equal on both sides.
    - White space, including line breaks, becomes one space.

    Returns:
        The pair, or the reason: "other placeholders", "other markup", "untranslated", "no word",
            "too long".
    """
    tags = [Counter(name.lower() for name in _TAG.findall(text)) for text in (source, target)]
    if tags[0] != tags[1]:
        return "other markup"
    bare = [_without_tags(text) for text in (source, target)]
    found = [_placeholders(text) for text in bare]
    if Counter(found[0]) != Counter(found[1]):
        return "other placeholders"
    texts = [_numbered(text, found[0]) for text in bare]
    if not all(has_word(text) for text in texts):
        return "no word"
    if texts[0].casefold() == texts[1].casefold():
        return "untranslated"
    if max(len(text.split()) for text in texts) > LONGEST:
        return "too long"
    return Pair(*texts)


def clean_text(text: str) -> str:
    """Return one text cleaned like :func:`clean_pair`: no tags, numbered placeholders."""
    bare = _without_tags(text)
    return _numbered(bare, _placeholders(bare))


def _without_tags(text: str) -> str:
    """Remove tags together with placeholders inside them (href="%(url)s")."""
    return html.unescape(_TAG.sub("", text))


def _placeholders(text: str) -> list[str]:
    return [name for name in _PLACEHOLDER.findall(text) if name != _PERCENT]


def _numbered(text: str, names: Sequence[str]) -> str:
    """Replace placeholders by {0}, {1}, ... in the order of `names`, and collapse spaces."""
    number = {name: f"{{{i}}}" for i, name in enumerate(dict.fromkeys(names))} | {_PERCENT: "%"}
    return " ".join(_PLACEHOLDER.sub(lambda match: number[match[0]], text).split())


def has_word(text: str) -> bool:
    """Return True if there are two letters in a row outside placeholders."""
    return (
        re.search(r"[^\W\d_]{2}", _PLACEHOLDER.sub("", text)) is not None
        or re.search(r"[\u3040-\u9fff\uac00-\ud7af]", text) is not None
    )


def sentence_key(text: str) -> str:
    """Return the text's letters in one case; punctuation, spaces and placeholders do not count."""
    return "".join(re.findall(r"[^\W\d_]+", _PLACEHOLDER.sub("", text).casefold()))
