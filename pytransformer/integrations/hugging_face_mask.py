"""What the mask interface hands to a transformers model: an object that only our attention reads.

A tensor of some dtype could be read as another thing: added to scores, a bool mask hides nothing, and ``None`` says "nothing
hidden" to one reader and "causal" to the next. A :class:`Mask` is no tensor. Models pass it on from layer to layer, through
checkpointing, hooks and compiled graphs, as they do with flex attention's ``BlockMask``; :func:`.hugging_face.attention_forward`
takes it apart. It answers for its shape and device. Whatever else touches it (indexes, converts, compares, hands it to a torch
function) gets the dense bool mask that ``sdpa`` would have got, in architectures that transformers runs with ``sdpa``, and an
error in all others. Adding it to something is an error everywhere: no sum with a bool mask hides a key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_map
from transformers import masking_utils as masking

from ..ops._options import Alignment
from . import hugging_face_models as models

_SUMS = frozenset(
    name.format(f)
    for f in ("add", "sub", "rsub", "mul", "baddbmm", "addmm")
    for name in ("{}", "{}_", "__{}__", "__r{}__", "__i{}__")
)


@dataclass(eq=False)
class Mask:
    """One forward pass's mask, (B, 1, Lq, Lk): ``padding`` and ``causal`` and ``window``, or ``dense``.

    Args:
        arguments: of ``transformers.masking_utils.sdpa_mask``, which makes the same mask dense.
        padding: (B, 1, 1, Lk) bool, True where a key may be seen; None hides nothing.
        causal: where the causal diagonal ends; None for no causality.
        window: how many keys a query sees, its own included; needs ``causal``.
        dense: (B, 1, Lq, Lk) bool: what the mask is if the rest is None, else the same once more, for code that touched it.
    """

    arguments: dict[str, Any]
    padding: torch.Tensor | None = None
    causal: Alignment | None = None
    window: int | None = None
    dense: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        a = self.arguments
        return torch.Size((a["batch_size"], 1, a["q_length"], a["kv_length"]))

    @property
    def ndim(self) -> int:
        return 4

    @property
    def device(self) -> torch.device:
        return torch.device(self.arguments["device"])

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Mask:
        """Itself, as the next two: ``generate`` and checkpointing ask for them, and nobody writes into a mask."""
        return self

    detach = contiguous

    def clone(self, **_: Any) -> Mask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Itself on another device (pipelines over several devices move it); any other conversion is a touch."""
        target = args[0] if args else kwargs.get("device")
        if len(args) > 1 or not isinstance(target, (str, int, torch.device)) or kwargs.keys() - {"device", "non_blocking"}:
            return self.touched("to").to(*args, **kwargs)
        padding, dense = (t if t is None else t.to(target) for t in (self.padding, self.dense))
        moved = {**self.arguments, "device": torch.device(target)}
        return dataclasses.replace(self, arguments=moved, padding=padding, dense=dense)

    def as_dense(self) -> torch.Tensor:
        """transformers' own (B, 1, Lq, Lk) bool mask; made once."""
        if self.dense is None:
            self.dense = dense_mask(self.arguments, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        assert self.dense is not None  # both ways of leaving it out are shut
        return self.dense

    def touched(self, how: str) -> torch.Tensor:
        """The dense mask, for code of the model's that is written for ``sdpa``'s; else an error."""
        config = self.arguments.get("config")
        if how.rpartition(".")[2] in _SUMS or not models.runs_with_sdpa(config):
            refuse_touch(config, how)
        return self.as_dense()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copy, pickle and hasattr look for
            raise AttributeError(name)
        return getattr(self.touched(name), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))

        def plain(x: Any) -> Any:
            return x.touched(name) if isinstance(x, Mask) else x

        args, kwargs = tree_map(plain, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def refuse_touch(config: Any, how: str) -> NoReturn:
    raise ValueError(
        f"pytransformer: {models.described(config)} works on its attention mask itself ({how}), and this mask is for our "
        "attention alone; use attn_implementation='eager' for this model"
    )


def dense_mask(arguments: dict[str, Any], **skips: bool) -> torch.Tensor | None:
    """transformers' own ``sdpa_mask``; ``skips`` are its two flags that let it return None."""
    return masking.sdpa_mask(**arguments, **skips)


def _operator(name: str) -> Callable[..., Any]:
    def touch(self: Mask, *args: Any) -> Any:
        return getattr(self.touched(name), name)(*args)

    return touch


for _name in (
    *(
        "add",
        "radd",
        "iadd",
        "sub",
        "rsub",
        "isub",
        "mul",
        "rmul",
        "imul",
        "truediv",
        "and",
        "rand",
        "iand",
        "or",
        "ror",
        "ior",
    ),
    *("xor", "rxor", "matmul", "rmatmul", "invert", "neg", "eq", "ne", "lt", "le", "gt", "ge"),
    *("getitem", "setitem", "len", "iter", "bool", "float", "int"),
):
    setattr(Mask, f"__{_name}__", _operator(f"__{_name}__"))
Mask.__hash__ = object.__hash__  # type: ignore[method-assign]  # defining __eq__ takes it away


@dataclass(eq=False)
class Packed:
    """The batch is one row of B sequences that start at ``offsets``, (B + 1,) int64: encoders converted to leave padding out."""

    offsets: torch.Tensor
