# SPDX-License-Identifier: Apache-2.0
"""Rotary positions with an optional RMS norm per head: public function and raw op.

See docs/ops/rotary.md.
"""

from __future__ import annotations

from typing import Any

import torch

from ..reference._rotary import rotary_forward
from ._backends.cpu import rotary as cpu
from ._backends.cuda import rotary as cuda
from ._backends.triton import rotary as triton
from ._core import fast_path
from ._core.op import Op
from ._core.registry import check_backend
from ._core.tensors import (
    as_integer,
    check_number,
    check_same,
    check_tensor,
    check_unused,
    empty_in_order,
    shape_of,
)
from .rotary_positions import RotaryPositions, RotaryScaling, known_frequencies, tables

BASE, EPS = 10000.0, 1e-6  # the defaults; csrc/fast_path/rotary.cpp repeats them


def _empty_rotary(a: Any) -> tuple[torch.Tensor, ...]:
    statistics = torch.float64 if a.x.dtype == torch.float64 else torch.float32
    return empty_in_order(a.x), a.x.new_empty(
        (0,) if a.weight is None else a.x.shape[:3], dtype=statistics
    )


rotary_op = Op(
    "rotary",
    arguments=(
        "Tensor x, Tensor? cos, Tensor? sin, Tensor? weight, bool interleaved, float eps, float"
        " weight_offset"
    ),
    outputs=("out", "rstd"),
    differentiable_outputs=1,
    differentiable=("x", "weight"),
    saved=("rstd",),
    empty_outputs=_empty_rotary,
)


def rotary(
    x: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    base: float = BASE,
    frequencies: torch.Tensor | None = None,
    scaling: RotaryScaling | None = None,
    dims: int | None = None,
    interleaved: bool = False,
    weight: torch.Tensor | None = None,
    eps: float = EPS,
    weight_offset: float = 0.0,
    backend: str | None = None,
    strict: bool = False,
) -> torch.Tensor:
    """Rotate pairs of a head's columns by ``position * frequency``, ``out = y cos + r(y) sin``.

    ``y`` is x, or with a weight its RMS norm over D,
    ``x / sqrt(mean(x^2) + eps) * (weight + weight_offset)``, in the same pass. Qwen 3 and Gemma 3
    normalize queries and keys this way.

    Args:
        x: (B, H, L, D), float32, bfloat16, float16 or float64; any strides.
        positions: (B, L) or (L,), int64 or int32; negative positions rotate backwards. Exclusive
            with cos and sin.
        cos, sin: (B, L, dims), (1, L, dims) or (L, dims), any floating dtype, one entry per column,
            as in transformers' models and from :meth:`RotaryPositions.tables`. No gradients.
        base: base of the frequencies ``base^(-2 i / dims)``.
        frequencies: (dims / 2,) floating, radians per position; replaces base, scaling and dims.
        scaling: for sequences longer than the trained length.
        dims: number of leading columns that rotate; default all. Required with narrower tables.
        interleaved: pairs are (2i, 2i + 1), as in GPT-J; otherwise (i, i + dims / 2), as in Llama.
        weight: (D,), any floating dtype: weight of the norm; None disables it.
        eps, weight_offset: parameters of the norm, which need a weight; Gemma's weight_offset is 1.
        backend: force ``"cuda"``, ``"triton"``, ``"cpu"`` or ``"reference"``; raises if
            unsupported.
        strict: raise instead of running on the reference.

    Returns:
        x's shape, dtype and memory order. Angles are float64, all else float32 (float64 for
        float64), rounded once.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        BackendError: a forced backend does not support the call, or ``strict`` and only the
            reference supports it.

    Source: Su et al., "RoFormer: enhanced transformer with rotary position embedding" (2021).
    """
    if not torch.compiler.is_compiling():
        found = fast_path.entries.rotary(
            x,
            positions,
            cos,
            sin,
            base,
            frequencies,
            scaling,
            dims,
            interleaved,
            weight,
            eps,
            weight_offset,
            backend,
            strict,
        )
        if found is not NotImplemented:
            return found
    prepared = _prepare(
        x, positions, cos=cos, sin=sin, base=base, frequencies=frequencies, scaling=scaling,
        dims=dims, interleaved=interleaved,
        weight=weight, eps=eps, weight_offset=weight_offset, backend=backend, strict=strict,
    )  # fmt: skip
    return rotary_op(*prepared)[0]


