# SPDX-License-Identifier: Apache-2.0
"""Text generation for decoders and encoder-decoders: greedy, sampling and beam search.

The KV cache is allocated once, and cross-attention's keys and values are computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..nn.cache import DecoderCache
from ..nn.masks import check_not_additive, is_lengths
from ..nn.positions import Positions

PAGE_SIZE = 64  # of a paged cache that generate creates


@dataclass(frozen=True)
class Decoding:
    """Options of token selection.

    Attributes:
        max_new_tokens: maximum number of new tokens.
        stop: token ids that end a sequence; the result excludes them.
        pad_token_id: fills shorter results.
        beams: hypotheses per sequence; 1: greedy or sampling.
        length_penalty: alpha of beam search; the score is log p / ((5 + length) / 6)^alpha (Wu et
            al. 2016, section 7; 0.6 in Vaswani et al. 2017).
        sample: sample from the distribution instead of taking its maximum.
        temperature: divisor of the logits before sampling.
        top_k: sample from the k most likely tokens only.
        top_p: sample from the most likely tokens that together reach this probability (Holtzman et
            al. 2020).
        use_cache: use a KV cache; False recomputes the full sequence for each token, with the same
            result.
    """

    max_new_tokens: int = 64
    stop: tuple[int, ...] = ()
    pad_token_id: int = 0
    beams: int = 1
    length_penalty: float = 0.6
    sample: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    use_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "beams"):
            if getattr(self, name) < 1:
                raise ValueError(f"Decoding: {name} must be at least 1, got {getattr(self, name)}")
        if not self.temperature > 0:
            raise ValueError(
                f"Decoding: temperature must be above 0, got {self.temperature}; for the maximum"
                " leave sample=False"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"Decoding: top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"Decoding: top_p must be above 0 and at most 1, got {self.top_p}")
        if self.sample and self.beams > 1:
            raise ValueError(
                "Decoding: beam search does not draw; expected sample=False or beams=1, got"
                f" beams={self.beams}"
            )
        if not self.sample and (
            self.top_k is not None or self.top_p is not None or self.temperature != 1.0
        ):
            raise ValueError(
                "Decoding: temperature, top_k and top_p are for drawing; expected sample=True"
            )


@dataclass(frozen=True)
class Generated:
    """The new tokens only, without prompt, start and stop tokens.

    Attributes:
        tokens: (B, longest) int64, padded with the pad token.
        lengths: (B,) int64.
        scores: (B,) float32, log-probabilities including the stop token; for beam search, penalized
            by length.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    scores: torch.Tensor

    def lists(self) -> list[list[int]]:
        return [row[:length] for row, length in zip(self.tokens.tolist(), self.lengths.tolist())]


@torch.no_grad()
def generate(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    decoding: Decoding | None = None,
    prefix_lengths: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
    cache: str | DecoderCache = "contiguous",
    **settings: Any,
) -> Generated:
    """Continue prompts (decoder models), or decode answers to sources (models with an encoder).

    Args:
        model: a model of :mod:`pytransformer.models`.
        input_ids: (B, L) int64: prompts, padded on any side, or sources, padded at the end.
        attention_mask: (B, L), 0 = padding; or lengths (B,). Padding does not affect a prompt's
            positions.
        decoding: the options, or their fields as keywords: ``generate(model, ids, beams=4,
            stop=(3,))``.
        prefix_lengths: (B,), of a prefix-LM; tokens of the prefix see each other.
        generator: for sample=True.
        cache: ``"contiguous"``, ``"paged"``, or an empty cache of the model, whose memory is
            reused; it is empty afterwards. If the call raises, the cache is unchanged.

    Raises:
        ValueError: inconsistent settings, an empty prompt, more tokens than the model has
            positions, or a cache that is not empty.
    """
    how = decoding or Decoding(**settings)
    if decoding is not None and settings:
        raise ValueError(
            f"generate: expected decoding or its fields, got both: {', '.join(settings)}"
        )
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(
            f"generate: input_ids must be (B, L) with L > 0, got shape {tuple(input_ids.shape)}"
        )
    if isinstance(cache, DecoderCache) and cache.length:
        raise ValueError(
            f"generate: the cache holds {cache.length} positions; free() it, or give another"
        )
    given = cache if isinstance(cache, DecoderCache) else None
    with evaluation(model), nullcontext() if given is None else given.transaction():
        reader = _Reader(model, input_ids, attention_mask, how, prefix_lengths, cache)
        generated = (
            _beam_search(reader, how) if how.beams > 1 else _one_by_one(reader, how, generator)
        )
        if given is not None:
            given.free()
    return generated


