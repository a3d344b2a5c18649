# SPDX-License-Identifier: Apache-2.0
"""Check one call of attention against float64: outputs, lse and every gradient."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from pytransformer.testing import bounds, oracle
from pytransformer.testing.cases import leaves


def run_attention(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return "out", "lse" and the gradient of every floating argument, on a forced backend."""
    import pytransformer as pt

    found = leaves("attention", args, kwargs)
    for leaf in found.values():
        leaf.requires_grad_()
    out, lse = pt.attention(*args, **{**kwargs, "return_lse": True}, backend=backend, strict=True)
    outputs, grads = ([out], [grad_out]) if grad_lse is None else ([out, lse], [grad_out, grad_lse])
    gradients = torch.autograd.grad(outputs, list(found.values()), grads)
    return {"out": out, "lse": lse, **dict(zip(found, gradients))}


def check_attention(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    backend: str,
    *,
    data: str = "zero_mean",
    seed: int = 0,
    poisoned: bool = False,
) -> dict[str, Tensor]:
    """Assert that a call with random upstream gradients is within the bounds; return its results.

    With ``poisoned``, rows of query, key, value and upstream gradient without a visible pair hold
    NaN, which must not reach any result.
    """
    query, key, value = args
    generator = torch.Generator().manual_seed(seed)
    grad_out = torch.randn(*query.shape[:3], value.shape[3], generator=generator).to(query.dtype)
    grad_lse = torch.randn(query.shape[:3], generator=generator)
    grad_lse = grad_lse.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
    solution = oracle.solve(query, key, value, grad_out, grad_lse, **kwargs)
    if poisoned:
        dead, unseen = solution.dead_queries, solution.unseen_keys
        rows = (dead, unseen, unseen, dead)
        tensors = (query, key, value, grad_out)
        query, key, value, grad_out = (
            t.detach().masked_fill(r[..., None], torch.nan) for t, r in zip(tensors, rows)
        )
    results = run_attention((query, key, value), kwargs, backend, grad_out, grad_lse)
    wrong = [str(c) for c in bounds.check(solution, results, query.dtype, data) if not c.ok]
    assert not wrong, "\n".join(wrong)
    return results


def check_starts(
    backend: str, causal: str, dtype: torch.dtype = torch.float32, mask_kind: str = "none"
) -> None:
    """Assert that a part of a longer sequence uses absolute indices, forward and backward.

    This covers visibility, biases and dropout. The mask uses the part's indices: "none", "padding"
    that hides some keys from all queries, "floating" in float32 with a gradient, or "tiles", a
    floating one in `dtype` that TMA can load.
    """
    from pytransformer.ops.attention import attention_op
    from pytransformer.ops.masks import RelativePositionBias

    query, key, value = (
        torch.randn(2, 2, n, 24, dtype=dtype, requires_grad=True) for n in (45, 72, 72)
    )
    table = torch.randn(8, 2, requires_grad=True)
    bias = RelativePositionBias(table, bidirectional=True, max_distance=20)
    lengths = {"query_lengths": torch.tensor([130, 100]), "key_lengths": torch.tensor([110, 97])}
    floating = torch.randn(
        1, 2, 45, 72, dtype=dtype if mask_kind == "tiles" else torch.float32, requires_grad=True
    )
    mask = {"none": None, "padding": torch.rand(2, 1, 1, 72) > 0.2}.get(mask_kind, floating)
    inputs = [query, key, value, table, *([floating] if mask is floating else [])]
    results = {}
    for name in ("reference", backend):
        a, _, _ = attention_op.prepare(
            query,
            key,
            value,
            attn_mask=mask,
            bias=bias,
            dropout_p=0.2,
            dropout_seed=7,
            window=(60, 40),
        )
        a = a._replace(query_start=90, key_start=45, causal=causal, **lengths)
        out, lse = attention_op(a, name, True)
        lse = lse.masked_fill(lse.isinf(), 0.0)
        results[name] = [out, lse, *torch.autograd.grad([out.square().sum() + lse.sum()], inputs)]
    for ours, want in zip(results[backend], results["reference"]):
        assert bounds.relative_error(ours, want) < 25 * torch.finfo(dtype).eps