def _prepare(
    x: Any,
    positions: Any = None,
    *,
    cos: Any = None,
    sin: Any = None,
    base: Any = BASE,
    frequencies: Any = None,
    scaling: Any = None,
    dims: Any = None,
    interleaved: Any = False,
    weight: Any = None,
    eps: Any = EPS,
    weight_offset: Any = 0.0,
    backend: Any = None,
    strict: bool = False,
) -> tuple[Any, str | None, bool]:
    op = "rotary"
    check_tensor(op, "x", x, floating=True, ndim=4)
    if (positions is None) == (cos is None) or (positions is not None and sin is not None):
        raise ValueError(f"{op}: give positions, or cos and sin, and not both")
    if positions is None:
        check_unused(
            op,
            "beside cos and sin",
            base=(base, BASE),
            frequencies=(frequencies, None),
            scaling=(scaling, None),
        )
        cos, sin = check_tables(op, "x", x, cos, sin, dims)
    else:
        check_integers(op, "positions", positions, "x", x)
        if frequencies is None:
            turning = RotaryPositions(
                _turning(op, x, dims),
                check_number(op, "base", base, positive=True),
                scaling,
                bool(interleaved),
            )
            cos, sin = turning.tables(positions, dtype=_table_dtype(x))
        else:
            check_tensor(op, "frequencies", frequencies, floating=True, ndim=1)
            check_same(op, "x", x, "frequencies", frequencies)
            check_unused(
                op,
                "beside frequencies",
                base=(base, BASE),
                scaling=(scaling, None),
                dims=(dims, None),
            )
            _turning(op, x, 2 * len(frequencies), "2 * len(frequencies)")
            cos, sin = tables(
                positions, frequencies.detach(), bool(interleaved), 1.0, _table_dtype(x)
            )
        cos, sin = (t[None] if t.dim() == 2 else t for t in (cos, sin))
    check_weight(op, "weight", weight, "x", x)
    if weight is None:
        check_unused(op, "without weight", eps=(eps, EPS), weight_offset=(weight_offset, 0.0))
    check_backend(op, backend)
    numbers = (check_number(op, "eps", eps), check_number(op, "weight_offset", weight_offset))
    return (
        rotary_op.Arguments(x, cos, sin, weight, bool(interleaved), *numbers),
        backend,
        bool(strict),
    )


rotary_op.prepare = _prepare
fast_path.facts |= {
    "RotaryPositions": RotaryPositions,
    "RotaryScaling": RotaryScaling,
    "rotary_frequencies": known_frequencies,
}


# ---- checks, shared with append_kv


def _table_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _turning(op: str, x: torch.Tensor, dims: Any, name: str = "dims") -> int:
    found = x.shape[3] if dims is None else as_integer(dims)
    if found is None or found <= 0 or found % 2 or found > x.shape[3]:
        raise ValueError(
            f"{op}: {name} must be an even number from 2 to x's last dimension, {x.shape[3]}, got"
            f" {dims!r}"
        )
    return found


def check_integers(
    op: str, name: str, t: Any, first: str, x: torch.Tensor, *, shared: bool = True
) -> None:
    """Raise unless ``t`` holds integer positions (batch, length) of ``x``.

    ``shared`` also accepts one row of positions for all sequences.
    """
    check_tensor(op, name, t)
    check_same(op, first, x, name, t)
    if t.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: {name} must be int64 or int32, got {t.dtype}")
    whole, one = (x.shape[0], x.shape[2]), (x.shape[2],)
    if tuple(t.shape) != whole and not (shared and tuple(t.shape) in (one, (1, *one))):
        wanted = f"{whole} or {one}" if shared else f"{whole}"
        raise ValueError(
            f"{op}: {name} must have the shape {wanted}, (batch, length) of {first}, got"
            f" {shape_of(t)}"
        )


def check_tables(
    op: str, first: str, x: torch.Tensor, cos: Any, sin: Any, dims: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin as (B or 1, L, turned).

    ``dims`` must confirm tables narrower than x, because FlashAttention's tables have one column
    per pair, half of x's columns.
    """
    for name, t in (("cos", cos), ("sin", sin)):
        check_tensor(op, name, t, floating=True)
        check_same(op, first, x, name, t)
        batches = (x.shape[0], 1)
        if (
            t.dim() not in (2, 3)
            or t.shape[-2] != x.shape[2]
            or (t.dim() == 3 and t.shape[0] not in batches)
        ):
            raise ValueError(
                f"{op}: {name} must have the shape ({x.shape[0]} or 1, {x.shape[2]}, dims) or"
                f" ({x.shape[2]}, dims), got {shape_of(t)}"
            )
        if torch.is_grad_enabled() and t.requires_grad:
            raise ValueError(
                f"{op}: {name} has no gradient; detach() it, or turn x by plain PyTorch where"
                " angles are learned"
            )
    if cos.shape != sin.shape:
        raise ValueError(
            f"{op}: cos and sin must have one shape, got {shape_of(cos)} and {shape_of(sin)}"
        )
    width = _turning(op, x, cos.shape[-1], "the last dimension of cos")
    if width != (x.shape[3] if dims is None else as_integer(dims)):
        raise ValueError(
            f"{op}: cos must have {x.shape[3] if dims is None else dims} columns, got {width}; give"
            f" dims={width} if so many columns turn, or repeat tables that have a column for each"
            " pair: torch.cat((cos, cos), -1)"
        )
    return (cos, sin) if cos.dim() == 3 else (cos[None], sin[None])


def check_weight(op: str, name: str, weight: Any, first: str, x: torch.Tensor) -> None:
    if weight is None:
        return
    check_tensor(op, name, weight, floating=True)
    check_same(op, first, x, name, weight)
    if tuple(weight.shape) != (x.shape[3],):
        raise ValueError(
            f"{op}: {name} must have the shape ({x.shape[3]},), the last dimension of {first}, got"
            f" {shape_of(weight)}"
        )


# ---- backends


def _reference_bytes(a: Any) -> int:
    """Return the bytes of y, its rotated pairs and the two products."""
    return 4 * a.x.numel() * (8 if a.x.dtype == torch.float64 else 4)


rotary_op.add_reference(rotary_forward, extra_bytes=_reference_bytes)
rotary_op.backend(cpu.backend(rotary_op))
rotary_op.backend(cuda.backend(rotary_op))
rotary_op.backend(triton.backend(rotary_op))
