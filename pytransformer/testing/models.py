# SPDX-License-Identifier: Apache-2.0
"""Limits for the agreement of two implementations of a model."""

from __future__ import annotations

import torch

# For float32 logits, relative to max(1, max|logit|). Two correct computations of the small test
# models differ by 1e-7 to 3e-6; an approximate GELU or a wrong eps gives 1e-4 and more.
LOGITS = 5e-5
# Relative 2-norm difference of a parameter's float32 gradients.
GRADIENT = 5e-5
# Relative difference of a small model's loss under bfloat16 autocast: a few roundings of 2^-9 per
# layer.
AUTOCAST = 2e-2
# Relative difference of two float64 losses after 50 training steps: rounding only (4e-15 measured).
CURVE = 1e-12
# For elements of one float32 attention with magnitude about 1, relative and absolute; gradients sum
# more terms.
ELEMENT = 32 * torch.finfo(torch.float32).eps
OUTPUT_SIZE, GRADIENT_SIZE = 4.0, 8.0
# For weights, relative and absolute, and losses after a few float32 training steps with another
# summation order. Adam divides small gradients, and thus their rounding errors, by their magnitude.
TRAINED, TRAINED_LEAST = 1e-4, 1e-5


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
