# SPDX-License-Identifier: Apache-2.0
"""``activate()``: every scaled_dot_product_attention call in the process runs on our kernels, masks included.

The hook is the dispatcher's own: while active, ``aten::scaled_dot_product_attention`` has our function as its
CompositeImplicitAutograd kernel, so calls from Python, C++, nn.MultiheadAttention, timm or a compiled graph's trace all
reach it, in no_grad and inference_mode too, and autocast has already cast their arguments. The C++ fast path, where there is one, is the
kernel for plain eager calls, and hands all others to our function. PyTorch's own kernel, fetched
before, computes what we cannot; each such call is recorded with its reason in ``pytransformer.fallbacks()``.

nn.MultiheadAttention and nn.TransformerEncoderLayer have an inference fast path that never calls the op: it is switched
off while active and set back to what it was afterwards. What it alone does, nested tensors, is in drop_in_nested.py.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library, get_kernel

from . import drop_in_nested
from .ops import nested
from .ops._core import fast_path
from .ops._core.autograd import compiling_a_derivative
from .ops._core.failures import is_broken
from .ops._core.fallbacks import NotLaunched, record_fallback
from .ops._core.registry import Op
from .ops._core.tensors import FLOATING, PLAIN, shape_of
from .ops.attention import attention_op
from .ops.attention_varlen import attention_varlen_op
from .ops.scaled_dot_product import four_dimensional

OP = "scaled_dot_product_attention"
# vmap decomposes the op in a kernel of its own before any other is asked. "CPU" only names a way to fetch the composite
# kernel, which is the same for every device: an alias key has no kernel of its own to fetch.
COMPOSITE = "CompositeImplicitAutograd"
HOOKS = {COMPOSITE: "CPU", "FuncTorchVmapMode": "FuncTorchVmapMode"}
AUTOCAST_KEYS = [key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast")]

_lock = threading.RLock()
_open: Counter[Activation] = Counter()
_library: Library | None = None
_mha_fastpath = True
_told_compiled = False


class Activation:
    """The result of :func:`activate`. As a context manager it ends its own activation, and a later
    ``with`` starts it again; the last to end restores PyTorch."""

    _entered = False

    def __enter__(self) -> Activation:
        with _lock:
            if self._entered or not _open[self]:  # the first block ends what activate() began
                _begin(self)
            self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            if _open[self] > 0:  # else deactivate() came first
                _open[self] -= 1
            if not +_open:
                _restore()


def activate() -> Activation:
    """Run every ``scaled_dot_product_attention`` call of the process on our kernels, until :func:`deactivate`.

    ``pt.activate()`` at the top of a script is enough; ``with pt.activate():`` ends with the block.
    Blocks are counted: they may nest, overlap in threads, coroutines and generators, and end in any
    order. Our kernels serve the whole process while one is open, because PyTorch has one table of
    kernels, and because a checkpoint's backward must recompute with the kernel of its forward.

    A graph of ``torch.compile`` keeps the kernels that it was traced with. Activate before the
    first trace: a warning reports earlier graphs once. A graph traced while active runs our
    kernels afterwards too. ``torch._dynamo.reset()`` traces anew.
    """
    activation = Activation()
    with _lock:
        _begin(activation)
    return activation


def _begin(activation: Activation) -> None:
    """Count the activation; the first one puts our kernels in place."""
    global _library, _mha_fastpath
    _open[activation] += 1
    if _library is not None:
        return
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\s*Warning only once for all operators", category=UserWarning)
        for key, runtime_key in HOOKS.items():
            replacement = _replacement(get_kernel(f"aten::{OP}", runtime_key))
            if key != COMPOSITE or not fast_path.activate(replacement):
                library.impl(OP, replacement, key, with_keyset=True)
    _library, _mha_fastpath = library, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    drop_in_nested.install()
    _tell_compiled()


def deactivate() -> None:
    """Give PyTorch its own kernels and settings back, however often :func:`activate` was called."""
    with _lock:
        _restore()


def _tell_compiled() -> None:
    """Warn, the first time, that what is compiled already goes on without us: its guards do not see the dispatcher."""
    global _told_compiled
    frames = sys.modules.get("torch._dynamo.convert_frame")
    traced = getattr(
        getattr(frames, "output_codes", None), "seen_ids", ()
    )  # of functions that are still there, since the last reset
    if traced and not _told_compiled:
        _told_compiled = True
        warnings.warn(
            "pytransformer.activate: what torch.compile traced before keeps PyTorch's attention. Activate first, or call "
            "torch._dynamo.reset() afterwards, which compiles anew",
            RuntimeWarning,
            stacklevel=4,
        )


def is_active() -> bool:
    """Whether PyTorch's scaled_dot_product_attention is ours at the moment."""
    return _library is not None


