# SPDX-License-Identifier: Apache-2.0
"""Text from models, token after token: greedy, sampled, or by beam search; the same code for decoders and encoder-decoders.

Keys and values of what was read are kept in a cache that is allocated once; those of cross-attention are computed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..nn.masks import position_ids
from ..nn.positions import Positions


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen.

    Attributes:
        max_new_tokens: where to stop at the latest.
        stop: token ids that end a sequence; they are not part of the result.
        pad_token_id: what fills the shorter results.
        beams: hypotheses kept of each sequence; 1: the best token each time (greedy), or a drawn one.
        length_penalty: alpha of beam search; hypotheses are compared by log p / ((5 + length) / 6)^alpha
            (Wu et al. 2016, section 7; 0.6 in Vaswani et al. 2017).
        sample: draw from the distribution rather than take its maximum.
        temperature: logits are divided by it before drawing.
        top_k: draw from the k likeliest tokens only.
        top_p: draw from the likeliest tokens that together reach this probability (Holtzman et al. 2020).
        use_cache: keep keys and values; False reads the whole sequence again for each token, with the same result.
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
        if self.temperature <= 0:
            raise ValueError(
                f"Decoding: temperature must be above 0, got {self.temperature}; for the maximum leave sample=False"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"Decoding: top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"Decoding: top_p must be above 0 and at most 1, got {self.top_p}")
        if self.sample and self.beams > 1:
            raise ValueError(f"Decoding: beam search does not draw; wanted sample=False or beams=1, got beams={self.beams}")
        if not self.sample and (self.top_k is not None or self.top_p is not None or self.temperature != 1.0):
            raise ValueError("Decoding: temperature, top_k and top_p are for drawing; wanted sample=True")


@dataclass(frozen=True)
class Generated:
    """New tokens only, without prompt, start and stop tokens.

    Attributes:
        tokens: (B, longest) int64, filled up with the pad token.
        lengths: (B,) int64.
        scores: (B,) float32, the log-probability of each, its stop token included; of a beam search as it compares them.
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
    **settings: Any,
) -> Generated:
    """Continues prompts (decoder models), or answers sources (models with an encoder).

    Args:
        model: of :mod:`pytransformer.models`.
        input_ids: (B, L) int64: prompts, padded on the left, or sources, padded at the end.
        attention_mask: (B, L), 0 = padding.
        decoding: how; or its fields as keywords: ``generate(model, ids, beams=4, stop=(3,))``.
        prefix_lengths: (B,), of a prefix-LM: the prompt's tokens before it see each other.
        generator: for sample=True.

    Raises:
        ValueError: settings that make no sense, prompts padded on the right, or more tokens than the model has positions.
    """
    how = decoding or Decoding(**settings)
    if decoding is not None and settings:
        raise ValueError(f"generate: wanted decoding or its fields, got both: {', '.join(settings)}")
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"generate: input_ids must be (B, L) with L > 0, got shape {tuple(input_ids.shape)}")
    training = model.training
    model.eval()
    try:
        reader = _Reader(model, input_ids, attention_mask, how, prefix_lengths)
        return _beam_search(reader, how) if how.beams > 1 else _one_by_one(reader, how, generator)
    finally:
        model.train(training)


