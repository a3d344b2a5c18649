# SPDX-License-Identifier: Apache-2.0
"""Dispatch of a call: directly to the kernel, or as a raw op if something observes the call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import pytransformer as pt
from pytransformer.ops._core.registry import OPS, trace

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.unpoisoned]


def attend(q: torch.Tensor) -> torch.Tensor:
    return pt.attention(q, q, q, causal="top_left")


def norm(x: torch.Tensor) -> torch.Tensor:
    return pt.layer_norm(x, 8)


CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"attention": attend, "layer_norm": norm}


def query(**keywords: bool) -> torch.Tensor:
    return torch.randn(1, 2, 5, 8, **keywords)


@pytest.fixture(params=CALLS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_eager_calls_bypass_the_dispatcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for forward and backward. Traces record the call, and explain predicts it."""

    def refuse(*inputs: object) -> None:
        raise AssertionError("the raw op was called")

    monkeypatch.setattr(OPS[name], "fwd", refuse)
    monkeypatch.setattr(OPS[name], "bwd", refuse)
    x = query(requires_grad=True)
    with trace() as ran:
        CALLS[name](x).sum().backward()
        with torch.inference_mode():
            CALLS[name](x)
    assert ran == [(f"{name}_fwd", "cpu"), (f"{name}_bwd", "cpu"), (f"{name}_fwd", "cpu")]
    arguments = (x, x, x) if name == "attention" else (x, 8)
    assert pt.explain(name, *arguments).backend == "cpu"


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_see_the_raw_ops(name: str) -> None:
    """The mode is active around both passes or around backward alone."""
    x = query(requires_grad=True)
    y = CALLS[name](x)
    with Seen() as seen:
        y.sum().backward()
        CALLS[name](x).sum().backward()
    raw = [op for op in seen.ops if op.startswith("pytransformer.")]
    assert raw == [f"pytransformer.{name}_{way}.default" for way in ("bwd", "fwd", "bwd")]


def test_function_modes_see_the_raw_op(name: str) -> None:
    with SeenFunctions() as seen:
        CALLS[name](query())
    assert f"pytransformer.{name}_fwd.default" in seen.ops


def test_flops_are_counted() -> None:
    """Forward has 4 B H L^2 D, half of it when causal, and backward 5/2 of that.

    PyTorch counts its op the same way, without the causal half.
    """
    x = query(requires_grad=True)
    with FlopCounterMode(display=False) as ours:
        attend(x).sum().backward()
    assert ours.get_total_flops() == (4 * 2 * 5 * 5 * 8) // 2 * 7 // 2


def test_fake_tensors_stay_fake(name: str) -> None:
    with FakeTensorMode():
        x = query(requires_grad=True)
        y = CALLS[name](x)
        y.sum().backward()
    assert (
        type(y).__name__ == type(x.grad).__name__ == "FakeTensor"
        and y.shape == x.grad.shape == x.shape
    )


def test_meta_tensors_need_no_kernel(name: str) -> None:
    x = torch.empty(1, 2, 5, 8, device="meta", requires_grad=True)
    y = CALLS[name](x)
    y.sum().backward()
    assert y.is_meta and x.grad.shape == x.shape


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_raw_ops(name: str, mode: str) -> None:
    def with_gradient(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(CALLS[name](x).sum(), x)[0]

    graph = make_fx(with_gradient, tracing_mode=mode)(query())
    raw = [
        str(node.target)
        for node in graph.graph.nodes
        if str(node.target).startswith("pytransformer.")
    ]
    assert raw == [f"pytransformer.{name}_fwd.default", f"pytransformer.{name}_bwd.default"]


def test_jit_trace_records_the_raw_op(name: str) -> None:
    graph = torch.jit.trace(CALLS[name], (query(),)).inlined_graph
    assert f"pytransformer::{name}_fwd" in str(graph)


def test_subclasses_use_the_dispatcher(name: str) -> None:
    a, b = query(), query()
    both = CALLS[name](TwoTensor(a, b))
    assert isinstance(both, TwoTensor)
    assert torch.equal(both.a, CALLS[name](a)) and torch.equal(both.b, CALLS[name](b))


def test_tensors_that_outlive_their_transform_are_unwrapped(name: str) -> None:
    kept = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x.sum()

    x = query()
    torch.func.grad(keep)(x)
    torch.testing.assert_close(CALLS[name](kept[0]).detach(), CALLS[name](x), rtol=0, atol=0)


def test_the_profiler_names_the_raw_ops(name: str) -> None:
    x = query(requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        CALLS[name](x).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {f"pytransformer::{name}_fwd", f"pytransformer::{name}_bwd"} <= names


def test_saved_tensor_hooks_see_saved_tensors(name: str) -> None:
    """Offloading and checkpointing use these hooks; the node must not keep other references."""
    packed: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> int:
        packed.append(t.clone())
        return len(packed) - 1

    x = query(requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        y = CALLS[name](x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    (want,) = torch.autograd.grad(CALLS[name](x).sum(), x)
    assert torch.equal(grad, want) and any(t.shape == x.shape for t in packed)


def test_in_place_changes_of_saved_tensors_raise() -> None:
    x = query()
    weight = torch.ones(8, requires_grad=True)
    y = pt.layer_norm(x, 8, weight)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_interpreter_runs_only_if_forced() -> None:
    """TRITON_INTERPRET=1 is for tests: CPU tensors use CPU kernels unless "triton" is forced."""
    script = (
        "import torch, pytransformer as pt; q = torch.zeros(1, 1, 4, 16)\n"
        "found = pt.explain('attention', q, q, q); print(found.backend, found.reasons['triton'])\n"
        "print(pt.explain('attention', q, q, q, backend='triton').backend)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    if result.returncode == 0 and "needs " in result.stdout:
        pytest.skip(f"triton: {result.stdout.splitlines()[0]}")
    assert result.stdout.splitlines() == ["cpu None", "triton"], result.stdout + result.stderr


def test_uniform_tensors_pass_the_argument_checks() -> None:
    """The checks that name an argument accept every call that the fast test `alike` accepts."""
    from pytransformer.ops._core.tensors import alike, check_same, check_tensor

    tensors = [
        torch.zeros(2, dtype=d) for d in (torch.float32, torch.bfloat16, torch.float64, torch.int64)
    ]
    things = [*tensors, torch.nn.Parameter(tensors[0]), torch.zeros(2, device="meta"), None, 3.0]
    accepted = 0
    for a in things:
        for b in things:
            if alike(a, b):
                accepted += 1
                for t in (a, b):
                    check_tensor("op", "t", t, floating=True)
                check_same("op", "a", a, "b", b, dtype=True)
    assert accepted >= 6


def test_compiled_autograd_captures_backward() -> None:
    """The forward is eager; its backward is captured as a graph."""
    x = query(requires_grad=True)
    want = torch.autograd.grad(attend(x).sin().sum(), x)[0]
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        got = torch.autograd.grad(attend(x).sin().sum(), x)[0]
    torch._dynamo.reset()
    torch.testing.assert_close(got, want)
