# SPDX-License-Identifier: Apache-2.0
"""``page_table``: attention over paged keys and values equals the contiguous path.

Free pages, rows behind a sequence's last key and unused table entries contain NaN or invalid
indices in every test. Random problems are in tests/test_fuzz.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core.registry import OPS, trace
from pytransformer.ops.attention import attention_op
from pytransformer.testing import bounds, exact_attention, oracle
from pytransformer.testing.cases import APART, FORWARD_ONLY, Case, cases
from support.pages import Pools, in_pages, widened
from support.raw_calls import arguments

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SOLVERS = {"attention": exact_attention.padded, "attention_varlen": exact_attention.packed}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(
    lq: int, lk: int, heads: int = 4, kv: int = 2, dim: int = 16, batch: int = 4
) -> tuple[torch.Tensor, ...]:
    return (
        draw(batch, heads, lq, dim),
        draw(batch, kv, lk, dim, seed=1),
        draw(batch, kv, lk, dim + 8, seed=2),
    )


def attend(
    backend: str, query: torch.Tensor, pools: Pools, lengths: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Run paged attention on a forced backend; skip with its reason if it declines pages."""
    options |= {"page_table": pools.table, "key_lengths": lengths}
    a = attention_op.prepare(query, *pools.tensors, **options)[0]
    if (reason := attention_op.reason(backend, a)) is not None:
        pytest.skip(f"backend {backend} declines: {reason}")
    with trace() as ran:
        out, lse = pt.attention(
            query, *pools.tensors, **options, return_lse=True, backend=backend, strict=True
        )
    assert ran == [("attention_fwd", backend)]
    return torch.cat([out, lse[..., None].to(out.dtype)], -1)


def expected(
    backend: str, query: torch.Tensor, pools: Pools, lengths: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Return the contiguous path's result."""
    out, lse = pt.attention(
        query,
        *pools.contiguous,
        key_lengths=lengths,
        **options,
        return_lse=True,
        backend=backend,
        strict=True,
    )
    return torch.cat([out, lse[..., None].to(out.dtype)], -1)


# One query (split KV, read in place), a few (packed per split), many (packed once); lengths of
# zero, one key, full and partial pages, and all keys.
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("lq", [1, 5, 33, 150])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_equal_the_contiguous_path_bit_for_bit(
    backend: str, dtype: torch.dtype, lq: int, page_size: int
) -> None:
    query, key, value = (t.to(dtype) for t in qkv(lq, 650, batch=5))
    lengths = torch.tensor([0, 1, 64, 333, 650])
    pools = in_pages(key, value, lengths, page_size)
    options: list[dict[str, Any]] = [{}, {"causal": "bottom_right"}]
    options += [
        {"causal": "bottom_right", "window": (70, 0), "global_keys": 5, "sinks": draw(4, seed=9)}
    ]
    for given in options:
        found = attend(backend, query, pools, lengths, **given)
        assert torch.equal(found, expected(backend, query, pools, lengths, **given)), given


def everything(lq: int, lk: int, batch: int) -> dict[str, dict[str, Any]]:
    """Return the keywords that depend on a key's logical position."""
    mask = draw(batch, 1, lq, lk, seed=3) > -0.5
    segments = torch.arange(lk).div(90, rounding_mode="floor").expand(batch, lk)
    return {
        "window": {"causal": "bottom_right", "window": (40, 3)},
        "global keys": {"window": (20, 2), "global_keys": 70, "causal": "bottom_right"},
        "alibi": {
            "bias": pt.AlibiBias(torch.tensor([0.5, 0.1, 0.02, 0.0])),
            "causal": "bottom_right",
        },
        "t5": {
            "bias": pt.RelativePositionBias(
                draw(32, 4, seed=5), bidirectional=True, max_distance=90
            )
        },
        "softcap": {"softcap": 5.0, "sinks": draw(4, seed=6)},
        "key padding": {"attn_mask": draw(batch, 1, 1, lk, seed=7) > -0.5},
        "mask": {"attn_mask": mask},
        "floating mask": {
            "attn_mask": torch.where(mask, draw(batch, 1, lq, lk, seed=4), -torch.inf)
        },
        "bias": {"bias": draw(1, 4, lq, lk, seed=8), "query_lengths": torch.tensor([lq, 1, 0, lq])},
        "segments": {
            "query_segments": segments[:, -lq:].contiguous(),
            "key_segments": segments.contiguous(),
        },
        "unsorted segments": {
            "query_segments": torch.arange(lq).remainder(3).expand(batch, lq).contiguous(),
            "key_segments": (torch.arange(lk) * 7 % 3).expand(batch, lk).contiguous(),
        },
        "prefix": {"causal": "top_left", "prefix_lengths": torch.tensor([3, 0, 100, 300])},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 11, "causal": "bottom_right"},
    }


