# SPDX-License-Identifier: Apache-2.0
"""Write a Portuguese-English corpus from a small grammar, for the translator and examples.

    python examples/portuguese.py    # 6,000 pairs, 500 held out, in results/portuguese/*.tsv
    cd results/portuguese
    pytransformer train translate --data train.tsv --held-out held-out.tsv

Portuguese has agreement where English has none: articles, adjectives and "um", "dois", "duzentos"
follow the noun's gender and number. It also reverses the order of adjectives and dates, so a
translator of these sentences has to attend to the source. Everything is a function of the seed.

A template produces each sentence. Its number and date form its combination. A combination is either
in training or held out, never both. For a clause with neither number nor date, the words form the
combination.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pytransformer.training import write_pairs

sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH
from portuguese_lexicon import (
    ADJECTIVES,
    MONTHS,
    NAMES,
    NOUNS,
    PLACES,
    SUBJECTS,
    VERBS,
    WEEKDAYS,
    Adjective,
    Noun,
    Person,
    Verb,
)

HELD_OUT_SHARE = 0.1  # share of all combinations
_UNITS = (
    "zero um dois três quatro cinco seis sete oito nove dez onze doze treze catorze quinze"
    " dezesseis dezessete dezoito dezenove"
)
_TENS = "vinte trinta quarenta cinquenta sessenta setenta oitenta noventa"
_HUNDREDS = (
    "cento duzentos trezentos quatrocentos quinhentos seiscentos setecentos oitocentos novecentos"
)
_UNITS_EN = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen"
)
_TENS_EN = "twenty thirty forty fifty sixty seventy eighty ninety"


class Combination(NamedTuple):
    """The part of a sentence that decides whether it is held out."""

    template: str
    number: int | None
    date: tuple[int, int] | None  # day, month
    words: tuple[str, ...] = ()  # words of a clause without number and date


class Sentence(NamedTuple):
    source: str
    target: str
    combination: Combination


class Corpus(NamedTuple):
    train: list[Sentence]
    held_out: list[Sentence]


def number_pt(n: int, gender: str = "m") -> str:
    """Return `n` from 0 to 999 in words, with gender: 202, "f" -> "duzentas e duas"."""
    if not 0 <= n <= 999:
        raise ValueError(f"number_pt: n must be between 0 and 999, got {n}")
    if n == 100:
        return "cem"
    hundreds, rest = divmod(n, 100)
    words = [_HUNDREDS.split()[hundreds - 1]] if hundreds else []
    if rest >= 20:
        words.append(_TENS.split()[rest // 10 - 2])
        rest %= 10
    if rest or not words:
        words.append(_UNITS.split()[rest])
    if gender == "f":
        feminine = {"um": "uma", "dois": "duas"}
        words = [feminine.get(w, w[:-2] + "as" if w.endswith("entos") else w) for w in words]
    return " e ".join(words)


def number_en(n: int) -> str:
    """Return `n` from 0 to 999 in words: 121 -> "one hundred and twenty-one"."""
    if not 0 <= n <= 999:
        raise ValueError(f"number_en: n must be between 0 and 999, got {n}")
    hundreds, rest = divmod(n, 100)
    words = [f"{_UNITS_EN.split()[hundreds]} hundred"] if hundreds else []
    if rest >= 20:
        tens = _TENS_EN.split()[rest // 10 - 2]
        words.append(f"{tens}-{_UNITS_EN.split()[rest % 10]}" if rest % 10 else tens)
    elif rest or not words:
        words.append(_UNITS_EN.split()[rest])
    return " and ".join(words)


class _Draw:
    """A source of words that records the number and the date that it drew."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.number: int | None = None
        self.date: tuple[int, int] | None = None

    def noun(self) -> Noun:
        return self.chance.choice(NOUNS)

    def adjective(self) -> Adjective:
        return self.chance.choice(ADJECTIVES)

    def verb(self) -> Verb:
        return self.chance.choice(VERBS)

    def person(self) -> Person:
        return self.chance.choice(SUBJECTS)

    def count(self, low: int = 1, high: int = 999) -> int:
        """Return a number; small ones are as frequent as large ones."""
        self.number = self.chance.randint(
            low, self.chance.choice([h for h in (20, 100, 999) if low < h <= high] or [high])
        )
        return self.number

    def day(self) -> tuple[str, str]:
        """Return a date in both languages: "5 de março", "March 5"."""
        month = self.chance.randrange(12)
        day = self.chance.randint(1, (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)[month])
        self.date = (day, month + 1)
        pt, en = MONTHS[month]
        return f"{day} de {pt}", f"{en} {day}"


