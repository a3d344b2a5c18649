# SPDX-License-Identifier: Apache-2.0
"""Verification results: which backends are known to be correct on a device, and the check.

On a GPU, and for the backends made for GPUs, an unforced call uses a backend only if a result shows
that the backend is correct there. A result comes from the package (verified.json, from our GPU
runs), from the user's file, which `pytransformer verify` writes, or from a short check at first
use. The CPU's backends need no result, but a failed check excludes them. A forced backend needs
none. A result applies to (op, backend, dtype, size class). See docs/design/verification.md.

verified.json lists, by compute capability, backend and op family, the tested commit and a digest of
its kernel sources. An entry is valid if the kernels here have the same digest; the Triton version
must match too. bench/tools/verified.py writes the file.

The user's cache has one file per machine and build. A file is validated completely before use; a
damaged file is ignored, with one warning. Without a home directory there is no cache, and results
last as long as the process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import stat
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..._file_lock import try_lock
from ..._version import __version__
from . import checking, native
from .checking import Deadline
from .registry import OPS

if TYPE_CHECKING:
    from .op import Op

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
            with locked("check", left):
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
    until = Deadline(seconds)
    (outcome,) = checking.run_jobs([job], seconds=HANG_SECONDS, until=until)
    names = ("op", "backend", "dtype", "size", "outcome", "detail")
    lines = [*outcome.get("lines", ()), {name: outcome.get(name) for name in names}]
    if outcome["detail"] == checking.TIME_UP:  # stored too, or every process would wait again
        lines[-1]["outcome"] = LATE
    if lines[-1]["outcome"] != UNCHECKED:
        add_checks(device, lines)
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
    content = load_file(device) or {"checks": []}
    # Preserve the results of this process: without a cache directory no file has them.
    merged = _devices.get(device) or {name: Result(complete=True) for name in shipped_names(device)}
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


# ---- results that come with the package

SHIPPED = Path(__file__).with_name("verified.json")


@functools.cache
def shipped() -> dict[str, Any]:
    return dict(json.loads(SHIPPED.read_text(encoding="utf-8")))


def shipped_names(device: torch.device) -> list[tuple[str, str, str]]:
    """Return (op, backend, dtype) of everything that is known to be correct on the device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return []
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return [
        (op.name, backend, dtype)
        for backend, entry in shipped().get(capability, {}).items()
        if entry.get("triton") in (None, triton_version())
        for op in OPS.values()
        if is_current(backend, op.family, entry["families"].get(op.family))
        for dtype in entry["dtypes"]
    ]


def is_current(backend: str, family: str, result: dict[str, Any] | None) -> bool:
    """Return whether the tested kernels equal the kernels that run here."""
    return result is not None and kernel_sources(backend).get(family) == result["sources"]


@functools.cache
def kernel_sources(backend: str) -> dict[str, str]:
    """Return digests of the kernels' sources by op family.

    They cover the sources of the CUDA build, or the installed Triton kernels.
    """
    if backend == "cuda":
        return dict((native.build_info() or {}).get("cuda_sources", {}))
    return {
        family: digest(folder, [folder / family, *folder.glob("*.py")])
        for folder in kernel_folders()
        for family in dict.fromkeys(op.family for op in OPS.values())
    }


