# SPDX-License-Identifier: Apache-2.0
"""The way down: a backend whose kernel was refused before it ran is remembered, and the next one computes.

Here stands which errors say so (no compiler, a compilation that fails, too few resources, a driver that is too old, a launch that is
refused); all others are raised as they are.
Out of memory is never among them: it says something of the caller's program, and the next backend would need more. Nor is a fault of a
kernel that ran (an illegal address, a device-side assert): the context is lost, and its results with it. Nor are ValueError and
TypeError of our own code, which tell of wrong input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from . import native, verification
from .fallbacks import BackendError, NotLaunched, failures, remember_failure

if TYPE_CHECKING:
    from .backend import Backend
    from .registry import Op

# What the CUDA runtime and driver say of a launch that they refuse: the texts of cudaGetErrorString and cuGetErrorString, whole,
# since "operation not permitted when stream is capturing", say, is another matter.
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
# Triton's steps before a launch. Its launcher is in triton.backends too, and names its errors itself.
TRITON_STEPS = ("triton.compiler", "triton.backends", "triton.runtime.build", "triton.runtime.driver")
SHORT = 300
DID_NOT_RUN = "did not run: "  # how the reason starts when a backend was tried and failed
BROKEN = (DID_NOT_RUN, native.LIBRARY, verification.PREFIX)


def is_broken(why: str) -> bool:
    """Whether a backend is left out because something is wrong with it here, and not because the problem is none of its own: a person
    is told of that, whatever computes instead."""
    return any(sign in why for sign in BROKEN)


def step_down(op: str, backend: str, a: Any, error: Exception, *, forced: bool) -> None:
    """Remember that the backend did not run this kind of problem, so that the next choice is another.

    Raises:
        Exception: the error itself, unless it says that no kernel ran.
        BackendError: the backend was forced.
    """
    why = None if backend == "reference" else refusal(backend, error)
    if why is None:
        raise error
    if forced:
        raise BackendError(f"{op}: backend {backend!r} was forced but {DID_NOT_RUN}{why}") from error
    remember_failure(kind(op, backend, a), DID_NOT_RUN + why)


def failure(op: str, backend: str, a: Any) -> str | None:
    """Why the backend did not run a problem of this kind, or None if it did or was never tried."""
    return failures.get(kind(op, backend, a)) if failures else None


def unasked_reason(op: Op, backend: Backend, a: Any, *, ask: bool = True) -> str | None:
    """Return why the backend does not compute the call unless forced, or None: it cannot, it failed
    before, or no verification result allows it. Without ``ask`` nothing is checked."""
    reason = backend.why_not(a)
    if reason is None and failures:
        reason = failure(op.name, backend.name, a)
    if reason is None and (key := (op.name, backend.name, a[0].device, a[0].dtype)) not in verification.settled:
        reason = verification.why_not(op, backend.name, a, key, ask=ask)
    return reason


def kind(op: str, backend: str, a: Any) -> tuple[Any, ...]:
    """What of a problem decides whether kernels compile and launch: which arguments there are, their dtypes, choices and signs, and the
    last dimension of the first. No lengths, of which a training run has many."""
    return (op, backend, a[0].device, a[0].shape[-1], *map(_sort, a))


def _sort(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (value > 0) - (value < 0)
    return value if isinstance(value, (bool, str)) else None


def refusal(backend: str, error: Exception) -> str | None:
    """What the error says, if it means that the backend's kernel never ran; else None."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)):
        return None  # the last is PyTorch's word for what a device tells after a kernel ran
    refused = _REFUSES.get(backend)
    if isinstance(error, (NotLaunched, NotImplementedError)) or (refused is not None and refused(error)):
        return f"{type(error).__name__}: {_shortened(str(error))}"
    return None


def _shortened(text: str) -> str:
    """On one line; of a long text, such as a compiler's, beginning and end."""
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[: SHORT // 3]} … {line[-2 * SHORT // 3 :]}"


def _triton(error: Exception) -> bool:
    """Errors of Triton's own types; launches that the driver refuses; anything that its compiler, its build of the launcher (no
    C compiler, no ptxas) or its search for a driver raises."""
    from triton.errors import TritonError
    from triton.runtime.errors import InterpreterError

    if isinstance(error, TritonError):
        return not isinstance(error, InterpreterError)  # raised by a kernel that ran
    text = str(error)
    if text.startswith(TRITON_LAUNCH):
        return text.removeprefix(TRITON_LAUNCH).strip() in REFUSED
    return any(module.startswith(TRITON_STEPS) for module in _modules(error))


def _cuda(error: Exception) -> bool:
    """Launches that the runtime refuses, and tensor maps that cannot be made."""
    first, *_ = str(error).splitlines() or [""]
    if not isinstance(error, RuntimeError) or first.startswith(TENSOR_MAPS):
        return isinstance(error, RuntimeError)
    return any(first.startswith(start) and first.removeprefix(start).strip() in REFUSED for start in CUDA_LAUNCH)


def _modules(error: Exception) -> Iterator[str]:
    """The modules that the error came through."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame.f_globals.get("__name__", "")
        step = step.tb_next


_REFUSES: dict[str, Callable[[Exception], bool]] = {"triton": _triton, "cuda": _cuda}
