# SPDX-License-Identifier: Apache-2.0
"""The C++ fast path returns NotImplemented for observed calls and unusual arguments."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pytransformer as pt
from pytransformer.cli import doctor
from pytransformer.ops._core import dispatch, fast_path, native
from pytransformer.ops._core.registry import OPS, observing, trace
from support.paths import (
    Functions,
    Sees,
    attention_in_both,
    needs_fast_path,
    norm_taken,
    qkv,
    results,
    same,
    same_in_both,
    taken,
)

pytestmark = [needs_fast_path, pytest.mark.usefixtures("one_thread")]


WATCHERS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "a forced backend": lambda: pt.use_backend(attention="reference"),
    "an observer": lambda: observing(lambda op, a, backend: None),
    "switched off": fast_path.off,
    "a dispatch mode": Sees,
    "a function mode": Functions,
    "a profiler": torch.profiler.profile,
    "a forward-mode level": torch.autograd.forward_ad.dual_level,
    "autocast to another dtype": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", WATCHERS)
def test_observed_calls_use_the_python_path(name: str) -> None:
    inputs = qkv(grad=False)
    assert taken(*inputs)
    with WATCHERS[name]():
        if name == "a forward-mode level":  # which concerns only tensors with a tangent
            inputs[0] = torch.autograd.forward_ad.make_dual(inputs[0].clone(), inputs[0])
        assert not taken(*inputs)
    inputs = qkv(grad=False)
    assert taken(*inputs)


def test_failures_of_a_backend_are_remembered() -> None:
    """Python selects the backend from the first failure on."""
    inputs = qkv(grad=False)
    dispatch.remember_failure(("attention", "cpu"), "did not run")
    assert not taken(*inputs)
    pt.clear_fallbacks()
    assert taken(*inputs)


@pytest.mark.parametrize("change", ["assigned", "one entry", "a new one first"])
def test_replaced_backends_use_the_python_path(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, inputs = OPS["attention"], qkv(grad=False)
    with monkeypatch.context() as patch:
        if change == "assigned":
            patch.setattr(op, "backends", {"reference": op.backends["reference"]})
        elif change == "one entry":
            patch.setattr(op, "backends", {**op.backends, "cpu": op.backends["reference"]})
        else:
            patch.setattr(op, "backends", {"mine": op.backends["reference"]} | op.backends)
        assert not taken(*inputs)
    assert taken(*inputs)
    with pytest.raises(TypeError, match="does not support item assignment"):
        op.backends["cpu"] = op.backends["reference"]  # type: ignore[index]


def test_traces_and_observers_see_the_backend() -> None:
    q, k, v = qkv()
    output = []
    with trace() as record:
        torch.autograd.grad(pt.attention(q, k, v).sum(), q)
        pt.layer_norm(q.detach(), 16)
        with pt.activate():
            F.scaled_dot_product_attention(q, k, v)
        assert taken(q, k, v)
    names = ["attention_fwd", "attention_bwd", "layer_norm_fwd", "attention_fwd", "attention_fwd"]
    assert record == [(name, "cpu") for name in names]
    with observing(lambda op, a, backend: output.append((op.name, backend))):
        pt.attention(q, k, v), pt.layer_norm(q, 16)
    assert output == [("attention", "cpu"), ("layer_norm", "cpu")]
    assert not taken(q, k, v, backend="reference") and taken(q, k, v, backend="cpu", strict=True)


def test_modes_see_the_backward_of_a_node() -> None:
    q, k, v = qkv()
    out = pt.attention(q, k, v)
    with Sees() as mode:
        torch.autograd.grad(out.sum(), q)
    assert "pytransformer.attention_bwd.default" in mode.seen


def test_subclasses_views_and_parameters_equal_the_python_path() -> None:
    class Mine(torch.Tensor):
        pass

    q, k, v = qkv()
    assert not taken(q.detach().as_subclass(Mine), k, v)
    assert taken(torch.nn.Parameter(q.detach()), k, v)
    assert not taken(torch._neg_view(q.detach()), k, v)
    same([pt.attention(torch._neg_view(q.detach()), k, v)], [pt.attention(-q.detach(), k, v)])
    assert not taken(*(t.to("meta") for t in (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_equals_the_python_path(dtype: torch.dtype) -> None:
    inputs = qkv()
    with torch.autocast("cpu", dtype=dtype):
        attention_in_both(inputs, inputs)
        assert taken(*(t.to(dtype) for t in inputs))


BAD: list[tuple[Callable[..., tuple[Any, ...]], dict[str, Any]]] = [
    (lambda q, k, v: (q, k, "x"), {}),
    (lambda q, k, v: (q[0], k, v), {}),
    (lambda q, k, v: (q, k.double(), v), {}),
    (lambda q, k, v: (q, k[:1], v), {}),
    (lambda q, k, v: (q, k[..., :8], v), {}),
    (lambda q, k, v: (q[:, :1], k, v), {}),
    (lambda q, k, v: (q, k, v[:, :, :4]), {}),
    (lambda q, k, v: (q.int(), k.int(), v.int()), {}),
    (lambda q, k, v: (q, k, v), {"attn_mask": torch.zeros(3, 8)}),
    (lambda q, k, v: (q, k, v), {"attn_mask": torch.zeros(8, 8, dtype=torch.int64)}),
    (lambda q, k, v: (q, k, v), {"attn_mask": torch.zeros(1, 1, 1, 8, 8)}),
    (lambda q, k, v: (q, k, v), {"bias": torch.ones(8, 8, dtype=torch.bool)}),
    (lambda q, k, v: (q, k, v), {"causal": "left"}),
    (lambda q, k, v: (q, k, v), {"causal": 3}),
    (lambda q, k, v: (q, k, v), {"window": 3}),
    (lambda q, k, v: (q, k, v), {"window": (-2, 1)}),
    (lambda q, k, v: (q, k, v), {"window": (True, 1)}),
    (lambda q, k, v: (q, k, v), {"key_lengths": torch.tensor([3, 99])}),
    (lambda q, k, v: (q, k, v), {"key_lengths": torch.tensor([3])}),
    (lambda q, k, v: (q, k, v), {"key_lengths": torch.tensor([3.0, 4.0])}),
    (lambda q, k, v: (q, k, v), {"prefix_lengths": torch.tensor([3, 4])}),
    (lambda q, k, v: (q, k, v), {"query_segments": torch.zeros(2, 8, dtype=torch.int64)}),
    (lambda q, k, v: (q, k, v), {"softcap": -1.0}),
    (lambda q, k, v: (q, k, v), {"scale": float("nan")}),
    (lambda q, k, v: (q, k, v), {"dropout_p": 1.5}),
    (lambda q, k, v: (q, k, v), {"dropout_p": 0.5, "dropout_seed": 0.5}),
    (lambda q, k, v: (q, k, v), {"backend": "cpus"}),
]


@pytest.mark.parametrize("bad", range(len(BAD)))
def test_errors_equal_the_python_path(bad: int) -> None:
    given, options = BAD[bad]
    arguments, raised = given(*qkv()), []
    for which in (contextlib.nullcontext, fast_path.off):
        with which(), pytest.raises((TypeError, ValueError)) as caught:
            pt.attention(*arguments, **options)
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


@pytest.mark.parametrize(
    "arguments",
    [
        (5,),
        ((4, 5),),
        (16, torch.ones(3)),
        (16, None, torch.ones(15)),
        (16, None, None, "x"),
        (0,),
        ((),),
    ],
)
def test_layer_norm_errors_equal_the_python_path(arguments: tuple[Any, ...]) -> None:
    x, raised = torch.randn(2, 16), []
    for which in (contextlib.nullcontext, fast_path.off):
        with which(), pytest.raises((TypeError, ValueError)) as caught:
            pt.layer_norm(x, *arguments)
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


# ---- activate()


SDPA: list[tuple[Callable[..., tuple[Tensor, ...]], dict[str, Any]]] = [
    (lambda q, k, v: (q, k, v), {}),
    (lambda q, k, v: (q, k, v), {"is_causal": True}),
    (lambda q, k, v: (q, k, v), {"attn_mask": torch.arange(64).view(8, 8) % 3 > 0}),
    (lambda q, k, v: (q, k, v), {"attn_mask": torch.linspace(-1, 1, 128).view(2, 1, 8, 8)}),
    (lambda q, k, v: (q, k, v), {"scale": 0.5}),
    (lambda q, k, v: (q, k, v), {"dropout_p": 0.5}),
    (lambda q, k, v: (q, k[:, :1], v[:, :1]), {"enable_gqa": True}),
    (lambda q, k, v: (q, k[:, :1], v[:, :1]), {}),  # broadcasts
    (lambda q, k, v: (q[0], k[0], v[0]), {}),
    (lambda q, k, v: (q[None], k[None], v[None]), {}),
    (lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {}),
]


@pytest.mark.parametrize("case", range(len(SDPA)))
def test_activate_gives_equal_results_on_both_paths(case: int) -> None:
    given, options = SDPA[case]
    inputs = qkv()
    with pt.activate():
        same_in_both(F.scaled_dot_product_attention, given(*inputs), inputs[:1], **options)


@pytest.mark.falls_back
def test_activate_uses_python_for_other_calls_and_ends() -> None:
    q, k, v = qkv(grad=False)
    q.requires_grad_()
    big = torch.randn(1, 1, 2, 600)
    with pt.activate():
        inside = F.scaled_dot_product_attention(q, k, v).grad_fn
        with trace() as record:
            F.scaled_dot_product_attention(big, big, big)
        assert record == [("attention_fwd", "torch")]
        for bad in (
            (q, k[:1, :, :3], v.double()),
            (torch.cat((q, q), 1), k, v),
        ):  # the second without enable_gqa
            with pytest.raises((RuntimeError, ValueError)), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                F.scaled_dot_product_attention(*bad)
        with torch.inference_mode():
            assert F.scaled_dot_product_attention(q, k, v).is_inference()
    after = F.scaled_dot_product_attention(q, k, v).grad_fn
    assert inside is not None and inside.name() == "attention_functionBackward"
    assert after is not None and after.name() != inside.name()


# ---- loading


def said(**changed: Any) -> str | None:
    info = native.build_info() or {}
    return fast_path.refusal({**info, "fast_path": {**info["fast_path"], **changed}})


def test_fast_path_loads_only_for_its_build() -> None:
    assert said() is None
    assert str(said(torch="2.99.0")).startswith("built for torch 2.99.0 (")
    assert "built for torch" in str(said(git_version="0" * 40))
    assert "another Python" in str(said(module="_fast_path.cpython-399.so"))
    assert (
        "other sources" in str(said(sources="0" * 16))
        or not (native.PACKAGE.parent / "csrc").is_dir()
    )
    assert said(built=False, reason="g++ is on holiday") == "not built: g++ is on holiday"
    assert "never built" in str(fast_path.refusal({}))


@pytest.fixture
def another_torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the fast path in a process with another torch than the one of the build."""
    info = native.build_info() or {}
    before = {name: getattr(fast_path.entries, name) for name in fast_path.ENTRIES}
    monkeypatch.setattr(
        native,
        "build_info",
        lambda: {**info, "fast_path": {**info["fast_path"], "torch": "2.99.0"}},
    )
    fast_path.why_not.cache_clear()
    yield
    monkeypatch.undo()
    fast_path.why_not.cache_clear()
    assert fast_path.why_not() is None and before == {
        name: getattr(fast_path.entries, name) for name in fast_path.ENTRIES
    }


