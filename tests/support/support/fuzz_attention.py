# SPDX-License-Identifier: Apache-2.0
"""Runs one random attention problem on one backend and checks every result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pytransformer.ops._core.dispatch import BackendError
from pytransformer.reference.eight_bit import dequantize_kv, quantize_kv
from pytransformer.testing import bounds, oracle
from pytransformer.testing.exact_attention import eight_bit_floor

from .attention_problem import Problem, in_blocks
from .draw_attention import draw
from .guarded import place
from .pages import Pools, in_pages, widened
from .poison import StrayWrite, poisoned

TAKE_NO_BLOCKS = ("torch",)  # backends without block masks get the dense mask
TAKE_NO_PAGES = ("torch",)
TAKE_NO_EIGHT_BITS = ("torch",)
THEIR_BLOCKS = 128  # a block size that every backend supports; it replaces one smaller than a tile
TAIL = 3  # rows of a packed tensor outside every sequence


@dataclass
class Run:
    """Results by name, padded ("out", "lse", gradients), and the backend of each raw op."""

    results: dict[str, Tensor | None]
    trace: list[tuple[str, str]]
    explained: str | None


class _Packing:
    """A converter of (B, H, L, ...) tensors with lengths to and from attention_varlen's."""

    def __init__(self, lengths: Tensor, longest: int) -> None:
        self.lengths, self.longest = lengths.tolist(), longest
        self.offsets = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
        self.max = max(self.lengths, default=0)

    def pack(self, x: Tensor, layout: str) -> Tensor:
        rows = [x[b, :, :n].transpose(0, 1) for b, n in enumerate(self.lengths)]
        rows.append(torch.full((TAIL, x.shape[1], *x.shape[3:]), float("nan"), dtype=x.dtype))
        return place(torch.cat(rows), layout)

    def unpack(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """Convert (total, H, ...) to (B, H, L, ...)."""
        out = torch.full(
            (len(self.lengths), x.shape[1], self.longest, *x.shape[2:]), fill, dtype=x.dtype
        )
        for b, n in enumerate(self.lengths):
            start = int(self.offsets[b])
            out[b, :, :n] = x[start : start + n].transpose(0, 1)
        return out


def _leaves(problem: Problem, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().requires_grad_(n in problem.wanted) for n, t in tensors.items()}


def _gradients(
    problem: Problem,
    leaves: dict[str, Tensor],
    out: Tensor,
    lse: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> dict[str, Tensor | None]:
    if not problem.wanted:
        return {}
    outputs, grads = [out], [grad_out]
    if lse is not None and grad_lse is not None:
        outputs, grads = [out, lse], [grad_out, grad_lse]
    found = torch.autograd.grad(
        outputs, [leaves[n] for n in problem.wanted], grads, allow_unused=True
    )
    return dict(zip(problem.wanted, found))


def run(problem: Problem, backend: str) -> Run:
    """Run the problem on a forced backend with guarded and poisoned memory."""
    from pytransformer.ops._core.registry import trace

    with poisoned(), trace() as record:
        if problem.packed:
            results, explained = _run_packed(problem, {"backend": backend, "strict": True})
        else:
            leaves = _leaves(problem, problem.tensors)
            args = leaves["query"], leaves["key"], leaves["value"]
            out, lse, explained = _call(
                problem, backend, args, problem.public_keywords(leaves), args[1].shape[2]
            )
            results = {"out": out, "lse": lse}
            results |= _gradients(problem, leaves, out, lse, problem.grad_out, problem.grad_lse)
    return Run(
        {n: t for n, t in results.items() if not (n == "lse" and t is None)},
        list(record),
        explained,
    )


def run_in_pages(problem: Problem, backend: str) -> Run:
    """Run the problem without gradients and with paged KV."""
    from pytransformer.ops._core.registry import trace

    pools, keywords = _pools(problem)
    with poisoned(), trace() as record:
        args = problem.tensors["query"], *pools.tensors
        out, lse, explained = _call(problem, backend, args, keywords, pools.num_keys)
    return Run({"out": out} if lse is None else {"out": out, "lse": lse}, list(record), explained)


def _pools(problem: Problem) -> tuple[Pools, dict[str, Any]]:
    """Return the problem's KV in pages, and its keywords over full pages."""
    assert problem.pages is not None
    key, value = problem.tensors["key"], problem.tensors["value"]
    lengths, batch = problem.keywords.get("key_lengths"), problem.tensors["query"].shape[0]
    lengths = torch.full((batch,), key.shape[2]) if lengths is None else lengths
    pools = in_pages(key, value, lengths, *problem.pages)
    keywords = problem.public_keywords(problem.tensors)
    keywords = widened(keywords, key.shape[2], pools.num_keys, batch, lengths)
    return pools, {**keywords, "page_table": pools.table}


def in_eight_bits(problem: Problem) -> Problem:
    """Return the problem with dequantized eight-bit keys and values, in float64.

    Query's dtype would add a rounding.
    """
    assert problem.eight_bits is not None
    tensors = dict(problem.tensors)
    for name in ("key", "value"):
        tensors[name] = dequantize_kv(
            *quantize_kv(tensors[name], problem.eight_bits), work=torch.float64
        )
    return replace(problem, tensors=tensors, wanted=())


def run_in_eight_bits(problem: Problem, backend: str) -> Run:
    """Run without gradients and with eight-bit KV, paged if the problem is.

    Unused rows hold NaN.
    """
    from pytransformer.ops._core.registry import trace

    assert problem.eight_bits is not None
    query, key, value = (problem.tensors[n] for n in ("query", "key", "value"))
    keywords, num_keys = problem.public_keywords(problem.tensors), key.shape[2]
    if problem.pages is not None:
        pools, keywords = _pools(problem)
        (key, value), num_keys = pools.tensors, pools.num_keys
    for name, rows in (("key", key), ("value", value)):
        rows, scale = quantize_kv(rows, problem.eight_bits)
        nobody = scale.isnan()[..., None].expand(rows.shape)
        rows = rows.view(torch.uint8).masked_fill(nobody, 0x7F).view(rows.dtype)
        layout = problem.layouts.get(name, "contiguous")
        keywords[f"{name}_scale"] = place(scale, "step" if layout == "step" else "contiguous")
        key, value = (place(rows, layout), value) if name == "key" else (key, place(rows, layout))
    with poisoned(), trace() as record:
        out, lse, explained = _call(problem, backend, (query, key, value), keywords, num_keys)
    return Run({"out": out} if lse is None else {"out": out, "lse": lse}, list(record), explained)


def _call(
    problem: Problem,
    backend: str,
    args: tuple[Tensor, ...],
    keywords: dict[str, Any],
    num_keys: int,
) -> tuple[Tensor, Tensor | None, str | None]:
    """Call attention with the mask in blocks if requested, or attention_varlen over pools.

    Return padded out and lse or None, and the backend that explain names.
    """
    import pytransformer as pt

    keywords |= {"backend": backend, "strict": True}
    if problem.packed:
        return _call_packed(problem, args, keywords, num_keys)
    if problem.block_size and backend not in TAKE_NO_BLOCKS:
        dense, lengths = keywords["attn_mask"], (args[0].shape[2], num_keys)
        keywords["attn_mask"] = in_blocks(dense, lengths, problem.block_size)
        if "block_size" in (pt.explain("attention", *args, **keywords).reasons.get(backend) or ""):
            keywords["attn_mask"] = in_blocks(dense, lengths, (THEIR_BLOCKS, THEIR_BLOCKS))
    explained = pt.explain("attention", *args, **keywords).backend
    return (*_outputs(pt.attention(*args, **keywords)), explained)


def _call_packed(
    problem: Problem, args: tuple[Tensor, ...], keywords: dict[str, Any], num_keys: int
) -> tuple[Tensor, Tensor | None, str | None]:
    """Pack query and call attention_varlen over pools, half of the time with a bound on lengths."""
    import pytransformer as pt

    assert problem.pages is not None
    query, key, value = args
    q = _Packing(keywords.pop("query_lengths"), query.shape[2])
    rows = q.pack(query, problem.layouts["query"] if problem.pages[1] % 3 == 0 else "contiguous")
    longest = (
        int(keywords["key_lengths"].max()) if len(q.lengths) and problem.pages[1] % 2 else None
    )
    given = rows, key, value, q.offsets, None, q.max, longest
    explained = pt.explain("attention_varlen", *given, **keywords).backend
    out, lse = _outputs(pt.attention_varlen(*given, **keywords))
    return q.unpack(out), None if lse is None else q.unpack(lse.mT, -torch.inf), explained


def _outputs(returned: Any) -> tuple[Tensor, Tensor | None]:
    return returned if isinstance(returned, tuple) else (returned, None)


def _run_packed(
    problem: Problem, keywords: dict[str, Any]
) -> tuple[dict[str, Tensor | None], str | None]:
    import pytransformer as pt

    t, k = problem.tensors, dict(problem.keywords)
    q, kv = (
        _Packing(k[name], t[of].shape[2])
        for name, of in (("query_lengths", "query"), ("key_lengths", "key"))
    )
    places = {
        n: problem.layouts[n] if problem.layouts[n] in ("offset", "step", "fused") else "contiguous"
        for n in ("query", "key", "value", "grad_out")
    }
    sides = {"query": q, "key": kv, "value": kv}
    packed = {n: sides[n].pack(t[n], places[n]) if n in sides else t[n] for n in t}
    leaves = _leaves(problem, packed)
    keywords |= {
        n: v for n, v in problem.public_keywords(leaves).items() if not n.endswith("_lengths")
    }
    args = leaves["query"], leaves["key"], leaves["value"], q.offsets, kv.offsets, q.max, kv.max
    explained = pt.explain("attention_varlen", *args, **keywords).backend
    out, lse = _outputs(pt.attention_varlen(*args, **keywords))
    results = {"out": q.unpack(out), "lse": None if lse is None else q.unpack(lse.mT, -torch.inf)}
    grad_lse = None if problem.grad_lse is None else q.pack(problem.grad_lse, "contiguous").mT
    grads = _gradients(
        problem, leaves, out, lse, q.pack(problem.grad_out, places["grad_out"]), grad_lse
    )
    for name, grad in grads.items():
        results[name] = sides[name].unpack(grad) if name in sides and grad is not None else grad
        if name in sides and grad is not None and bool(grad[-TAIL:].count_nonzero()):
            raise AssertionError(f"the gradient of {name} is not zero outside cu_seqlens")
    return results, explained


def judge(
    problem: Problem, solution: oracle.Solution, run: Run, backend: str
) -> tuple[list[bounds.Check], list[str]]:
    """Return every comparison with float64 and the list of other faults."""
    wrong = []
    checks = bounds.check(solution, run.results, problem.dtype, problem.limits)
    wrong += [str(c) for c in checks if not c.ok]

    exact = {
        "out": solution.dead_queries,
        "lse": solution.dead_queries,  # the sink alone, else -inf
        "query": solution.dead_queries,
        "key": solution.unseen_keys,
        "value": solution.unseen_keys,
    }
    for name, tensor in run.results.items():
        if name in exact and tensor is not None:
            where = exact[name]
            found, want = tensor.detach()[where].double(), solution.results[name].value[where]
            if bool((found != want).any()):
                wrong.append(
                    f"{name} is not {'0' if name != 'lse' else 'the sink'} in rows that take part"
                    " in no pair"
                )

    op = "attention_varlen" if problem.packed else "attention"
    expected = [(f"{op}_fwd", backend)] + [(f"{op}_bwd", backend)] * bool(problem.wanted)
    if run.trace != expected:
        wrong.append(f"ran {run.trace}, want {expected}")
    if run.explained != backend:
        wrong.append(f"explain said {run.explained}, {backend} was forced")
    return checks, wrong


def examine(
    seed: int, case: int, backends: list[str], repeat: bool
) -> tuple[Problem, dict[str, tuple[list[bounds.Check], list[str]]]]:
    """Draw one problem, solve it in float64 and check every backend on it.

    `repeat` runs each backend twice and compares bits. Declined problems have no result.
    """
    problem = draw(seed, case)
    solution = problem.solve()
    verdicts = {}
    for backend in backends:
        try:
            first = run(problem, backend)
            checks, wrong = judge(problem, solution, first, backend)
            if problem.pages and backend not in TAKE_NO_PAGES:
                more = judge(
                    replace(problem, wanted=()), solution, run_in_pages(problem, backend), backend
                )
                checks, wrong = checks + more[0], wrong + [f"in pages: {text}" for text in more[1]]
            if problem.eight_bits and backend not in TAKE_NO_EIGHT_BITS:
                eight = in_eight_bits(problem)
                keys, p = eight.tensors["key"].shape[2], eight.keywords.get("dropout_p", 0.0)
                exact = eight_bit_floor(eight.solve(), problem.eight_bits, keys, p)
                more = judge(eight, exact, run_in_eight_bits(problem, backend), backend)
                checks, wrong = (
                    checks + more[0],
                    wrong + [f"in {problem.eight_bits}: {text}" for text in more[1]],
                )
            if repeat and (
                different := bounds.other_bits(first.results, run(problem, backend).results)
            ):
                wrong.append(f"two runs differ in {', '.join(different)}")
        except BackendError:
            continue  # unsupported by the backend: the report counts these
        except (StrayWrite, AssertionError, ValueError, TypeError, RuntimeError) as error:
            checks, wrong = [], [f"{type(error).__name__}: {error}"]
        verdicts[backend] = checks, wrong
    return problem, verdicts
