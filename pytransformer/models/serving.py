# SPDX-License-Identifier: Apache-2.0
"""Many prompts continued together, which join and leave between the steps: continuous batching over a paged cache.

Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models" (2022), section 3.1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..nn.paged_cache import PagedCache
from .generation import Decoding, choose, most_positions


class Finished(NamedTuple):
    """A request's new tokens, without prompt and stop token, and their log-probability, the stop token's included."""

    request: int
    tokens: list[int]
    score: float


@dataclass
class _Request:
    number: int
    prompt: list[int]
    how: Decoding
    generator: torch.Generator | None
    sequence: int = -1
    read: int = 0  # of prompt and new tokens, how many the cache holds
    new: list[int] = field(default_factory=list)
    score: float = 0.0

    @property
    def longest(self) -> int:
        """Positions that it will hold at most: the last token is not read."""
        return len(self.prompt) + self.how.max_new_tokens - 1

    @property
    def unread(self) -> list[int]:
        return self.prompt[self.read :] if self.read < len(self.prompt) else self.new[self.read - len(self.prompt) :]


class Batcher:
    """Requests to a decoder model, each with its own :class:`Decoding`; its tokens are those of :func:`generate` alone.

    A request waits until a slot is free and there are pages for all that it may become, so none is ever interrupted. Prompts are read in
    pieces, between which the others go on; those that begin like an earlier one share its full pages, if ``share``.

        batcher = Batcher(model, model.make_paged_cache(num_pages=4096), slots=32)
        number = batcher.submit(prompt, max_new_tokens=40, stop=(3,))
        while batcher.busy:
            for finished in batcher.step():
                ...

    Args:
        model: that continues prompts, in eval mode while :meth:`step` runs.
        cache: of the model; the batcher's alone.
        slots: requests at a time.
        piece: tokens of a prompt that one step reads at most.
    """

    def __init__(self, model: Any, cache: PagedCache, *, slots: int = 16, piece: int = 256, share: bool = True) -> None:
        if hasattr(model, "encode"):
            raise ValueError(
                f"Batcher: {type(model).__name__} answers sources; wanted a model that continues prompts; use generate"
            )
        for name, value in (("slots", slots), ("piece", piece)):
            if value < 1:
                raise ValueError(f"Batcher: {name} must be at least 1, got {value}")
        self.model, self.cache, self.slots, self.piece, self.share = model, cache, slots, piece, share
        self._device = next(model.parameters()).device
        self._waiting: deque[_Request] = deque()
        self._active: list[_Request] = []
        self._count = 0

    @property
    def busy(self) -> bool:
        """Whether a request has not finished."""
        return bool(self._waiting or self._active)

    def submit(
        self,
        prompt: Sequence[int],
        decoding: Decoding | None = None,
        *,
        generator: torch.Generator | None = None,
        **settings: Any,
    ) -> int:
        """A request's number, at once.

        Args:
            prompt: token ids, at least one.
            decoding: how; or its fields as keywords.
            generator: for sample=True, the request's own.

        Raises:
            ValueError: beams, no tokens, or more of them than the model has positions or the cache pages.
        """
        if decoding is not None and settings:
            raise ValueError(f"Batcher.submit: wanted decoding or its fields, got both: {', '.join(settings)}")
        request = _Request(self._count, [int(token) for token in prompt], decoding or Decoding(**settings), generator)
        if not request.prompt:
            raise ValueError("Batcher.submit: the prompt has no tokens; wanted at least one")
        if request.how.beams > 1 or not request.how.use_cache:
            raise ValueError("Batcher.submit: wanted beams=1 and use_cache=True; generate does the others")
        pages, positions = self.cache.pages, most_positions(self.model)
        if positions is not None and request.longest > positions:
            raise ValueError(f"Batcher.submit: {request.longest} positions, and the model has {positions}")
        if pages.pages_for(request.longest) > pages.num_pages:
            raise ValueError(
                f"Batcher.submit: {request.longest} positions need {pages.pages_for(request.longest)} pages of {pages.page_size}, and the "
                f"cache has {pages.num_pages}"
            )
        self._count += 1
        self._waiting.append(request)
        return request.number

    @torch.no_grad()
    def step(self) -> list[Finished]:
        """Lets requests join, reads a piece of each new prompt and one token of each other request; returns those that have ended."""
        self._admit()
        training = self.model.training
        self.model.eval()
        try:
            prompts = [request for request in self._active if not request.new]
            others = [request for request in self._active if request.new]
            return [end for requests in (prompts, others) if requests for end in self._read(requests)]
        finally:
            self.model.train(training)

    def _admit(self) -> None:
        pages = self.cache.pages
        promised = sum(pages.pages_for(request.longest) for request in self._active)
        while self._waiting and len(self._active) < self.slots:
            request = self._waiting[0]
            promised += pages.pages_for(request.longest)
            if promised > pages.num_pages:
                break
            self._active.append(self._waiting.popleft())
            request.sequence = self.cache.open(request.prompt if self.share else ())
            request.read = pages.lengths[request.sequence]

    def _read(self, requests: list[_Request]) -> list[Finished]:
        """One call of the model, and the next token of each request that has been read to its end."""
        pieces = [request.unread[: self.piece] for request in requests]
        longest = max(map(len, pieces))
        ids = torch.tensor([piece + [0] * (longest - len(piece)) for piece in pieces], device=self._device)
        self.cache.select([request.sequence for request in requests])
        for request, piece in zip(requests, pieces):
            request.read += len(piece)
        ragged = any(len(piece) < longest for piece in pieces)
        more = (
            {"attention_mask": torch.tensor([request.read for request in requests])} if ragged else {}
        )  # the cache reads it here
        out = self.model(ids, **more, past_key_values=self.cache, logits_to_keep=1)
        if all(request.unread for request in requests):
            return []
        probabilities = out.logits[:, -1].float().log_softmax(-1)
        ended = [self._next(request, row) for request, row in zip(requests, probabilities) if not request.unread]
        return [end for end in ended if end is not None]

    def _next(self, request: _Request, probabilities: torch.Tensor) -> Finished | None:
        how = request.how
        token = int(choose(probabilities[None], how, request.generator))
        request.score += float(probabilities[token])
        if self.share and not request.new:
            self.cache.know(request.sequence, request.prompt)
        if token not in how.stop:
            request.new.append(token)
            if len(request.new) < how.max_new_tokens:
                return None
        if self.share:
            self.cache.know(request.sequence, (request.prompt + request.new)[: request.read])
        self.cache.close(request.sequence)
        self._active.remove(request)
        return Finished(request.number, request.new, request.score)