@pytest.mark.parametrize("lq", [1, 6, 90])
@pytest.mark.parametrize("name", everything(1, 1, 4))
def test_pages_with_other_keywords_equal_the_contiguous_path(
    backend: str, name: str, lq: int
) -> None:
    query, key, value = qkv(lq, 336)
    lengths = torch.tensor([336, 1, 100, 257])
    pools, options = in_pages(key, value, lengths, 16), everything(lq, 336, 4)[name]
    found = attend(backend, query, pools, lengths, **options)
    assert torch.equal(found, expected(backend, query, pools, lengths, **options))


def test_pages_with_a_block_mask_equal_the_contiguous_path(backend: str) -> None:
    query, key, value = qkv(90, 320)
    lengths = torch.tensor([320, 1, 100, 257])
    mask = pt.BlockMask.from_function(
        lambda b, h, i, j: (j // 32 + h) % 3 != 1, None, 4, 90, 320, block_size=32
    )
    pools = in_pages(key, value, lengths, 16)
    options = {"attn_mask": mask, "causal": "bottom_right"}
    if "block" in (
        attention_op.reason(backend, attention_op.prepare(query, key, value, **options)[0]) or ""
    ):
        pytest.skip(f"backend {backend} declines blocks of 32 pairs")
    assert torch.equal(
        attend(backend, query, pools, lengths, **options),
        expected(backend, query, pools, lengths, **options),
    )


@pytest.mark.parametrize("lq", [1, 20])
def test_pages_within_the_bound_of_float64(backend: str, lq: int) -> None:
    """The contiguous path alone could be wrong too."""
    for dtype in (torch.float32, torch.bfloat16):
        query, key, value = (t.to(dtype) for t in qkv(lq, 333))
        lengths = torch.tensor([333, 1, 100, 257])
        pools = in_pages(key, value, lengths, 7)
        options: dict[str, Any] = {
            "causal": "bottom_right",
            "window": (200, 0),
            "sinks": draw(4, seed=3),
        }
        out = attend(backend, query, pools, lengths, **options)[..., :-1]
        grads = torch.zeros_like(out), torch.zeros(out.shape[:3])
        answer = oracle.solve(query, key, value, *grads, key_lengths=lengths, **options)
        wrong = [str(c) for c in bounds.check(answer, {"out": out}, dtype, "zero_mean") if not c.ok]
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "named",
    [c for op in SOLVERS for c in cases(op, tags={APART, FORWARD_ONLY})],
    ids=lambda c: c.name,
)
def test_named_cases_within_the_bound(backend: str, named: Case) -> None:
    """Benchmarks and ``pytransformer verify`` use these cases; no tensor requires a gradient."""
    op, function = OPS[named.op], getattr(pt, named.op)
    for dtype in (torch.float32, torch.bfloat16):
        args, kwargs = named.make("cpu", dtype, seed=3, requires_grad=True)
        if (reason := op.reason(backend, op.prepare(*args, **kwargs)[0])) is not None:
            pytest.skip(f"backend {backend} declines: {reason}")
        out = function(*args, **kwargs, backend=backend, strict=True)
        answer = SOLVERS[named.op](dict(zip(op.positional, args)) | kwargs, None)
        wrong = [str(c) for c in bounds.check(answer, {"out": out}, dtype, "zero_mean") if not c.ok]
        assert not wrong, "\n".join(wrong)


