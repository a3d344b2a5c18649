# SPDX-License-Identifier: Apache-2.0
"""PyTorch's registry of flash attention: ``register()``, then
``torch.nn.attention.activate_flash_attention_impl("pytransformer")``."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.library import Library

from ..ops._core.op import autograd_inside

NAME = "pytransformer"


def register(name: str = NAME) -> None:
    """List this package in ``torch.nn.attention.list_flash_attention_impls()``. Idempotent.

    ``activate_flash_attention_impl(name)`` then does what :func:`pytransformer.activate` does, and
    gives ``torch.nn.attention.varlen.varlen_attn`` a CPU kernel with gradients, which PyTorch
    lacks. ``restore_flash_attention_impl()`` removes both and leaves other activations as they are.

    Raises:
        ImportError: this version of torch has no such registry.
    """
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError as error:
        raise ImportError(
            "register: torch must have torch.nn.attention.register_flash_attention_impl, got torch"
            f" {torch.__version__}; call pytransformer.activate() instead"
        ) from error
    register_flash_attention_impl(name, register_fn=_Handle)


class _Handle:
    """An activation of the registry."""

    def __init__(self) -> None:
        from ..drop_in import activate

        self._activation = activate()
        self._library: Library | None = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=r"\s*Warning only once for all operators", category=UserWarning
            )
            self._library.impl("_flash_attention_forward", _forward, "CPU")
            self._library.impl("_flash_attention_forward_no_dropout_inplace", _forward_into, "CPU")
            self._library.impl("_flash_attention_backward", _backward, "CPU")

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None
            self._activation.__exit__()


# ---- CPU kernels of aten::_flash_attention_*, which varlen_attn calls. Layouts are flash-attn's.


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    longest: tuple[int, int],
    dropout_p: float,
    is_causal: bool,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    from ..compat._aligned import (
        Scores,
        attend,
        attend_packed,
    )  # on first use, to keep the import short

    op = "_flash_attention_forward"
    if dropout_p != 0.0:
        raise ValueError(
            f"{op}: dropout_p must be 0, got {dropout_p}; call pytransformer.attention_varlen"
        )
    if options.get("num_splits") not in (None, 0, 1):
        raise ValueError(
            f"{op}: num_splits must be None, 0 or 1, got {options['num_splits']}; the backend"
            " splits"
        )
    sides = (options.get("window_size_left"), options.get("window_size_right"))
    left, right = (None if side is None or side < 0 else int(side) for side in sides)
    if is_causal:
        right = None
    window = None if left is None and right is None else (left, right)
    scores = Scores(
        0.0, options.get("scale"), is_causal, window, None, options.get("alibi_slopes"), True
    )
    table, used = options.get("block_table"), options.get("seqused_k")
    if cum_seq_q is None:
        return attend(op, query, key, value, scores, key_lengths=used, page_table=table)
    return attend_packed(
        op, query, key, value, (cum_seq_q, cum_seq_k), longest, scores, table, used
    )


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    return_debug_mask: bool, **options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    out, lse = _attend(
        query, key, value, cum_seq_q, cum_seq_k, (max_q, max_k), dropout_p, is_causal, options
    )
    empty = query.new_empty(0)
    return out, lse, query.new_zeros(2, dtype=torch.uint64), empty, empty.clone()


def _forward_into(out: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    result, lse, *_ = _forward(*arguments, **options)
    out.copy_(result)
    return lse


def _backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor, cum_seq_q: torch.Tensor, cum_seq_k: torch.Tensor, max_q: int,
    max_k: int,
    dropout_p: float, is_causal: bool, rng_state: torch.Tensor, unused: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of query, key and value, through a second forward."""
    with autograd_inside():
        q, k, v = (t.detach().requires_grad_() for t in (query, key, value))
        result, _ = _attend(
            q, k, v, cum_seq_q, cum_seq_k, (max_q, max_k), dropout_p, is_causal, options
        )
        return torch.autograd.grad(result, (q, k, v), grad_out)
