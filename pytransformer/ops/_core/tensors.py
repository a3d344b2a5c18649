# SPDX-License-Identifier: Apache-2.0
"""Tensor helpers of the ops: checks, memory order, autocast, dropout seeds."""

from __future__ import annotations

import contextlib
import math
import numbers
import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_TENSORS = (torch.Tensor, torch.nn.Parameter)
# Classes whose storage or trace holds the tensor's values. torch.func's wrappers are torch.Tensor.
PLAIN = (*_TENSORS, torch.nn.Buffer, FakeTensor, FunctionalTensor)
# Wrappers that unwrap themselves in __torch_dispatch__, by module: none exists before its module is
# imported.
_UNWRAPPED = {
    "torch.distributed.tensor": "DTensor",
    "torch.distributed._functional_collectives": "AsyncCollectiveTensor",
}
_TensorOrNone = TypeVar("_TensorOrNone", torch.Tensor, torch.Tensor | None)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_INSTEAD = {
    "nested": "scaled_dot_product_attention takes nested tensors, attention_varlen packed sequences"
}
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def constant_in_graphs(function: _Function) -> _Function:
    """Mark a function that torch.compile runs while tracing, and whose result is a constant.

    It does what torch.compiler.assume_constant_result does, which imports the compiler (1 s of
    ``import pytransformer``).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def shape_of(t: torch.Tensor) -> str:
    return "(" + ", ".join(str(n) for n in t.shape) + ")"


def check_tensor(
    op: str, name: str, t: Any, *, floating: bool = False, ndim: int | None = None
) -> None:
    """Raise unless t is a dense tensor, of a supported floating dtype and of ndim dimensions.

    The dtype is checked if ``floating``. A wrong ndim raises ValueError, everything else TypeError.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(t).__name__}")
    if type(t) not in PLAIN and has_own_meaning(t):
        raise TypeError(
            f"{op}: {name} must be a plain tensor, got {_class_name(t)}, a subclass with a meaning "
            "of its own; as_subclass(torch.Tensor), dequantize() or the like makes one"
        )
    if (layout := unusual_layout(t)) is not None:
        raise TypeError(
            f"{op}: {name} must be a dense tensor, got a {layout} one;"
            f" {_INSTEAD.get(layout, 'to_dense() makes one')}"
        )
    check_storage(op, (name,), (t,))
    if floating and t.dtype not in FLOATING:
        raise TypeError(
            f"{op}: {name} must be float32, bfloat16, float16 or float64, got {t.dtype}"
        )
    if ndim is not None and t.dim() != ndim:
        raise ValueError(
            f"{op}: {name} must have {ndim} dimensions, got {t.dim()} with shape {shape_of(t)}"
        )


def is_freed(t: torch.Tensor) -> bool:
    """Return whether a plain tensor has elements but its storage has no bytes.

    FSDP2 frees a parameter's storage when it reshards, and PyTorch's elementwise functions read
    such a tensor at address 0.
    """
    if type(t) not in _TENSORS or torch.compiler.is_compiling():
        return False
    try:
        return not t.untyped_storage().nbytes() and t.numel() > 0 and not t._is_zerotensor()
    # a transform's wrapper and a sparse tensor have no storage
    except (NotImplementedError, RuntimeError):
        return False


def check_storage(op: str, names: Iterable[str], values: Iterable[Any]) -> None:
    """Raise RuntimeError if the storage of one of the tensors was freed."""
    for name, t in zip(names, values):
        if t is not None and is_freed(t):
            raise RuntimeError(
                f"{op}: {name} has no storage: it was freed (FSDP2 reshard, or"
                " untyped_storage().resize_(0)); keep it allocated until backward has run"
            )


def has_own_meaning(t: torch.Tensor) -> bool:
    """Return whether t's class may represent other values than its storage.

    A class that redefines ``__torch_function__`` may. A class with only ``__torch_dispatch__`` gets
    the raw op and unwraps itself. PLAIN, nested tensors (checked by layout) and _UNWRAPPED are
    excluded.
    """
    if type(t) in PLAIN or t.is_nested:
        return False
    for module, name in _UNWRAPPED.items():
        if module in sys.modules and isinstance(t, getattr(sys.modules[module], name)):
            return False
    function = type(t).__torch_function__
    usual = function == torch._C._disabled_torch_function_impl or (
        getattr(function, "__func__", None)
        is getattr(torch.Tensor.__torch_function__, "__func__", None)
    )
    return not usual


