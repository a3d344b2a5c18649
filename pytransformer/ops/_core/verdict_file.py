# SPDX-License-Identifier: Apache-2.0
"""Where verdicts are kept: a JSON file for each machine and build, in the user's cache directory, or shipped with the package.

The order: the user's own, which holds for all parts of key(), then a shipped one that was measured with this driver, then one of another
driver. A shipped verdict holds for the parts ALIKE: compiled files differ from machine to machine though their sources do not.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..._version import __version__
from . import native

SCHEMA = 1
# Verdicts that were measured by us: in an installed package, where setup.py puts them, and in a checkout.
SHIPPED = ("verdicts/*.json", "../bench/results/*/verdict*.json")
KERNELS = __package__.partition(".")[0] + ".kernels"
CODE = ("ops/_backends", "ops/_problem")  # beside the kernels, whose change makes an old verdict worthless
ALIKE = ("device", "torch", "triton", "sources")  # what a shipped verdict must have of this machine's key


def cache_folder() -> Path:
    """PYTRANSFORMER_CACHE, or pytransformer in the user's cache directory."""
    if own := os.environ.get("PYTRANSFORMER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytransformer"


def key(device: torch.device) -> dict[str, str]:
    """What a verdict holds for: the device, its driver, the libraries that compile, and the build of ours."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        name = "{} (sm_{}{})".format(torch.cuda.get_device_name(index), *torch.cuda.get_device_capability(index))
        driver = str(getattr(torch._C, "_cuda_getDriverVersion", int)())  # not in builds for the CPU
    else:
        name, driver = cpu_name(), os.environ.get("PYTRANSFORMER_CPU_ISA", "")
    sources, binaries = _build()
    return {
        "device": name, "driver": driver, "torch": str(torch.__version__), "triton": _triton(), "sources": sources,
        "binaries": binaries, "version": __version__,
    }  # fmt: skip


@functools.cache
def cpu_name() -> str:
    """The processor's name, as the system gives it."""
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                name, _, value = line.partition(":")
                if name.strip() == "model name":
                    return value.strip()
    except OSError:
        pass  # not Linux: the next line asks Python
    return platform.processor() or platform.machine()


@functools.cache
def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _build() -> tuple[str, str]:
    """Digests of the sources of kernels and backends, the same in a checkout and installed, and of what was compiled (by name, size and the
    build's own record)."""
    sources, binaries = hashlib.sha256(), hashlib.sha256()
    for folder in (*kernel_folders(), *(native.PACKAGE / name for name in CODE)):
        for path in sorted(path for end in ("*.py", "*.json") for path in folder.rglob(end)):
            sources.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    sources.update(str((native.build_info() or {}).get("sources")).encode())  # of what is compiled
    for path in sorted(native.PACKAGE.glob("*.so")):
        binaries.update(f"{path.name} {path.stat().st_size} ".encode())
    info = native.PACKAGE / "_build_info.json"
    binaries.update(info.read_bytes() if info.is_file() else b"")
    return sources.hexdigest()[:16], binaries.hexdigest()[:16]


def kernel_folders() -> list[Path]:
    """Where Triton's kernels and their tables lie: in a checkout beside the package, not in it."""
    found = importlib.util.find_spec(KERNELS)
    return [Path(place) for place in (found and found.submodule_search_locations) or ()]


def path_of(found: dict[str, str]) -> Path:
    """The file of a key."""
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"verdict-{digest}.json"


def shipped() -> list[Path]:
    """The verdicts that came with the package."""
    return [path for pattern in SHIPPED for path in sorted(native.PACKAGE.glob(pattern))]


def own(device: torch.device) -> dict[str, Any] | None:
    """The user's own verdict for this device, driver, libraries and build; a file that cannot be read counts as none."""
    folder = cache_folder()
    if not folder.is_dir() or next(folder.glob("verdict-*.json"), None) is None:
        return None  # without asking for names and digests
    here = key(device)
    found = _read(path_of(here))
    return found if found is not None and found["key"] == here else None


def load(device: torch.device) -> dict[str, Any] | None:
    """The verdict for this device: the user's own, else a shipped one, else None."""
    if (found := own(device)) is not None:
        return found
    read = [found for path in shipped() if (found := _read(path)) is not None]
    here = key(device) if read else {}
    fits = [found for found in read if all(found["key"].get(part) == here[part] for part in ALIKE)]
    return min(fits, key=lambda found: found["key"].get("driver") != here["driver"], default=None)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(found, dict) and found.get("schema") == SCHEMA and isinstance(found.get("key"), dict)
    return found if known and isinstance(found.get("checks"), list) else None


def save(device: torch.device, verdict: dict[str, Any]) -> Path | None:
    """Write it in one step, so that no reader sees half of it; None where the folder cannot be written."""
    here = key(device)
    path = path_of(here)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(
                {"schema": SCHEMA, "key": here, **{k: v for k, v in verdict.items() if k not in ("schema", "key")}},
                file,
                indent=1,
            )
        os.replace(file.name, path)
    except OSError:
        return None
    return path


def add_checks(device: torch.device, lines: list[dict[str, Any]]) -> None:
    """Put checks that a call asked for beside those that are there, a shipped verdict's too, which the user's own then stands before; a
    later one of the same problem takes the place of an earlier."""
    verdict = load(device) or {"checks": []}
    name = ("op", "backend", "dtype", "features", "size")
    kept = {json.dumps([line.get(n) for n in name]): line for line in [*verdict["checks"], *lines]}
    save(device, {**verdict, "checks": list(kept.values())})
