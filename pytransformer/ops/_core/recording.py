# SPDX-License-Identifier: Apache-2.0
"""Recording of a backend's steps, which the C++ fast path replays with other tensors.

A GPU backend computes tiles, strides and plans in Python from shapes, strides, dtypes, alignments
and numbers, never from tensor values. Calls that agree in all of these take the same steps: they
allocate the same memory, run the same ops and launch the same kernels. :func:`forward` and
:func:`backward` run a call once while a dispatch mode records its ops and the backend its launches.
csrc/fast_path/builder.cpp builds a program from the record, or rejects it. See
docs/design/fast-path.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .registry import OPS, Backend, Op

Recorded = tuple[tuple[Any, ...], list[tuple[Any, ...]], tuple[Any, ...], str, Any]


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


def forward(
    op_name: str,
    given: tuple[Any, ...] | dict[str, Any],
    tensors: tuple[Any, ...],
    others: tuple[Any, ...],
    save: bool,
    backend: str | None,
    strict: bool,
) -> Recorded | str | None:
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


def backward(
    op_name: str,
    grads: tuple[Any, ...],
    tensors: tuple[Any, ...],
    others: tuple[Any, ...],
    saved: tuple[Any, ...],
    wanted: Sequence[bool],
    backend: str | None,
    strict: bool,
) -> Recorded | str | None:
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
) -> Recorded | str | None:
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
