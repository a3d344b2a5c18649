# SPDX-License-Identifier: Apache-2.0
"""A translator: an encoder-decoder with two tokenizers; train, save, translate, inspect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..models import Transformer, _files, generate
from ..models.generation import evaluation
from ..nn import taps
from .batching import Batches, pad, translation_collate
from .objective import held_out_loss, of_model
from .schedule import cooled_down, warmup_inverse_square_root
from .text import Pair
from .tokenizer import Tokenizer, check_tokenizer
from .trainer import Recipe, Trainer

_TOKENIZERS = ("source", "target")
_FACTS = "translator.json"


class Alignment(NamedTuple):
    """A translation and the attention of each of its tokens."""

    text: str
    source_tokens: list[str]
    target_tokens: list[str]  # with </s>, whose query predicts the end
    weights: torch.Tensor  # (layers, heads, target tokens, source tokens)


@dataclass
class Translator:
    """A model and its two tokenizers."""

    model: Transformer
    source: Tokenizer
    target: Tokenizer

    def translate(
        self, texts: Sequence[str], *, beams: int = 1, max_new_tokens: int | None = None
    ) -> list[str]:
        """Return translations of up to `max_new_tokens` tokens (None: twice the source plus 20)."""
        return [
            self.target.decode(ids) for ids in self.translate_ids(texts, beams, max_new_tokens)[1]
        ]

    def align(self, text: str, *, beams: int = 1) -> Alignment:
        """Translate one sentence and recompute its cross-attention from the saved lse."""
        (source,), (ids,) = self.translate_ids([text], beams, None)
        device = next(self.model.parameters()).device
        with (
            evaluation(self.model),
            torch.no_grad(),
            taps(self.model, "decoder.*.cross_attention") as seen,
        ):
            read = torch.tensor([[self.target.start_id, *ids]], device=device)
            self.model(torch.tensor([source], device=device), decoder_input_ids=read)
        weights = torch.stack([tap.weights()[0] for tap in seen.values()])
        said = self.target.tokens([*ids, self.target.end_id])
        return Alignment(self.target.decode(ids), self.source.tokens(source), said, weights)

    def translate_ids(
        self, texts: Sequence[str], beams: int, max_tokens: int | None
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens read, with the end, and those generated, without it, of each text."""
        device = next(self.model.parameters()).device
        sources = [[*ids, self.source.end_id] for ids in self.source.encode_all(texts)]
        longest, limit = max(map(len, sources)), self.model.config.max_length
        if longest > limit:
            raise ValueError(
                f"translate: a sentence of {longest} tokens is longer than the model's {limit}"
                " positions"
            )
        max_tokens = min(2 * longest + 20, limit) if max_tokens is None else max_tokens
        ids = pad(sources, self.source.pad_id).to(device)
        mask = ids != self.source.pad_id
        made = generate(
            self.model,
            ids,
            mask,
            beams=beams,
            max_new_tokens=max_tokens,
            stop=(self.target.end_id,),
            pad_token_id=self.target.pad_id,
        )
        return sources, made.lists()

    def save(self, folder: str | Path) -> None:
        """Write model, config and tokenizers."""
        folder = Path(folder)
        self.model.save(folder)
        facts = {}
        for name in _TOKENIZERS:
            tokenizer: Tokenizer = getattr(self, name)
            tokenizer.save(folder / f"{name}.tokenizer.json")
            facts[name] = tokenizer.fingerprint
        _files.write_text(folder / _FACTS, json.dumps({"tokenizers": facts}, indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> Translator:
        """Read the output of `save`.

        Raises:
            FileNotFoundError: the folder has no translator.
            ValueError: a file is damaged, or a tokenizer does not belong to the model.
        """
        folder = Path(folder)
        model = Transformer.load(folder).eval()
        facts = _files.read_json(folder / _FACTS)
        tokenizers = {}
        for name in _TOKENIZERS:
            path = folder / f"{name}.tokenizer.json"
            tokenizers[name] = Tokenizer.load(path)
            embedding = getattr(model, f"{name}_embedding")
            check_tokenizer(
                str(path), tokenizers[name], embedding.num_embeddings, facts["tokenizers"][name]
            )
        return cls(model, **tokenizers)


@dataclass(frozen=True)
class TranslationPlan:
    """The settings of `pytransformer train translate`."""

    preset: str = "notes-small"
    layers: int = 2  # in the encoder and in the decoder
    epochs: int = 0  # logged one by one, replaces steps; 0: unused
    d_model: int = 128
    vocabulary: int = 7000  # max tokens of each language
    batch_size: int = 64
    steps: int = 1500
    warmup: int = 300
    rate: float = 0.7  # factor on the paper's rate
    dropout: float = 0.1
    seed: int = 0


def new_translator(pairs: Sequence[Pair], plan: TranslationPlan) -> Translator:
    """Return an untrained model with tokenizers trained on the pairs."""
    source, target = (
        Tokenizer.train([pair[side] for pair in pairs], plan.vocabulary) for side in (0, 1)
    )
    torch.manual_seed(plan.seed)
    model = Transformer.from_preset(
        plan.preset,
        vocab_size=len(source),
        target_vocab_size=len(target),
        d_model=plan.d_model,
        hidden=4 * plan.d_model,
        num_encoder_layers=plan.layers,
        num_decoder_layers=plan.layers,
        dropout=plan.dropout,
        pad_token_id=target.pad_id,
        start_token_id=target.start_id,
    )
    return Translator(model, source, target)


def translation_batches(
    translator: Translator, pairs: Sequence[Pair], batch_size: int, seed: int = 0
) -> Batches:
    """Return the pairs as ids, batched by length, without those beyond the model's positions."""
    source, target = translator.source, translator.target
    sides = zip(
        source.encode_all([p.source for p in pairs]), target.encode_all([p.target for p in pairs])
    )
    limit = translator.model.config.max_length
    examples = [(s, t) for s, t in sides if max(len(s), len(t)) < limit]
    collate = translation_collate(source.pad_id, target.start_id, target.end_id)
    return Batches(
        examples, batch_size, collate, lengths=[len(s) + len(t) for s, t in examples], seed=seed
    )


def translation_trainer(
    translator: Translator,
    train: Sequence[Pair],
    held_out: Sequence[Pair],
    plan: TranslationPlan,
    recipe: Recipe,
    **more: Any,
) -> Trainer:
    """Return a trainer of the translator; `more`: out, world and console of :class:`Trainer`."""
    batches = translation_batches(translator, train, plan.batch_size, plan.seed)
    checked = translation_batches(translator, held_out, plan.batch_size)
    sample = (
        translation_batches(
            translator, train[:: max(1, len(train) // len(held_out))], plan.batch_size
        )
        if plan.epochs
        else None
    )

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        figures = held_out_loss(model, checked.epoch(0))
        if sample is not None:  # by the same measure, without dropout
            figures["training_accuracy"] = held_out_loss(model, sample.epoch(0))["accuracy"]
        return figures

    schedule = warmup_inverse_square_root(plan.d_model, plan.warmup, plan.rate)
    return Trainer(
        translator.model,
        of_model,
        batches,
        recipe,
        cooled_down(schedule, recipe.steps),
        evaluate=evaluate,
        **more,
    )


class Exactness(NamedTuple):
    """The number of held-out sentences translated exactly."""

    right: int
    total: int
    wrong: list[tuple[str, str, str]]  # source, output, target

    @property
    def share(self) -> float:
        return self.right / self.total


def translate_all(
    translator: Translator, texts: Sequence[str], *, beams: int = 1, batch_size: int = 100
) -> list[str]:
    """Return the translations in the order of the texts; batches have texts of similar length."""
    said, order = [""] * len(texts), sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for first in range(0, len(order), batch_size):
        part = order[first : first + batch_size]
        for index, text in zip(part, translator.translate([texts[i] for i in part], beams=beams)):
            said[index] = text
    return said


def exactness(pairs: Sequence[Pair], said: Sequence[str]) -> Exactness:
    """Count the outputs that equal the pairs' targets, ignoring spaces."""
    wrong = [(p.source, s, p.target) for p, s in zip(pairs, said) if s.split() != p.target.split()]
    return Exactness(len(pairs) - len(wrong), len(pairs), wrong)
