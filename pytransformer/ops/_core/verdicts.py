# SPDX-License-Identifier: Apache-2.0
"""Whether a backend has earned its place on a device: what `pytransformer verify`, or a check at the first call, found there.

On GPUs, and for the tiers that are made for them, a backend is used unasked only where a verdict says that it is right. On the CPU it is
used without one, but not against one. A forced backend is not asked about. What is found costs a warm call one look into a set.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import checking, verdict_file

if TYPE_CHECKING:
    from .registry import Op

GUARDED = {"triton", "cuda"}  # tiers that need a verdict on every device; on a cuda device all do
MODES = ("off", "first", "strict")
VERDICT = "verify: "  # how the reason starts when a verdict keeps a backend out
RIGHT, DECLINED, UNCHECKED = "right", "declined", "not checked"
FIRST_SECONDS = 120.0  # for the checks at the first call of a kind
LEAST_SIZE, MOST_SIZE = 64, 8192
FEW_ROWS = 16

Key = tuple[str, str, torch.device, torch.dtype]  # op, backend, device, dtype of the first tensor
settled: set[Key] = set()  # right whatever the call
order_of: dict[tuple[str, str], tuple[str, ...]] = {}  # (op, type of device): a measured order of the backends
watched: list[str] = []  # what keeps the C++ lane away: backends that it would use and a verdict does not
when_forgotten: list[Callable[[], None]] = []
_known: dict[tuple[Any, ...], str | None] = {}  # of calls on keys that are not settled
_devices: dict[torch.device, Found] = {}
_lock = threading.RLock()


@dataclass(frozen=True)
class Features:
    """What of a call decides which kernels run: arguments, choices and signs that are not neutral, and the last dimension as a power
    of two."""

    names: frozenset[str]
    size: int


@dataclass
class _Checked:
    """Of one op, backend and dtype."""

    right: list[Features] = field(default_factory=list)
    wrong: list[tuple[Features, str]] = field(default_factory=list)
    complete: bool = False  # all cases were checked

    def reason(self, call: Features) -> str | None:
        """Why the verdict is against the call: a wrong problem has nothing that the call has not, or the call is a part of a wrong one and
        of no right one. Sizes stand for one another, unless the same problem was found right in the call's."""
        for wrong, why in self.wrong:
            part = call.names <= wrong.names and not any(call.names <= r.names for r in self.right)
            if not (part or wrong.names <= call.names):
                continue
            if wrong.size == call.size or not any(wrong.names <= r.names and r.size == call.size for r in self.right):
                return why
        return None

    def covers(self, call: Features) -> bool:
        return self.complete or any(call.names <= r.names and call.size == r.size for r in self.right)


Found = dict[tuple[str, str, str], _Checked]  # by op, backend, dtype


def mode() -> str:
    """PYTRANSFORMER_VERIFY: "first" if it is not set, or not one of MODES."""
    found = os.environ.get("PYTRANSFORMER_VERIFY", "first")
    return found if found in MODES else "first"


def features(a: Any) -> Features:
    """Of an op's arguments."""
    names = set()
    for name, value in zip(a._fields, a):
        if isinstance(value, torch.Tensor):
            sort = "bool" if value.dtype == torch.bool else "float" if value.is_floating_point() else "int"
        elif isinstance(value, str):
            sort = "" if value == "none" else value
        elif isinstance(value, (bool, int, float, torch.SymInt)):
            sort = "yes" if _number(value) > 0 and name != "deterministic" else ""
        else:
            sort = ""
        if sort:
            names.add(f"{name}={sort}")
    names |= getattr(a, "signs", frozenset())
    first = a[0]
    key = getattr(a, "key", None)
    if key is not None and _number(first.shape[1]) != _number(key.shape[1]):
        names.add("grouped")
    if first.dim() > 2 and _number(first.shape[-2]) <= FEW_ROWS:
        names.add("few rows")
    last = _number(first.shape[-1])
    size = min(max(LEAST_SIZE, 1 << (max(last, 1) - 1).bit_length()), MOST_SIZE)
    return Features(frozenset(names), size)


def _number(n: Any) -> Any:
    """While torch.compile traces, of a symbolic size what it stands for now: a look at it must not become a guard."""
    return n.node.hint if isinstance(n, torch.SymInt) else n


