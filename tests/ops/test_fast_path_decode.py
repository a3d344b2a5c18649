# SPDX-License-Identifier: Apache-2.0
"""The C++ fast path runs a decoding step with the Python path's bits and errors.

A step is rotary, append_kv and attention over pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._core import fast_path
from support.paths import counting, needs_fast_path, results, same, same_in_both, taken, taken_by

pytestmark = [needs_fast_path, pytest.mark.usefixtures("one_thread")]
TABLE = [[5, 0, 2], [1, 4, 3]]


def rows(dtype: torch.dtype, length: int) -> list[Tensor]:
    """Return query, key and value of two sequences, with the strides of a model's projections."""
    shapes = ((2, length, 4, 16), (2, length, 2, 16), (2, length, 2, 8))
    return [torch.randn(shape, dtype=dtype).transpose(1, 2) for shape in shapes]


def cache(dtype: torch.dtype, table: torch.dtype | None) -> pt.KeyValues:
    first, room = (2, 12) if table is None else (6, 4)
    pools = (torch.zeros(first, 2, room, columns, dtype=dtype) for columns in (16, 8))
    return pt.KeyValues(*pools, None if table is None else torch.tensor(TABLE, dtype=table))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("table", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("length", [1, 3])
def test_decoding_step_equals_the_python_path(
    dtype: torch.dtype, table: torch.dtype | None, length: int
) -> None:
    """Compare outputs and the full contents of the caches."""
    query, key, value = rows(dtype, length)
    positions = torch.tensor([[8], [5]]) + torch.arange(length)
    turning, weight = pt.RotaryPositions(12), torch.randn(16)
    lengths = positions[:, -1] + 1

    def step(_: Tensor) -> tuple[Tensor, ...]:
        held = cache(dtype, table)
        turned = pt.append_kv(query, key, value, held, positions, rotary=turning, k_norm=weight)
        options: dict[str, Any] = {
            "page_table": held.page_table,
            "key_lengths": lengths,
            "causal": "bottom_right",
        }
        return turned, held.key, held.value, pt.attention(turned, held.key, held.value, **options)

    with torch.no_grad(), counting() as counts:
        step(query)
    assert counts == {("append_kv", True): 1, ("attention", True): 1}
    same_in_both(step, (query,), ())


ANGLES = torch.linspace(-2, 2, 96, dtype=torch.float64).reshape(2, 3, 16)
TURNS: dict[str, dict[str, Any]] = {
    "positions": {"positions": torch.tensor([3, 4, 5])},
    "interleaved": {"positions": torch.tensor([[3, 4, 5]], dtype=torch.int32), "interleaved": True},
    "partial": {"positions": torch.tensor([[3, 4, 5], [70000, -2, 0]]), "dims": 6},
    "yarn": {
        "positions": torch.tensor([3, 4, 5]),
        "base": 500.0,
        "scaling": pt.RotaryScaling("yarn", 4.0, 32),
    },
    "linear": {"positions": torch.tensor([3, 4, 5]), "scaling": pt.RotaryScaling("linear", 4)},
    "tables": {
        "cos": ANGLES[0, :, :8].float().cos(),
        "sin": ANGLES[0, :, :8].float().sin(),
        "dims": 8,
    },
    "tables of each sequence": {"cos": ANGLES.cos(), "sin": ANGLES.sin()},
}
PYTHONS: dict[str, dict[str, Any]] = {
    "frequencies": {"positions": torch.arange(3), "frequencies": torch.linspace(0.1, 1, 8)},
    "dynamic": {"positions": torch.arange(3), "scaling": pt.RotaryScaling("dynamic", 2.0, 2)},
    "base of integers": {"positions": torch.arange(3), "base": 10000},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", TURNS.values(), ids=TURNS)
def test_rotary_equals_the_python_path_bitwise(dtype: torch.dtype, options: dict[str, Any]) -> None:
    x, weight = (
        torch.randn(2, 3, 4, 16, dtype=dtype).transpose(1, 2).requires_grad_(),
        torch.randn(16, requires_grad=True),
    )
    for given, expected in (({}, (x,)), ({"weight": weight, "weight_offset": 1.0}, (x, weight))):
        assert taken_by("rotary", x, **options, **given)
        same_in_both(pt.rotary, (x,), expected, **options, **given)


@pytest.mark.parametrize("options", PYTHONS.values(), ids=PYTHONS)
def test_calls_that_need_python_use_the_python_path(options: dict[str, Any]) -> None:
    x = torch.randn(2, 2, 3, 16)
    assert not taken_by("rotary", x, **options)
    same_in_both(pt.rotary, (x,), (), **options)


def test_many_angles_use_the_python_path() -> None:
    x = torch.randn(1, 1, 4096, 16)
    assert taken_by("rotary", x[:, :, :2048], torch.arange(2048)) and not taken_by(
        "rotary", x, torch.arange(4096)
    )


@pytest.mark.parametrize("which", ["query", "key", "value", "key_cache", "value_cache", "q_norm"])
def test_gradients_of_a_cache_are_refused(which: str) -> None:
    query, key, value = rows(torch.float32, 1)
    held, norm = cache(torch.float32, None), torch.ones(16)
    every = dict(
        zip(
            ("query", "key", "value", "key_cache", "value_cache", "q_norm"),
            (query, key, value, *held[:2], norm),
        )
    )
    every[which].requires_grad_()
    with pytest.raises(ValueError, match="append_kv: gives no gradient"):
        pt.append_kv(query, key, value, held, torch.tensor([[1], [2]]), q_norm=norm)
    with torch.no_grad(), counting() as counts:
        pt.append_kv(query, key, value, held, torch.tensor([[1], [2]]), q_norm=norm)
    assert counts == {("append_kv", True): 1}


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_gradients_over_pages_are_refused(which: str) -> None:
    given = {
        "query": torch.randn(2, 2, 1, 16),
        "key": torch.randn(6, 2, 4, 16),
        "value": torch.randn(6, 2, 4, 16),
    }
    given[which].requires_grad_()
    options: dict[str, Any] = {
        "page_table": torch.tensor(TABLE),
        "key_lengths": torch.tensor([3, 9]),
    }
    with pytest.raises(ValueError, match="page_table has no gradients"):
        pt.attention(**given, **options)
    with torch.no_grad():
        assert taken(**given, **options)


@pytest.mark.parametrize("writes", ["fast_path", "python"])
def test_writing_a_cache_saved_for_backward_raises(writes: str) -> None:
    query, key, value = rows(torch.float32, 1)
    held, factor = cache(torch.float32, None), torch.ones(1, requires_grad=True)
    product = factor * held.key  # saves the cache for its backward

    def write() -> None:
        pt.append_kv(query, key, value, held, torch.tensor([[1], [2]]))

    if writes == "fast_path":
        write()
    else:
        with fast_path.off():
            write()
    assert held.key._version == 1 and held.value._version == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_inference_mode_caches_have_no_version() -> None:
    with torch.inference_mode():
        query, key, value = rows(torch.float32, 1)
        held = cache(torch.float32, None)
        assert taken_by("append_kv", query, key, value, held, torch.tensor([[1], [2]]))
        assert held.key[0, :, 1].equal(key[0, :, 0])


@pytest.mark.parametrize("change", ["a mask", "a bias", "a window", "segments", "softcap"])
def test_attention_over_pages_with_other_keywords(change: str) -> None:
    query, pools = torch.randn(2, 4, 3, 16), torch.randn(2, 6, 2, 4, 16)
    more: dict[str, Callable[[], dict[str, Any]]] = {
        "a mask": lambda: {"attn_mask": torch.rand(2, 1, 3, 12) > 0.3},
        "a bias": lambda: {"bias": torch.randn(4, 3, 12)},
        "a window": lambda: {"window": (4, 0), "causal": "bottom_right"},
        "segments": lambda: {
            "query_segments": torch.zeros(2, 3).long(),
            "key_segments": torch.randint(0, 2, (2, 12)),
        },
        "softcap": lambda: {"softcap": 3.0, "query_lengths": torch.tensor([1, 3])},
    }
    options = {
        "page_table": torch.tensor(TABLE),
        "key_lengths": torch.tensor([12, 7]),
        "return_lse": True,
    } | more[change]()
    assert taken(query, *pools, **options)
    same_in_both(pt.attention, (query, *pools), (), **options)


def test_page_outside_the_pool_raises_the_python_path_error() -> None:
    given = (torch.randn(2, 2, 1, 16), *torch.randn(2, 6, 2, 4, 16).unbind())
    bad = torch.tensor([[5, 0, 2], [1, 6, 3]])
    with pytest.raises(ValueError, match=r"page_table\[1, 1\] must be a page from 0 to 5, got 6"):
        pt.attention(*given, page_table=bad, key_lengths=torch.tensor([9, 5]))
    fine = results(
        pt.attention, given, (), page_table=bad, key_lengths=torch.tensor([9, 4])
    )  # that entry is not read
    same(
        fine,
        results(
            pt.attention,
            given,
            (),
            page_table=torch.tensor(TABLE),
            key_lengths=torch.tensor([9, 4]),
        ),
    )
