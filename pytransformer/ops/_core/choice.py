# SPDX-License-Identifier: Apache-2.0
"""The forced backends, observers and traces of a context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .scopes import Block, Scope
from .table import OPS

if TYPE_CHECKING:
    from .registry import Op

Record = list[tuple[str, str]]
forcing: Scope[dict[str, str | None]] = Scope("forcing")
observing_ops: Scope[Callable[[Op, Any, str], None]] = Scope("observing")
tracing: Scope[Record] = Scope("tracing")
SCOPES: tuple[Scope[Any], ...] = (forcing, observing_ops, tracing)


def record(raw: str, backend: str) -> None:
    """Add a raw op that ran to the traces of this context."""
    if tracing.open:
        for trace in tracing.values():
            trace.append((raw, backend))


def use_backend(**choice: str | None) -> contextlib.AbstractContextManager[None]:
    """Force backends by op: ``with use_backend(attention="cpu"): ...``.

    A call that the forced backend does not support raises :class:`BackendError` with the reason.
    The choice holds in this context: other threads and tasks have separate choices, and a new
    thread starts without one. Backward uses the blocks around ``backward()`` and around forward,
    while they are open. A compiled function follows the choice without recompiling. ``None``
    cancels an outer choice.

    Raises:
        ValueError: the op is unknown or does not have the backend.
    """
    for op, backend in choice.items():
        if op not in OPS:
            raise ValueError(f"use_backend: unknown op {op!r}; the ops are {', '.join(OPS)}")
        check_backend(op, backend)
    return forcing.holding(choice)


def forced_backend(op: str) -> str | None:
    """Return the backend that :func:`use_backend` forces for the op here, or None."""
    if forcing.open:
        for choice in reversed(forcing.values()):
            if op in choice:
                return choice[op]
    return None


def check_backend(op: str, backend: str | None) -> None:
    """Raise ValueError unless the op has this backend; None always passes."""
    if backend is not None and backend not in OPS[op].backends:
        raise ValueError(f"{op}: unknown backend {backend!r}; it has {', '.join(OPS[op].backends)}")


def observing(
    observer: Callable[[Op, Any, str], None],
) -> contextlib.AbstractContextManager[None]:
    """Call ``observer(op, arguments, backend)`` before each forward op inside the block."""
    return observing_ops.holding(observer)


@contextlib.contextmanager
def trace() -> Iterator[Record]:
    """Record (raw op, backend) of every raw op that runs inside the block, in order."""
    record: Record = []
    with tracing.holding(record):
        yield record


def open_blocks() -> list[Sequence[Block[Any]]] | None:
    """Return the open blocks for :func:`carried`, or None if there are none."""
    if forcing.open or observing_ops.open or tracing.open:
        return [scope.blocks() for scope in SCOPES]
    return None


@contextlib.contextmanager
def carried(blocks: Sequence[Sequence[Block[Any]]]) -> Iterator[None]:
    """Apply forward's blocks in backward, which may run in an autograd thread."""
    with contextlib.ExitStack() as stack:
        for scope, saved in zip(SCOPES, blocks, strict=True):
            stack.enter_context(scope.carried(saved))
        yield
