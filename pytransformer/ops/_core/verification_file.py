# SPDX-License-Identifier: Apache-2.0
"""Files of verification results: one JSON file per machine and build, in the user's cache.

Each file is validated completely before use; a damaged file is ignored, with one warning. Without a
home directory there is no cache, and results last as long as the process.
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
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..._file_lock import try_lock
from ..._version import __version__
from . import native

SCHEMA = 2
KERNELS = __package__.partition(".")[0] + ".kernels"
CODE = ("ops/_backends", "ops/_problem")  # besides the kernels: a change here invalidates a result
MAX_BYTES, MAX_LINES, MAX_TEXT = 8 << 20, 20_000, 1000
LOCK_SECONDS = 10.0  # a writer holds the lock for milliseconds
TEXTS = ("op", "backend", "dtype", "outcome")
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


def key(device: torch.device) -> dict[str, str]:
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


def load(device: torch.device) -> dict[str, Any] | None:
    """Return the contents for this device, driver, libraries and build, or None."""
    folder = cache_folder()
    try:
        if folder is None or next(folder.glob("verification-*.json"), None) is None:
            return None  # without computing names and digests
    except OSError:
        return None
    here = key(device)
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
            check(content)
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


def check(content: dict[str, Any]) -> None:
    """Check types and sizes of everything that is read later.

    Raises:
        ValueError: an entry is missing, has another type, or is too large.
    """

    def is_text(value: Any) -> bool:
        return isinstance(value, str) and len(value) <= MAX_TEXT

    def expect(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(what)

    parts, lines = content.get("key"), content.get("checks")
    good = isinstance(parts, dict) and all(is_text(x) for pair in parts.items() for x in pair)
    expect(good, "key must be an object of texts")
    expect(isinstance(lines, list) and len(lines) <= MAX_LINES, "checks must be a list")
    for line in lines or ():
        expect(isinstance(line, dict), "a check must be an object")
        expect(
            all(is_text(line.get(name)) for name in TEXTS), f"a check must have {TEXTS} as texts"
        )
        expect(type(line.get("size")) is int, "the size of a check must be an integer")
        for name in ("case", "detail"):
            expect(
                line.get(name) is None or is_text(line[name]), f"{name} of a check must be a text"
            )
        used = line.get("bound_used")
        finite = isinstance(used, (int, float)) and math.isfinite(used)
        expect(used is None or finite, "bound_used of a check must be a number")
        last = line.get("last")
        expect(
            last is None or is_text(last) or type(last) is int, "last must be an integer or a text"
        )
    complete, order = content.get("complete", []), content.get("order", {})
    good = isinstance(complete, list) and len(complete) <= MAX_LINES
    good = good and all(
        isinstance(c, list) and len(c) == 3 and all(map(is_text, c)) for c in complete
    )
    expect(good, "complete must be a list of (op, backend, dtype)")
    good = isinstance(order, dict) and all(
        is_text(op) and isinstance(names, list) and len(names) <= 16 and all(map(is_text, names))
        for op, names in order.items()
    )
    expect(good, "order must be an object of lists of backends")


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


def update(
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
        return _save(device, change(load(device)))


def _save(device: torch.device, content: dict[str, Any]) -> Path | None:
    here = key(device)
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

    update(device, added)
