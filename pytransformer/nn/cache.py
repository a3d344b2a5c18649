# SPDX-License-Identifier: Apache-2.0
"""KV caches of a decoder: one buffer per sequence, or pages (:mod:`.paged_cache`)."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from ..ops.append_kv import KeyValues, append_kv
from ..reference.eight_bit import LIMITS
from .masks import causal, is_lengths, is_tree, padding, tree


class Step(NamedTuple):
    """The new tokens of one decoder call: positions and masks, computed once for all layers.

    Attributes:
        start: positions before them, of the longest sequence.
        end: positions after them, of the longest sequence, or an upper bound.
        visible: self-attention's masks, as arguments of :func:`pytransformer.attention`.
        new: (B,) int64, number of new tokens of each row; the remaining columns are padding at the
            end. None: all columns are tokens.
        total: (B,) int64, lengths including the new tokens; None: all are ``end``.
        positions: (B, columns) int64, -1 at padding; None: consecutive from ``start`` in each row.
        at: (B, columns) int64, position ids that differ from ``positions``: nodes of a tree.
    """

    start: int
    end: int
    visible: dict[str, Any]
    new: torch.Tensor | None = None
    total: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    at: torch.Tensor | None = None

    @staticmethod
    def of(
        cache: DecoderCache | None, ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> Step:
        """Return the cache's next step, or the only step without a cache.

        The cache then expects these tokens.

        Args:
            ids: (B, columns, ...), of which shape and device matter.
            attention_mask: (B, cached + columns), 0 = padding on any side, if all sequences have
                one length; or (B,), lengths including cached tokens; or (B, columns, cached +
                columns) bool, the keys each token sees, if the columns are a tree of drafts.
        """
        if cache is not None:
            return cache.step(ids, attention_mask)
        batch, columns = ids.shape[:2]
        visible = causal(padding(attention_mask, batch, columns), 0, columns)
        return Step(
            0, columns, visible, attention_mask if is_lengths(attention_mask, batch) else None
        )

    @property
    def position_ids(self) -> torch.Tensor | None:
        """Return (B, columns), 0 at padding, or None if positions count from ``start``."""
        if self.at is not None:
            return self.at
        return None if self.positions is None else self.positions.clamp_min(0)

    def places(self, columns: int, device: torch.device) -> torch.Tensor:
        """Return :attr:`position_ids`, or (columns,) counted from ``start``."""
        ids = self.position_ids
        return torch.arange(self.start, self.start + columns, device=device) if ids is None else ids

    def last(self, hidden: torch.Tensor, keep: int) -> torch.Tensor:
        """Return the last ``keep`` tokens of each sequence, (B, columns, d) to (B, keep, d).

        ``keep`` = 0 returns all columns. A sequence with fewer new tokens repeats its first one.
        """
        if keep == 0 or self.new is None:
            return hidden[:, -keep:]
        at = (self.new[:, None] + torch.arange(-keep, 0, device=hidden.device)).clamp_min(0)
        return hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))


def write(
    cache: KeyValues, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
) -> None:
    """Store (B, Hkv, L, D) at positions (B, L) of each sequence; skip negative positions."""
    append_kv(key[:, :0], key, value, cache, positions)  # no query, so no rotation and no norm


class Layer(Protocol):
    """One layer of a cache, the ``cache`` argument of :class:`MultiHeadAttention`."""

    cross: tuple[torch.Tensor, torch.Tensor] | None

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        """Return the 8-bit scales of the last :meth:`append`, as arguments of attention."""
        ...

    def positions(self, columns: int, device: torch.device) -> torch.Tensor:
        """Return the positions of the next :meth:`append`, int64.

        The shape is (columns,) or (B, columns); padding has 0.
        """
        ...

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (B, Hkv, new, D) and return the keys and values for attention."""
        ...


class Reserved(NamedTuple):
    """The state that a cache prepares for steps on the device; see :class:`FixedSteps`.

    Attributes:
        layers: the memory of each layer, and the keys and values of its cross-attention.
        lengths: (B,) int64, current lengths of the sequences.
        most: maximum length of any sequence.
        done: callback that receives the final lengths.
    """

    layers: Sequence[tuple[KeyValues, tuple[torch.Tensor, torch.Tensor] | None]]
    lengths: torch.Tensor
    most: int
    done: Callable[[list[int]], None]


