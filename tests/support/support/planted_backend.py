# SPDX-License-Identifier: Apache-2.0
"""A backend with a planted fault, for the tests of verification and its worker process.

``planted`` replaces the backend by a substitute that fails before its kernel or in it.
``checked_apart`` leaves the backend unchanged, for faults in its kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch

import pytransformer as pt
from pytransformer.ops._core import checking, fast_path, verification
from pytransformer.ops._core import registry as _registry
from pytransformer.ops._core.registry import Backend
from support.hugging_face import distance, model_distance_limit

BACKEND = "triton"  # guarded: needs a verification result on every device


def _hang(*_: object) -> NoReturn:
    while True:
        time.sleep(1)


def _crash(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _raising(text: str) -> Callable[..., NoReturn]:
    def fail(*_: object) -> NoReturn:
        raise RuntimeError(text)

    return fail


# The behavior of the broken forward, and its description in the result.
FAULTS: dict[str, tuple[Callable[..., Any] | None, str]] = {
    "wrong numbers": (None, "verify: wrong here: "),
    "hang": (_hang, "verify: hung here: no answer in"),
    "crash": (_crash, "verify: crashed here: the process ended by SIGSEGV"),
    "compile error": (_raising("at 3:4: dot() missing b"), "RuntimeError: at 3:4: dot() missing b"),
    "no compiler": (
        _raising("Failed to find C compiler"),
        "RuntimeError: Failed to find C compiler",
    ),
    "driver too old": (
        _raising(
            "a kernel could not be launched: the provided PTX was compiled with an unsupported"
            " toolchain."
        ),
        "unsupported toolchain",
    ),
}


def broken(fault: str, first: Backend) -> Backend:
    """Return the backend with this fault; "" means none."""
    if not fault:
        return dataclasses.replace(first, name=BACKEND)
    function, _ = FAULTS[fault]

    def forward(a: Any) -> Any:
        return function(a) if function is not None else tuple(1.02 * t for t in first.forward(a))

    return dataclasses.replace(first, name=BACKEND, forward=forward, infer=None)


def plant(fault: str) -> None:
    """Plant the fault in attention's backend, native on the CPU, permanently (in the worker)."""
    op = _registry.OPS["attention"]
    op.backends = {
        BACKEND: broken(fault, op.backends["cpu"]),
        **{n: b for n, b in op.backends.items() if n != BACKEND},
    }
    _registry.HOME[BACKEND] = "cpu"


@contextlib.contextmanager
def planted(fault: str, folder: object, *, seconds: float = 60.0) -> Iterator[list[str]]:
    """Plant the fault in the workers, with results stored in ``folder``.

    In this process the backend works and records its calls; yield these records, which must stay
    empty.
    """
    ran: list[str] = []
    cpu = _registry.OPS["attention"].backends["cpu"]

    def forward(a: Any) -> Any:
        ran.append("forward")
        return cpu.forward(a)

    preamble = f"from support.planted_backend import plant; plant({fault!r})"
    with checked_apart(
        dataclasses.replace(cpu, name=BACKEND, forward=forward, infer=None),
        preamble,
        folder,
        seconds=seconds,
    ):
        yield ran


@contextlib.contextmanager
def checked_apart(
    backend: Backend, preamble: str, folder: object, *, seconds: float = 60.0
) -> Iterator[None]:
    """Put the guarded backend first for attention, as if native on the CPU, without the fast path.

    The checking process runs ``preamble`` first and has ``seconds``; results are stored in
    ``folder``.
    """
    op = _registry.OPS["attention"]
    saved = op.backends
    with pytest.MonkeyPatch.context() as patch, fast_path.off():
        patch.setenv("PYTRANSFORMER_CACHE", str(folder))
        patch.setenv("PYTRANSFORMER_VERIFY", "first")
        patch.setattr(checking, "PREAMBLE", preamble)
        patch.setattr(verification, "HANG_SECONDS", seconds)
        patch.setattr(verification, "CHECK_SECONDS", 300.0)
        patch.setitem(_registry.HOME, backend.name, "cpu")
        op.backends = {backend.name: backend} | {
            n: b for n, b in saved.items() if n != backend.name
        }
        verification.forget()
        try:
            yield
        finally:
            op.backends = saved
            verification.forget()


def check_told_once(
    way: Callable[[], list[torch.Tensor]], want: list[torch.Tensor], backend: str, says: str
) -> None:
    """Run the call twice on a broken backend; assert correct results and one warning.

    The backend cpu must compute both, and the warning must contain the check's result.
    """
    with warnings.catch_warnings(record=True) as told, _registry.trace() as by:
        warnings.simplefilter("always")
        results = [way(), way()]
    reasons = {f.reason for f in pt.fallbacks()}
    pt.clear_fallbacks()
    assert backend not in {backend for _, backend in by}, f"ran on the broken backend: {by}"
    for got in results:
        for mine, theirs in zip(got, want, strict=True):
            assert distance(mine, theirs) < model_distance_limit(torch.float32)
    messages = [str(w.message) for w in told if backend in str(w.message)]
    assert len(messages) == 1 and "runs on the backend cpu" in messages[0], messages
    assert says in messages[0] and verification.PREFIX in messages[0], messages
    assert len(reasons) == 1


def inputs() -> list[torch.Tensor]:
    """Return query, key and value of a plain call."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, 30, 16, generator=generator) for _ in range(3)]
