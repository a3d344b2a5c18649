# SPDX-License-Identifier: Apache-2.0
"""A random attention problem of the fuzzer: tensors, keywords, gradients, float64 solution."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pytransformer.testing import oracle


@dataclass
class Problem:
    """A drawn problem.

    `tensors` are the float arguments by name (bias parts as "slopes", "table"), with their final
    strides. `keywords` are those of pytransformer.attention. `wanted` names the tensors that get a
    gradient.
    """

    tensors: dict[str, Tensor]
    keywords: dict[str, Any]
    wanted: tuple[str, ...]
    grad_out: Tensor
    grad_lse: Tensor | None
    dtype: torch.dtype
    data: str  # key of DATA
    packed: bool  # run as attention_varlen
    features: frozenset[str] = field(default_factory=frozenset)
    layouts: dict[str, str] = field(default_factory=dict)
    # Pass the boolean mask as a block mask to backends that support it.
    block_size: tuple[int, int] | None = None
    pages: tuple[int, int] | None = None  # (page size, seed) of a second run with paged KV
    # Run again with keys and values in this dtype, paged if the problem is.
    eight_bits: torch.dtype | None = None

    @property
    def limits(self) -> str:
        """Return the problem's key into bounds.LIMITS."""
        if any(layout.startswith("expanded") for layout in self.layouts.values()):
            return "repeated"
        return "zero_mean" if self.data == "normal" else "any"

    def public_keywords(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Return the keywords with their float tensors and bias objects from `tensors`."""
        from pytransformer import AlibiBias, RelativePositionBias

        out = dict(self.keywords)
        for name in ("attn_mask", "bias", "sinks"):
            if name in tensors:
                out[name] = tensors[name]
        if "slopes" in tensors:
            out["bias"] = AlibiBias(tensors["slopes"])
        if "table" in tensors:
            out["bias"] = RelativePositionBias(tensors["table"], *out.pop("t5"))
        return out

    def solve(self) -> oracle.Solution:
        """Return the float64 solution."""
        t = self.tensors
        return oracle.solve(
            t["query"],
            t["key"],
            t["value"],
            self.grad_out,
            self.grad_lse,
            **self.public_keywords(t),
        )

    def __str__(self) -> str:
        shapes = " ".join(f"{n}{tuple(t.shape)}" for n, t in self.tensors.items())
        others = ", ".join(
            f"{k}={_short(v)}" for k, v in self.keywords.items() if k not in self.tensors
        )
        layouts = " ".join(
            f"{n}:{layout}" for n, layout in self.layouts.items() if layout != "contiguous"
        )
        return (
            f"{'varlen ' if self.packed else ''}{str(self.dtype)[6:]} {self.data} {shapes}"
            f" [{others}] grads {','.join(self.wanted) or 'none'} layouts {layouts or 'contiguous'}"
        )


def _short(value: Any) -> str:
    return (
        str(value.tolist())
        if isinstance(value, Tensor) and value.numel() <= 4
        else (
            f"{str(value.dtype)[6:]}{tuple(value.shape)}"
            if isinstance(value, Tensor)
            else repr(value)
        )
    )


def in_blocks(mask: Tensor, lengths: tuple[int, int], block_size: tuple[int, int]) -> Any:
    """Return the boolean mask as a block mask: full lengths, original batch and heads."""
    from pytransformer import BlockMask

    mask = mask[(None,) * (4 - mask.dim())]
    return BlockMask.from_dense(mask.expand(*mask.shape[:2], *lengths), block_size=block_size)
