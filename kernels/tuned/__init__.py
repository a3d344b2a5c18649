# SPDX-License-Identifier: Apache-2.0
"""Measured configurations, one file per GPU and op: kernels/tuned/<gpu>/<op>.json, written by `make
tune`.

    {"gpu": "NVIDIA H200", "triton": "3.6.0", …,
     "kernels": {"forward, 16 bit, head size 128": {"BM": 128, …, "time_us": 81.2}}}

Without a file or an entry, the op's configs.py decides. Nothing is measured at run time.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .._lang import INTERPRETED

FOLDER = Path(__file__).parent
MEASURED = ("time_us", "heuristic_us")  # fields of an entry besides the configuration
_tried: dict[str, Mapping[str, Mapping[str, Any]]] = {}


def table(op: str, device: torch.device) -> Mapping[str, Mapping[str, Any]]:
    """Return an op's measured configurations on this device, by kernel and problem class; may be
    empty.
    """
    if op in _tried:
        return _tried[op]
    if INTERPRETED or device.type != "cuda" or not torch.cuda.is_available():
        return {}
    return read(op, torch.cuda.get_device_name(device))


@contextlib.contextmanager
def trying(op: str, entries: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Use these as an op's measured configurations on every device within the block."""
    _tried[op] = entries
    try:
        yield
    finally:
        del _tried[op]


def are_tried() -> bool:
    """Return True within :func:`trying`."""
    return bool(_tried)


@functools.cache
def read(op: str, gpu: str, folder: Path = FOLDER) -> Mapping[str, Mapping[str, Any]]:
    """Return the measured configurations for a GPU by its name."""
    path = path_of(op, gpu, folder)
    if not path.is_file():
        return {}
    kernels = json.loads(path.read_text())["kernels"]
    return {
        key: {n: v for n, v in entry.items() if n not in MEASURED} for key, entry in kernels.items()
    }


def path_of(op: str, gpu: str, folder: Path = FOLDER) -> Path:
    """Return the path of a table: "NVIDIA H200" is the folder nvidia-h200."""
    return folder / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") / f"{op}.json"