def _counted(draw: _Draw, adjective: bool) -> tuple[str, str]:
    """Return a counted noun: "vinte e duas casas pretas", "twenty-two black houses"."""
    noun, n = draw.noun(), draw.count()
    pt, en = [number_pt(n, noun.gender), noun.pt(n)], [number_en(n), noun.en(n)]
    if adjective:
        quality = draw.adjective()
        pt.append(quality.pt(noun.gender, n))
        en.insert(1, quality.en)
    return " ".join(pt), " ".join(en)


def _definite(draw: _Draw, adjective: bool) -> tuple[str, str, int]:
    """Return a definite noun and its number: "as casas pretas", "the black houses", 2."""
    noun, n = draw.noun(), draw.chance.choice((1, 2))
    article = {("m", 1): "o", ("f", 1): "a", ("m", 2): "os", ("f", 2): "as"}[noun.gender, n]
    if not adjective:
        return f"{article} {noun.pt(n)}", f"the {noun.en(n)}", n
    quality = draw.adjective()
    return (
        f"{article} {noun.pt(n)} {quality.pt(noun.gender, n)}",
        f"the {quality.en} {noun.en(n)}",
        n,
    )


def _bought(draw: _Draw) -> tuple[str, str]:
    person, verb, things, day = draw.person(), draw.verb(), _counted(draw, False), draw.day()
    return (
        f"{person.pt} {verb.past_pt[person.form]} {things[0]} em {day[0]}.",
        f"{person.en} {verb.past_en} {things[1]} on {day[1]}.",
    )


def _there_are(draw: _Draw) -> tuple[str, str]:
    (pt, en), place = _counted(draw, True), draw.chance.choice(PLACES)
    return (
        f"há {pt} {place.inside_pt}.",
        f"there {'is' if draw.number == 1 else 'are'} {en} {place.inside_en}.",
    )


def _born(draw: _Draw) -> tuple[str, str]:
    name, day = draw.chance.choice(NAMES), draw.day()
    return f"{name} nasceu em {day[0]}.", f"{name} was born on {day[1]}."


def _age(draw: _Draw) -> tuple[str, str]:
    name, n = draw.chance.choice(NAMES), draw.count(1, 100)
    one = n == 1
    return (
        f"{name} tem {number_pt(n)} {'ano' if one else 'anos'}.",
        f"{name} is {number_en(n)} {'year' if one else 'years'} old.",
    )


def _cost(draw: _Draw) -> tuple[str, str]:
    (pt, en, count), n = _definite(draw, True), draw.count(2)
    costs = (("custa", "costs"), ("custam", "cost"))[count - 1]
    return f"{pt} {costs[0]} {number_pt(n)} reais.", f"{en} {costs[1]} {number_en(n)} reais."


def _today(draw: _Draw) -> tuple[str, str]:
    weekday, day = draw.chance.choice(WEEKDAYS), draw.day()
    return f"hoje é {weekday[0]}, {day[0]}.", f"today is {weekday[1]}, {day[1]}."


