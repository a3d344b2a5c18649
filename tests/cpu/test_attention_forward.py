# SPDX-License-Identifier: Apache-2.0
"""Attention forward on the CPU: within the bound of float64, at sizes that cross blocks.

The fuzzer draws every keyword at small sizes. Sizes here cross blocks of queries (96), tiles (512)
and splits of keys.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._core import native
from pytransformer.testing import bounds, oracle
from support.raw_calls import arguments

WHY_NOT = native.why_not("attention_fwd")
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
ISAS = torch.ops.pytransformer_C.cpu_isas() if WHY_NOT is None else []
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ALIGN = {None: 0, "top_left": 1, "bottom_right": 2}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.ops.pytransformer_C.set_cpu_isa(request.param)
    yield request.param
    torch.ops.pytransformer_C.set_cpu_isa("")


def draw(
    b: int, hq: int, hkv: int, lq: int, lk: int, d: int, dv: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    sizes = {"query": (b, hq, lq, d), "key": (b, hkv, lk, d), "value": (b, hkv, lk, dv)}
    return {name: torch.randn(size).to(dtype) for name, size in sizes.items()}


def attend(t: dict[str, Tensor], **keywords: Any) -> dict[str, Tensor]:
    out, lse = pt.attention(**t, return_lse=True, backend="cpu", strict=True, **keywords)
    return {"out": out, "lse": lse}


def check(t: dict[str, Tensor], **keywords: Any) -> None:
    """Check every instruction set against one exact solution, the slowest part."""
    exact = oracle.solve(**t, **keywords)
    try:
        for name in ISAS:
            torch.ops.pytransformer_C.set_cpu_isa(name)
            wrong = [
                str(c)
                for c in bounds.check(exact, attend(t, **keywords), t["query"].dtype)
                if not c.ok
            ]
            assert not wrong, f"{name}: {'; '.join(wrong)}"
    finally:
        torch.ops.pytransformer_C.set_cpu_isa("")


def raw(
    query: Tensor, key: Tensor, value: Tensor, *, causal: str | None = None, left: int = -1,
    right: int = -1, p: float = 0.0,
    first: int = 0, starts: tuple[int, int] = (0, 0), longest: tuple[int, int] | None = None,
    **terms: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call the raw op, which takes absolute starts and checks values itself."""
    rows, heads = (
        (query.shape[0], query.shape[1]) if query.dim() == 3 else (query.shape[2], query.shape[1])
    )
    out = torch.full((*query.shape[:-1], value.shape[-1]), math.nan, dtype=query.dtype)
    lse = torch.full((heads, rows) if query.dim() == 3 else query.shape[:3], math.nan)
    longest = longest or (query.shape[2], key.shape[2])
    raw = torch.ops.pytransformer_C.attention_fwd.default
    given = {
        "query": query, "key": key, "value": value, "out": out, "lse": lse, **terms,
        "dropout_seed": torch.tensor(77), "align": ALIGN[causal], "left": left, "right": right,
        "global_keys": first, "query_start": starts[0], "key_start": starts[1],
        "num_queries": longest[0], "num_keys": longest[1], "scale": query.shape[-1] ** -0.5,
        "dropout_p": p,
    }  # fmt: skip
    raw(*arguments(raw, **given))
    return out, lse


