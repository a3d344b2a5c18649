# SPDX-License-Identifier: Apache-2.0
"""append_kv equals its parts, in caches and pages and in torch.compile; bad input raises.

Random problems are in test_fuzz_ops.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import fast_path
from pytransformer.ops._core.registry import OPS

BACKENDS = ("reference", "cpu")
TURNING = pt.RotaryPositions(12)
pytestmark = pytest.mark.filterwarnings("error")


def _rows(length: int = 3, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return query, key and value of two sequences, with the strides of a model's projections."""
    shapes = ((2, length, 4, 16), (2, length, 2, 16), (2, length, 2, 8))
    return tuple(torch.randn(shape, dtype=dtype).transpose(1, 2) for shape in shapes)


def _cache(room: int = 10, dtype: torch.dtype = torch.float32) -> pt.KeyValues:
    return pt.KeyValues(
        torch.zeros(2, 2, room, 16, dtype=dtype), torch.zeros(2, 2, room, 8, dtype=dtype)
    )


def _pages(dtype: torch.dtype = torch.float32, of: torch.dtype = torch.int32) -> pt.KeyValues:
    table = torch.tensor([[5, 0, 3], [2, 6, 1]], dtype=of)
    return pt.KeyValues(
        torch.zeros(7, 2, 4, 16, dtype=dtype), torch.zeros(7, 2, 4, 8, dtype=dtype), table
    )


@pytest.mark.parametrize("op_backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_append_kv_equals_rotary_and_a_copy(op_backend: str, dtype: torch.dtype) -> None:
    """The query and the keys have the bits of `rotary`, at their positions."""
    (query, key, value), weight = _rows(dtype=dtype), torch.randn(16)
    positions = torch.tensor([[4, 5, 6], [9, -1, 0]])
    cache, paged = _cache(dtype=dtype), _pages(dtype)
    keywords: dict[str, Any] = {
        "rotary": TURNING,
        "k_norm": weight,
        "eps": 1e-5,
        "backend": op_backend,
    }
    out = pt.append_kv(query, key, value, cache, positions, **keywords)
    assert torch.equal(out, pt.append_kv(query, key, value, paged, positions, **keywords))
    assert out.stride() == query.stride() and torch.equal(
        out, pt.rotary(query, positions, dims=12, backend=op_backend)
    )
    turned = pt.rotary(key, positions, dims=12, weight=weight, eps=1e-5, backend=op_backend)
    expected = _cache(dtype=dtype)
    for b, i in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2)):
        expected.key[b, :, positions[b, i]], expected.value[b, :, positions[b, i]] = (
            turned[b, :, i],
            value[b, :, i],
        )
    assert torch.equal(cache.key, expected.key) and torch.equal(cache.value, expected.value)
    assert paged.page_table is not None
    for mine, other in zip(paged[:2], expected[:2]):
        gathered = mine[paged.page_table.long()].transpose(1, 2).flatten(2, 3)
        assert (
            torch.equal(gathered[:, :, :10], other)
            and not gathered[:, :, 10:].any()
            and not mine[4].any()
        )


@pytest.mark.parametrize("op_backend", BACKENDS)
def test_attention_over_appended_rows_equals_the_full_sequence(op_backend: str) -> None:
    query, key, value = _rows(6)
    positions, cache = torch.arange(6).repeat(2, 1), _cache()
    whole = pt.attention(
        pt.rotary(query, positions, dims=12),
        pt.rotary(key, positions, dims=12),
        value,
        causal="top_left",
        backend=op_backend,
    )
    for i in range(6):
        one = [t[:, :, i : i + 1] for t in (query, key, value)]
        step = pt.append_kv(
            *one, cache, positions[:, i : i + 1], rotary=TURNING, backend=op_backend
        )
        lengths = torch.full((2,), i + 1)
        out = pt.attention(
            step, *cache[:2], key_lengths=lengths, causal="bottom_right", backend=op_backend
        )
        torch.testing.assert_close(out, whole[:, :, i : i + 1])


@pytest.mark.parametrize("op_backend", BACKENDS)
def test_rows_are_copied_without_rotary(op_backend: str) -> None:
    (query, key, value), cache = _rows(), _cache()
    out = pt.append_kv(query, key, value, cache, torch.tensor([[0, 1, 2]] * 2), backend=op_backend)
    assert (
        torch.equal(out, query)
        and torch.equal(cache.key[:, :, :3], key)
        and torch.equal(cache.value[:, :, :3], value)
    )
    out = pt.append_kv(
        *(t[:, :, :0] for t in (query, key, value)),
        cache,
        torch.empty(2, 0, dtype=torch.int64),
        backend=op_backend,
    )
    assert out.shape == (2, 4, 0, 16)


