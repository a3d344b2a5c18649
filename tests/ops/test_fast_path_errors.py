# SPDX-License-Identifier: Apache-2.0
"""Replace every argument of every op: both paths give the same bits or the same error text."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._core import fast_path
from support.paths import needs_fast_path, same, taken_by

pytestmark = [
    needs_fast_path,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.falls_back,
    pytest.mark.filterwarnings("ignore"),
]


def alibi() -> Any:
    return pt.AlibiBias(torch.rand(2))


def t5() -> Any:
    return pt.RelativePositionBias(torch.randn(8, 2), True, 32)


def attention() -> dict[str, Any]:
    q, k, v = torch.randn(3, 2, 2, 8, 16).unbind()
    lengths = dict.fromkeys(
        ("query_lengths", "key_lengths", "prefix_lengths"), torch.tensor([3, 8])
    )
    segments = dict.fromkeys(
        ("query_segments", "key_segments"), torch.zeros(2, 8, dtype=torch.int64)
    )
    dense = {"attn_mask": torch.rand(8, 8) > 0.3, "bias": torch.randn(2, 1, 8, 8)}
    return (
        {"query": q, "key": k, "value": v, "causal": "top_left", "window": (3, None), "scale": 0.5}
        | lengths
        | segments
        | dense
    )


def pages() -> dict[str, Any]:
    query, pools = torch.randn(2, 2, 1, 16), torch.randn(2, 6, 2, 4, 16)
    return {
        "query": query, "key": pools[0], "value": pools[1],
        "page_table": torch.tensor([[5, 0, 2], [1, 4, 3]]),
        "key_lengths": torch.tensor([9, 12]), "causal": "bottom_right",
    }  # fmt: skip


def attention_varlen() -> dict[str, Any]:
    q, k, v = torch.randn(3, 13, 2, 16).unbind()
    offsets = torch.tensor([0, 8, 13])
    packed = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 8,
        "max_seqlen_k": 9,
    }
    return {
        "query": q,
        "key": k,
        "value": v,
        **packed,
        "bias": t5(),
        "softcap": 3.0,
        "dropout_p": 0.5,
        "dropout_seed": 7,
    }


def norm(op: str) -> dict[str, Any]:
    x, r = torch.randn(2, 3, 16).unbind()
    parameters = {"weight": torch.randn(16), "bias": torch.randn(16)}
    if op == "add_norm":
        return {
            "x": x,
            "residual": r,
            **parameters,
            "dropout_p": 0.5,
            "dropout_seed": torch.tensor(5),
        }
    parameters = parameters if op == "layer_norm" else {"weight": parameters["weight"]}
    return {"x": x, "normalized_shape": 16, **parameters}


def feed_forward() -> dict[str, Any]:
    w1, gate = torch.randn(2, 24, 16).unbind()
    biases = {"b1": torch.randn(24), "b2": torch.randn(16), "gate_bias": torch.randn(24)}
    return {
        "x": torch.randn(3, 16),
        "w1": w1,
        "w2": torch.randn(16, 24),
        "gate_weight": gate,
        **biases,
        "dropout_p": 0.5,
    }


def linear_cross_entropy() -> dict[str, Any]:
    target = torch.tensor([[1, 4, -100], [0, 2, 3]])
    return {
        "x": torch.randn(2, 3, 16),
        "weight": torch.randn(5, 16),
        "target": target,
        "bias": torch.randn(5),
    }


def scaled_dot_product_attention() -> dict[str, Any]:
    q, k, v = torch.randn(3, 2, 2, 8, 16).unbind()
    return {
        "query": q,
        "key": k,
        "value": v,
        "attn_mask": torch.rand(8, 8) > 0.3,
        "is_causal": True,
    }


def rotary(**angles: Any) -> dict[str, Any]:
    return {
        "x": torch.randn(2, 2, 3, 16),
        "weight": torch.randn(16),
        "eps": 1e-5,
        "weight_offset": 1.0,
        **angles,
    }


def turned_by_tables() -> dict[str, Any]:
    return rotary(cos=torch.randn(2, 3, 8), sin=torch.randn(2, 3, 8), dims=8)


def turned_by_positions() -> dict[str, Any]:
    scaling = pt.RotaryScaling("llama3", 8.0, 32)
    return rotary(
        positions=torch.tensor([[1, 2, 3], [9, -1, 70]]),
        dims=8,
        base=500.0,
        scaling=scaling,
        interleaved=True,
    )


def append_kv(table: Tensor | None = None, **more: Any) -> dict[str, Any]:
    query, key, value = torch.randn(2, 3, 2, 16), torch.randn(2, 2, 2, 16), torch.randn(2, 2, 2, 8)
    first, rows = (2, 9) if table is None else (6, 4)
    cache = pt.KeyValues(torch.zeros(first, 2, rows, 16), torch.zeros(first, 2, rows, 8), table)
    norms = {"q_norm": torch.randn(16), "k_norm": torch.randn(16)}
    return {
        "query": query,
        "key": key,
        "value": value,
        "cache": cache,
        "positions": torch.tensor([[7, 8], [3, -1]]),
        **norms,
        **more,
    }


def append_to_pages() -> dict[str, Any]:
    return append_kv(
        torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=torch.int32), rotary=pt.RotaryPositions(8)
    )


def caches(value: pt.KeyValues) -> Iterator[Any]:
    """Yield caches with one bad tensor."""
    yield tuple(value)
    for i, t in enumerate(value):
        for other in (None, 3, value[0], *(wrong(t) if isinstance(t, Tensor) else ())):
            yield pt.KeyValues(*value[:i], other, *value[i + 1 :])


OPS: dict[str, Any] = {
    "attention": attention,
    "attention, pages": pages,
    "rotary, tables": turned_by_tables,
    "rotary, positions": turned_by_positions,
    "append_kv": append_kv,
    "append_kv, pages": append_to_pages,
    "attention_varlen": attention_varlen,
    "layer_norm": lambda: norm("layer_norm"),
    "rms_norm": lambda: norm("rms_norm"),
    "add_norm": lambda: norm("add_norm"),
    "feed_forward": feed_forward,
    "linear_cross_entropy": linear_cross_entropy,
    "scaled_dot_product_attention": scaled_dot_product_attention,
}
NUMBERS = [
    None,
    True,
    -1,
    0,
    1,
    5,
    2**31,
    2**63,
    2**64,
    0.0,
    0.25,
    1.5,
    -0.5,
    math.inf,
    math.nan,
    1e-30,
]
TEXTS = ["", "x", "cpu", "reference", "bottom_right", "rms", "silu", "none", "sum"]
OTHERS = [(), (16,), (3, 16), [16], (1, 2), (-1, 2), (None, None), (True, 1), {}, object]


def wrong(value: Any) -> Iterator[Any]:
    """Yield replacements of a value: numbers, strings, containers and mismatched tensors."""
    if isinstance(value, pt.KeyValues):
        yield from caches(value)
    yield from (
        *NUMBERS,
        *TEXTS,
        *OTHERS,
        torch.tensor(3),
        torch.tensor([4, 5]),
        torch.tensor(0.5),
        alibi(),
        t5(),
    )
    yield pt.AlibiBias(torch.rand(3))
    yield pt.AlibiBias(torch.rand(2).int())
    yield pt.AlibiBias(3)  # type: ignore[arg-type]
    for table, both, distance in (
        ((7, 2), True, 32),
        ((2, 2), True, 32),
        ((8, 3), False, 32),
        ((8, 2), True, 2),
        ((8, 2), 1, 32),
    ):
        yield pt.RelativePositionBias(torch.randn(table), both, distance)  # type: ignore[arg-type]
    yield pt.RelativePositionBias(torch.randn(8, 2).to(torch.float8_e4m3fn))
    if not isinstance(value, Tensor) or value.dim() == 0:
        return
    yield from (
        value[None],
        value[..., :-1],
        value[:-1],
        value[..., None],
        value[0],
        value[:0],
        torch.cat((value, value)),
    )
    yield from (
        value.to(d)
        for d in (
            torch.float64,
            torch.bfloat16,
            torch.int32,
            torch.bool,
            torch.complex64,
            torch.float8_e4m3fn,
        )
    )
    yield from (
        value.to("meta"),
        value.to_sparse(),
        value.tolist(),
        torch.nn.Parameter(value.float()),
        value.expand(2, *value.shape),
    )
    yield value.new_tensor(-7).expand(
        value.shape
    )  # outside the range of lengths, offsets and targets
    yield value.new_tensor(99).expand(value.shape)


def outcome(op: str, arguments: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = getattr(pt, op)(**arguments)
    except Exception as error:
        return type(error), str(error)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("name_of_call", OPS)
def test_bad_arguments_have_the_outcome_of_the_python_path(name_of_call: str) -> None:
    arguments, op = OPS[name_of_call](), name_of_call.partition(",")[0]
    names = list(inspect.signature(getattr(pt, op)).parameters)
    assert taken_by(op, **arguments) and arguments.keys() <= set(names)
    errors = 0
    for name in names:
        for value in wrong(arguments.get(name)):
            outcomes = []
            for which in (contextlib.nullcontext, fast_path.off):
                with which():
                    outcomes.append(outcome(op, arguments | {name: value}))
            mine, pythons = outcomes
            output = f"{op}: {name}={value!r:.200}"
            if isinstance(mine[0], type) or isinstance(pythons[0], type):
                assert mine == pythons, output
                errors += 1
            elif mine[0].device.type == "cpu":
                same(mine, pythons)
    assert errors > 20 * len(names)
