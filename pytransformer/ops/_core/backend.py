# SPDX-License-Identifier: Apache-2.0
"""A backend of an op: its functions, its limits and its home devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

# the order without measurements: see preference.py
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
    # Return the library kernel that would run, if the backend has several: see preference.py.
    kernel: Callable[[Any], str | None] = lambda a: None
    # A call that depends only on shapes, strides and numbers may be recorded within
    # ``recorded(recorder)``: see recording.py.
    recorded: Recorded | None = None


class Backends(dict[str, Backend]):
    """An op's backends by name, in order of preference; each change calls ``changed``."""

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


for _name in (
    "__setitem__",
    "__delitem__",
    "__ior__",
    "clear",
    "pop",
    "popitem",
    "setdefault",
    "update",
):
    setattr(Backends, _name, _telling(_name))


def at_home(backend: str, device: str) -> bool:
    """Return true if the backend is a fused backend for this type of device."""
    return HOME.get(backend, device) == device and backend != "reference"


WRONG_DEVICE = "runs on "  # prefix of the reason when a backend does not support the device