@pytest.mark.parametrize("op_backend", BACKENDS)
def test_cache_may_be_a_view(op_backend: str) -> None:
    """In (B, L, H, D) memory of many layers, the rest stays unchanged."""
    store = torch.full((3, 2, 10, 2, 24), 5.0)
    cache = pt.KeyValues(store[1, ..., :16].transpose(1, 2), store[1, ..., 16:].transpose(1, 2))
    (query, key, value), positions = _rows(), torch.tensor([[7, 8, 9], [0, 1, 2]])
    pt.append_kv(query, key, value, cache, positions, backend=op_backend)
    expected = torch.full_like(store, 5.0)
    for b in range(2):
        expected[1, b, positions[b], :, :16], expected[1, b, positions[b], :, 16:] = (
            key[b].transpose(0, 1),
            value[b].transpose(0, 1),
        )
    assert torch.equal(store, expected)


def test_full_length_on_all_threads() -> None:
    query, key, value = _rows(300, torch.bfloat16)
    caches, positions = [], torch.stack([torch.randperm(400)[:300] for _ in range(2)])
    threads = torch.get_num_threads()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            caches.append(_cache(400, torch.bfloat16))
            pt.append_kv(query, key, value, caches[-1], positions, rotary=TURNING, backend="cpu")
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(caches[0].key, caches[1].key) and torch.equal(
        caches[0].value, caches[1].value
    )
    turned = pt.rotary(key, positions, dims=12, backend="cpu")
    assert torch.equal(caches[0].key[1][:, positions[1]], turned[1])


# ---- torch's machinery


@pytest.mark.unpoisoned
@pytest.mark.parametrize("op_backend", BACKENDS)
def test_opcheck(op_backend: str) -> None:
    """The schema declares the writes; fake tensors and functionalization see them."""
    (query, key, value), cache, positions = (
        _rows(),
        _pages(of=torch.int64),
        torch.tensor([[0, 1, 2], [3, -1, 5]]),
    )
    cos, sin = TURNING.tables(positions)
    a = (query, key, value, *cache, positions, cos, sin, torch.ones(16), None, False, 1e-6, 0.0)
    torch.library.opcheck(OPS["append_kv"].fwd, (*a, op_backend, True))


@pytest.mark.unpoisoned
@pytest.mark.parametrize("op_backend", BACKENDS)
def test_compiles_to_one_graph(op_backend: str) -> None:
    """Reads of the cache after the call see the written rows."""

    def step(
        query: Any, key: Any, value: Any, k: Any, v: Any, positions: Any
    ) -> tuple[torch.Tensor, ...]:
        before = k.sum()
        out = pt.append_kv(
            query, key, value, pt.KeyValues(k, v), positions, rotary=TURNING, backend=op_backend
        )
        return out, before, k.sum(), v.sum()

    rows, positions = _rows(), torch.tensor([[0, 1, 2], [3, 4, 5]])
    mine, theirs = _cache(), _cache()
    with torch.no_grad():
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(
            *rows, *mine[:2], positions
        )
        expected = step(*rows, *theirs[:2], positions)
    for a, e in zip((*found, *mine[:2]), (*expected, *theirs[:2])):
        torch.testing.assert_close(a, e)
    assert not found[1] and found[2]


def test_writing_a_saved_cache_raises_in_backward() -> None:
    """Otherwise the gradient would be wrong silently."""
    (query, key, value), cache = _rows(), _cache()
    factor = torch.ones((), requires_grad=True)
    product = cache.key * factor
    with torch.no_grad():
        pt.append_kv(
            query, key, value, cache, torch.zeros(2, 3, dtype=torch.int64) + torch.arange(3)
        )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        pt.append_kv(query, key, value, _cache(), torch.arange(3).repeat(2, 1))


@pytest.mark.parametrize("by_cpp", [True, False])
def test_inference_caches_are_written_only_in_inference_mode(by_cpp: bool) -> None:
    rows, positions = _rows(), torch.arange(3).repeat(2, 1)
    with contextlib.nullcontext() if by_cpp else fast_path.off():
        with torch.inference_mode():
            cache = _cache()
            pt.append_kv(*rows, cache, positions)
        before = cache.key.clone()
        with pytest.raises(
            RuntimeError, match="append_kv: cache must not hold inference tensors outside"
        ):
            pt.append_kv(*rows, cache, positions + 1)
        assert torch.equal(cache.key, before)


