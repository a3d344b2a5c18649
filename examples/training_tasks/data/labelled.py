# SPDX-License-Identifier: Apache-2.0
"""Single texts with a label: the program of a message, or a column of a file."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pytransformer.training.text import read_texts

from .catalogues import english_messages, find_catalogues
from .cleaning import LONGEST, clean_text, has_word, sentence_key


class Labelled(NamedTuple):
    """A text and its label; "" if it has none."""

    text: str
    label: str = ""


class Texts(NamedTuple):
    """Texts, their sources, and the counts of removed texts, by reason."""

    texts: list[Labelled]
    described: list[str]
    left_out: dict[str, int]


def catalogue_texts(packages: Iterable[str]) -> Texts:
    """Return the English messages of installed packages, cleaned, once each, labeled by package.

    Raises:
        ValueError: there is no text, or :func:`find_catalogues` fails.
    """
    kept: dict[str, Labelled] = {}
    left_out: Counter[str] = Counter()
    described = []
    for package in packages:
        found, before = find_catalogues(package), len(kept)
        for raw in english_messages(found):
            text = clean_text(raw)
            reason = (
                "no word"
                if not has_word(text)
                else "too long"
                if len(text.split()) > LONGEST
                else None
            )
            reason = reason or ("a duplicate" if sentence_key(text) in kept else None)
            if reason is None:
                kept[sentence_key(text)] = Labelled(text, package)
            else:
                left_out[reason] += 1
        described.append(f"{found.package}, licence {found.licence}: {len(kept) - before} texts")
    if not kept:
        raise ValueError(f"gettext: no text in {', '.join(described) or 'no package'}")
    return Texts(list(kept.values()), described, dict(left_out))


def read_labelled(path: str | Path) -> Texts:
    """Return the lines of a file; each is a text, or a label, a tab and a text.

    Raises:
        ValueError: no line, or not UTF-8.
        OSError: the file cannot be read.
    """
    texts = []
    for line in read_texts(path):
        label, tab, raw = line.partition("\t")
        texts.append(Labelled(raw.strip(), label.strip()) if tab else Labelled(line))
    return Texts(list(dict.fromkeys(texts)), [f"{path}: {len(texts)} lines"], {})


def split_texts(
    texts: Sequence[Labelled], seed: int = 0, every: int = 20
) -> tuple[list[Labelled], list[Labelled]]:
    """Return (training, held-out) texts; one in `every` is held out.

    The choice is a hash of the seed and the text's letters, so that texts which differ only in
    case, punctuation or placeholders are on the same side.
    """
    train: list[Labelled] = []
    held_out: list[Labelled] = []
    for text in texts:
        chosen = zlib.crc32(f"{seed} {sentence_key(text.text)}".encode()) % every == 0
        (held_out if chosen else train).append(text)
    return train, held_out


def halves(text: str, least: int = 5) -> list[str]:
    """Split the text at the sentence end nearest the middle, or else in the middle.

    A text with fewer than `least` words stays in one piece. BERT's "sentences" are any two adjacent
    spans of text (Devlin et al. 2019, section 3).
    """
    words = text.split()
    if len(words) < least:
        return [text]
    ends = [i for i in range(1, len(words)) if words[i - 1][-1] in ".!?:"] or [len(words) // 2]
    cut = min(ends, key=lambda i: abs(i - len(words) / 2))
    return [" ".join(words[:cut]), " ".join(words[cut:])]
