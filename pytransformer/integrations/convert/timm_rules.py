# SPDX-License-Identifier: Apache-2.0
"""Rules for timm modules, by the full name of their class, without importing timm.

Attention uses :func:`pytransformer.activate`. The rules were written for timm 1.0.31; each has the
digest of its code (see :func:`.code.digest`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...ops.layer_norm import layer_norm
from .modules import (
    add_norm,
    droppable,
    feed_forward,
    first_reason,
    fusable_norm,
    needs,
    probability,
    special_weights,
    unhooked,
)
from .rules import RULES, Rule


class LayerNorm:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Mlp:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.drop2(
            feed_forward(
                x, self.fc1, self.fc2, self.act, dropout=probability(self.drop1, self.training)
            )
        )


class PreNormBlock:
    """The sum after attention is fused with the network's norm; the last sum is not fused."""

    def forward(
        self: Any, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False
    ) -> torch.Tensor:
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)
        normed, stream = add_norm(self.drop_path1(self.ls1(attended)), x, self.norm2, 0.0)
        return stream + self.drop_path2(self.ls2(self.mlp(normed)))


def _fast_norm(m: Any) -> str | None:
    fast = (
        "uses timm's fast norm, whose dtypes under autocast are its own" if m._fast_norm else None
    )
    return fast or special_weights(m)


def _plain_network(m: Any) -> str | None:
    normed = (
        None
        if isinstance(m.norm, nn.Identity)
        else "has a norm between its linear layers, which our op has not"
    )
    return first_reason(normed, needs(m.act, m.fc1, m.fc2), unhooked(m.norm), droppable(m.drop1))


RULES |= {
    "timm.layers.norm.LayerNorm": Rule(
        "norm", "layer_norm", LayerNorm, _fast_norm, ("9f2d83f483c7",)
    ),
    "timm.layers.mlp.Mlp": Rule(
        "feed_forward", "feed_forward", Mlp, _plain_network, ("b7e91f5baac3",)
    ),
    "timm.models.vision_transformer.Block": Rule(
        "block",
        "add_norm",
        PreNormBlock,
        lambda m: first_reason(unhooked(m.norm2), fusable_norm(m.norm2)),
        ("84a9c173f350",),
    ),
}
