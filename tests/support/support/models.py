# SPDX-License-Identifier: Apache-2.0
"""The agreement of two implementations of a model."""

from __future__ import annotations

import torch

from pytransformer.testing.bounds import AUTOCAST as AUTOCAST
from pytransformer.testing.bounds import CURVE as CURVE
from pytransformer.testing.bounds import ELEMENT as ELEMENT
from pytransformer.testing.bounds import GRADIENT as GRADIENT
from pytransformer.testing.bounds import GRADIENT_SIZE as GRADIENT_SIZE
from pytransformer.testing.bounds import LOGITS as LOGITS
from pytransformer.testing.bounds import OUTPUT_SIZE as OUTPUT_SIZE
from pytransformer.testing.bounds import TRAINED as TRAINED
from pytransformer.testing.bounds import TRAINED_LEAST as TRAINED_LEAST


def random_sum(out: torch.Tensor) -> torch.Tensor:
    """Return a loss for comparing gradients: the sum of ``out`` times fixed normal weights.

    The gradient through a final norm loses the weights' row mean and their component along the
    output. Random weights retain nearly everything, so gradients are as exact as their terms. A
    ramp over all elements (nearly constant in a row) retains little. ``out.square().sum()`` retains
    nothing, because the norm makes it constant and all gradients are rounding errors.
    """
    generator = torch.Generator().manual_seed(11)
    return (out * torch.randn(out.shape, generator=generator).to(out)).sum()


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raise AssertionError unless max|ours - theirs| <= LOGITS * max(1, max|theirs|).

    Both must be finite.
    """
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} but expected {tuple(theirs.shape)}"
    assert ours.isfinite().all() and theirs.isfinite().all()
    worst, scale = (ours - theirs).abs().max().item(), max(1.0, theirs.abs().max().item())
    assert worst <= LOGITS * scale, f"logits differ by {worst:.2e}, allowed {LOGITS * scale:.2e}"


def assert_same_gradient(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Raise AssertionError unless |ours - theirs| <= GRADIENT * |theirs| in the 2-norm.

    `theirs` must not be zero.
    """
    assert ours.shape == theirs.shape
    assert theirs.norm() > 0
    worst = ((ours - theirs).norm() / theirs.norm()).item()
    assert worst <= GRADIENT, f"gradients differ by {worst:.2e}, allowed {GRADIENT:.2e}"


def assert_same_elements(
    ours: torch.Tensor, theirs: torch.Tensor, *, gradient: bool = False
) -> None:
    """Raise AssertionError unless all attention outputs or gradients are within :data:`ELEMENT`."""
    size = GRADIENT_SIZE if gradient else OUTPUT_SIZE
    torch.testing.assert_close(ours, theirs, rtol=ELEMENT, atol=size * ELEMENT)


def assert_same_training(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Raise AssertionError unless the trained weights agree within :data:`TRAINED`."""
    assert ours.keys() == theirs.keys()

    def same(name: str) -> None:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=TRAINED, atol=TRAINED_LEAST, msg=lambda m: f"{name}: {m}"
        )

    for name in ours:
        same(name)
