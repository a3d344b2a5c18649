# SPDX-License-Identifier: Apache-2.0
"""The fast path leaves observed calls to Python; its nodes differentiate and leak nothing."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._core import dispatch, fast_path
from pytransformer.ops._core.registry import OPS, observing, trace, tracing
from pytransformer.testing.cases import Case, case, leaves
from support.paths import (
    Functions,
    Sees,
    needs_fast_path,
    qkv,
    results,
    same,
    same_in_both,
    taken_by,
)

pytestmark = [needs_fast_path, pytest.mark.usefixtures("one_thread")]

TINY = {
    "B": 1,
    "Hq": 2,
    "Hkv": 2,
    "Lq": 4,
    "Lk": 4,
    "D": 4,
    "rows": 3,
    "d": 5,
    "hidden": 6,
    "classes": 7,
}
NAMES = (
    "everything",
    "alibi",
    "t5_bias",
    "varlen_alibi",
    "varlen_t5",
    "layer_norm",
    "rms_norm",
    "add_norm",
    "add_norm_dropout",
    "add_rms_norm",
    "feed_forward_gelu",
    "feed_forward_swiglu",
    "feed_forward_dropout",
    "feed_forward_recompute",
    "linear_cross_entropy",
    "linear_cross_entropy_smooth",
    "rotary",
    "rotary_norm",
)
every_op = pytest.mark.parametrize(
    "problem", [case(name).resize(**TINY) for name in NAMES], ids=NAMES
)
Given = tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]


def given(problem: Case, dtype: torch.dtype = torch.float32) -> Given:
    """Return arguments, keywords and the tensors that need a gradient."""
    args, kwargs = problem.make("cpu", dtype, seed=0, requires_grad=True)
    return args, kwargs, [t for t in leaves(problem.op, args, kwargs).values() if t.requires_grad]


def loss(problem: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    found = getattr(pt, problem.op)(*args, **kwargs)
    outs = found if isinstance(found, tuple) else (found,)
    return torch.stack([out.double().square().sum() for out in outs]).sum()


@every_op
def test_observed_calls_use_the_python_path(problem: Case) -> None:
    args, kwargs, expected = given(problem)
    watchers: dict[str, Callable[[], Any]] = {
        "a forced backend": lambda: pt.use_backend(**{problem.op: "reference"}),
        "an observer": lambda: observing(lambda op, a, backend: None),
        "switched off": fast_path.off,
        "a dispatch mode": Sees,
        "a function mode": Functions,
        "a profiler": torch.profiler.profile,
    }
    for name, watcher in watchers.items():
        assert taken_by(problem.op, *args, **kwargs)
        with watcher():
            assert not taken_by(problem.op, *args, **kwargs), name
    dispatch.remember_failure((problem.op, "cpu"), "did not run")
    assert not taken_by(problem.op, *args, **kwargs)
    pt.clear_fallbacks()
    with torch.autograd.forward_ad.dual_level():
        tangent = torch.autograd.forward_ad.make_dual(expected[0].detach(), expected[0].detach())
        dual = [tangent if a is expected[0] else a for a in args]
        assert not taken_by(problem.op, *dual, **kwargs)


@every_op
def test_traces_observers_and_modes_see_the_backend(problem: Case) -> None:
    args, kwargs, expected = given(problem)
    with trace() as record:
        torch.autograd.grad(loss(problem, args, kwargs), expected)
    assert record == [(f"{problem.op}_fwd", "cpu"), (f"{problem.op}_bwd", "cpu")]
    out = loss(problem, args, kwargs)
    with Sees() as mode:
        torch.autograd.grad(out, expected)
    assert f"pytransformer.{problem.op}_bwd.default" in mode.seen
    with observing(lambda op, a, backend: record.append((op.name, backend))):
        loss(problem, args, kwargs)
    assert record[-1] == (problem.op, "cpu")


@every_op
def test_second_derivatives_equal_the_python_path_bitwise(problem: Case) -> None:
    args, kwargs, expected = given(problem, torch.float64)

    def seconds(*_: Any) -> tuple[Tensor, ...]:
        firsts = torch.autograd.grad(loss(problem, args, kwargs), expected, create_graph=True)
        return (
            *firsts,
            *torch.autograd.grad(torch.stack([g.square().sum() for g in firsts]).sum(), expected),
        )

    assert taken_by(problem.op, *args, **kwargs)
    same_in_both(seconds, (), ())


@every_op
def test_each_gradient_alone_equals_the_python_path(problem: Case) -> None:
    args, kwargs, expected = given(problem, torch.bfloat16)
    call = getattr(pt, problem.op)
    for leaf in expected:
        same_in_both(call, args, [leaf], **kwargs)
    for leaf in expected:
        for other in expected:
            other.requires_grad_(other is leaf)
        same_in_both(call, args, [leaf], **kwargs)


@every_op
@pytest.mark.unpoisoned
def test_compiled_autograd_equals_eager(problem: Case) -> None:
    from torch._dynamo.compiled_autograd import _enable

    def gradients(compiled: bool) -> list[Tensor | None]:
        args, kwargs, expected = given(problem)
        out = loss(problem, args, kwargs)
        if compiled:
            with _enable(lambda graph: torch.compile(graph, backend="eager", fullgraph=True)):
                out.backward()
        else:
            out.backward()
        return [t.grad for t in expected]

    for a, b in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(a, b)


@every_op
def test_inference_mode_equals_the_python_path(problem: Case) -> None:
    args, kwargs, _ = given(problem)
    with torch.inference_mode():
        assert taken_by(problem.op, *args, **kwargs)
        found = getattr(pt, problem.op)(*args, **kwargs)
    assert all(t.is_inference() for t in (found if isinstance(found, tuple) else (found,)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_op
def test_autocast_equals_the_python_path(problem: Case, dtype: torch.dtype) -> None:
    args, kwargs, expected = given(problem)
    with torch.autocast("cpu", dtype=dtype):
        same_in_both(getattr(pt, problem.op), args, expected, **kwargs)


# ---- behavior of single ops


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16, None])
def test_add_norm_variants_equal_the_python_path(
    used: tuple[int, ...], kind: str, residual: torch.dtype | None
) -> None:
    x = torch.randn(2, 5, 16, dtype=torch.bfloat16, requires_grad=True)
    stream = None if residual is None else torch.randn(2, 5, 16, dtype=residual, requires_grad=True)
    w = torch.randn(16, requires_grad=True)
    expected = [x] if stream is None else [x, stream]

    def call(eps: float | None) -> tuple[Tensor, ...]:
        found = pt.add_norm(x, stream, w, eps=eps, kind=kind, dropout_p=0.3, dropout_seed=11)  # type: ignore[arg-type]
        return tuple(found[i] for i in used)

    assert taken_by("add_norm", x, stream, w, eps=None, kind=kind, dropout_p=0.3, dropout_seed=11)
    for eps in (1e-5, None):
        same_in_both(call, (eps,), [*expected, w] if 0 in used else expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_eps_none_is_the_eps_of_the_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(4, 16, dtype=dtype) * 1e-3
    assert taken_by("rms_norm", x, 16)
    same_in_both(pt.rms_norm, (x, 16), ())


def test_seeds_give_equal_dropout_and_advance_the_generator_equally() -> None:
    x, w1, w2 = torch.randn(9, 16), torch.randn(24, 16), torch.randn(16, 24)
    for seed in (0, -1, 2**63 - 1, -(2**63), torch.tensor(3), None):
        same_in_both(pt.feed_forward, (x, w1, None, w2, None), (), dropout_p=0.5, dropout_seed=seed)
        same_in_both(pt.add_norm, (x, x, None), (), dropout_p=0.5, dropout_seed=seed)
        same_in_both(pt.attention, qkv(grad=False), (), dropout_p=0.5, dropout_seed=seed)
    states = []
    for call in (
        lambda: pt.add_norm(x, x, None, dropout_p=0.5),
        lambda: torch.randint(-(2**63), 2**63 - 1, ()),
    ):
        torch.manual_seed(4)
        call()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_large_hidden_layers_exceed_the_row_and_scratch_limits() -> None:
    """The fast path gets both limits: rows of hidden per part, and persistent scratch."""
    w1, w2 = torch.randn(6000, 8, requires_grad=True), torch.randn(8, 6000, requires_grad=True)
    for rows in (1, 1600):
        x = torch.randn(rows, 8, requires_grad=True)
        assert taken_by("feed_forward", x, w1, None, w2, None)
        same_in_both(pt.feed_forward, (x, w1, None, w2, None), (x, w1, w2), recompute=True)


@pytest.mark.parametrize(
    "dtype, rows, classes, depth, keeps",
    [
        (torch.float32, 500, 500, 129, True),
        (torch.float32, 500, 500, 128, False),  # shallow
        (torch.float32, 420, 40_000, 129, False),  # more than 64 MB
        (torch.bfloat16, 500, 500, 257, True),
        (torch.bfloat16, 500, 500, 256, False),
    ],
)
def test_cross_entropy_saves_the_tensors_of_the_python_path(
    dtype: torch.dtype, rows: int, classes: int, depth: int, keeps: bool
) -> None:
    x, w = (torch.randn(n, depth, dtype=dtype, requires_grad=True) for n in (rows, classes))
    target = torch.randint(0, classes, (rows,))

    def largest_kept() -> int:
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            pt.linear_cross_entropy(x, w, target)
        return max(t.numel() for t in kept)

    sizes = [largest_kept()]
    with fast_path.off():
        sizes.append(largest_kept())
    assert sizes[0] == sizes[1] == (rows * classes if keeps else max(x.numel(), w.numel()))
    for reduction in ("mean", "sum", "none"):
        same_in_both(pt.linear_cross_entropy, (x, w, target), (x, w), reduction=reduction)
    ignored = torch.full_like(target, -100)
    same_in_both(pt.linear_cross_entropy, (x, w, ignored), (x, w))  # NaN


def test_integer_dtypes_of_offsets_and_lengths_equal_the_python_path() -> None:
    q, k, v = (torch.randn(13, 2, 16, requires_grad=True) for _ in range(3))
    for dtype in (torch.int32, torch.int16, torch.uint8, torch.int64):
        offsets = torch.tensor([0, 0, 8, 13, 13], dtype=dtype)
        assert taken_by("attention_varlen", q, k, v, offsets, offsets, 8, 8)
        same_in_both(
            pt.attention_varlen, (q, k, v, offsets, offsets, 8, 8), (q, k, v), return_lse=True
        )
        padded = qkv()
        assert taken_by("attention", *padded, key_lengths=offsets[1:3])
        same_in_both(pt.attention, padded, padded, key_lengths=offsets[1:3])


SDPA: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"attn_mask": torch.arange(64).view(8, 8) % 3 > 0},
    {"attn_mask": torch.linspace(-1, 1, 128).view(2, 1, 8, 8), "is_causal": True},
    {"scale": 0.5},
    {"dropout_p": 0.5},
]


@pytest.mark.parametrize("options", SDPA, ids=str)
def test_scaled_dot_product_attention_equals_the_python_path(options: dict[str, Any]) -> None:
    inputs = qkv()
    assert taken_by("scaled_dot_product_attention", *inputs, **options)
    same_in_both(pt.scaled_dot_product_attention, inputs, inputs, **options)
    few = qkv(kv_heads=1)
    assert taken_by("scaled_dot_product_attention", *few, enable_gqa=True, **options)
    assert not taken_by("scaled_dot_product_attention", *few, **options)  # which broadcasts
    same_in_both(pt.scaled_dot_product_attention, few, few, enable_gqa=True, **options)
    same_in_both(pt.scaled_dot_product_attention, few, few, **options)
    three = [t[0] for t in inputs]
    assert not taken_by("scaled_dot_product_attention", *three)
    mine = pt.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(mine, F.scaled_dot_product_attention(*inputs))


# ---- many calls


def test_threads_have_separate_scratch() -> None:
    """All threads read the T5 tables."""
    problems = [case(name) for name in NAMES]
    prepared = [(p, *given(p)) for p in problems]
    expected = [
        results(getattr(pt, p.op), args, wanted, **kwargs) for p, args, kwargs, wanted in prepared
    ]
    wrong: list[object] = []

    def work() -> None:
        try:
            for (p, args, kwargs, _), before in zip(prepared * 3, expected * 3):
                if kwargs.get("dropout_p"):
                    continue
                found = getattr(pt, p.op)(*args, **kwargs)
                first = found[0] if isinstance(found, tuple) else found
                first.double().sum().backward()
                same([first], before[:1])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@every_op
@pytest.mark.unpoisoned
def test_nodes_keep_nothing_alive(problem: Case) -> None:
    args, kwargs, expected = given(problem)
    gone = [weakref.ref(t) for t in expected]
    for backward in (True, False):
        out = loss(problem, args, kwargs)
        gone.append(weakref.ref(out))
        if backward:
            out.backward()
    del args, kwargs, expected, out
    gc.collect()
    assert all(ref() is None for ref in gone)


@pytest.mark.slow
@pytest.mark.unpoisoned
@every_op
def test_many_calls_do_not_leak_memory(problem: Case) -> None:
    args, kwargs, expected = given(problem)

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def calls(count: int) -> None:
        for _ in range(count):
            torch.autograd.grad(loss(problem, args, kwargs), expected)

    traces = tracing.open[:]
    tracing.open.clear()  # the trace records each call, 200 bytes
    try:
        calls(2_000)
        before = resident()
        calls(100_000)
        assert resident() - before < 1 << 20  # 10 bytes per call
    finally:
        tracing.open[:] = traces


def test_every_op_of_the_package_is_in_the_fast_path() -> None:
    assert {*OPS} <= {*fast_path.ENTRIES}
