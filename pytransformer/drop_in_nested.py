# SPDX-License-Identifier: Apache-2.0
"""Nested tensors while :func:`pytransformer.activate` is on.

PyTorch handles them before its attention op: a function of torch.nested computes jagged tensors,
and nn.MultiheadAttention supports nested tensors only in its inference fast path, which is off.
Here both run as packed sequences, in training too.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .ops import nested
from .ops._core.dispatch import record_fallback
from .ops.attention_varlen import attention_varlen, attention_varlen_op

# private; not patched if absent
MODULE, JAGGED = "torch.nested._internal.ops", "jagged_scaled_dot_product_attention"
_patches: list[Patch] = []


class Patch:
    """An attribute replaced by ``wrap(patch, original)`` until :meth:`remove`.

    Another library may patch the same attribute later. Its patch then stays and still calls ours,
    which must only forward the call once ``on`` is false.
    """

    def __init__(self, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
        self.owner, self.name, self.on = owner, name, True
        self.inherited = name not in vars(owner)
        self.original = getattr(owner, name)
        self.ours = wrap(self, self.original)
        setattr(owner, name, self.ours)

    def remove(self) -> None:
        self.on = False
        if vars(self.owner).get(self.name) is not self.ours:
            return
        if self.inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


def install() -> None:
    module = importlib.import_module(MODULE)
    if hasattr(module, JAGGED):
        _patches.append(Patch(module, JAGGED, _jagged))
    # Patch __call__, because torch.jit.script reads forward.
    _patches.append(Patch(nn.MultiheadAttention, "__call__", _multihead_call))


def restore() -> None:
    while _patches:
        _patches.pop().remove()


def _jagged(patch: Patch, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if not patch.on:
            return original(*arguments)
        try:
            a, finish = nested.lower(*arguments)
            reason = attention_varlen_op.why_not_fused(a)
        except (TypeError, ValueError) as error:
            reason = str(error)
        if reason is None:
            return finish(attention_varlen_op(a)[0])
        record_fallback(nested.OP, reason, instead="PyTorch's own path")
        return original(*arguments)

    return attend


def _multihead_call(patch: Patch, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: nn.MultiheadAttention, *args: Any, **kwargs: Any) -> Any:
        tensors = (*args[:3], *kwargs.values())
        if not patch.on or not any(isinstance(t, torch.Tensor) and t.is_nested for t in tensors):
            return original(self, *args, **kwargs)
        reason = _why_not(self, *args, **kwargs)
        if reason is None:
            return _multihead(self, *args, **kwargs), None
        record_fallback("nn.MultiheadAttention", reason, instead="PyTorch's fast path")
        with _fast_path():
            return original(self, *args, **kwargs)

    return call


def _why_not(
    self: nn.MultiheadAttention, query: Any, key: Any, value: Any, key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None, average_attn_weights: bool = True, is_causal: bool = False,
) -> str | None:  # fmt: skip
    """Return why a call with a nested tensor cannot run as packed sequences, or None."""
    if need_weights:
        return "need_weights=True asks for the weights of nested tensors"
    if key_padding_mask is not None or attn_mask is not None or is_causal:
        return "nested tensors with a mask"
    if not all(
        t.is_nested and t.dim() == 3 and t.layout == query.layout for t in (query, key, value)
    ):
        return "some of query, key and value are not nested tensors (B, L*, E) of one layout"
    if self.bias_k is not None or self.add_zero_attn or not self.batch_first:
        return "nested tensors with bias_k, add_zero_attn or batch_first=False"
    if self._forward_hooks or self._forward_pre_hooks:
        return "nested tensors in a module with hooks"
    return None


def _multihead(
    self: nn.MultiheadAttention, query: Any, key: Any, value: Any, **_: Any
) -> torch.Tensor:
    """Return the module's output, including its projections, computed on packed rows."""
    packed = {
        id(t): nested.pack(name, t)
        for name, t in (("query", query), ("key", key), ("value", value))
    }
    q, k, v = (packed[id(t)] for t in (query, key, value))
    nested.check_same_lengths("nn.MultiheadAttention", k, v)
    stacked = self.in_proj_weight
    weights = (
        (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if stacked is None
        else stacked.chunk(3)
    )
    biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
    projected = zip((q, k, v), weights, biases, strict=True)
    heads = [
        F.linear(t.rows[:, 0], w, b).unflatten(1, (self.num_heads, self.head_dim))
        for t, w, b in projected
    ]
    dropout = self.dropout if self.training else 0.0
    cu_seqlens = (q.offsets, k.offsets, q.longest, k.longest)
    out = attention_varlen(heads[0], heads[1], heads[2], *cu_seqlens, dropout_p=dropout)
    return nested.like(query, q, self.out_proj(out.flatten(1)).unsqueeze(1))


@contextmanager
def _fast_path() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(False)
