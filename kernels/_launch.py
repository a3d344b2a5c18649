# SPDX-License-Identifier: Apache-2.0
"""Warm calls: record the launches of a call, and replay them for equal calls with other tensors.

Before a kernel runs, its host function computes tiles, strides and flags, and Triton binds and
classifies some hundred values: 20 to 60 us per launch. All of it depends on shapes, strides,
dtypes, alignments and numbers, never on tensor contents. So a call that equals an earlier one in
all of these differs only in addresses:

    @replayed
    def forward(a, out, lse): ...        # only allocates, creates views and launches

A function that also computes with tensors (T5's diagonals, a sum over partial results) is detected,
and runs normally each time.

The fast path's recorded programs (ops/_core/fast_path.py) replay eager calls before Python runs.
This module serves the calls that reach a kernel through Python: under torch.compile, modes and
subclasses, with block masks, and where the C++ fast path is not built.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton

from pytransformer.ops._core.fast_path import Watching

from . import _lang, tuned

MOST = 4096  # stored calls; at the limit all are dropped
ALIGNMENT = 256  # of scratch between launches, as of an allocation
# Tensor operations allowed in a replayed host function: allocations and views.
ALLOCATES = ("empty", "empty_like", "empty_strided", "new_empty")
VIEWS = (
    "view", "expand", "t", "transpose", "permute", "select", "slice", "unbind", "unsqueeze",
    "squeeze", "alias", "detach", "as_strided",
)  # fmt: skip


class Step(NamedTuple):
    """One launch: Triton's compiled kernel on a grid, and its arguments; addresses by index."""

    launch: Callable[..., None]
    arguments: tuple[Any, ...]
    # (position, builder) of arguments that contain an address
    made: tuple[tuple[int, Callable[[list[int]], Any]], ...]


