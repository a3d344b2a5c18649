# SPDX-License-Identifier: Apache-2.0
"""Batches of sequences of like length, in an order that is a function of the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Batch = dict[str, torch.Tensor]
Collate = Callable[[list[Any], torch.Generator], Batch]
IGNORED = -100  # a label that no loss counts: the default of linear_cross_entropy and of PyTorch


class Batches:
    """What a trainer reads: the examples in batches, another order each epoch.

    The batches of an epoch depend on the seed and the epoch only, and each batch's generator on its place too. So training
    resumes in the middle of an epoch with the very batches it would have seen, masked the very same way.

    Args:
        examples: anything indexable.
        batch_size: examples in a batch; the last ones of an epoch that fill no batch are left to the next epoch's shuffle.
            With fewer examples than that, one batch of all.
        collate: makes a batch of a list of examples, drawing what it draws from the generator it gets.
        lengths: of each example; examples of like length share a batch, so that little is padding. None: all alike.
        seed: of the order and of what collate draws.
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
            raise ValueError(f"Batches: wanted a length for each of {len(examples)} examples, got {len(lengths)}")
        self.examples, self.collate, self.seed = examples, collate, seed
        self.batch_size = min(batch_size, len(examples))
        self.lengths = None if lengths is None else torch.as_tensor(lengths)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.examples) // self.batch_size

    def plan(self, epoch: int) -> list[list[int]]:
        """The examples of each batch of an epoch."""
        draw = _generator(self.seed, epoch)
        order = torch.randperm(len(self.examples), generator=draw)
        if self.lengths is not None:
            # Sorting by length within 50 batches' worth keeps lengths alike and batches different from epoch to epoch.
            pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(50 * self.batch_size)]
            order = torch.cat(pools)
        batches = order[: len(self) * self.batch_size].view(len(self), self.batch_size)
        return batches[torch.randperm(len(self), generator=draw)].tolist()

    def epoch(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The batches of an epoch from number `start` on: of every `world` in a row, the one of number `rank`.

        The last ones that do not suffice for all processes are left out.
        """
        plan = self.plan(epoch)
        for first in range(start, len(plan) - world + 1, world):
            yield self.batch(epoch, first + rank, plan[first + rank])

    def batch(self, epoch: int, number: int, indices: list[int]) -> Batch:
        return self.collate([self.examples[i] for i in indices], _generator(self.seed, epoch, number + 1))


def _generator(*numbers: int) -> torch.Generator:
    """A generator whose state is a function of the numbers, different for different ones."""
    return torch.Generator().manual_seed(mix(*numbers))


def mix(*numbers: int) -> int:
    """One seed from several numbers, such that neighbours have nothing in common."""
    import hashlib

    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch's seeds are int64


def pad(sequences: Sequence[Sequence[int]], value: int, *, left: bool = False) -> torch.Tensor:
    """(B, longest) int64, the shorter ones filled up with `value` at the end, or at the start with `left`."""
    width = max(map(len, sequences))
    fill = [[value] * (width - len(s)) for s in sequences]
    return torch.tensor([[*f, *s] if left else [*s, *f] for s, f in zip(sequences, fill)], dtype=torch.int64)


def attention_mask(sequences: Sequence[Sequence[int]], *, left: bool = False) -> torch.Tensor:
    """(B, longest) int64: 1 at tokens, 0 at padding."""
    return pad([[1] * len(s) for s in sequences], 0, left=left)


def translation_collate(pad_id: int, start_id: int, end_id: int) -> Collate:
    """Collates (source ids, target ids) for an encoder-decoder with teacher forcing.

    The source ends with `</s>`; the decoder reads `<s>` and the target, and is to say the target and `</s>`.
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
    """Collates token sequences for a decoder that says each next token; labels stand where their tokens do, as in Hugging Face.

    With a delimiter (article, delimiter, summary in one sequence), only what follows it is learned.
    """

    def collate(examples: list[list[int]], generator: torch.Generator) -> Batch:
        known = [0 if delimiter is None else ids.index(delimiter) + 1 for ids in examples]
        return {
            "input_ids": pad(examples, pad_id),
            "attention_mask": attention_mask(examples),
            "labels": pad([[*[IGNORED] * n, *ids[n:]] for ids, n in zip(examples, known)], IGNORED),
        }

    return collate
