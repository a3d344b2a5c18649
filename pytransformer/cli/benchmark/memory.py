# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one call, measured in a fresh process.

A helper process imports torch and the package and then only forks. Each measurement is one child.
It creates the inputs, runs the same code once at a tiny shape to load library code, resets the
kernel's high-water mark of resident memory, and makes the call. The result is the rise of that
mark: outputs, saved tensors, gradients and workspace, without the inputs. The helper's allocator
returns large blocks at once (MALLOC_* below), so no freed block hides a new one. The resolution is
about a quarter of a megabyte.

On CUDA the result is torch's high-water mark of allocated memory, minus the memory allocated
before.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

# Blocks of 64 KiB and more come from mmap and return to the system when freed. Fixed thresholds
# also disable glibc's dynamic adjustment.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_RESET_PEAK = "5"  # written to /proc/self/clear_refs: VmHWM = VmRSS (Linux, proc(5))


class Unmeasured(RuntimeError):
    """The peak could not be measured; the message has the reason."""


def why_not() -> str | None:
    """Return why peak memory cannot be measured on this system, or None."""
    if not hasattr(os, "fork"):
        return "peak memory needs fork, which this system lacks"
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return "peak memory needs a writable /proc/self/clear_refs (Linux)"
    return None


class MemoryProbe:
    """The helper process, a context manager; `measure` may be called repeatedly."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> MemoryProbe:
        if why_not() is None:
            # The child inherits this process's sys.path, so that it imports the same copies.
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from"
                " pytransformer.cli.benchmark.memory_helper import serve; serve()"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **ENVIRONMENT},
                # Ctrl-C in the terminal reaches the parent only, which then ends this process
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def measure(self, request: dict[str, Any]) -> int:
        """Return the peak bytes of one request (`runner.memory_request`) or raise Unmeasured."""
        reason = why_not()
        if reason is not None:
            raise Unmeasured(reason)
        assert self._process is not None, "MemoryProbe is a context manager: enter it first"
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise Unmeasured("the helper process that measures memory has died")
        answer = json.loads(line)
        if "bytes" not in answer:
            raise Unmeasured(answer["error"])
        return answer["bytes"]


def measure_rise(call: Callable[[], object]) -> int:
    """Return the rise of this process's resident memory at its peak while `call` ran, in bytes."""
    with contextlib.suppress(AttributeError):  # musl has no malloc_trim and needs none
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as marks:
        marks.write(_RESET_PEAK)
    before = _status_bytes("VmRSS")
    kept = call()
    peak = _status_bytes("VmHWM") - before
    del kept
    return max(0, peak)


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as status:
        for line in status:
            name, _, value = line.partition(":")
            if name == field:
                return int(value.split()[0]) * 1024
    raise Unmeasured(f"/proc/self/status has no {field}")
