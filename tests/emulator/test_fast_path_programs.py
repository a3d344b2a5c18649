# SPDX-License-Identifier: Apache-2.0
"""A recorded program (csrc/fast_path/program.h) gives the backend's bits for other values.

The backend is "cuda", whose kernels the emulator runs: its ops are steps of the program, like
allocations, views and PyTorch's ops. tests/triton/stub/warm.py compares Triton's launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._backends.gpu import attention as gpu_attention
from pytransformer.ops._backends.gpu import cross_entropy as gpu_cross_entropy
from pytransformer.ops._core import fast_path, tensors
from pytransformer.ops._core.op import Op
from pytransformer.ops._core.registry import OPS, observing
from support.paths import Sees, needs_fast_path, same

pytestmark = [
    needs_fast_path,
    pytest.mark.unpoisoned,
    pytest.mark.usefixtures("emulated", "one_thread", "sm90"),
]
BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a GPU: no check of lengths and targets, and one fixed precision of products.

    A CPU call checks values, which no program does.
    """
    whole = tensors._whole_sums
    monkeypatch.setattr(tensors, "_whole_sums", lambda device: whole(torch.device("cuda")))
    for backend in (gpu_attention, gpu_cross_entropy):
        monkeypatch.setattr(backend, "looks_at_values", lambda device: False)
    fast_path.forget()


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def qkv(lq: int = 24, lk: int = 24, d: int = 16) -> list[Tensor]:
    return [normal(1, 2, lq, d), normal(1, 2, lk, d), normal(1, 2, lk, d)]


