# SPDX-License-Identifier: Apache-2.0
"""What a program's messages must lose to be sentences: markup, placeholders, shortcuts; and which pairs are no translations."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Sequence

from .text import Pair

LONGEST = 60  # words of a text; longer ones are paragraphs of help
# %(name)s, %(n).1f, %s, %1$d, {name}, {0:.2f}, {}, ${name}, {{ name }}; and %%, which is no placeholder
_PLACEHOLDER = re.compile(r"%%|%(?:\(\w*\)|\d+\$)?[-+#0]*\d*(?:\.\d+)?[sdifrxgu]|\$?\{+[^{}]*\}+")
_PERCENT = "%%"
_TAG = re.compile(r"</?\s*([a-zA-Z][a-zA-Z0-9]*)(?:\s[^<>]*)?/?>")


def clean_pair(source: str, target: str) -> Pair | str:
    """The pair as sentences, or why it is left out.

    - Tags are taken out, where both sides have the same ones, and character references resolved.
    - Placeholders become {0}, {1}, ... in the order of the source, the same on both sides.
    - White space, line breaks too, is one space.

    Returns:
        The pair, or the reason: "other placeholders", "other markup", "untranslated", "no word", "too long".
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
    """One text as :func:`clean_pair` leaves them: no tags, numbered placeholders, single spaces."""
    bare = _without_tags(text)
    return _numbered(bare, _placeholders(bare))


def _without_tags(text: str) -> str:
    """A tag may hold placeholders (href="%(url)s"): they go with it."""
    return html.unescape(_TAG.sub("", text))


def _placeholders(text: str) -> list[str]:
    return [name for name in _PLACEHOLDER.findall(text) if name != _PERCENT]


def _numbered(text: str, names: Sequence[str]) -> str:
    """The text with {0}, {1}, ... for the placeholders, in the order of `names`, and single spaces."""
    number = {name: f"{{{i}}}" for i, name in enumerate(dict.fromkeys(names))} | {_PERCENT: "%"}
    return " ".join(_PLACEHOLDER.sub(lambda match: number[match[0]], text).split())


def has_word(text: str) -> bool:
    """At least two letters in a row, placeholders aside."""
    return (
        re.search(r"[^\W\d_]{2}", _PLACEHOLDER.sub("", text)) is not None
        or re.search(r"[\u3040-\u9fff\uac00-\ud7af]", text) is not None
    )


def sentence_key(text: str) -> str:
    """The letters of a text alone, in one case: what is the same but for punctuation, spacing and placeholders shares it."""
    return "".join(re.findall(r"[^\W\d_]+", _PLACEHOLDER.sub("", text).casefold()))
