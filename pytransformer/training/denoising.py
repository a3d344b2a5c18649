# SPDX-License-Identifier: Apache-2.0
"""What a text-to-text model learns from: spans left out and to be filled in, and several tasks mixed by their size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from .batching import Batch, Collate, translation_collate

T = TypeVar("T")


class TextToText(NamedTuple):
    """Token ids of what is read, and of what is to be said; None: the text itself is to be filled in, spans left out anew each time."""

    source: list[int]
    target: list[int] | None = None
    prefix: int = 0  # tokens at the source's start that are never left out


def corrupt_spans(
    ids: Sequence[int], sentinels: Sequence[int], generator: torch.Generator, share: float = 0.15, mean_length: float = 3.0
) -> tuple[list[int], list[int]]:
    """(what is read, what is to be said) of T5's span corruption (Raffel et al. 2020, section 3.1.4).

    round(share n) tokens, at least one, are left out, in round(that / mean_length) spans of random lengths; a sentinel stands for each.
    Between two spans at least one token is kept. A span may stand anywhere; in the authors' code one always ends the text, which of texts
    as short as a sentence, with a single span, would make nothing but completion.
    What is to be said is each sentinel with the tokens it stands for, and one sentinel more. "Thank you for inviting me" may be read as
    "Thank X for inviting me", to which "X you Y" is the answer.

    Raises:
        ValueError: fewer than two tokens, or too few sentinels.
    """
    if len(ids) < 2:
        raise ValueError(f"corrupt_spans: wanted at least two tokens, got {len(ids)}")
    hidden = min(max(1, round(share * len(ids))), len(ids) - 1)
    spans = min(max(1, round(hidden / mean_length)), len(ids) - hidden + 1, hidden)
    if spans + 1 > len(sentinels):
        raise ValueError(f"corrupt_spans: {spans} spans want {spans + 1} sentinels, got {len(sentinels)}")
    kept = _partition(len(ids) - hidden + 2, spans + 1, generator)
    kept[0] -= 1  # nothing need stand before the first span, nor, in the last part, after the last one
    left_out = _partition(hidden, spans, generator)
    read: list[int] = []
    said: list[int] = []
    place = 0
    for sentinel, before, length in zip(sentinels, kept, left_out):
        first = place + before
        last = first + length
        read += [*ids[place:first], sentinel]
        said += [sentinel, *ids[first:last]]
        place = last
    return [*read, *ids[place:]], [*said, sentinels[spans]]


def _partition(total: int, parts: int, generator: torch.Generator) -> list[int]:
    """`total` in `parts` positive numbers, every way equally likely."""
    cuts = sorted((torch.randperm(total - 1, generator=generator)[: parts - 1] + 1).tolist())
    return [b - a for a, b in zip([0, *cuts], [*cuts, total])]


def text_to_text_collate(pad_id: int, start_id: int, end_id: int, sentinels: Sequence[int]) -> Collate:
    """Collates :class:`TextToText` of any tasks in one batch, for an encoder-decoder with teacher forcing."""
    plain = translation_collate(pad_id, start_id, end_id)

    def collate(examples: list[TextToText], generator: torch.Generator) -> Batch:
        pairs = []
        for source, target, prefix in examples:
            if target is None:
                read, said = corrupt_spans(source[prefix:], sentinels, generator)
                pairs.append(([*source[:prefix], *read], said))
            else:
                pairs.append((source, target))
        return plain(pairs, generator)

    return collate


def sampling_rates(sizes: Mapping[str, int], temperature: float = 1.0, limit: int | None = None) -> dict[str, float]:
    """How much of a mixture each task is: min(size, limit)^(1 / temperature), as a share of all.

    Temperature 1 is in proportion to the sizes, infinity equal (Raffel et al. 2020, section 3.5.2).

    Raises:
        ValueError: a temperature below 1, or a size below 1.
    """
    if temperature < 1 or min(sizes.values()) < 1:
        raise ValueError(f"sampling_rates: wanted a temperature and sizes of at least 1, got {temperature} and {dict(sizes)}")
    weights = {name: min(size, limit or size) ** (1 / temperature) for name, size in sizes.items()}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def mixed(tasks: Mapping[str, Sequence[T]], temperature: float = 1.0, limit: int | None = None) -> list[T]:
    """The examples of all tasks, small tasks' several times, in the proportions of :func:`sampling_rates`: the task that is drawn least
    for its size stands in it once."""
    rates = sampling_rates({name: len(examples) for name, examples in tasks.items()}, temperature, limit)
    total = max(len(examples) / rates[name] for name, examples in tasks.items())
    out: list[T] = []
    for name, examples in tasks.items():
        count = round(rates[name] * total)
        out += [examples[i % len(examples)] for i in range(count)]
    return out