def check_slices(backend: str, dtype: torch.dtype = torch.float32, packed: bool = False) -> None:
    """Assert that a call on some sequences and heads gives the bits of the full call.

    batch_start and head_start select them, forward and backward, with dropout. The dropout mask
    must also equal the reference's if the indices exceed 2^31 and 2^32.
    """
    from pytransformer.ops.attention import attention_op
    from pytransformer.ops.attention_varlen import attention_varlen_op
    from pytransformer.reference.philox import keep_mask

    batch, heads, group, length = 3, 4, 2, 41
    query, key, value, grad = (
        torch.randn(batch, h, length, 16).to(dtype)
        for h in (heads, heads // group, heads // group, heads)
    )
    op = attention_varlen_op if packed else attention_op
    rows = lambda t: t.transpose(1, 2).flatten(0, 1) if packed else t
    back = lambda t: t.unflatten(0, (-1, length)).transpose(1, 2) if packed else t

    def call(b: slice, h: slice, **starts: int) -> list[Tensor]:
        of_keys = slice(h.start // group, h.stop // group)
        inputs = [
            rows(t[b, of]).requires_grad_()
            for t, of in ((query, h), (key, of_keys), (value, of_keys))
        ]
        offsets = torch.arange(b.stop - b.start + 1) * length
        ends = (offsets, offsets, length, length) if packed else ()
        a, _, _ = op.prepare(*inputs, *ends, causal="top_left", dropout_p=0.3, dropout_seed=-5)
        out, _ = op(a._replace(**starts), backend, True)
        return [
            back(t.detach()) for t in (out, *torch.autograd.grad(out, inputs, rows(grad[b, h])))
        ]

    whole = call(slice(0, batch), slice(0, heads))
    for b, h in (
        (slice(1, 3), slice(0, 4)),
        (slice(0, 3), slice(2, 4)),
        (slice(2, 3), slice(2, 4)),
    ):
        for turn in (0, 2**32):
            part = call(b, h, batch_start=b.start + turn, head_start=h.start - turn)
            for n, (ours, want) in enumerate(zip(part, whole)):
                of = slice(h.start // group, h.stop // group) if n > 1 else h
                assert torch.equal(ours, want[b, of]), f"result {n} of sequences {b} and heads {h}"
    if packed:
        return
    zeros, eye = (
        torch.zeros(2, 2, 5, 32, dtype=dtype),
        torch.eye(32, dtype=dtype).expand(2, 2, -1, -1),
    )
    for batch_start, head_start in ((2**31 - 1, 2**32 - 1), (2**32 - 1, 2**31 - 1)):
        a, _, _ = attention_op.prepare(zeros, eye, eye, dropout_p=0.3, dropout_seed=9)
        out, _ = attention_op(
            a._replace(batch_start=batch_start, head_start=head_start), backend, True
        )
        keep = keep_mask(
            torch.tensor(9), 0.3, 2, 2, 5, 32, head_start=head_start, batch_start=batch_start
        )
        assert torch.equal(out != 0, keep)


def check_packed(args: tuple[Any, ...], kwargs: dict[str, Any], backend: str) -> None:
    """Assert that packed sequences give the bits of padded ones, forward and backward."""
    import pytransformer as pt

    query, key, value, *offsets, longest_q, longest_k = args
    ends = [o.tolist() for o in offsets]

    def padded(t: Tensor, ends: list[int], longest: int) -> Tensor:
        out = t.new_zeros(len(ends) - 1, t.shape[1], longest, t.shape[2])
        for b, (start, end) in enumerate(itertools.pairwise(ends)):
            out[b, :, : end - start] = t[start:end].transpose(0, 1)
        return out

    def packed(t: Tensor, ends: list[int]) -> Tensor:
        return torch.cat(
            [
                t[b, :, : end - start].transpose(0, 1)
                for b, (start, end) in enumerate(itertools.pairwise(ends))
            ]
        )

    sides = ((ends[0], longest_q), (ends[1], longest_k), (ends[1], longest_k))
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(*query.shape[:2], value.shape[2], generator=generator).to(query)
    with torch.no_grad():
        inputs = [t.clone() for t in (query, key, value)]
        wide = [padded(t, *side) for t, side in zip(inputs, sides)]
    for t in (*inputs, *wide):
        t.requires_grad_()
    out = pt.attention_varlen(*inputs, *args[3:], **kwargs, backend=backend, strict=True)
    lengths = {"query_lengths": offsets[0].diff(), "key_lengths": offsets[1].diff()}
    want = pt.attention(
        wide[0], wide[1], wide[2], **lengths, **kwargs, backend=backend, strict=True
    )
    ours = [out, *torch.autograd.grad(out, inputs, grad)]
    theirs = [want, *torch.autograd.grad(want, wide, padded(grad, *sides[0]))]
    for name, a, b, (end, _) in zip(
        ("out", "query", "key", "value"), ours, theirs, (sides[0], *sides)
    ):
        assert torch.equal(a, packed(b, end)), f"{name}: packed and padded differ"


def check_no_sequences(backend: str, device: str) -> None:
    """Assert that rows outside every packed sequence, and their gradients, are zero.

    A GPU refuses a grid without blocks.
    """
    import pytransformer as pt

    x, ends = (
        torch.randn(5, 2, 16, device=device, requires_grad=True),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    out = pt.attention_varlen(x, x, x, ends, ends, 5, 5, backend=backend, strict=True)
    assert not out.any() and not torch.autograd.grad(out.sum(), x)[0].any()
