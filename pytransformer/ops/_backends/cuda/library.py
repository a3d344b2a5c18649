# SPDX-License-Identifier: Apache-2.0
"""The native library of the backend ``cuda``: raw ops ``pytransformer_C::cuda_*``.

It loads on first use, also on a machine without a GPU. ``PYTRANSFORMER_EMULATE=1`` selects the
emulated library instead: the same kernels and bindings compiled for the CPU, with CPU tensors
(csrc/emulator, for tests). A path instead of 1 selects another build of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..._core import native
from ..._core.registry import WRONG_DEVICE

LIBRARY_NAME = "libpytransformer_cuda.so"
# in a checkout; csrc/emulator/build.py builds it
EMULATED = Path("build", "emulator", "libpytransformer_emulated.so")
OLDEST = (8, 0)  # compute capability


def emulating() -> bool:
    return os.environ.get("PYTRANSFORMER_EMULATE", "0") not in ("", "0")


def why_not(op: str, device: torch.device) -> str | None:
    """Return why the raw op cannot run with tensors of this device, or None."""
    if emulating():
        if device.type != "cpu":
            return (
                f"{WRONG_DEVICE}CPU tensors while PYTRANSFORMER_EMULATE is set, and x is on"
                f" {device}"
            )
        return _why_not_emulated(os.environ["PYTRANSFORMER_EMULATE"], op)
    if device.type != "cuda":
        return f"{WRONG_DEVICE}CUDA devices, and x is on {device}"
    index = device.index if device.index is not None else torch.cuda.current_device()
    return native.why_not_nvidia() or why_not_loaded(op) or _why_not_device(index)


@functools.cache
def why_not_loaded(op: str) -> str | None:
    """Return why the CUDA library or its raw op is unavailable, or None; needs no GPU."""
    path = native.PACKAGE / LIBRARY_NAME
    if not path.exists():
        info = native.build_info()
        reason = info["cuda"]["reason"] if info else "this checkout was never built (make build)"
        return f"the CUDA library was not built: {reason}"
    return _load(path, f"cuda_{op}", "make build")


@functools.cache
def _why_not_emulated(value: str, op: str) -> str | None:
    path = native.PACKAGE.parent / EMULATED if value == "1" else Path(value)
    if not path.exists():
        return f"there is no emulated library {path}: python csrc/emulator/build.py makes it"
    return _load(path, f"emulated_{op}", "python csrc/emulator/build.py")


def _load(path: Path, op: str, remedy: str) -> str | None:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        return f"{path.name} does not load: {error}"
    return (
        None
        if hasattr(torch.ops.pytransformer_C, op)
        else f"{path.name} has no op {op}: it is older than this code ({remedy})"
    )


@functools.cache
def _why_not_device(index: int) -> str | None:
    capability = torch.cuda.get_device_capability(index)
    built = (native.build_info() or {}).get("cuda", {}).get("archs", ())
    return why_not_capability(capability, built) or _why_not_driver(index)


def _why_not_driver(index: int) -> str | None:
    """Return why the library's kernels do not load on the device, or None.

    Its CUDA runtime may be newer than the driver.
    """
    ask = getattr(torch.ops.pytransformer_C, "cuda_why_not_device", None)
    if not ask:
        return f"{LIBRARY_NAME} is older than this code (make build)"
    with native.untraced():
        return ask(index) or None


def why_not_capability(capability: tuple[int, int], archs: Sequence[str]) -> str | None:
    """Return why a GPU of this compute capability cannot run a library for ``archs``, or None.

    Code for sm_80 runs on every later 8.x. A name that ends in "a" is valid for one architecture
    only. The oldest architecture also contains PTX, unless its name ends in "a", and the driver
    compiles PTX for newer GPUs.
    """
    here = "{}.{}".format(*capability)
    if capability < OLDEST:
        return f"needs a GPU of compute capability 8.0 or later, and this one has {here}"
    built = [
        (int(m[1]), int(m[2]), bool(m[3]))
        for m in (re.fullmatch(r"sm_(\d+)(\d)([af]?)", a) for a in archs)
        if m
    ]
    for major, minor, exact in built:
        if (major, minor) == capability or (
            not exact and major == capability[0] and minor <= capability[1]
        ):
            return None
    if any(not exact and (major, minor) <= capability for major, minor, exact in built):
        return None  # from PTX
    return (
        f"the CUDA library was built for {', '.join(archs) or 'no architecture'}, and this GPU has"
        f" compute capability {here}"
    )


def runs_sm90a(device: torch.device) -> bool:
    """Return true if sm_90a kernels may run, as ``pt::cuda::runs_sm90a`` of csrc/cuda/device.h."""
    path = os.environ.get("PYTRANSFORMER_CUDA_PATH", "")
    if emulating():
        return path == "sm90"
    built = (native.build_info() or {}).get("cuda", {}).get("archs", ())
    return (
        path != "portable"
        and "sm_90a" in built
        and torch.cuda.get_device_capability(device) == (9, 0)
    )


@contextlib.contextmanager
def recorded(recorder: Any) -> Iterator[None]:
    """Record raw ops as other ops, except that each call receives the current stream."""
    recorder.launches_on((lambda index: 0) if emulating() else torch._C._cuda_getCurrentRawStream)
    yield


def ask(op: str, *arguments: Any) -> Any:
    """Return the cached result of a pure function of the library.

    Plans and constants are defined in C++ only.
    """
    return _ask(emulating(), op, *arguments)


@functools.lru_cache(maxsize=1024)
def _ask(emulated: bool, op: str, *arguments: Any) -> Any:
    return getattr(torch.ops.pytransformer_C, f"{'emulated' if emulated else 'cuda'}_{op}")(
        *arguments
    )


def raw(op: str) -> torch._ops.OpOverload:
    name = f"{'emulated' if emulating() else 'cuda'}_{op}"
    return getattr(torch.ops.pytransformer_C, name).default


def call(op: str, device: torch.device, *arguments: Any) -> Any:
    """Run the raw op on the device's current stream and return its result."""
    if emulating():
        return raw(op)(*arguments, 0, 0)
    index = device.index if device.index is not None else torch.cuda.current_device()
    return raw(op)(*arguments, index, torch._C._cuda_getCurrentRawStream(index))
