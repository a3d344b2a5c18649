# SPDX-License-Identifier: Apache-2.0
"""One decoding step before attention: norm and rotary positions, key and value into the cache.

See docs/ops/rotary.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..reference._rotary import append_kv_forward
from ..reference.eight_bit import LIMITS, dequantize_kv
from ._backends.cpu import rotary as cpu
from ._backends.cuda import rotary as cuda
from ._backends.triton import rotary as triton
from ._core import fast_path
from ._core.op import Op
from ._core.registry import check_backend
from ._core.tensors import (
    check_number,
    check_same,
    check_tensor,
    check_unused,
    empty_in_order,
    is_sharded,
    shape_of,
)
from ._problem.rotary import check_positions
from .rotary import EPS, check_integers, check_tables, check_weight
from .rotary_positions import RotaryPositions


class KeyValues(NamedTuple):
    """A cache of keys and values.

    Key j of sequence b is ``key[b, :, j]``, or with a page_table
    ``key[page_table[b, j // page_size], :, j % page_size]``.

    Attributes:
        key: (B, Hkv, max_length, D), or pools (num_pages, Hkv, page_size, D).
        value: likewise, (…, Dv).
        page_table: (B, pages) int64 or int32, or None.
        key_scale, value_scale: float32, (B, Hkv, max_length) or (num_pages, Hkv, page_size), for
            caches in float8_e4m3fn or int8; None for every other dtype.
            :func:`pytransformer.attention` takes them.
    """

    key: torch.Tensor
    value: torch.Tensor
    page_table: torch.Tensor | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def stored(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors that a write changes: key, value, and the scales if there are any."""
        return tuple(
            t for t in (self.key, self.value, self.key_scale, self.value_scale) if t is not None
        )

    @property
    def numbers(self) -> tuple[torch.Tensor, ...]:
        """Return ``stored``, with float8 as int8 views, which every torch copies by index."""
        return tuple(
            t.view(torch.int8) if t.dtype == torch.float8_e4m3fn else t for t in self.stored
        )

    @property
    def scales(self) -> dict[str, torch.Tensor]:
        """Return the keywords of :func:`pytransformer.attention` that an 8-bit cache needs."""
        both = {"key_scale": self.key_scale, "value_scale": self.value_scale}
        return {name: t for name, t in both.items() if t is not None}

    @staticmethod
    def empty(
        key: torch.Tensor,
        value: torch.Tensor,
        rows: tuple[int, int],
        dtype: torch.dtype | None = None,
    ) -> KeyValues:
        """Return an uninitialized cache for keys and values like these, (B, Hkv, L, D).

        ``rows`` is its first and third dimension. ``dtype`` is float8_e4m3fn or int8; None means
        the tensors' dtype.
        """
        shapes = [(rows[0], t.shape[1], rows[1]) for t in (key, value)]
        caches = [
            t.new_empty(*shape, t.shape[3], dtype=dtype) for t, shape in zip((key, value), shapes)
        ]
        eight = dtype in LIMITS
        scales = [
            t.new_empty(shape, dtype=torch.float32) if eight else None
            for t, shape in zip((key, value), shapes)
        ]
        return KeyValues(caches[0], caches[1], None, scales[0], scales[1])


def _written(named: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the cached keys and values, dequantized if they are in eight bits."""
    cache = named["cache"]
    if cache.key_scale is None:
        return {"key_cache": cache.key, "value_cache": cache.value}
    both = ((cache.key, cache.key_scale), (cache.value, cache.value_scale))
    return dict(
        zip(("key_cache", "value_cache"), (dequantize_kv(rows, scale) for rows, scale in both))
    )


append_kv_op = Op(
    "append_kv",
    arguments=(
        "Tensor query, Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache,"
        " Tensor? page_table, Tensor(c!)? key_scale, Tensor(d!)? value_scale, Tensor positions,"
        " Tensor? cos, Tensor? sin, Tensor? q_norm, Tensor? k_norm, bool interleaved, float eps,"
        " float weight_offset"
    ),
    # torch and the code that handles ops expect a tuple of at least two outputs
    outputs=("out", "nothing"),
    differentiable_outputs=0,
    differentiable=(),
    saved=(),
    empty_outputs=lambda a: (empty_in_order(a.query), a.query.new_empty(0)),
    family="rotary",
)
append_kv_op.written = _written


def append_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: KeyValues,
    positions: torch.Tensor,
    *,
    rotary: RotaryPositions | tuple[torch.Tensor, torch.Tensor] | None = None,
    interleaved: bool = False,
    dims: int | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = EPS,
    weight_offset: float = 0.0,
    backend: str | None = None,
    strict: bool = False,
) -> torch.Tensor:
    """Normalize and rotate query and key, and write key and value into the cache, in one pass.

    The norm and the rotation are as in :func:`rotary`. The call replaces all steps between the
    projections and attention.

    Args:
        query: (B, Hq, L, D), float32, bfloat16, float16 or float64; any strides.
        key, value: (B, Hkv, L, D) and (B, Hkv, L, Dv), of query's dtype.
        cache: :class:`KeyValues` of that dtype, written in place, or in eight bits, quantized as by
            :func:`quantize_kv`. If two keys have the same position, either may remain.
        positions: (B, L) int64 or int32. A negative position is padding and writes nothing.
        rotary: the angles of the positions, or their tables (cos, sin), which all layers share;
            None disables the rotation.
        interleaved: the layout of the pairs with tables; :class:`RotaryPositions` sets its layout
            itself.
        dims: number of rotated columns; required if the tables have fewer columns than D.
        q_norm, k_norm: (D,), the weights of the RMS norms over D, before the rotation; None
            disables a norm.
        eps, weight_offset: parameters of the norms; Gemma's weight_offset is 1.
        backend, strict: as in :func:`rotary`.

    Returns:
        The query for attention, in query's shape, dtype and memory order.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it. On the CPU, or with
            PYTRANSFORMER_CHECK=1, also for a position or page outside the cache. GPU kernels do not
            write such a key.
        RuntimeError: the cache was created in inference mode and the call is outside it, as for
            PyTorch's in-place updates.
        BackendError: a forced backend does not support the call, or ``strict`` and only the
            reference supports it.
    """
    if not torch.compiler.is_compiling():
        found = fast_path.entries.append_kv(
            query,
            key,
            value,
            cache,
            positions,
            rotary,
            interleaved,
            dims,
            q_norm,
            k_norm,
            eps,
            weight_offset,
            backend,
            strict,
        )
        if found is not NotImplemented:
            return found
    prepared = _prepare(
        query, key, value, cache, positions, rotary=rotary, interleaved=interleaved, dims=dims,
        q_norm=q_norm,
        k_norm=k_norm, eps=eps, weight_offset=weight_offset, backend=backend, strict=strict,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        return append_kv_op(*prepared)[0]
    if not torch.is_inference_mode_enabled() and any(t.is_inference() for t in cache.stored):
        raise RuntimeError(
            "append_kv: cache must not hold inference tensors outside torch.inference_mode(); make"
            " the cache outside of it, or call inside"
        )
    out = append_kv_op(*prepared)[0]
    torch.autograd.graph.increment_version([t for t in cache.stored if not t.is_inference()])
    return out


def _prepare(
    query: Any,
    key: Any,
    value: Any,
    cache: Any,
    positions: Any,
    *,
    rotary: Any = None,
    interleaved: Any = False,
    dims: Any = None,
    q_norm: Any = None,
    k_norm: Any = None,
    eps: Any = EPS,
    weight_offset: Any = 0.0,
    backend: Any = None,
    strict: bool = False,
) -> tuple[Any, str | None, bool]:
    op = "append_kv"
    _check_rows(query, key, value)
    _check_cache(query, key, value, cache)
    check_integers(op, "positions", positions, "query", query, shared=False)
    cos = sin = None
    if isinstance(rotary, RotaryPositions):
        check_unused(op, "beside RotaryPositions", dims=(dims, None))
        if not rotary.interleaved:
            check_unused(
                op, "beside RotaryPositions with another layout", interleaved=(interleaved, False)
            )
        interleaved = rotary.interleaved
        if rotary.dims > query.shape[3]:
            raise ValueError(
                f"{op}: rotary turns {rotary.dims} dimensions, and query's last dimension is"
                f" {query.shape[3]}"
            )
        work = torch.float64 if query.dtype == torch.float64 else torch.float32
        cos, sin = rotary.tables(positions, dtype=work)
    elif rotary is not None:
        if not isinstance(rotary, tuple) or len(rotary) != 2:
            raise TypeError(
                f"{op}: rotary must be a RotaryPositions, a pair (cos, sin) or None, got"
                f" {type(rotary).__name__}"
            )
        cos, sin = check_tables(op, "query", query, *rotary, dims)
    else:
        check_unused(op, "without rotary", interleaved=(interleaved, False), dims=(dims, None))
    if q_norm is None and k_norm is None:
        check_unused(
            op, "without q_norm and k_norm", eps=(eps, EPS), weight_offset=(weight_offset, 0.0)
        )
    check_weight(op, "q_norm", q_norm, "query", query)
    check_weight(op, "k_norm", k_norm, "key", key)
    check_backend(op, backend)
    numbers = (check_number(op, "eps", eps), check_number(op, "weight_offset", weight_offset))
    a = append_kv_op.Arguments(
        query, key, value, cache.key, cache.value, cache.page_table, cache.key_scale,
        cache.value_scale, positions.long(), cos, sin,
        q_norm, k_norm, bool(interleaved), *numbers,
    )  # fmt: skip
    if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in a):
        raise ValueError(
            f"{op}: gives no gradient, since what a cache holds has none; call it under"
            " torch.no_grad(), or train with pytransformer.rotary(x, positions, weight=…) and the"
            " keys themselves"
        )
    if is_sharded(a):
        raise TypeError(f"{op}: does not support DTensors; give each rank's heads by to_local()")
    return a, backend, bool(strict)


append_kv_op.prepare = _prepare
fast_path.facts["KeyValues"] = KeyValues


def _check_rows(query: Any, key: Any, value: Any) -> None:
    op = "append_kv"
    check_tensor(op, "query", query, floating=True, ndim=4)
    for name, t in (("key", key), ("value", value)):
        check_tensor(op, name, t, floating=True, ndim=4)
        check_same(op, "query", query, name, t, dtype=True)
        if t.shape[0] != query.shape[0] or t.shape[2] != query.shape[2]:
            wanted = f"({query.shape[0]}, heads, {query.shape[2]}, …)"
            raise ValueError(
                f"{op}: {name} must have query's batch and length, {wanted}, got {shape_of(t)}"
            )
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"{op}: key has {key.shape[1]} heads and value {value.shape[1]}")
    if key.shape[3] != query.shape[3]:
        raise ValueError(
            f"{op}: key's last dimension is {key.shape[3]} and query's {query.shape[3]}"
        )


def _check_cache(query: Any, key: Any, value: Any, cache: Any) -> None:
    op = "append_kv"
    if not isinstance(cache, tuple) or len(cache) not in (2, 3, 5):
        raise TypeError(
            f"{op}: cache must be a KeyValues(key, value, page_table=None), got"
            f" {type(cache).__name__}"
        )
    table = cache[2] if len(cache) > 2 else None
    if not isinstance(cache, KeyValues):
        raise TypeError(
            f"{op}: cache must be a KeyValues, got {type(cache).__name__}:"
            " pytransformer.KeyValues(*cache)"
        )
    for name, t, rows in (("key", cache.key, key), ("value", cache.value, value)):
        eight = isinstance(t, torch.Tensor) and t.dtype in LIMITS
        check_tensor(op, f"cache.{name}", t, floating=not eight, ndim=4)
        check_same(op, "query", query, f"cache.{name}", t, dtype=not eight)
        first = cache.key.shape[0] if table is not None else query.shape[0]
        wanted = (first, rows.shape[1], cache.key.shape[2], rows.shape[3])
        if tuple(t.shape) != wanted:
            raise ValueError(f"{op}: cache.{name} must have the shape {wanted}, got {shape_of(t)}")
        _check_own_memory(name, t)
        if t.stride(3) != 1 and t.shape[3] > 1:
            raise ValueError(
                f"{op}: the last dimension of cache.{name} must be contiguous: a copy would not be"
                " the cache"
            )
    if cache.key is cache.value:
        raise ValueError(f"{op}: cache.key and cache.value must be two tensors")
    _check_scales(query, cache)
    if table is not None:
        check_tensor(op, "cache.page_table", table, ndim=2)
        check_same(op, "query", query, "cache.page_table", table)
        if table.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"{op}: cache.page_table must be int64 or int32, got {table.dtype}")
        if table.shape[0] != query.shape[0]:
            raise ValueError(
                f"{op}: cache.page_table must have a row for each of {query.shape[0]} sequences,"
                f" got {shape_of(table)}"
            )


def _check_own_memory(name: str, t: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape)):
        raise ValueError(
            f"append_kv: cache.{name} is expanded, so that one number has several places; give it"
            " memory of its own"
        )


def _check_scales(query: torch.Tensor, cache: KeyValues) -> None:
    op = "append_kv"
    check_same(op, "cache.key", cache.key, "cache.value", cache.value, dtype=True)
    eight = cache.key.dtype in LIMITS
    for name, t in (("key_scale", cache.key_scale), ("value_scale", cache.value_scale)):
        if not eight:
            if t is not None:
                raise ValueError(
                    f"{op}: cache.{name} belongs to a cache in float8_e4m3fn or int8, got"
                    f" {cache.key.dtype}"
                )
            continue
        wanted = tuple(cache.key.shape[:3])
        if t is None:
            raise ValueError(
                f"{op}: a cache in {cache.key.dtype} needs {name}, float32 of the shape {wanted}"
            )
        check_tensor(op, f"cache.{name}", t)
        check_same(op, "query", query, f"cache.{name}", t)
        if t.dtype != torch.float32 or tuple(t.shape) != wanted:
            raise ValueError(
                f"{op}: cache.{name} must be float32 of the shape {wanted}, got {t.dtype}"
                f" {shape_of(t)}; each row that is written gets a scale of its own"
            )
        _check_own_memory(name, t)
    if eight and query.dtype == torch.float64:
        raise TypeError(
            f"{op}: into a cache in {cache.key.dtype} go float32, bfloat16 and float16, got"
            f" {query.dtype}"
        )
    if eight and cache.key_scale is cache.value_scale:
        raise ValueError(f"{op}: cache.key_scale and cache.value_scale must be two tensors")


append_kv_op.add_reference(
    append_kv_forward, extra_bytes=lambda a: 4 * 4 * a.query.numel(), check_values=check_positions
)
append_kv_op.backend(cpu.append_backend(append_kv_op))
append_kv_op.backend(cuda.append_backend(append_kv_op))
append_kv_op.backend(triton.append_backend(append_kv_op))
