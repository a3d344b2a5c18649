# SPDX-License-Identifier: Apache-2.0
"""Layer norm, RMS norm and residual + dropout + norm: public functions and raw ops.

See docs/ops/layer_norm.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch

from ..reference._layer_norm import add_norm_forward, layer_norm_forward, rms_norm_forward
from ._backends.cpu import layer_norm as cpu
from ._backends.cuda import layer_norm as cuda
from ._backends.triton import layer_norm as triton
from ._core import fast_path
from ._core.op import Op
from ._core.registry import check_backend
from ._core.tensors import (
    alike,
    as_integer,
    check_choice,
    check_number,
    check_same,
    check_tensor,
    dropout_arguments,
    empty_in_order,
    shape_of,
)
from .options import NormKind

KINDS = get_args(NormKind)
# ``dims`` is the number of normalized trailing dimensions. mean and rstd have the leading shape,
# float32 (float64 for float64). ``row_start`` is the absolute index of x's first row, over its
# flattened leading dimensions; only dropout reads it.


def _statistics(h: torch.Tensor, dims: int, *, rms: bool = False) -> torch.Tensor:
    dtype = torch.float64 if h.dtype == torch.float64 else torch.float32
    return h.new_empty((0,) if rms else h.shape[: h.dim() - dims], dtype=dtype)


def _empty_layer_norm(a: Any) -> tuple[torch.Tensor, ...]:
    return empty_in_order(a.x), _statistics(a.x, a.dims), _statistics(a.x, a.dims)


def _empty_rms_norm(a: Any) -> tuple[torch.Tensor, ...]:
    return empty_in_order(a.x), _statistics(a.x, a.dims)


def _empty_add_norm(a: Any) -> tuple[torch.Tensor, ...]:
    stream = a.x if a.residual is None else a.residual
    residual_out = empty_in_order(stream)
    return (
        empty_in_order(a.x),
        residual_out,
        _statistics(stream, a.dims, rms=a.rms),
        _statistics(stream, a.dims),
    )


layer_norm_op = Op(
    "layer_norm",
    arguments="Tensor x, Tensor? weight, Tensor? bias, int dims, float eps",
    outputs=("out", "mean", "rstd"),
    differentiable_outputs=1,
    differentiable=("x", "weight", "bias"),
    saved=("mean", "rstd"),
    empty_outputs=_empty_layer_norm,
)
rms_norm_op = Op(
    "rms_norm",
    arguments="Tensor x, Tensor? weight, int dims, float eps",
    outputs=("out", "rstd"),
    differentiable_outputs=1,
    differentiable=("x", "weight"),
    saved=("rstd",),
    empty_outputs=_empty_rms_norm,
    family="layer_norm",
)
add_norm_op = Op(
    "add_norm",
    arguments=(
        "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? dropout_seed, int dims,"
        " SymInt row_start, float eps, float dropout_p, bool rms"
    ),
    outputs=("normed", "residual_out", "mean", "rstd"),
    differentiable_outputs=2,
    differentiable=("x", "residual", "weight", "bias"),
    saved=("residual_out", "mean", "rstd"),
    empty_outputs=_empty_add_norm,
    family="layer_norm",
    returned=2,
)


# ---- public functions


def layer_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
    strict: bool = False,
) -> torch.Tensor:
    """Compute layer norm, ``(x - mean) / sqrt(var + eps) * weight + bias``, over trailing
    dimensions.

    Args:
        x: (..., *normalized_shape), float32, bfloat16, float16 or float64; any strides.
        normalized_shape: the trailing dimensions, or one int.
        weight, bias: of shape normalized_shape, any floating dtype; None means ones and zeros.
        eps: added to the (biased) variance.
        backend: force one backend, such as ``"cpu"``; raises if it cannot compute the call.
        strict: raise instead of running on the reference.

    Returns:
        x's shape, dtype and memory order. Statistics are float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        BackendError: a forced backend does not support the call, or ``strict`` and only the
            reference supports it.

    Source: Ba, Kiros, Hinton, "Layer Normalization" (2016).
    """
    if not torch.compiler.is_compiling():
        found = fast_path.entries.layer_norm(
            x, normalized_shape, weight, bias, eps, backend, strict
        )
        if found is not NotImplemented:
            return found
    return layer_norm_op(
        *_prepare_layer_norm(x, normalized_shape, weight, bias, eps, backend=backend, strict=strict)
    )[0]


def rms_norm(
    x: torch.Tensor,
    normalized_shape: int | Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    backend: str | None = None,
    strict: bool = False,
) -> torch.Tensor:
    """Compute RMS norm over the trailing dimensions, ``x / sqrt(mean(x^2) + eps) * weight``.

    Arguments, result and errors are as in :func:`layer_norm`; ``eps=None`` means
    ``torch.finfo(x.dtype).eps``, as in torch.nn.RMSNorm.

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019).
    """
    if not torch.compiler.is_compiling():
        found = fast_path.entries.rms_norm(x, normalized_shape, weight, eps, backend, strict)
        if found is not NotImplemented:
            return found
    return rms_norm_op(
        *_prepare_rms_norm(x, normalized_shape, weight, eps, backend=backend, strict=strict)
    )[0]


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    eps: float | None = 1e-5,
    dropout_p: float = 0.0,
    dropout_seed: int | torch.Tensor | None = None,
    kind: NormKind = "layer",
    backend: str | None = None,
    strict: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute residual connection, dropout and norm in one pass over memory.

    ``residual_out = residual + dropout(x)`` in residual's dtype; ``normed`` is the norm of
    ``residual_out`` as stored.

    Args:
        x: (..., *weight.shape), float32, bfloat16, float16 or float64; any strides. Without weight
            the last dimension is normalized.
        residual: x's shape, any floating dtype (often float32 with bfloat16 branches), or None for
            zero.
        weight, bias: any floating dtype, or None.
        eps: as in :func:`layer_norm`; None means the eps of residual_out's dtype.
        dropout_p: probability of dropping an element of x. The same seed drops the same elements on
            every backend.
        dropout_seed: int or int64 tensor; drawn from torch's generator if None.
        kind: ``"layer"`` or ``"rms"``.
        backend, strict: as in :func:`layer_norm`.

    Returns:
        (normed, residual_out): normed in x's dtype, residual_out in residual's dtype, or x's
        without a residual.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        BackendError: a forced backend does not support the call, or ``strict`` and only the
            reference supports it.
    """
    if not torch.compiler.is_compiling():
        found = fast_path.entries.add_norm(
            x, residual, weight, bias, eps, dropout_p, dropout_seed, kind, backend, strict
        )
        if found is not NotImplemented:
            return found
    prepared = _prepare_add_norm(
        x,
        residual,
        weight,
        bias,
        eps=eps,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        kind=kind,
        backend=backend,
        strict=strict,
    )
    outputs = add_norm_op(*prepared)
    return outputs[0], outputs[1]