SHAPES = {
    "blocks": (1, 2, 2, 200, 1100, 64, 64),  # three blocks of queries, three tiles of keys
    "odd": (2, 3, 3, 131, 579, 40, 72),
    "grouped": (2, 8, 2, 100, 530, 33, 17),
    "stacked": (2, 8, 2, 9, 2100, 64, 64),  # the heads of a group in one block, keys split
    "decode": (3, 4, 1, 1, 1300, 128, 128),
    "wide": (1, 1, 1, 20, 70, 512, 300),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_across_blocks_within_the_bound(shape: str, dtype: torch.dtype) -> None:
    t = draw(*SHAPES[shape], dtype)
    check(t, causal="bottom_right")
    lengths = torch.randint(0, t["key"].shape[2] + 1, (t["key"].shape[0],))
    check(t, key_lengths=lengths, softcap=3.0)


def segments(length: int, documents: int) -> Tensor:
    return torch.randint(0, documents, (2, length)).sort(1).values


KEYWORDS: dict[str, dict[str, Any]] = {
    "window": dict(window=(70, 30)),
    "causal window": dict(window=(150, None), causal="bottom_right"),
    "prefix": dict(causal="top_left", prefix_lengths=torch.tensor([300, 0])),
    "lengths": dict(
        query_lengths=torch.tensor([111, 40]),
        key_lengths=torch.tensor([541, 17]),
        causal="bottom_right",
    ),
    "sorted segments": dict(query_segments=segments(131, 4), key_segments=segments(545, 4)),
    "unsorted segments": dict(
        query_segments=torch.randint(0, 5, (2, 131)), key_segments=torch.randint(0, 5, (2, 545))
    ),
    "key padding": dict(attn_mask=torch.rand(2, 1, 1, 545) < 0.6),
    "mask": dict(attn_mask=torch.rand(131, 545) < 0.3, scale=-0.2),
    "float mask": dict(
        attn_mask=torch.randn(2, 1, 131, 1), bias=torch.randn(1, 2, 1, 545).bfloat16()
    ),
    "alibi": dict(bias=pt.AlibiBias(torch.tensor([0.5, 0.02])), causal="bottom_right"),
    "sinks": dict(
        sinks=torch.tensor([6.0, -torch.inf]),
        key_lengths=torch.tensor([541, 17]),
        causal="bottom_right",
    ),
    "t5": dict(bias=pt.RelativePositionBias(torch.randn(32, 2), True, 128), window=(300, 300)),
    "one-sided t5": dict(
        bias=pt.RelativePositionBias(torch.randn(16, 2), False, 64),
        attn_mask=torch.rand(131, 545) < 0.7,
    ),
    "dropout": dict(dropout_p=0.3, dropout_seed=-12345678901, window=(None, 200)),
    "everything dropped": dict(dropout_p=1.0, dropout_seed=1),
}


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", KEYWORDS)
def test_keywords_over_several_tiles_within_the_bound(name: str, dtype: torch.dtype) -> None:
    t = draw(2, 2, 1, 131, 545, 32, 48, dtype)
    check(t, **KEYWORDS[name])
    few = t | {"query": t["query"][:, :, :5]}
    shorter = {
        n: k[:, :5] if n == "query_segments" else k[:5] if n == "attn_mask" and k.dim() == 2 else k
        for n, k in KEYWORDS[name].items()
    }
    if (
        isinstance(shorter.get("attn_mask"), Tensor)
        and shorter["attn_mask"].dim() == 4
        and shorter["attn_mask"].shape[2] > 1
    ):
        shorter["attn_mask"] = shorter["attn_mask"][:, :, :5]
    if "query_lengths" in shorter:
        shorter["query_lengths"] = torch.tensor([5, 2])
    check(few, **shorter)


@pytest.mark.parametrize("shape", ("blocks", "grouped", "stacked", "decode"))
def test_bits_do_not_depend_on_threads_or_other_sequences(shape: str, isa: str) -> None:
    sizes = list(SHAPES[shape])
    sizes[0] = 3
    t = draw(*sizes, torch.bfloat16)
    keywords = dict(
        dropout_p=0.1,
        dropout_seed=3,
        bias=torch.randn(1, 1, sizes[3], sizes[4]),
        causal="bottom_right",
    )
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = attend(t, **keywords)
        torch.set_num_threads(2)
        two = attend(t, **keywords)
    finally:
        torch.set_num_threads(threads)
    alone = attend({n: x[:1] for n, x in t.items()}, **keywords)
    for name in one:
        assert torch.equal(one[name], two[name]), name
        assert torch.equal(one[name][:1], alone[name]), name


@pytest.mark.parametrize("p", (0.0, 0.25))
def test_packed_sequences_equal_padded_ones(p: float, isa: str) -> None:
    lengths_q, lengths_k = torch.tensor([130, 0, 7, 1]), torch.tensor([600, 5, 0, 1040])
    t = draw(4, 4, 2, 130, 1040, 64, 64, torch.float32)
    out, lse = raw(
        *t.values(), query_lengths=lengths_q, key_lengths=lengths_k, causal="bottom_right", p=p
    )

    def pack(x: Tensor, lengths: Tensor) -> Tensor:
        rows = [x[b, :, : int(n)].transpose(0, 1) for b, n in enumerate(lengths)]
        return torch.cat([*rows, torch.full_like(rows[0][:1], math.nan).expand(3, -1, -1)])

    def offsets(lengths: Tensor) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])

    query, key, value = (
        pack(t["query"], lengths_q),
        pack(t["key"], lengths_k),
        pack(t["value"], lengths_k),
    )
    packed, packed_lse = raw(query, key, value, cu_seqlens_q=offsets(lengths_q),
        cu_seqlens_k=offsets(lengths_k),
        longest=(130, 1040),
                             causal="bottom_right", p=p)  # fmt: skip
    torch.testing.assert_close(packed[:-3], pack(out, lengths_q)[:-3], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        packed_lse.T[:-3], pack(lse[..., None], lengths_q)[:-3, :, 0], rtol=1e-5, atol=1e-6
    )
    assert packed[-3:].count_nonzero() == 0 and bool((packed_lse[:, -3:] == -math.inf).all())


