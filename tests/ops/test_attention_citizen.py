# SPDX-License-Identifier: Apache-2.0
"""Attention within PyTorch: autograd, torch.func, compile, autocast, determinism, memory."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import pytransformer as pt
from pytransformer.ops.attention import _prepare, attention_op

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANTS = ("plain", "masked", "bias", "alibi", "t5", "sinks", "dropout")


def problem(variant: str, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], dict]:
    """Return the leaves and a function from leaves to keywords.

    The leaves are query, key, value and one more if the variant has it.
    """
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, h, n, 3, dtype=dtype) for h, n in ((4, 3), (2, 5), (2, 5)))
    keywords = {
        "plain": dict,
        "masked": lambda: {
            "causal": "bottom_right",
            "window": (2, None),
            "key_lengths": torch.tensor([5, 2]),
            "softcap": 3.0,
        },
        "bias": lambda b: {"bias": b},
        "alibi": lambda b: {"bias": pt.AlibiBias(b), "causal": "bottom_right"},
        "t5": lambda b: {"bias": pt.RelativePositionBias(b, True, 4)},
        "sinks": lambda b: {
            "sinks": b,
            "causal": "bottom_right",
            "query_lengths": torch.tensor([3, 2]),
        },
        "dropout": lambda: {"dropout_p": 0.3, "dropout_seed": 7},
    }[variant]
    extra = {"bias": (1, 4, 3, 5), "alibi": (4,), "t5": (8, 4), "sinks": (4,)}.get(variant)
    leaves = [q, k, v] + ([torch.randn(extra, dtype=dtype)] if extra else [])
    return [leaf.requires_grad_() for leaf in leaves], keywords


def function(keywords, backend: str):
    """Return (out, lse) as a function of the leaves.

    It replaces the lse of rows without a visible key: finite differences need finite values.
    """

    def call(q, k, v, *extra):
        out, lse = pt.attention(
            q, k, v, **keywords(*extra), return_lse=True, backend=backend, strict=True
        )
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return call


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradcheck(variant: str, backend: str) -> None:
    leaves, keywords = problem(variant)
    assert gradcheck(function(keywords, backend), leaves)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradgradcheck(variant: str, backend: str) -> None:
    leaves, keywords = problem(variant)
    assert gradgradcheck(function(keywords, backend), leaves, fast_mode=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_func_grad_and_jacrev_equal_autograd(variant: str, backend: str) -> None:
    leaves, keywords = problem(variant)
    f = function(keywords, backend)
    loss = lambda *x: f(*x)[0].sin().sum()
    want = torch.autograd.grad(loss(*leaves), leaves)
    detached = [leaf.detach() for leaf in leaves]
    for ours, theirs in zip(
        torch.func.grad(loss, argnums=tuple(range(len(leaves))))(*detached), want
    ):
        assert torch.allclose(ours, theirs, atol=1e-12)
    jacobian = torch.func.jacrev(lambda x: f(x, *detached[1:])[0].sum((1, 2, 3)))(detached[0])
    direct = torch.autograd.functional.jacobian(
        lambda x: f(x, *detached[1:])[0].sum((1, 2, 3)), detached[0]
    )
    assert torch.allclose(jacobian, direct, atol=1e-12)


def test_vmap_equals_a_loop(backend: str) -> None:
    q, k, v = torch.randn(3, 4, 2, 2, 5, 8, dtype=torch.float64).unbind(0)
    call = lambda *x: pt.attention(*x, causal="top_left", backend=backend, strict=True)
    assert torch.allclose(
        torch.func.vmap(call)(q, k, v), torch.stack([call(*x) for x in zip(q, k, v)]), atol=1e-13
    )
    assert torch.allclose(
        torch.func.vmap(call, in_dims=(0, None, None))(q, k[0], v[0]),
        torch.stack([call(x, k[0], v[0]) for x in q]),
        atol=1e-13,
    )
    grads = torch.func.vmap(torch.func.grad(lambda *x: call(*x).sin().sum()))(q, k, v)
    want = torch.stack([torch.func.grad(lambda *x: call(*x).sin().sum())(*x) for x in zip(q, k, v)])
    assert torch.allclose(grads, want, atol=1e-12)


def test_forward_mode_is_right_or_refused(backend: str) -> None:
    """jvp and dual tensors equal the reverse-mode result or raise; they never return zeros."""
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64).unbind(0)
    tangent = torch.randn_like(q)
    call = lambda x: pt.attention(x, k, v, backend=backend, strict=True)
    _, want = torch.autograd.functional.jvp(call, q, tangent)  # uses double backward
    try:
        _, ours = torch.func.jvp(call, (q,), (tangent,))
    except (RuntimeError, NotImplementedError):
        pass
    else:
        assert torch.allclose(ours, want, atol=1e-10)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tangent)
        try:
            ours = torch.autograd.forward_ad.unpack_dual(call(dual)).tangent
        except (RuntimeError, NotImplementedError):
            return
    assert ours is not None and torch.allclose(ours, want, atol=1e-10)


@pytest.mark.unpoisoned  # guarded outputs have a storage offset; fake outputs have none
@pytest.mark.parametrize("variant", VARIANTS)
def test_opcheck_of_the_raw_ops(variant: str, backend: str) -> None:
    """Check schema, fakes and dispatch of forward and backward; the fuzzer checks values."""
    leaves, keywords = problem(variant, torch.float32)
    leaves = [leaf.detach() for leaf in leaves]
    a, _, _ = _prepare(*leaves[:3], **keywords(*leaves[3:]))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(attention_op.fwd, (*a, backend, True), test_utils=tests)
    out, lse = attention_op.fwd(*a, backend, True)
    expected = [
        isinstance(a[p], torch.Tensor) and a[p].is_floating_point() for p in attention_op.positions
    ]
    arguments = (
        torch.randn_like(out),
        torch.randn_like(lse),
        *a,
        out,
        lse,
        expected,
        backend,
        True,
    )
    torch.library.opcheck(attention_op.bwd, arguments, test_utils=tests)


@pytest.mark.unpoisoned
def test_compiled_derivatives_are_right_or_refused() -> None:
    """torch.compile ignores autograd Functions in torch.func.grad: the gradient would be zero."""
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind(0)
    loss = lambda q: pt.attention(q, k, v).sin().sum()
    want = torch.func.grad(loss)(q)
    assert torch.equal(torch.func.grad(torch.compile(loss, backend="aot_eager"))(q), want)
    assert torch.equal(torch.compile(torch.func.grad(loss), backend="aot_eager")(q), want)
    # Otherwise Dynamo would reuse the code that it compiled for the eager run.
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"without fullgraph=True they run eagerly"):
        torch.compile(torch.func.grad(loss), backend="aot_eager", fullgraph=True)(q)


@pytest.mark.unpoisoned
@pytest.mark.parametrize("variant", ("plain", "masked", "t5"))
def test_compiles_to_one_graph_without_recompiling(variant: str) -> None:
    """Forward and backward have no graph break; use_backend causes no recompilation."""
    leaves, keywords = problem(variant, torch.float32)
    backends = [
        n
        for n, r in pt.explain("attention", *leaves[:3], **keywords(*leaves[3:])).reasons.items()
        if r is None
    ]
    call = lambda *x: pt.attention(*x[:3], **keywords(*x[3:])).square().sum()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for name in backends:
            with pt.use_backend(attention=name):
                want = torch.autograd.grad(call(*leaves), leaves)
                for ours, theirs in zip(torch.autograd.grad(compiled(*leaves), leaves), want):
                    assert torch.allclose(ours, theirs, atol=1e-5), name
    torch._dynamo.reset()


def test_autocast_casts_only_query_key_and_value(backend: str) -> None:
    """The bias and its gradient keep their dtype."""
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, 9, 9, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = pt.attention(q, k, v, bias=bias, backend=backend)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum(), (q, k, v, bias))
    assert [g.dtype for g in grads] == [torch.float32] * 4


# ---- determinism


def everything() -> tuple[list[torch.Tensor], dict]:
    q, k, v = (torch.randn(3, h, n, 64).bfloat16() for h, n in ((4, 193), (2, 257), (2, 257)))
    table = torch.randn(32, 4)
    leaves = [t.requires_grad_() for t in (q, k, v, table)]
    keywords = {
        "causal": "bottom_right",
        "key_lengths": torch.tensor([257, 200, 90]),
        "dropout_p": 0.1,
        "dropout_seed": 3,
    }
    return leaves, keywords


def run(leaves: list[torch.Tensor], keywords: dict, backend: str) -> list[torch.Tensor]:
    bias = pt.RelativePositionBias(leaves[3])
    out, lse = pt.attention(
        *leaves[:3], bias=bias, **keywords, return_lse=True, backend=backend, strict=True
    )
    return [out, lse, *torch.autograd.grad((out.float() * torch.linspace(-1, 1, 64)).sum(), leaves)]


def test_repeated_runs_and_thread_counts_give_equal_bits(backend: str) -> None:
    leaves, keywords = everything()
    first = run(leaves, keywords, backend)
    threads = torch.get_num_threads()
    try:
        for i in range(20 if backend != "reference" else 2):
            torch.set_num_threads(1 + i % 2)
            for a, b in zip(first, run(leaves, keywords, backend)):
                assert (
                    torch.equal(a, b) if backend != "reference" else torch.allclose(a, b, atol=1e-2)
                ), i
    finally:
        torch.set_num_threads(threads)


def test_sequence_does_not_depend_on_its_batch(backend: str) -> None:
    """Each sequence gets the same bits alone and in a batch.

    Dropout, which counts the batch, is off.
    """
    leaves, keywords = everything()
    keywords = {**keywords, "dropout_p": 0.0}
    whole = run(leaves, keywords, backend)[:5]
    alone = [t[:1].detach().requires_grad_() for t in leaves[:3]]
    single = run(
        [*alone, leaves[3]], {**keywords, "key_lengths": keywords["key_lengths"][:1]}, backend
    )[:5]
    for a, b in zip(whole, single):
        if backend == "reference":
            assert torch.allclose(a[:1].float(), b.float(), atol=2e-2)
        else:
            assert torch.equal(a[:1], b)


# ---- memory

MEMORY = """
import resource, sys, torch
import pytransformer as pt
q, k, v = (torch.randn(1, 2, 16384, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
table = torch.randn(32, 2, requires_grad=True)
small = [t[:, :, :64].detach().requires_grad_() for t in (q, k, v)]
def call(*x):
    bias = pt.RelativePositionBias(table, False)
    out = pt.attention(*x, causal="top_left", bias=bias, backend=sys.argv[1], strict=True)
    out.sum().backward()
call(*small)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
call(q, k, v)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.unpoisoned
def test_memory_is_linear_in_length(backend: str) -> None:
    """One (Lq, Lk) byte matrix at L = 16,384 would need 512 MB; T5's bias is on."""
    if backend == "reference":
        pytest.skip("the reference builds the (Lq, Lk) matrices on purpose")
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEMORY), backend],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    grown = int(result.stdout) / 1024
    assert grown < 96, f"peak memory grew by {grown:.0f} MB"