# ---- checks and lowering


def _prepare_layer_norm(
    x: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    *,
    backend: Any = None,
    strict: bool = False,
) -> tuple[Any, str | None, bool]:
    op = "layer_norm"
    check_tensor(op, "x", x, floating=True)
    shape = _trailing(op, x, normalized_shape)
    _check_parameters(op, x, shape, weight, bias)
    check_backend(op, backend)
    x, weight, bias = _as_autocast_norm(x, weight, bias)
    return (
        layer_norm_op.Arguments(x, weight, bias, len(shape), check_number(op, "eps", eps)),
        backend,
        bool(strict),
    )


def _prepare_rms_norm(
    x: Any,
    normalized_shape: Any,
    weight: Any = None,
    eps: Any = None,
    *,
    backend: Any = None,
    strict: bool = False,
) -> tuple[Any, str | None, bool]:
    op = "rms_norm"
    check_tensor(op, "x", x, floating=True)
    shape = _trailing(op, x, normalized_shape)
    _check_parameters(op, x, shape, weight, None)
    check_backend(op, backend)
    x, weight = _as_autocast_norm(x, weight)
    return (
        rms_norm_op.Arguments(x, weight, len(shape), _eps(op, eps, x.dtype)),
        backend,
        bool(strict),
    )


def _prepare_add_norm(
    x: Any,
    residual: Any,
    weight: Any,
    bias: Any = None,
    *,
    eps: Any = 1e-5,
    dropout_p: Any = 0.0,
    dropout_seed: Any = None,
    kind: Any = "layer",
    backend: Any = None,
    strict: bool = False,
) -> tuple[Any, str | None, bool]:
    op = "add_norm"
    check_tensor(op, "x", x, floating=True)
    if residual is not None:
        if not alike(x, residual):
            check_tensor(op, "residual", residual, floating=True)
            check_same(op, "x", x, "residual", residual)
        if residual.shape != x.shape:
            raise ValueError(
                f"{op}: residual must have x's shape {shape_of(x)}, got {shape_of(residual)}"
            )
    if weight is not None:
        check_tensor(op, "weight", weight, floating=True)
        if weight.dim() == 0:
            raise ValueError(
                f"{op}: weight must have the shape of the normalized dimensions, got a number"
            )
    shape = _trailing(op, x, x.shape[-1:] if weight is None else weight.shape, "weight.shape")
    _check_parameters(op, x, shape, weight, bias)
    check_choice(op, "kind", kind, KINDS)
    p, seed = dropout_arguments(op, dropout_p, dropout_seed, x.device)
    check_backend(op, backend)
    x, residual, weight, bias = _as_autocast_norm(x, residual, weight, bias)
    eps = _eps(op, eps, (x if residual is None else residual).dtype)
    return (
        add_norm_op.Arguments(
            x, residual, weight, bias, seed, len(shape), 0, eps, p, kind == "rms"
        ),
        backend,
        bool(strict),
    )