@contextmanager
def evaluation(model: torch.nn.Module) -> Iterator[None]:
    """Run the block in eval mode and restore each submodule's mode; parts may be frozen."""
    training = [module for module in model.modules() if module.training]
    try:
        if training:
            model.eval()
        yield
    finally:
        for module in training:
            module.training = True


def compact(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    prefix_lengths: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return (ids, lengths, prefix lengths) of prompts with all padding moved to the end.

    Lengths are None without padding.

    Raises:
        ValueError: a mask of another shape, or an empty prompt.
    """
    batch, length = input_ids.shape
    if attention_mask is None:
        return input_ids, None, prefix_lengths
    check_not_additive(attention_mask)
    column = torch.arange(length, device=input_ids.device)
    mask = (
        column < attention_mask[:, None]
        if is_lengths(attention_mask, batch)
        else attention_mask.bool()
    )
    if mask.shape != input_ids.shape:
        raise ValueError(
            f"generate: attention_mask must be ({batch}, {length}) or lengths ({batch},), got"
            f" {attention_mask.dtype} of shape {tuple(attention_mask.shape)}"
        )
    lengths = mask.sum(1)
    for b in (lengths == 0).nonzero()[:1, 0].tolist():
        raise ValueError(f"generate: prompt {b} has no tokens; expected at least one")
    if bool(mask.all()):
        return input_ids, None, prefix_lengths
    order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)[
        :, : int(lengths.max())
    ]
    if prefix_lengths is not None:
        prefix_lengths = (mask & (column < prefix_lengths[:, None])).sum(1)
    return input_ids.gather(1, order), lengths, prefix_lengths


def most_positions(model: Any) -> int | None:
    """Return the maximum sequence length of the model's position tables; None: unlimited."""
    return min(
        (module.weight.shape[0] for module in model.modules() if isinstance(module, Positions)),
        default=None,
    )


class _Reader:
    """A model's next-token log-probabilities, with cache, encoder, lengths and positions hidden.

    Attributes:
        prompts: (rows, length), padded at the end; start tokens for a model with an encoder.
        lengths: (rows,), lengths of the prompts; None: no padding.
        new: (rows, tokens), the tokens chosen so far.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        how: Decoding,
        prefix_lengths: torch.Tensor | None,
        cache: str | DecoderCache,
    ) -> None:
        self.model, self.constant = model, {}
        self.lengths: torch.Tensor | None = None
        if hasattr(model, "encode"):
            self.constant["encoder_outputs"] = model.encode(input_ids, attention_mask)
            if attention_mask is not None:
                self.constant["attention_mask"] = attention_mask
            self.prompts = input_ids.new_full((len(input_ids), 1), model.config.start_token_id)
        else:
            self.prompts, self.lengths, prefix_lengths = compact(
                input_ids, attention_mask, prefix_lengths
            )
        self.prefix = {} if prefix_lengths is None else {"prefix_lengths": prefix_lengths}
        self.new = self.prompts[:, :0]
        prompt = self.prompts.shape[1]
        total = prompt + how.max_new_tokens - 1  # the last token is not read
        positions = most_positions(model)
        if positions is not None and total > positions:
            raise ValueError(
                f"generate: {prompt} tokens and {how.max_new_tokens} new ones are more than the"
                f" model's {positions} positions"
            )
        self.cache = (
            _cache_of(model, cache, len(self.prompts) * how.beams, total) if how.use_cache else None
        )

    def log_probabilities(self) -> torch.Tensor:
        """Return (rows, vocabulary) float32 log-probabilities of the next token."""
        known = self.constant
        if self.cache is not None and self.new.shape[1]:
            read = self.new[:, -1:]
        else:
            read, lengths = self._whole()
            known = known | self.prefix | ({} if lengths is None else {"attention_mask": lengths})
        name = "decoder_input_ids" if "encoder_outputs" in known else "input_ids"
        out = self.model(**{name: read}, **known, past_key_values=self.cache, logits_to_keep=1)
        return out.logits[:, -1].float().log_softmax(-1)

    def _whole(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return prompts and new tokens, (rows, length), padded at the end, and their lengths."""
        ids = torch.cat([self.prompts, self.new], 1)
        if self.lengths is None:
            return ids, None
        places = self.lengths[:, None] + torch.arange(self.new.shape[1], device=ids.device)
        return ids.scatter(1, places, self.new), self.lengths + self.new.shape[1]

    def append(self, tokens: torch.Tensor) -> None:
        """Append one token to each row, (rows,)."""
        self.new = torch.cat([self.new, tokens[:, None]], 1)

    def choose(self, rows: torch.Tensor, copies: bool = False) -> None:
        """Replace row r by the former row rows[r].

        Args:
            copies: the number of rows grows, so per-source tensors are copied too.
        """
        self.new = self.new[rows]
        if copies:
            self.prompts = self.prompts[rows]
            self.lengths = None if self.lengths is None else self.lengths[rows]
            self.constant, self.prefix = (
                {name: v[rows] for name, v in what.items()} for what in (self.constant, self.prefix)
            )
        if self.cache is not None:
            self.cache.reorder(rows, cross=copies)


def _cache_of(model: Any, cache: str | DecoderCache, rows: int, total: int) -> DecoderCache:
    """Return the given cache, or create one for ``rows`` sequences of ``total`` positions."""
    if isinstance(cache, DecoderCache):
        return cache
    if cache not in ("contiguous", "paged"):
        raise ValueError(
            f"generate: cache must be 'contiguous', 'paged' or a cache of the model, got {cache!r}"
        )
    if cache == "contiguous":
        made: DecoderCache = model.make_cache(total)
    else:
        made = model.make_paged_cache(max(1, rows * -(-total // PAGE_SIZE)), PAGE_SIZE)
    return made


def _one_by_one(reader: _Reader, how: Decoding, generator: torch.Generator | None) -> Generated:
    """Decode greedily or by sampling, one hypothesis per sequence."""
    rows, device = len(reader.prompts), reader.prompts.device
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    lengths, scores = (
        torch.zeros_like(done, dtype=torch.int64),
        torch.zeros_like(done, dtype=torch.float32),
    )
    stop = torch.tensor(how.stop, dtype=torch.int64, device=device)
    for _ in range(how.max_new_tokens):
        probabilities = reader.log_probabilities()
        token = choose(probabilities, how, generator)
        scores += torch.where(done, 0.0, probabilities.gather(1, token[:, None])[:, 0])
        done = done | torch.isin(token, stop)
        lengths += ~done
        reader.append(torch.where(done, how.pad_token_id, token))
        if bool(done.all()):
            break
    longest = int(lengths.max()) if rows else 0
    return Generated(reader.new[:, :longest], lengths, scores)


def choose(
    probabilities: torch.Tensor, how: Decoding, generator: torch.Generator | None
) -> torch.Tensor:
    """Return (rows,), the argmax of log-probabilities (rows, vocabulary), or a sample."""
    if not how.sample:
        return probabilities.argmax(-1)
    drawn = filtered(probabilities / how.temperature, how.top_k, how.top_p).softmax(-1)
    return torch.multinomial(drawn, 1, generator=generator)[:, 0]


def filtered(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """Return logits (…, vocabulary) with -inf outside top-k and top-p; the maximum stays."""
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, -1).values[..., -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, where = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        out = (before >= top_p).scatter(-1, where, before >= top_p)
        logits = logits.masked_fill(out, -torch.inf)
    return logits


def _penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


class _Finished:
    """The best finished hypotheses of one sequence, (score, tokens), at most `keep`."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.hypotheses: list[tuple[float, list[int]]] = []

    def add(self, score: float, tokens: Sequence[int]) -> None:
        self.hypotheses = sorted([*self.hypotheses, (score, list(tokens))], key=lambda h: -h[0])[
            : self.keep
        ]

    def complete(self, best_possible: float) -> bool:
        """Return whether no unfinished hypothesis can enter."""
        return len(self.hypotheses) == self.keep and self.hypotheses[-1][0] >= best_possible


def _beam_search(reader: _Reader, how: Decoding) -> Generated:
    """Extend the `beams` most likely hypotheses until none can beat the finished ones."""
    beams, alpha = how.beams, how.length_penalty
    batch, device = len(reader.prompts), reader.prompts.device
    finished = [_Finished(beams) for _ in range(batch)]
    stop = torch.tensor(how.stop, dtype=torch.int64, device=device)
    first = beams * torch.arange(batch, device=device)[:, None]  # first row of each sequence
    scores = torch.zeros(batch, 1, device=device)
    for length in range(1, how.max_new_tokens + 1):
        probabilities = reader.log_probabilities()
        vocabulary, alive = probabilities.shape[-1], scores.shape[1]
        total = (scores[..., None] + probabilities.view(batch, alive, vocabulary)).view(batch, -1)
        # Among these candidates at least `beams` are not stop tokens.
        best, where = total.topk(min(beams * (1 + len(how.stop)), total.shape[1]), -1)
        parent, token = where // vocabulary, where % vocabulary
        ends = torch.isin(token, stop)
        for b, rank in ends[:, :beams].nonzero().tolist():
            row = b * alive + int(parent[b, rank])
            score = best[b, rank].item() / _penalty(length, alpha)
            if score > -torch.inf:
                finished[b].add(score, reader.new[row].tolist())
        order = torch.where(ends, -torch.inf, best).topk(min(beams, best.shape[1]), -1)
        scores, kept = order.values, order.indices
        if scores.shape[1] < beams:  # the first step, if the vocabulary is smaller than the beams
            lacking = beams - scores.shape[1]
            scores = torch.nn.functional.pad(scores, (0, lacking), value=-torch.inf)
            kept = torch.nn.functional.pad(kept, (0, lacking))
        source = first // beams * alive + parent.gather(1, kept)
        reader.choose(source.flatten(), copies=alive != beams)
        reader.append(token.gather(1, kept).flatten())
        longest = how.max_new_tokens if alpha > 0 else length
        if all(
            f.complete(s.item() / _penalty(longest, alpha)) for f, s in zip(finished, scores[:, 0])
        ):
            break
    else:
        for b in range(batch):
            for rank in range(beams):
                row = reader.new[b * beams + rank].tolist()
                if scores[b, rank] > -torch.inf:
                    finished[b].add(
                        scores[b, rank].item() / _penalty(how.max_new_tokens, alpha), row
                    )
    return _collected([f.hypotheses[0] for f in finished], how.pad_token_id, device)


def _collected(best: list[tuple[float, list[int]]], pad: int, device: torch.device) -> Generated:
    longest = max((len(tokens) for _, tokens in best), default=0)
    rows = [tokens + [pad] * (longest - len(tokens)) for _, tokens in best]
    return Generated(
        torch.tensor(rows, dtype=torch.int64, device=device).view(len(best), longest),
        torch.tensor([len(tokens) for _, tokens in best], dtype=torch.int64, device=device),
        torch.tensor([score for score, _ in best], device=device),
    )
