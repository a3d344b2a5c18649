# SPDX-License-Identifier: Apache-2.0
"""Gradients of attention on the CPU: within the bound of float64, at sizes that cross blocks.

The fuzzer draws every keyword at small sizes. Sizes here cross blocks of queries (128) and keys
(192), splits and phases.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import native
from pytransformer.testing import bounds, oracle

WHY_NOT = native.why_not("attention_bwd")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
ISAS = torch.ops.pytransformer_C.cpu_isas() if WHY_NOT is None else []
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF, torch.float64)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.ops.pytransformer_C.set_cpu_isa(request.param)
    yield request.param
    torch.ops.pytransformer_C.set_cpu_isa("")


def draw(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return query, key, value and grad_out for (B, Hq, Hkv, Lq, Lk, D, Dv)."""
    b, hq, hkv, lq, lk, d, dv = shape
    sizes = {
        "query": (b, hq, lq, d),
        "key": (b, hkv, lk, d),
        "value": (b, hkv, lk, dv),
        "grad_out": (b, hq, lq, dv),
    }
    return {name: torch.randn(size).to(dtype) for name, size in sizes.items()}


def gradients(
    t: dict[str, torch.Tensor], grad_lse: torch.Tensor | None = None, **keywords: Any
) -> dict[str, torch.Tensor]:
    """Return the gradients by name on the backend under test.

    They cover query, key, value and every floating-point term.
    """
    inputs = {name: t[name].detach().requires_grad_() for name in ("query", "key", "value")}
    bias = keywords.get("bias")
    for name, term in (("attn_mask", keywords.get("attn_mask")), ("bias", bias)):
        if isinstance(term, torch.Tensor) and term.is_floating_point():
            inputs[name] = keywords[name] = term.detach().requires_grad_()
    if "sinks" in keywords:
        inputs["sinks"] = keywords["sinks"] = keywords["sinks"].detach().requires_grad_()
    for name in ("slopes", "table"):
        if hasattr(bias, name):
            inputs[name] = getattr(bias, name).requires_grad_()
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    out, lse = pt.attention(query, key, value, return_lse=True, backend="cpu", **keywords)
    outputs, upstream = (
        ((out,), (t["grad_out"],)) if grad_lse is None else ((out, lse), (t["grad_out"], grad_lse))
    )
    return dict(zip(inputs, torch.autograd.grad(outputs, list(inputs.values()), upstream)))


def check(
    t: dict[str, torch.Tensor], grad_lse: torch.Tensor | None = None, **keywords: Any
) -> dict[str, torch.Tensor]:
    found = gradients(t, grad_lse, **keywords)
    exact = oracle.solve(**t, grad_lse=grad_lse, **keywords)
    wrong = [str(c) for c in bounds.check(exact, found, t["query"].dtype) if not c.ok]
    assert not wrong, "; ".join(wrong)
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def segments(length: int) -> torch.Tensor:
    return torch.arange(2 * length).reshape(2, length) * 7 % 11 % 3