layer_norm_op.prepare = _prepare_layer_norm
rms_norm_op.prepare = _prepare_rms_norm
add_norm_op.prepare = _prepare_add_norm


def _trailing(
    op: str, x: torch.Tensor, normalized_shape: Any, name: str = "normalized_shape"
) -> tuple[int, ...]:
    """Return normalized_shape as a tuple after checking that it is x's trailing shape."""
    last = x.shape[-1:]
    if type(normalized_shape) is int and last == (normalized_shape,):
        return (normalized_shape,)
    if (
        type(normalized_shape) in (tuple, torch.Size)
        and len(normalized_shape) == 1
        and last == normalized_shape
    ):
        return normalized_shape
    one = as_integer(normalized_shape)
    given = normalized_shape if one is None else (one,)
    if isinstance(given, torch.Tensor) or not isinstance(given, Sequence) or isinstance(given, str):
        raise TypeError(
            f"{op}: {name} must be an int or a sequence of ints, got"
            f" {type(normalized_shape).__name__}"
        )
    shape = tuple(n if (size := as_integer(n)) is None else size for n in given)
    if not shape:
        raise ValueError(f"{op}: {name} must have at least one dimension, got ()")
    if len(shape) > x.dim() or tuple(x.shape[x.dim() - len(shape) :]) != shape:
        raise ValueError(
            f"{op}: {name} must be x's trailing shape, got {shape} for x of shape {shape_of(x)}"
        )
    return shape


def _check_parameters(
    op: str, x: torch.Tensor, shape: tuple[int, ...], weight: Any, bias: Any
) -> None:
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None:
            if not alike(x, t):
                check_tensor(op, name, t, floating=True)
                check_same(op, "x", x, name, t)
            if t.shape != shape:
                raise ValueError(
                    f"{op}: {name} must have the normalized shape {shape}, got {shape_of(t)}"
                )


def _eps(op: str, eps: Any, dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if eps is None else check_number(op, "eps", eps)


def _as_autocast_norm(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """Cast as autocast does for F.layer_norm: float32 on CUDA, nothing on the CPU."""
    tensors = (x, *others)
    if x.device.type != "cuda" or not torch.is_autocast_enabled("cuda"):
        return tensors
    return tuple(t if t is None or t.dtype == torch.float64 else t.float() for t in tensors)


# ---- backends


def _reference_bytes(a: Any) -> int:
    """Return the bytes of the centered row, its square and the unrounded result."""
    return 3 * a.x.numel() * (8 if a.x.dtype == torch.float64 else 4)


for _op, _forward in (
    (layer_norm_op, layer_norm_forward),
    (rms_norm_op, rms_norm_forward),
    (add_norm_op, add_norm_forward),
):
    _op.add_reference(_forward, extra_bytes=_reference_bytes)
    _op.backend(cpu.backend(_op))
    _op.backend(cuda.backend(_op))
    _op.backend(triton.backend(_op))