def _restore() -> None:
    global _library
    _open.clear()
    if _library is not None:
        _library._destroy()
        fast_path.deactivate()
        _library = None
        torch.backends.mha.set_fastpath_enabled(_mha_fastpath)
        drop_in_nested.restore()


def _replacement(original: Any) -> Callable[..., torch.Tensor]:
    """Our kernel for one dispatch key. ``original`` is PyTorch's for the same key."""

    def scaled_dot_product_attention(
        keyset: torch._C.DispatchKeySet,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        reason = _unsuitable(query, key, value, attn_mask)
        if reason is None:
            try:
                op, a, finish = (_lower_nested if query.is_nested else _lower)(*arguments)
                reason = None if query.is_meta else op.why_not_fused(a)
            except (TypeError, ValueError) as error:  # PyTorch may allow it, or says in its own words what is wrong
                reason = str(error)
        if reason is None:
            try:
                with _user_level():
                    out = op.fused(a)[0]
                return finish(out)
            except NotLaunched as error:
                reason = str(error)
        _check_lengths(key, value)
        record_fallback(OP, reason, instead="PyTorch's own kernel", once=is_broken(reason))
        return original.call_boxed(
            keyset, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    return scaled_dot_product_attention


_Lowered = tuple[
    Op, Any, Callable[[torch.Tensor], torch.Tensor]
]  # the op, its arguments, what gives its output the caller's shape


def _lower(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> _Lowered:
    q, k, v, mask, lead = four_dimensional(query, key, value, mask, enable_gqa)
    causal = "top_left" if is_causal else None
    a, _, _ = attention_op.prepare(q, k, v, attn_mask=mask, causal=causal, scale=scale, dropout_p=dropout_p)
    return attention_op, a, lambda out: out.reshape(*lead, *out.shape[-2:])


def _lower_nested(*arguments: Any) -> _Lowered:
    return attention_varlen_op, *nested.lower(*arguments)


def _check_lengths(key: torch.Tensor, value: torch.Tensor) -> None:
    """ValueError if key and value differ in length: PyTorch's flash kernel does not look (2.13) and reads past the shorter one."""
    if not key.is_nested and not value.is_nested and min(key.dim(), value.dim()) >= 2 and key.shape[-2] != value.shape[-2]:
        raise ValueError(f"{OP}: key and value must have the same length, got key {shape_of(key)} and value {shape_of(value)}")


def _unsuitable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> str | None:
    """Why these tensors are not for our ops at all, or None."""
    for name, t in (("query", query), ("key", key), ("value", value), ("attn_mask", mask)):
        if t is None:
            continue
        if type(t) not in PLAIN:
            return f"{name} is a {type(t).__name__}, and only plain tensors are supported"
        if t.layout != torch.strided or t.is_nested != query.is_nested:
            return (
                f"{name} is a {'nested' if t.is_nested else t.layout} tensor, and only dense or only nested ones are supported"
            )
        if name != "attn_mask" and t.dtype not in FLOATING:
            return f"{name} is {t.dtype}, and only float32, bfloat16, float16 and float64 are supported"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is not supported"
    if torch.compiler.is_compiling() and compiling_a_derivative():
        return "torch.compile of a torch.func derivative is not supported"
    return None


@contextlib.contextmanager
def _user_level() -> Any:
    """Inside a torch.func transform the kernel of an op runs with the transforms' dispatch keys switched off. Our autograd
    Function needs them on, as they are where a user calls it; autocast alone, which has done its part, stays off."""
    if torch._C._functorch.maybe_current_level() is None:
        yield
        return
    included = torch._C._dispatch_tls_local_include_set().remove(torch._C.DispatchKey.FuncTorchVmapMode)
    excluded = torch._C.DispatchKeySet(AUTOCAST_KEYS[0])
    for key in AUTOCAST_KEYS[1:]:
        excluded = excluded.add(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield
