# SPDX-License-Identifier: Apache-2.0
"""Runs one problem on both dispatch paths, Python and C++."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import pytransformer as pt
from pytransformer.ops._core import fast_path

needs_fast_path = pytest.mark.skipif(
    fast_path.why_not() is not None, reason=f"no C++ fast path: {fast_path.why_not()}"
)


class Sees(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that records each op that the dispatcher runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(torch.overrides.TorchFunctionMode):
    """A mode that passes every function through unchanged."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def taken_by(op: str, *args: Any, **kwargs: Any) -> bool:
    """Return True if the C++ fast path handles this call of ``pt.<op>``."""
    call = inspect.signature(getattr(pt, op)).bind(*args, **kwargs)
    call.apply_defaults()
    given = [value for name, value in call.arguments.items() if name != "unknown"]
    return getattr(fast_path.entries, op)(*given) is not NotImplemented


taken = functools.partial(taken_by, "attention")
norm_taken = functools.partial(taken_by, "layer_norm")


@contextlib.contextmanager
def counting() -> Iterator[Counter[tuple[str, bool]]]:
    """Count calls of each op's fast-path entry: (op, handled) -> calls."""
    counts: Counter[tuple[str, bool]] = Counter()

    def counted(name: str, entry: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            found = entry(*arguments)
            counts[name, found is not NotImplemented] += 1
            return found

        return ask

    before = {name: getattr(fast_path.entries, name) for name in fast_path.ENTRIES}
    vars(fast_path.entries).update({name: counted(name, entry) for name, entry in before.items()})
    try:
        yield counts
    finally:
        vars(fast_path.entries).update(before)


def bits(t: Tensor) -> Tensor:
    """Return the tensor's bits as integers, so that NaN compares too."""
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def qkv(
    dtype: torch.dtype = torch.float32,
    *,
    kv_heads: int = 2,
    grad: bool = True,
    lq: int = 8,
    lk: int = 8,
    dv: int = 16,
) -> list[Tensor]:
    shapes = (2, 2, lq, 16), (2, kv_heads, lk, 16), (2, kv_heads, lk, dv)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def results(
    function: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    """Return outputs and gradients with the same random numbers each time."""
    torch.manual_seed(1)
    found = function(*inputs, **options)
    outs = found if isinstance(found, tuple) else (found,)
    if not wanted:
        return outs
    torch.manual_seed(2)
    return (*outs, *torch.autograd.grad(outs, wanted, [torch.randn_like(o) for o in outs]))


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b):
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        assert torch.equal(bits(x), bits(y)), (x - y).abs().max()


def same_in_both(
    function: Callable[..., Any], inputs: Sequence[Any], wanted: Sequence[Tensor], **options: Any
) -> None:
    """Assert that the function gives the same bits with and without the C++ fast path."""
    got = []
    for which in (contextlib.nullcontext, fast_path.off):
        with which():
            got.append(results(function, inputs, wanted, **options))
    same(*got)


def attention_in_both(inputs: Sequence[Any], wanted: Sequence[Tensor], **options: Any) -> None:
    same_in_both(pt.attention, inputs, wanted, **options)
