# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine and installation, for doctor and benchmark results."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from typing import Any

from pytransformer.ops._core.verification import cpu_name as cpu_name

SOFTWARE_TILES = "tiles in software (a test build, slow: PYTRANSFORMER_SOFTWARE_TILES=1)"


def cpu_features() -> dict[str, bool]:
    """Return CPU feature -> availability; without _C the names are the system's."""
    module, _ = introspection()
    if module is not None:
        return dict(module.cpu_features())
    try:
        with open("/proc/cpuinfo") as info:
            flags = next((line.split() for line in info if line.startswith("flags")), [])
    except OSError:  # not Linux
        return {}
    return {
        name: name in flags
        for name in ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_bf16")
    }


def usable_cores() -> int:
    """Return the number of cores this process may use; a container may allow fewer than all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version_of(distribution: str) -> str | None:
    """Return the installed version without importing the package, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_version() -> str | None:
    return version_of("triton")


def introspection() -> tuple[Any, str | None]:
    """Return (pytransformer._C, None), or (None, the reason it is missing)."""
    if importlib.util.find_spec("pytransformer._C") is None:
        return None, "pytransformer._C was not built"
    try:
        return importlib.import_module("pytransformer._C"), None
    except ImportError as error:
        return None, f"pytransformer._C does not load: {error}"


def active_isa() -> str | None:
    """Return the CPU kernels' instruction set, marking emulated tiles; None without kernels."""
    module, _ = introspection()
    if module is None:
        return None
    try:
        isa: str = module.default_isa()
        software = isa.startswith("amx") and module.build_info()["cpu"].get("tiles_in_software")
        return f"{isa}, {SOFTWARE_TILES}" if software else isa
    except RuntimeError:  # PYTRANSFORMER_CPU_ISA names a set that cannot run; doctor reports it
        return None
