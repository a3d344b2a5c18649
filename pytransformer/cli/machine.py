# SPDX-License-Identifier: Apache-2.0
"""Facts about this machine and this installation that doctor prints and benchmarks record."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from typing import Any

from pytransformer.ops._core.verification_file import cpu_name as cpu_name

SOFTWARE_TILES = "tiles in software (a test build, slow: PYTRANSFORMER_SOFTWARE_TILES=1)"


def cpu_features() -> dict[str, bool]:
    """Features that matter to the kernels -> whether this CPU has them; as the system names them without _C."""
    module, _ = introspection()
    if module is not None:
        return dict(module.cpu_features())
    try:
        with open("/proc/cpuinfo") as info:
            flags = next((line.split() for line in info if line.startswith("flags")), [])
    except OSError:  # not Linux
        return {}
    return {name: name in flags for name in ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_bf16")}


def usable_cores() -> int:
    """Cores this process may run on; a container may allow fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version_of(distribution: str) -> str | None:
    """The installed version, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def triton_version() -> str | None:
    return version_of("triton")


def introspection() -> tuple[Any, str | None]:
    """(pytransformer._C, None), or (None, why it is not there)."""
    if importlib.util.find_spec("pytransformer._C") is None:
        return None, "pytransformer._C was not built"
    try:
        return importlib.import_module("pytransformer._C"), None
    except ImportError as error:
        return None, f"pytransformer._C does not load: {error}"


def active_isa() -> str | None:
    """The instruction set whose CPU kernels are in use, and whether its tiles are software; None without native kernels."""
    module, _ = introspection()
    if module is None:
        return None
    try:
        isa: str = module.default_isa()
        software = isa.startswith("amx") and module.build_info()["cpu"].get("tiles_in_software")
        return f"{isa}, {SOFTWARE_TILES}" if software else isa
    except RuntimeError:  # PYTRANSFORMER_CPU_ISA names one that cannot run; doctor says which
        return None
