# SPDX-License-Identifier: Apache-2.0
"""Which pairs self-attention computes, for every length: a block mask made once and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..ops.block_mask import BlockMask

NAMES = ("sliding_window", "strided", "longformer", "big_bird")
KEPT = 8  # masks of one pattern; a batch of another length makes its mask anew after so many others


class Pattern:
    """A pattern of :class:`pytransformer.BlockMask` without its length: ``Pattern("longformer", window=512, global_tokens=1)``.

    The mask of a length is made at the first call on a device and kept, the last :data:`KEPT` of them. Layers that share a pattern
    share its masks. Under ``torch.compile`` and ``torch.export`` the mask is a constant of the graph, and the length is too.

    Args:
        make: one of :data:`NAMES`, a constructor of BlockMask; or a function of (length, device) that returns one.
        **keywords: of the constructor, all but the length and the device; ``heads`` where heads differ.

    Raises:
        ValueError: no such constructor. What the constructor refuses, it refuses when a mask is made.
    """

    def __init__(self, make: str | Callable[[int, torch.device], BlockMask], **keywords: Any) -> None:
        if isinstance(make, str) and make not in NAMES:
            raise ValueError(f"Pattern: no pattern is called {make!r}; there are {', '.join(NAMES)}, or give a function")
        if not isinstance(make, str) and keywords:
            raise ValueError(f"Pattern: a function takes (length, device) alone, got the keywords {', '.join(keywords)}")
        self.make, self.keywords = make, keywords
        self._kept: dict[tuple[int, str, int | None], BlockMask] = {}  # the last used at the end

    def __call__(self, length: int, device: torch.device) -> BlockMask:
        """The mask of ``length`` queries and as many keys."""
        self._keep(length, device)
        return self._kept[length, device.type, device.index]

    # A compiler runs it while it traces. What __call__ then looks up is an input with a guard; as the constant result itself the mask
    # had none, and the graph of one layer computed another's pattern.
    def _keep(self, length: int, device: torch.device) -> None:
        """See to it that the mask is there, as the last one used."""
        key = (length, device.type, device.index)
        if key in self._kept:
            self._kept[key] = self._kept.pop(key)
            return
        self._kept[key] = self._made(length, device)
        while len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]

    # What torch.compiler.assume_constant_result does, which imports the whole compiler: 1 s of `import pytransformer`.
    _keep._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _made(self, length: int, device: torch.device) -> BlockMask:
        # Real tensors that autograd may save, whatever is being traced or run without gradients: later calls get them too.
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            if callable(self.make):
                return self.make(length, device)
            constructor = getattr(BlockMask, self.make)
            if device.type == "meta":  # has no values to make a mask of
                return constructor(length, **self.keywords).to(device)
            return constructor(length, **self.keywords, device=device)

    def visible(self, x: torch.Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
        """The visibility arguments of :func:`pytransformer.attention` for x, (B, L, d), with this pattern besides.

        A key-padding mask, (B or 1, 1, 1, L), becomes segments: its keys stand in another than the queries, wherever they are.

        Raises:
            ValueError: another mask, or a padding mask beside segments.
        """
        arguments = dict(arguments)
        mask = arguments.pop("attn_mask", None)
        batch, length = x.shape[0], x.shape[1]
        if mask is not None:
            given = f"{mask.dtype} of {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
            if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape[1:] != (1, 1, length):
                raise ValueError(
                    f"attention with a pattern: attn_mask must be key padding, bool ({batch}, 1, 1, {length}), got {given}; "
                    "put it into the pattern, as a function that returns mask & another"
                )
            if "key_segments" in arguments or "query_segments" in arguments:
                raise ValueError("attention with a pattern: give padding as key_lengths where there are segments")
            hidden = (~mask[:, 0, 0]).to(torch.int32).expand(batch, length)
            arguments |= {"query_segments": hidden.new_zeros(()).expand(batch, length), "key_segments": hidden}
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.mark_static(x, 1)  # a compiler that has seen two lengths would hand on a symbol
        return {**arguments, "attn_mask": self(int(x.shape[1]), x.device)}

    def __getstate__(self) -> dict[str, Any]:
        """Without the masks: a copy makes its own."""
        return {"make": self.make, "keywords": self.keywords, "_kept": {}}

    def __repr__(self) -> str:
        name = self.make if isinstance(self.make, str) else getattr(self.make, "__name__", repr(self.make))
        return f"Pattern({', '.join([repr(name), *(f'{k}={v!r}' for k, v in self.keywords.items())])})"
