# SPDX-License-Identifier: Apache-2.0
"""Simple baselines for a model: counts of words and adjacent tokens, the most frequent answer."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from pytransformer.extras import require

T = TypeVar("T")
K = TypeVar("K")


def majority(labels: Sequence[T]) -> T:
    """Return the most frequent label; on a tie the first."""
    return Counter(labels).most_common(1)[0][0]


def share_right(said: Sequence[object], wanted: Sequence[object]) -> float:
    """Return the accuracy."""
    return sum(a == b for a, b in zip(said, wanted, strict=True)) / max(1, len(wanted))


class MostFrequent(Generic[K, T]):
    """The most frequent training answer per key, and overall for an unknown key."""

    def __init__(self, seen: Iterable[tuple[K, T]]) -> None:
        counts: dict[K, Counter[T]] = defaultdict(Counter)
        for key, answer in seen:
            counts[key][answer] += 1
        self._best = {key: counter.most_common(1)[0][0] for key, counter in counts.items()}
        self._rest = sum(counts.values(), Counter()).most_common(1)[0][0]

    def __call__(self, key: K) -> T:
        return self._best.get(key, self._rest)


def label_scores(
    texts: Sequence[str], labels: Sequence[str], asked: Sequence[str]
) -> list[dict[str, float]]:
    """Return each label's probability for the texts `asked`.

    The model is logistic regression on tf-idf word weights (scikit-learn's defaults, C = 10).

    Raises:
        ImportError: scikit-learn is not installed.
    """
    text = require("sklearn.feature_extraction.text", "corpora", "the baseline, bag of words,")
    linear = require("sklearn.linear_model", "corpora", "the baseline, logistic regression,")
    words = text.TfidfVectorizer(sublinear_tf=True)
    model = linear.LogisticRegression(C=10.0, max_iter=300)
    model.fit(words.fit_transform(texts), labels)
    return [
        dict(zip(map(str, model.classes_), row))
        for row in model.predict_proba(words.transform(asked)).tolist()
    ]


class Bigrams:
    """A bigram model, smoothed by unigram counts, which are smoothed by 1 / vocabulary.

    p(b | a) = (c(a b) + t(a) p(b)) / (c(a) + t(a)), where t(a) is the number of different tokens
    after a; p(b) has the same form.

    Source: Witten and Bell, "The zero-frequency problem" (1991), method C.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], vocabulary: int) -> None:
        self._after: dict[int, Counter[int]] = defaultdict(Counter)
        self._alone: Counter[int] = Counter()
        for sequence in sequences:
            for a, b in itertools.pairwise(sequence):
                self._after[a][b] += 1
                self._alone[b] += 1
        self._total, self._vocabulary = sum(self._alone.values()), vocabulary
        self._totals = {a: sum(after.values()) for a, after in self._after.items()}

    def probability(self, a: int, b: int) -> float:
        kinds = len(self._alone)
        alone = (self._alone[b] + kinds / self._vocabulary) / (self._total + kinds)
        if a not in self._totals:
            return alone
        after = self._after[a]
        return (after[b] + len(after) * alone) / (self._totals[a] + len(after))

    def loss(self, sequences: Iterable[Sequence[int]]) -> float:
        """Return the mean of -log p over each sequence's tokens but the first, in nats."""
        logs = [
            -math.log(self.probability(a, b))
            for sequence in sequences
            for a, b in itertools.pairwise(sequence)
        ]
        return sum(logs) / max(1, len(logs))