class DecoderCache(abc.ABC):
    """The interface of decoder caches, for ``past_key_values`` and ``generate``'s ``cache``.

    A model requests the next :class:`Step`, and then each layer appends its keys and values. Each
    call of a model is a :meth:`transaction`; other stacks open one around their steps.
    """

    @property
    @abc.abstractmethod
    def layers(self) -> Sequence[Layer]: ...

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Return the number of stored positions of the longest sequence, or an upper bound."""

    @property
    @abc.abstractmethod
    def lengths(self) -> torch.Tensor:
        """Return the length of each sequence, (B,) int64."""

    @abc.abstractmethod
    def step(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Step:
        """Reserve room for the columns of ``ids``, or for fewer new tokens; see :meth:`Step.of`."""

    @abc.abstractmethod
    def reorder(self, rows: torch.Tensor, cross: bool = True) -> None:
        """Replace row b of the batch by the former row ``rows[b]`` (int64), for beam search.

        Args:
            cross: also reorder cross-attention's keys. False skips that copy when rows move only
                among the beams of one source.
        """

    @abc.abstractmethod
    def crop(self, length: int | torch.Tensor) -> None:
        """Drop the positions from ``length`` on; (B,) sets a length for each sequence."""

    @abc.abstractmethod
    def reserve(self, tokens: int) -> Reserved:
        """Reserve room for ``tokens`` more tokens of each sequence, for :class:`FixedSteps`.

        Raises:
            ValueError: the cache is empty or has too little room.
        """

    @abc.abstractmethod
    def free(self) -> None:
        """End all sequences and retain their memory for new ones."""

    @abc.abstractmethod
    def snapshot(self) -> Any:
        """Return the input of :meth:`restore`: lengths, pages and cross-attention keys."""

    @abc.abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Undo every step, crop, open, fork and close since the snapshot, even after an exception.

        A :meth:`reorder` of a cache with one buffer per sequence moves its contents and cannot be
        undone.
        """

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Restore the cache if the block raises, also on KeyboardInterrupt."""
        snapshot = self.snapshot()
        try:
            yield
        except BaseException:
            self.restore(snapshot)
            raise


def new_tokens(
    who: str, held: torch.Tensor, columns: int, lengths: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return new (B,), total (B,) and positions (B, columns) of a step.

    Args:
        held: (B,), current lengths.
        lengths: (B,), lengths after the step; None: all columns are new tokens.

    Raises:
        ValueError: a length is out of range, on the CPU. On a GPU it is clamped, to avoid a
            synchronization.
    """
    total = held + columns if lengths is None else lengths.to(torch.int64)
    new = total - held
    if lengths is not None and new.device.type == "cpu":
        for b in ((new < 0) | (new > columns)).nonzero()[:1, 0].tolist():
            raise ValueError(
                f"{who}: sequence {b} holds {held[b]} tokens and {columns} columns came; expected a"
                f" length from {held[b]} to {held[b] + columns}, cached tokens included, got"
                f" {total[b]}"
            )
    new = new.clamp(0, columns)
    column = torch.arange(columns, device=held.device)
    positions = torch.where(column < new[:, None], held[:, None] + column, -1)
    return new, held + new, positions


