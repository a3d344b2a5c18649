# SPDX-License-Identifier: Apache-2.0
"""Peers of `layer_norm`, `rms_norm` and `add_norm`: the formula, and torch.nn.functional."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from pytransformer.cli.providers import (
    NAIVE,
    TORCH,
    Outputs,
    Prepared,
    Problem,
    Provider,
    Row,
    Unsupported,
    compiled,
    installed,
)


def _naive_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, kind: str
) -> torch.Tensor:
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _torch_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, kind: str
) -> torch.Tensor:
    if kind == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _prepare(problem: Problem, norm: Any, label: str) -> Prepared:
    named, op = problem.named, problem.case.op
    x, weight, bias = named["x"], named.get("weight"), named.get("bias")
    kind = named.get("kind", "rms" if op == "rms_norm" else "layer")
    eps = named.get("eps", 1e-5)
    if eps is None:
        eps = torch.finfo(problem.dtype).eps
    if op != "add_norm":
        return Prepared(label, lambda: (norm(x, weight, bias, eps, kind),))
    residual, dropout = named["residual"], problem.dropout

    def forward() -> Outputs:
        total = residual + (F.dropout(x, dropout) if dropout else x)
        return norm(total, weight, bias, eps, kind), total

    return Prepared(f"{label} of residual + x", forward, own_dropout=dropout > 0)


def prepare_naive(problem: Problem) -> Prepared:
    return _prepare(problem, _naive_norm, "mean, rsqrt and product, in the inputs' dtype")


def prepare_torch(problem: Problem) -> Prepared:
    rms = problem.case.op == "rms_norm" or problem.named.get("kind") == "rms"
    return _prepare(problem, _torch_norm, "F.rms_norm" if rms else "F.layer_norm")


def prepare_liger(problem: Problem) -> Prepared:
    """Prepare Liger's norms; they need a weight and have no dropout."""
    if problem.device != "cuda":
        raise Unsupported("Liger-Kernel runs on GPUs only")
    functional = installed("liger-kernel", "liger_kernel.transformers.functional")
    named, op = problem.named, problem.case.op
    x, weight, bias, eps = (
        named["x"],
        named.get("weight"),
        named.get("bias"),
        named.get("eps", 1e-5),
    )
    rms = op == "rms_norm" or named.get("kind") == "rms"
    if problem.dropout or weight is None:
        raise Unsupported("Liger-Kernel's norms have a weight and no dropout")
    if op == "add_norm":
        if not rms:
            raise Unsupported("Liger-Kernel adds a residual before its RMS norm only")
        return Prepared(
            "liger_fused_add_rms_norm",
            lambda: functional.liger_fused_add_rms_norm(x, named["residual"], weight, eps),
        )
    if rms:
        eps = torch.finfo(problem.dtype).eps if eps is None else eps
        return Prepared("liger_rms_norm", lambda: (functional.liger_rms_norm(x, weight, eps),))
    if bias is None:
        raise Unsupported("Liger-Kernel's layer norm has a bias")
    return Prepared(
        "liger_layer_norm", lambda: (functional.liger_layer_norm(x, weight, bias, eps),)
    )


def prepare_quack(problem: Problem) -> Prepared:
    """Prepare quack's RMS norm, or its layer norm with weights in float32."""
    if problem.device != "cuda":
        raise Unsupported("quack runs on Hopper GPUs and later only")
    quack = installed("quack-kernels", "quack")
    named, op = problem.named, problem.case.op
    x, weight, bias = named["x"], named.get("weight"), named.get("bias")
    if op == "rms_norm":
        eps = torch.finfo(problem.dtype).eps if named.get("eps") is None else named["eps"]
        return Prepared("quack.rmsnorm", lambda: (quack.rmsnorm(x, weight, eps=eps),))
    if op == "add_norm" or named.get("kind", "layer") != "layer":
        raise Unsupported("quack is compared on rms_norm and layer_norm only")
    if weight is None:
        raise Unsupported("quack's layer norm has a weight")
    norm = installed("quack-kernels", "quack.rmsnorm")
    eps = named.get("eps", 1e-5)
    # Convert outside the clock, which favors quack.
    floats = [None if t is None else t.detach().float() for t in (weight, bias)]

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1])
            if not any(ctx.needs_input_grad):
                return norm.layernorm_fwd(rows, *floats, eps).view_as(x)
            y, rstd, mean = norm.layernorm_fwd(rows, *floats, eps, True, True)
            ctx.save_for_backward(rows, rstd, mean)
            return y.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            rows, rstd, mean = ctx.saved_tensors
            given = norm.layernorm_bwd(
                rows, floats[0], grads[0].reshape_as(rows), rstd, mean, bias is not None
            )
            d_x, *d_weights = given
            inputs = (weight, bias)
            return d_x.view_as(grads[0]), *(
                None if t is None or d is None else d.to(t.dtype)
                for t, d in zip(inputs, d_weights, strict=True)
            )

    return Prepared("quack.rmsnorm.layernorm_fwd", lambda: (LayerNorm.apply(x, weight, bias),))


PROVIDERS = dict.fromkeys(
    ("layer_norm", "rms_norm", "add_norm"),
    (
        Provider(NAIVE, prepare_naive),
        Provider(TORCH, prepare_torch),
        compiled(prepare_naive),
        Provider("liger", prepare_liger),
        Provider("quack", prepare_quack),
    ),
)
_ROWS = {"rows": 4096, "d": 512}
QUICK = (
    Row("layer_norm", _ROWS, ("float32",)),
    Row("rms_norm", _ROWS, ("float32",)),
    Row("add_norm", _ROWS),
)
_LARGE = {"rows": 8192, "d": 1024}
SUITES = {
    "aims": tuple(
        Row(name, _LARGE) for name in ("layer_norm", "rms_norm", "add_norm", "add_norm_dropout")
    ),
    "isa": (Row("add_norm", _LARGE),),
}
