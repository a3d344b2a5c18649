# SPDX-License-Identifier: Apache-2.0
"""Faults planted in serving, generation and calls with a cache: survivors get the tokens that they get alone.

A plant raises once, at the n-th event of a kind: the entry or exit of a module, an operation of torch, a page that is taken, or a line
of the code that keeps the books, for KeyboardInterrupt may come at any line. Memory that nobody holds is NaN before every call.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from pytransformer import nn
from pytransformer.models import GPT, T5, Batcher, Finished, GPTConfig, T5Config, generate, generation, serving
from pytransformer.nn import cache as contiguous
from pytransformer.nn import paged_cache, pages
from pytransformer.testing.models import assert_same_logits
from pytransformer.testing.pages import check_pages, poison_free_rows

VOCABULARY = 23
BOOKS = {module.__file__ for module in (serving, generation, contiguous, paged_cache, pages)}
ERRORS: tuple[Callable[[str], BaseException], ...] = (
    RuntimeError,
    torch.OutOfMemoryError,
    KeyboardInterrupt,
    nn.OutOfPages,
    MemoryError,
)
OF_THE_BATCH = (MemoryError, torch.OutOfMemoryError, KeyboardInterrupt)


class Plant:
    """Raises ``error`` at the event number ``at``, once."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.raised = at, error, False

    def __call__(self, *_: Any) -> None:
        self.at -= 1
        if self.at < 0 and not self.raised:
            self.raised = True
            raise self.error


class _Operations(TorchDispatchMode):
    def __init__(self, plant: Plant) -> None:
        super().__init__()
        self.plant = plant

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.plant()
        return func(*args, **(kwargs or {}))


@contextmanager
def _lines(plant: Plant) -> Iterator[None]:
    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lineno not in returns(frame.f_code.co_filename):
            plant()
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename in BOOKS else None)
    try:
        yield
    finally:
        sys.settrace(before)


@functools.cache
def returns(file: str) -> frozenset[int]:
    """Lines that return a name: the interpreter handles no signal between an assignment and such a line."""
    with open(file, encoding="utf-8") as lines:
        return frozenset(
            n for n, line in enumerate(lines, 1) if line.split()[:1] == ["return"] and line.split()[1:][:1] == ["finished"]
        )


