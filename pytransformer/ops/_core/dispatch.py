# SPDX-License-Identifier: Apache-2.0
"""Choice of a backend for a call: the order of trial, failed launches, and records of fallbacks.

preferences.csv contains measured kernel times on GPUs by op, direction, dtype, kind, size (the last
dimension) and length (keys, or rows); bench/tools/preferences.py writes it from committed results.
A call uses the nearest row. Backends without a verification result come last, so that a call does
not wait for a check while a verified backend can compute it. See docs/design/verification.md.

If a kernel was refused before it ran, the next backend computes the call. ``refusal`` decides which
errors mean that no kernel ran (no compiler, a failed compilation, too few resources, an old driver,
a refused launch). All other errors propagate. Out of memory is not among them, because the caller's
program causes it and the next backend would need more. A fault of a kernel that ran (an illegal
address, a device-side assert) is not either, because the context and its results are lost.
ValueError and TypeError of our code report invalid input.
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from . import native, verification
from .registry import BACKENDS, Backend
from .verification import number

if TYPE_CHECKING:
    from .op import Op


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
# Reasons by backend and kind of problem: Empty on a working machine.
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
    ours = str(native.PACKAGE)
    theirs = os.path.dirname(os.path.abspath(torch.__file__))
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((ours, theirs, "<")):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"


# Messages of refused launches, exactly as cudaGetErrorString and cuGetErrorString return them.
# Matches must be complete, because for example "operation not permitted when stream is capturing"
# is a different error.
REFUSED = frozenset((
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "invalid cluster size",
    "too many resources requested for launch",
    "no kernel image is available for execution on the device",
    "device kernel image is invalid",
    "a PTX JIT compilation failed",
    "PTX JIT compiler library not found",
    "the provided PTX was compiled with an unsupported toolchain.",
    "named symbol not found",
    "operation not supported",
    "CUDA driver version is insufficient for CUDA runtime version",
    "API call is not supported in the installed CUDA driver",
    "system has unsupported display driver / cuda driver combination",
    "forward compatibility was attempted on non supported HW",
))  # fmt: skip
TRITON_LAUNCH = "Triton Error [CUDA]: "
CUDA_LAUNCH = ("a kernel could not be launched: ", "CUDA: ")  # csrc/cuda/launch.cuh, device.cu
TENSOR_MAPS = ("no tensor map can be made", "cuTensorMapEncodeTiled failed", "the driver has no ")
# Triton's steps before a launch. Its launcher is in triton.backends too, and prefixes its errors.
TRITON_STEPS = (
    "triton.compiler",
    "triton.backends",
    "triton.runtime.build",
    "triton.runtime.driver",
)
SHORT = 300
DID_NOT_RUN = "did not run: "  # prefix of the reason when a backend was tried and failed
BROKEN = (DID_NOT_RUN, native.LIBRARY, verification.PREFIX)


def is_broken(why: str) -> bool:
    """Return true if a backend is excluded because it is broken on this machine.

    Such a reason is reported even if another fused backend computes the call. An unsupported
    problem does not count as broken.
    """
    return any(sign in why for sign in BROKEN)


def step_down(op: str, backend: str, a: Any, error: Exception, *, forced: bool) -> None:
    """Remember that the backend did not run this kind of problem, so that select skips it.

    Raises:
        Exception: ``error``, unless it means that no kernel ran.
        BackendError: the backend was forced.
    """
    why = None if backend == "reference" else refusal(backend, error)
    if why is None:
        raise error
    if forced:
        raise BackendError(
            f"{op}: backend {backend!r} was forced but {DID_NOT_RUN}{why}"
        ) from error
    remember_failure(kind(op, backend, a), DID_NOT_RUN + why)


def failure(op: str, backend: str, a: Any) -> str | None:
    """Return why the backend failed for this kind of problem, or None."""
    return failures.get(kind(op, backend, a)) if failures else None


def unasked_reason(op: Op, backend: Backend, a: Any, *, ask: bool = True) -> str | None:
    """Return why the backend does not compute the call unless forced, or None.

    It does not support the call, it failed before, or no verification result allows it. Without
    ``ask`` no check runs.
    """
    reason = backend.why_not(a)
    if reason is None and failures:
        reason = failure(op.name, backend.name, a)
    if (
        reason is None
        and (key := (op.name, backend.name, a[0].device, a[0].dtype)) not in verification.settled
    ):
        reason = verification.why_not(op, backend.name, a, key, ask=ask)
    return reason


def kind(op: str, backend: str, a: Any) -> tuple[Any, ...]:
    """Return the part of a problem that decides if kernels compile and launch.

    The key has the arguments that are present, their dtypes, choices and signs, and the last
    dimension of the first. It has no lengths, because a training run has many.
    """
    return (op, backend, a[0].device, a[0].shape[-1], *map(_sort, a))


def _sort(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (value > 0) - (value < 0)
    return value if isinstance(value, (bool, str)) else None


def refusal(backend: str, error: Exception) -> str | None:
    """Return the error's message if the backend's kernel never ran, else None."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)):
        return None  # AcceleratorError reports a failure after a kernel ran
    refused = _REFUSES.get(backend)
    if isinstance(error, (NotLaunched, NotImplementedError)) or (
        refused is not None and refused(error)
    ):
        return f"{type(error).__name__}: {_shortened(str(error))}"
    return None