def test_pages_may_be_shared_and_repeated(backend: str) -> None:
    """Sequences with a common prefix share pages and free their copies.

    One sequence may use a page twice.
    """
    query, key, value = qkv(1, 128)
    key[1:, :, :64], value[1:, :, :64] = key[:1, :, :64].clone(), value[:1, :, :64].clone()
    lengths = torch.tensor([128, 80, 64, 128])
    pools = in_pages(key, value, lengths, 16)
    table = pools.table.clone()
    table[1:, :4] = table[0, :4]
    shared = Pools(pools.tensors, table, pools.contiguous)
    want = expected(backend, query, pools, lengths)
    assert torch.equal(attend(backend, query, shared, lengths), want)

    own = set(pools.table[1, :4].tolist())  # pages of sequence 1 without a reference
    for pool in pools.tensors:
        pool[sorted(own)] = torch.nan
    assert torch.equal(attend(backend, query, shared, lengths), want)

    twice = table.clone()
    twice[:, 1] = twice[:, 0]
    rows = [t.clone() for t in pools.contiguous]
    for t in rows:
        t[:, :, 16:32] = t[:, :, :16]
    assert torch.equal(
        attend(backend, query, Pools(pools.tensors, twice, pools.contiguous), lengths),
        expected(backend, query, Pools(pools.tensors, twice, (rows[0], rows[1])), lengths),
    )


def test_sequence_does_not_depend_on_its_batch(backend: str) -> None:
    query, key, value = qkv(2, 650)
    lengths = torch.tensor([650, 3, 400, 77])
    pools = in_pages(key, value, lengths, 16)
    found = attend(backend, query, pools, lengths, causal="bottom_right")
    for b in range(4):
        alone = Pools(pools.tensors, pools.table[b : b + 1], pools.contiguous)
        assert torch.equal(
            attend(backend, query[b : b + 1], alone, lengths[b : b + 1], causal="bottom_right"),
            found[b : b + 1],
        )


def test_decoding_equals_the_full_sequence(backend: str) -> None:
    """A cache grows in place, page by page, by one and several tokens per step."""
    query, key, value = qkv(50, 50, batch=1)
    whole = pt.attention(query, key, value, causal="bottom_right", backend=backend, strict=True)
    pools = in_pages(key, value, torch.tensor([50]), 7)
    done = 0
    for new in (1, 6, 1, 13, 1, 1, 27):
        done += new
        step = attend(
            backend,
            query[:, :, done - new : done],
            pools,
            torch.tensor([done]),
            causal="bottom_right",
        )
        assert bounds.agree(step[..., :-1], whole[:, :, done - new : done]), done


def test_empty_keys_pages_and_batches(backend: str) -> None:
    query, key, value = qkv(3, 32)
    nothing = torch.zeros(4, dtype=torch.int64)
    for pages, width in ((0, 0), (0, 2), (3, 0), (3, 2)):
        pools = Pools(
            (torch.full((pages, 2, 16, 16), torch.nan), torch.full((pages, 2, 16, 24), torch.nan)),
            torch.full((4, width), 99), (key[:, :, :0], value[:, :, :0]),
        )  # fmt: skip
        found = attend(backend, query, pools, nothing)
        assert not found[..., :-1].any() and bool((found[..., -1] == -torch.inf).all())
    pools = in_pages(key, value, torch.full((4,), 32), 16)
    assert (
        attend(
            backend, query[:0], Pools(pools.tensors, pools.table[:0], pools.contiguous), nothing[:0]
        ).shape[0]
        == 0
    )
    assert attend(backend, query[:, :, :0], pools, torch.full((4,), 32)).shape[2] == 0


