# SPDX-License-Identifier: Apache-2.0
"""Ops by name, their backends, and the choices that apply in a context."""

from __future__ import annotations

import contextlib
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from .scopes import Block, Scope

if TYPE_CHECKING:
    from .op import Op

# the order without measurements: see dispatch.py
BACKENDS = ("cuda", "triton", "cpu", "torch", "reference")
# Device type that a backend computes by default. On other devices (interpreted, emulated) it must
# be forced.
HOME = {"cuda": "cuda", "triton": "cuda", "cpu": "cpu"}


Recorded = Callable[[Any], AbstractContextManager[None]]


@dataclass(frozen=True)
class Backend:
    """The functions of one backend for an op.

    ``forward(a)`` receives the named tuple of the op's arguments and returns its outputs.
    ``backward(a, grads, saved, wanted)`` returns a tensor or None for each differentiable argument.
    ``extra_bytes(a)`` estimates the memory of a call beyond its inputs and outputs. ``infer(a)``,
    if not None, is a cheaper ``forward`` for calls without gradient; it returns only the
    differentiable outputs.
    """

    name: str
    forward: Callable[[Any], tuple[torch.Tensor, ...]]
    backward: Callable[..., Sequence[torch.Tensor | None]]
    why_not: Callable[[Any], str | None]
    extra_bytes: Callable[[Any], int] = lambda a: 0
    infer: Callable[[Any], tuple[torch.Tensor, ...]] | None = None
    # explain's note on the call if the backend is chosen
    note: Callable[[Any], str | None] = lambda a: None
    # Return the library kernel that would run, if the backend has several: see dispatch.py.
    kernel: Callable[[Any], str | None] = lambda a: None
    # A call that depends only on shapes, strides and numbers may be recorded within
    # ``recorded(recorder)``: see fast_path.py.
    recorded: Recorded | None = None


def at_home(backend: str, device: str) -> bool:
    """Return true if the backend is a fused backend for this type of device."""
    return HOME.get(backend, device) == device and backend != "reference"


WRONG_DEVICE = "runs on "  # prefix of the reason when a backend does not support the device


OPS: dict[str, Op] = {}
replaced: list[str] = []  # ops whose backends differ from the declared backends


class ArgumentsClass(Protocol):
    """The named-tuple class of an op's arguments.

    Its fields come from the op's schema, so type checkers do not know them.
    """

    _fields: tuple[str, ...]

    def __call__(self, *values: Any) -> Any: ...

    def _make(self, values: Iterable[Any], /) -> Any: ...


def arguments_class(name: str, fields: Sequence[str], problem: type | None) -> ArgumentsClass:
    """Return the class with these fields; it inherits the properties of ``problem``."""
    # Type stubs treat a named tuple with computed fields as any tuple. Its __new__ must stay,
    # because torch.compile supports no other.
    made = cast(type, namedtuple(name, fields))
    return cast(
        ArgumentsClass, made if problem is None else type(name, (made, problem), {"__slots__": ()})
    )


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
