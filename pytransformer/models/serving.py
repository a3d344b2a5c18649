# SPDX-License-Identifier: Apache-2.0
"""Continuous batching over a paged cache: requests join and leave between steps.

Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models"
(2022), section 3.1.
"""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..nn.paged_cache import PagedCache
from .generation import Decoding, choose, evaluation, most_positions

# Raised while sampling for a request, but not its fault.
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


class Finished(NamedTuple):
    """The result of a request.

    Attributes:
        request: its number.
        tokens: the new tokens, without prompt and stop token.
        score: their log-probability, including the stop token's.
        error: the exception that ended the request, CancelledError after :meth:`Batcher.cancel`;
            None: it completed.
    """

    request: int
    tokens: list[int]
    score: float
    error: Exception | None = None


@dataclass(eq=False)
class _Request:
    prompt: list[int]
    how: Decoding
    generator: torch.Generator | None
    number: int = -1
    sequence: int | None = None  # None: queued
    read: int = 0  # tokens of the prompt and new tokens in the cache
    new: list[int] = field(default_factory=list)
    score: float = 0.0
    result: Finished | None = None

    @property
    def max_positions(self) -> int:
        """Return the maximum number of cached positions; the last token is not read."""
        return len(self.prompt) + self.how.max_new_tokens - 1

    @property
    def unread(self) -> list[int]:
        return (
            self.prompt[self.read :]
            if self.read < len(self.prompt)
            else self.new[self.read - len(self.prompt) :]
        )

    def snapshot(self) -> Any:
        draws = (
            self.generator.get_state() if self.generator is not None and self.how.sample else None
        )
        return self.sequence, self.read, len(self.new), self.score, self.result, draws

    def restore(self, snapshot: Any) -> None:
        self.sequence, self.read, count, self.score, self.result, draws = snapshot
        del self.new[count:]
        if self.generator is not None and draws is not None:
            self.generator.set_state(draws)


