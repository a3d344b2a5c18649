# SPDX-License-Identifier: Apache-2.0
"""Shared code of the decoder tasks: data, a small GPT, held-out loss, multiple choice."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pytransformer.models import GPT, GPTConfig
from pytransformer.training import IGNORED, Batches, Tokenizer, pad
from pytransformer.training.batching import Batch, attention_mask

from ._run import Run
from ._text import each_batch
from .data.baselines import Bigrams

LENGTH = 192  # the model's positions
CHOICES = 4


def new_gpt(run: Run, vocabulary: int, **more: Any) -> GPT:
    a = run.arguments
    run.seed("model")
    return GPT(
        GPTConfig(
            vocab_size=vocabulary, d_model=a.width, num_layers=a.layers,
            num_heads=max(1, a.width // 32), max_length=LENGTH,
            dropout=a.dropout, attention_dropout=a.dropout, **more,
        )
    )  # fmt: skip


def by_length(sequences: Sequence[list[int]], collate: Any, run: Run) -> Batches:
    return Batches(
        sequences,
        run.arguments.batch,
        collate,
        lengths=[len(s) for s in sequences],
        seed=run.arguments.seed,
    )


def next_token_figures(model: torch.nn.Module, batches: Sequence[Batch]) -> dict[str, float]:
    """Return the mean token loss in nats, without the experts' balance loss, and top-1 accuracy."""
    loss, right, count = 0.0, 0, 0
    for batch, out in each_batch(model, batches):
        wanted = batch["labels"][:, 1:]
        asked = wanted != IGNORED
        logits = out.logits[:, :-1][asked].float()
        loss += torch.nn.functional.cross_entropy(logits, wanted[asked], reduction="sum").item()
        right += int((logits.argmax(-1) == wanted[asked]).sum())
        count += int(asked.sum())
    return {"validation_loss": loss / max(1, count), "accuracy": right / max(1, count)}


def bigram_loss(
    train: Sequence[Sequence[int]], held_out: Sequence[Sequence[int]], vocabulary: int
) -> float:
    return Bigrams(train, vocabulary).loss(held_out)


class Choice(NamedTuple):
    """A prompt and candidate endings, one of them true."""

    prompt: str
    endings: list[str]
    answer: int


def choices(
    prompts: Sequence[str], endings: Sequence[str], chance: random.Random, most: int = 200
) -> list[Choice]:
    """Return each prompt's ending beside CHOICES - 1 others of similar length.

    Similar lengths keep the length from giving the answer away.
    """
    if len(set(endings)) < 2 * CHOICES:
        return []
    order = sorted(range(len(endings)), key=lambda i: (len(endings[i]), i))
    place = {index: rank for rank, index in enumerate(order)}
    made = []
    for index in chance.sample(range(len(prompts)), min(most, len(prompts))):
        near = sorted(order, key=lambda i: abs(place[i] - place[index]))
        others = list(dict.fromkeys(endings[i] for i in near if endings[i] != endings[index]))[
            : 3 * (CHOICES - 1)
        ]
        shown = chance.sample(others, CHOICES - 1)
        answer = chance.randrange(CHOICES)
        made.append(
            Choice(prompts[index], [*shown[:answer], endings[index], *shown[answer:]], answer)
        )
    return made


@torch.no_grad()
def log_likelihoods(
    model: GPT, asked: Sequence[tuple[list[int], list[int]]], pad_id: int, batch_size: int = 32
) -> list[float]:
    """Return each (prompt, ending)'s mean log-probability of the ending's tokens.

    Long prompts lose their beginning.
    """
    device = next(model.parameters()).device
    model.eval()
    likelihoods = []
    for first in range(0, len(asked), batch_size):
        part = [
            (p[-(LENGTH - len(e)) :] if len(p) + len(e) > LENGTH else p, e)
            for p, e in asked[first : first + batch_size]
        ]
        ids = [[*p, *e] for p, e in part]
        labels = pad([[*[IGNORED] * len(p), *e] for p, e in part], IGNORED).to(device)[:, 1:]
        logits = (
            model(pad(ids, pad_id).to(device), attention_mask(ids).to(device))
            .logits[:, :-1]
            .float()
        )
        each = -torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
        )
        likelihoods += (each.sum(1) / (labels != IGNORED).sum(1)).tolist()
    return likelihoods


def chosen_right(likelihoods: Sequence[float], asked: Sequence[Choice]) -> float:
    """Return the share of choices whose likeliest ending is true; likelihoods are flattened."""
    rows = [likelihoods[i : i + CHOICES] for i in range(0, len(likelihoods), CHOICES)]
    return sum(row.index(max(row)) == c.answer for row, c in zip(rows, asked, strict=True)) / max(
        1, len(asked)
    )


def by_letters_in_common(asked: Sequence[Choice]) -> float:
    """Return the accuracy of the ending that shares most letter trigrams with its prompt."""

    def trigrams(text: str) -> set[str]:
        letters = " ".join(re.findall(r"\w+", text.casefold()))
        return {letters[i : i + 3] for i in range(max(1, len(letters) - 2))}

    right = 0
    for choice in asked:
        known = trigrams(choice.prompt)
        shares = [len(known & trigrams(e)) / len(trigrams(e)) for e in choice.endings]
        right += shares.index(max(shares)) == choice.answer
    return right / max(1, len(asked))


def text_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return `<s> text </s>` of each text, truncated to the model's positions."""
    return [
        [tokenizer.start_id, *ids[: LENGTH - 2], tokenizer.end_id]
        for ids in tokenizer.encode_all(texts)
    ]
