# SPDX-License-Identifier: Apache-2.0
"""The three fine-tuning questions of BERT, each beside a simple baseline.

The labels come from the texts themselves.

classification  [CLS] predicts a text's label (for gettext: its package)
answer          the input is a label and three texts with different labels; the
                output is the start and end of the text with that label
tagging         for each lowercased word, predict its case: lower, capitalized or
                capitals
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from pytransformer.models.bert import BERT, best_answers
from pytransformer.training import IGNORED, Batches, Tokenizer, pad
from pytransformer.training.batching import Batch, attention_mask

from ._masked import LENGTH, Texts
from ._run import Figure, Run
from ._text import FEWEST, baseline_or_none, each_batch, in_batches, rate
from .data.baselines import MostFrequent, label_scores, majority, share_right
from .data.labelled import Labelled

PASSAGES = 3  # candidate texts per question
CASES = ("lower case", "capital", "capitals")


class Example(NamedTuple):
    ids: list[int]
    segments: list[int]
    labels: Any  # a class, two ends, or a class per token


class Question(NamedTuple):
    """A head, its training and test data, and its baseline."""

    head: str
    what: str
    train: list[Example]
    held_out: list[Example]
    num_labels: int
    by: str
    baseline: Callable[[], float]
    chance: float


def fine_tune(run: Run, model: BERT, question: Question, steps: int, pad_id: int) -> Figure | None:
    """Train the head on the pre-trained trunk; return its held-out accuracy.

    Print a message and return None if there are too few examples.
    """
    if min(len(question.held_out), len(question.train)) < FEWEST or question.num_labels < 2:
        run.say(
            f"{question.head} is left out: {len(question.train)} examples to learn from,"
            f" {len(question.held_out)} held out and {question.num_labels} labels; expected"
            f" {FEWEST}, {FEWEST} and 2 (a label and a tab before each text of a FILE)"
        )
        return None
    a = run.arguments
    collate = _collate(pad_id, per_token=question.head == "tagging")
    batches = Batches(
        question.train, a.batch, collate, lengths=[len(e.ids) for e in question.train], seed=a.seed
    )
    checked = in_batches(question.held_out, a.batch, collate)
    run.seed(question.head)
    tuned = model.with_heads(question.head, num_labels=question.num_labels)
    if question.head != "classification" and tuned.pooler is not None:
        tuned.pooler.requires_grad_(False)  # nothing reads it, and DDP would wait for its gradient

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        return {"accuracy": share(right_answers(model, checked, question.head))}

    run.fit(question.head, tuned, batches, rate(a.fine_rate, steps), steps, evaluate=evaluate)
    right = right_answers(tuned, checked, question.head)
    baseline = baseline_or_none(run, question.baseline)
    return Figure(question.what, share(right), baseline, question.by, question.chance, len(right))


def right_answers(model: torch.nn.Module, batches: Sequence[Batch], head: str) -> list[bool]:
    """Return whether each text's class, answer's ends or word's tag is right."""
    right: list[bool] = []
    for batch, out in each_batch(model, batches):
        labels = batch["labels"]
        if head == "answer":
            right += (best_answers(out.logits) == labels).all(-1).tolist()
        elif head == "tagging":
            asked = labels != IGNORED
            right += (out.logits.argmax(-1) == labels)[asked].tolist()
        else:
            right += (out.logits.argmax(-1) == labels).tolist()
    return right


def share(right: Sequence[bool]) -> float:
    return sum(right) / max(1, len(right))


def _collate(pad_id: int, per_token: bool) -> Callable[[list[Example], torch.Generator], Batch]:
    def collate(examples: list[Example], generator: torch.Generator) -> Batch:
        ids, labels = [e.ids for e in examples], [e.labels for e in examples]
        return {
            "input_ids": pad(ids, pad_id), "attention_mask": attention_mask(ids),
            "token_type_ids": pad([e.segments for e in examples], 0),
            "labels": pad(labels, IGNORED) if per_token else torch.tensor(labels),
        }  # fmt: skip

    return collate


# ---- classification


def classification(texts: Texts) -> Question:
    tokenizer = texts.words.tokenizer
    classes = sorted({t.label for t in texts.train})

    def examples(part: Sequence[Labelled]) -> list[Example]:
        kept = [t for t in part if t.label in classes]
        ids = [
            [tokenizer.start_id, *i[: LENGTH - 2], tokenizer.end_id]
            for i in tokenizer.encode_all([t.text.lower() for t in kept])
        ]
        return [Example(i, [0] * len(i), classes.index(t.label)) for i, t in zip(ids, kept)]

    wanted = [t.label for t in texts.held_out]

    def baseline() -> float:
        scores = label_scores(
            [t.text for t in texts.train],
            [t.label for t in texts.train],
            [t.text for t in texts.held_out],
        )
        return share_right([max(s, key=lambda label: s[label]) for s in scores], wanted)

    chance = share_right([majority([t.label for t in texts.train])] * len(wanted), wanted)
    return Question(
        "classification", "a text's label, from [CLS]", examples(texts.train),
        examples(texts.held_out), len(classes),
        "bag of words, logistic regression", baseline, chance,
    )  # fmt: skip