def why_not(op: Op, backend: str, a: Any, key: Key, *, ask: bool = True) -> str | None:
    """Why the verdict, or the want of one, keeps the backend from computing this call unasked, or None. With ``ask`` an unknown kind of
    call is checked now, in a process of its own."""
    if key in settled or backend == "reference" or (how := mode()) == "off":
        return None
    device = key[2]
    checked = _found(device).get((key[0], backend, str(key[3])[6:]))
    guarded = backend in GUARDED or device.type == "cuda"
    complete = checked is not None and checked.complete
    if (complete or not guarded) and (checked is None or not checked.wrong):
        settled.add(key)
        return None
    call = features(a)
    memory = (*key, call.names, call.size, how)
    if memory not in _known:
        with _lock:
            if memory not in _known:
                reason, final = _judged(op, backend, a, call, checked or _Checked(), guarded, how if ask else "later")
                if not final:
                    return reason
                _known[memory] = reason
    return _known[memory]


def _judged(
    op: Op, backend: str, a: Any, call: Features, checked: _Checked, guarded: bool, how: str
) -> tuple[str | None, bool]:
    """(why not, whether that is for good)."""
    reason = checked.reason(call)
    if reason is not None or not guarded or checked.covers(call):
        return reason, True
    if how == "strict":
        return (
            f"{VERDICT}no verdict says that it is right here, and PYTRANSFORMER_VERIFY is strict: run pytransformer verify",
            True,
        )
    if how == "later":
        return None, False
    return _check_first(op, backend, a, call), True


def _check_first(op: Op, backend: str, a: Any, call: Features) -> str | None:
    """Check small problems of the call's kind, tell so, and keep what was found."""
    device, dtype = a[0].device, str(a[0].dtype)[6:]
    job = {
        "do": "kind", "op": op.name, "backend": backend, "dtype": dtype, "device": device.type, "index": device.index,
        "features": sorted(call.names), "size": call.size, "last": _number(a[0].shape[-1]),
    }  # fmt: skip
    where = verdict_file.key(device)["device"]
    print(
        f"pytransformer: checks {op.name} on the backend {backend} ({dtype}, {where}) in a process of its own, once. "
        "`pytransformer verify` checks everything at once; PYTRANSFORMER_VERIFY=off checks nothing.",
        file=sys.stderr,
    )
    (result,) = checking.run_jobs([job], seconds=FIRST_SECONDS)
    own = {k: job[k] for k in ("op", "backend", "dtype", "features", "size")} | {
        k: result.get(k) for k in ("outcome", "detail")
    }
    lines = [*result.get("lines", []), own]
    if own["outcome"] != UNCHECKED:
        verdict_file.add_checks(device, lines)
    _add(_devices[device], lines)
    return None if own["outcome"] == RIGHT else told(own)


def told(line: Mapping[str, Any]) -> str:
    """A check that was not passed, as a reason."""
    case = f"{line['case']}: " if line.get("case") else ""
    return f"{VERDICT}{line['outcome']} here: {case}{line.get('detail') or ''}".rstrip(": ")


def _found(device: torch.device) -> Found:
    """The verdict of the device, read once."""
    found = _devices.get(device)
    if found is None:
        with _lock:
            if device not in _devices:
                verdict = verdict_file.load(device) or {"checks": []}
                _devices[device] = _add({}, verdict["checks"], verdict.get("complete", ()))
                for name, order in verdict.get("order", {}).items():
                    order_of[name, device.type] = tuple(order)
                _watch()
            found = _devices[device]
    return found


def _add(found: Found, lines: Iterable[Mapping[str, Any]], complete: Iterable[Any] = ()) -> Found:
    for line in lines:
        checked = found.setdefault((line["op"], line["backend"], line["dtype"]), _Checked())
        of = Features(frozenset(line["features"]), line["size"])
        if line["outcome"] == RIGHT:
            checked.right.append(of)
        elif line["outcome"] not in (DECLINED, UNCHECKED):
            checked.wrong.append((of, told(line)))
    for op, backend, dtype in complete:
        found.setdefault((op, backend, dtype), _Checked()).complete = True
    return found


def _watch() -> None:
    """The lane knows the backend cpu alone: it stays away where a verdict is against that, or puts another first."""
    against = [
        f"{op} {backend}"
        for found in _devices.values()
        for (op, backend, _), c in found.items()
        if backend == "cpu" and c.wrong
    ]
    first = [op for (op, kind), order in order_of.items() if kind == "cpu" and order[:1] != ("cpu",)]
    watched[:] = [*against, *first]


def prepare_cpu() -> None:
    """Read the CPU's verdict before anything computes past the registry."""
    if mode() != "off":
        _found(torch.device("cpu"))


def ordered(op: Op, device: str) -> Iterable[str]:
    """The op's backends in the order in which they are tried on this type of device."""
    order = order_of.get((op.name, device))
    if order is None:
        return op.backends
    return [n for n in order if n in op.backends] + [n for n in op.backends if n not in order]


def forget() -> None:
    """Read every verdict anew when it is next needed."""
    with _lock:
        for memory in (settled, order_of, _known, _devices, watched):
            memory.clear()
        for forget_too in when_forgotten:
            forget_too()
