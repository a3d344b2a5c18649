# SPDX-License-Identifier: Apache-2.0
"""No silent fallback: what ran on the reference, on PyTorch's own kernel, or on the next backend after one that failed."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from .native import PACKAGE


class BackendError(NotImplementedError):
    """A forced backend cannot do the problem, or strict mode met a fallback; the message has the reason."""


class NotLaunched(RuntimeError):
    """A backend's kernel was refused before it ran: nothing was computed, and another backend may compute it."""


@dataclass
class Fallback:
    """The reference, or the next backend, computed what a fused backend was expected to compute."""

    op: str
    call_site: str
    reason: str
    count: int = 0


# Process-wide on purpose: thread-locals and context variables do not reach autograd's device threads.
_fallbacks: dict[tuple[str, str, str], Fallback] = {}
_lock = threading.Lock()
# Why a backend did not run a kind of problem: see failures.py. Empty unless something is wrong with this machine.
failures: dict[tuple[Any, ...], str] = {}
MOST_FAILURES = 1024  # the oldest is forgotten, and its backend tried again
MAX_FALLBACKS = 1024  # a reason may name a shape, and a server meets any number of shapes


def fallbacks() -> list[Fallback]:
    """The calls, by place and reason, that ran on the reference where a fused backend was expected, or on the next backend after one
    that failed. The newest 1,024 are stored."""
    with _lock:
        return list(_fallbacks.values())


def clear_fallbacks() -> None:
    """Forget the recorded fallbacks; the next one at each place warns again, and backends that failed are tried again."""
    with _lock:
        _fallbacks.clear()
        failures.clear()


def remember_failure(kind: tuple[Any, ...], why: str) -> None:
    """Do not try this backend again for this kind of problem."""
    with _lock:
        failures[kind] = why
        if len(failures) > MOST_FAILURES:
            del failures[next(iter(failures))]


def record_fallback(op: str, why: str, *, instead: str, strict: bool = False, once: bool = False) -> None:
    """Note a call that a fused backend was expected to compute; warns the first time at each place, or with ``once`` at the first place.

    Raises:
        BackendError: ``strict``, or PYTRANSFORMER_STRICT=1.
    """
    if strict or os.environ.get("PYTRANSFORMER_STRICT") == "1":
        raise BackendError(f"{op}: strict mode, and only {instead} can do this: {why}")
    site = _call_site()
    with _lock:
        record = _fallbacks.setdefault((op, site, why), Fallback(op, site, why))
        if len(_fallbacks) > MAX_FALLBACKS:
            del _fallbacks[next(iter(_fallbacks))]
        record.count += 1
        told = once and any(f.op == op and f.reason == why and f is not record for f in _fallbacks.values())
    if record.count == 1 and not told:
        warnings.warn(f"pytransformer.{op} at {site} runs on {instead}: {why}", RuntimeWarning, stacklevel=2)


def _call_site() -> str:
    """file:line of the innermost frame that is neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    ours = str(PACKAGE)
    theirs = os.path.dirname(os.path.abspath(torch.__file__))
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((ours, theirs, "<")):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"
