# SPDX-License-Identifier: Apache-2.0
"""Training data of a text-to-text model: span corruption, and tasks mixed by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from .batching import Batch, Collate, translation_collate

T = TypeVar("T")


class TextToText(NamedTuple):
    """Token ids of source and target; with target None, spans of the source are drawn each time."""

    source: list[int]
    target: list[int] | None = None
    prefix: int = 0  # tokens at the source's start that are never left out


def corrupt_spans(
    ids: Sequence[int],
    sentinels: Sequence[int],
    generator: torch.Generator,
    share: float = 0.15,
    mean_length: float = 3.0,
) -> tuple[list[int], list[int]]:
    """Return (source, target) of T5's span corruption (Raffel et al. 2020, section 3.1.4).

    round(share n) tokens, at least one, are left out in round(count / mean_length) spans of random
    lengths. A sentinel replaces each span, and at least one token separates two spans. A span may
    be anywhere. In the authors' code a span always ends the text, which would turn short texts with
    a single span into pure completion.

    The target is each sentinel followed by its tokens, and a final sentinel. "Thank you for
    inviting me" may become "Thank X for inviting me" with the target "X you Y".

    Raises:
        ValueError: fewer than two tokens, or too few sentinels.
    """
    if len(ids) < 2:
        raise ValueError(f"corrupt_spans: expected at least two tokens, got {len(ids)}")
    hidden = min(max(1, round(share * len(ids))), len(ids) - 1)
    spans = min(max(1, round(hidden / mean_length)), len(ids) - hidden + 1, hidden)
    if spans + 1 > len(sentinels):
        raise ValueError(
            f"corrupt_spans: {spans} spans want {spans + 1} sentinels, got {len(sentinels)}"
        )
    kept = _partition(len(ids) - hidden + 2, spans + 1, generator)
    kept[0] -= 1  # the parts before the first span and after the last may be empty
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
    """Return a uniformly random composition of `total` into `parts` positive numbers."""
    cuts = sorted((torch.randperm(total - 1, generator=generator)[: parts - 1] + 1).tolist())
    return [b - a for a, b in zip([0, *cuts], [*cuts, total])]


def text_to_text_collate(
    pad_id: int, start_id: int, end_id: int, sentinels: Sequence[int]
) -> Collate:
    """Return a collate of :class:`TextToText` of any tasks, with teacher forcing."""
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


def sampling_rates(
    sizes: Mapping[str, int], temperature: float = 1.0, limit: int | None = None
) -> dict[str, float]:
    """Return each task's share: min(size, limit)^(1 / temperature), normalized.

    Temperature 1 is proportional to size; infinity is uniform (Raffel et al. 2020, section 3.5.2).

    Raises:
        ValueError: a temperature below 1, or a size below 1.
    """
    if temperature < 1 or min(sizes.values()) < 1:
        raise ValueError(
            f"sampling_rates: expected a temperature and sizes of at least 1, got {temperature} and"
            f" {dict(sizes)}"
        )
    weights = {name: min(size, limit or size) ** (1 / temperature) for name, size in sizes.items()}
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def mixed(
    tasks: Mapping[str, Sequence[T]], temperature: float = 1.0, limit: int | None = None
) -> list[T]:
    """Return the examples of all tasks in the proportions of :func:`sampling_rates`.

    Small tasks repeat. The task with the lowest rate relative to its size occurs once.
    """
    rates = sampling_rates(
        {name: len(examples) for name, examples in tasks.items()}, temperature, limit
    )
    total = max(len(examples) / rates[name] for name, examples in tasks.items())
    out: list[T] = []
    for name, examples in tasks.items():
        count = round(rates[name] * total)
        out += [examples[i % len(examples)] for i in range(count)]
    return out