# ---- bad input


ARANGE = torch.arange(3).repeat(2, 1)


def _call(
    cache: Any = None, positions: torch.Tensor = ARANGE, rows: Any = None, **keywords: Any
) -> torch.Tensor:
    return pt.append_kv(
        *(rows or _rows()), _cache() if cache is None else cache, positions, **keywords
    )


@pytest.mark.parametrize("op_backend", BACKENDS)
def test_positions_outside_the_cache_raise(op_backend: str) -> None:
    cache, paged = _cache(), _pages()
    with pytest.raises(
        ValueError, match="positions holds 10, and the cache has room for 10 keys a sequence"
    ):
        _call(cache, ARANGE + 8, backend=op_backend)
    with pytest.raises(
        ValueError,
        match="positions holds 12, and the cache has room for 3 pages of 4 keys a sequence",
    ):
        _call(paged, ARANGE + 10, backend=op_backend)
    assert paged.page_table is not None
    paged.page_table[1, 0] = 7
    with pytest.raises(
        ValueError,
        match="page_table names page 7 for a position that is written, and the pool has 7",
    ):
        _call(paged, backend=op_backend)
    assert not any(t.any() for t in (*cache[:2], *paged[:2]))
    positions = ARANGE.clone()
    positions[1] = -1  # rows that are not written may have any position
    _call(paged, positions, backend=op_backend)


def test_kernel_writes_nothing_outside_the_cache() -> None:
    """Below the check, which GPUs skip, memory behind the cache stays unchanged."""
    store = torch.full((2, 2, 12, 16), 5.0)
    cache = store[:, :, 1:11]
    (query, key, value), positions = _rows(), torch.tensor([[-7, 10, 1 << 40], [11, -(1 << 40), 3]])
    torch.ops.pytransformer_C.append_kv(
        query, key, value, cache, torch.zeros(2, 2, 10, 8), None, positions, None, None, None, None,
        torch.empty_like(query), False,
        1e-6, 0.0,
    )  # fmt: skip
    assert torch.equal(cache[1, :, 3], key[1, :, 2])
    cache[1, :, 3] = 5.0
    assert (store == 5.0).all()


def _expanded() -> pt.KeyValues:
    return pt.KeyValues(torch.zeros(1, 2, 10, 16).expand(2, 2, 10, 16), torch.zeros(2, 2, 10, 8))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: _call(tuple(_cache()[:2])),
            TypeError,
            r"cache must be a KeyValues, got tuple: pytransformer.KeyValues\(\*cache\)",
        ),
        (lambda: _call(torch.zeros(2)), TypeError, "cache must be a KeyValues"),
        (
            lambda: _call(_cache(dtype=torch.float64)),
            TypeError,
            "cache.key is torch.float64 but query is torch.float32",
        ),
        (
            lambda: _call(_cache()._replace(key=torch.zeros(3, 2, 10, 16))),
            ValueError,
            r"cache.key must have the shape \(2, 2, 10, 16\)",
        ),
        (
            lambda: _call(_cache()._replace(value=torch.zeros(2, 2, 9, 8))),
            ValueError,
            r"cache.value must have the shape \(2, 2, 10, 8\)",
        ),
        (lambda: _call(_expanded()), ValueError, "cache.key is expanded"),
        (
            lambda: _call(_cache()._replace(key=torch.zeros(2, 2, 16, 10).mT)),
            ValueError,
            "last dimension of cache.key must be contiguous",
        ),
        (
            lambda: _call(_pages()._replace(page_table=torch.zeros(3, 2).long())),
            ValueError,
            "a row for each of 2 sequences",
        ),
        (
            lambda: _call(_pages()._replace(page_table=torch.zeros(2, 2))),
            TypeError,
            "page_table must be int64 or int32",
        ),
        (lambda: _call(positions=ARANGE[0]), ValueError, r"positions must have the shape \(2, 3\)"),
        (
            lambda: _call(rotary=3),
            TypeError,
            r"rotary must be a RotaryPositions, a pair \(cos, sin\) or None",
        ),
        (
            lambda: _call(rotary=pt.RotaryPositions(18)),
            ValueError,
            "rotary turns 18 dimensions, and query's last dimension is 16",
        ),
        (lambda: _call(q_norm=torch.ones(8)), ValueError, r"q_norm must have the shape \(16,\)"),
        (
            lambda: _call(q_norm=torch.ones(16, requires_grad=True)),
            ValueError,
            "gives no gradient.*no_grad",
        ),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
