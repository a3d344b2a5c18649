# SPDX-License-Identifier: Apache-2.0
"""Translation quality: BLEU and chrF by sacrebleu (the extra `corpora`)."""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from ..extras import require
from .text import Pair


def translation_scores(said: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    """Return corpus BLEU and chrF (0 to 100) against one reference each, with signatures.

    sacrebleu's signatures make scores comparable. Sources: Papineni et al. 2002, Popović 2015;
    Post, "A Call for Clarity in Reporting BLEU Scores" (2018).

    Raises:
        ImportError: sacrebleu is not installed.
        ValueError: no translation, or another number than references.
    """
    sacrebleu = require("sacrebleu", "corpora", "BLEU and chrF")
    if not said or len(said) != len(wanted):
        raise ValueError(
            f"translation_scores: expected a translation for each reference, got {len(said)} and"
            f" {len(wanted)}"
        )
    scores: dict[str, Any] = {}
    for name, metric in (("bleu", sacrebleu.metrics.BLEU()), ("chrf", sacrebleu.metrics.CHRF())):
        scores[name] = round(metric.corpus_score(list(said), [list(wanted)]).score, 2)
        scores[f"{name}_signature"] = str(metric.get_signature())
    return scores


def from_memory(memory: Sequence[Pair], texts: Sequence[str]) -> list[str]:
    """Return, for each text, the target of the most similar source in `memory`, as a baseline.

    The first pair wins a tie. A text without a known word is returned unchanged.
    """
    found = most_alike([pair.source for pair in memory], texts, 1)
    return [memory[best[0]].target if best else text for text, best in zip(texts, found)]


def most_alike(
    memory: Sequence[str], texts: Sequence[str], count: int, look_at: int | None = None
) -> list[list[int]]:
    """Return, for each text, the indices of the `count` most similar memory texts, best first.

    The list is shorter if fewer texts share a word. Similarity is the cosine of word counts
    weighted by log(number of texts / texts with the word). The first text wins a tie.

    Args:
        look_at: count words from the rarest on until this many memory texts have matched; None: all
            words. With 25,000 texts on each side, 1,000 takes 20 seconds and None an hour; frequent
            words add little.
    """
    words = [Counter(_words(text)) for text in memory]
    holders: dict[str, list[int]] = defaultdict(list)
    for index, counts in enumerate(words):
        for word in counts:
            holders[word].append(index)
    weight = {word: math.log(1 + len(memory) / len(where)) for word, where in holders.items()}
    norms = [
        math.sqrt(sum((n * weight[word]) ** 2 for word, n in counts.items())) for counts in words
    ]
    answers = []
    for text in texts:
        likeness: dict[int, float] = defaultdict(float)
        met = 0
        for word, n in sorted(
            Counter(_words(text)).items(), key=lambda item: len(holders.get(item[0], ()))
        ):
            where = holders.get(word, ())
            met += len(where)
            if look_at is not None and likeness and met > look_at:
                break
            for index in where:
                likeness[index] += n * words[index][word] * weight[word] ** 2 / norms[index]
        answers.append(heapq.nsmallest(count, likeness, key=lambda i: (-likeness[i], i)))
    return answers


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())