def test_chunks_by_absolute_starts_equal_the_full_call(isa: str) -> None:
    """A ring of devices splits queries and keys and merges by lse; dropout and ALiBi are on."""
    t = draw(1, 2, 2, 150, 421, 16, 16, torch.float32)
    terms = dict(slopes=torch.tensor([0.05, 0.3]), p=0.2, left=100, right=290, first=20)
    whole, whole_lse = raw(*t.values(), **terms)
    for q0, q1 in ((0, 61), (61, 150)):
        parts = [raw(t["query"][:, :, q0:q1].contiguous(), t["key"][:, :, k0:k1],
            t["value"][:, :, k0:k1], starts=(q0, k0), **terms)
                 for k0, k1 in ((0, 133), (133, 421))]  # fmt: skip
        lse = torch.stack([part_lse for _, part_lse in parts])
        weight = (lse - lse.logsumexp(0)).exp()[..., None]
        torch.testing.assert_close(
            sum(w * out for w, (out, _) in zip(weight, parts)),
            whole[:, :, q0:q1],
            rtol=2e-5,
            atol=2e-5,
        )
        torch.testing.assert_close(lse.logsumexp(0), whole_lse[:, :, q0:q1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("few", (False, True))
def test_hidden_keys_do_not_affect_the_output(few: bool, isa: str) -> None:
    t = draw(1, 2, 1, 4 if few else 120, 700, 32, 32, torch.bfloat16)
    alive = torch.rand(700) < 0.8
    alive[600:] = False
    hidden = torch.where(alive, 0.0, -math.inf)
    expected = attend(t, attn_mask=alive[None, None, None])
    for name in ("key", "value"):
        t[name][:, :, ~alive] = math.nan
    for keywords in (
        dict(attn_mask=alive[None, None, None]),
        dict(attn_mask=hidden[None, None, None]),
    ):
        found = attend(t, **keywords)
        torch.testing.assert_close(found["out"], expected["out"], rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(found["lse"], expected["lse"])


@pytest.mark.parametrize("rows", (1, 2, 9, 120))
@pytest.mark.parametrize("kind", ("bool", "float", "bias", "segments", "sorted_segments"))
def test_keys_hidden_by_a_dense_mask_do_not_affect_the_output(
    kind: str, rows: int, isa: str
) -> None:
    t = draw(2, 4, 2, rows, 600, 40, 24, torch.bfloat16)
    seen = torch.rand(2, 1 if kind != "bias" else 4, rows, 600) < 0.5
    documents = torch.randint(3, (2, 600))
    documents = documents.sort(-1)[0] if kind == "sorted_segments" else documents
    keywords: dict[str, Any] = {
        "bool": {"attn_mask": seen},
        "float": {"attn_mask": torch.where(seen, 0.5, -math.inf)},
        "bias": {"bias": torch.where(seen, 0.5, -math.inf)},
    }.get(kind, {"query_segments": torch.randint(2, (2, rows)) * 2, "key_segments": documents})
    dead = torch.zeros(2, 2, 600, dtype=torch.bool)
    dead[:, :, 3::7] = True
    if "segments" in kind:
        dead[:] = (documents == 1)[:, None]
    elif kind == "bias":  # each key/value head has two query heads
        keywords["bias"].masked_fill_(dead.repeat_interleave(2, 1)[:, :, None], -math.inf)
    else:
        keywords["attn_mask"].masked_fill_(
            dead[:, :1, None], False if kind == "bool" else -math.inf
        )
    expected = attend(t, **keywords)
    assert expected["out"].isfinite().all()
    t["key"][dead], t["value"][dead] = math.nan, math.inf
    found = attend(t, **keywords)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_extreme_and_dead_rows(dtype: torch.dtype, isa: str) -> None:
    t = draw(1, 1, 1, 130, 600, 16, 16, dtype)
    mask = torch.zeros(130, 600)
    mask[7] = torch.finfo(torch.float32).min
    mask[8] = -math.inf
    mask[9, :-1] = -math.inf
    found = attend(t, attn_mask=mask)
    mean = t["value"].double().mean(2)[0, 0]
    torch.testing.assert_close(found["out"][0, 0, 7].double(), mean, rtol=1e-2, atol=1e-3)
    assert found["out"][0, 0, 8].count_nonzero() == 0 and found["lse"][0, 0, 8] == -math.inf
    assert torch.equal(found["out"][0, 0, 9], t["value"][0, 0, -1])
    assert bool(found["lse"][0, 0, 7] <= 0.999 * torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    "ramp", [1.0, 20.0, 400.0]
)  # a row's scores from the first to the last key, as powers of e
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rescaling_of_scores_that_rise_and_fall(dtype: torch.dtype, ramp: float) -> None:
    """The maximum of a row is not in its first keys.

    Weights beyond 2^8 of the running maximum rescale; beyond 2^128 they would be infinite.
    """
    t = draw(1, 2, 2, 40, 1300, 64, 64, dtype)
    rise = torch.linspace(0, ramp, 1300).view(1, 1, -1)
    rise[..., 700] = 1.5 * ramp  # in the middle of a tile
    t["query"][..., 0] = torch.where(torch.arange(40) % 3 == 0, -8.0, 8.0)
    t["key"][..., 0] = rise.to(dtype)
    for keywords in ({}, {"causal": "bottom_right"}, {"dropout_p": 0.3, "dropout_seed": 7}):
        check(t, **keywords)


def test_zero_sizes_and_many_heads(isa: str) -> None:
    for sizes in ((0, 2, 1, 3, 4, 8, 8), (2, 2, 1, 0, 4, 8, 8)):
        t = draw(*sizes, torch.float32)
        assert attend(t)["out"].numel() == 0
        assert (
            attend({**t, "query": t["query"].repeat(1, 1, 1, 2)[..., ::2]})["out"].numel() == 0
        )  # a last stride of 2
    empty = attend(draw(2, 2, 1, 3, 0, 8, 8, torch.float32))
    assert empty["out"].count_nonzero() == 0 and bool((empty["lse"] == -math.inf).all())
    t = draw(1, 70_000, 70_000, 1, 1, 4, 4, torch.float32)
    assert torch.equal(attend(t)["out"], t["value"])


def test_addresses_are_64_bit() -> None:
    far = torch.empty(2**31 + 4096, dtype=torch.bfloat16)  # untouched pages need no memory
    key = far.as_strided((1, 2, 20, 16), (0, 2**31, 16, 1))
    key.copy_(torch.randn(key.shape))
    t = draw(1, 2, 2, 20, 20, 16, 16, torch.bfloat16)
    assert torch.equal(
        attend(t | {"key": key})["out"], attend(t | {"key": key.contiguous()})["out"]
    )


SCRATCH = """
import json, torch, pytransformer as pt
query, key, value = (torch.randn(1, 16, length, 16) for length in (200, 8_000, 8_000))
held = []
for causal in (None, "bottom_right"):
    pt.attention(query, key, value, causal=causal, backend="cpu", strict=True)
    held.append(torch.ops.pytransformer_C.cpu_scratch_bytes())
print(json.dumps([torch.ops.pytransformer_C.cpu_isa(), *held]))
"""


@pytest.mark.parametrize("isa", ISAS)
def test_scratch_memory_is_bounded(isa: str) -> None:
    """Scratch is linear in the lengths: 22 MB, where a matrix of scores needs 98 MB.

    It contains packed operands of some heads and a tile per thread. The test starts a process
    because the kernels of each instruction set keep the scratch of earlier calls.
    """
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTRANSFORMER_CPU_ISA": isa}
    done = subprocess.run(
        [sys.executable, "-c", SCRATCH],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    used, full, causal = json.loads(done.stdout.splitlines()[-1])
    assert used == isa
    assert 0 < full < 32 << 20
    assert causal <= full


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (
            dict(key_lengths=torch.tensor([6, 4])),
            r"ValueError: key_lengths\[0\] is 6; expected between 0 and 5",
        ),
        (
            dict(query_lengths=torch.tensor([3, -1])),
            r"ValueError: query_lengths\[1\] is -1; expected between 0 and 3",
        ),
        (dict(prefix_lengths=torch.tensor([0, 9])), r"ValueError: prefix_lengths\[1\] is 9"),
        (
            dict(mask=torch.ones(2, 1, 3, 4, dtype=torch.bool)),
            "mask has size 4 in dimension 3; expected 5 or 1",
        ),
    ],
)
def test_values_are_checked_before_an_address_is_computed(
    terms: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        raw(*draw(2, 1, 1, 3, 5, 8, 8, torch.float32).values(), causal="top_left", **terms)


def test_unsupported_head_dims_are_refused() -> None:
    with pytest.raises(RuntimeError, match="head sizes are 513 and 8; expected 1 to 512"):
        raw(*draw(1, 1, 1, 2, 3, 513, 8, torch.float32).values())


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([1, 4, 9], r"cu_seqlens_k\[0\] is 1; expected 0"),
        ([0, 5, 3], "cu_seqlens_k falls from 5 to 3"),
        ([0, 4, 10], "cu_seqlens_k ends at 10, but there are only 9 rows"),
        ([0, 8, 9], "gives sequence 0 8 rows, but the longest was said to be 6"),
    ],
)
def test_offsets_are_checked(cu: list[int], message: str) -> None:
    query, key = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    with pytest.raises(RuntimeError, match=message):
        raw(
            query,
            key,
            key,
            cu_seqlens_q=torch.tensor([0, 4, 9]),
            cu_seqlens_k=torch.tensor(cu),
            longest=(6, 6),
        )
