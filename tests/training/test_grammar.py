# SPDX-License-Identifier: Apache-2.0
"""The parallel corpus of the examples is correct, reproducible, and held out without overlap."""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
from portuguese import (  # noqa: E402
    HELD_OUT_SHARE,
    TEMPLATES,
    is_held_out,
    make_corpus,
    make_sentence,
    number_en,
    number_pt,
)
from portuguese_lexicon import ADJECTIVES, NOUNS, VERBS  # noqa: E402


@pytest.fixture(scope="module")
def corpus():
    return make_corpus(6000, 500, seed=0)


@pytest.mark.parametrize(
    ("n", "gender", "pt", "en"),
    [
        (0, "m", "zero", "zero"),
        (1, "f", "uma", "one"),
        (16, "m", "dezesseis", "sixteen"),
        (21, "f", "vinte e uma", "twenty-one"),
        (100, "f", "cem", "one hundred"),
        (101, "m", "cento e um", "one hundred and one"),
        (200, "f", "duzentas", "two hundred"),
        (342, "m", "trezentos e quarenta e dois", "three hundred and forty-two"),
        (999, "f", "novecentas e noventa e nove", "nine hundred and ninety-nine"),
    ],
)
def test_numbers_are_spelled_out(n, gender, pt, en):
    assert (number_pt(n, gender), number_en(n)) == (pt, en)


def test_numbers_have_distinct_words():
    for words in (number_pt, number_en):
        assert len({words(n) for n in range(1000)}) == 1000
        for n in (-1, 1000):
            with pytest.raises(ValueError, match=f"between 0 and 999, got {n}"):
                words(n)


def test_words_agree():
    house, black = NOUNS[12], ADJECTIVES[0]
    assert (house.pt(1), house.pt(2), black.pt("f", 1), black.pt("f", 2), black.pt("m", 2)) == (
        "casa", "casas", "preta", "pretas", "pretos",
    )  # fmt: skip
    assert VERBS[1].present_pt == ("vendo", "vende", "vendemos", "vendem")
    assert VERBS[0].past_pt == ("comprei", "comprou", "compramos", "compraram")


def test_corpus_is_a_function_of_the_seed(corpus):
    assert make_corpus(6000, 500, seed=0) == corpus
    assert make_corpus(50, 5, seed=1).train != corpus.train[:50]
    first = corpus.train[
        0
    ]  # for every machine and version, so a trained model's corpus can be drawn again
    assert (
        first.source
        == "em 30 de julho, Beatriz vai à cidade com quatrocentos e noventa e oito chapéus."
    )
    assert (
        first.target
        == "on July 30, Beatriz goes to the city with four hundred and ninety-eight hats."
    )


def test_no_held_out_combination_occurs_in_training(corpus):
    train = {sentence.combination for sentence in corpus.train}
    held_out = {sentence.combination for sentence in corpus.held_out}
    assert train and held_out and not train & held_out
    assert not {s.source for s in corpus.train} & {s.source for s in corpus.held_out}
    # A sentence contains its combination: day, month and number can be parsed.
    for sentence in [*corpus.train, *corpus.held_out]:
        day = re.search(r"\d+", sentence.source)
        assert (int(day[0]) if day else None) == (sentence.combination.date or (None,))[0], sentence
        if (n := sentence.combination.number) is not None:
            assert number_en(n) in sentence.target and (
                number_pt(n) in sentence.source or number_pt(n, "f") in sentence.source
            )
        else:
            assert sentence.combination.date or sentence.combination.words == tuple(
                sentence.source.split()
            )


def test_about_a_tenth_is_held_out():
    chance = random.Random(5)
    combinations = {make_sentence(chance).combination for _ in range(20_000)}
    share = sum(is_held_out(c, 0) for c in combinations) / len(combinations)
    assert abs(share - HELD_OUT_SHARE) < 4 * (0.09 / len(combinations)) ** 0.5


def test_every_template_and_word_is_learned(corpus):
    assert set(Counter(s.combination.template for s in corpus.train)) == set(TEMPLATES)
    assert set(Counter(s.combination.template for s in corpus.held_out)) == set(TEMPLATES)
    words = lambda side, part: {w for s in side for w in re.findall(r"[^\W\d]+|\d", s[part])}
    for part in (0, 1):
        assert words(corpus.held_out, part) <= words(corpus.train, part)


def test_translations_are_unambiguous(corpus):
    meaning = {}
    for source, target, _ in [*corpus.train, *corpus.held_out]:
        assert meaning.setdefault(source, target) == target


def test_invalid_sizes_are_refused():
    with pytest.raises(ValueError, match="got -1 and 5"):
        make_corpus(-1, 5)
