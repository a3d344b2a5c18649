# SPDX-License-Identifier: Apache-2.0
"""transformers' dynamic cache with spare rows, so new tokens are written in place.

``DynamicLayer`` concatenates, which copies all keys and values for each token. Here :attr:`keys`
and :attr:`values` are views of the start of larger tensors. All other methods are transformers';
they operate on the views and may replace them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """One layer; rows that were returned are never overwritten.

    After a crop, reorder or copy the next token allocates new tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None
        self._filled = 0  # rows written so far

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        new = (key_states, value_states)
        # Backward may need the returned tensors unchanged.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self._has_room(start, end, new):
            self._move(start, end, new)
        assert self._room is not None
        for room, states in zip(self._room, new):
            room[..., start:end, :] = states
        self._filled = end
        self.keys, self.values = (room[..., :end, :] for room in self._room)
        return self.keys, self.values

    def _has_room(self, start: int, end: int, new: tuple[torch.Tensor, torch.Tensor]) -> bool:
        """Return whether the views cover all written rows and the new rows fit."""
        if self._room is None or start != self._filled or end > self._room[0].shape[-2]:
            return False
        return all(
            held.data_ptr() == room.data_ptr()
            and held.shape[:-2] == room.shape[:-2] == states.shape[:-2]
            and (held.dtype, held.device) == (room.dtype, room.device)
            # Inference tensors are read-only outside inference mode.
            and (torch.is_inference_mode_enabled() or not room.is_inference())
            for held, room, states in zip((self.keys, self.values), self._room, new)
        )

    def _move(self, start: int, end: int, new: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Allocate a quarter more rows than needed; a row is copied at most four times."""
        rows = end + max(end // 4, 64)
        held = (self.keys, self.values)
        self._room = tuple(t.new_empty(*t.shape[:-2], rows, t.shape[-1]) for t in new)  # type: ignore[assignment]
        if start:
            for room, states in zip(self._room or (), held):
                room[..., :start, :] = states

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without spare rows; a copy allocates its memory on demand."""
        return {**self.__dict__, "_room": None, "_filled": 0}


def growing_cache(config: Any) -> DynamicCache | EncoderDecoderCache:
    """Return ``DynamicCache(config=config)`` with growing layers, except sliding windows.

    An encoder-decoder needs one cache per attention: its self-attention's grows, and its
    cross-attention's is written once.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    if getattr(config, "is_encoder_decoder", False):
        return EncoderDecoderCache(cache, DynamicCache())
    return cache
