# SPDX-License-Identifier: Apache-2.0
"""Faults planted in serving, generation and cached calls: survivors get their usual tokens.

A plant raises once, at the n-th event of a class: entry or exit of a module, an operation of torch,
an allocated page, or a line of the bookkeeping code, because KeyboardInterrupt may come at any
line. Free memory is NaN before every call.
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
from pytransformer.models import (
    GPT,
    T5,
    Batcher,
    Finished,
    GPTConfig,
    T5Config,
    generate,
    generation,
    serving,
)
from pytransformer.nn import cache as contiguous
from pytransformer.nn import paged_cache, pages
from support.models import assert_same_logits
from support.pages import check_pages, poison_free_rows

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
    """Raises ``error`` once, at the event number ``at``."""

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
        if event == "line" and frame.f_lineno not in uninterrupted(frame.f_code.co_filename):
            plant()
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename in BOOKS else None)
    try:
        yield
    finally:
        sys.settrace(before)


@functools.cache
def uninterrupted(file: str) -> frozenset[int]:
    """Return the traced lines before which the interpreter handles no signal.

    They are the return of a name after an assignment, and the end of a ``with`` block, which is
    traced as its first line.
    """
    with open(file, encoding="utf-8") as lines:
        return frozenset(
            number
            for number, line in enumerate(lines, 1)
            if line.strip() == "return finished" or line.lstrip().startswith("with ")
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
    """Return the model with sharper distributions, so a wrong key changes tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(5 if "embedding" in name else 3)
    return model.eval()


@functools.cache
def gpt() -> GPT:
    torch.manual_seed(5)
    return _scaled(
        GPT(
            GPTConfig(
                vocab_size=VOCABULARY,
                d_model=16,
                num_layers=2,
                num_heads=2,
                max_length=48,
                tied=False,
            )
        )
    )


@functools.cache
def t5() -> T5:
    torch.manual_seed(5)
    return _scaled(
        T5(
            T5Config(
                vocab_size=VOCABULARY,
                d_model=16,
                head_dim=8,
                hidden=16,
                num_heads=2,
                num_layers=2,
                max_distance=32,
            )
        )
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
STRIDES += [
    pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("modules", "operations", "lines")
]

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
    """Check that cache and requests have the same positions and no sequence is left."""
    assert {r.sequence: r.read for r in batcher._running()} == batcher.cache.pages.lengths


def check(results: dict[int, Finished], plants: list[Plant]) -> int:
    """Compare the surviving requests with ``generate`` and return their number."""
    assert results.keys() == set(range(len(REQUESTS)))
    survivors = 0
    for number, (_, tokens, score, error) in results.items():
        if number in FAULTY:
            assert not tokens and isinstance(error, (TypeError, RuntimeError))
        elif isinstance(error, CancelledError):
            assert number == CANCELLED and tokens == alone(number)[0][: len(tokens)]
        elif error is not None:
            assert any(error is plant.error for plant in plants) and not isinstance(
                error, OF_THE_BATCH
            )
            assert tokens == alone(number)[0][: len(tokens)]
        else:
            survivors += 1
            assert tokens == alone(number)[0], number
            assert_same_logits(torch.tensor([score]), torch.tensor([alone(number)[1]]))
    return survivors


def serve(kind: str, at: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Plant], int]:
    """Serve all requests with a plant at this event of each step.

    Return the plants that raised and the number of survivors.
    """
    cache = gpt().make_paged_cache(9, page_size=4)
    batcher, plants, results = (
        Batcher(gpt(), cache, slots=3, piece=4),
        list[Plant](),
        dict[int, Finished](),
    )
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
    """Run for events 0, stride, … until one is beyond every call.

    Return the sums of the runs' results: (plants, survivors).
    """
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
    assert torch.is_grad_enabled() and plants > 10 and survivors > 10
    print(f"{kind}: {plants} plants, {survivors} survivors")


