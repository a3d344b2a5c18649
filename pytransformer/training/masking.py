# SPDX-License-Identifier: Apache-2.0
"""Training data of a masked language model: masked tokens, masked spans, sentence pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .batching import IGNORED, Batch, attention_mask, pad


class Masked(NamedTuple):
    """One sequence: the input ids, and the labels, IGNORED where there is no prediction."""

    ids: list[int]
    labels: list[int]
    spans: list[tuple[int, int]]  # (first, last) token of each masked span; empty for single tokens


class Vocabulary(NamedTuple):
    """The token ids that masking needs."""

    size: int
    mask_id: int
    special: frozenset[int]  # never masked, never drawn as a replacement


def mask_tokens(
    ids: Sequence[int], vocabulary: Vocabulary, generator: torch.Generator, share: float = 0.15
) -> Masked:
    """Mask tokens as BERT does (Devlin et al. 2019, section 3.1).

    A `share` of the tokens gets labels. 80 % of these become the mask token, 10 % a random token,
    and 10 % stay. At least one token gets a label if the sequence has any that is not special.
    """
    free = [i for i, token in enumerate(ids) if token not in vocabulary.special]
    count = min(len(free), max(1, _round_at_random(share * len(free), generator)))
    chosen = [free[i] for i in torch.randperm(len(free), generator=generator)[:count].tolist()]
    return _replace(ids, [[i] for i in chosen], vocabulary, generator)._replace(spans=[])


def mask_spans(
    ids: Sequence[int],
    vocabulary: Vocabulary,
    generator: torch.Generator,
    share: float = 0.15,
    success: float = 0.2,
    longest: int = 10,
) -> Masked:
    """Mask spans as SpanBERT does (Joshi et al. 2020, section 3.1).

    Lengths are geometric, truncated at `longest` (mean 3.8), until `share` of the tokens are
    masked; 80 : 10 : 10 is drawn once per span. A span contains no special token. At least one
    unmasked token separates two spans, because the boundary objective reads it.
    """
    free = [token not in vocabulary.special for token in ids]
    budget = min(sum(free), max(1, _round_at_random(share * sum(free), generator)))
    spans: list[list[int]] = []
    while budget > 0:
        length = min(_span_length(generator, success, longest), budget)
        starts = [i for i in range(len(ids) - length + 1) if all(free[i : i + length])]
        if not starts and length == 1:
            break
        if not starts:  # no gap of this length is left, so try shorter ones
            longest = length - 1
            continue
        start = starts[int(torch.randint(len(starts), (), generator=generator))]
        spans.append(list(range(start, start + length)))
        budget -= length
        for i in range(max(0, start - 1), min(len(ids), start + length + 1)):
            free[i] = False
    return _replace(ids, spans, vocabulary, generator)


def span_length_probabilities(success: float = 0.2, longest: int = 10) -> list[float]:
    """Return P(length = 1), ..., P(length = longest) of the truncated geometric distribution."""
    weights = [success * (1 - success) ** (length - 1) for length in range(1, longest + 1)]
    return [weight / sum(weights) for weight in weights]


class SentencePair(NamedTuple):
    """`<s> first </s> second </s>` with segment ids and the next-sentence label."""

    ids: list[int]
    segments: list[int]
    label: int  # as in Hugging Face: 0 is the next sentence, 1 a random one


def masked_collate(
    pad_id: int,
    vocabulary: Vocabulary,
    mask: Callable[[Sequence[int], Vocabulary, torch.Generator], Masked] = mask_tokens,
) -> Callable[[list[Any], torch.Generator], Batch]:
    """Return a collate that draws masks anew for each batch.

    Examples are token sequences or :class:`SentencePair`, which adds "token_type_ids" and
    "next_sentence_label". Masked spans add "span_bounds" (B, L, 2), the tokens around each.
    """

    def collate(examples: list[Any], generator: torch.Generator) -> Batch:
        pairs = [example for example in examples if isinstance(example, SentencePair)]
        masked = [
            mask(ids, vocabulary, generator) for ids in [pair.ids for pair in pairs] or examples
        ]
        batch = {
            "input_ids": pad([m.ids for m in masked], pad_id),
            "attention_mask": attention_mask([m.ids for m in masked]),
            "labels": pad([m.labels for m in masked], IGNORED),
        }
        if pairs:
            batch["token_type_ids"] = pad([pair.segments for pair in pairs], 0)
            batch["next_sentence_label"] = torch.tensor([pair.label for pair in pairs])
        if any(m.spans for m in masked):
            batch["span_bounds"] = bounds = torch.zeros(
                *batch["labels"].shape, 2, dtype=torch.int64
            )
            for row, m in enumerate(masked):
                for first, last in m.spans:
                    bounds[row, first : last + 1] = torch.tensor([first - 1, last + 1])
        return batch

    return collate


def next_sentence_pairs(
    documents: Sequence[Sequence[Sequence[int]]],
    start_id: int,
    end_id: int,
    generator: torch.Generator,
) -> list[SentencePair]:
    """Return BERT's pairs (Devlin et al. 2019, section 3.1).

    Each sentence is paired with its successor or, half of the time, with a random sentence of
    another document.

    Args:
        documents: the sentences of each document, as token ids.

    Raises:
        ValueError: fewer than two documents have a sentence, so there is none to draw from.
    """
    documents = [document for document in documents if document]
    if len(documents) < 2:
        raise ValueError(
            "next_sentence_pairs: expected at least two documents with sentences, got"
            f" {len(documents)}"
        )
    pairs = []
    for number, document in enumerate(documents):
        for first, second in itertools.pairwise(document):
            label = int(torch.randint(2, (), generator=generator))
            if label == 1:
                other = int(torch.randint(len(documents) - 1, (), generator=generator))
                elsewhere = documents[other + (other >= number)]
                second = elsewhere[int(torch.randint(len(elsewhere), (), generator=generator))]
            ids = [start_id, *first, end_id, *second, end_id]
            pairs.append(SentencePair(ids, [0] * (len(first) + 2) + [1] * (len(second) + 1), label))
    return pairs


def _round_at_random(x: float, generator: torch.Generator) -> int:
    """Round `x` randomly with mean x; otherwise short sequences would have too few masks."""
    return int(x + torch.rand((), generator=generator).item())


def _span_length(generator: torch.Generator, success: float, longest: int) -> int:
    weights = torch.tensor(span_length_probabilities(success, longest))
    return 1 + int(torch.multinomial(weights, 1, generator=generator))


def _replace(
    ids: Sequence[int], spans: list[list[int]], vocabulary: Vocabulary, generator: torch.Generator
) -> Masked:
    """Replace each span by masks or random tokens, or leave it, and set labels for its tokens."""
    read, labels = list(ids), [IGNORED] * len(ids)
    for span in spans:
        fate = torch.rand((), generator=generator).item()
        for i in span:
            labels[i] = ids[i]
            if fate < 0.8:
                read[i] = vocabulary.mask_id
            elif fate < 0.9:
                read[i] = _any_token(vocabulary, generator)
    return Masked(read, labels, [(span[0], span[-1]) for span in spans])


def _any_token(vocabulary: Vocabulary, generator: torch.Generator) -> int:
    while True:
        token = int(torch.randint(vocabulary.size, (), generator=generator))
        if token not in vocabulary.special:
            return token
