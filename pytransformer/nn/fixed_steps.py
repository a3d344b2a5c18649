# SPDX-License-Identifier: Apache-2.0
"""Decoding steps with fixed shapes, addresses and tables; lengths are counted on the device.

Such a step can be captured once, as a CUDA graph or by torch.compile, and replayed. Pages are
reserved before the first step and released after the last.
"""

from __future__ import annotations

from typing import Any

import torch

from ..ops.append_kv import KeyValues
from .cache import DecoderCache, Reserved, Step, refuse_gradients, write
from .masks import is_lengths


class FixedLayer:
    """One layer with all of its memory; attention reads the part within the lengths."""

    def __init__(
        self, steps: FixedSteps, held: KeyValues, cross: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        self.steps, self.held, self.cross = steps, held, cross

    def positions(self, columns: int, device: torch.device) -> torch.Tensor:
        return self.steps.current.places(columns, device)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (B, Hkv, new, D) and return the full memory."""
        refuse_gradients("FixedSteps", key, value)
        positions = self.steps.current.positions
        assert positions is not None
        write(self.held, key, value, positions)
        return self.held[:2]

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        return self.held.scales


class FixedSteps(DecoderCache):
    """A cache's ``past_key_values`` for up to ``tokens`` steps that read nothing on the host.

    It replaces a cache that has read a prompt; after :meth:`finish` the cache continues. Every step
    increments :attr:`lengths`, one tensor, and :meth:`crop` sets it. Tokens beyond the reserved
    room are neither written nor read. The CPU raises in that step; a GPU is not synchronized, and
    :meth:`finish` raises.

    Raises:
        ValueError: the cache is empty or has too little room.
        OutOfPages: a paged cache has too few pages; it is unchanged.
    """

    def __init__(self, cache: DecoderCache, tokens: int) -> None:
        if tokens < 1:
            raise ValueError(f"FixedSteps: tokens must be at least 1, got {tokens}")
        reserved = cache.reserve(tokens)
        self._layers = [FixedLayer(self, held, cross) for held, cross in reserved.layers]
        self._lengths, self._room, self._most = (
            reserved.lengths.clone(),
            reserved.lengths + tokens,
            reserved.most,
        )
        self._reserved: Reserved | None = reserved
        self._step: Step | None = None
        self._new = self._lengths  # (B,), tokens of the current step

    @property
    def layers(self) -> list[FixedLayer]:
        return self._layers

    @property
    def length(self) -> int:
        """Return the maximum length of a sequence."""
        return self._most

    @property
    def lengths(self) -> torch.Tensor:
        return self._lengths

    @property
    def current(self) -> Step:
        if self._step is None:
            raise ValueError("FixedSteps: call step before its layers, as models do")
        return self._step

    def step(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Step:
        (batch, columns), held = ids.shape[:2], self._lengths
        if self._reserved is None:
            raise ValueError("FixedSteps: it was finished; make others of the cache")
        if held.shape[0] != batch:
            raise ValueError(f"FixedSteps: it was made for {held.shape[0]} sequences, got {batch}")
        if is_lengths(attention_mask, batch):
            asked, some = (attention_mask.to(held.dtype) - held).clamp(0, columns), True
        elif attention_mask is None:
            asked, some = torch.full_like(held, columns), False
        else:
            raise ValueError(
                f"FixedSteps: expected attention_mask as lengths ({batch},) or None, got"
                f" {tuple(attention_mask.shape)}"
            )
        if held.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check(held + asked)
        new = torch.minimum(asked, self._room - held).clamp_min(0)
        column = torch.arange(columns, device=held.device)
        positions = torch.where(column < new[:, None], held[:, None] + column, -1)
        total = held + new
        visible: dict[str, Any] = {"causal": "bottom_right", "key_lengths": total}
        if self._layers and (table := self._layers[0].held.page_table) is not None:
            visible["page_table"] = table
        if some:
            visible["query_lengths"] = new
        start = max(0, self._most - columns)
        self._new = new
        self._step = Step(start, self._most, visible, new if some else None, total, positions)
        self._lengths.add_(asked)  # also beyond the room, which finish() detects
        return self._step

    def _check(self, lengths: torch.Tensor) -> None:
        for b in (lengths > self._room).nonzero()[:1, 0].tolist():
            raise ValueError(
                f"FixedSteps: sequence {b} would hold {lengths[b]} tokens, and there is room for"
                f" {self._room[b]}; finish() and make room for more"
            )

    def finish(self) -> None:
        """Return the current lengths to the cache, which continues; synchronizes with the device.

        Raises:
            ValueError: more steps ran than there was room for. The last results are wrong, and
                their tokens are lost.
        """
        if self._reserved is None:
            raise ValueError("FixedSteps: it was finished before")
        lengths, room = self._lengths.tolist(), self._room.tolist()
        self._reserved.done([min(n, most) for n, most in zip(lengths, room)])
        self._reserved = self._step = None
        for b, (n, most) in enumerate(zip(lengths, room)):
            if n > most:
                raise ValueError(
                    f"FixedSteps.finish: sequence {b} was given {n - most} tokens more than there"
                    " was room for; the results of those steps are wrong: make room for as many as"
                    " are run"
                )

    def crop(self, length: int | torch.Tensor) -> None:
        """Drop the positions from ``length`` on, on the device.

        A length beyond the end of a sequence has no effect.
        """
        if isinstance(length, torch.Tensor):
            torch.minimum(self._lengths, length.to(self._lengths), out=self._lengths)
        else:
            self._lengths.clamp_max_(length)

    def snapshot(self) -> None:
        self._step = None  # restore() undoes a step; copying lengths would cost a launch per step

    def restore(self, snapshot: None) -> None:
        if self._step is not None and self._step.total is not None:
            self._lengths.copy_(self._step.total - self._new)
        self._step = None

    def reorder(self, rows: torch.Tensor, cross: bool = True) -> None:
        raise ValueError("FixedSteps: rows keep their places; finish() and reorder() the cache")

    def reserve(self, tokens: int) -> Reserved:
        raise ValueError("FixedSteps: finish(), and make others of the cache")

    def free(self) -> None:
        raise ValueError("FixedSteps: finish(), and free() the cache")