class Replay:
    """The launches of one call, for any tensors with its layout. ``scratch``: sizes in bytes of
    memory between launches.
    """

    def __init__(self, steps: list[Step], scratch: list[int], device: torch.device) -> None:
        self.steps, self.device = steps, device
        self.scratch: list[int] = []
        self.bytes = 0
        for size in scratch:
            self.scratch.append(self.bytes)
            self.bytes += -(-size // ALIGNMENT) * ALIGNMENT

    def __call__(self, addresses: list[int]) -> None:
        """Launch on the tensors at these addresses, in the order of the call's arguments."""
        if self.device.type == "cuda" and torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                self.run(addresses)
        else:
            self.run(addresses)

    def run(self, addresses: list[int]) -> None:
        if self.bytes:
            held = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
            base = held.data_ptr()
            addresses += [base + offset for offset in self.scratch]
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        for launch, arguments, made in self.steps:
            full = list(arguments)
            for place, make in made:
                full[place] = make(addresses)
            launch(*full, stream=stream)


class _Recorder(Watching):
    """Records the operations and launches of a call."""

    def __init__(self, addresses: list[int], device: torch.device) -> None:
        super().__init__()
        self.addresses, self.device = addresses, device
        self.scratch: list[torch.Tensor] = []  # held until the end, so that no address is reused
        self.steps: list[Step] = []
        self.why_not: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name in ALLOCATES and found.device == self.device:
            self.scratch.append(found)
        elif name not in VIEWS:
            self.why_not = self.why_not or f"it calls {func}"
        return found

    def launched(
        self, compiled: Any, programs: int, arguments: tuple[Any, ...], parameters: int
    ) -> None:
        if len(arguments) != parameters:
            self.why_not = "not all arguments are given by position"
            return
        made, fixed = [], list(arguments)
        for place, argument in enumerate(arguments):
            make = self.maker(argument)
            if make is not None:
                made.append((place, make))
                fixed[place] = None
        self.steps.append(Step(compiled[(programs, 1, 1)], tuple(fixed), tuple(made)))

    def maker(self, argument: Any) -> Callable[[list[int]], Any] | None:
        """Return a function that builds the argument from addresses; None for an argument without
        addresses.
        """
        if isinstance(argument, torch.Tensor):
            return self.address(argument)
        if not isinstance(argument, tuple):
            return None
        inner = [(i, make) for i, make in enumerate(map(self.maker, argument)) if make is not None]
        if not inner:
            return None
        again = type(argument)._make if hasattr(argument, "_fields") else tuple
        fixed = [None if isinstance(v, torch.Tensor) else v for v in argument]

        def rebuild(addresses: list[int]) -> Any:
            full = list(fixed)
            for i, make in inner:
                full[i] = make(addresses)
            return again(full)

        return rebuild

    def address(self, t: torch.Tensor) -> Callable[[list[int]], int] | None:
        found = t.data_ptr()
        if found in self.addresses:
            number = self.addresses.index(found)
            return lambda addresses: addresses[number]
        for i, memory in enumerate(self.scratch):
            offset = found - memory.data_ptr()
            if 0 <= offset < max(1, memory.nbytes):
                number = len(self.addresses) + i
                return lambda addresses: addresses[number] + offset
        self.why_not = self.why_not or "a tensor comes from elsewhere"
        return None


ONCE, NEVER = "seen once", "not by addresses alone"
_known: dict[Any, Replay | str] = {}
_cold: list[str] = []


def replayed(run: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``run``: from the third equal call on, replay the launches of the second. See the
    module's docstring.
    """
    if _lang.INTERPRETED:
        return run

    @functools.wraps(run)
    def call(*arguments: Any, **named: Any) -> None:
        if _lang._observer or _cold or tuned.are_tried() or _lang.telling():
            return run(*arguments, **named)
        tensors: list[torch.Tensor] = []
        addresses: list[int] = []
        key = (
            run,
            *_key(arguments, tensors, addresses),
            *_key(named.values(), tensors, addresses),
            *_settings(tensors[0].device),
        )
        known = _known.get(key)
        if type(known) is Replay:
            known(addresses)
        elif known is NEVER:
            run(*arguments, **named)
        elif known is None:  # growing lengths never repeat: skip a first call
            if len(_known) >= MOST:
                _known.clear()
            _known[key] = ONCE
            run(*arguments, **named)
        else:
            recorder = _Recorder(addresses, tensors[0].device)
            with recorder, _lang.told_of_launches(recorder.launched):
                run(*arguments, **named)
            sizes = [t.nbytes for t in recorder.scratch]
            _known[key] = (
                NEVER if recorder.why_not else Replay(recorder.steps, sizes, tensors[0].device)
            )

    return call


@contextlib.contextmanager
def recorded(recorder: Any) -> Iterator[None]:
    """Record this thread's launches within the block: see ops/_core/fast_path.py of the package."""

    def told(compiled: Any, programs: int, arguments: tuple[Any, ...], parameters: int) -> None:
        whole = not _lang.INTERPRETED and len(arguments) == parameters
        recorder.launched(compiled[(programs, 1, 1)] if whole else None, arguments)

    if not _lang.INTERPRETED:
        recorder.launches_on(triton.runtime.driver.active.get_current_stream)
    with _lang.told_of_launches(told):
        yield


# While one of these is not empty, calls are not replayed, because it changes them too.
watchers: tuple[Any, ...] = (_lang._observer, tuned._tried, _cold)


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Disable replay within the block, for comparisons and if something that decides a call
    changes.
    """
    _cold.append("cold")
    try:
        yield
    finally:
        _cold.pop()


def _settings(device: torch.device) -> tuple[Any, ...]:
    """Return settings besides the arguments: the device, and the precision of float32 products."""
    return device, _lang.precision(torch.float32)


def _key(values: Iterable[Any], tensors: list[torch.Tensor], addresses: list[int]) -> Iterator[Any]:
    """Yield everything about the arguments but tensor contents and addresses; collect tensors and
    addresses.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            address = value.data_ptr()
            # A tensor that occurs twice gives another key, because addresses are looked up by
            # value.
            yield (
                value.shape,
                value.stride(),
                value.dtype,
                address & 15,
                addresses.index(address) if address in addresses else -1,
            )
            tensors.append(value)
            addresses.append(address)
        elif isinstance(value, tuple):
            yield from _key(value, tensors, addresses)
        elif isinstance(value, dict):
            yield tuple(value)
            yield from _key(value.values(), tensors, addresses)
        else:
            yield value
    yield len(addresses)


def numbers(t: torch.Tensor) -> torch.Tensor:
    """Return keys, values or a cache as kernels receive them: float8_e4m3fn as uint8, because
    Triton lacks it before sm_89.
    """
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
