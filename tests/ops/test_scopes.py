# SPDX-License-Identifier: Apache-2.0
"""use_backend, trace, observing and activate in threads, coroutines and generators."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer import drop_in
from pytransformer.ops._core.registry import (
    carried,
    forced_backend,
    forcing,
    observing,
    open_blocks,
    trace,
)
from pytransformer.ops._core.registry import record as record_op

pytestmark = pytest.mark.unpoisoned
BACKENDS = ("cpu", "reference")


def forced() -> str | None:
    return forced_backend("attention")


def test_threads_have_independent_choices() -> None:
    results: list[str | None] = []
    with pt.use_backend(attention="cpu"):
        thread = threading.Thread(target=lambda: results.append(forced()))
        thread.start()
        thread.join()
        assert forced() == "cpu"
    assert results == [None]


def test_tasks_keep_their_choice_while_they_overlap() -> None:
    async def task(backend: str, sleeps: int) -> None:
        with pt.use_backend(attention=backend):
            for _ in range(sleeps):
                assert forced() == backend
                await asyncio.sleep(0)
            assert forced() == backend
        assert forced() is None

    async def main() -> None:
        await asyncio.gather(*(task(BACKENDS[i % 2], i + 1) for i in range(6)))
        assert forced() is None

    asyncio.run(main())
    assert forced() is None


def steps(backend: str, inner: str | None = None) -> Iterator[str | None]:
    with pt.use_backend(attention=backend):
        yield forced()
        with use_nested(inner) if inner else contextlib.nullcontext():
            yield forced()
        yield forced()


@contextlib.contextmanager
def use_nested(backend: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(pt.use_backend(attention=backend))
        yield


def test_interleaved_generators_keep_their_choice() -> None:
    a, b = steps("cpu", "reference"), steps("reference", "cpu")
    assert [next(a), next(b), next(a), next(b), next(a)] == [
        "cpu",
        "reference",
        "reference",
        "cpu",
        "cpu",
    ]
    with pt.use_backend(attention="reference"):
        a = steps("cpu")
        next(a)
        with pt.use_backend(attention=None):
            assert forced() is None
            assert next(a) == "cpu"
    a.close()
    b.close()
    assert forced() is None
    assert not forcing.open


def test_generators_resumed_in_another_thread_keep_their_choice() -> None:
    generator, results = steps("cpu"), []
    next(generator)
    thread = threading.Thread(target=lambda: results.extend([*generator, forced()]))
    thread.start()
    thread.join()
    assert results == ["cpu", "cpu", None]
    assert forced() is None


def test_generator_context_managers_force_for_their_caller() -> None:
    with pt.use_backend(attention="cpu"), use_nested("reference"):
        assert forced() == "reference"
        with pt.use_backend(attention="cpu"):
            assert forced() == "cpu"


def test_blocks_may_end_out_of_order() -> None:
    a, b = pt.use_backend(attention="cpu"), pt.use_backend(attention="reference")
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert forced() == "reference"
    b.__exit__(None, None, None)
    assert forced() is None


def test_blocks_ended_in_another_context_leave_no_state() -> None:
    block = pt.use_backend(attention="cpu")
    block.__enter__()
    thread = threading.Thread(target=block.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    assert forced() is None
    assert not forcing.open


def test_traces_and_observers_see_their_own_thread_only() -> None:
    q, seen = torch.randn(1, 1, 4, 8), []

    def other() -> None:
        pt.attention(q, q, q, backend="reference")

    with trace() as ran, observing(lambda op, a, backend: seen.append(backend)):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        pt.attention(q, q, q, backend="cpu")
    assert ran == [("attention_fwd", "cpu")]
    assert seen == ["cpu"]


@pytest.mark.parametrize("entry", ["direct_function", "function"])
def test_backward_in_another_thread_uses_the_choice_of_forward(entry: str) -> None:
    """Autograd's device threads inherit no context."""
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    errors: list[BaseException] = []

    def backward(out: torch.Tensor) -> None:
        try:
            assert forced() is None
            torch.autograd.grad(out.sum(), q)
        except BaseException as error:
            errors.append(error)

    mode = torch.utils.flop_counter.FlopCounterMode(display=False)
    with trace() as ran, pt.use_backend(attention="reference"):
        with mode if entry == "function" else contextlib.nullcontext():
            out = pt.attention(q, q, q)
        thread = threading.Thread(target=backward, args=(out,))
        thread.start()
        thread.join()
    assert errors == []
    assert ran == [("attention_fwd", "reference"), ("attention_bwd", "reference")]


