# SPDX-License-Identifier: Apache-2.0
"""Inputs of the plots from a model: attention by layer, and positions."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import models
from ..nn import AttentionTap, taps
from ..nn.positions import Positions
from .depth import mean_distances

STACKS = ("cross", "decoder", "encoder")  # the first available one is the default


@dataclass(frozen=True)
class Returned:
    """Attention weights that a model returned, (B, heads, Lq, Lk), as an attention tap."""

    all_weights: torch.Tensor

    def weights(self, rows: Any = None, heads: Any = None) -> torch.Tensor:
        """Return the weights of these rows and heads.

        Raises:
            ValueError: a row or head is out of range.
        """
        found = self.all_weights
        for dim, what, chosen in ((1, "heads", heads), (2, "rows", rows)):
            if chosen is not None:
                count = found.shape[dim]
                if wrong := [n for n in chosen if not -count <= n < count]:
                    raise ValueError(
                        f"{what} must be between {-count} and {count - 1}, got {wrong[0]}"
                    )
                found = found.index_select(
                    dim, torch.tensor([n % count for n in chosen], device=found.device)
                )
        return found

    def summary(self, *kinds: str) -> dict[str, torch.Tensor]:
        """Return the "distance" only, sum_j p |j - i| of each query."""
        if kinds != ("distance",):
            raise ValueError(
                "of weights that a model returned there is the distance only, got"
                f" {', '.join(kinds) or 'all'}"
            )
        i, j = (torch.arange(n, device=self.all_weights.device) for n in self.all_weights.shape[2:])
        return {"distance": (self.all_weights * (j - i[:, None]).abs()).sum(-1)}


@dataclass(frozen=True)
class Seen:
    """The attention of one stack in one call of a model.

    Attributes:
        which: "encoder", "decoder" (self-attention) or "cross".
        taps: the kernel's inputs and lse of each layer, or the weights that the model returned.
    """

    which: str
    taps: tuple[AttentionTap | Returned, ...]

    def weights(
        self,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        rows: Sequence[int] | None = None,
        batch: int = 0,
    ) -> torch.Tensor:
        """Return (layers, heads, rows, Lk) of one sequence, computing nothing else.

        Raises:
            ValueError: a layer, head or row is out of range.
        """
        count = len(self.taps)
        chosen = range(count) if layers is None else layers
        if wrong := [layer for layer in chosen if not -count <= layer < count]:
            raise ValueError(f"layer must be between 0 and {count - 1}, got {wrong[0]}")
        return torch.stack(
            [self.taps[layer].weights(rows=rows, heads=heads)[batch] for layer in chosen]
        )

    def distances(self, valid: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean attention distance (layers, heads), in linear memory.

        Args:
            valid: (B, Lq), queries to include.
        """
        return torch.stack(
            [mean_distances(tap.summary("distance")["distance"], valid) for tap in self.taps]
        )

    def patch_distances(self, model: Any) -> torch.Tensor:
        """Return a ViT's mean patch distance (layers, heads) in pixels, without [CLS].

        Source: Dosovitskiy et al. (2021), section 4.5 and figure 7.
        """
        rows, columns = model.patches.grid
        places = (
            torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
            * model.patches.patch_size
        )
        apart = torch.cdist(places, places)
        found = []
        for tap in self.taps:
            weights = tap.weights()[:, :, 1:, 1:].float().cpu()  # [B, heads, patches, patches]
            found.append(((weights * apart).sum(-1) / weights.sum(-1)).mean((0, 2)))
        return torch.stack(found)


@torch.no_grad()
def attention_of(model: Any, inputs: dict[str, torch.Tensor], which: str | None = None) -> Seen:
    """Run a model once, without dropout, and record its attention.

    Args:
        model: a model of :mod:`pytransformer.models`.
        inputs: keyword arguments of the call.
        which: "encoder", "decoder", "cross"; None: cross-attention if there is any, else the only
            stack.

    Raises:
        ValueError: the model has no such attention.
    """
    there = _stacks(model)
    if not there:
        raise ValueError(
            f"{type(model).__name__} mixes tokens without attention: there are no weights to plot"
        )
    which = which_stack(there, which, type(model).__name__)
    training = model.training
    model.eval()
    try:
        with taps(model, *there[which]) as record:
            model(**inputs)
    finally:
        model.train(training)
    return Seen(which, tuple(record.values()))


def _stacks(model: Any) -> dict[str, list[str]]:
    """Return the names of each stack's attention modules, by layer."""
    found: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if hasattr(module, "observer"):
            own = "decoder" if name.startswith("decoder.") else "encoder"
            found.setdefault("cross" if getattr(module, "cross", False) else own, []).append(name)
    return found


def which_stack(there: Collection[str], wanted: str | None, model: str) -> str:
    """Return the requested stack, or the first available one of :data:`STACKS`.

    Raises:
        ValueError: the model lacks the requested stack.
    """
    known = [stack for stack in STACKS if stack in there]
    if wanted is not None and wanted not in there:
        raise ValueError(f"{model} has no {wanted} attention; it has {', '.join(known)}")
    return wanted or known[0]


def position_table(model: Any) -> torch.Tensor:
    """Return the position table (positions, d) of a model, learned or sinusoidal.

    Raises:
        ValueError: the model has none.
    """
    for module in model.modules():
        if isinstance(module, Positions):
            return module.weight.detach()
    raise ValueError(f"{type(model).__name__} has no table of positions")


def load_model(folder: Path) -> Any:
    """Load a model from a folder written by `save` or Hugging Face's `save_pretrained`.

    Raises:
        ValueError, FileNotFoundError: the folder has no readable model.
    """
    config = folder / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; expected the folder of a model")
    facts = json.loads(config.read_text())
    if "model" in facts:
        if facts["model"] not in models.__all__:
            raise ValueError(
                f"{folder} holds a {facts['model']}, which is none of pytransformer.models"
            )
        return getattr(models, facts["model"]).load(folder).eval()
    kind, kinds = facts.get("model_type"), hugging_face_types()
    if kind not in kinds:
        raise ValueError(
            f"{folder} holds a Hugging Face model of type {kind!r}; expected one of"
            f" {', '.join(sorted(kinds))}"
        )
    return kinds[kind].load_hf(folder)


def hugging_face_types() -> dict[str, Any]:
    """Return the supported Hugging Face model types and their classes."""
    return {
        k: cls
        for name in models.__all__
        for cls in [getattr(models, name)]
        for k in getattr(cls, "CONVERSIONS", {})
    }
