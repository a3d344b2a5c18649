# SPDX-License-Identifier: Apache-2.0
"""The format of results.json and the machine facts stored with it.

    {"schema_version": 1,
     "environment": {...},    place, time and versions
     "peaks": {...},          measured: "tflops" by dtype, "gbps" and other keys
                              of peaks.py; null if not measured
     "complete": true,        false: stopped early; the rows present are valid
     "rows": [...],           one per op, case, dtype, mode and backend that was
                              checked and timed
     "not_run": [...]}        the rest with reasons: status "skipped",
                              "unsupported", "wrong" or "failed"

ROW and NOT_RUN list the fields of an entry; docs/benchmarks.md explains them.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from pytransformer.cli.benchmark import limits

SCHEMA_VERSION = 1
MODES = ("fwd", "bwd", "fwd+bwd")
# Variables that bind OpenMP's threads.
BINDERS = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

_NUMBER = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str, "int": int, "number": _NUMBER, "list": list, "dict": dict,
}  # fmt: skip
_Field = tuple[type | tuple[type, ...], bool]  # (type, may be null)


def _fields(text: str) -> dict[str, _Field]:
    """Parse "kind: name name, ..." into fields; a kind that ends in "?" may be null."""
    groups = (group.split(": ") for group in " ".join(text.split()).split(", "))
    return {
        name: (_KINDS[kind.rstrip("?")], kind.endswith("?"))
        for kind, names in groups
        for name in names.split()
    }


ROW = _fields("""
    str: op backend provider case dtype mode device note, dict: shape,
    number: median_ms p20_ms p80_ms tflops gbps, int: samples, int?: peak_bytes, dict?: errors,
    number?: error error_bound bound_used error_ratio_naive speedup_naive speedup_torch""")
# Older files lack these fields.
ROW_LATER = _fields("""
    str: cache, list?: time_over_torch, int?: saved_bytes, str?: limit, dict?: limit_shares,
    number?: kernel_ms floor_ms alone_ms burst_ms sustained_ms share""")
NOT_RUN = _fields("str: op backend case dtype mode status reason, number?: error error_bound")
NOT_RUN_LATER = _fields("dict: shape")
ENVIRONMENT = _fields("""
    str: device device_name cpu system python torch pytransformer date command, int: cores threads,
    str?: isa gpu triton commit, number?: load""")
ENVIRONMENT_LATER = _fields("str: pinning")
STATUSES = ("skipped", "unsupported", "wrong", "failed")


def step_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line-up's key: op, case, shape, dtype, mode, device, cache state."""
    shape = " ".join(f"{name}={size}" for name, size in sorted(row["shape"].items()))
    names = ("op", "case", "dtype", "mode", "device")
    op, case, *rest = (row[name] for name in names)
    return (op, case, shape, *rest, row.get("cache", "warm"))


