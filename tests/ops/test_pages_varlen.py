# SPDX-License-Identifier: Apache-2.0
"""``page_table`` of ``attention_varlen``: packed queries over paged keys and values.

Unused memory contains NaN or invalid indices, as in test_pages.py. Random problems are in
tests/test_fuzz.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import fast_path
from pytransformer.ops._core.registry import trace
from pytransformer.ops.attention_varlen import attention_varlen_op
from pytransformer.reference.eight_bit import quantize_kv
from pytransformer.testing import bounds, oracle
from support.pages import Pools, in_pages
from support.raw_calls import arguments

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LENGTHS = torch.tensor([333, 0, 1, 64, 257])
# Decoding, speculative steps beside an idle sequence, and chunks of prompts beside decoding.
QUERIES = {"decode": (1, 1, 1, 1, 1), "steps": (5, 0, 1, 3, 4), "chunks": (1, 33, 0, 64, 150)}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Packed:
    """Packed queries, two of them in no sequence, and keys in pages."""

    def __init__(
        self,
        queries: tuple[int, ...] = QUERIES["chunks"],
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        lengths: torch.Tensor = LENGTHS,
    ) -> None:
        self.lengths, longest = lengths, max(int(lengths.max()), 1)
        self.rows, self.longest = list(queries), max(queries)
        self.cu = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0)
        self.query = draw(sum(queries) + 2, 4, 16).to(dtype)
        self.query[sum(queries) :] = torch.nan
        key = draw(len(queries), 2, longest, 16, seed=1).to(dtype)
        self.kv = key, draw(len(queries), 2, longest, 24, seed=2).to(dtype)
        self.pools = in_pages(*self.kv, lengths, page_size)

    def attend(self, backend: str, **options: Any) -> torch.Tensor:
        """Run on a forced backend; skip with its reason if it declines pages."""
        given = {"page_table": self.pools.table, "key_lengths": self.lengths, **options}
        args = self.query, *self.pools.tensors, self.cu, None, self.longest
        longest = given.pop("max_seqlen_k", None)
        a = attention_varlen_op.prepare(*args, longest, **given)[0]
        if (reason := attention_varlen_op.reason(backend, a)) is not None:
            pytest.skip(f"backend {backend} declines: {reason}")
        with trace() as ran:
            out, lse = pt.attention_varlen(
                *args, longest, **given, return_lse=True, backend=backend, strict=True
            )
        assert ran == [("attention_varlen_fwd", backend)]
        return torch.cat([out, lse.mT[..., None].to(out.dtype)], -1)

    def expected(self, backend: str, pools: Pools | None = None, **options: Any) -> torch.Tensor:
        """Return the result over packed contiguous keys, with the same bound on their number."""
        pools = pools or self.pools
        key, value = (
            torch.cat([t[b, :, :n].transpose(0, 1) for b, n in enumerate(self.lengths.tolist())])
            for t in pools.contiguous
        )
        cu_k = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        out, lse = pt.attention_varlen(
            self.query, key, value, self.cu, cu_k, self.longest, pools.num_keys, **options,
            return_lse=True, backend=backend, strict=True,
        )  # fmt: skip
        return torch.cat([out, lse.mT[..., None].to(out.dtype)], -1)

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return (total, H, D) as (B, H, longest, D), with zeros at the padding."""
        out = rows.new_zeros(len(self.rows), rows.shape[1], self.longest, rows.shape[2])
        for b, n in enumerate(self.rows):
            out[b, :, :n] = rows[int(self.cu[b]) : int(self.cu[b]) + n].transpose(0, 1)
        return out


