# SPDX-License-Identifier: Apache-2.0
"""The C++ fast path: eager calls without Python.

A public function tries it first. It computes a call only if nothing observes the call and every
argument is plain, and otherwise returns NotImplemented. Python then computes the call: the Python
code remains the specification and raises every error. csrc/fast_path/fast_path.h documents the
design. The module is compiled for one Python and one torch version, and loads at the first call in
no other.

The second part of this file records a backend's steps, which the fast path replays with other
tensors. A GPU backend computes tiles, strides and plans in Python from shapes, strides, dtypes,
alignments and numbers, never from tensor values. Calls that agree in all of these take the same
steps: they allocate the same memory, run the same ops and launch the same kernels.
:func:`record_forward` and :func:`record_backward` run a call once while a dispatch mode records its
ops and the backend its launches. csrc/fast_path/builder.cpp builds a program from the record, or
rejects it. See docs/design/fast-path.md.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import inspect
import os
import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..masks import AlibiBias, RelativePositionBias, bucket_starts
from . import native, registry, verification
from .dispatch import failures
from .registry import OPS, Backend

if TYPE_CHECKING:
    from .op import Op

MODULE = "_fast_path" + importlib.machinery.EXTENSION_SUFFIXES[0]
_off: list[str] = []


class Entries:
    """The C++ entry points; each takes all arguments of the public function, by position.

    Each returns NotImplemented for a call that Python must compute. The first call of any of them
    loads the module and sets all attributes. From ``post_norm_layer`` on they serve converted
    modules (csrc/fast_path/modules.cpp and whole_layers.cpp).
    """

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
    post_norm_layer: Callable[..., Any]
    pre_norm_heads: Callable[..., Any]
    pre_norm_rest: Callable[..., Any]
    remember: Callable[..., Any]
    recall: Callable[..., Any]

    def __init__(self) -> None:
        for name in ENTRIES:
            setattr(self, name, functools.partial(self._first_call, name))

    def _first_call(self, name: str, *arguments: Any) -> Any:
        why_not()
        return getattr(self, name)(*arguments)


ENTRIES = tuple(Entries.__annotations__)
entries = Entries()


def _refuse(*_: Any) -> Any:
    return NotImplemented


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
        Recorder.precision = staticmethod(module.precision)
        module.connect(tuple(_watchers), registry.tracing.open, _backward, facts)
    for name in ENTRIES:
        setattr(entries, name, _refuse if module is None else getattr(module, name))
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
        _call("connect", tuple(_watchers), registry.tracing.open, _backward, facts)


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


# ---- recording

Recording = tuple[tuple[Any, ...], list[tuple[Any, ...]], tuple[Any, ...], str, Any]


class Watching(TorchDispatchMode):
    """A mode that observes each op of a call; nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that PyTorch does not hide ``__torch_dispatch__`` from torch.compile.

        Hiding imports torch.compile at the first op, 4 s of a process's second call on a GPU.
        """
        return False


class Recorder(Watching):
    """The record of each op and of each launch that a backend reports."""

    # returns the precision settings of products; set when the fast path loads
    precision: Callable[[], tuple[int, ...]]

    def __init__(self) -> None:
        super().__init__()
        # stores the tensors too, so that no address is reused
        self.events: list[tuple[Any, ...]] = []
        self.stream: Callable[[int], int] | None = None
        self.why_not: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        precision = self.precision()
        found = func(*args, **(kwargs or {}))
        self.events.append((func, args, kwargs or {}, found, precision))
        return found

    def launches_on(self, stream: Callable[[int], int]) -> None:
        """Set the function that returns a device's current stream.

        Each launch gets the stream as ``stream``.
        """
        self.stream = stream

    def launched(self, launch: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
        """Record a launch that ``launch(*arguments, stream=...)`` repeats."""
        if launch is None:
            self.refuse("a launch cannot be repeated")
        self.events.append((launch, arguments))

    def refuse(self, reason: str) -> None:
        self.why_not = self.why_not or reason


def record_forward(
    op_name: str,
    given: tuple[Any, ...] | dict[str, Any],
    tensors: tuple[Any, ...],
    others: tuple[Any, ...],
    save: bool,
    backend: str | None,
    strict: bool,
) -> Recording | str | None:
    """Record a call of the public function with the arguments ``given``, by position or by name.

    The fast path has lowered them to ``tensors`` and ``others``. Returns a reason if no such call
    can be recorded, and None if only this call cannot.
    """
    op = OPS[op_name]
    named = (
        given
        if isinstance(given, dict)
        else dict(zip(inspect.signature(op.prepare).parameters, given))
    )
    seed = (
        op.Arguments._fields.index("dropout_seed")
        if "dropout_seed" in op.Arguments._fields
        else None
    )
    if seed is not None and named["dropout_p"] and named.get("dropout_seed") is None:
        named["dropout_seed"] = tensors[seed]  # otherwise Python would draw another seed
    try:
        a = op.prepare(**named)[0]
        chosen = op.select(a, backend, strict)
    except Exception:
        return None  # Python raises the error
    if not _alike(op, a, (*tensors, *others[:-2]), save):
        return "Python converts an argument"
    a = op.Arguments._make((*tensors, *a[op.num_tensors :]))
    infer = None if save else chosen.infer
    return _recorded(chosen, a, tensors, lambda: infer(a) if infer else chosen.forward(a))


def record_backward(
    op_name: str,
    grads: tuple[Any, ...],
    tensors: tuple[Any, ...],
    others: tuple[Any, ...],
    saved: tuple[Any, ...],
    wanted: Sequence[bool],
    backend: str | None,
    strict: bool,
) -> Recording | str | None:
    """Record the op's backward in the same way."""
    op = OPS[op_name]
    a = op.Arguments._make((*tensors, *others[:-2]))
    try:
        chosen = op.select(a, backend, strict, direction="bwd")
    except Exception:
        return None
    return _recorded(
        chosen,
        a,
        (*grads, *tensors, *saved),
        lambda: chosen.backward(a, grads, saved, list(wanted)),
    )


