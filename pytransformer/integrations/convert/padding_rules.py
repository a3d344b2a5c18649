# SPDX-License-Identifier: Apache-2.0
"""Hugging Face encoders that skip padding: kind ``"padding"`` of :func:`.convert`, off by default.

The real tokens of a batch padded at the end pass through the layers as one row, (1, total, d), with
the sequence offsets as mask (:class:`..hugging_face.mask.Packed`). Padding becomes zeros in the
result. Eager code has other values there, so the kind is off by default.
"""

from __future__ import annotations

from typing import Any

import torch

from ...nn.packing import Packing
from .hugging_face_rules import _bert, _rule, runs_on_ours
from .rules import Rule


class PackedEncoder:
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        others = ("encoder_hidden_states", "encoder_attention_mask", self.cache_keyword)
        if any(kwargs.get(name) is not None for name in others):
            return NotImplemented
        packing = _packing(self, hidden_states, attention_mask, kwargs)
        if packing is None:
            return NotImplemented
        from ..hugging_face.mask import Packed

        packed = Packed(packing.offsets)
        out = super().forward(packing.pack(hidden_states)[None], packed, **kwargs)  # type: ignore[misc]
        out.last_hidden_state = packing.unpack(out.last_hidden_state[0])
        return out


def _packing(encoder: Any, x: torch.Tensor, mask: Any, kwargs: dict[str, Any]) -> Packing | None:
    """Return the packing, or None if this call must run unpacked.

    Packing requires key padding at the end, enough of it, our attention, and no request for
    attention weights, hidden states or a cache.
    """
    from ..hugging_face import collected, weights_wanted
    from ..hugging_face.mask import Mask

    if (
        not isinstance(mask, Mask)
        or mask.padding is None
        or mask.causal is not None
        or kwargs.get("use_cache")
        or weights_wanted(kwargs)
        or "hidden_states" in collected()
        or not runs_on_ours(encoder.config)
    ):
        return None
    return Packing.of({"attn_mask": mask.padding.expand(x.shape[0], -1, -1, -1)}, x, if_worth=True)


_rule(
    Rule(
        "padding",
        "layers without padding",
        PackedEncoder,
        digests=("c4a9f7672e5b",),
        by_probe=False,  # it changes padding
    ),
    **{model: f"{name}Encoder" for model, name in _bert.items()},
)
