# SPDX-License-Identifier: Apache-2.0
"""Attention over 8-bit keys and values equals attention over the dequantized values.

Random problems with every keyword, paged and contiguous, are in tests/test_fuzz.py.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import trace
from pytransformer.ops.attention import attention_op
from pytransformer.testing import bounds, exact_attention, oracle
from support.pages import in_pages

pytestmark = pytest.mark.usefixtures("one_thread")

EIGHT = [torch.float8_e4m3fn, torch.int8]
QUERIES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(
    lq: int, lk: int, heads: int = 4, kv: int = 2, dim: int = 16, batch: int = 3
) -> tuple[torch.Tensor, ...]:
    return (
        draw(batch, heads, lq, dim),
        draw(batch, kv, lk, dim, seed=1),
        draw(batch, kv, lk, dim + 8, seed=2),
    )


def attend(
    backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Run a forced backend; skip the test with its reason if it declines 8 bits."""
    a = attention_op.prepare(query, key, value, **options)[0]
    if (reason := attention_op.reason(backend, a)) is not None:
        pytest.skip(f"backend {backend} declines: {reason}")
    with trace() as ran:
        out = pt.attention(query, key, value, **options, backend=backend, strict=True)
    assert ran == [("attention_fwd", backend)]
    return out


def check(
    found: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> None:
    """Check the usual bound against float64 on the dequantized values."""
    grads = torch.zeros_like(found), torch.zeros(found.shape[:3])
    answer = oracle.solve(query, key, value, *grads, **options)
    wrong = [
        str(c) for c in bounds.check(answer, {"out": found}, query.dtype, "zero_mean") if not c.ok
    ]
    assert not wrong, "\n".join(wrong)


def both(
    key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype
) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Return (keys, values, scales as keywords)."""
    (k, ks), (v, vs) = pt.quantize_kv(key, dtype), pt.quantize_kv(value, dtype)
    return k, v, {"key_scale": ks, "value_scale": vs}


def exact(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return pt.dequantize_kv(rows, scale.expand(rows.shape[:3]), torch.float64)


# ---- rows and scales


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_quantization_error_is_at_most_half_a_step(dtype: torch.dtype) -> None:
    x = draw(5, 7, 64) * torch.logspace(-30, 30, 35).view(5, 7, 1)
    rows, scale = pt.quantize_kv(x, dtype)
    limit = 448 if dtype == torch.float8_e4m3fn else 127
    assert torch.equal(scale, (x.abs().amax(-1) / limit))
    error = (pt.dequantize_kv(rows, scale, torch.float64) - x.double()).abs()
    step = x.double().abs() / 16 if dtype == torch.float8_e4m3fn else torch.zeros_like(x).double()
    least = scale.double()[..., None] * (2**-10 if dtype == torch.float8_e4m3fn else 0.5)
    assert bool((error <= torch.maximum(step, least) * (1 + 1e-6)).all())
    assert bool((rows.float().abs().amax(-1) == limit).all()), (
        "the largest number of a row is the dtype's largest"
    )


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_rows_of_zeros_and_of_the_min_values(dtype: torch.dtype) -> None:
    x = torch.tensor(
        [[0.0, -0.0, 0.0], [1e-45, 0.0, -1e-45], [1e-38, -3e-39, 0.0], [3e38, -1e38, 1.0]]
    )
    rows, scale = pt.quantize_kv(x, dtype)
    back = pt.dequantize_kv(rows, scale)
    assert bool(scale.isfinite().all()) and bool((scale > 0).all()) and bool(back.isfinite().all())
    assert not back[0].any()
    assert bool(((back - x).abs() <= 0.05 * x.abs().amax(-1, keepdim=True) + 2.0**-126).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_rows_with_a_non_finite_value_become_nan(dtype: torch.dtype, bad: float) -> None:
    x = draw(2, 3, 8)
    x[1, 2, 5] = bad
    rows, scale = pt.quantize_kv(x, dtype)
    assert scale.isnan().nonzero().tolist() == [[1, 2]]
    assert pt.dequantize_kv(rows, scale).isnan().all(-1).nonzero().tolist() == [[1, 2]]


def test_every_8_bit_value_is_decoded(backend: str) -> None:
    """All 256 codes, subnormals and both zeros included, appear as keys and as values."""
    for dtype in EIGHT:
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        numbers = every.float()
        taken = numbers.isfinite()
        every, numbers = every.view(torch.uint8)[taken].view(dtype), numbers[taken]
        n = len(numbers)
        for query_dtype in QUERIES:
            query = torch.ones(1, 1, n, 56, dtype=query_dtype)
            query[..., 1:] = 0
            rows = every.view(1, 1, n, 1).expand(1, 1, n, 56).contiguous()
            only = torch.eye(n, dtype=torch.bool)[None, None]
            one = torch.ones(())
            out = attend(backend, query, rows, rows, attn_mask=only, key_scale=one, value_scale=one)
            assert torch.equal(out[0, 0].float(), numbers[:, None].expand(n, 56)), (
                dtype,
                query_dtype,
            )
            a = attention_op.prepare(
                query, rows, rows, attn_mask=only, key_scale=one, value_scale=one, scale=0.25
            )[0]
            lse = pt.attention(
                query,
                rows,
                rows,
                attn_mask=only,
                key_scale=one,
                value_scale=one,
                scale=0.25,
                return_lse=True,
                backend=backend,
            )[1]
            torch.testing.assert_close(lse[0, 0], numbers * a.scale, rtol=1e-6, atol=0)


# ---- attention


@pytest.mark.parametrize("lq", [1, 5, 40, 150])
@pytest.mark.parametrize("query_dtype", QUERIES, ids=str)
@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_attention_within_the_bound_of_float64(
    backend: str, dtype: torch.dtype, query_dtype: torch.dtype, lq: int
) -> None:
    query, key, value = qkv(lq, 650)
    query = query.to(query_dtype)
    k, v, scales = both(key, value, dtype)
    lengths = torch.tensor([650, 1, 333])
    options: dict[str, Any] = {
        "key_lengths": lengths,
        "causal": "bottom_right",
        "sinks": draw(4, seed=9),
    }
    found = attend(backend, query, k, v, **options, **scales)
    check(found, query, exact(k, scales["key_scale"]), exact(v, scales["value_scale"]), **options)


@pytest.mark.parametrize("size", [2e-36, 1e-30])
def test_subnormal_weights_lose_at_most_the_floor(backend: str, size: float) -> None:
    """Scaled weights below 2^-126 may become zero."""
    query, key, value = qkv(20, 300)
    for dtype in EIGHT:
        k, v, scales = both(key, value.abs() * size, dtype)
        found = attend(backend, query, k, v, **scales)
        answer = exact_attention.padded({"query": query, "key": k, "value": v, **scales}, None)
        wrong = [
            str(c)
            for c in bounds.check(answer, {"out": found}, query.dtype, "zero_mean")
            if not c.ok
        ]
        assert not wrong, "\n".join(wrong)
    [nothing] = bounds.check(answer, {"out": torch.zeros_like(found)}, query.dtype, "zero_mean")
    assert nothing.ok == (size < 1e-34), "zeros are no answer where values are 1e-30"


@pytest.mark.parametrize("dim", [1, 8, 13, 64, 100, 128, 256])
@pytest.mark.parametrize("lq", [1, 20])
def test_head_dims_within_the_bound(backend: str, dim: int, lq: int) -> None:
    for dtype in EIGHT:
        query, key, value = (
            draw(2, 4, lq, dim),
            draw(2, 2, 70, dim, seed=1),
            draw(2, 2, 70, dim, seed=2),
        )
        for query_dtype in QUERIES:
            k, v, scales = both(key, value, dtype)
            found = attend(backend, query.to(query_dtype), k, v, **scales)
            check(
                found,
                query.to(query_dtype),
                exact(k, scales["key_scale"]),
                exact(v, scales["value_scale"]),
            )


@pytest.mark.parametrize("dtype", EIGHT, ids=str)
@pytest.mark.parametrize("query_dtype", QUERIES, ids=str)
def test_scales_of_different_magnitude(
    backend: str, query_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Outliers are 1000 times the rest, and some rows a thousandth.

    A weight times a small scale must keep its bits, in float16 too.
    """
    query, key, value = qkv(3, 500)
    query, value = (
        query.to(query_dtype),
        value * torch.logspace(-3, 1, 500)[torch.randperm(500)][None, None, :, None],
    )
    k, v, scales = both(key, value, dtype)
    check(
        attend(backend, query, k, v, **scales),
        query,
        exact(k, scales["key_scale"]),
        exact(v, scales["value_scale"]),
    )
    small = {**scales, "value_scale": scales["value_scale"] * 2.0**-6}
    found = attend(backend, query, k, v, **small)
    check(found, query, exact(k, small["key_scale"]), exact(v, small["value_scale"]))


@pytest.mark.parametrize(
    "shape", [(), (1, 1), (2, 1), (3, 1, 1), (3, 2, 1), (1, 2, 90), (90,)], ids=str
)
def test_scales_broadcast(backend: str, shape: tuple[int, ...]) -> None:
    """Use one scale in all, one per head, one per sequence and one per key."""
    query, key, value = qkv(4, 90)
    for dtype in EIGHT:
        k, v, _ = both(key, value, dtype)
        scale = draw(*shape, seed=5).abs() + 0.01
        given = {"key_scale": scale * 0.01, "value_scale": scale}
        found = attend(backend, query, k, v, **given)
        whole = {name: t.expand(3, 2, 90).contiguous() for name, t in given.items()}
        assert torch.equal(found, attend(backend, query, k, v, **whole))
        check(found, query, exact(k, given["key_scale"]), exact(v, given["value_scale"]))


@pytest.mark.parametrize("lq", [1, 6, 70])
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_pages_equal_the_contiguous_cache(backend: str, page_size: int, lq: int) -> None:
    query, key, value = qkv(lq, 333)
    lengths = torch.tensor([333, 1, 100])
    pools = in_pages(key, value, lengths, page_size)
    for dtype in EIGHT:
        k, v, scales = both(*pools.tensors, dtype)
        paged = attend(
            backend,
            query,
            k,
            v,
            page_table=pools.table,
            key_lengths=lengths,
            causal="bottom_right",
            **scales,
        )
        k, v, scales = both(*pools.contiguous, dtype)
        whole = attend(backend, query, k, v, key_lengths=lengths, causal="bottom_right", **scales)
        assert bool(paged.isfinite().all()), "a row of nobody was read"
        assert torch.equal(paged, whole)


def test_hidden_rows_and_scales_may_be_nan(backend: str) -> None:
    """Rows and scales behind the lengths hold NaN."""
    query, key, value = qkv(2, 100)
    lengths = torch.tensor([60, 1, 99])
    for dtype in EIGHT:
        k, v, scales = both(key, value, dtype)
        want = attend(backend, query, k, v, key_lengths=lengths, **scales)
        behind = torch.arange(100) >= lengths[:, None, None]
        for t in (k, v):
            t.view(torch.uint8).masked_fill_(behind[..., None], 0x7F)
        poisoned = {name: t.masked_fill(behind, torch.nan) for name, t in scales.items()}
        assert torch.equal(attend(backend, query, k, v, key_lengths=lengths, **poisoned), want)


def test_visible_nan_reaches_the_output(backend: str) -> None:
    query, key, value = qkv(2, 100)
    for name in ("key_scale", "value_scale"):
        k, v, scales = both(key, value, torch.int8)
        scales[name][1, 0, 70] = torch.nan
        out = attend(backend, query, k, v, **scales)
        assert (
            bool(out[1, :2].isnan().all())
            and bool(out[[0, 2]].isfinite().all())
            and bool(out[1, 2:].isfinite().all())
        )
    for place in (0, 1):  # float8 has a NaN code
        k, v, scales = both(key, value, torch.float8_e4m3fn)
        (k, v)[place].view(torch.uint8)[1, 0, 70, 3] = 0xFF
        out = attend(backend, query, k, v, **scales)
        assert bool(out[1, :2, :, 3].isnan().all()) and bool(out[[0, 2]].isfinite().all())


# ---- what is refused


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no key scale": ({"key_scale": None}, ValueError, "key is torch.int8 and needs key_scale"),
    "no value scale": ({"value_scale": None}, ValueError,
        "value is torch.int8 and needs value_scale"),
    "no scales": ({"key_scale": None, "value_scale": None}, ValueError, "needs key_scale"),
    "two dtypes": ({"value": torch.zeros(3, 2, 90, 24).to(torch.float8_e4m3fn)}, TypeError,
        "value is torch.float8_e4m3fn but key"),
    "values alone": ({"key": torch.zeros(3, 2, 90, 16)}, TypeError,
        "value is torch.int8 but key is torch.float32"),
    "float64": ({"query": torch.zeros(3, 4, 2, 16, dtype=torch.float64)}, TypeError,
        "query must be float32, bfloat16 or float16"),
    "query": ({"query": torch.zeros(3, 4, 2, 16, dtype=torch.int8)}, TypeError,
        "query must be float32, bfloat16, float16 or float64"),
    "uint8": ({"key": torch.zeros(3, 2, 90, 16, dtype=torch.uint8)}, TypeError,
        "key must be float32"),
    "e5m2": ({"key": torch.zeros(3, 2, 90, 16).to(torch.float8_e5m2)}, TypeError,
        "key must be float32"),
    "dtype of scales": ({"key_scale": torch.ones((), dtype=torch.bfloat16)}, TypeError,
        "key_scale must be float32"),
    "shape of scales": ({"value_scale": torch.ones(3, 4, 90)}, ValueError,
        r"value_scale of shape \(3, 4, 90\) does not broadcast"),
    "number": ({"key_scale": 0.1}, TypeError, "key_scale must be a Tensor, got float"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_bad_arguments_are_named(what: str) -> None:
    query, key, value = qkv(2, 90)
    k, v, scales = both(key, value, torch.int8)
    change, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        pt.attention(**{"query": query, "key": k, "value": v, **scales, **change})


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_scales_of_other_dtypes_are_refused(name: str) -> None:
    query, key, value = qkv(2, 90)
    with pytest.raises(ValueError, match=f"{name} belongs to a .* in float8_e4m3fn or int8"):
        pt.attention(query, key, value, **{name: torch.ones(())})  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["query", "sinks", "bias", "value_scale"])
def test_gradients_are_refused(name: str) -> None:
    query, key, value = qkv(2, 90)
    k, v, scales = both(key, value, torch.int8)
    tensors = {"query": query, "sinks": draw(4), "bias": draw(1, 4, 2, 90), **scales}
    tensors[name].requires_grad_()
    with pytest.raises(
        ValueError, match=r"eight bits have no gradients; call it under torch.no_grad\(\)"
    ):
        pt.attention(key=k, value=v, **tensors)  # type: ignore[call-overload]
    with torch.no_grad():
        pt.attention(key=k, value=v, **tensors)  # type: ignore[call-overload]


def test_autocast_keeps_8_bit_tensors() -> None:
    query, key, value = qkv(2, 90)
    k, v, scales = both(key, value, torch.float8_e4m3fn)
    with torch.autocast("cpu", torch.bfloat16):
        found = pt.attention(query, k, v, **scales)  # type: ignore[call-overload]
    assert torch.equal(found, pt.attention(query.bfloat16(), k, v, **scales))  # type: ignore[call-overload]


@pytest.mark.unpoisoned
@pytest.mark.parametrize("dtype", EIGHT, ids=str)
def test_compiles_and_runs_on_fake_tensors(dtype: torch.dtype) -> None:
    query, key, value = qkv(2, 90)
    k, v, scales = both(key, value, dtype)

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ks: torch.Tensor, vs: torch.Tensor
    ) -> torch.Tensor:
        return pt.attention(q, k, v, key_scale=ks, value_scale=vs, causal="bottom_right") * 2

    args = query, k, v, *scales.values()
    want = call(*args)
    assert torch.equal(torch.compile(call, fullgraph=True)(*args), want)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert call(*(mode.from_tensor(t) for t in args)).shape == want.shape
    a = attention_op.prepare(query, k, v, **scales)[0]
    names = (
        ("test_faketensor",) if dtype.is_floating_point else ("test_schema", "test_faketensor")
    )  # opcheck cannot compare float8
    torch.library.opcheck(attention_op.fwd, (*a, None, False), test_utils=names)


def test_declining_backends_give_a_reason() -> None:
    query, key, value = qkv(2, 90)
    k, v, scales = both(key, value, torch.int8)
    found = pt.explain("attention", query, k, v, **scales)
    assert found.reasons["torch"] == "PyTorch's kernels read no keys in eight bits"
    rows = 3 * 2 * 90 * (16 + 24) * 4
    plain = pt.explain("attention", query, key, value)
    assert found.extra_bytes["reference"] == plain.extra_bytes["reference"] + rows
