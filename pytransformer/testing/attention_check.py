"""Check one call of attention against float64: outputs, lse and every gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import bounds, oracle
from .cases import leaves


def run_attention(
    args: tuple[Any, ...], kwargs: dict[str, Any], backend: str, grad_out: Tensor, grad_lse: Tensor | None = None
) -> dict[str, Tensor]:
    """Results by name: "out", "lse" and the gradient of every floating argument, on a forced backend."""
    import pytransformer as pt

    found = leaves("attention", args, kwargs)
    for leaf in found.values():
        leaf.requires_grad_()
    out, lse = pt.attention(*args, **{**kwargs, "return_lse": True}, backend=backend, strict=True)
    outputs, grads = ([out], [grad_out]) if grad_lse is None else ([out, lse], [grad_out, grad_lse])
    gradients = torch.autograd.grad(outputs, list(found.values()), grads)
    return {"out": out, "lse": lse, **dict(zip(found, gradients))}


def check_attention(
    args: tuple[Any, ...], kwargs: dict[str, Any], backend: str, *, data: str = "zero_mean", seed: int = 0
) -> dict[str, Tensor]:
    """Assert that a call, with random upstream gradients, keeps within the bounds; returns its results."""
    query, _, value = args
    generator = torch.Generator().manual_seed(seed)
    grad_out = torch.randn(*query.shape[:3], value.shape[3], generator=generator).to(query.dtype)
    grad_lse = torch.randn(query.shape[:3], generator=generator)
    grad_lse = grad_lse.to(torch.float64 if query.dtype == torch.float64 else torch.float32)
    results = run_attention(args, kwargs, backend, grad_out, grad_lse)
    solution = oracle.solve(*args, grad_out, grad_lse, **kwargs)
    wrong = [str(c) for c in bounds.check(solution, results, query.dtype, data) if not c.ok]
    assert not wrong, "\n".join(wrong)
    return results