def test_another_torch_disables_the_fast_path_and_doctor_reports_it(another_torch: None) -> None:
    reason = doctor.native()["fast_path_why_not"]
    assert "built for torch 2.99.0" in reason
    q, k, v = qkv()
    assert not taken(q, k, v) and not norm_taken(q, 16)
    assert pt.attention(q, k, v).grad_fn is not None
    with pt.activate():
        assert F.scaled_dot_product_attention(q, k, v).shape == q.shape


PROGRAM = """
import torch, pytransformer as pt
from pytransformer.ops._core import fast_path
from support.paths import Functions, Sees, taken
q = torch.randn(1, 1, 4, 8)
{first}
print(taken(q, q, q))
"""
FIRST = {
    "inference mode": "with torch.inference_mode(): pt.attention(q, q, q)",
    "vmap": "torch.func.vmap(lambda t: pt.attention(t, q, q))(q[None])",
    "fake tensors": (
        "from torch._subclasses import FakeTensorMode as M\nwith M() as m:"
        " pt.attention(*[m.from_tensor(q)] * 3)"
    ),
    "ends activated": "pt.activate(); torch.nn.functional.scaled_dot_product_attention(q, q, q)",
}


@pytest.mark.parametrize(
    ("first", "value", "answer"),
    [*((name, "1", "True") for name in FIRST), ("inference mode", "0", "False")],
)
def test_first_call_loads_the_fast_path(first: str, value: str, answer: str) -> None:
    """PYTRANSFORMER_FAST_PATH=0 disables it."""
    environment = os.environ | {"PYTRANSFORMER_FAST_PATH": value, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=FIRST[first])],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.strip()) == (0, answer), done.stderr


# ---- many calls


def test_threads_give_equal_results() -> None:
    inputs = qkv()
    expected = results(pt.attention, inputs, inputs)
    wrong: list[int] = []

    def work() -> None:
        for _ in range(200):
            out = pt.attention(*inputs)
            torch.autograd.grad(out.sum(), inputs)
            if not torch.equal(out, expected[0]):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.unpoisoned
def test_calls_keep_nothing_alive() -> None:
    q, k, v = qkv()
    gone: list[weakref.ref[Tensor]] = []
    for call in (lambda x: pt.attention(x, k, v, dropout_p=0.1), lambda x: pt.layer_norm(x, 16)):
        x = q.detach().clone().requires_grad_()
        out = call(x)
        out.sum().backward()
        gone += [weakref.ref(out), weakref.ref(x)]
        out = call(x)  # and no backward
        gone.append(weakref.ref(out))
        del out, x
    assert all(ref() is None for ref in gone)