# ---- generate with a caller's cache


def caches(model: Any, kind: str) -> nn.DecoderCache:
    """Return an empty cache; a paged one has another sequence."""
    if kind == "contiguous":
        return model.make_cache(24)
    cache = model.make_paged_cache(40, page_size=4)
    if not hasattr(model, "encode"):
        cache.select([cache.open()])
        with torch.no_grad():
            model(torch.tensor([[9] * 6]), past_key_values=cache)
        cache.rows = []
    return cache


def modes(model: Any) -> list[bool]:
    return [module.training for module in model.modules()]


GENERATE: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "greedy": (gpt, "contiguous", {}),
    "beams": (gpt, "paged", {"beams": 3}),
    "drawn": (gpt, "paged", DRAWN),
    "an encoder's": (t5, "paged", {"beams": 2}),
    "an encoder's, contiguous": (t5, "contiguous", {"beams": 2}),
}


@pytest.mark.parametrize("name", GENERATE)
@pytest.mark.parametrize(
    ("kind", "stride"), [("modules", 53), ("operations", 211), ("pages", 3), ("lines", 137)]
)
def test_failing_generate_restores_the_cache(
    name: str, kind: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, cached, settings = GENERATE[name]
    model, ids = make(), torch.tensor([[*BEGINNING, 12], [8, 7, 6, 5, 3, 4]])
    lengths = torch.tensor([6, 4])
    run = lambda cache: generate(
        model,
        ids,
        lengths,
        max_new_tokens=5,
        stop=(3,),
        generator=seeded(1),
        cache=cache,
        **settings,
    )
    cache, expected = caches(model, cached), run(caches(model, cached))
    held = dict(cache.pages.tables) if isinstance(cache, nn.PagedCache) else {}

    def at(event: int) -> tuple[int, int]:
        plant = Plant(event, ERRORS[event % len(ERRORS)]("planted"))
        for number, module in enumerate(model.modules()):
            module.training = number % 3 == 0
        before = modes(model)
        try:
            with planted(kind, plant, monkeypatch):
                run(cache)
        except BaseException as error:
            assert error is plant.error
        assert (
            modes(model) == before or kind == "lines"
        )  # the restoring code can be interrupted too
        model.eval()
        assert cache.length == 0
        poison(cache)
        assert not isinstance(cache, nn.PagedCache) or (
            cache.pages.tables == held and not cache.rows
        )
        again = run(cache)
        assert again.lists() == expected.lists() and torch.equal(again.scores, expected.scores)
        return int(plant.raised), 1

    plants, _ = exhaust(kind, stride, at)
    assert plants or (kind == "pages" and cached == "contiguous")


# ---- calls of a model


def _chain(cache: nn.DecoderCache, model: Any) -> list[Callable[[], Any]]:
    """Prepare two prompts of different lengths, a token each, more for one, a chain of drafts."""
    call = lambda ids, lengths=None: model(torch.tensor(ids), lengths, past_key_values=cache)
    return [
        lambda: call([[5, 6, 7, 8, 9], [9, 8, 7, 0, 0]], torch.tensor([5, 3])),
        lambda: call([[4], [6]]),
        lambda: call([[4, 7], [0, 0]], torch.tensor([8, 4])),
        lambda: call([[4, 7, 8], [6, 5, 4]]),
    ]


def _tree(cache: nn.DecoderCache, model: Any) -> list[Callable[[], Any]]:
    sees = torch.ones(1, 3, 9, dtype=torch.bool).tril(6)
    sees[:, 2, 7] = False
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    return [
        lambda: model(ids, past_key_values=cache),
        lambda: model(torch.tensor([[4, 6, 8]]), sees, past_key_values=cache),
    ]


def _fork(cache: Any, model: Any) -> list[Callable[[], Any]]:
    """Prepare two sequences that share a partially full page, which the next call copies."""
    model(torch.tensor([[5, 6, 7, 8, 9, 10]]), past_key_values=cache)
    cache.rows = [*cache.rows, cache.fork(cache.rows[0])]
    return [lambda: model(torch.tensor([[4, 5], [6, 7]]), past_key_values=cache)]


def _fixed(cache: nn.DecoderCache, model: Any) -> list[Callable[[], Any]]:
    model(torch.tensor([[5, 6, 7], [9, 8, 0]]), torch.tensor([3, 2]), past_key_values=cache)
    steps = nn.FixedSteps(cache, 4)
    return [
        lambda: model(torch.tensor([[4], [6]]), past_key_values=steps),
        lambda: model(
            torch.tensor([[4, 5], [6, 0]]),
            steps.lengths + torch.tensor([2, 1]),
            past_key_values=steps,
        ),
        lambda: model(torch.tensor([[4], [6]]), past_key_values=steps),
    ]


def _encoder(cache: nn.DecoderCache, model: Any) -> list[Callable[[], Any]]:
    memory = model.encode(torch.tensor([[5, 6, 7, 8]]))
    call = lambda ids: model(
        encoder_outputs=memory, decoder_input_ids=torch.tensor([ids]), past_key_values=cache
    )
    return [lambda: call([0, 5]), lambda: call([7])]


CALLS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "chain": (gpt, _chain), "tree": (gpt, _tree), "fork": (gpt, _fork), "fixed": (gpt, _fixed),
    "encoder": (t5, _encoder),
}  # fmt: skip
CACHES: dict[str, Callable[[Any], nn.DecoderCache]] = {
    "contiguous": lambda model: model.make_cache(20),
    "paged": lambda model: model.make_paged_cache(12, page_size=4),
    "int8": lambda model: model.make_cache(20, torch.int8),
}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "cached"), [(n, c) for n in CALLS for c in CACHES if n != "fork" or c == "paged"]
)
@pytest.mark.parametrize(("kind", "stride"), [("modules", 7), ("operations", 29), ("pages", 1)])
def test_failing_calls_change_no_later_logit(
    name: str, cached: str, kind: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, scenario = CALLS[name]
    model = make()
    new = lambda: CACHES[cached](model)
    cache = new()
    expected = [call().logits for call in scenario(cache, model)]

    def at(event: int) -> tuple[int, int]:
        cache, plants = new(), 0
        for number, call in enumerate(scenario(cache, model)):
            plant, before = (
                Plant(event, ERRORS[(event + number) % len(ERRORS)]("planted")),
                cache.lengths,
            )
            try:
                with planted(kind, plant, monkeypatch):
                    out = call()
            except BaseException as error:
                assert error is plant.error
                if name != "fixed":  # its capacity exceeds the lengths
                    assert (
                        torch.equal(cache.lengths, before)
                        or before.sum() == cache.lengths.sum() == 0
                    )
                    poison(cache)
                plants += 1
                out = call()
            assert_same_logits(out.logits, expected[number])
        return plants, 1

    plants, _ = exhaust(kind, stride, at)
    assert plants or kind == "pages"


@torch.no_grad()
@pytest.mark.parametrize("cached", CACHES)
def test_failing_first_calls_leave_no_cross_attention_keys(
    cached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, start = t5(), torch.tensor([[0, 5]])
    memories = [model.encode(torch.tensor([source])) for source in ([5, 6, 7, 8], [9, 4, 3, 3])]
    call = lambda cache, memory: model(
        encoder_outputs=memory, decoder_input_ids=start, past_key_values=cache
    )
    expected, cache = call(CACHES[cached](model), memories[1]).logits, CACHES[cached](model)
    with (
        pytest.raises(KeyboardInterrupt),
        planted("modules", Plant(30, KeyboardInterrupt()), monkeypatch),
    ):
        call(cache, memories[0])
    assert_same_logits(call(cache, memories[1]).logits, expected)
