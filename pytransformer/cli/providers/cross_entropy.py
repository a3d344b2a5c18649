# SPDX-License-Identifier: Apache-2.0
"""Peers of `linear_cross_entropy`: the formula, and `F.cross_entropy` of `F.linear`."""

from __future__ import annotations

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


def _keywords(problem: Problem) -> tuple[torch.Tensor | None, int, float, str]:
    named = problem.named
    return (
        named.get("bias"),
        named.get("ignore_index", -100),
        named.get("label_smoothing", 0.0),
        named.get("reduction", "mean"),
    )


def _softcap_and_z_loss(problem: Problem) -> tuple[float, float]:
    return problem.named.get("softcap") or 0.0, problem.named.get("z_loss_weight", 0.0)


def prepare_naive(problem: Problem) -> Prepared:
    x, weight, target = (problem.named[name] for name in ("x", "weight", "target"))
    bias, ignored, smoothing, reduction = _keywords(problem)
    if smoothing:
        raise Unsupported("the naive code has no label smoothing")
    softcap, factor = _softcap_and_z_loss(problem)
    valid = target != ignored
    index = torch.where(valid, target, 0)[:, None]

    def forward() -> Outputs:
        logits = x @ weight.t()
        if bias is not None:
            logits = logits + bias
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        lse = torch.logsumexp(logits, -1)
        loss = lse - logits.gather(1, index)[:, 0]
        if factor:
            loss = loss + factor * lse**2
        loss = torch.where(valid, loss, 0.0)
        return (
            loss
            if reduction == "none"
            else loss.sum()
            if reduction == "sum"
            else loss.sum() / valid.sum(),
        )

    return Prepared("logsumexp(z) - z[target], z = x @ w.t(), in the inputs' dtype", forward)


def prepare_torch(problem: Problem) -> Prepared:
    x, weight, target = (problem.named[name] for name in ("x", "weight", "target"))
    bias, ignored, smoothing, reduction = _keywords(problem)
    if any(_softcap_and_z_loss(problem)):
        raise Unsupported("PyTorch's cross entropy has no softcap and no z-loss")
    return Prepared(
        "F.cross_entropy(F.linear(x, w))",
        lambda: (
            F.cross_entropy(
                F.linear(x, weight, bias),
                target,
                ignore_index=ignored,
                label_smoothing=smoothing,
                reduction=reduction,
            ),
        ),
    )


def prepare_liger(problem: Problem) -> Prepared:
    """Prepare Liger's fused loss, which computes its gradients in forward."""
    if problem.device != "cuda":
        raise Unsupported("Liger-Kernel runs on GPUs only")
    functional = installed("liger-kernel", "liger_kernel.transformers.functional")
    x, weight, target = (problem.named[name] for name in ("x", "weight", "target"))
    bias, ignored, smoothing, reduction = _keywords(problem)
    softcap, factor = _softcap_and_z_loss(problem)
    if reduction == "none":
        raise Unsupported("Liger-Kernel has no gradients of the loss per row")
    settings = {
        "ce_weight": problem.named.get("class_weight"),
        "ignore_index": ignored,
        "lse_square_scale": factor,
        "label_smoothing": smoothing,
        "reduction": reduction,
        "softcap": softcap or None,
    }
    return Prepared(
        "liger_fused_linear_cross_entropy",
        lambda: (functional.liger_fused_linear_cross_entropy(x, weight, target, bias, **settings),),
    )


PROVIDERS = {
    "linear_cross_entropy": (
        Provider(NAIVE, prepare_naive),
        Provider(TORCH, prepare_torch),
        compiled(prepare_naive),
        Provider("liger", prepare_liger),
    )
}
QUICK = (Row("linear_cross_entropy", {"rows": 256, "d": 256, "classes": 8192}, ("float32",)),)
_LARGE = (Row("linear_cross_entropy", {"rows": 1024, "d": 512, "classes": 8192}),)
_SOFTCAP = (Row("linear_cross_entropy_softcap", {"rows": 1024, "d": 512, "classes": 8192}),)
SUITES = {"aims": (*_LARGE, *_SOFTCAP), "isa": _LARGE}