def digest(root: Path, places: list[Path]) -> str:
    """Return a digest of the files, and of all files below the folders."""
    hashed = hashlib.sha256()
    files = [f for place in places for f in ([place] if place.is_file() else place.rglob("*"))]
    for path in sorted(f for f in files if f.is_file() and f.suffix != ".pyc"):
        hashed.update(
            path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return hashed.hexdigest()[:16]


# ---- files of the user's cache

SCHEMA = 2
KERNELS = __package__.partition(".")[0] + ".kernels"
CODE = ("ops/_backends", "ops/_problem")  # besides the kernels: a change here invalidates a result
MAX_BYTES, MAX_LINES, MAX_TEXT = 8 << 20, 20_000, 1000
LOCK_SECONDS = 10.0  # a writer holds the lock for milliseconds
NONE = type(None)
LINE: dict[str, tuple[type, ...]] = {  # the types of a check's fields
    **dict.fromkeys(("op", "backend", "dtype", "outcome"), (str,)), "size": (int,),
    "case": (str, NONE), "detail": (str, NONE), "bound_used": (int, float, NONE),
    "last": (int, str, NONE),
}  # fmt: skip
_warned: set[Path] = set()


def cache_folder() -> Path | None:
    """Return PYTRANSFORMER_CACHE, or pytransformer in the user's cache directory, or None.

    It is None without a home directory.
    """
    if folder := os.environ.get("PYTRANSFORMER_CACHE"):
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytransformer"
    except RuntimeError:  # neither HOME nor a passwd entry
        return None


def file_key(device: torch.device) -> dict[str, str]:
    """Return the dependencies of a result: device, driver, compiling libraries and our build."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        name = "{} (sm_{}{})".format(
            torch.cuda.get_device_name(index), *torch.cuda.get_device_capability(index)
        )
        # CPU builds of torch do not have this function.
        driver = str(getattr(torch._C, "_cuda_getDriverVersion", int)())
    else:
        name, driver = cpu_name(), os.environ.get("PYTRANSFORMER_CPU_ISA", "")
    sources, binaries = _build()
    return {
        "device": name, "driver": driver, "torch": str(torch.__version__),
        "triton": triton_version(),
        "sources": sources, "binaries": binaries, "version": __version__,
    }  # fmt: skip


@functools.cache
def cpu_name() -> str:
    """Return the processor's name, as the system reports it."""
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass  # not Linux: the next line uses Python's answer
    return platform.processor() or platform.machine()


@functools.cache
def triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _build() -> tuple[str, str]:
    """Return digests of the kernel and backend sources, and of the compiled files.

    The second digest covers the names and sizes of compiled files and the build's record.
    """
    sources, binaries = hashlib.sha256(), hashlib.sha256()
    for folder in (*kernel_folders(), *(native.PACKAGE / name for name in CODE)):
        for path in sorted(path for end in ("*.py", "*.json") for path in folder.rglob(end)):
            sources.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    sources.update(str((native.build_info() or {}).get("sources")).encode())  # C++ and CUDA
    for path in sorted(native.PACKAGE.glob("*.so")):
        binaries.update(f"{path.name} {path.stat().st_size} ".encode())
    info = native.PACKAGE / "_build_info.json"
    binaries.update(info.read_bytes() if info.is_file() else b"")
    return sources.hexdigest()[:16], binaries.hexdigest()[:16]


def kernel_folders() -> list[Path]:
    """Return the folders of Triton's kernels and tables, in a checkout beside the package."""
    spec = importlib.util.find_spec(KERNELS)
    return [Path(place) for place in (spec and spec.submodule_search_locations) or ()]


def path_of(entry: dict[str, str]) -> Path | None:
    """Return the file of a key, or None without a cache directory."""
    digest = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_folder()
    return None if folder is None else folder / f"verification-{digest}.json"


def load_file(device: torch.device) -> dict[str, Any] | None:
    """Return the contents for this device, driver, libraries and build, or None."""
    folder = cache_folder()
    try:
        if folder is None or next(folder.glob("verification-*.json"), None) is None:
            return None  # without computing names and digests
    except OSError:
        return None
    here = file_key(device)
    path = path_of(here)
    content = None if path is None else _read(path)
    return content if content is not None and content["key"] == here else None


def _read(path: Path) -> dict[str, Any] | None:
    """Return a file's contents; warn once and return None if they are damaged."""
    try:
        if not path.exists():
            return None
        content = json.loads(_bytes_of(path).decode())
        if content.get("schema") == SCHEMA:
            check_file(content)
            return dict(content)
        reason = f"schema {content.get('schema')!r}, expected {SCHEMA}"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
    if path not in _warned:
        _warned.add(path)
        warnings.warn(
            f"pytransformer: ignoring the verification file {path} ({reason}); remove it, or run "
            "pytransformer verify to replace it",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def _bytes_of(path: Path) -> bytes:
    """Read a regular file of at most MAX_BYTES, never waiting for a pipe's writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > MAX_BYTES:
            raise ValueError(f"{status.st_size} bytes, at most {MAX_BYTES} expected")
        return file.read(MAX_BYTES)


def check_file(content: dict[str, Any]) -> None:
    """Check types and sizes of everything that is read later.

    Raises:
        ValueError: an entry is missing, has another type, or is too large.
    """

    def expect(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(what)

    def texts(values: Any, kind: type[list[Any]] | type[dict[str, Any]] = list) -> bool:
        return isinstance(values, kind) and all(_fits(value, (str,)) for value in values)

    parts: Any = content.get("key")
    lines: Any = content.get("checks")
    good = texts(parts, dict) and texts([*parts.values()])
    expect(good, "key must be an object of texts")
    expect(isinstance(lines, list) and len(lines) <= MAX_LINES, "checks must be a list")
    for line in lines:
        expect(isinstance(line, dict), "a check must be an object")
        for name, kinds in LINE.items():
            names = " or ".join(kind.__name__ for kind in kinds)
            expect(_fits(line.get(name), kinds), f"{name} of a check must be {names}")
    complete: Any = content.get("complete", [])
    order: Any = content.get("order", {})
    good = isinstance(complete, list) and len(complete) <= MAX_LINES
    good = good and all(texts(entry) and len(entry) == 3 for entry in complete)
    expect(good, "complete must be a list of (op, backend, dtype)")
    good = texts(order, dict) and all(texts(v) and len(v) <= 16 for v in order.values())
    expect(good, "order must be an object of lists of backends")


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return True for a value of exactly one of these types, a short text, a finite number."""
    if isinstance(value, str):
        return str in kinds and len(value) <= MAX_TEXT
    return type(value) in kinds and (not isinstance(value, float) or math.isfinite(value))


@contextlib.contextmanager
def locked(name: str, seconds: float) -> Iterator[bool]:
    """Hold a lock file of the cache directory, one process of the node at a time.

    Yields True if locked, and False without a cache directory or after ``seconds``.
    """
    folder = cache_folder()
    try:
        if folder is None:
            raise OSError("no cache directory")
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        yield False
        return
    try:
        yield _acquire(descriptor, time.monotonic() + seconds)
    finally:
        os.close(descriptor)  # releases the lock


def _acquire(descriptor: int, until: float) -> bool:
    while True:
        try:
            if try_lock(descriptor):
                return True
        except OSError:  # a file system without locks
            return False
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)


def update_file(
    device: torch.device, change: Callable[[dict[str, Any] | None], dict[str, Any]]
) -> Path | None:
    """Replace the contents by ``change`` of them, one writer at a time; return the file.

    Returns None if the directory is not writable.
    """
    with locked("write", LOCK_SECONDS) as held:
        if held and (folder := cache_folder()) is not None:
            for left in folder.glob("verification-*.tmp"):  # left by a killed writer
                with contextlib.suppress(OSError):
                    left.unlink()
        return _save(device, change(load_file(device)))


def _save(device: torch.device, content: dict[str, Any]) -> Path | None:
    here = file_key(device)
    path = path_of(here)
    if path is None:
        return None
    whole = {"schema": SCHEMA, "key": here}
    whole |= {name: value for name, value in content.items() if name not in whole}
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(".tmp", "verification-", path.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(whole, file, indent=1)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return None
    return path


def add_checks(device: torch.device, lines: list[dict[str, Any]]) -> None:
    """Add check lines to the file; a later line of the same check replaces an earlier one."""
    names = ("op", "backend", "dtype", "case", "last", "size")

    def added(content: dict[str, Any] | None) -> dict[str, Any]:
        content = content or {"checks": []}
        both = [*content["checks"], *lines]
        by_name = {json.dumps([line.get(name) for name in names]): line for line in both}
        return {**content, "checks": list(by_name.values())}

    update_file(device, added)