def test_autograd_threads_use_the_choice_of_their_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autograd copies the thread-local state of the caller to its device threads."""
    with pt.use_backend(attention="cpu"):
        state = torch._C._get_obj_in_tls(forcing._key)
        results: list[str | None] = []

        def device_thread() -> None:
            torch._C._stash_obj_in_tls(forcing._key, state)
            results.append(forced())

        thread = threading.Thread(target=device_thread)
        thread.start()
        thread.join()
    assert results == ["cpu"]


def test_blocks_that_have_ended_are_not_carried() -> None:
    with trace() as ran, pt.use_backend(attention="cpu"):
        blocks = open_blocks()
    assert blocks is not None
    with carried(blocks):
        assert forced() is None
        record_op("attention_fwd", "cpu")
    assert ran == []


def test_a_compiled_call_follows_the_choice_without_recompiling() -> None:
    compiled = torch.compile(lambda q: pt.attention(q, q, q), backend="aot_eager", fullgraph=True)
    q = torch.randn(1, 1, 4, 8)
    compiled(q)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for backend in BACKENDS:
            with pt.use_backend(attention=backend), trace() as ran:
                compiled(q)
            assert ran == [("attention_fwd", backend)]


def calls_of_a_worker(seed: int, calls: int, wrong: list[str]) -> None:
    """Toggle blocks and activate() in one thread, from its body, generators and coroutines."""
    rng, q = random.Random(seed), torch.randn(1, 1, 2, 8)

    def check(expected: str) -> None:
        with trace() as ran:
            pt.attention(q, q, q)
            torch.nn.functional.scaled_dot_product_attention(q, q, q)
        if ran != [("attention_fwd", expected)] * 2:
            wrong.append(f"{ran}, expected {expected} twice")

    def generator(backend: str) -> Iterator[None]:
        with pt.activate(), pt.use_backend(attention=backend):
            while True:
                check(backend)
                yield

    async def task(backend: str, count: int) -> None:
        with pt.activate(), pt.use_backend(attention=backend):
            for _ in range(count):
                check(backend)
                await asyncio.sleep(0)

    async def tasks() -> None:
        await asyncio.gather(*(task(backend, 4) for backend in BACKENDS))

    done = 0
    generators = [generator(rng.choice(BACKENDS)) for _ in range(3)]
    while done < calls:
        kind, backend = rng.randrange(4), rng.choice(BACKENDS)
        if kind == 0:
            with pt.use_backend(attention=backend), pt.activate():
                check(backend)
        elif kind == 1:
            asyncio.run(tasks())
        elif kind == 2:
            place = rng.randrange(3)
            generators[place].close()
            generators[place] = generator(backend)
        else:
            next(rng.choice(generators))
        done += 16 if kind == 1 else 2 * (kind != 2)
    for g in generators:
        g.close()


def toggled_in_threads(threads: int, calls: int) -> list[str]:
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            calls_of_a_worker(seed, calls, wrong)
        except BaseException as error:
            wrong.append(repr(error))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return wrong


@pytest.mark.parametrize(
    "calls", [200, pytest.param(125_000, marks=pytest.mark.slow)], ids=["sample", "a million"]
)
def test_eight_threads_toggle_everything_at_once(calls: int) -> None:
    assert toggled_in_threads(8, calls) == []
    assert not drop_in.is_active()
    assert not forcing.open
    assert forced() is None


# ---- activate()


def calls_ours() -> bool:
    q = torch.randn(1, 1, 2, 8)
    with pt.use_backend(attention="reference"), trace() as ran:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    return bool(ran)


def test_activations_are_reentrant() -> None:
    activation = pt.activate()
    for _ in range(2):
        with activation:
            assert calls_ours()
            with activation:
                assert calls_ours()
            assert calls_ours()
        assert not calls_ours()


def test_activations_may_overlap() -> None:
    a, b = pt.activate(), pt.activate()
    a.__exit__()
    assert calls_ours()
    b.__exit__()
    assert not calls_ours()


@pytest.fixture(params=["before", "during", "undone during"])
def patched(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[int], Callable[[], None]]]:
    """Return when another library patches MultiheadAttention, its calls, and the patch."""
    calls: list[int] = []

    def patch() -> None:
        before = torch.nn.MultiheadAttention.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return before(self, *args, **kwargs)

        torch.nn.MultiheadAttention.__call__ = call

    yield request.param, calls, patch
    if "__call__" in vars(torch.nn.MultiheadAttention):
        del torch.nn.MultiheadAttention.__call__


def test_patches_of_other_libraries_remain(
    patched: tuple[str, list[int], Callable[[], None]],
) -> None:
    when, calls, patch = patched
    module, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 3, 8)
    if when == "before":
        patch()
    for _ in range(2):
        with pt.activate():
            if when == "during":
                patch()
            if when == "undone during":
                patch()
                del torch.nn.MultiheadAttention.__call__
            calls.clear()
            module(x, x, x)
            assert bool(calls) == (when != "undone during")
        calls.clear()
        module(x, x, x)
        assert bool(calls) == (when != "undone during")


def test_replaced_pytorch_functions_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(*args: Any, **kwargs: Any) -> None: ...

    with pt.activate():
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", replaced)
    assert torch.nn.functional.scaled_dot_product_attention is replaced
