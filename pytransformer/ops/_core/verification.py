# SPDX-License-Identifier: Apache-2.0
"""Verification results: which backends are known to be correct on a device, and the check.

On a GPU, and for the backends made for GPUs, an unforced call uses a backend only if a result shows
that the backend is correct there. Results come with the package (verified.py), from `pytransformer
verify`, or from a short check at first use. The CPU's backends need no result, but a failed check
excludes them. A forced backend needs none. A result applies to (op, backend, dtype, size class).
See docs/design/verification.md.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import checking, verification_file, verified
from .deadline import Deadline, Stopwatch

if TYPE_CHECKING:
    from .registry import Op

GUARDED = {"triton", "cuda"}  # need a result on every device; on a cuda device every backend does
MODES = ("off", "first", "strict")
PREFIX = "verify: "  # prefix of every reason that comes from a result
RIGHT, DECLINED, UNCHECKED, LATE = "right", "declined", "not checked", "late"
CHECK_SECONDS = 20.0  # for all first-use checks of a process, including waits for other processes
HANG_SECONDS = 15.0  # without an answer for this long, a check counts as hung
CASES_SECONDS = 5.0  # no further case begins after this time
POLL_SECONDS = 0.2
MIN_SIZE, MAX_SIZE = 64, 8192
UNKNOWN = f"{PREFIX}not checked here yet"

Key = tuple[str, str, torch.device, torch.dtype]  # op, backend, device, dtype of the first tensor
settled: set[Key] = set()  # correct for every size: a warm call reads only this set
measured_order: dict[tuple[str, str], tuple[str, ...]] = {}  # by (op, device type)
watched: list[str] = []  # disables the C++ fast path while not empty
when_forgotten: list[Callable[[], None]] = []
version = [0]  # changes with every new result
_devices: dict[torch.device, Results] = {}
_lock = threading.RLock()
_seconds = [0.0]  # spent by checks at first use


@dataclass
class Result:
    """The verification result of one op, backend and dtype on a device."""

    complete: bool = False  # every case was checked
    right: set[int] = field(default_factory=set)  # size classes
    wrong: dict[int, str] = field(default_factory=dict)  # reasons by size class

    def reason(self, size: int) -> str | None:
        """Return why the backend is excluded, None if it is correct, or UNKNOWN without a check.

        One failed case excludes its size class, and every class in which no case passed.
        """
        if size in self.wrong:
            return self.wrong[size]
        if size in self.right:
            return None
        if self.wrong:
            return next(iter(self.wrong.values()))
        return None if self.complete else UNKNOWN


Results = dict[tuple[str, str, str], Result]  # by op, backend, dtype


def mode() -> str:
    """Return PYTRANSFORMER_VERIFY, or "first" if it is unset or unknown."""
    value = os.environ.get("PYTRANSFORMER_VERIFY", "first")
    return value if value in MODES else "first"


def size_class(a: Any) -> int:
    """Return the last dimension of the first tensor, rounded up to a power of two."""
    last = number(a[0].shape[-1])
    return min(max(MIN_SIZE, 1 << (max(last, 1) - 1).bit_length()), MAX_SIZE)


def number(n: Any) -> Any:
    """Return the current value of a symbolic size, without adding a guard to a traced graph."""
    return n.node.hint if isinstance(n, torch.SymInt) else n


def needs_result(backend: str, device: torch.device) -> bool:
    return backend != "reference" and (backend in GUARDED or device.type == "cuda")


def why_not(op: Op, backend: str, a: Any, key: Key, *, ask: bool = True) -> str | None:
    """Return why the backend must not compute this call unless forced, or None.

    With ``ask``, a child process checks an unknown backend now.
    """
    if key in settled or backend == "reference" or (how := mode()) == "off":
        return None
    device, size = key[2], size_class(a)
    result = results(device).get((key[0], backend, str(key[3])[6:]))
    guarded = needs_result(backend, device)
    if (not guarded or (result is not None and result.complete)) and not (result and result.wrong):
        settled.add(key)
        return None
    reason = UNKNOWN if result is None else result.reason(size)
    if reason != UNKNOWN:
        return reason
    if not guarded:
        return None
    if how == "strict":
        return (
            f"{PREFIX}no result shows that it is right here, and PYTRANSFORMER_VERIFY is strict;"
            " run pytransformer verify"
        )
    return _check_first(op, backend, a, size) if ask else None


def is_known(op: str, backend: str, device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Return whether the backend is known to be correct, or needs no result."""
    if not needs_result(backend, device) or mode() == "off":
        return True
    result = results(device).get((op, backend, str(dtype)[6:]))
    return result is not None and result.reason(size) is None