def _recorded(
    chosen: Backend, a: Any, inputs: tuple[Any, ...], run: Callable[[], Sequence[Any]]
) -> Recording | str | None:
    if chosen.recorded is None:
        return f"the backend {chosen.name} is not recorded"
    if any(isinstance(t, torch.Tensor) and not t.numel() for t in a):
        return "an argument has no elements: the reference's"
    device = next(t.device for t in inputs if t is not None)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None  # the graph would contain unneeded work
    recorder = Recorder()
    try:
        with (
            _below_autograd(),
            torch.autocast(device.type, enabled=False),
            chosen.recorded(recorder),
            recorder,
        ):
            results = tuple(run())
    except Exception as error:
        return f"error: {error!r}"  # Python repeats the call, and the error triggers the fallback
    if recorder.why_not:
        return recorder.why_not
    return inputs, recorder.events, results, chosen.name, recorder.stream


def _below_autograd() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    include, exclude = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )
    return torch._C._ForceDispatchKeyGuard(include, exclude | keys)


def _alike(op: Op, a: Any, lowered: tuple[Any, ...], save: bool) -> bool:
    """Return true if the fast path lowered the call as Python does.

    Without a backward, only Python sets ``save``.
    """
    return all(
        (name == "save" and not save) or _same(mine, theirs)
        for name, mine, theirs in zip(op.Arguments._fields, a, lowered)
    )


def _same(mine: Any, theirs: Any) -> bool:
    if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
        return type(mine) is type(theirs) and mine == theirs
    alike = (mine.shape, mine.stride(), mine.dtype, mine.device) == (
        theirs.shape,
        theirs.stride(),
        theirs.dtype,
        theirs.device,
    )
    # Both sides convert lengths, segments and seeds separately, to equal values.
    return alike and (mine.data_ptr() == theirs.data_ptr() or mine.dtype == torch.int64)


# Constants and functions that C++ shares with Python, by name. The ops' files add their constants.
facts: dict[str, Any] = {
    "AlibiBias": AlibiBias,
    "RelativePositionBias": RelativePositionBias,
    "bucket_starts": bucket_starts,
    "record_forward": record_forward,
    "record_backward": record_backward,
    "trace": registry.record,
}
_watchers: list[Any] = [
    registry.forcing.open,
    registry.observing_ops.open,
    registry.replaced,
    failures,
    verification.watched,
    _off,
]
