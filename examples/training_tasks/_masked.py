# SPDX-License-Identifier: Apache-2.0
"""Shared code of BERT and SpanBERT: pre-training on masked texts, beside token counts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pytransformer.cli import UsageError
from pytransformer.models import BERT, BERTConfig
from pytransformer.training import (
    IGNORED,
    Batches,
    SentencePair,
    masked_collate,
    next_sentence_pairs,
)
from pytransformer.training.batching import Batch

from ._run import Run
from ._text import FEWEST, Words, each_batch, in_batches, rate, words_of
from .data.baselines import MostFrequent
from .data.labelled import Labelled, halves

LENGTH = 128  # the model's positions


class Texts(NamedTuple):
    train: list[Labelled]
    held_out: list[Labelled]
    words: Words


def uncased_words(train: Sequence[Labelled], held_out: list[Labelled], size: int) -> Texts:
    return Texts(list(train), held_out, words_of([t.text.lower() for t in train], size))


def new_bert(run: Run, words: Words, heads: tuple[str, ...]) -> BERT:
    a = run.arguments
    run.seed("model")
    return BERT(
        BERTConfig(
            vocab_size=words.known, d_model=a.width, hidden=4 * a.width, num_layers=a.layers,
            num_heads=max(1, a.width // 32),
            max_length=LENGTH, heads=heads, pooler="nsp" in heads, dropout=a.dropout,
            attention_dropout=a.dropout,
        )
    )  # fmt: skip


def span_pairs(run: Run, texts: Texts) -> tuple[list[Any], list[Any]]:
    """Return (training, held-out) pairs: halves of one text or, half of the time, of two."""
    made = []
    tokenizer = texts.words.tokenizer
    for part, name in ((texts.train, "pairs"), (texts.held_out, "held-out pairs")):
        documents = [tokenizer.encode_all([h.lower() for h in halves(t.text)]) for t in part]
        documents = [
            [ids[: LENGTH // 2 - 2] for ids in document]
            for document in documents
            if len(document) == 2
        ]
        if len(documents) < FEWEST:
            raise UsageError(
                f"{len(documents)} texts ({name}) have words enough to be cut in two; wanted"
                f" {FEWEST}"
            )
        made.append(
            next_sentence_pairs(documents, tokenizer.start_id, tokenizer.end_id, run.seed(name))
        )
    return made[0], made[1]


def pre_train(
    run: Run, texts: Texts, heads: tuple[str, ...], mask: Callable[..., Any]
) -> tuple[BERT, list[Any], list[Batch]]:
    """Return the pre-trained model, the held-out data, and its batches.

    Without the head nsp, the model reads whole texts, one at a time.
    """
    tokenizer = texts.words.tokenizer
    if "nsp" in heads:
        train, held_out = span_pairs(run, texts)
        lengths = [len(pair.ids) for pair in train]
    else:
        train, held_out = (
            [
                [tokenizer.start_id, *ids[: LENGTH - 2], tokenizer.end_id]
                for ids in tokenizer.encode_all([t.text.lower() for t in part])
            ]
            for part in (texts.train, texts.held_out)
        )
        lengths = [len(ids) for ids in train]
    collate = masked_collate(tokenizer.pad_id, texts.words.vocabulary, mask)
    a = run.arguments
    batches = Batches(train, a.batch, collate, lengths=lengths, seed=a.seed)
    checked = in_batches(held_out, a.batch, collate, a.seed)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        return {
            name: value for name, value in masked_figures(model, checked).items() if name != "asked"
        }

    model = new_bert(run, texts.words, heads)
    run.fit("pretrain", model, batches, rate(a.rate, a.steps), a.steps, evaluate=evaluate)
    tokenizer.save(run.out / "tokenizer.json")
    return model, held_out, checked


def masked_figures(model: torch.nn.Module, batches: list[Batch]) -> dict[str, float]:
    """Return the loss and the accuracy of masked tokens and next sentences."""
    loss, right, asked, next_right, pairs, count = 0.0, 0, 0, 0, 0, 0
    for batch, out in each_batch(model, batches):
        wanted = batch["labels"] != IGNORED
        right += int((out.logits[wanted].argmax(-1) == batch["labels"][wanted]).sum())
        loss, asked, count = loss + out.loss.item(), asked + int(wanted.sum()), count + 1
        if "next_sentence_label" in batch:
            next_right += int(
                (out.next_sentence_logits.argmax(-1) == batch["next_sentence_label"]).sum()
            )
            pairs += len(batch["next_sentence_label"])
    found = {
        "validation_loss": loss / max(1, count),
        "masked_accuracy": right / max(1, asked),
        "asked": float(asked),
    }
    return found | ({"next_accuracy": next_right / pairs} if pairs else {})


def by_neighbour(texts: Texts, batches: list[Batch]) -> float:
    """Return the accuracy of the most frequent successor of the token before, if known."""
    ids = texts.words.tokenizer.encode_all([t.text.lower() for t in texts.train])
    follows = MostFrequent(pair for text in ids for pair in itertools.pairwise(text))
    right = asked = 0
    for batch in batches:
        for row, token in (batch["labels"] != IGNORED).nonzero().tolist():
            right += follows(int(batch["input_ids"][row, token - 1])) == int(
                batch["labels"][row, token]
            )
            asked += 1
    return right / max(1, asked)


def by_words_in_common(pairs: Sequence[SentencePair]) -> float:
    """Return the accuracy of predicting "next" if the two spans share a token."""
    right = 0
    for pair in pairs:
        one, other = ({t for t, s in zip(pair.ids, pair.segments) if s == side} for side in (0, 1))
        common = one & other - {pair.ids[0], pair.ids[-1]}
        right += (0 if common else 1) == pair.label
    return right / max(1, len(pairs))


@torch.no_grad()
def boundary_accuracy(model: BERT, batches: Sequence[Batch]) -> float:
    """Return the boundary head's accuracy on the tokens of masked spans."""
    head = model.boundary
    assert head is not None
    right = count = 0
    for batch, out in each_batch(model, batches):
        asked = batch["labels"] != IGNORED
        said = head.output(
            head.predicted(out.last_hidden_state, asked, batch["span_bounds"])
        ).argmax(-1)
        right, count = right + int((said == batch["labels"][asked]).sum()), count + int(asked.sum())
    return right / max(1, count)