def _shortened(text: str) -> str:
    """Return the text on one line; a long text, such as a compiler's, is cut in the middle."""
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[: SHORT // 3]} … {line[-2 * SHORT // 3 :]}"


def _triton(error: Exception) -> bool:
    """Return true for errors before a Triton launch.

    These are Triton's exceptions, launches that the driver refuses, and any error from its
    compiler, the build of its launcher (no C compiler, no ptxas) or its search for a driver.
    """
    from triton.errors import TritonError
    from triton.runtime.errors import InterpreterError

    if isinstance(error, TritonError):
        return not isinstance(error, InterpreterError)  # raised by a kernel that ran
    text = str(error)
    if text.startswith(TRITON_LAUNCH):
        return text.removeprefix(TRITON_LAUNCH).strip() in REFUSED
    return any(module.startswith(TRITON_STEPS) for module in _modules(error))


def _cuda(error: Exception) -> bool:
    """Return true for launches that the runtime refuses and for failed tensor maps."""
    first, *_ = str(error).splitlines() or [""]
    if not isinstance(error, RuntimeError) or first.startswith(TENSOR_MAPS):
        return isinstance(error, RuntimeError)
    return any(
        first.startswith(start) and first.removeprefix(start).strip() in REFUSED
        for start in CUDA_LAUNCH
    )


def _modules(error: Exception) -> Iterator[str]:
    """Yield the names of the modules in the error's traceback."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame.f_globals.get("__name__", "")
        step = step.tb_next


_REFUSES: dict[str, Callable[[Exception], bool]] = {"triton": _triton, "cuda": _cuda}


PREFERENCES = Path(__file__).with_name("preferences.csv")
MARGIN = 1.03  # noise: a faster backend must win by more to precede BACKENDS' order
# Kinds with similar kernels; the first of a group replaces an unmeasured kind of it.
GROUPS = (
    ("full", "causal", "window", "padding", "packed"),
    ("mask", "bias", "t5", "alibi", "dropout"),
    ("one query", "pages"),
)
OTHER_KIND, OTHER_GROUP, OTHER_DTYPE, OTHER_WIDTH, PER_DOUBLING = 20.0, 60.0, 1.0, 8.0, 1.0
HIDING_MS = 0.1  # Python calls PyTorch's kernels, and a shorter call does not hide that

# a backend and, if the time belongs to one of its kernels, that kernel
Entry = tuple[str, str | None]


@dataclass(frozen=True)
class Cell:
    """The kind of a call, as far as preferences distinguish calls."""

    op: str
    direction: str  # "fwd" or "bwd"
    dtype: str
    kind: str
    size: int
    length: int  # rounded up to a power of two


@dataclass(frozen=True)
class Row:
    """Measured times of a cell in milliseconds."""

    cell: Cell
    times: dict[Entry, float]

    def order(self) -> list[Entry]:
        """Return the measured entries, fastest first, in BACKENDS' order within MARGIN."""
        rest, ordered = sorted(self.times, key=lambda e: BACKENDS.index(e[0])), []
        while rest:
            limit = min(self.times[e] for e in rest) * MARGIN
            ordered.append(next(e for e in rest if self.times[e] <= limit))
            rest.remove(ordered[-1])
        return ordered


@functools.cache
def preferences() -> dict[str, list[Row]]:
    """Return the rows by compute capability, "sm_90"."""
    rows: dict[str, list[Row]] = {}
    with PREFERENCES.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            cell = Cell(
                line["op"], line["direction"], line["dtype"], line["kind"],
                int(line["size"]), int(line["length"]),
            )  # fmt: skip
            pairs = (item.split("=") for item in line["ms"].split())
            times = {entry(name): float(ms) for name, ms in pairs}
            rows.setdefault(line["arch"], []).append(Row(cell, times))
    return rows


def entry(text: str) -> Entry:
    """Parse "cuda" or "torch:cudnn"."""
    name, _, kernel = text.partition(":")
    return name, kernel or None


def cell_of(op: Op, a: Any, direction: str) -> Cell:
    first = a[0]
    kind = getattr(a, "kind", "")
    last = max(1, number(first.shape[-1]))
    if kind in GROUPS[2]:  # bound by the bytes of all keys
        length = number(a.sequences) * number(a.key_heads) * number(a.num_keys)
    elif kind:
        length = number(a.num_keys)
    else:
        length = number(first.numel()) // last
    # few classes, because the order of each is cached
    length = 1 << (max(1, length) - 1).bit_length()
    return Cell(op.name, direction, str(first.dtype)[6:], kind, last, length)


def distance(cell: Cell, row: Cell) -> float:
    """Return the dissimilarity of two cells of one op and direction."""
    far = PER_DOUBLING * (
        2 * abs(math.log2(cell.size / row.size)) + abs(math.log2(cell.length / row.length))
    )
    if cell.kind != row.kind:
        alike = any(cell.kind in group and row.kind in group for group in GROUPS)
        stands_in = any(row.kind == group[0] for group in GROUPS)
        far += (OTHER_KIND if alike else OTHER_GROUP) - stands_in
    if cell.dtype != row.dtype:
        halves = {cell.dtype, row.dtype} == {"bfloat16", "float16"}
        far += OTHER_DTYPE if halves else OTHER_WIDTH
    return far


def measured(arch: str, cell: Cell, family: str, deterministic: bool) -> list[Entry]:
    """Return the entries of the nearest row, fastest first, or [] if the op was not measured.

    PyTorch's kernels choose their splits by the batch, so a sequence's result may depend on its
    neighbors. They come first only for calls with ``deterministic=False``.
    """
    if not preferences():
        return []
    rows = preferences()[
        min(preferences(), key=lambda known: abs(_number_of(known) - _number_of(arch)))
    ]
    rows = [row for row in rows if row.cell.direction == cell.direction]
    rows = [row for row in rows if row.cell.op == cell.op] or [
        r for r in rows if r.cell.op == family
    ]
    if not rows:
        return []
    row = min(rows, key=lambda row: distance(cell, row.cell))
    scaled = cell.length / row.cell.length
    return [
        e
        for e in row.order()
        if e[0] != "torch" or (not deterministic and row.times[e] * scaled >= HIDING_MS)
    ]


def _number_of(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


@functools.cache
def arch_of(device: torch.device) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def ordered(op: Op, a: Any, direction: str) -> Iterable[Entry]:
    """Return the op's backends in the order in which they are tried for this call."""
    device = a[0].device
    if device.type != "cuda":
        names = cpu_order(op, device.type) if verification.measured_order else op.backends
        return zip(names, itertools.repeat(None))
    cell, deterministic = cell_of(op, a, direction), getattr(a, "deterministic", True)
    size = verification.size_class(a)
    return _gpu_order(
        op.name, op.family, tuple(op.backends), device, a[0].dtype, size, cell, deterministic,
        verification.mode(), verification.version[0],
    )  # fmt: skip


def cpu_order(op: Op, device: str = "cpu") -> list[str]:
    """Return the op's default order, or the order that `pytransformer verify` measured."""
    order = verification.measured_order.get((op.name, device), ())
    return [n for n in order if n in op.backends] + [n for n in op.backends if n not in order]


@functools.lru_cache(1024)
def _gpu_order(
    op: str, family: str, backends: tuple[str, ...], device: torch.device, dtype: torch.dtype,
    size: int,
    cell: Cell, deterministic: bool, _mode: str, _version: int,
) -> list[Entry]:  # fmt: skip
    arch = arch_of(device)
    entries = measured(arch, cell, family, deterministic)
    order = verification.measured_order.get((op, device.type), ())
    if order and arch not in preferences():  # this machine's measurement before a neighbor's
        entries = [entry(name) for name in order]
    entries = [e for e in entries if e[0] in backends]
    known = {name for name, kernel in entries if kernel is None}
    entries += [(name, None) for name in backends if name not in known]
    # sorted() is stable: verified backends first, each part in its order; the reference is last.
    return sorted(
        entries,
        key=lambda e: (
            e[0] == "reference",
            not verification.is_known(op, e[0], device, dtype, size),
        ),
    )