def row_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the key that identifies a row within its document."""
    return (*step_key(row), row["backend"])


def validate(document: Any) -> list[str]:
    """Return the faults of `document` as the content of results.json; empty if valid."""
    if not isinstance(document, dict):
        return [f"the document is a {type(document).__name__}, not an object"]
    problems = []
    for key in ("schema_version", "environment", "complete", "rows", "not_run"):
        if key not in document:
            problems.append(f"{key} is missing")
    if problems:
        return problems
    if document["schema_version"] != SCHEMA_VERSION:
        problems.append(f"schema_version is {document['schema_version']!r}, not {SCHEMA_VERSION}")
    if not isinstance(document["complete"], bool):
        problems.append("complete is not true or false")
    problems += _check("environment", document["environment"], ENVIRONMENT, ENVIRONMENT_LATER)
    problems += _check_peaks(document.get("peaks"))
    for name, fields, later in (("rows", ROW, ROW_LATER), ("not_run", NOT_RUN, NOT_RUN_LATER)):
        if not isinstance(document[name], list):
            problems.append(f"{name} is not a list")
            continue
        for index, entry in enumerate(document[name]):
            problems += _check(f"{name}[{index}]", entry, fields, later)
    return problems or _check_meaning(document)


def _check(
    where: str, entry: Any, fields: Mapping[str, _Field], later: Mapping[str, _Field]
) -> list[str]:
    if not isinstance(entry, dict):
        return [f"{where} is a {type(entry).__name__}, not an object"]
    known = {**fields, **{key: later[key] for key in later if key in entry}}
    problems = [f"{where} has the unknown field {key}" for key in entry if key not in known]
    for key, (kind, nullable) in known.items():
        value = entry.get(key)
        if key not in entry:
            problems.append(f"{where}.{key} is missing")
        elif value is None:
            if not nullable:
                problems.append(f"{where}.{key} is null")
        elif not isinstance(value, kind) or isinstance(value, bool):
            problems.append(f"{where}.{key} is {value!r}, of the wrong type")
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{where}.{key} is {value!r}, which JSON cannot hold")
    return problems


def _check_peaks(peaks: Any) -> list[str]:
    """Check the peaks; older files have none."""
    if peaks is None:
        return []
    if not isinstance(peaks, dict):
        return ["peaks are not an object"]
    rates = [peaks.get("gbps"), *(peaks[key] for key in ("read_gbps", "warm_gbps") if key in peaks)]
    rates += [rate for key in ("tflops", "copy_gbps") for rate in peaks.get(key, {}).values()]
    good = all(isinstance(rate, _NUMBER) and rate > 0 for rate in rates)
    return [] if good else ["peaks are not positive rates"]


def _check_meaning(document: dict[str, Any]) -> list[str]:
    problems, seen = [], set()
    for index, row in enumerate(document["rows"]):
        where = f"rows[{index}]"
        if row_key(row) in seen:
            problems.append(f"{where} repeats {' '.join(row_key(row))}")
        seen.add(row_key(row))
        if row["mode"] not in MODES:
            problems.append(f"{where}.mode is {row['mode']!r}, not one of {', '.join(MODES)}")
        if not 0 < row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]:
            problems.append(f"{where}: 0 < p20_ms <= median_ms <= p80_ms does not hold")
        if "limit" in row:
            limit = limits.of(row, document.get("peaks")) or (None, None)
            if limit != (row["limit"], row["limit_shares"]):
                problems.append(f"{where}.limit {row['limit']} does not follow from its times")
        if row["error"] is not None and not row["error"] <= row["error_bound"]:
            problems.append(
                f"{where}.error {row['error']} is above its bound {row['error_bound']}: it may not"
                " be timed"
            )
    for index, entry in enumerate(document["not_run"]):
        if entry["status"] not in STATUSES:
            problems.append(
                f"not_run[{index}].status is {entry['status']!r}, not one of {', '.join(STATUSES)}"
            )
        if not entry["reason"].strip():
            problems.append(f"not_run[{index}].reason must not be blank")
    return problems


# ---- the machine


def environment(device: str, command: str) -> dict[str, Any]:
    """Return the environment of a measurement; ENVIRONMENT lists the fields."""
    from pytransformer import __version__
    from pytransformer.cli.machine import active_isa, cpu_name, triton_version, usable_cores

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = cpu_name()
    return {
        "device": device,
        "device_name": (gpu or "unknown GPU") if device == "cuda" else cpu,
        "cpu": cpu,
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "pinning": pinning(),
        "isa": active_isa(),
        "gpu": gpu,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": triton_version(),
        "pytransformer": __version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "command": command,
    }


def pinning() -> str:
    """Return the cores that threads may use, and what binds each thread to a core."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    bound = [f"{name}={os.environ[name]}" for name in BINDERS if os.environ.get(name)]
    where = (
        f"cores {cores[0]}-{cores[-1]}"
        if cores and cores[-1] - cores[0] == len(cores) - 1
        else f"cores {cores}"
    )
    return f"{where if cores else 'any core'}, {', '.join(bound) or 'threads not pinned'}"


def commit() -> str | None:
    """Return the checkout's commit, with "+changes" if modified; None outside a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + (
            "+changes" if _git(root, "status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