# ---- answers


class Passages(NamedTuple):
    """A label, texts with different labels, and the index of the match."""

    asked: str
    texts: list[Labelled]
    answer: int


def passages(part: Sequence[Labelled], chance: random.Random) -> list[Passages]:
    """Return every text once as the answer, beside texts with other labels."""
    by_label: dict[str, list[Labelled]] = {}
    for text in part:
        by_label.setdefault(text.label, []).append(text)
    if len(by_label) < PASSAGES:
        return []
    made = []
    for text in part:
        others = chance.sample(sorted(by_label.keys() - {text.label}), PASSAGES - 1)
        beside = [chance.choice(by_label[label]) for label in others]
        place = chance.randrange(PASSAGES)
        made.append(Passages(text.label, [*beside[:place], text, *beside[place:]], place))
    return made


def answers(run: Run, texts: Texts) -> Question:
    tokenizer, seed = texts.words.tokenizer, run.arguments.seed
    room = (LENGTH - 14) // PASSAGES - 1  # minus the question (at most 12 tokens) and text ends

    def example(p: Passages) -> Example:
        question = tokenizer.encode(p.asked.lower())[:12]
        ids, ends = [tokenizer.start_id, *question, tokenizer.end_id], (0, 0)
        first = len(ids)
        for place, text in enumerate(p.texts):
            read = tokenizer.encode(text.text.lower())[:room]
            if place == p.answer:
                ends = (len(ids), len(ids) + len(read) - 1)
            ids += [*read, tokenizer.end_id]
        return Example(ids, [0] * first + [1] * (len(ids) - first), ends)

    train, held_out = (
        passages(part, random.Random(f"{seed} {n}"))
        for n, part in enumerate((texts.train, texts.held_out))
    )

    def baseline() -> float:
        asked = [t.text for p in held_out for t in p.texts]
        scores = iter(
            label_scores([t.text for t in texts.train], [t.label for t in texts.train], asked)
        )
        said = [[next(scores).get(p.asked, 0.0) for _ in p.texts] for p in held_out]
        return share_right([s.index(max(s)) for s in said], [p.answer for p in held_out])

    return Question(
        "answer", f"start and end of the text with a label, of {PASSAGES}",
        [example(p) for p in train],
        [example(p) for p in held_out], len({p.asked for p in train}),
        "bag of words", baseline, 1 / PASSAGES,
    )  # fmt: skip


# ---- tagging


def case_of(word: str) -> int:
    """Return the index in CASES; capitals need two or more letters, all uppercase."""
    letters = [c for c in word if c.isalpha()]
    return (
        0
        if not letters or not letters[0].isupper()
        else 2
        if len(letters) > 1 and all(c.isupper() for c in letters)
        else 1
    )


def _cased(text: str) -> Iterator[tuple[str, int, bool]]:
    """Yield (lowercased word, its case, is first) for each piece of the text with a letter."""
    for number, word in enumerate(re.findall(r"\S+", text)):
        yield word.lower(), case_of(word), number == 0


def tagging(texts: Texts) -> Question:
    tokenizer = texts.words.tokenizer

    def example(text: Labelled) -> Example:
        return _tagged(tokenizer, text.text)

    known = MostFrequent(
        (("" if first else word), case) for t in texts.train for word, case, first in _cased(t.text)
    )

    def baseline() -> float:
        held_out = [item for t in texts.held_out for item in _cased(t.text)]
        return share_right(
            [known("" if first else word) for word, _, first in held_out],
            [case for _, case, _ in held_out],
        )

    held_out = [example(t) for t in texts.held_out]
    tags = [tag for e in held_out for tag in e.labels if tag != IGNORED]
    return Question(
        "tagging", "case of a word read in lower case", [example(t) for t in texts.train], held_out,
        len(CASES),
        "the word's most frequent case, the first word's too", baseline,
        share_right([majority(tags)] * len(tags), tags),
    )  # fmt: skip


def _tagged(tokenizer: Tokenizer, text: str) -> Example:
    """Return a tagged example; a word's tag is at its first token, other tokens have none."""
    ids, tags = [tokenizer.start_id], [IGNORED]
    for word, case, _ in _cased(text):
        tokens = tokenizer.encode(word)
        ids += tokens
        tags += [case] + [IGNORED] * (len(tokens) - 1) if tokens else []
    ids, tags = [*ids[: LENGTH - 1], tokenizer.end_id], [*tags[: LENGTH - 1], IGNORED]
    return Example(ids, [0] * len(ids), tags)
