# SPDX-License-Identifier: Apache-2.0
"""Batches of sequences of similar length, ordered by a function of seed and epoch only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Batch = dict[str, torch.Tensor]
Collate = Callable[[list[Any], torch.Generator], Batch]
IGNORED = -100  # a label that losses skip: the default of linear_cross_entropy and PyTorch


class Batches:
    """The examples in batches, in another order each epoch.

    The batches of an epoch depend only on the seed and the epoch, and each batch's generator also
    on its position. Training can therefore resume in the middle of an epoch with the same batches
    and the same masks.

    Args:
        examples: anything indexable.
        batch_size: examples per batch. An incomplete last batch is dropped; its examples return in
            the next epoch's shuffle. With fewer examples, one batch has all of them.
        collate: builds a batch from a list of examples; random choices use the generator it gets.
        lengths: the length of each example. Examples of similar length share a batch, which saves
            padding. None: all equal.
        seed: seeds the order and collate's generator.
    """

    def __init__(
        self,
        examples: Sequence[Any],
        batch_size: int,
        collate: Collate,
        *,
        lengths: Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"Batches: batch_size must be at least 1, got {batch_size}")
        if len(examples) == 0:
            raise ValueError("Batches: no example to make a batch of")
        if lengths is not None and len(lengths) != len(examples):
            raise ValueError(
                f"Batches: expected a length for each of {len(examples)} examples, got"
                f" {len(lengths)}"
            )
        self.examples, self.collate, self.seed = examples, collate, seed
        self.batch_size = min(batch_size, len(examples))
        self.lengths = None if lengths is None else torch.as_tensor(lengths)

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.examples) // self.batch_size

    def plan(self, epoch: int) -> list[list[int]]:
        """Return the examples of each batch of an epoch."""
        draw = _generator(self.seed, epoch)
        order = torch.randperm(len(self.examples), generator=draw)
        if self.lengths is not None:
            # Sorting by length within pools of 50 batches groups similar lengths and still varies
            # the batches between epochs.
            pools = [
                pool[self.lengths[pool].argsort(stable=True)]
                for pool in order.split(50 * self.batch_size)
            ]
            order = torch.cat(pools)
        batches = order[: len(self) * self.batch_size].view(len(self), self.batch_size)
        return batches[torch.randperm(len(self), generator=draw)].tolist()

    def epoch(
        self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1
    ) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start`: every `world`-th, offset by `rank`.

        The last batches are dropped if they do not suffice for all processes.
        """
        plan = self.plan(epoch)
        for first in range(start, len(plan) - world + 1, world):
            yield self.batch(epoch, first + rank, plan[first + rank])

    def batch(self, epoch: int, number: int, indices: list[int]) -> Batch:
        return self.collate(
            [self.examples[i] for i in indices], _generator(self.seed, epoch, number + 1)
        )


def _generator(*numbers: int) -> torch.Generator:
    """Return a generator whose state is a function of the numbers."""
    return torch.Generator().manual_seed(mix(*numbers))


def mix(*numbers: int) -> int:
    """Return one seed from several numbers; adjacent numbers give unrelated seeds."""
    import hashlib

    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch's seeds are int64


def pad(sequences: Sequence[Sequence[int]], value: int, *, left: bool = False) -> torch.Tensor:
    """Return (B, longest) int64; pad with `value` at the end, or at the start with `left`."""
    width = max(map(len, sequences))
    fill = [[value] * (width - len(s)) for s in sequences]
    return torch.tensor(
        [[*f, *s] if left else [*s, *f] for s, f in zip(sequences, fill)], dtype=torch.int64
    )


def attention_mask(sequences: Sequence[Sequence[int]], *, left: bool = False) -> torch.Tensor:
    """Return (B, longest) int64: 1 at tokens, 0 at padding."""
    return pad([[1] * len(s) for s in sequences], 0, left=left)


def translation_collate(pad_id: int, start_id: int, end_id: int) -> Collate:
    """Return a collate of (source ids, target ids) for teacher forcing.

    The source ends with `</s>`. The decoder's input is `<s>` and the target; its labels are the
    target and `</s>`.
    """

    def collate(examples: list[tuple[list[int], list[int]]], generator: torch.Generator) -> Batch:
        sources = [[*source, end_id] for source, _ in examples]
        read = [[start_id, *target] for _, target in examples]
        return {
            "input_ids": pad(sources, pad_id),
            "attention_mask": attention_mask(sources),
            "decoder_input_ids": pad(read, pad_id),
            "decoder_attention_mask": attention_mask(read),
            "labels": pad([[*target, end_id] for _, target in examples], IGNORED),
        }

    return collate


def causal_collate(pad_id: int, *, delimiter: int | None = None) -> Collate:
    """Return a collate for a decoder; labels align with their tokens, as in Hugging Face.

    With a delimiter (article, delimiter, summary in one sequence), only the part after it has
    labels.
    """

    def collate(examples: list[list[int]], generator: torch.Generator) -> Batch:
        known = [0 if delimiter is None else ids.index(delimiter) + 1 for ids in examples]
        return {
            "input_ids": pad(examples, pad_id),
            "attention_mask": attention_mask(examples),
            "labels": pad([[*[IGNORED] * n, *ids[n:]] for ids, n in zip(examples, known)], IGNORED),
        }

    return collate
