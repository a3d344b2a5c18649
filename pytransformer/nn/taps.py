# SPDX-License-Identifier: Apache-2.0
"""Recording of named intermediates, without changes to the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ..ops.attention_weights import KINDS, attention_summary, attention_weights
from ..reference.eight_bit import dequantize_kv


@dataclass(frozen=True)
class AttentionTap:
    """The inputs of one :class:`MultiHeadAttention` call's fused kernel, and its lse.

    Attributes:
        query, key, value: (B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv).
        lse: (B, Hq, Lq), the log of the softmax's denominator.
        arguments: masks, bias and scale of the call.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    lse: torch.Tensor
    arguments: dict[str, Any]

    @staticmethod
    def of(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lse: torch.Tensor,
        arguments: dict[str, Any],
    ) -> AttentionTap:
        """Return the tap of a call, with contiguous keys and values in query's dtype.

        Paged keys and values are gathered; 8-bit ones are dequantized.
        """
        scales = [arguments.get(name) for name in ("key_scale", "value_scale")]
        if scales[0] is not None and scales[1] is not None:
            key, value = (
                dequantize_kv(rows, scale, query.dtype)
                for rows, scale in zip((key, value), scales)
                if scale is not None
            )
            arguments = {
                name: what
                for name, what in arguments.items()
                if name not in ("key_scale", "value_scale")
            }
        if "page_table" in arguments:
            table = arguments["page_table"].long()
            arguments = {name: what for name, what in arguments.items() if name != "page_table"}
            key, value = (pool[table].transpose(1, 2).flatten(2, 3) for pool in (key, value))
        return AttentionTap(query, key, value, lse, arguments)

    def weights(self, rows: Any = None, heads: Any = None) -> torch.Tensor:
        """Return :func:`pytransformer.attention_weights` of the rows, (B, heads, rows, Lk)."""
        return attention_weights(
            self.query, self.key, self.lse, rows=rows, heads=heads, **self.arguments
        )

    def summary(self, *kinds: str) -> dict[str, torch.Tensor]:
        """Return :func:`pytransformer.attention_summary` of these kinds (default: all)."""
        return attention_summary(
            self.query, self.key, self.lse, kinds=kinds or KINDS, **self.arguments
        )


@contextlib.contextmanager
def taps(model: nn.Module, *patterns: str) -> Iterator[dict[str, Any]]:
    """Record intermediates by the names of ``model.named_modules()``.

    A shell-style pattern (``"decoder.*.cross_attention"``) selects modules; without patterns, all
    attention modules are recorded. The record is an :class:`AttentionTap` for a
    :class:`MultiHeadAttention` and the output for any other module. The last call counts. Packing
    is off meanwhile, so all shapes are (B, L, ...).

        with taps(model, "encoder.*") as seen:
            model(input_ids)
        seen["encoder.blocks.0.self_attention"].weights(rows=[3])

    Raises:
        ValueError: no module matches a pattern.
    """
    modules = dict(model.named_modules())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            names = ", ".join(name for name in list(modules)[1:9])
            raise ValueError(f"taps: no module is called {pattern!r}; there are {names} and so on")
    chosen = {
        name: module
        for name, module in modules.items()
        if (
            any(fnmatchcase(name, p) for p in patterns) if patterns else hasattr(module, "observer")
        )
    }
    record: dict[str, Any] = {}
    handles = []
    packing = [module for module in modules.values() if getattr(module, "packs", False)]
    for stack in packing:
        stack.packs = False
    for name, module in chosen.items():
        if hasattr(module, "observer"):
            module.observer = lambda tap, name=name: record.__setitem__(name, tap)
        else:
            handles.append(
                module.register_forward_hook(
                    lambda _m, _i, out, name=name: record.__setitem__(name, out)
                )
            )
    try:
        yield record
    finally:
        for stack in packing:
            stack.packs = True
        for handle in handles:
            handle.remove()
        for module in chosen.values():
            if hasattr(module, "observer"):
                module.observer = None