@contextmanager
def planted(kind: str, plant: Plant, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ExitStack() as stack:
        if kind == "modules":
            for register in (register_module_forward_pre_hook, register_module_forward_hook):
                stack.callback(register(plant).remove)
        elif kind == "operations":
            stack.enter_context(_Operations(plant))
        elif kind == "pages":
            take = nn.Pages._take
            patch = stack.enter_context(monkeypatch.context())
            patch.setattr(nn.Pages, "_take", lambda self: (plant(), take(self))[1])
        else:
            stack.enter_context(_lines(plant))
        yield


def _scaled(model: Any) -> Any:
    """The model with sharper distributions, so that a wrong key changes tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(5 if "embedding" in name else 3)
    return model.eval()


@functools.cache
def gpt() -> GPT:
    torch.manual_seed(5)
    return _scaled(GPT(GPTConfig(vocab_size=VOCABULARY, d_model=16, num_layers=2, num_heads=2, max_length=48, tied=False)))


@functools.cache
def t5() -> T5:
    torch.manual_seed(5)
    return _scaled(
        T5(T5Config(vocab_size=VOCABULARY, d_model=16, head_dim=8, hidden=16, num_heads=2, num_layers=2, max_distance=32))
    )


def poison(cache: nn.DecoderCache) -> None:
    if isinstance(cache, nn.PagedCache):
        poison_free_rows(cache)
        check_pages(cache.pages)
    elif isinstance(cache, nn.KeyValueCache):
        for layer in cache.layers:
            assert layer.length == cache.length and layer.step is None
            for buffer in layer.stored.numbers if layer.stored is not None else ():
                for row, held in zip(buffer, cache.lengths.tolist()):
                    row[:, held:] = torch.nan if buffer.is_floating_point() else 127


STRIDES: list[Any] = [("modules", 4), ("operations", 23), ("pages", 1), ("lines", 41)]
STRIDES += [pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("modules", "operations", "lines")]

# ---- the batcher

BEGINNING = [7, 8, 9, 10, 11]
DRAWN: dict[str, Any] = {"sample": True, "temperature": 0.9, "top_k": 9}
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    ([*BEGINNING, 12], {"max_new_tokens": 4}),
    ([*BEGINNING, 13, 14], {"max_new_tokens": 3, **DRAWN}),
    ([5], {"max_new_tokens": 3, "sample": True, "top_k": 2.5}),  # raises when it draws
    ([*BEGINNING, 12, 15], {"max_new_tokens": 1}),
    ([4, 6], {"max_new_tokens": 9}),  # is cancelled
    ([6] * 9, {"max_new_tokens": 3, "stop": (3,), **DRAWN}),
    ([4], {"max_new_tokens": 2, "stop": 3}),  # raises when its token is compared
]
FAULTY, CANCELLED = (2, 6), 4


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


@functools.cache
def alone(number: int) -> tuple[list[int], float]:
    prompt, settings = REQUESTS[number]
    made = generate(gpt(), torch.tensor([prompt]), generator=seeded(number), **settings)
    return made.lists()[0], float(made.scores[0])


def agree(batcher: Batcher) -> None:
    """Cache and requests hold the same positions, and no sequence is left over."""
    assert {r.sequence: r.read for r in batcher._running()} == batcher.cache.pages.lengths


def check(results: dict[int, Finished], plants: list[Plant]) -> int:
    """Compare the requests that survived with ``generate`` and return their number."""
    assert results.keys() == set(range(len(REQUESTS)))
    survivors = 0
    for number, (_, tokens, score, error) in results.items():
        if number in FAULTY:
            assert not tokens and isinstance(error, (TypeError, RuntimeError))
        elif isinstance(error, CancelledError):
            assert number == CANCELLED and tokens == alone(number)[0][: len(tokens)]
        elif error is not None:
            assert any(error is plant.error for plant in plants) and not isinstance(error, OF_THE_BATCH)
            assert tokens == alone(number)[0][: len(tokens)]
        else:
            survivors += 1
            assert tokens == alone(number)[0], number
            assert_same_logits(torch.tensor([score]), torch.tensor([alone(number)[1]]))
    return survivors


def serve(kind: str, at: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Plant], int]:
    """Serve all requests with a plant at this event of each step. Returns the plants that raised, and the number of survivors."""
    cache = gpt().make_paged_cache(9, page_size=4)
    batcher, plants, results = Batcher(gpt(), cache, slots=3, piece=4), list[Plant](), dict[int, Finished]()
    for step in itertools.count():
        assert step < 200, "a request never ends"
        for number in range(len(REQUESTS))[2 * step : 2 * step + 2]:
            prompt, settings = REQUESTS[number]
            assert batcher.submit(prompt, generator=seeded(number), **settings) == number
        if step == 5:
            assert batcher.cancel(CANCELLED) or results[CANCELLED].error is not None
        if not batcher.busy:
            break
        plant = Plant(at, ERRORS[(step + at) % len(ERRORS)](f"event {at}"))
        for attempt in range(2):
            poison(cache)
            try:
                with planted(kind, plant, monkeypatch) if attempt == 0 else ExitStack():
                    ended = batcher.step()
            except BaseException as error:
                assert error is plant.error and attempt == 0
                agree(batcher)
                continue
            for finished in ended:
                assert finished.request not in results
                results[finished.request] = finished
            break
        agree(batcher)
        if plant.raised:
            plants.append(plant)
    check_pages(cache.pages)
    assert cache.pages.available == 9
    return plants, check(results, plants)


def exhaust(kind: str, stride: int, run: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
    """Run for events 0, stride, … until one is beyond every call. Returns the sums of what the runs return: (plants, survivors)."""
    totals = [0, 0]
    for at in range(random.Random(kind).randrange(stride), 10**6, stride):
        plants, survivors = run(at)
        totals[0] += plants
        totals[1] += survivors
        if not plants:
            return totals[0], totals[1]
    raise AssertionError("the plants have no end")


@pytest.mark.parametrize(("kind", "stride"), STRIDES)
def test_survivors_of_a_fault_in_a_step_get_the_tokens_of_generate(
    kind: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(at: int) -> tuple[int, int]:
        plants, survivors = serve(kind, at, monkeypatch)
        return len(plants), survivors

    plants, survivors = exhaust(kind, stride, run)
    assert plants > 10 and survivors > 10
    print(f"{kind}: {plants} plants, {survivors} survivors")