class Batcher:
    """Continuous batching of requests to a decoder model, each with its :class:`Decoding`.

    Each request's tokens equal those of a separate :func:`generate`. A request waits until a slot
    is free and the pages suffice for its maximum length, so no request is preempted. A step reads
    one piece of each prompt. With ``share``, prompts with a common prefix share its full pages.

        batcher = Batcher(model, model.make_paged_cache(num_pages=4096), slots=32)
        number = batcher.submit(prompt, max_new_tokens=40, stop=(3,))
        while batcher.busy:
            for finished in batcher.step():
                ...

    One thread calls :meth:`step`; any thread may call :meth:`submit` and :meth:`cancel`.

    Args:
        model: a decoder model; :meth:`step` runs it in eval mode.
        cache: a cache of the model without other users.
        slots: maximum number of concurrent requests.
        piece: maximum number of prompt tokens per request and step.
    """

    def __init__(
        self,
        model: Any,
        cache: PagedCache,
        *,
        slots: int = 16,
        piece: int = 256,
        share: bool = True,
    ) -> None:
        if hasattr(model, "encode"):
            raise ValueError(
                f"Batcher: {type(model).__name__} answers sources; expected a model that continues"
                " prompts; use generate"
            )
        for name, value in (("slots", slots), ("piece", piece)):
            if value < 1:
                raise ValueError(f"Batcher: {name} must be at least 1, got {value}")
        self.model, self.cache, self.slots, self.piece, self.share = (
            model,
            cache,
            slots,
            piece,
            share,
        )
        self._device = next(model.parameters()).device
        self._lock = threading.Lock()  # guards the three fields below
        self._waiting: deque[_Request] = deque()
        self._cancelled: set[int] = set()
        self._count = 0
        # Requests with a sequence or an unreturned result; replaced, never modified.
        self._active: list[_Request] = []

    @property
    def busy(self) -> bool:
        """Return True if a step has work to do or results to return."""
        return bool(self._waiting or self._active)

    def submit(
        self,
        prompt: Sequence[int],
        decoding: Decoding | None = None,
        *,
        generator: torch.Generator | None = None,
        **settings: Any,
    ) -> int:
        """Queue a request and return its number.

        Args:
            prompt: token ids, at least one; a list or a one-dimensional tensor.
            decoding: a :class:`Decoding`; or its fields as keywords.
            generator: for sample=True, used by this request only.

        Raises:
            TypeError: ids that are not integers, or a generator of another type.
            ValueError: no ids, ids outside the vocabulary, beams, or more tokens than the model has
                positions or the cache has pages.
        """
        if decoding is not None and settings:
            raise ValueError(
                f"Batcher.submit: expected decoding or its fields, got both: {', '.join(settings)}"
            )
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(
                f"Batcher.submit: generator must be a torch.Generator or None, got {generator!r}"
            )
        request = _Request(self._ids(prompt), decoding or Decoding(**settings), generator)
        if request.how.beams > 1 or not request.how.use_cache:
            raise ValueError(
                "Batcher.submit: expected beams=1 and use_cache=True; generate does the others"
            )
        pages, positions, longest = (
            self.cache.pages,
            most_positions(self.model),
            request.max_positions,
        )
        if positions is not None and longest > positions:
            raise ValueError(f"Batcher.submit: {longest} positions, and the model has {positions}")
        if pages.pages_for(longest) > pages.num_pages:
            raise ValueError(
                f"Batcher.submit: {longest} positions need {pages.pages_for(longest)} pages of"
                f" {pages.page_size}, and the cache has {pages.num_pages}"
            )
        with self._lock:
            request.number = self._count
            self._count += 1
            self._waiting.append(request)
        return request.number

    def _ids(self, prompt: Iterable[Any]) -> list[int]:
        """Return the prompt's ids; a wrong id in a step would fail the full batch."""
        if isinstance(prompt, torch.Tensor):
            if prompt.dim() != 1 or prompt.is_floating_point():
                raise TypeError(
                    f"Batcher.submit: prompt must be integers of one dimension, got {prompt.dtype}"
                    f" of shape {tuple(prompt.shape)}"
                )
            prompt = prompt.tolist()
        try:
            ids = [operator.index(token) for token in prompt]
        except TypeError as error:
            raise TypeError(
                f"Batcher.submit: prompt must be token ids, one integer each; {error}"
            ) from None
        if not ids:
            raise ValueError("Batcher.submit: the prompt has no tokens; expected at least one")
        size = getattr(getattr(self.model, "config", None), "vocab_size", None)
        for token in (min(ids), max(ids)):
            if token < 0 or (size is not None and token >= size):
                end = "" if size is None else f" to {size - 1}, the end of the vocabulary"
                raise ValueError(
                    f"Batcher.submit: token ids must be from 0{end}, got {token}; use the model's"
                    " tokenizer"
                )
        return ids

    def cancel(self, number: int) -> bool:
        """End a request; the next step returns it with its tokens so far.

        A step that is running may complete it first. Returns False if the request has ended or does
        not exist.
        """
        with self._lock:
            running = any(
                r.number == number and r.result is None for r in (*self._waiting, *self._active)
            )
            if running:
                self._cancelled.add(number)
        return running

    def step(self) -> list[Finished]:
        """Admit requests, read a piece of each new prompt, and decode one token of each other.

        Returns the requests that ended. An error of one request ends it and is part of its result.
        Any other exception, such as out of memory or KeyboardInterrupt, leaves each request
        unchanged, or after the first of the step's two model calls. The next step continues from
        there and also returns the requests that ended in this one.
        """
        with evaluation(self.model), torch.no_grad():
            self._cancel()
            self._admit()
            running = self._running()
            prompts = [request for request in running if not request.new]
            others = [request for request in running if request.new]
            for requests in (prompts, others):
                if requests:
                    self._read(requests)
        finished = [request.result for request in self._active if request.result is not None]
        self._active = self._running()
        return finished

    def _running(self) -> list[_Request]:
        return [request for request in self._active if request.result is None]

    @contextmanager
    def _transaction(self, requests: Sequence[_Request]) -> Iterator[None]:
        """Restore the requests and the cache if the block raises.

        One ``try`` covers both, so they agree after any interrupt.
        """
        active, snapshots, cached = (
            self._active,
            [request.snapshot() for request in requests],
            self.cache.snapshot(),
        )
        try:
            yield
        except BaseException:
            self._active = active
            self.cache.restore(cached)
            for request, snapshot in zip(requests, snapshots):
                request.restore(snapshot)
            raise

    def _cancel(self) -> None:
        if not self._cancelled:
            return
        with self._lock:
            numbers = set(self._cancelled)
            requests = [
                r
                for r in (*self._active, *self._waiting)
                if r.number in numbers and r.result is None
            ]
        with self._transaction(requests):
            for request in requests:
                if request.sequence is None:
                    request.sequence = self.cache.open()  # leave the queue as admitted requests do
                    self._active = [*self._active, request]
                self._end(request, CancelledError("cancelled"))
        with self._lock:
            self._cancelled -= numbers

    def _admit(self) -> None:
        pages, running = self.cache.pages, self._running()
        free, promised = (
            self.slots - len(running),
            sum(pages.pages_for(request.max_positions) for request in running),
        )
        while self._waiting:
            request = self._waiting[0]
            if request.sequence is None:  # otherwise already admitted or cancelled
                promised += pages.pages_for(request.max_positions)
                if not free or promised > pages.num_pages:
                    break
                with self._transaction([request]):
                    request.sequence = self.cache.open(request.prompt if self.share else ())
                    request.read = pages.lengths[request.sequence]
                    self._active = [*self._active, request]
                free -= 1
            with self._lock:
                self._waiting.popleft()

    def _read(self, requests: list[_Request]) -> None:
        """Call the model once, and choose the next token of each request whose prompt is read."""
        with self._transaction(requests):
            pieces = [request.unread[: self.piece] for request in requests]
            longest = max(map(len, pieces))
            ids = torch.tensor(
                [piece + [0] * (longest - len(piece)) for piece in pieces], device=self._device
            )
            self.cache.select(
                [request.sequence for request in requests if request.sequence is not None]
            )
            for request, piece in zip(requests, pieces):
                request.read += len(piece)
            more = {}
            # A CPU tensor, because the cache reads it there.
            if any(len(piece) < longest for piece in pieces):
                more["attention_mask"] = torch.tensor([request.read for request in requests])
            out = self.model(ids, **more, past_key_values=self.cache, logits_to_keep=1)
            if all(request.unread for request in requests):
                return
            probabilities = out.logits[:, -1].float().log_softmax(-1)
            for request, row in zip(requests, probabilities):
                if not request.unread:
                    self._next(request, row)

    def _next(self, request: _Request, probabilities: torch.Tensor) -> None:
        how = request.how
        try:
            token = int(choose(probabilities[None], how, request.generator))
            score, stops = float(probabilities[token]), token in how.stop
        except OUT_OF_MEMORY:
            raise
        except Exception as error:
            self._end(request, error)
            return
        if self.share and not request.new:
            self._know(request, request.prompt)
        request.score += score
        if not stops:
            request.new.append(token)
        if stops or len(request.new) >= how.max_new_tokens:
            if self.share:
                self._know(request, (request.prompt + request.new)[: request.read])
            self._end(request)

    def _know(self, request: _Request, tokens: list[int]) -> None:
        assert request.sequence is not None
        self.cache.know(request.sequence, tokens)

    def _end(self, request: _Request, error: Exception | None = None) -> None:
        assert request.sequence is not None
        self.cache.close(request.sequence)
        request.result = Finished(request.number, list(request.new), request.score, error)