def _class_name(t: torch.Tensor) -> str:
    return f"{type(t).__module__}.{type(t).__qualname__}"


def check_same(
    op: str, first: str, a: torch.Tensor, name: str, t: torch.Tensor | None, *, dtype: bool = False
) -> None:
    """Raise ValueError unless t is on a's device, and with ``dtype`` TypeError unless dtypes match.

    None passes.
    """
    if t is None:
        return
    if t.device != a.device:
        raise ValueError(
            f"{op}: {name} is on {t.device} but {first} is on {a.device}; move one of them"
        )
    if dtype and t.dtype != a.dtype:
        raise TypeError(f"{op}: {name} is {t.dtype} but {first} is {a.dtype}; cast one of them")


def looks_at_values(device: torch.device) -> bool:
    """Return true if an op checks tensor values (lengths, offsets, targets).

    The CPU always checks. A GPU, which must synchronize, checks with PYTRANSFORMER_CHECK=1. Without
    it GPU kernels clamp invalid values, so that no address leaves its tensor.
    """
    return device.type == "cpu" or os.environ.get("PYTRANSFORMER_CHECK", "0") not in ("", "0")


def unusual_layout(t: torch.Tensor) -> str | None:
    """Return the layout of a tensor that is not dense (nested, sparse_coo, …), else None."""
    if t.is_nested:
        return "nested"
    return (
        None
        if t.layout is torch.strided
        else str(t.layout).removeprefix("torch.").removeprefix("_")
    )


def alike(*tensors: Any) -> bool:
    """Return true if all are plain dense tensors of one supported dtype on one device.

    This is a fast test for the usual case. If it fails, the full checks decide.
    """
    first = tensors[0]
    if type(first) not in _TENSORS:
        return False
    dtype, device, strided = first.dtype, first.device, torch.strided
    for t in tensors:
        if (
            type(t) not in _TENSORS
            or t.dtype != dtype
            or t.device != device
            or t.layout is not strided
            or t.is_nested
        ):
            return False
    return dtype in FLOATING


def check_number(op: str, name: str, value: Any, *, positive: bool = False) -> float:
    """Return the value as a finite float.

    NumPy scalars and 0-dimensional tensors are numbers, except tensors that require a gradient,
    which scalar arguments do not have.
    """
    if type(value) is float and (
        0.0 < value < math.inf or (not positive and -math.inf < value < math.inf)
    ):
        return value
    if isinstance(value, torch.Tensor) and _is_scalar(value):
        value = value.item()
    if isinstance(value, (torch.Tensor, bool)) or not isinstance(
        value, (numbers.Real, torch.SymFloat, torch.SymInt)
    ):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{op}: {name} must be finite, got {value}")
    if positive and not float(value) > 0:
        raise ValueError(f"{op}: {name} must be greater than 0, got {value}")
    return float(value)


def as_integer(value: Any) -> Any:
    """Return the value as an int or a SymInt, or None if it is not an integer.

    NumPy integers and 0-dimensional integer tensors are integers; a bool is not.
    """
    if type(value) is int:
        return value
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    if isinstance(value, torch.Tensor) and not _is_scalar(value):
        return None
    try:
        return operator.index(value)
    except TypeError:  # a floating tensor
        return None


def check_integer(op: str, name: str, value: Any, low: int = 0) -> Any:
    """Return the value as an int or a SymInt of at least ``low``."""
    found = as_integer(value)
    if found is None or found < low:
        raise ValueError(f"{op}: {name} must be an int >= {low}, got {value!r}")
    return found


def _is_scalar(t: torch.Tensor) -> bool:
    return t.dim() == 0 and not t.requires_grad and t.dtype != torch.bool and not t.is_complex()


def check_unused(op: str, reason: str, **given: tuple[Any, Any]) -> None:
    """Raise ValueError if an argument that has no effect in this call was given.

    Each argument is a pair (value, default), and ``reason`` explains why it has no effect.
    """
    for name, (value, default) in given.items():
        if value is not default and (isinstance(value, torch.Tensor) or value != default):
            raise ValueError(f"{op}: {name} must be left out {reason}, got {value!r}")


def check_choice(op: str, name: str, value: Any, choices: Sequence[Any], hint: str = "") -> None:
    if value not in choices:
        raise ValueError(
            f"{op}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}{hint}"
        )