def keywords() -> dict[str, dict[str, Any]]:
    """Return every keyword that packed queries support."""
    return {
        "nothing": {},
        "top left": {"causal": "top_left"},
        "bottom right": {"causal": "bottom_right"},
        "window": {"causal": "bottom_right", "window": (40, 3)},
        "two-sided window": {"window": (30, 200)},
        "global keys": {"window": (20, 2), "global_keys": 70, "causal": "bottom_right"},
        "alibi": {"bias": pt.AlibiBias(draw(4, seed=5).abs()), "causal": "bottom_right"},
        "t5": {"bias": pt.RelativePositionBias(draw(32, 4, seed=5), max_distance=90)},
        "softcap, sinks, scale": {"softcap": 5.0, "sinks": draw(4, seed=6), "scale": 0.3},
        "dropout": {"dropout_p": 0.3, "dropout_seed": 11, "causal": "bottom_right"},
    }


@pytest.mark.parametrize("page_size", [7, 64])
@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_equal_the_contiguous_path_bit_for_bit(
    backend: str, dtype: torch.dtype, queries: str, page_size: int
) -> None:
    problem = Packed(QUERIES[queries], page_size, dtype)
    for options in ({}, keywords()["global keys"]):
        found = problem.attend(backend, **options)
        assert torch.equal(found, problem.expected(backend, **options)), options


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("name", keywords())
def test_pages_with_other_keywords_equal_the_contiguous_path(
    backend: str, name: str, queries: str
) -> None:
    problem = Packed(QUERIES[queries])
    found = problem.attend(backend, **keywords()[name])
    assert torch.equal(found, problem.expected(backend, **keywords()[name]))


@pytest.mark.parametrize("queries", QUERIES)
def test_packed_equals_padded_over_the_same_pages(backend: str, queries: str) -> None:
    problem = Packed(QUERIES[queries])
    options: dict[str, Any] = {"causal": "bottom_right", "sinks": draw(4, seed=3)}
    found = problem.attend(backend, **options)
    out, lse = pt.attention(
        problem.padded(problem.query), *problem.pools.tensors, page_table=problem.pools.table,
        key_lengths=problem.lengths, query_lengths=problem.cu.diff(), **options, return_lse=True,
        backend=backend, strict=True,
    )  # fmt: skip
    want = torch.cat([out, lse[..., None]], -1)
    for b, n in enumerate(problem.rows):
        start = int(problem.cu[b])
        assert torch.equal(found[start : start + n].transpose(0, 1), want[b, :, :n])


