# SPDX-License-Identifier: Apache-2.0
"""A model with dropout on the fused ops that trains in milliseconds.

Tests share it with the processes that they start.
"""

from __future__ import annotations

import torch
from torch import nn

import pytransformer as pt
import pytransformer.testing  # processes draw like the test that starts them
from pytransformer.training import IGNORED, Batches, Recipe, Trainer, warmup_cosine

WORDS, WIDTH = 13, 16


class Toy(nn.Module):
    """A model that predicts the next number: embedding, add_norm, feed-forward, tied output."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.dropout = dropout
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        p = self.dropout if self.training else 0.0
        x = self.embedding(ids)
        hidden = pt.feed_forward(
            x, self.inner.weight, self.inner.bias, self.outer.weight, self.outer.bias, dropout_p=p
        )
        return pt.add_norm(hidden, x, self.norm.weight, self.norm.bias, dropout_p=p)[0]


def objective(model, batch):
    hidden = model(batch["input_ids"])
    loss = pt.linear_cross_entropy(
        hidden, model.output.weight, batch["labels"], ignore_index=IGNORED
    )
    return loss, int((batch["labels"] != IGNORED).sum())


def collate(examples, generator):
    ids = torch.tensor(examples)
    labels = torch.where(
        torch.rand(ids.shape, generator=generator) < 0.8, (2 * ids + 1) % WORDS, IGNORED
    )
    labels[:, 0] = (2 * ids[:, 0] + 1) % WORDS
    return {"input_ids": ids, "labels": labels}


def make_trainer(out=None, *, dropout=0.1, batch_size=4, **recipe):
    examples = torch.randint(WORDS, (48, 6), generator=torch.Generator().manual_seed(1)).tolist()
    world, options = (
        recipe.pop("world", None),
        {k: recipe.pop(k) for k in ("evaluate", "console") if k in recipe},
    )
    recipe = Recipe(**{"steps": 30, "log_every": 5, **recipe})
    batches = Batches(examples, batch_size, collate, seed=3)
    schedule = warmup_cosine(0.02, 5, 40)
    return Trainer(
        Toy(dropout), objective, batches, recipe, schedule, out=out, world=world, **options
    )