def dropout_arguments(
    op: str, p: Any, seed: Any, device: torch.device
) -> tuple[float, torch.Tensor | None]:
    """Return p and the seed as a 0-dimensional int64 tensor on the device.

    None draws a seed with a torch op on the tensors' device, so torch.manual_seed, CUDA graphs and
    checkpointing control it.
    """
    if type(p) is float and p == 0.0:
        return p, None
    p = check_number(op, "dropout_p", p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: dropout_p must be between 0 and 1, got {p}")
    if p == 0.0:
        return p, None
    if seed is None:
        return p, torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, torch.Tensor):
        check_tensor(op, "dropout_seed", seed)
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"{op}: dropout_seed must be one int64, got {seed.dtype} of shape {shape_of(seed)}"
            )
        if seed.device != device:
            raise ValueError(
                f"{op}: dropout_seed is on {seed.device} but the input is on {device}; move it"
            )
        return p, seed.reshape(())
    given, seed = seed, as_integer(seed)
    if seed is None:
        raise TypeError(
            f"{op}: dropout_seed must be an int or an int64 tensor, got {type(given).__name__}"
        )
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"{op}: dropout_seed must fit in 64 bits, got {seed}")
    # A copy from the host would synchronize, and a CUDA graph cannot capture one.
    return p, torch.full((), seed, dtype=torch.int64, device=device)


def autocast(device: torch.device, *tensors: _TensorOrNone) -> tuple[_TensorOrNone, ...]:
    """Return the tensors in the current autocast dtype, if autocast is on.

    float64 tensors, as in torch, and 8-bit tensors are unchanged.
    """
    kind = device.type
    if (
        kind != "cpu" and not torch.amp.is_autocast_available(kind)
    ) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    kept = (torch.float64, torch.float8_e4m3fn)

    # a freed tensor passes unchanged, and check_storage refuses it by name
    def cast(t: Any) -> Any:
        as_is = t is None or t.dtype in kept or not t.is_floating_point() or is_freed(t)
        return t if as_is else t.to(dtype)

    return tuple(map(cast, tensors))


def empty_in_order(
    like: torch.Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return an uninitialized dense tensor with like's memory order, last dimension innermost.

    The default shape is like's. A (B, H, L, D) view of (B, L, H, D) memory gives another such view,
    so that a model never copies. Broadcast dimensions of ``like`` (stride 0) count as the
    outermost.
    """
    if like.is_contiguous():
        if shape is None:
            return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
        return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
    strides = like.stride()
    order = sorted(range(like.dim() - 1), key=lambda d: -strides[d] if strides[d] else -math.inf)
    order.append(like.dim() - 1)
    return torch.empty_permuted(
        like.shape if shape is None else shape, order, dtype=dtype or like.dtype, device=like.device
    )


def last_contiguous(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a contiguous last dimension.

    A copy, if needed, has the same memory order.
    """
    if t.stride(-1) == 1 or t.size(-1) <= 1:
        return t
    return empty_in_order(t).copy_(t)


def matrix(t: torch.Tensor) -> torch.Tensor:
    """Return (rows, columns) with contiguous columns, a view if the strides permit one."""
    return last_contiguous(t).reshape(-1, t.shape[-1])


@contextlib.contextmanager
def as_written(device: torch.device) -> Iterator[None]:
    """Run library products in the given dtypes, with float32 sums and without a graph."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _whole_sums(device):
        yield


@contextlib.contextmanager
def _whole_sums(device: torch.device) -> Iterator[None]:
    """Disable 16-bit rounding of partial sums on a GPU.

    By default 16-bit products may round parts of long sums to 16 bits, beyond the promised bound.
    """
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    flags = torch.backends.cuda.matmul
    before = {name: getattr(flags, name) for name in names} if device.type == "cuda" else {}
    changed = {name: value for name, value in before.items() if value}
    for name in changed:
        setattr(flags, name, False)
    try:
        yield
    finally:
        for name, value in changed.items():
            setattr(flags, name, value)


def is_sharded(inputs: Sequence[Any]) -> bool:
    """Return true if an input is a DTensor; none exists before its module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(value, module.DTensor) for value in inputs)


def whole(t: torch.Tensor) -> torch.Tensor:
    """Return a DTensor as a plain tensor with all its shards."""
    full: torch.Tensor = t.full_tensor() if is_sharded((t,)) else t  # type: ignore[attr-defined]
    return full
