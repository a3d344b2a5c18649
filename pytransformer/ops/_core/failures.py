# SPDX-License-Identifier: Apache-2.0
"""Fallback to the next backend after a kernel was refused before it ran.

This module decides which errors mean that no kernel ran (no compiler, a failed compilation, too few
resources, an old driver, a refused launch) and remembers the backend. All other errors propagate.
Out of memory is not among them, because the caller's program causes it and the next backend would
need more. A fault of a kernel that ran (an illegal address, a device-side assert) is not either,
because the context and its results are lost. ValueError and TypeError of our code report invalid
input.
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

# Messages of refused launches, exactly as cudaGetErrorString and cuGetErrorString return them.
# Matches must be complete, because for example "operation not permitted when stream is capturing"
# is a different error.
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
# Triton's steps before a launch. Its launcher is in triton.backends too, and prefixes its errors.
TRITON_STEPS = (
    "triton.compiler",
    "triton.backends",
    "triton.runtime.build",
    "triton.runtime.driver",
)
SHORT = 300
DID_NOT_RUN = "did not run: "  # prefix of the reason when a backend was tried and failed
BROKEN = (DID_NOT_RUN, native.LIBRARY, verification.PREFIX)


def is_broken(why: str) -> bool:
    """Return true if a backend is excluded because it is broken on this machine.

    Such a reason is reported even if another fused backend computes the call. An unsupported
    problem does not count as broken.
    """
    return any(sign in why for sign in BROKEN)


def step_down(op: str, backend: str, a: Any, error: Exception, *, forced: bool) -> None:
    """Remember that the backend did not run this kind of problem, so that select skips it.

    Raises:
        Exception: ``error``, unless it means that no kernel ran.
        BackendError: the backend was forced.
    """
    why = None if backend == "reference" else refusal(backend, error)
    if why is None:
        raise error
    if forced:
        raise BackendError(
            f"{op}: backend {backend!r} was forced but {DID_NOT_RUN}{why}"
        ) from error
    remember_failure(kind(op, backend, a), DID_NOT_RUN + why)


def failure(op: str, backend: str, a: Any) -> str | None:
    """Return why the backend failed for this kind of problem, or None."""
    return failures.get(kind(op, backend, a)) if failures else None


def unasked_reason(op: Op, backend: Backend, a: Any, *, ask: bool = True) -> str | None:
    """Return why the backend does not compute the call unless forced, or None.

    It does not support the call, it failed before, or no verification result allows it. Without
    ``ask`` no check runs.
    """
    reason = backend.why_not(a)
    if reason is None and failures:
        reason = failure(op.name, backend.name, a)
    if (
        reason is None
        and (key := (op.name, backend.name, a[0].device, a[0].dtype)) not in verification.settled
    ):
        reason = verification.why_not(op, backend.name, a, key, ask=ask)
    return reason


def kind(op: str, backend: str, a: Any) -> tuple[Any, ...]:
    """Return the part of a problem that decides if kernels compile and launch.

    The key has the arguments that are present, their dtypes, choices and signs, and the last
    dimension of the first. It has no lengths, because a training run has many.
    """
    return (op, backend, a[0].device, a[0].shape[-1], *map(_sort, a))


def _sort(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (value > 0) - (value < 0)
    return value if isinstance(value, (bool, str)) else None


def refusal(backend: str, error: Exception) -> str | None:
    """Return the error's message if the backend's kernel never ran, else None."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)):
        return None  # AcceleratorError reports a failure after a kernel ran
    refused = _REFUSES.get(backend)
    if isinstance(error, (NotLaunched, NotImplementedError)) or (
        refused is not None and refused(error)
    ):
        return f"{type(error).__name__}: {_shortened(str(error))}"
    return None


def _shortened(text: str) -> str:
    """Return the text on one line; a long text, such as a compiler's, is cut in the middle."""
    line = " ".join(text.split())
    return line if len(line) <= SHORT else f"{line[: SHORT // 3]} … {line[-2 * SHORT // 3 :]}"


def _triton(error: Exception) -> bool:
    """Return true for errors before a Triton launch.

    These are Triton's exceptions, launches that the driver refuses, and any error from its
    compiler, the build of its launcher (no C compiler, no ptxas) or its search for a driver.
    """
    from triton.errors import TritonError
    from triton.runtime.errors import InterpreterError

    if isinstance(error, TritonError):
        return not isinstance(error, InterpreterError)  # raised by a kernel that ran
    text = str(error)
    if text.startswith(TRITON_LAUNCH):
        return text.removeprefix(TRITON_LAUNCH).strip() in REFUSED
    return any(module.startswith(TRITON_STEPS) for module in _modules(error))


def _cuda(error: Exception) -> bool:
    """Return true for launches that the runtime refuses and for failed tensor maps."""
    first, *_ = str(error).splitlines() or [""]
    if not isinstance(error, RuntimeError) or first.startswith(TENSOR_MAPS):
        return isinstance(error, RuntimeError)
    return any(
        first.startswith(start) and first.removeprefix(start).strip() in REFUSED
        for start in CUDA_LAUNCH
    )


def _modules(error: Exception) -> Iterator[str]:
    """Yield the names of the modules in the error's traceback."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame.f_globals.get("__name__", "")
        step = step.tb_next


_REFUSES: dict[str, Callable[[Exception], bool]] = {"triton": _triton, "cuda": _cuda}