def test_equal_bits_for_any_number_of_threads() -> None:
    query, key, value = qkv(1, 4000)
    lengths = torch.tensor([4000, 1, 2100, 257])
    pools = in_pages(key, value, lengths, 16)
    found = attend("cpu", query, pools, lengths)
    torch.set_num_threads(2)
    assert torch.equal(attend("cpu", query, pools, lengths), found)


@pytest.mark.parametrize("entry", [-1, 9, 2**31 - 1])
def test_table_entries_outside_the_pool_raise(backend: str, entry: int) -> None:
    query, key, value = qkv(1, 64, batch=2)
    lengths = torch.tensor([64, 20])
    pools = in_pages(key, value, lengths, 16)
    attend(backend, query, pools, lengths)
    pools.table[1, 1] = entry
    with pytest.raises(ValueError, match=rf"page_table\[1, 1\] .* from 0 to 8, got {entry}"):
        attend(backend, query, pools, lengths)


def test_kernel_checks_table_entries() -> None:
    """The raw op refuses them without the Python check."""
    query, key, value = qkv(1, 64, batch=2)
    lengths = torch.tensor([64, 20])
    pools = in_pages(key, value, lengths, 16)
    attend("cpu", query, pools, lengths)
    out, lse = torch.empty(2, 4, 1, 24), torch.empty(2, 4, 1)
    pools.table[1, 1] = 9
    raw = torch.ops.pytransformer_C.attention_fwd.default
    given = arguments(
        raw, query=query, key=pools.tensors[0], value=pools.tensors[1], out=out, lse=lse,
        key_lengths=lengths, page_table=pools.table, left=-1, right=-1, num_queries=1,
        num_keys=64, scale=0.25,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match=r"page_table\[1, 1\] is 9; expected a page from 0 to 8"):
        raw(*given)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no lengths": ({"key_lengths": None}, ValueError, "page_table needs key_lengths"),
    "no tensor": ({"page_table": [[0]]}, TypeError, "page_table must be a Tensor"),
    "float": ({"page_table": torch.zeros(2, 4)}, TypeError,
        "page_table must be int32 or int64, got torch.float32"),
    "batch": ({"page_table": torch.zeros(3, 4, dtype=torch.int32)}, ValueError,
        r"must have shape \(B, pages\), B = 2, got \(3, 4\)"),
    "dimensions": ({"page_table": torch.zeros(2, dtype=torch.int32)}, ValueError,
        r"must have shape \(B, pages\)"),
    "too long": ({"key_lengths": torch.tensor([65, 3])}, ValueError,
        "key_lengths must be between 0 and 64, got 65"),
    "pages of value": ({"value": torch.zeros(8, 2, 16, 24)}, ValueError,
        "key and value must have as many pages"),
    "size of value's pages": ({"value": torch.zeros(9, 2, 8, 24)}, ValueError,
        "the same heads and page size"),
    "empty pages": ({"key": torch.zeros(9, 2, 0, 16), "value": torch.zeros(9, 2, 0, 24)},
        ValueError, "page_size at least 1"),
    "mask": ({"attn_mask": torch.ones(2, 1, 1, 20, dtype=torch.bool)}, ValueError,
        r"does not broadcast to .* = \(2, 4, 1, 64\)"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_named(what: str) -> None:
    query, key, value = qkv(1, 64, batch=2)
    lengths = torch.tensor([64, 20])
    pools = in_pages(key, value, lengths, 16)
    given: dict[str, Any] = {"query": query, "key": pools.tensors[0], "value": pools.tensors[1]}
    change, error, message = BAD[what]
    with pytest.raises(error, match=message):
        pt.attention(**{**given, "page_table": pools.table, "key_lengths": lengths, **change})


@pytest.mark.parametrize("name", ["query", "key", "value", "sinks", "bias"])
def test_gradients_are_refused(name: str) -> None:
    query, key, value = qkv(1, 64, batch=2)
    lengths = torch.tensor([64, 20])
    pools = in_pages(key, value, lengths, 16)
    tensors = {
        "query": query,
        "key": pools.tensors[0],
        "value": pools.tensors[1],
        "sinks": draw(4),
        "bias": draw(1, 4, 1, 64),
    }
    tensors[name].requires_grad_()
    options: dict[str, Any] = {**tensors, "page_table": pools.table, "key_lengths": lengths}
    with pytest.raises(
        ValueError, match=r"page_table has no gradients; call it under torch.no_grad\(\)"
    ):
        pt.attention(**options)
    with torch.no_grad():
        pt.attention(**options)
    with torch.inference_mode():
        pt.attention(**options)


def test_vmap_runs_and_torch_func_gradients_raise() -> None:
    """vmap runs one call at a time."""
    query, key, value = qkv(1, 64, batch=2)
    lengths = torch.tensor([64, 20])
    pools = in_pages(key, value, lengths, 16)

    def call(q: torch.Tensor) -> torch.Tensor:
        return pt.attention(q, *pools.tensors, page_table=pools.table, key_lengths=lengths)

    several = torch.stack([query, 2 * query])
    assert torch.equal(torch.func.vmap(call)(several), torch.stack([call(q) for q in several]))
    with pytest.raises(ValueError, match="page_table has no gradients"):
        torch.func.grad(lambda q: call(q).sum())(query)


@pytest.mark.unpoisoned
def test_compiles_and_runs_on_fake_tensors() -> None:
    query, key, value = qkv(1, 64, batch=2)
    lengths = torch.tensor([64, 20])
    pools = in_pages(key, value, lengths, 16)

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, n: torch.Tensor
    ) -> torch.Tensor:
        return pt.attention(q, k, v, page_table=table, key_lengths=n, causal="bottom_right") * 2

    args = query, *pools.tensors, pools.table, lengths
    want = call(*args)
    assert torch.equal(torch.compile(call, fullgraph=True)(*args), want)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert call(*(mode.from_tensor(t) for t in args)).shape == want.shape
    a = attention_op.prepare(*args[:3], page_table=pools.table, key_lengths=lengths)[0]
    torch.library.opcheck(
        attention_op.fwd, (*a, None, False), test_utils=("test_schema", "test_faketensor")
    )


