# SPDX-License-Identifier: Apache-2.0
"""append_kv into 8-bit caches writes the rows of quantize_kv and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import OPS, trace

EIGHT = [torch.float8_e4m3fn, torch.int8]
TURNING = pt.RotaryPositions(12)


def rows(length: int = 3, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return query, key and value of two sequences, with the strides of a model's projections."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((2, length, 4, 16), (2, length, 2, 16), (2, length, 2, 8))
    return tuple(
        torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes
    )


def cache_of(
    dtype: torch.dtype, first: int = 2, size: int = 10, table: torch.Tensor | None = None
) -> pt.KeyValues:
    """Return a cache with 0x33 in every unwritten byte and 7 in every scale."""
    numbers = [
        torch.full((first, 2, size, dim), 0x33, dtype=torch.uint8).view(dtype) for dim in (16, 8)
    ]
    scales = [torch.full((first, 2, size), 7.0) for _ in range(2)]
    return pt.KeyValues(*numbers, table, *scales)


TABLE = torch.tensor([[5, 0, 3], [2, 6, 1]], dtype=torch.int32)
POSITIONS = torch.tensor([[4, 5, 6], [9, -1, 0]])
WRITTEN = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2))


def appended(op_backend: str, cache: pt.KeyValues, given: Any, **keywords: Any) -> torch.Tensor:
    with trace() as ran:
        out = pt.append_kv(*given, cache, POSITIONS, **keywords, backend=op_backend, strict=True)
    assert ran == [("append_kv_fwd", op_backend)]
    return out


@pytest.fixture(params=["reference", "cpu"])
def op_backend(request: pytest.FixtureRequest) -> str:
    op = OPS["append_kv"]
    a = op.prepare(*rows(), cache_of(torch.int8), POSITIONS)[0]
    if (reason := op.reason(request.param, a)) is not None:
        pytest.skip(f"backend {request.param} declines: {reason}")
    return str(request.param)


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_append_equals_quantize_and_append(
    op_backend: str, query_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """The bits are those of quantize_kv on the rows for a cache of query's dtype."""
    given, weight = rows(dtype=query_dtype), torch.randn(16)
    keywords: dict[str, Any] = {"rotary": TURNING, "k_norm": weight, "eps": 1e-5}
    flat, paged = cache_of(dtype), cache_of(dtype, 7, 4, TABLE)
    out = appended(op_backend, flat, given, **keywords)
    assert torch.equal(out, appended(op_backend, paged, given, **keywords))
    assert torch.equal(out, pt.rotary(given[0], POSITIONS, dims=12, backend=op_backend))
    key = pt.rotary(given[1], POSITIONS, dims=12, weight=weight, eps=1e-5, backend=op_backend)
    expected = cache_of(dtype)
    for b, i in WRITTEN:
        for t, scales, new in (
            (expected.key, expected.key_scale, key),
            (expected.value, expected.value_scale, given[2]),
        ):
            numbers, scale = pt.quantize_kv(new[b, :, i], dtype)
            t.view(torch.uint8)[b, :, POSITIONS[b, i]], scales[b, :, POSITIONS[b, i]] = (
                numbers.view(torch.uint8),
                scale,
            )
    for mine, other in zip(flat.numbers, expected.numbers, strict=True):
        assert torch.equal(mine, other)
    untouched = cache_of(dtype, 7, 4)
    for mine, other, clean in zip(paged.numbers, expected.numbers, untouched.numbers, strict=True):
        gathered = mine[TABLE.long()].transpose(1, 2).flatten(2, 3)
        assert torch.equal(gathered[:, :, :10], other) and torch.equal(mine[4], clean[4])


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_zero_and_non_finite_rows_equal_quantize_kv(op_backend: str, dtype: torch.dtype) -> None:
    query, key, value = (t.clone() for t in rows())
    key[0, 0, 1], value[1, 1, 0] = 0.0, 0.0
    key[0, 1, 2, 5], value[1, 0, 2, 3], value[0, 0, 0, 1] = torch.nan, torch.inf, -torch.inf
    cache = cache_of(dtype)
    appended(op_backend, cache, (query, key, value))
    for t, scale, new in (
        (cache.key, cache.key_scale, key),
        (cache.value, cache.value_scale, value),
    ):
        assert scale is not None
        for b, i in WRITTEN:
            numbers, expected = pt.quantize_kv(new[b, :, i], dtype)
            assert torch.equal(t[b, :, POSITIONS[b, i]].float(), numbers.float())
            torch.testing.assert_close(
                scale[b, :, POSITIONS[b, i]], expected, rtol=0, atol=0, equal_nan=True
            )
    assert bool(cache.key_scale[0, 1, 6].isnan()) and bool(cache.value_scale[1, 0, 0].isnan())  # type: ignore[index]


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_caches_may_be_views(op_backend: str, dtype: torch.dtype) -> None:
    """Values and scales have any strides."""
    plain = cache_of(dtype)
    wide = [
        torch.full((10, 2, 2, 2 * d), 0x33, dtype=torch.uint8)
        .view(dtype)
        .permute(1, 2, 0, 3)[..., :d]
        for d in (16, 8)
    ]
    scales = [torch.full((10, 2, 4), 7.0).permute(1, 2, 0)[:, ::2] for _ in range(2)]
    views = pt.KeyValues(*wide, None, *scales)
    for cache in (plain, views):
        appended(op_backend, cache, rows())
    for mine, other in zip(views.numbers, plain.numbers, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_opcheck_and_compile(op_backend: str, dtype: torch.dtype) -> None:
    a = OPS["append_kv"].prepare(*rows(), cache_of(dtype), POSITIONS, rotary=TURNING)[0]
    names = (
        ("test_faketensor",) if dtype.is_floating_point else ("test_schema", "test_faketensor")
    )  # opcheck cannot compare float8
    torch.library.opcheck(OPS["append_kv"].fwd, (*a, op_backend, True), test_utils=names)

    def step(query: Any, key: Any, value: Any, cache: pt.KeyValues) -> torch.Tensor:
        query = pt.append_kv(
            query, key, value, cache, POSITIONS, rotary=TURNING, backend=op_backend
        )
        lengths = torch.tensor([7, 10])
        return pt.attention(
            query, cache.key, cache.value, key_lengths=lengths, **cache.scales, backend="reference"
        )

    plain, compiled = cache_of(dtype), cache_of(dtype)
    want = step(*rows(), plain)
    assert torch.equal(torch.compile(step, fullgraph=True)(*rows(), compiled), want)
    for mine, other in zip(compiled.numbers, plain.numbers, strict=True):
        assert torch.equal(mine, other)


GOOD = cache_of(torch.int8)
WRONG: dict[str, tuple[pt.KeyValues, type[Exception], str]] = {
    "no key scale": (GOOD._replace(key_scale=None), ValueError,
        r"needs key_scale, float32 of the shape \(2, 2, 10\)"),
    "no value scale": (GOOD._replace(value_scale=None), ValueError, "needs value_scale"),
    "two dtypes": (GOOD._replace(value=cache_of(torch.float8_e4m3fn).value), TypeError,
        "cache.value is torch.float8_e4m3fn"),
    "half the scales' dtype": (GOOD._replace(key_scale=torch.zeros(2, 2, 10).half()), ValueError,
        "must be float32 of the shape"),
    "a scale a head": (GOOD._replace(key_scale=torch.zeros(2, 2, 1)), ValueError,
        "each row that is written gets a scale of its own"),
    "expanded": (GOOD._replace(value_scale=torch.zeros(2, 1, 10).expand(2, 2, 10)), ValueError,
        "cache.value_scale is expanded"),
    "one scale for both": (GOOD._replace(key_scale=GOOD.value_scale), ValueError,
        "key_scale and cache.value_scale must be two"),
    "scales of a plain cache": (
        pt.KeyValues(torch.zeros(2, 2, 10, 16), torch.zeros(2, 2, 10, 8), None, GOOD.key_scale),
        ValueError,
        "cache.key_scale belongs to a cache in float8_e4m3fn or int8",
    ),
    "uint8": (GOOD._replace(key=GOOD.key.view(torch.uint8)), TypeError,
        "cache.key must be float32"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_bad_caches_are_named(what: str) -> None:
    cache, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        pt.append_kv(*rows(), cache, POSITIONS)


def test_float64_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"into a cache in torch.int8 go float32, bfloat16 and float16"
    ):
        pt.append_kv(*rows(dtype=torch.float64), cache_of(torch.int8), POSITIONS)
