# SPDX-License-Identifier: Apache-2.0
"""The C++ fast path: eager calls without Python.

A public function tries it first. It computes a call only if nothing observes the call and every
argument is plain, and otherwise returns NotImplemented. Python then computes the call: the Python
code remains the specification and raises every error. csrc/fast_path/fast_path.h documents the
design. The module is compiled for one Python and one torch version, and loads at the first call in
no other.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import os
import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..masks import AlibiBias, RelativePositionBias, bucket_starts
from . import choice, native, recording, registry, verification
from .fallbacks import failures
from .registry import OPS

MODULE = "_fast_path" + importlib.machinery.EXTENSION_SUFFIXES[0]
ENTRIES = (
    "attention",
    "attention_varlen",
    "layer_norm",
    "rms_norm",
    "add_norm",
    "feed_forward",
    "linear",
    "linear_cross_entropy",
    "rotary",
    "append_kv",
    "scaled_dot_product_attention",
)
_off: list[str] = []
# Constants and functions that C++ shares with Python, by name. The ops' files add their constants.
facts: dict[str, Any] = {
    "AlibiBias": AlibiBias,
    "RelativePositionBias": RelativePositionBias,
    "bucket_starts": bucket_starts,
    "record_forward": recording.forward,
    "record_backward": recording.backward,
    "trace": choice.record,
}
_watchers: list[Any] = [
    choice.forcing.open,
    choice.observing_ops.open,
    registry.replaced,
    failures,
    verification.watched,
    _off,
]


def _entry(name: str) -> Callable[..., Any]:
    """Return the initial entry point, which loads the fast path and replaces all entry points."""

    def first_call(*arguments: Any) -> Any:
        why_not()
        return globals()[name](*arguments)

    return first_call


def _refuse(*_: Any) -> Any:
    return NotImplemented


# Each takes all arguments of the public function, by position.
attention: Callable[..., Any]
attention_varlen: Callable[..., Any]
layer_norm: Callable[..., Any]
rms_norm: Callable[..., Any]
add_norm: Callable[..., Any]
feed_forward: Callable[..., Any]
linear: Callable[..., Any]
linear_cross_entropy: Callable[..., Any]
rotary: Callable[..., Any]
append_kv: Callable[..., Any]
scaled_dot_product_attention: Callable[..., Any]
globals().update({name: _entry(name) for name in ENTRIES})


@functools.cache
def why_not() -> str | None:
    """Load the fast path; return why Python computes every call, or None."""
    reason = refusal(native.build_info() or {})
    module = None
    if reason is None:
        try:
            module = importlib.import_module("pytransformer._fast_path")
        except ImportError as error:
            reason = f"not loadable: {error}"
    if module is not None:
        verification.prepare_cpu()
        recording.Recorder.precision = staticmethod(module.precision)
        module.connect(tuple(_watchers), choice.tracing.open, _backward, facts)
    globals().update(
        {name: _refuse if module is None else getattr(module, name) for name in ENTRIES}
    )
    return reason


def refusal(info: dict[str, Any], package: Path = native.PACKAGE) -> str | None:
    """Return why the fast path in ``_build_info.json`` cannot be loaded here, or None."""
    if os.environ.get("PYTRANSFORMER_FAST_PATH") == "0":
        return "switched off by PYTRANSFORMER_FAST_PATH=0"
    built = info.get("fast_path") or {
        "built": False,
        "reason": "this copy was never built (make build)",
    }
    if not built["built"]:
        return f"not built: {built['reason']}"
    if built["module"] != MODULE:
        return f"built for another Python ({built['module']}): {native.OLDER}"
    here = (str(torch.__version__), str(torch.version.git_version))
    if (built["torch"], built["git_version"]) != here:
        return (
            f"built for torch {built['torch']} ({built['git_version'][:12]}), and this is {here[0]}"
            f" ({here[1][:12]}): {native.OLDER}"
        )
    if not (package / MODULE).is_file():
        return f"{MODULE} is missing: {native.OLDER}"
    csrc = native.sources(info, package)
    if (
        csrc
        and runpy.run_path(str(csrc / "interface.py"))["digest"](csrc, "fast_path")
        != built["sources"]
    ):
        return f"built from other sources than this code: {native.OLDER}"
    return native.why_not("attention_fwd")


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Disable the fast path in the process, to compare it with Python or to patch Python."""
    _off.append("off")
    try:
        yield
    finally:
        _off.pop()


def watch(*containers: dict[Any, Any] | list[Any]) -> None:
    """Disable the fast path while one of these containers is not empty."""
    new = [c for c in containers if not any(c is known for known in _watchers)]
    if new:
        _watchers.extend(new)
        _call("connect", tuple(_watchers), choice.tracing.open, _backward, facts)


def forget() -> None:
    """Discard all recorded calls, because the choice of backends changed."""
    if why_not.cache_info().currsize:  # otherwise nothing was recorded
        _call("forget")


def programs() -> tuple[int, list[str]]:
    """Return the number of recorded kinds of calls and why others failed, for tests and tools."""
    module = None if why_not() else importlib.import_module("pytransformer._fast_path")
    return (0, []) if module is None else module.programs()


verification.when_forgotten.append(forget)


def activate(replacement: Callable[..., torch.Tensor]) -> bool:
    """Install the fast path's kernel for PyTorch's scaled_dot_product_attention.

    ``replacement`` computes unsupported calls. Returns False without a fast path.
    """
    return _call("activate", replacement)


def deactivate() -> None:
    """Remove the kernel that :func:`activate` installed."""
    _call("deactivate")


def replace_memory(function: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Replace each uninitialized tensor of the fast path by ``function(tensor)``; None resets.

    For tests.
    """
    _call("replace_memory", function)


def _call(name: str, *arguments: Any) -> bool:
    """Call a function of the fast path and return true, or return false if it is not loaded."""
    if why_not() is not None:
        return False
    getattr(importlib.import_module("pytransformer._fast_path"), name)(*arguments)
    return True


def _backward(
    op: str,
    grads: Any,
    tensors: Any,
    others: Any,
    saved: Any,
    wanted: Sequence[bool],
    backend: str | None,
    strict: bool,
) -> list[torch.Tensor | None]:
    """Run the backward of a fast-path node in Python.

    The node is observed or differentiated again, or has no program.
    """
    target = OPS[op]
    results = target.gradients(
        grads, (*tensors, *saved), (*others[:-2], backend, strict), list(wanted), target.backward
    )
    return [result if want else None for result, want in zip(results, wanted)]