def test_explain_counts_the_bytes_of_pages() -> None:
    query, key, value = qkv(1, 64, batch=2)
    lengths = torch.tensor([64, 20])
    pools = in_pages(key, value, lengths, 16)
    found = pt.explain(
        "attention", query, *pools.tensors, page_table=pools.table, key_lengths=lengths
    )
    assert found.reasons["torch"] == "PyTorch's kernels read no pages"
    assert found.reasons["cpu"] is None
    other = pt.explain("attention", query, *pools.contiguous, key_lengths=lengths)
    assert found.extra_bytes["cpu"] == other.extra_bytes["cpu"]
    gathered = sum(t.numel() * t.element_size() for t in pools.contiguous)
    assert found.extra_bytes["reference"] == other.extra_bytes["reference"] + gathered


def test_fuzzer_pads_keywords_to_full_pages(backend: str) -> None:
    """A call over 333 keys becomes one over 21 pages of 16."""
    query, key, value = qkv(6, 333)
    lengths = torch.tensor([333, 1, 100, 257])
    options = {**everything(6, 333, 4)["mask"], **everything(6, 333, 4)["unsorted segments"]}
    pools = in_pages(key, value, lengths, 16)
    given = widened(options, 333, pools.num_keys, 4, lengths)
    given.pop("key_lengths")
    found = attend(backend, query, pools, lengths, **given)
    want = pt.attention(
        query, key, value, key_lengths=lengths, **options, backend=backend, strict=True
    )
    assert bounds.agree(found[..., :-1], want)
