# SPDX-License-Identifier: Apache-2.0
"""A backend of an op: how it computes, when it cannot, and on which devices it is at home."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

BACKENDS = ("cuda", "triton", "cpu", "torch", "reference")  # the order without measurements: see preference.py
# The devices whose tensors a backend computes unasked. Elsewhere (interpreted, emulated) it has to be forced.
HOME = {"cuda": "cuda", "triton": "cuda", "cpu": "cpu"}


Recorded = Callable[[Any], AbstractContextManager[None]]


@dataclass(frozen=True)
class Backend:
    """How one backend computes an op.

    ``forward(a)`` gets the named tuple of the op's arguments and returns its outputs; ``backward(a, grads, saved, wanted)``
    returns one tensor, or None, for each differentiable argument. ``extra_bytes(a)`` estimates the memory a call needs
    beyond its inputs and outputs. ``infer(a)``, if there is one, is a cheaper ``forward`` for calls that need no gradient: it
    returns the differentiable outputs alone.
    """

    name: str
    forward: Callable[[Any], tuple[torch.Tensor, ...]]
    backward: Callable[..., Sequence[torch.Tensor | None]]
    why_not: Callable[[Any], str | None]
    extra_bytes: Callable[[Any], int] = lambda a: 0
    infer: Callable[[Any], tuple[torch.Tensor, ...]] | None = None
    note: Callable[[Any], str | None] = lambda a: None  # what explain says of the call if the backend is chosen
    # The name of the library kernel that would run, if the backend has several: see preference.py.
    kernel: Callable[[Any], str | None] = lambda a: None
    # What goes by shapes, strides and numbers alone may be recorded, within ``recorded(recorder)``: see recording.py.
    recorded: Recorded | None = None


class Backends(dict[str, Backend]):
    """An op's backends by name, in the order of preference; ``changed`` is called after each change."""

    def __init__(self, backends: Mapping[str, Backend], changed: Callable[[], None]) -> None:
        super().__init__(backends)
        self.changed = changed


def _telling(name: str) -> Callable[..., Any]:
    change = getattr(dict, name)

    def method(self: Backends, *args: Any, **kwargs: Any) -> Any:
        try:
            return change(self, *args, **kwargs)
        finally:
            self.changed()

    return method


for _name in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(Backends, _name, _telling(_name))


def at_home(backend: str, device: str) -> bool:
    """Whether the backend is a fused one that is expected to compute what lies on this type of device."""
    return HOME.get(backend, device) == device and backend != "reference"


WRONG_DEVICE = "runs on "  # how the reason starts when a backend cannot take tensors of this device at all