FEATURES: dict[str, Any] = {
    "plain": dict,
    "causal": lambda: {
        "causal": "bottom_right",
        "key_lengths": torch.tensor([389, 300]),
        "query_lengths": torch.tensor([257, 199]),
    },
    "window": lambda: {"window": (30, 3)},
    "prefix": lambda: {
        "causal": "top_left",
        "prefix_lengths": torch.tensor([200, 0]),
        "softcap": 4.0,
    },
    "segments": lambda: {"query_segments": segments(257), "key_segments": segments(389)},
    "documents": lambda: {
        "query_segments": segments(257).sort(-1)[0],
        "key_segments": segments(389).sort(-1)[0],
        "causal": "top_left",
    },
    "mask": lambda: {
        "attn_mask": torch.rand(2, 1, 257, 389) > 0.4,
        "dropout_p": 0.3,
        "dropout_seed": 5,
    },
    "padding": lambda: {"attn_mask": torch.rand(2, 1, 1, 389) > 0.4},
    "dropout": lambda: {
        "dropout_p": 0.5,
        "dropout_seed": -77,
        "causal": "top_left",
        "window": (100, None),
    },
    "all_dropped": lambda: {"dropout_p": 1.0, "dropout_seed": 1},
    "bias": lambda: {"bias": torch.randn(2, 4, 257, 389), "scale": -0.2, "causal": "top_left"},
    "shared_bias": lambda: {"bias": torch.randn(1, 1, 257, 389), "softcap": 2.0},
    "bias_of_heads": lambda: {
        "bias": torch.randn(1, 4, 257, 389),
        "attn_mask": torch.randn(2, 1, 257, 1),
    },
    "bias_of_keys": lambda: {
        "bias": torch.randn(1, 4, 1, 389),
        "attn_mask": torch.randn(1, 1, 1, 1),
    },
    "sinks": lambda: {
        "sinks": torch.tensor([0.0, -torch.inf, 30.0, -2.0]),
        "causal": "bottom_right",
        "query_lengths": torch.tensor([257, 199]),
        "key_lengths": torch.tensor([300, 30]),
    },
    "alibi": lambda: {"bias": pt.AlibiBias(torch.rand(4) / 8), "causal": "bottom_right"},
    "t5": lambda: {"bias": pt.RelativePositionBias(torch.randn(32, 4), True, 128)},
    "t5_causal": lambda: {
        "bias": pt.RelativePositionBias(torch.randn(8, 4), False, 20),
        "causal": "top_left",
        "dropout_p": 0.1,
        "dropout_seed": 3,
    },
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_within_the_bound(dtype: torch.dtype, feature: str) -> None:
    t = draw((2, 4, 2, 257, 389, 40, 24), dtype)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    check(t, torch.randn(2, 4, 257, dtype=work), **FEATURES[feature]())


@pytest.mark.parametrize("feature", ["plain", "dropout", "t5", "sinks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_within_the_bound(isa: str, dtype: torch.dtype, feature: str) -> None:
    check(draw((2, 4, 2, 257, 389, 72, 72), dtype), **FEATURES[feature]())


@pytest.mark.parametrize("seed", range(3))
def test_long_sums_are_split(seed: int) -> None:
    """One sum over a head of 256 columns away from zero has c of 4 to 10.

    The columns belong to out and to value's gradient; four partial sums have c of 2.
    """
    torch.manual_seed(seed)
    t = {name: x + 2 for name, x in draw((1, 1, 1, 200, 200, 256, 256), torch.float32).items()}
    exact = oracle.solve(**t, scale=0.25)
    found = {name: x for name, x in gradients(t, scale=0.25).items() if name == "value"}
    found["out"] = pt.attention(
        t["query"], t["key"], t["value"], scale=0.25, backend="cpu", strict=True
    )
    for check in bounds.check(exact, found, torch.float32):
        assert check.reached < 3.5, check


@pytest.mark.parametrize(
    "feature", ["plain", "shared_bias", "bias_of_heads", "alibi", "t5", "sinks"]
)
def test_number_of_threads_changes_no_bit(feature: str) -> None:
    t, keywords = draw((2, 4, 2, 257, 389, 40, 24), torch.bfloat16), FEATURES[feature]()
    threads = torch.get_num_threads()
    found = []
    try:
        for n in (1, 2, 2):
            torch.set_num_threads(n)
            found.append(gradients(t, **keywords))
    finally:
        torch.set_num_threads(threads)
    same(found[0], found[1])
    same(found[1], found[2])


def test_other_sequences_change_no_bit() -> None:
    t = draw((3, 4, 2, 257, 389, 40, 24), torch.float32)
    lengths = {
        "query_lengths": torch.tensor([257, 1, 130]),
        "key_lengths": torch.tensor([2, 389, 193]),
        "causal": "bottom_right",
    }
    together = gradients(t, **lengths)
    for b in range(3):
        one = {
            name: x[b : b + 1] if isinstance(x, torch.Tensor) else x for name, x in lengths.items()
        }
        same(
            gradients({name: x[b : b + 1] for name, x in t.items()}, **one),
            {name: x[b : b + 1] for name, x in together.items()},
        )


def test_several_phases_accumulate_dk_and_dv() -> None:
    """20 query heads of one key head need more scratch than one phase has."""
    check(
        draw((1, 20, 1, 300, 300, 512, 512), torch.float32),
        causal="top_left",
        bias=torch.randn(1, 1, 300, 300),
    )


@pytest.mark.parametrize("wanted", ["query", "key", "value", "bias", "sinks"])
def test_single_gradients_equal_those_of_all(wanted: str) -> None:
    t, bias, sinks = (
        draw((2, 4, 2, 130, 200, 40, 24), torch.bfloat16),
        torch.randn(2, 1, 130, 200),
        torch.randn(4),
    )
    every = gradients(t, bias=bias, sinks=sinks)
    inputs = {
        "query": t["query"],
        "key": t["key"],
        "value": t["value"],
        "bias": bias.detach(),
        "sinks": sinks,
    }
    inputs[wanted] = inputs[wanted].detach().requires_grad_()
    out = pt.attention(
        inputs["query"],
        inputs["key"],
        inputs["value"],
        bias=inputs["bias"],
        sinks=inputs["sinks"],
        backend="cpu",
    )
    assert torch.equal(torch.autograd.grad(out, inputs[wanted], t["grad_out"])[0], every[wanted])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_finfo_min_recompute_their_maximum(dtype: torch.dtype) -> None:
    """lse cannot represent finfo.min + log(n).

    The kernel recomputes the maximum and the sum, and the weights are 1 / n.
    """
    t = draw((1, 2, 2, 140, 200, 40, 24), dtype)
    mask = torch.zeros(1, 1, 140, 200, dtype=dtype if dtype not in HALF else torch.float32)
    mask[..., 3:9, :], mask[..., 150:] = torch.finfo(mask.dtype).min, -math.inf
    found = check(t, attn_mask=mask)
    mean = t["grad_out"][:, :, 3:9].double().sum(2) / 150
    only = {name: x.clone() for name, x in t.items()}
    only["grad_out"][:, :, :3], only["grad_out"][:, :, 9:] = 0, 0
    dv = gradients(only, attn_mask=mask)["value"].double()
    torch.testing.assert_close(
        dv[:, :, :150],
        mean[:, :, None].expand(-1, -1, 150, -1),
        rtol=2e-2 if dtype in HALF else 1e-5,
        atol=1e-6,
    )
    assert not found["value"][:, :, 150:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hidden_rows_do_not_affect_gradients(dtype: torch.dtype) -> None:
    t = draw((2, 4, 2, 130, 200, 40, 24), dtype)
    mask = torch.rand(2, 1, 1, 200) > 0.3
    keywords = {
        "query_lengths": torch.tensor([77, 130]),
        "key_lengths": torch.tensor([150, 0]),
        "attn_mask": mask,
    }
    clean = check(
        t,
        torch.zeros(2, 4, 130, dtype=torch.float64 if dtype == torch.float64 else torch.float32),
        **keywords,
    )
    dirty = {name: x.clone() for name, x in t.items()}
    for name in ("query", "grad_out"):
        dirty[name][0, :, 77:], dirty[name][1] = math.nan, math.nan
    for name in ("key", "value"):
        dirty[name][0, :, 150:], dirty[name][1] = math.nan, math.inf
        dirty[name][0, :, ~mask[0, 0, 0]] = math.nan
    same(
        gradients(
            dirty,
            torch.zeros(
                2, 4, 130, dtype=torch.float64 if dtype == torch.float64 else torch.float32
            ),
            **keywords,
        ),
        clean,
    )


@pytest.mark.parametrize("kind", ("bool", "float", "segments"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_hidden_by_a_dense_mask_do_not_affect_gradients(dtype: torch.dtype, kind: str) -> None:
    t = draw((2, 4, 2, 130, 200, 40, 24), dtype)
    dead = torch.zeros(200, dtype=torch.bool)
    dead[5::9] = True
    seen = (torch.rand(2, 1, 130, 200) > 0.3) & ~dead
    keywords = {
        "bool": {"attn_mask": seen},
        "float": {"attn_mask": torch.where(seen, 0.0, -math.inf)},
        "segments": {
            "query_segments": segments(130),
            "key_segments": torch.where(dead, 9, segments(200)),
        },
    }[kind]
    clean = check(t, **keywords)
    for name in ("key", "value"):
        t[name] = t[name].clone()
        t[name][:, :, dead] = math.nan
    same(gradients(t, **keywords), clean)


def test_disjoint_segments_cost_no_products() -> None:
    """Unsorted segments of 16 parts never match across parts, so backward skips those tiles.

    An eighth of the tiles (128 queries x 192 keys) is left; half of the time is allowed for them.
    """
    t = draw((1, 1, 1, 2048, 2048, 64, 64), torch.float32)
    alternating = torch.arange(2048) % 2
    parts = torch.arange(2048) // 128 * 10 + alternating
    inputs = [t[name].requires_grad_() for name in ("query", "key", "value")]

    def seconds(documents: torch.Tensor) -> float:
        out = pt.attention(
            *inputs,
            query_segments=documents[None],
            key_segments=documents[None],
            backend="cpu",
            strict=True,
        )
        start = time.thread_time()
        torch.autograd.grad(out, inputs, t["grad_out"])
        return time.thread_time() - start

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert min(seconds(parts) for _ in range(5)) < 0.5 * min(
            seconds(alternating) for _ in range(5)
        )
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "shape", [(0, 2, 1, 5, 6, 8, 8), (2, 2, 1, 0, 6, 8, 8), (2, 2, 1, 5, 0, 8, 8)]
)
def test_empty_inputs(shape: tuple[int, ...]) -> None:
    for gradient in gradients(
        draw(shape, torch.float32), bias=pt.AlibiBias(torch.rand(shape[1]))
    ).values():
        assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_stale_scratch_does_not_affect_gradients(dtype: torch.dtype) -> None:
    """The softcap's derivative is not stored behind the last key.

    NaN of an earlier call once leaked from there.
    """

    def gradients(keys: int, fill: float) -> tuple[torch.Tensor, ...]:
        leaves = [torch.randn(1, 1, n, 48).to(dtype).requires_grad_() for n in (15, keys, keys)]
        with torch.no_grad():
            leaves[1].add_(fill)
        out = pt.attention(*leaves, softcap=0.5, backend="cpu", strict=True)
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    gradients(256, float("nan"))
    assert all(g.isfinite().all() for g in gradients(8, 0.0))