def reordered(
    cross: tuple[torch.Tensor, torch.Tensor] | None, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the cross-attention keys and values of these rows."""
    return (
        None if cross is None else (cross[0].index_select(0, rows), cross[1].index_select(0, rows))
    )


def storage(dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the storage dtype of keys and values; None means their input dtype.

    Raises:
        TypeError: the dtype is not float8_e4m3fn, int8 or None.
    """
    if dtype not in (None, *LIMITS):
        raise TypeError(
            "a cache's dtype must be torch.float8_e4m3fn, torch.int8 or None, which keeps keys and"
            f" values as they come, got {dtype}"
        )
    return dtype


def refuse_gradients(who: str, *tensors: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        raise ValueError(
            f"{who} is for inference: call the model under torch.no_grad() or"
            " torch.inference_mode()"
        )


class LayerCache:
    """One layer's KV buffers of ``max_length`` positions, and its cross-attention keys and values.

    The first :meth:`append` allocates the buffers, (B, Hkv, max_length, D); results are views of
    their filled part. Without a :class:`Step`, each :meth:`append` adds all its positions to every
    sequence. ``dtype`` is float8_e4m3fn or int8, with one scale per key and head, or None for the
    input dtype.
    """

    def __init__(self, max_length: int, dtype: torch.dtype | None = None) -> None:
        self.max_length, self.dtype = max_length, storage(dtype)
        self.length = 0
        self.lengths: torch.Tensor | None = None  # (B,), if sequences differ
        self.stored: KeyValues | None = None
        self.cross: tuple[torch.Tensor, torch.Tensor] | None = None
        self.step: Step | None = None

    @property
    def buffers(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self.stored is None else self.stored[:2]

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        return (
            {}
            if self.stored is None
            else {name: t[:, :, : self.length] for name, t in self.stored.scales.items()}
        )

    def positions(self, columns: int, device: torch.device) -> torch.Tensor:
        return (self.step or Step(self.length, self.length + columns, {})).places(columns, device)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store (B, Hkv, new, D) and return all keys and values so far, as views of the buffers.

        Raises:
            ValueError: more than max_length positions, a batch size or head shape that changed, or
                tensors that require a gradient, because in-place writes are not differentiable.
        """
        refuse_gradients("KeyValueCache", key, value)
        if self.step is None and self.lengths is not None:
            raise ValueError(
                "KeyValueCache: its sequences differ in length; call cache.step before its layers,"
                " as models do"
            )
        step, self.step = self.step or Step(self.length, self.length + key.shape[2], {}), None
        if step.end > self.max_length:
            raise ValueError(
                f"KeyValueCache: {step.end} positions, but it was made for"
                f" max_length={self.max_length}"
            )
        if self.stored is None or (step.start == 0 and self.stored.key.shape[0] != key.shape[0]):
            self.stored = KeyValues.empty(key, value, (key.shape[0], self.max_length), self.dtype)
        for buffer, new, name in zip(self.stored[:2], (key, value), ("key", "value")):
            want = (*buffer.shape[:2], new.shape[2], buffer.shape[3])
            if tuple(new.shape) != want:
                raise ValueError(
                    f"KeyValueCache: {name} must be {want} as before, got {tuple(new.shape)};"
                    " reset() the cache"
                )
            if step.positions is None and self.dtype is None:
                buffer[:, :, step.start : step.end] = new
        positions = step.positions
        if positions is None and self.dtype is not None:
            positions = torch.arange(step.start, step.end, device=key.device).expand(
                key.shape[0], -1
            )
        if positions is not None:
            write(self.stored, key, value, positions)
        self.length, self.lengths = step.end, step.total
        keys, values = self.stored[:2]
        return keys[:, :, : step.end], values[:, :, : step.end]

    def reorder(self, rows: torch.Tensor, cross: bool = True) -> None:
        """Replace row b by the former row ``rows[b]``; the number of rows may change."""
        if cross:
            self.cross = reordered(self.cross, rows)
        if self.lengths is not None:
            self.lengths = self.lengths.index_select(0, rows)
        if self.stored is not None:
            filled = [b[:, :, : self.length].index_select(0, rows) for b in self.stored.numbers]
            if rows.shape[0] != self.stored.key.shape[0]:
                self.stored = KeyValues.empty(
                    self.stored.key,
                    self.stored.value,
                    (rows.shape[0], self.max_length),
                    self.stored.key.dtype,
                )
            for buffer, kept in zip(self.stored.numbers, filled):
                buffer[:, :, : self.length] = kept


class KeyValueCache(DecoderCache):
    """The caches of all layers of a decoder, one buffer of ``max_length`` positions per sequence.

    ``model.make_cache(max_length)`` creates it; pass it as ``past_key_values``, and each call of
    the model appends to it. Memory is allocated once: 2 B Hkv max_length D elements per layer in
    ``dtype``, which is None for the input dtype, or float8_e4m3fn or int8 with one scale per key
    and head. Only the first call computes the keys and values of cross-attention.

    Sequences have one common length or individual lengths. A call whose mask is lengths (B,)
    appends to each sequence after its last token and does not store padding columns. Attention then
    uses lengths, without a mask.
    """

    def __init__(self, num_layers: int, max_length: int, dtype: torch.dtype | None = None) -> None:
        if max_length < 1:
            raise ValueError(f"KeyValueCache: max_length must be at least 1, got {max_length}")
        self.max_length, self.dtype = max_length, storage(dtype)
        self._layers = [LayerCache(max_length, dtype) for _ in range(num_layers)]

    @property
    def layers(self) -> list[LayerCache]:
        return self._layers

    @property
    def length(self) -> int:
        return self.layers[0].length if self.layers else 0

    @property
    def lengths(self) -> torch.Tensor:
        first = self.layers[0] if self.layers else LayerCache(1)
        if first.lengths is not None:
            return first.lengths
        if first.stored is None:
            return torch.zeros(0, dtype=torch.int64)
        return torch.full(
            first.stored.key.shape[:1],
            first.length,
            dtype=torch.int64,
            device=first.stored.key.device,
        )

    def step(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Step:
        (batch, columns), start = ids.shape[:2], self.length
        ragged = bool(self.layers) and self.layers[0].lengths is not None
        if is_lengths(attention_mask, batch):
            step = self._ragged(batch, columns, attention_mask.to(ids.device))
        elif not ragged and is_tree(attention_mask):
            visible, at = tree(attention_mask, batch, columns, start + columns)
            step = Step(start, start + columns, visible, at=at)
        elif not ragged:
            step = Step(
                start,
                start + columns,
                causal(padding(attention_mask, batch, start + columns), start, columns),
            )
        elif attention_mask is None:
            step = self._ragged(batch, columns, None)
        else:
            raise ValueError(
                "KeyValueCache: its sequences differ in length; expected attention_mask as lengths"
                f" ({batch},), cached tokens included, or None, got shape"
                f" {tuple(attention_mask.shape)}"
            )
        for layer in self.layers:
            layer.step = step
        return step

    def _ragged(self, batch: int, columns: int, lengths: torch.Tensor | None) -> Step:
        held = self.lengths
        if self.length == 0 and lengths is not None:
            held = torch.zeros_like(lengths, dtype=torch.int64)
        if held.shape[0] != batch:
            raise ValueError(
                f"KeyValueCache: it holds {held.shape[0]} sequences, got {batch}; reset() the cache"
            )
        new, total, positions = new_tokens("KeyValueCache", held, columns, lengths)
        end = self.length + columns
        # on a GPU the bound suffices, without a synchronization
        if batch and (held.device.type == "cpu" or end > self.max_length):
            end = int(total.max())
        visible: dict[str, Any] = {"causal": "bottom_right", "key_lengths": total}
        if lengths is not None:
            visible["query_lengths"] = new
        return Step(self.length, end, visible, None if lengths is None else new, total, positions)

    def reorder(self, rows: torch.Tensor, cross: bool = True) -> None:
        for layer in self.layers:
            layer.reorder(rows, cross)

    def crop(self, length: int | torch.Tensor) -> None:
        if isinstance(length, torch.Tensor):
            kept = length.to(self.lengths)
            if kept.shape != self.lengths.shape or bool(((kept < 0) | (kept > self.lengths)).any()):
                raise ValueError(
                    f"KeyValueCache.crop: lengths must be from 0 to {self.lengths.tolist()}, got"
                    f" {length.tolist()}"
                )
            end = int(kept.max()) if len(kept) else 0
        else:
            if not 0 <= length <= self.length:
                raise ValueError(
                    f"KeyValueCache.crop: length must be between 0 and {self.length}, got {length}"
                )
            end, kept = length, self.lengths.clamp_max(length)
        ragged = isinstance(length, torch.Tensor) or any(
            layer.lengths is not None for layer in self.layers
        )
        for layer in self.layers:
            layer.length, layer.lengths = end, kept if ragged else None

    def reserve(self, tokens: int) -> Reserved:
        if not self.layers or any(layer.stored is None for layer in self.layers):
            raise ValueError("KeyValueCache: run a prompt first, which allocates its buffers")
        lengths, longest = self.lengths, self.length
        if longest + tokens > self.max_length:  # on a GPU the length is an upper bound
            longest = int(lengths.max())
        if longest + tokens > self.max_length:
            raise ValueError(
                f"KeyValueCache: {longest + tokens} positions, but it was made for"
                f" max_length={self.max_length}"
            )
        layers = [(layer.stored, layer.cross) for layer in self.layers if layer.stored is not None]

        ragged, device = self.layers[0].lengths is not None, lengths.device

        def done(lengths: list[int]) -> None:
            each = torch.tensor(lengths, device=device) if ragged or len(set(lengths)) > 1 else None
            for layer in self.layers:
                layer.length, layer.lengths = max(lengths, default=0), each

        return Reserved(layers, lengths, longest + tokens, done)

    def free(self) -> None:
        for layer in self.layers:
            layer.length, layer.lengths, layer.cross, layer.step = 0, None, None, None

    def snapshot(self) -> Any:
        return [(layer.length, layer.lengths, layer.cross) for layer in self.layers]

    def restore(self, snapshot: Any) -> None:
        for layer, (length, lengths, cross) in zip(self.layers, snapshot):
            layer.length, layer.lengths, layer.cross, layer.step = length, lengths, cross, None

    def reset(self) -> None:
        """Drop all contents and buffers."""
        self._layers = [LayerCache(self.max_length, self.dtype) for _ in self.layers]
