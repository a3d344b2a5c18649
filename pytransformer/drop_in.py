# SPDX-License-Identifier: Apache-2.0
"""``activate()`` runs every scaled_dot_product_attention call of the process on our kernels.

While active, our function is the CompositeImplicitAutograd kernel of
``aten::scaled_dot_product_attention``. The dispatcher therefore sends it calls from Python, C++,
nn.MultiheadAttention, timm and a compiled graph's trace, also under no_grad and inference_mode,
after autocast has cast the arguments. If the C++ fast path is available, it is the kernel for plain
eager calls and passes all other calls to our function. PyTorch's kernel, fetched before, computes
unsupported calls; ``pytransformer.fallbacks()`` records each with its reason.

nn.MultiheadAttention and nn.TransformerEncoderLayer have an inference fast path that never calls
the op. ``activate()`` disables it and restores the setting afterwards. drop_in_nested.py handles
nested tensors, which only that fast path supports.
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
from .ops._core.dispatch import NotLaunched, is_broken, record_fallback
from .ops._core.op import Op
from .ops._core.tensors import FLOATING, PLAIN, shape_of
from .ops.attention import attention_op
from .ops.attention_varlen import attention_varlen_op
from .ops.scaled_dot_product import four_dimensional

OP = "scaled_dot_product_attention"
# vmap decomposes the op in a kernel with a higher dispatch priority. "CPU" is only the key that
# fetches the composite kernel, which is the same for every device; an alias key has no kernel to
# fetch.
COMPOSITE = "CompositeImplicitAutograd"
HOOKS = {COMPOSITE: "CPU", "FuncTorchVmapMode": "FuncTorchVmapMode"}
AUTOCAST_KEYS = [
    key for name, key in torch._C.DispatchKey.__members__.items() if name.startswith("Autocast")
]

_lock = threading.RLock()
_open: Counter[Activation] = Counter()
_library: Library | None = None
_mha_fastpath = True
_told_compiled = False


class Activation:
    """The result of :func:`activate`.

    As a context manager it ends its activation, and a later ``with`` starts it again. The last
    activation to end restores PyTorch.
    """

    _entered = False

    def __enter__(self) -> Activation:
        with _lock:
            if self._entered or not _open[self]:  # the first block ends what activate() began
                _begin(self)
            self._entered = True
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            if _open[self] > 0:  # false if deactivate() came first
                _open[self] -= 1
            if not +_open:
                _restore()


def activate() -> Activation:
    """Run every ``scaled_dot_product_attention`` call of the process on our kernels.

    The effect lasts until :func:`deactivate`. ``pt.activate()`` at the top of a script is enough;
    ``with pt.activate():`` ends with the block. Blocks are counted: they may nest, overlap in
    threads, coroutines and generators, and end in any order. Our kernels serve the whole process
    while one block is open, because PyTorch has one table of kernels and because a checkpoint's
    backward must recompute with the kernel of its forward.

    A graph of ``torch.compile`` keeps the kernels that it was traced with. Activate before the
    first trace; a warning reports earlier graphs once. A graph traced while active runs our kernels
    afterwards too. ``torch._dynamo.reset()`` discards traced graphs.
    """
    activation = Activation()
    with _lock:
        _begin(activation)
    return activation


def _begin(activation: Activation) -> None:
    """Count the activation; the first one installs our kernels."""
    global _library, _mha_fastpath
    _open[activation] += 1
    if _library is not None:
        return
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r"\s*Warning only once for all operators", category=UserWarning
        )
        for key, runtime_key in HOOKS.items():
            replacement = _replacement(get_kernel(f"aten::{OP}", runtime_key))
            if key != COMPOSITE or not fast_path.activate(replacement):
                library.impl(OP, replacement, key, with_keyset=True)
    _library, _mha_fastpath = library, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    drop_in_nested.install()
    _tell_compiled()


def deactivate() -> None:
    """Restore PyTorch's kernels and settings, however often :func:`activate` was called."""
    with _lock:
        _restore()


def _tell_compiled() -> None:
    """Warn once that graphs compiled earlier keep PyTorch's attention.

    Their guards do not cover the dispatcher.
    """
    global _told_compiled
    frames = sys.modules.get("torch._dynamo.convert_frame")
    # The live functions that were traced since the last reset.
    traced = getattr(getattr(frames, "output_codes", None), "seen_ids", ())
    if traced and not _told_compiled:
        _told_compiled = True
        warnings.warn(
            "pytransformer.activate: what torch.compile traced before keeps PyTorch's attention."
            " Activate first, or call torch._dynamo.reset() afterwards, which compiles anew",
            RuntimeWarning,
            stacklevel=4,
        )


def is_active() -> bool:
    """Return true while our kernels serve PyTorch's scaled_dot_product_attention."""
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
    """Return our kernel for one dispatch key; ``original`` is PyTorch's kernel for the same key."""

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
            except (TypeError, ValueError) as error:  # PyTorch may accept it, or raises its error
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
            keyset,
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )

    return scaled_dot_product_attention


# The op, its arguments, a function that reshapes the output.
_Lowered = tuple[Op, Any, Callable[[torch.Tensor], torch.Tensor]]


def _lower(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> _Lowered:
    q, k, v, mask, lead = four_dimensional(query, key, value, mask, enable_gqa)
    causal = "top_left" if is_causal else None
    a, _, _ = attention_op.prepare(
        q, k, v, attn_mask=mask, causal=causal, scale=scale, dropout_p=dropout_p
    )
    return attention_op, a, lambda out: out.reshape(*lead, *out.shape[-2:])


def _lower_nested(*arguments: Any) -> _Lowered:
    return attention_varlen_op, *nested.lower(*arguments)


def _check_lengths(key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise ValueError if key and value differ in length.

    PyTorch's flash kernel does not check (2.13) and reads past the end of the shorter tensor.
    """
    if (
        not key.is_nested
        and not value.is_nested
        and min(key.dim(), value.dim()) >= 2
        and key.shape[-2] != value.shape[-2]
    ):
        raise ValueError(
            f"{OP}: key and value must have the same length, got key {shape_of(key)} and value"
            f" {shape_of(value)}"
        )


def _unsuitable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> str | None:
    """Return why our ops do not support these tensors, or None."""
    for name, t in (("query", query), ("key", key), ("value", value), ("attn_mask", mask)):
        if t is None:
            continue
        if type(t) not in PLAIN:
            return f"{name} is a {type(t).__name__}, and only plain tensors are supported"
        if t.layout != torch.strided or t.is_nested != query.is_nested:
            return (
                f"{name} is a {'nested' if t.is_nested else t.layout} tensor, and only dense or"
                " only nested ones are supported"
            )
        if name != "attn_mask" and t.dtype not in FLOATING:
            return (
                f"{name} is {t.dtype}, and only float32, bfloat16, float16 and float64 are"
                " supported"
            )
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is not supported"
    if torch.compiler.is_compiling() and compiling_a_derivative():
        return "torch.compile of a torch.func derivative is not supported"
    return None


@contextlib.contextmanager
def _user_level() -> Any:
    """Enable the dispatch keys of a torch.func transform, as in the user's call.

    The kernel of an op runs with these keys disabled, and our autograd Function needs them.
    Autocast stays disabled because it has already run.
    """
    if torch._C._functorch.maybe_current_level() is None:
        yield
        return
    included = torch._C._dispatch_tls_local_include_set().remove(
        torch._C.DispatchKey.FuncTorchVmapMode
    )
    excluded = torch._C.DispatchKeySet(AUTOCAST_KEYS[0])
    for key in AUTOCAST_KEYS[1:]:
        excluded = excluded.add(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        yield
