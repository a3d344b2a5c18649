# SPDX-License-Identifier: Apache-2.0
"""PyTorch's CPU attention kernels and ours on problems that both support; see `calibrate`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pytransformer.testing import bounds, oracle

from .attention_problem import Problem
from .checks import Calibration
from .draw_attention import draw

KEYWORDS = frozenset({"attn_mask", "causal", "scale", "return_lse"})
KERNELS = {"PyTorch math": SDPBackend.MATH, "PyTorch flash": SDPBackend.FLASH_ATTENTION}


def problem(seed: int, case: int) -> Problem | None:
    """Return a problem that PyTorch's kernels support, or None.

    Its tensors are contiguous and its mask has query's dtype.
    """
    p = draw(seed, case, KEYWORDS)
    if p.keywords.get("causal") == "bottom_right":
        p.keywords["causal"] = "top_left"
    if "attn_mask" in p.features:
        p.keywords.pop("causal", None)  # MATH refuses a mask together with is_causal
    p.tensors = {n: t.contiguous() for n, t in p.tensors.items()}
    if "attn_mask" in p.tensors:
        p.tensors["attn_mask"] = p.tensors["attn_mask"].to(p.dtype)
    if p.keywords.get("scale", 1.0) <= 0:
        # The flash kernel returns NaN for causal problems with such a scale.
        del p.keywords["scale"]
    p.keywords.pop("return_lse", None)
    p.grad_out, p.grad_lse = p.grad_out.contiguous(), None
    p.wanted = ("query", "key", "value")
    empty = 0 in p.tensors["query"].shape or 0 in p.tensors["key"].shape
    return None if empty else p


def pytorch(p: Problem, kernel: SDPBackend) -> dict[str, Tensor]:
    """Return output and gradients of the problem from one of PyTorch's kernels."""
    leaves = {n: p.tensors[n].detach().requires_grad_() for n in p.wanted}
    mask = p.tensors.get("attn_mask", p.keywords.get("attn_mask"))
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
    with sdpa_kernel(kernel):
        out = F.scaled_dot_product_attention(
            leaves["query"],
            leaves["key"],
            leaves["value"],
            attn_mask=mask,
            is_causal="causal" in p.keywords,
            scale=p.keywords.get("scale"),
            enable_gqa=p.tensors["query"].shape[1] != p.tensors["key"].shape[1],
        )
    grads = torch.autograd.grad(out, list(leaves.values()), p.grad_out)
    return {"out": out, **dict(zip(leaves, grads))}


def ours(p: Problem, backend: str) -> dict[str, Tensor]:
    """Return output and gradients from a backend of this package."""
    import pytransformer as pt

    leaves = {n: p.tensors[n].detach().requires_grad_() for n in p.wanted}
    out = pt.attention(
        leaves["query"],
        leaves["key"],
        leaves["value"],
        **p.public_keywords({k: t for k, t in p.tensors.items() if k not in leaves}),
        backend=backend,
        strict=True,
    )
    grads = torch.autograd.grad(out, list(leaves.values()), p.grad_out)
    return {"out": out, **dict(zip(leaves, grads))}


def solve(p: Problem) -> oracle.Solution:
    return p.solve()


CALIBRATION = Calibration(
    problem,
    solve,
    {name: partial(pytorch, kernel=kernel) for name, kernel in KERNELS.items()},
    ours,
    ("out", "query", "key", "value"),
    lambda p: (p.limits, bounds.LIMITS),
)
