# SPDX-License-Identifier: Apache-2.0
"""The mask object of the mask interface, which only our attention reads directly.

A tensor could be misread: a bool mask added to scores hides nothing, and ``None`` means "nothing
hidden" to one reader and "causal" to another. A :class:`Mask` is not a tensor. Models pass it
between layers, through checkpointing, hooks and compiled graphs, like flex attention's
``BlockMask``, and :func:`.attention.attention_forward` reads its fields. It has a shape and a
device. Any other access (adding, indexing, converting, comparing, a torch function) uses the
additive mask of the model's eager code, with the same result. Writes raise, because our attention
would ignore them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map
from transformers import masking_utils as masking

from ...ops.options import Alignment
from .models import described
from .packing import sequence_bounds

# Model types whose code reads a mask of any dtype as True = visible. Nemotron ASR hides keys by
# logical_not, so the additive mask, with 0 for visible keys, hides the reverse and gives NaN.
READ_AS_BOOL = frozenset({"nemotron_asr_streaming_encoder"})


@dataclass(eq=False)
class Mask:
    """One forward pass's mask, (B, 1, Lq, Lk).

    It is ``padding``, ``causal``, ``window`` and ``lengths``, or ``dense``.

    Args:
        arguments: of ``transformers.masking_utils.sdpa_mask``, which builds the same mask densely.
        padding: (B, 1, 1, Lk) bool, True for visible keys; None hides nothing.
        causal: alignment of the causal diagonal; None: not causal.
        window: number of keys a query sees, including the query's; requires ``causal``.
        lengths: (B,) int64, valid keys of a static cache, up to the last query's; None: all.
        dense: (B, 1, Lq, Lk) bool, the mask if the other fields are None, otherwise an equal copy.
        segments: (B, L) integers, the sequence of each token in a packed batch; None for one
            sequence per row.
        moved: the device, if it differs from that in ``arguments``.
        additive: eager code's mask, cached by the first access.
        bounds: offsets and longest sequence of ``segments``, cached by the first layer.
    """

    arguments: dict[str, Any]
    padding: torch.Tensor | None = None
    causal: Alignment | None = None
    window: int | None = None
    lengths: torch.Tensor | None = None
    dense: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    moved: torch.device | None = None
    additive: torch.Tensor | None = None
    bounds: tuple[torch.Tensor, int] | None = None

    @property
    def shape(self) -> torch.Size:
        a = self.arguments
        return torch.Size((a["batch_size"], 1, a["q_length"], a["kv_length"]))

    @property
    def ndim(self) -> int:
        return 4

    @property
    def device(self) -> torch.device:
        return torch.device(self.arguments["device"]) if self.moved is None else self.moved

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Mask:
        return self

    def detach(self) -> Mask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mask on another device (for pipelines); other conversions return a tensor."""
        target = args[0] if args else kwargs.get("device")
        if (
            len(args) > 1
            or not isinstance(target, (str, int, torch.device))
            or kwargs.keys() - {"device", "non_blocking"}
        ):
            return self.touched().to(*args, **kwargs)
        there = dataclasses.replace(self, moved=torch.device(target), bounds=None)
        for name in ("padding", "lengths", "dense", "segments", "additive"):
            tensor = getattr(self, name)
            setattr(there, name, tensor if tensor is None else tensor.to(target))
        return there

    def sequence_bounds(self) -> tuple[torch.Tensor, int] | None:
        """Return offsets and longest sequence of a packed batch, read once per forward pass."""
        if self.bounds is None and self.segments is not None:
            self.bounds = sequence_bounds(self.segments)
        return self.bounds

    def as_dense(self) -> torch.Tensor:
        """Return transformers' (B, 1, Lq, Lk) bool mask, cached."""
        if self.dense is None:
            dense = dense_mask(
                self.arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False
            )
            assert dense is not None  # both skips are off
            self.dense = dense.to(self.device)
        return self.dense

    def touched(self) -> torch.Tensor:
        """Return transformers' additive mask for eager code, cached.

        Models of :data:`READ_AS_BOOL` get sdpa's bool mask.
        """
        if getattr(self.arguments.get("config"), "model_type", None) in READ_AS_BOOL:
            return self.as_dense()
        if self.additive is None:
            self.additive = masking.eager_mask(**self.arguments).to(self.device)
        return self.additive

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy, pickle and hasattr probe these names
            raise AttributeError(name)
        if name.endswith("_"):
            self.refuse_writing(name)
        return getattr(self.touched(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        kwargs = kwargs or {}
        for written in (
            args[0] if args and name.endswith("_") and not name.endswith("__") else None,
            kwargs.get("out"),
        ):
            if isinstance(written, Mask):
                written.refuse_writing(name)
        args, kwargs = tree_map(
            lambda x: x.touched() if isinstance(x, Mask) else x, (tuple(args), kwargs)
        )
        return func(*args, **kwargs)

    def refuse_writing(self, how: str) -> NoReturn:
        raise ValueError(
            f"pytransformer: {described(self.arguments.get('config'))} writes into its attention"
            f" mask ({how}), which our attention would not see; use attn_implementation='eager' for"
            " this model"
        )


def dense_mask(arguments: dict[str, Any], **skips: bool) -> torch.Tensor | None:
    """Return transformers' ``sdpa_mask``; ``skips`` are its two flags that allow None."""
    return masking.sdpa_mask(**arguments, **skips)


def _operator(name: str) -> Callable[..., Any]:
    def touch(self: Mask, *args: Any) -> Any:
        return getattr(self.touched(), name)(*args)

    return touch


def _in_place(name: str) -> Callable[..., Any]:
    def refuse(self: Mask, *args: Any) -> NoReturn:
        self.refuse_writing(name)

    return refuse


_SUMS, _BITS = ("add", "sub", "mul", "truediv", "matmul"), ("and", "or", "xor")
for _name in (
    *(f"{reflected}{f}" for reflected in ("", "r") for f in (*_SUMS, *_BITS)),
    *("invert", "neg", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "len", "iter", "bool"),
):
    setattr(Mask, f"__{_name}__", _operator(f"__{_name}__"))
for _name in ("setitem", *(f"i{f}" for f in (*_SUMS, *_BITS))):
    setattr(Mask, f"__{_name}__", _in_place(f"__{_name}__"))
Mask.__hash__ = object.__hash__  # type: ignore[method-assign]  # defining __eq__ removes it


@dataclass(eq=False)
class Packed:
    """The mask of B sequences in one row, starting at ``offsets``, (B + 1,) int64.

    Encoders converted to skip padding use it.
    """

    offsets: torch.Tensor
