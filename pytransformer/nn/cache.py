# SPDX-License-Identifier: Apache-2.0
"""Keys and values of what a decoder has seen, kept for the next token."""

from __future__ import annotations

import torch


class LayerCache:
    """One layer's self-attention keys and values in buffers of ``max_length``, and its cross-attention's as they were made.

    Buffers are (B, Hkv, max_length, D), allocated at the first :meth:`append`; what is handed out are views of their filled part.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self.buffers: tuple[torch.Tensor, torch.Tensor] | None = None
        self.cross: tuple[torch.Tensor, torch.Tensor] | None = None

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (B, Hkv, new, D) and return all keys and values so far, views of the buffers.

        Raises:
            ValueError: more than max_length positions, another batch size or head shape than before, or tensors that need a
                gradient: what is overwritten in place cannot be differentiated.
        """
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise ValueError("KeyValueCache is for inference: call the model under torch.no_grad() or torch.inference_mode()")
        end = self.length + key.shape[2]
        if end > self.max_length:
            raise ValueError(f"KeyValueCache: {end} positions, but it was made for max_length={self.max_length}")
        if self.buffers is None:
            self.buffers = (self._buffer(key), self._buffer(value))
        for buffer, new, name in zip(self.buffers, (key, value), ("key", "value")):
            want = (*buffer.shape[:2], new.shape[2], buffer.shape[3])
            if tuple(new.shape) != want:
                raise ValueError(f"KeyValueCache: {name} must be {want} as before, got {tuple(new.shape)}; reset() the cache")
            buffer[:, :, self.length : end] = new
        self.length = end
        keys, values = self.buffers
        return keys[:, :, :end], values[:, :, :end]

    def _buffer(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(*like.shape[:2], self.max_length, like.shape[3])

    def reorder(self, rows: torch.Tensor) -> None:
        """Row b of the batch becomes what was row ``rows[b]``; there may be more or fewer rows than before."""
        if self.buffers is not None:
            filled = [b[:, :, : self.length].index_select(0, rows) for b in self.buffers]
            if rows.shape[0] != self.buffers[0].shape[0]:
                self.buffers = (self._buffer(filled[0]), self._buffer(filled[1]))
            for buffer, kept in zip(self.buffers, filled):
                buffer[:, :, : self.length] = kept
        if self.cross is not None:
            self.cross = (self.cross[0].index_select(0, rows), self.cross[1].index_select(0, rows))


class KeyValueCache:
    """The caches of all layers of a decoder.

    Made by ``model.make_cache(max_length)`` and passed as ``past_key_values``; each call of the model appends to it. Memory is
    taken once: 2 B Hkv max_length D numbers a layer. Keys and values of cross-attention are computed in the first call only.
    """

    def __init__(self, num_layers: int, max_length: int) -> None:
        if max_length < 1:
            raise ValueError(f"KeyValueCache: max_length must be at least 1, got {max_length}")
        self.max_length = max_length
        self.layers = [LayerCache(max_length) for _ in range(num_layers)]

    @property
    def length(self) -> int:
        """How many positions are stored."""
        return self.layers[0].length if self.layers else 0

    def reorder(self, rows: torch.Tensor, cross: bool = True) -> None:
        """Row b of the batch becomes what was row ``rows[b]`` (int64): beams that live on, or a prompt copied for each beam.

        Args:
            cross: also the cross-attention's; False saves that where rows only move among the beams of one source sentence.
        """
        for layer in self.layers:
            kept = layer.cross
            if not cross:
                layer.cross = None
            layer.reorder(rows)
            if not cross:
                layer.cross = kept

    def crop(self, length: int) -> None:
        """Forget the positions from ``length`` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"KeyValueCache.crop: length must be between 0 and {self.length}, got {length}")
        for layer in self.layers:
            layer.length = length

    def reset(self) -> None:
        """Forget everything, buffers too."""
        self.layers = [LayerCache(self.max_length) for _ in self.layers]