def across(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def attention(*inputs: Tensor, **options: Any) -> Any:
    return pt.attention(*inputs, **options, backend="cuda")


def network(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, **options: Any) -> Tensor:
    return pt.feed_forward(x, w1, b1, w2, None, **options, backend="cuda")


def parameters() -> list[Tensor]:
    return [normal(5, 16), normal(24, 16), normal(24), normal(16, 24)]


# (function, new tensors for it)
Problem = tuple[Callable[..., Any], Callable[[], list[Tensor]]]
PROBLEMS: dict[str, Problem] = {
    "plain": (attention, qkv),
    "dropout": (lambda *t: attention(*t, causal="bottom_right", dropout_p=0.2), qkv),
    # with a float32 copy of d_query, and in turns
    "gradients at once": (attention, lambda: qkv(24, 1024)),
    "an int seed": (lambda *t: attention(*t, dropout_p=0.2, dropout_seed=3), qkv),
    "memory order, lse": (lambda *t: attention(*across(*t), return_lse=True),
        lambda: [normal(1, 24, 2, 16) for _ in range(3)]),
    "rows that are copied": (attention, lambda: qkv(d=17)),
    "off 16 bytes": (lambda q, k, v: attention(q[..., 1:], k, v),
        lambda: [normal(1, 2, 24, 17), *qkv()[1:]]),
    "T5": (lambda q, k, v, t: attention(q, k, v, bias=pt.RelativePositionBias(t)),
        lambda: [*qkv(), normal(8, 2, dtype=F32)]),
    "global keys": (lambda *t: attention(*t, window=(5, 0), global_keys=2), qkv),
    "ALiBi": (lambda q, k, v, s: attention(q, k, v, bias=pt.AlibiBias(s)),
        lambda: [*qkv(), normal(2, dtype=F32)]),
    "a mask with gradient": (lambda q, k, v, m: attention(q, k, v, attn_mask=m),
        lambda: [*qkv(), normal(24, 24)]),
    # A mask whose blocks are listed in each call has another structure each time.
    "a listed mask": (
        lambda q, k, v, m: attention(q, k, v,
            attn_mask=m.repeat_interleave(128, 0).repeat_interleave(128, 1)[:140, :260] > 0),
        lambda: [*(normal(1, 2, n, 16, dtype=F32) for n in (140, 260, 260)), torch.randn(2, 3)],
    ),
    "lengths": (lambda q, k, v, n: attention(q, k, v, key_lengths=n),
        lambda: [*qkv(), torch.randint(1, 24, (1,))]),
    "int32 lengths": (lambda q, k, v, n: attention(q, k, v, key_lengths=n.int()),
        lambda: [*qkv(), torch.randint(1, 24, (1,))]),
    "one tensor thrice": (lambda q: attention(q, q, q), lambda: qkv()[:1]),
    "layer_norm": (lambda x, w: pt.layer_norm(x, 32, w, backend="cuda"),
        lambda: [normal(6, 32), normal(32)]),
    "layer_norm, strided": (lambda x, w: pt.layer_norm(x.t(), 6, w, backend="cuda"),
        lambda: [normal(6, 32), normal(6)]),
    "rms_norm": (lambda x, w: pt.rms_norm(x, 32, w, backend="cuda"),
        lambda: [normal(6, 32), normal(32)]),
    "add_norm": (
        lambda x, y, w: pt.add_norm(x, y, w, dropout_p=0.3, backend="cuda"),
        lambda: [normal(6, 32), normal(6, 32), normal(32)],
    ),
    "add_norm, nothing to add": (lambda x, w: pt.add_norm(x, None, w, backend="cuda"),
        lambda: [normal(6, 32), normal(32)]),
    "feed_forward": (lambda *t: network(*t, activation="gelu", dropout_p=0.1), parameters),
    "feed_forward, recomputed": (
        lambda *t: network(*t[:4], gate_weight=t[4], activation="silu", recompute=True),
        lambda: [*parameters(), normal(24, 16)],
    ),
    "linear_cross_entropy": (
        lambda x, w, t: pt.linear_cross_entropy(x, w, t, backend="cuda"),
        lambda: [normal(5, 16), normal(24, 16), torch.randint(0, 24, (5,))],
    ),
}  # fmt: skip


def results(function: Callable[..., Any], inputs: list[Tensor], seed: int) -> list[Tensor]:
    """Return outputs and gradients, and the outputs of a call without gradients."""
    torch.manual_seed(seed)
    found = function(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    expected = [t for t in inputs if t.requires_grad]
    gradients = torch.autograd.grad(outputs, expected, [torch.full_like(o, 0.5) for o in outputs])
    with torch.no_grad():
        torch.manual_seed(seed)
        found = function(*inputs)
    return [*outputs, *gradients, *(found if isinstance(found, tuple) else (found,))]


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the bodies of raw ops that Python runs."""
    ran: list[str] = []
    for name in ("run", "run_backward"):
        body = getattr(Op, name)
        monkeypatch.setattr(
            Op,
            name,
            lambda self, *a, body=body, **kw: (ran.append(self.name), body(self, *a, **kw))[1],
        )
    yield ran


@pytest.mark.parametrize("name", PROBLEMS)
def test_programs_equal_the_recorded_calls(name: str, in_python: list[str]) -> None:
    function, make = PROBLEMS[name]
    for time in range(5):  # Python runs the first forward and backward; the second is recorded
        inputs = make()
        in_python.clear()
        got = results(function, inputs, time)
        by_fast_path = not in_python
        with fast_path.off():
            same(got, results(function, inputs, time))
    assert by_fast_path, fast_path.programs()


def test_calls_with_keywords_are_recorded() -> None:
    """The arguments have the form that the kernel of ``activate()`` passes on a GPU."""
    query, key, value = (t.detach() for t in qkv())
    given = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": None,
        "causal": "top_left",
        "scale": 0.3,
        "dropout_p": 0.2,
    }
    op = OPS["attention"]
    a = op.prepare(
        query, key, value, causal="top_left", scale=0.3, dropout_p=0.2, dropout_seed=torch.tensor(3)
    )[0]
    tensors, others = a[: op.num_tensors], (*a[op.num_tensors :], "cuda", True)
    inputs, events, *_, backend, _ = fast_path.record_forward(
        "attention", given, tensors, others, False, "cuda", True
    )
    assert backend == "cuda" and events and inputs == tensors


WATCHERS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "an observer": lambda: observing(lambda op, a, backend: None),
    "a forced backend": lambda: pt.use_backend(attention="reference"),
    "a dispatch mode": Sees,
    "a profiler": torch.profiler.profile,
    "autocast to another dtype": lambda: torch.autocast("cpu", dtype=torch.float16),
}


@pytest.mark.parametrize("watcher", WATCHERS)
def test_observed_calls_use_the_python_path(watcher: str, in_python: list[str]) -> None:
    inputs = [t.detach() for t in qkv()]
    for _ in range(3):
        attention(*inputs)
    in_python.clear()
    attention(*inputs)
    assert not in_python
    with WATCHERS[watcher]():
        for _ in range(3):
            in_python.clear()
            found = attention(*inputs)
            assert in_python
    assert found.dtype == (torch.float16 if "autocast" in watcher else BF16)


def test_environment_variables_invalidate_programs(
    in_python: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = qkv()
    for _ in range(4):
        attention(*inputs)
    in_python.clear()
    monkeypatch.setenv("PYTRANSFORMER_CUDA_PATH", "portable")
    attention(*inputs)
    assert in_python


def test_calls_that_check_values_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "looks_at_values", lambda device: True)
    q, k, v = qkv()
    for _ in range(4):
        attention(q, k, v, key_lengths=torch.tensor([5]))
    with pytest.raises(ValueError, match="key_lengths"):
        attention(q, k, v, key_lengths=torch.tensor([50]))
    assert any("no tensor" in reason or "holds" in reason for reason in fast_path.programs()[1])


def test_bad_calls_raise_every_time() -> None:
    q, k, v = qkv()
    for _ in range(4):
        with pytest.raises(ValueError, match="same head size"):
            attention(q, k[..., :8], v)


def test_second_derivatives_equal_the_reference() -> None:
    inputs = qkv(lq=8, lk=8)
    found = []
    for _ in range(4):
        (first,) = torch.autograd.grad(
            attention(*inputs).float().square().sum(), inputs[:1], create_graph=True
        )
        found.append(torch.autograd.grad(first.float().sum(), inputs[1])[0])
    same(found[:1] * 3, found[1:])
