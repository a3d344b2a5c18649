# SPDX-License-Identifier: Apache-2.0
"""Which backend runs, as the process wants it, and what ran: forced choices, observers and traces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .table import OPS

if TYPE_CHECKING:
    from .registry import Op

# Process-wide on purpose: thread-locals and context variables do not reach autograd's device threads.
_forced: dict[str, str] = {}
_traces: list[list[tuple[str, str]]] = []
_observers: list[Callable[[Op, Any, str], None]] = []


def record(raw: str, backend: str) -> None:
    for trace in _traces:
        trace.append((raw, backend))


@contextlib.contextmanager
def use_backend(**choice: str | None) -> Iterator[None]:
    """Force backends by op, in the whole process: ``with use_backend(attention="cpu"): ...``.

    Forced means forced: a call that the backend cannot do raises :class:`BackendError` with the reason. Takes effect
    without recompiling a compiled function. ``None`` lifts an outer choice.

    Raises:
        ValueError: unknown op, or a backend that the op does not have.
    """
    for op, backend in choice.items():
        if op not in OPS:
            raise ValueError(f"use_backend: unknown op {op!r}; the ops are {', '.join(OPS)}")
        check_backend(op, backend)
    saved = dict(_forced)
    for op, backend in choice.items():
        if backend is None:
            _forced.pop(op, None)
        else:
            _forced[op] = backend
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(saved)


def forced_backend(op: str) -> str | None:
    """The backend that :func:`use_backend` forces for the op, or None."""
    return _forced.get(op)


def check_backend(op: str, backend: str | None) -> None:
    """ValueError unless the op has this backend (None is always right)."""
    if backend is not None and backend not in OPS[op].backends:
        raise ValueError(f"{op}: unknown backend {backend!r}; it has {', '.join(OPS[op].backends)}")


@contextlib.contextmanager
def observing(observer: Callable[[Op, Any, str], None]) -> Iterator[None]:
    """Call ``observer(op, arguments, backend)`` before each forward op that runs inside the block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextlib.contextmanager
def trace() -> Iterator[list[tuple[str, str]]]:
    """Record (raw op, backend) of every raw op that runs inside the block, in order."""
    record: list[tuple[str, str]] = []
    _traces.append(record)
    try:
        yield record
    finally:
        _traces[:] = [t for t in _traces if t is not record]  # by identity: nested traces may be equal
