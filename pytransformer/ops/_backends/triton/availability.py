# SPDX-License-Identifier: Apache-2.0
"""Availability of Triton kernels, for the ``triton`` backend of every op.

The first query imports Triton and the kernels; importing the package does not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import torch

from ..._core import fast_path, native
from ..._core.registry import WRONG_DEVICE


def why_not(**tensors: torch.Tensor | None) -> str | None:
    """Return why Triton kernels do not support these arguments of an op, or None.

    The first argument must not be None.
    """
    name, first = next(iter(tensors.items()))
    assert first is not None
    if (reason := _unavailable(first.device, name)) is not None:
        return reason
    double = (name for name, t in tensors.items() if t is not None and t.dtype == torch.float64)
    return next(
        (
            f"float32, bfloat16 or float16, got {name} in float64; the backend reference has it"
            for name in double
        ),
        None,
    )


def _unavailable(device: torch.device, name: str) -> str | None:
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not (interpreting and device.type == "cpu"):
        return (
            f"{WRONG_DEVICE}CUDA (or, with TRITON_INTERPRET=1, interpreted on the CPU), and {name}"
            f" is on {device}"
        )
    if device.type == "cuda" and (reason := native.why_not_nvidia()):
        return reason
    if not _installed("triton"):
        return "needs Triton: pip install triton, in the version that this torch was made for"
    if not _installed("pytransformer.kernels"):
        return "needs the kernels installed: pip install -e . in the checkout"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "compute capability 8.0 or higher, got {}.{}".format(
            *torch.cuda.get_device_capability(device)
        )
    from pytransformer.kernels._lang import INTERPRETED

    if interpreting != INTERPRETED:
        return (
            "TRITON_INTERPRET changed after Triton was imported, by torch perhaps; set it before"
            " Python starts"
        )
    return None


@contextlib.contextmanager
def recorded(recorder: Any) -> Iterator[None]:
    """Report the launches inside the block to the recorder.

    The fast path watches the other settings that decide a launch.
    """
    from pytransformer.kernels import _launch

    fast_path.watch(*_launch.watchers)
    with _launch.recorded(recorder):
        yield


@functools.cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
