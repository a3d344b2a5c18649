# SPDX-License-Identifier: Apache-2.0
"""transformers' dynamic cache with room behind the keys and values, so that a token is written there and nothing is copied.

``DynamicLayer`` concatenates: each token copies all keys and values that there are. Here they are the beginning of a larger tensor, of
which :attr:`keys` and :attr:`values` are views; every other method is transformers' own, works on those views and may replace them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types here
    """One layer. What was handed out is never written again: after keys were cropped, reordered or copied, the next token moves them."""

    def __init__(self) -> None:
        super().__init__()
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None
        self._filled = 0  # rows of it that were written

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        new = (key_states, value_states)
        if torch.is_grad_enabled() or torch.compiler.is_compiling():  # a backward may want what was returned as it was
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
        """Whether keys and values are all that was written of the room, and it holds the new rows too."""
        if self._room is None or start != self._filled or end > self._room[0].shape[-2]:
            return False
        return all(
            held.data_ptr() == room.data_ptr()
            and held.shape[:-2] == room.shape[:-2] == states.shape[:-2]
            and (held.dtype, held.device) == (room.dtype, room.device)
            and (torch.is_inference_mode_enabled() or not room.is_inference())  # else it may not be written
            for held, room, states in zip((self.keys, self.values), self._room, new)
        )

    def _move(self, start: int, end: int, new: tuple[torch.Tensor, torch.Tensor]) -> None:
        """A quarter more than is needed: each row is copied four times at most, by and by."""
        rows = end + max(end // 4, 64)
        held = (self.keys, self.values)
        self._room = tuple(t.new_empty(*t.shape[:-2], rows, t.shape[-1]) for t in new)  # type: ignore[assignment]
        if start:
            for room, states in zip(self._room or (), held):
                room[..., :start, :] = states

    def __getstate__(self) -> dict[str, Any]:
        """A copy takes room of its own when it needs some."""
        return {**self.__dict__, "_room": None, "_filled": 0}


def growing_cache(config: Any) -> DynamicCache | EncoderDecoderCache:
    """Return ``DynamicCache(config=config)`` with growing layers; sliding windows stay as they are.

    An encoder-decoder needs one cache per attention: its self-attention's grows, and its
    cross-attention's is written once.
    """
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    if getattr(config, "is_encoder_decoder", False):
        return EncoderDecoderCache(cache, DynamicCache())
    return cache
