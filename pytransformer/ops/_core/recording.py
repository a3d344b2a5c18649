# SPDX-License-Identifier: Apache-2.0
"""What a backend does for a call, noted step by step, for the C++ fast path to do again with other tensors.

A backend of a GPU works out tiles, strides and plans in Python, and all of that goes by shapes, strides, dtypes, alignments and numbers,
never by what tensors hold. So a call that is equal to an earlier one in all of these takes the same steps: it allocates the same
memory, runs the same ops and launches the same kernels. :func:`forward` and :func:`backward` do a call once while a dispatch mode notes
its ops and the backend its launches; csrc/fast_path/builder.cpp makes a program of them, or finds out that they are none.
See docs/design/fast-path.md.
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
    """A mode that sees each op of a call, of which nothing is compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch's own question: whether to hide ``__torch_dispatch__`` from torch.compile, which imports that at the first op seen: 4 s
        of a process's second call on a GPU."""
        return False


class Recorder(Watching):
    """Sees each op and, told by a backend, each launch."""

    precision: Callable[[], tuple[int, ...]]  # how exact products are now; set when the fast path is loaded

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Any, ...]] = []  # with their tensors: no address comes twice
        self.stream: Callable[[int], int] | None = None
        self.why_not: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        precision = self.precision()
        found = func(*args, **(kwargs or {}))
        self.events.append((func, args, kwargs or {}, found, precision))
        return found

    def launches_on(self, stream: Callable[[int], int]) -> None:
        """What gives the current stream of a device, by its index: each launch gets it as ``stream``."""
        self.stream = stream

    def launched(self, launch: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
        """``launch(*arguments, stream=...)`` does the launch again."""
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

    The fast path has lowered them to ``tensors`` and ``others``.

    Returns a reason where no call like it can be recorded, None where only this one cannot.
    """
    op = OPS[op_name]
    named = given if isinstance(given, dict) else dict(zip(inspect.signature(op.prepare).parameters, given))
    seed = op.Arguments._fields.index("dropout_seed") if "dropout_seed" in op.Arguments._fields else None
    if seed is not None and named["dropout_p"] and named.get("dropout_seed") is None:
        named["dropout_seed"] = tensors[seed]  # or Python would draw another
    try:
        a = op.prepare(**named)[0]
        chosen = op.select(a, backend, strict)
    except Exception:
        return None  # Python words the error
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
    """The same of the op's backward."""
    op = OPS[op_name]
    a = op.Arguments._make((*tensors, *others[:-2]))
    try:
        chosen = op.select(a, backend, strict, direction="bwd")
    except Exception:
        return None
    return _recorded(chosen, a, (*grads, *tensors, *saved), lambda: chosen.backward(a, grads, saved, list(wanted)))


def _recorded(chosen: Backend, a: Any, inputs: tuple[Any, ...], run: Callable[[], Sequence[Any]]) -> Recorded | str | None:
    if chosen.recorded is None:
        return f"the backend {chosen.name} is not recorded"
    if any(isinstance(t, torch.Tensor) and not t.numel() for t in a):
        return "an argument has no elements: the reference's"
    device = next(t.device for t in inputs if t is not None)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None  # the graph would keep what is computed for nothing
    recorder = Recorder()
    try:
        with _below_autograd(), torch.autocast(device.type, enabled=False), chosen.recorded(recorder), recorder:
            results = tuple(run())
    except Exception as error:
        return f"error: {error!r}"  # Python does the call, and the error leads it to the next backend
    if recorder.why_not:
        return recorder.why_not
    return inputs, recorder.events, results, chosen.name, recorder.stream


def _below_autograd() -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    keys = keys | torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(include, exclude | keys)


def _alike(op: Op, a: Any, lowered: tuple[Any, ...], save: bool) -> bool:
    """Whether the fast path lowered the call as Python does. Without a backward, ``save`` is Python's alone."""
    return all(
        (name == "save" and not save) or _same(mine, theirs) for name, mine, theirs in zip(op.Arguments._fields, a, lowered)
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
    # Lengths, segments and seeds are converted by each for itself, to equal numbers.
    return alike and (mine.data_ptr() == theirs.data_ptr() or mine.dtype == torch.int64)
