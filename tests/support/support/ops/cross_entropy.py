# SPDX-License-Identifier: Apache-2.0
"""linear_cross_entropy: fuzzer, mutants, calibration."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from pytransformer.ops.cross_entropy import linear_cross_entropy
from pytransformer.testing.case import Problem
from pytransformer.testing.exact_cross_entropy import LIMITS, solve
from pytransformer.testing.oracle import exact

from .. import fuzz_cross_entropy
from ..calibration import plain_calibration, usual
from ..checks import Checks, Fuzzer, Mutants
from ..faults import BACKWARD_FAULTS
from ..mutants_cross_entropy import FAULTS


def results_at_offset(offset: float, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Return loss, dx, dweight and dbias of logits that share ``offset``.

    All logits are multiples of 1/4 below 2^22, so float32 holds them exactly and the offset must
    not change a single bit.
    """
    draw = torch.Generator().manual_seed(0)
    integers = lambda *shape: torch.randint(-2, 3, shape, generator=draw)
    x, weight = (
        integers(40, 16).to(dtype).requires_grad_(),
        (integers(300, 16) / 4).to(dtype).requires_grad_(),
    )
    bias = torch.full((300,), offset).requires_grad_()
    target = torch.randint(0, 300, (40,), generator=draw)
    loss = linear_cross_entropy(x, weight, target, bias=bias, backend=backend, strict=True)
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight, bias))]


def _plain(p: Problem, t: Mapping[str, Tensor]) -> Tensor:
    logits = F.linear(t["x"], t["weight"], t.get("bias")).reshape(-1, t["weight"].shape[0])
    keywords = dict(p.keywords)
    softcap, factor = keywords.pop("softcap", None), keywords.pop("z_loss_weight", 0.0)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    target, weight = t["target"].reshape(-1), t.get("class_weight")
    losses = F.cross_entropy(logits, target, weight, **keywords)
    if factor:
        valid = target != keywords.get("ignore_index", -100)
        z_losses = torch.where(valid, factor * torch.logsumexp(logits, 1) ** 2, 0.0)
        how = keywords["reduction"]
        of_z = z_losses if how == "none" else z_losses.sum() / (valid.sum() if how == "mean" else 1)
        losses = losses + of_z
    losses = losses.view(t["target"].shape) if p.keywords["reduction"] == "none" else losses
    # PyTorch's loss has its logits' dtype and is compared in that dtype's eps.
    return losses.to(torch.float64 if p.dtype == torch.float64 else torch.float32)


def _ours(p: Problem, t: Mapping[str, Tensor], backend: str) -> Tensor:
    import pytransformer as pt

    return pt.linear_cross_entropy(
        t["x"],
        t["weight"],
        t["target"],
        bias=t.get("bias"),
        class_weight=t.get("class_weight"),
        **p.keywords,
        backend=backend,
        strict=True,
    )


def _problem(seed: int, case: int) -> Problem | None:
    p = usual(fuzz_cross_entropy.draw(seed, case), as_drawn=("target", "grad_out"))
    if p is None or "ignored_nan" in p.features:
        return None
    for name in ("return_z_loss", "return_accuracy"):
        p.keywords.pop(name, None)
    over_nothing = p.keywords["reduction"] == "mean" and bool(
        (p.tensors["target"] == p.keywords.get("ignore_index", -100)).all()
    )
    return None if over_nothing else p


CHECKS = Checks(
    fuzzer=Fuzzer(
        fuzz_cross_entropy.draw,
        fuzz_cross_entropy.examine,
        features=(
            *fuzz_cross_entropy.REDUCTIONS,
            *("bias", "ignore_index", "ignored", "label_smoothing", "strided", "positive", "large"),
            *("softcap", "z_loss_weight", "class_weight", "return_accuracy"),
        ),
        rare=("ignored_nan",),
    ),
    mutants=Mutants(
        ("linear_cross_entropy",),
        FAULTS,
        {n: f for n, f in BACKWARD_FAULTS.items() if "dropout" not in n},  # this op has no dropout
    ),
    calibration=plain_calibration(
        _problem,
        lambda p: exact(solve(p)),
        _plain,
        _ours,
        ("loss", "x", "weight", "bias"),
        LIMITS,
    ),
)
