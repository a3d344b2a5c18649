# SPDX-License-Identifier: Apache-2.0
"""Records and warnings of fallbacks to the reference, PyTorch's kernel, or the next backend."""

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
    """A forced backend does not support the problem, or strict mode met a fallback.

    The message gives the reason.
    """


class NotLaunched(RuntimeError):
    """A refused kernel: nothing was computed, and another backend may compute the call."""


@dataclass
class Fallback:
    """A call that the reference or the next backend computed instead of a fused backend."""

    op: str
    call_site: str
    reason: str
    count: int = 0


# Process-wide, because thread-locals and context variables do not reach autograd's device threads.
_fallbacks: dict[tuple[str, str, str], Fallback] = {}
_lock = threading.Lock()
# Reasons by backend and kind of problem: see failures.py. Empty on a working machine.
failures: dict[tuple[Any, ...], str] = {}
MOST_FAILURES = 1024  # the oldest entry is dropped, and its backend is tried again
MAX_FALLBACKS = 1024  # a reason may contain a shape, and a server meets any number of shapes


def fallbacks() -> list[Fallback]:
    """Return the recorded fallbacks by call site and reason, at most the latest 1,024.

    A fallback is a call that ran on the reference although a fused backend was expected, or on the
    next backend after one that failed.
    """
    with _lock:
        return list(_fallbacks.values())


def clear_fallbacks() -> None:
    """Clear the recorded fallbacks and failures.

    The next fallback at each call site warns again, and failed backends are tried again.
    """
    with _lock:
        _fallbacks.clear()
        failures.clear()


def remember_failure(kind: tuple[Any, ...], why: str) -> None:
    """Exclude this backend for this kind of problem."""
    with _lock:
        failures[kind] = why
        if len(failures) > MOST_FAILURES:
            del failures[next(iter(failures))]


def record_fallback(
    op: str, why: str, *, instead: str, strict: bool = False, once: bool = False
) -> None:
    """Record a fallback and warn once per call site, or with ``once`` at the first site only.

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
        told = once and any(
            f.op == op and f.reason == why and f is not record for f in _fallbacks.values()
        )
    if record.count == 1 and not told:
        warnings.warn(
            f"pytransformer.{op} at {site} runs on {instead}: {why}", RuntimeWarning, stacklevel=2
        )


def _call_site() -> str:
    """Return file:line of the innermost frame outside this package and torch."""
    frame: FrameType | None = sys._getframe(1)
    ours = str(PACKAGE)
    theirs = os.path.dirname(os.path.abspath(torch.__file__))
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((ours, theirs, "<")):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"