def _check_first(op: Op, backend: str, a: Any, size: int) -> str | None:
    """Check small problems in a child process, once per node, and store the outcome.

    Local ranks other than 0 of a distributed job wait for rank 0's result.
    """
    device, dtype = a[0].device, str(a[0].dtype)[6:]
    name = (op.name, backend, dtype)

    def known() -> str | None:
        return _devices[device].get(name, Result()).reason(size)

    with _lock:
        start, left = time.monotonic(), CHECK_SECONDS - _seconds[0]
        if (reason := known()) != UNKNOWN:
            return reason
        if left > 0 and os.environ.get("LOCAL_RANK", "0") != "0":
            while known() == UNKNOWN and time.monotonic() < start + left:
                time.sleep(POLL_SECONDS)
                _reread(device)
        elif left > 0:
            with verification_file.locked("check", left):
                _reread(device)
                left -= time.monotonic() - start
                if known() == UNKNOWN and left > 0:
                    _run_check(op, backend, a, size, left)
        _seconds[0] += time.monotonic() - start
        if known() == UNKNOWN:
            why = (
                f"{PREFIX}{UNCHECKED} here within {CHECK_SECONDS:g} s; pytransformer verify"
                " checks it"
            )
            _devices[device].setdefault(name, Result()).wrong[size] = why
        version[0] += 1
        return known()


def _run_check(op: Op, backend: str, a: Any, size: int, seconds: float) -> None:
    device, dtype = a[0].device, str(a[0].dtype)[6:]
    job = {
        "do": "first", "op": op.name, "backend": backend, "dtype": dtype, "device": device.type,
        "index": device.index, "size": size, "last": number(a[0].shape[-1]),
        "seconds": CASES_SECONDS,
    }  # fmt: skip
    if not _seconds[0]:
        print(
            f"pytransformer: checking {op.name} on the backend {backend} in a child process, once"
            f" per machine and at most {CHECK_SECONDS:g} s; `pytransformer verify` checks every"
            " backend, PYTRANSFORMER_VERIFY=off checks none",
            file=sys.stderr,
        )
    until = Deadline(seconds, Stopwatch(exact=True))
    (outcome,) = checking.run_jobs([job], seconds=HANG_SECONDS, until=until)
    names = ("op", "backend", "dtype", "size", "outcome", "detail")
    lines = [*outcome.get("lines", ()), {name: outcome.get(name) for name in names}]
    if outcome["detail"] == checking.TIME_UP:  # stored too, or every process would wait again
        lines[-1]["outcome"] = LATE
    if lines[-1]["outcome"] != UNCHECKED:
        verification_file.add_checks(device, lines)
        _add(_devices[device], lines)


def describe(line: Mapping[str, Any]) -> str:
    """Return a failed check as a reason."""
    case = f"{line['case']}: " if line.get("case") else ""
    return f"{PREFIX}{line['outcome']} here: {case}{line.get('detail') or ''}".rstrip(": ")


def results(device: torch.device) -> Results:
    """Return the results for the device, from the package and then from the user's file."""
    if device not in _devices:
        with _lock:
            if device not in _devices:
                _reread(device)
    return _devices[device]


def _reread(device: torch.device) -> None:
    content = verification_file.load(device) or {"checks": []}
    # Preserve the results of this process: without a cache directory no file has them.
    merged = _devices.get(device) or {
        name: Result(complete=True) for name in verified.names(device)
    }
    _devices[device] = _add(merged, content["checks"], content.get("complete", ()))
    for name, order in content.get("order", {}).items():
        measured_order[name, device.type] = tuple(order)
    version[0] += 1
    _watch()


def _add(
    merged: Results, lines: Iterable[Mapping[str, Any]], complete: Iterable[Any] = ()
) -> Results:
    for line in lines:
        result = merged.setdefault((line["op"], line["backend"], line["dtype"]), Result())
        if line["outcome"] == RIGHT:
            result.right.add(line["size"])
        elif line["outcome"] not in (DECLINED, UNCHECKED):
            result.wrong.setdefault(line["size"], describe(line))
    for op, backend, dtype in complete:
        merged.setdefault((op, backend, dtype), Result()).complete = True
    return merged


def _watch() -> None:
    """Disable the fast path if a result excludes the backend cpu or another is preferred.

    On the CPU the fast path supports only that backend.
    """
    excluded = [
        f"{op} {backend}"
        for by_name in _devices.values()
        for (op, backend, _), result in by_name.items()
        if backend == "cpu" and result.wrong
    ]
    first = [
        op
        for (op, kind), order in measured_order.items()
        if kind == "cpu" and order[:1] != ("cpu",)
    ]
    watched[:] = [*excluded, *first]


def prepare_cpu() -> None:
    """Read the CPU's results before anything bypasses the registry."""
    if mode() != "off":
        results(torch.device("cpu"))


def forget() -> None:
    """Discard every result; the next use reads it again."""
    with _lock:
        for memory in (settled, measured_order, _devices, watched):
            memory.clear()
        _seconds[0] = 0.0
        version[0] += 1
        for forget_too in when_forgotten:
            forget_too()
