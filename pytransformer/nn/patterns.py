# SPDX-License-Identifier: Apache-2.0
"""Sparsity patterns of self-attention for any length, as cached block masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..ops._core.tensors import constant_in_graphs
from ..ops.block_mask import BlockMask

NAMES = ("sliding_window", "strided", "longformer", "big_bird")
KEPT = 8  # cached masks per pattern; the least recently used is evicted


class Pattern:
    """A pattern of :class:`pytransformer.BlockMask` without its length.

    Example: ``Pattern("longformer", window=512, global_tokens=1)``. The first call with a length
    and device builds the mask; the last :data:`KEPT` masks are cached. Layers that share a pattern
    share its masks. Under ``torch.compile`` and ``torch.export`` the mask and the length are
    constants of the graph.

    Args:
        make: one of :data:`NAMES`, a constructor of BlockMask; or a function of (length, device)
            that returns one.
        **keywords: the constructor's arguments except the length and device; ``heads`` for per-head
            masks.

    Raises:
        ValueError: unknown constructor. The constructor checks its arguments when it builds a mask.
    """

    def __init__(
        self, make: str | Callable[[int, torch.device], BlockMask], **keywords: Any
    ) -> None:
        if isinstance(make, str) and make not in NAMES:
            raise ValueError(
                f"Pattern: no pattern is called {make!r}; there are {', '.join(NAMES)}, or give a"
                " function"
            )
        if not isinstance(make, str) and keywords:
            raise ValueError(
                "Pattern: a function takes (length, device) alone, got the keywords"
                f" {', '.join(keywords)}"
            )
        self.make, self.keywords = make, keywords
        self._kept: dict[tuple[int, str, int | None], BlockMask] = {}  # least recently used first

    def __call__(self, length: int, device: torch.device) -> BlockMask:
        """Return the mask of ``length`` queries and ``length`` keys."""
        self._keep(length, device)
        return self._kept[length, device.type, device.index]

    # The compiler runs this while tracing. The read in __call__ is then a guarded input. A
    # constant mask had no guard, so the graph of one layer used the pattern of another.
    @constant_in_graphs
    def _keep(self, length: int, device: torch.device) -> None:
        """Cache the mask as the most recently used one."""
        key = (length, device.type, device.index)
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)
            return
        self._kept[key] = self._made(length, device)
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]

    def _made(self, length: int, device: torch.device) -> BlockMask:
        # Create real tensors that autograd may save, under any tracing or no-grad mode, for later
        # calls.
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            if callable(self.make):
                return self.make(length, device)
            constructor = getattr(BlockMask, self.make)
            if device.type == "meta":  # meta tensors have no values to build a mask from
                return constructor(length, **self.keywords).to(device)
            return constructor(length, **self.keywords, device=device)

    def visible(self, x: torch.Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return attention's visibility arguments for x, (B, L, d), with the pattern.

        A key-padding mask, (B or 1, 1, 1, L), becomes segments: padding keys get another segment
        than the queries, at any position.

        Raises:
            ValueError: another mask, or a padding mask together with segments.
        """
        arguments = dict(arguments)
        mask = arguments.pop("attn_mask", None)
        batch, length = x.shape[0], x.shape[1]
        if mask is not None:
            given = (
                f"{mask.dtype} of {tuple(mask.shape)}"
                if isinstance(mask, torch.Tensor)
                else type(mask).__name__
            )
            if (
                not isinstance(mask, torch.Tensor)
                or mask.dtype != torch.bool
                or mask.shape[1:] != (1, 1, length)
            ):
                raise ValueError(
                    f"attention with a pattern: attn_mask must be key padding, bool ({batch}, 1, 1,"
                    f" {length}), got {given}; put it into the pattern, as a function that returns"
                    " mask & another"
                )
            if "key_segments" in arguments or "query_segments" in arguments:
                raise ValueError(
                    "attention with a pattern: give padding as key_lengths where there are segments"
                )
            hidden = (~mask[:, 0, 0]).to(torch.int32).expand(batch, length)
            arguments |= {
                "query_segments": hidden.new_zeros(()).expand(batch, length),
                "key_segments": hidden,
            }
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.mark_static(x, 1)  # after two lengths a compiler would pass a symbol
        return {**arguments, "attn_mask": self(int(x.shape[1]), x.device)}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the masks; a copy rebuilds them."""
        return {"make": self.make, "keywords": self.keywords, "_kept": {}}

    def __repr__(self) -> str:
        name = (
            self.make
            if isinstance(self.make, str)
            else getattr(self.make, "__name__", repr(self.make))
        )
        return (
            f"Pattern({', '.join([repr(name), *(f'{k}={v!r}' for k, v in self.keywords.items())])})"
        )