class _Reader:
    """A model that is asked for the logits of each next token; it hides cache, encoder, masks and positions.

    Attributes:
        ids: (rows, length) what has been read or is to be read: prompt and new tokens.
        prompt: how many of them are not new.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        how: Decoding,
        prefix_lengths: torch.Tensor | None,
    ) -> None:
        self.model, self.constant = model, {}
        self.mask: torch.Tensor | None = None
        if hasattr(model, "encode"):
            self.constant["encoder_outputs"] = model.encode(input_ids, attention_mask)
            if attention_mask is not None:
                self.constant["attention_mask"] = attention_mask
            input_ids = input_ids.new_full((len(input_ids), 1), model.config.start_token_id)
        elif attention_mask is not None and not bool(attention_mask.bool().all()):
            if not bool(attention_mask[:, -1].bool().all()):
                raise ValueError("generate: prompts must be padded on the left, so that new tokens follow them")
            self.mask = attention_mask.bool()
        if prefix_lengths is not None:
            self.constant["prefix_lengths"] = prefix_lengths
        self.ids, self.prompt = input_ids, input_ids.shape[1]
        total = self.prompt + how.max_new_tokens - 1  # the last token is not read
        positions = [module.weight.shape[0] for module in model.modules() if isinstance(module, Positions)]
        if positions and total > min(positions):
            raise ValueError(
                f"generate: {self.prompt} tokens and {how.max_new_tokens} new ones are more than the model's "
                f"{min(positions)} positions"
            )
        self.cache = model.make_cache(total) if how.use_cache else None

    def log_probabilities(self) -> torch.Tensor:
        """(rows, vocabulary) float32, of the token after `ids`."""
        read = 0 if self.cache is None else self.cache.length
        new, more = self.ids[:, read:], {}
        if self.mask is not None:
            grown = self.ids.shape[1] - self.mask.shape[1]
            self.mask = torch.nn.functional.pad(self.mask, (0, grown), value=True)
            more = {"attention_mask": self.mask, "position_ids": position_ids(self.mask, new.shape[1])}
        name = "decoder_input_ids" if "encoder_outputs" in self.constant else "input_ids"
        known = {k: v for k, v in self.constant.items() if k != "prefix_lengths" or read == 0}
        out = self.model(**{name: new}, **known, **more, past_key_values=self.cache, logits_to_keep=1)
        return out.logits[:, -1].float().log_softmax(-1)

    def append(self, tokens: torch.Tensor) -> None:
        """(rows,): what comes next in each row."""
        self.ids = torch.cat([self.ids, tokens[:, None]], 1)

    def choose(self, rows: torch.Tensor, copies: bool = False) -> None:
        """Row r becomes what was row rows[r]; `copies`: there are more rows than before, of other sources too."""
        self.ids = self.ids[rows]
        if copies:
            self.constant = {name: value[rows] for name, value in self.constant.items()}
            self.mask = None if self.mask is None else self.mask[rows]
        if self.cache is not None:
            self.cache.reorder(rows, cross=copies)


def _one_by_one(reader: _Reader, how: Decoding, generator: torch.Generator | None) -> Generated:
    """Greedy or drawn: one hypothesis each."""
    ids = reader.ids
    rows = ids.shape[0]
    done = torch.zeros(rows, dtype=torch.bool, device=ids.device)
    lengths, scores = torch.zeros_like(done, dtype=torch.int64), torch.zeros_like(done, dtype=torch.float32)
    stop = torch.tensor(how.stop, dtype=torch.int64, device=ids.device)
    for _ in range(how.max_new_tokens):
        probabilities = reader.log_probabilities()
        if how.sample:
            drawn = filtered(probabilities / how.temperature, how.top_k, how.top_p).softmax(-1)
            token = torch.multinomial(drawn, 1, generator=generator)[:, 0]
        else:
            token = probabilities.argmax(-1)
        scores += torch.where(done, 0.0, probabilities.gather(1, token[:, None])[:, 0])
        done = done | torch.isin(token, stop)
        lengths += ~done
        reader.append(torch.where(done, how.pad_token_id, token))
        if bool(done.all()):
            break
    longest = int(lengths.max()) if rows else 0
    return Generated(reader.ids[:, reader.prompt : reader.prompt + longest], lengths, scores)


def filtered(logits: torch.Tensor, top_k: int | None, top_p: float | None) -> torch.Tensor:
    """The logits (…, vocabulary) with -inf for what top-k and then top-p leave out; the likeliest token always stays."""
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
    """The best hypotheses of one sequence that have ended: (score, tokens), at most `keep`."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.hypotheses: list[tuple[float, list[int]]] = []

    def add(self, score: float, tokens: Sequence[int]) -> None:
        self.hypotheses = sorted([*self.hypotheses, (score, list(tokens))], key=lambda h: -h[0])[: self.keep]

    def complete(self, best_possible: float) -> bool:
        """Whether nothing that is still growing can get in."""
        return len(self.hypotheses) == self.keep and self.hypotheses[-1][0] >= best_possible


def _beam_search(reader: _Reader, how: Decoding) -> Generated:
    """Keeps the `beams` likeliest beginnings of each sequence, until no beginning can beat what has ended."""
    ids, beams, alpha = reader.ids, how.beams, how.length_penalty
    batch, device = ids.shape[0], ids.device
    finished = [_Finished(beams) for _ in range(batch)]
    stop = torch.tensor(how.stop, dtype=torch.int64, device=device)
    first = beams * torch.arange(batch, device=device)[:, None]  # of each sequence's rows
    scores = torch.zeros(batch, 1, device=device)
    for length in range(1, how.max_new_tokens + 1):
        probabilities = reader.log_probabilities()
        vocabulary, alive = probabilities.shape[-1], scores.shape[1]
        total = (scores[..., None] + probabilities.view(batch, alive, vocabulary)).view(batch, -1)
        # Of so many candidates at least `beams` do not stop, whatever happens.
        best, where = total.topk(min(beams * (1 + len(how.stop)), total.shape[1]), -1)
        parent, token = where // vocabulary, where % vocabulary
        ends = torch.isin(token, stop)
        for b, rank in ends[:, :beams].nonzero().tolist():
            row = b * alive + int(parent[b, rank])
            score = best[b, rank].item() / _penalty(length, alpha)
            if score > -torch.inf:
                finished[b].add(score, reader.ids[row, reader.prompt :].tolist())
        order = torch.where(ends, -torch.inf, best).topk(min(beams, best.shape[1]), -1)
        scores, kept = order.values, order.indices
        if scores.shape[1] < beams:  # a vocabulary smaller than the beams, in the first step
            lacking = beams - scores.shape[1]
            scores = torch.nn.functional.pad(scores, (0, lacking), value=-torch.inf)
            kept = torch.nn.functional.pad(kept, (0, lacking))
        source = first // beams * alive + parent.gather(1, kept)
        reader.choose(source.flatten(), copies=alive != beams)
        reader.append(token.gather(1, kept).flatten())
        longest = how.max_new_tokens if alpha > 0 else length
        if all(f.complete(s.item() / _penalty(longest, alpha)) for f, s in zip(finished, scores[:, 0])):
            break
    else:
        for b in range(batch):
            for rank in range(beams):
                row = reader.ids[b * beams + rank, reader.prompt :].tolist()
                if scores[b, rank] > -torch.inf:
                    finished[b].add(scores[b, rank].item() / _penalty(how.max_new_tokens, alpha), row)
    return _collected([f.hypotheses[0] for f in finished], how.pad_token_id, device)


def _collected(best: list[tuple[float, list[int]]], pad: int, device: torch.device) -> Generated:
    longest = max((len(tokens) for _, tokens in best), default=0)
    rows = [tokens + [pad] * (longest - len(tokens)) for _, tokens in best]
    return Generated(
        torch.tensor(rows, dtype=torch.int64, device=device).view(len(best), longest),
        torch.tensor([len(tokens) for _, tokens in best], dtype=torch.int64, device=device),
        torch.tensor([score for score, _ in best], device=device),
    )