def _travel(draw: _Draw) -> tuple[str, str]:
    name, place, (pt, en), day = (
        draw.chance.choice(NAMES),
        draw.chance.choice(PLACES),
        _counted(draw, False),
        draw.day(),
    )
    return (
        f"em {day[0]}, {name} vai {place.to_pt} com {pt}.",
        f"on {day[1]}, {name} goes {place.to_en} with {en}.",
    )


def _question(draw: _Draw) -> tuple[str, str]:
    pt, en = _counted(draw, True)
    return f"você tem {pt}?", f"do you have {en}?"


def _every_day(draw: _Draw) -> tuple[str, str]:
    person, verb, (pt, en, _) = draw.person(), draw.verb(), _definite(draw, False)
    does = verb.third_en if person.third else verb.en
    return (
        f"{person.pt} {verb.present_pt[person.form]} {pt} todos os dias.",
        f"{person.en} {does} {en} every day.",
    )


def _does_not(draw: _Draw) -> tuple[str, str]:
    person, verb, (pt, en, _) = draw.person(), draw.verb(), _definite(draw, True)
    does = "does" if person.third else "do"
    return (
        f"{person.pt} não {verb.present_pt[person.form]} {pt}.",
        f"{person.en} {does} not {verb.en} {en}.",
    )


def _is(draw: _Draw) -> tuple[str, str]:
    (pt, en, count), place = _definite(draw, True), draw.chance.choice(PLACES)
    be = (("está", "is"), ("estão", "are"))[count - 1]
    return f"{pt} {be[0]} {place.inside_pt}.", f"{en} {be[1]} {place.inside_en}."


TEMPLATES: dict[str, Callable[[_Draw], tuple[str, str]]] = {
    "bought": _bought,
    "there are": _there_are,
    "born": _born,
    "age": _age,
    "cost": _cost,
    "today": _today,
    "travel": _travel,
    "question": _question,
    "every day": _every_day,
    "does not": _does_not,
    "is": _is,
}


def make_sentence(chance: random.Random) -> Sentence:
    """Return one sentence drawn with `chance`."""
    template = chance.choice(list(TEMPLATES))
    draw = _Draw(chance)
    source, target = TEMPLATES[template](draw)
    words = () if draw.number is not None or draw.date is not None else tuple(source.split())
    return Sentence(source, target, Combination(template, draw.number, draw.date, words))


def is_held_out(combination: Combination, seed: int) -> bool:
    """Return True for a tenth of all combinations, another tenth for each seed."""
    digest = hashlib.blake2b(repr((seed, tuple(combination))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def make_corpus(train: int = 6000, held_out: int = 500, seed: int = 0) -> Corpus:
    """Return `train` and `held_out` different sentences, reproducible on every machine.

    Raises:
        ValueError: a negative number, or more sentences than the grammar can produce.
    """
    if train < 0 or held_out < 0 or train + held_out > 100_000:
        raise ValueError(
            f"make_corpus: train and held_out must be >= 0 and at most 100000 together, got {train}"
            f" and {held_out}"
        )
    chance = random.Random(seed)
    kept: dict[bool, dict[str, Sentence]] = {False: {}, True: {}}
    wanted = {False: train, True: held_out}
    while any(len(kept[side]) < wanted[side] for side in kept):
        sentence = make_sentence(chance)
        side = is_held_out(sentence.combination, seed)
        if len(kept[side]) < wanted[side]:
            kept[side].setdefault(sentence.source, sentence)
    return Corpus(list(kept[False].values()), list(kept[True].values()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sentences", type=int, default=6000, help="to learn from (default %(default)s)"
    )
    parser.add_argument("--held-out", type=int, default=500, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results") / "portuguese",
        metavar="DIR",
        help="default %(default)s",
    )
    options = parser.parse_args(arguments)
    corpus = make_corpus(options.sentences, options.held_out, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train.tsv", "held-out.tsv"), corpus):
        write_pairs(options.out / name, [(s.source, s.target) for s in part])
        print(f"{len(part)} sentence pairs in {options.out / name}")


if __name__ == "__main__":
    main()