@pytest.mark.parametrize("eight", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("queries", QUERIES)
def test_eight_bit_pools_equal_the_padded_call(
    backend: str, queries: str, eight: torch.dtype
) -> None:
    problem = Packed(QUERIES[queries])
    key, value = (t.nan_to_num(0.0) for t in problem.pools.tensors)
    (key, key_scale), (value, value_scale) = (quantize_kv(t, eight) for t in (key, value))
    problem.pools = Pools((key, value), problem.pools.table, problem.pools.contiguous)
    scales = {"key_scale": key_scale, "value_scale": value_scale, "causal": "bottom_right"}
    found = problem.attend(backend, **scales)[..., :-1]
    want = pt.attention(
        problem.padded(problem.query), key, value, page_table=problem.pools.table,
        key_lengths=problem.lengths, query_lengths=problem.cu.diff(), **scales, backend=backend,
        strict=True,
    )  # fmt: skip
    for b, n in enumerate(problem.rows):
        start = int(problem.cu[b])
        assert torch.equal(found[start : start + n].transpose(0, 1), want[b, :, :n])


def test_pages_within_the_bound_of_float64(backend: str) -> None:
    """The contiguous path alone could be wrong too."""
    for dtype in (torch.float32, torch.bfloat16):
        problem = Packed(page_size=7, dtype=dtype)
        options: dict[str, Any] = {
            "causal": "bottom_right", "window": (200, 0), "sinks": draw(4, seed=3)
        }  # fmt: skip
        out = problem.padded(problem.attend(backend, **options))[..., :-1]
        grads = torch.zeros_like(out), torch.zeros(out.shape[:3])
        answer = oracle.solve(
            problem.padded(problem.query), *problem.kv, *grads, key_lengths=problem.lengths,
            query_lengths=problem.cu.diff(), **options,
        )  # fmt: skip
        wrong = [str(c) for c in bounds.check(answer, {"out": out}, dtype, "zero_mean") if not c.ok]
        assert not wrong, "\n".join(wrong)


def test_max_seqlen_k_may_be_any_bound_of_the_lengths(backend: str) -> None:
    problem = Packed()
    want = problem.attend(backend, causal="bottom_right")[..., :-1]
    for longest in (333, 340, 10**9):
        found = problem.attend(backend, causal="bottom_right", max_seqlen_k=longest)
        assert bounds.agree(found[..., :-1], want)
    with pytest.raises(ValueError, match="key_lengths must be between 0 and 332, got 333"):
        problem.attend(backend, max_seqlen_k=332)


def test_chunks_of_a_prompt_equal_the_full_sequence(backend: str) -> None:
    """A prefix in shared pages, then chunks of any size and single steps."""
    full = Packed((50,), 7, lengths=torch.tensor([50]))
    want = pt.attention(
        full.padded(full.query), *full.kv, causal="bottom_right", backend=backend, strict=True
    )[0].transpose(0, 1)
    done, query = 0, full.query
    for new in (1, 6, 1, 13, 1, 1, 27):
        done += new
        full.query, full.cu = query[done - new : done], torch.tensor([0, new])
        full.longest, full.lengths = new, torch.tensor([done])
        step = full.attend(backend, causal="bottom_right")[..., :-1]
        assert bounds.agree(step, want[done - new : done]), done


def test_empty_keys_pages_and_batches(backend: str) -> None:
    nothing = torch.zeros(5, dtype=torch.int64)
    for pages, width in ((0, 0), (0, 2), (3, 0), (3, 2)):
        problem = Packed(lengths=nothing)
        pools = [torch.full((pages, 2, 16, d), torch.nan) for d in (16, 24)]
        problem.pools = Pools((pools[0], pools[1]), torch.full((5, width), 99), problem.kv)
        found = problem.attend(backend)
        assert not found[..., :-1].any() and bool((found[..., -1] == -torch.inf).all())
    for queries in ((0, 0, 0, 0, 0), ()):
        problem = Packed((*queries, 1), lengths=torch.full((len(queries) + 1,), 32))
        problem.cu = problem.cu[:-1]
        problem.lengths, problem.longest = problem.lengths[:-1], 0
        problem.pools = Pools(problem.pools.tensors, problem.pools.table[:-1], problem.kv)
        found = problem.attend(backend)
        assert not found[..., :-1].any() and bool((found[..., -1] == -torch.inf).all())


def test_equal_bits_for_any_number_of_threads() -> None:
    problem = Packed((1, 7, 2, 90), lengths=torch.tensor([4000, 1, 2100, 257]))
    found = problem.attend("cpu", causal="bottom_right")
    torch.set_num_threads(2)
    assert torch.equal(problem.attend("cpu", causal="bottom_right"), found)


@pytest.mark.parametrize("entry", [-1, 46, 2**31 - 1])
def test_table_entries_outside_the_pool_raise(backend: str, entry: int) -> None:
    problem = Packed()
    assert problem.pools.tensors[0].shape[0] == 46
    problem.pools.table[3, 1] = entry
    with pytest.raises(
        ValueError, match=rf"attention_varlen: page_table\[3, 1\] .* from 0 to 45, got {entry}"
    ):
        problem.attend(backend)


def test_kernel_checks_table_entries_and_lengths() -> None:
    """The raw op refuses them without the Python check."""
    problem = Packed()
    problem.attend("cpu")
    rows = problem.query.shape[0]
    raw = torch.ops.pytransformer_C.attention_fwd.default

    def call(**changes: Any) -> None:
        given = dict(
            query=problem.query, key=problem.pools.tensors[0], value=problem.pools.tensors[1],
            out=torch.empty(rows, 4, 24), lse=torch.empty(4, rows), key_lengths=problem.lengths,
            page_table=problem.pools.table, cu_seqlens_q=problem.cu.long(), left=-1, right=-1,
            num_queries=problem.longest, num_keys=336, scale=0.25,
        )  # fmt: skip
        raw(*arguments(raw, **{**given, **changes}))

    call()
    table = problem.pools.table.clone()
    table[3, 1] = 46
    with pytest.raises(RuntimeError, match=r"page_table\[3, 1\] is 46; expected a page from 0"):
        call(page_table=table)
    with pytest.raises(RuntimeError, match=r"key_lengths\[0\] is 333; expected between 0 and 332"):
        call(num_keys=332)
    with pytest.raises(RuntimeError, match=r"key_lengths\[0\] is 333; expected between 0 and 320"):
        call(page_table=problem.pools.table[:, :20].contiguous())
    with pytest.raises(RuntimeError, match="page_table needs key_lengths"):
        call(key_lengths=None)
    with pytest.raises(RuntimeError, match="come together"):
        call(cu_seqlens_k=problem.cu.long())


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no lengths": ({"key_lengths": None}, ValueError, "page_table needs key_lengths"),
    "offsets of keys": ({"cu_seqlens_k": torch.tensor([0, 3, 9])}, ValueError,
        "cu_seqlens_k must be None with page_table, got a Tensor; key_lengths has"),
    "lengths without pages": ({"page_table": None, "key": draw(9, 2, 16),
        "value": draw(9, 2, 24)}, ValueError, "key_lengths must be None without page_table"),
    "no offsets and no pages": ({"page_table": None, "key_lengths": None, "key": draw(9, 2, 16),
        "value": draw(9, 2, 24)}, TypeError, "cu_seqlens_k must be a Tensor, got NoneType"),
    "scales without pages": ({"page_table": None, "key_lengths": None, "key": draw(9, 2, 16),
        "value": draw(9, 2, 24), "value_scale": torch.ones(())}, ValueError,
        "value_scale must be None without page_table"),
    "scales of floating pools": ({"key_scale": torch.ones(())}, ValueError,
        "key_scale belongs to a key in float8_e4m3fn or int8"),
    "packed rows": ({"key": draw(9, 2, 16), "value": draw(9, 2, 24)}, ValueError,
        "key must have 4 dimensions"),
    "pools without pages": ({"page_table": None, "key_lengths": None}, ValueError,
        "key must have 3 dimensions"),
    "no tensor": ({"page_table": [[0]]}, TypeError, "page_table must be a Tensor"),
    "float": ({"page_table": torch.zeros(2, 4)}, TypeError,
        "page_table must be int32 or int64, got torch.float32"),
    "batch": ({"page_table": torch.zeros(3, 4, dtype=torch.int32)}, ValueError,
        r"must have shape \(B, pages\), B = 2, got \(3, 4\)"),
    "lengths of another batch": ({"key_lengths": torch.tensor([3, 4, 5])}, ValueError,
        r"key_lengths must have shape \(2,\), got \(3\)"),
    "floating lengths": ({"key_lengths": torch.tensor([3.0, 4.0])}, TypeError,
        "key_lengths must have an integer dtype"),
    "too long": ({"key_lengths": torch.tensor([65, 3])}, ValueError,
        "key_lengths must be between 0 and 64, got 65"),
    "negative": ({"key_lengths": torch.tensor([5, -3])}, ValueError,
        "key_lengths must be between 0 and 64, got -3"),
    "negative bound": ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k must be an int >= 0"),
    "pages of value": ({"value": torch.zeros(8, 2, 16, 24)}, ValueError,
        "key and value must have the same pages, heads and page size"),
    "empty pages": ({"key": torch.zeros(9, 2, 0, 16), "value": torch.zeros(9, 2, 0, 24)},
        ValueError, "page_size at least 1"),
    "head size": ({"query": draw(5, 4, 24)}, ValueError, "the same head size"),
    "heads": ({"query": draw(5, 3, 16)}, ValueError, "must be a multiple of key's heads"),
    "dtype": ({"query": draw(5, 4, 16).half()}, TypeError, "query .*float16"),
    "dense bias": ({"bias": torch.zeros(4, 5, 64)}, TypeError, "dense bias has no packed form"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_named(what: str) -> None:
    problem = Packed((4, 1), lengths=torch.tensor([64, 20]))
    change, error, message = BAD[what]
    given: dict[str, Any] = {
        "query": problem.query[:5], "key": problem.pools.tensors[0],
        "value": problem.pools.tensors[1], "cu_seqlens_q": problem.cu, "cu_seqlens_k": None,
        "max_seqlen_q": 4, "max_seqlen_k": None, "page_table": problem.pools.table,
        "key_lengths": problem.lengths,
    }  # fmt: skip
    pt.attention_varlen(**given)
    with pytest.raises(error, match=f"attention_varlen: .*{message}"):
        pt.attention_varlen(**{**given, **change})


@pytest.mark.parametrize("name", ["query", "key", "value", "sinks"])
def test_gradients_are_refused(name: str) -> None:
    problem = Packed()
    tensors = dict(zip(("query", "key", "value"), (problem.query, *problem.pools.tensors)))
    tensors["sinks"] = draw(4)
    tensors[name].requires_grad_()

    def call() -> None:
        pt.attention_varlen(
            **tensors, cu_seqlens_q=problem.cu, cu_seqlens_k=None, max_seqlen_q=150,
            max_seqlen_k=None, page_table=problem.pools.table, key_lengths=problem.lengths,
        )  # fmt: skip

    with pytest.raises(ValueError, match=r"varlen: page_table has no gradients; call it under"):
        call()
    with torch.no_grad():
        call()
    with torch.inference_mode():
        call()


@pytest.mark.parametrize("name", keywords())
def test_fast_path_equals_python(name: str) -> None:
    """The C++ fast path serves the call and gives the bits of the Python path."""
    if (reason := fast_path.why_not()) is not None:
        pytest.skip(reason)
    problem = Packed()
    for longest in (None, 333, 10**6):
        for table in (problem.pools.table, problem.pools.table.int()):
            given = {"page_table": table, "key_lengths": problem.lengths.int()}
            args = problem.query, *problem.pools.tensors, problem.cu, None, 150, longest
            with trace() as ran:
                found = pt.attention_varlen(*args, **given, **keywords()[name], return_lse=True)
            assert ran == [("attention_varlen_fwd", "cpu")]
            with fast_path.off():
                want = pt.attention_varlen(*args, **given, **keywords()[name], return_lse=True)
            assert all(map(torch.equal, found, want))


@pytest.mark.unpoisoned
def test_compiles_and_runs_on_fake_tensors() -> None:
    problem = Packed()

    def call(*t: torch.Tensor) -> torch.Tensor:
        return 2 * pt.attention_varlen(
            *t[:4], None, 150, None, page_table=t[4], key_lengths=t[5], causal="bottom_right"
        )

    args = problem.query, *problem.pools.tensors, problem.cu, problem.pools.table, problem.lengths
    want = call(*args)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(*args), want)
    narrow = problem.lengths.clamp(max=320)
    fewer = *args[:4], problem.pools.table[:, :20], narrow
    assert torch.equal(compiled(*fewer), call(*fewer))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert call(*(mode.from_tensor(t) for t in args)).shape == want.shape
    given: dict[str, Any] = {"page_table": problem.pools.table, "key_lengths": problem.lengths}
    a = attention_varlen_op.prepare(*args[:4], None, 150, 333, **given)[0]
    torch.library.opcheck(
        attention_varlen_op.fwd, (*a, None, False), test_utils=("test_schema", "test_faketensor")
    )


def test_explain_names_the_backends() -> None:
    problem = Packed()
    found = pt.explain(
        "attention_varlen", problem.query, *problem.pools.tensors, problem.cu, None, 150, None,
        page_table=problem.pools.table, key_lengths=problem.lengths,
    )  # fmt: skip
    assert found.reasons["torch"] == "PyTorch's kernels read no pages"
    assert found.reasons["cpu"] is None and found.backend == "cpu"
