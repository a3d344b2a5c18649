# SPDX-License-Identifier: Apache-2.0
"""A tier that is broken in one of the ways a GPU may show, imitated on the CPU: for the tests of verdicts, in their process and in the
worker's."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch

from ..ops._core import checking, verdicts
from ..ops._core import registry as _registry
from ..ops._core.registry import Backend

TIER = "triton"  # guarded: it needs a verdict wherever it is


def _hang(*_: object) -> NoReturn:
    while True:
        time.sleep(1)


def _crash(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _raising(text: str) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError(text)

    return fail


# What the broken forward does, and how the verdict words it.
FAULTS: dict[str, tuple[Callable[..., Any] | None, str]] = {
    "wrong numbers": (None, "verify: wrong here: "),
    "hang": (_hang, "verify: hung here: no answer in"),
    "crash": (_crash, "verify: crashed here: the process ended by SIGSEGV"),
    "compile error": (_raising("at 3:4: dot() missing b"), "RuntimeError: at 3:4: dot() missing b"),
    "no compiler": (_raising("Failed to find C compiler"), "RuntimeError: Failed to find C compiler"),
    "driver too old": (
        _raising("a kernel could not be launched: the provided PTX was compiled with an unsupported toolchain."),
        "unsupported toolchain",
    ),
}


def broken(fault: str, first: Backend) -> Backend:
    """The backend with this fault; "" for none."""
    if not fault:
        return dataclasses.replace(first, name=TIER)
    function, _ = FAULTS[fault]

    def forward(a: Any) -> Any:
        return function(a) if function is not None else tuple(1.02 * t for t in first.forward(a))

    return dataclasses.replace(first, name=TIER, forward=forward, infer=None)


def plant(fault: str) -> None:
    """Make the tier of attention one with this fault, at home on the CPU. For good: in the worker."""
    op = _registry.OPS["attention"]
    op.backends = {TIER: broken(fault, op.backends["cpu"]), **{n: b for n, b in op.backends.items() if n != TIER}}
    _registry.HOME[TIER] = "cpu"


@contextlib.contextmanager
def planted(fault: str, folder: object, *, seconds: float = 60.0) -> Iterator[list[str]]:
    """Here and in the workers, with verdicts kept in ``folder``. Here the faulty tier must not run: yields what did run of it."""
    op, ran = _registry.OPS["attention"], []
    saved = op.backends

    def forward(a: Any) -> Any:
        ran.append("forward")
        return saved["cpu"].forward(a)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTRANSFORMER_CACHE", str(folder))
        patch.setenv("PYTRANSFORMER_VERIFY", "first")
        patch.setattr(checking, "PREAMBLE", f"from pytransformer.testing.planted_tier import plant; plant({fault!r})")
        patch.setattr(verdicts, "FIRST_SECONDS", seconds)
        patch.setitem(_registry.HOME, TIER, "cpu")
        op.backends = {TIER: dataclasses.replace(saved["cpu"], name=TIER, forward=forward, infer=None)} | {
            n: b for n, b in saved.items() if n != TIER
        }
        verdicts.forget()
        try:
            yield ran
        finally:
            op.backends = saved
            verdicts.forget()


def inputs() -> list[torch.Tensor]:
    """Query, key and value of a plain call."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, 30, 16, generator=generator) for _ in range(3)]
