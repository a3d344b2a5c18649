# SPDX-License-Identifier: Apache-2.0
"""When two implementations of a model agree: the limits, in one place."""

from __future__ import annotations

import torch

# Of logits in float32, relative to max(1, max|logit|). Two correct computations of the small test models differ by 1e-7 to
# 3e-6; an approximate GELU for the exact one, or a wrong eps, by 1e-4 and more.
LOGITS = 5e-5
# Relative 2-norm of the difference of a parameter's gradients in float32.
GRADIENT = 5e-5
# Relative difference of a small model's loss under bfloat16 autocast: a few roundings of 2^-9 a layer.
AUTOCAST = 2e-2
# Relative difference of two float64 losses after 50 steps of training: rounding only; 4e-15 was seen.
CURVE = 1e-12
# Elements of one attention in float32, of size about 1, relative and absolute; gradients add up more terms.
ELEMENT = 32 * torch.finfo(torch.float32).eps
OUTPUT_SIZE, GRADIENT_SIZE = 4.0, 8.0
# Weights, relative and absolute, and losses after a few steps of training in float32, added up in another order: Adam
# divides small gradients by their own size, and so their rounding too.
TRAINED, TRAINED_LEAST = 1e-4, 1e-5


def random_sum(out: torch.Tensor) -> torch.Tensor:
    """A loss to differentiate where two computations are compared: the sum of ``out`` times fixed standard normal numbers.

    The gradient of what ends in a norm has the weights' mean over a row, and their share along the output itself, taken off. Of random
    weights nearly all is left, so that gradients are as exact as their terms. Of a ramp over all elements (alike within a row) little is
    left, and of ``out.square().sum()`` nothing: the norm makes that sum constant, and all gradients are rounding.
    """
    generator = torch.Generator().manual_seed(11)
    return (out * torch.randn(out.shape, generator=generator).to(out)).sum()


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """AssertionError, with the figures, unless max|ours - theirs| <= LOGITS * max(1, max|theirs|), all finite."""
    assert ours.shape == theirs.shape, f"{tuple(ours.shape)} but expected {tuple(theirs.shape)}"
    assert ours.isfinite().all() and theirs.isfinite().all()
    worst, scale = (ours - theirs).abs().max().item(), max(1.0, theirs.abs().max().item())
    assert worst <= LOGITS * scale, f"logits differ by {worst:.2e}, allowed {LOGITS * scale:.2e}"


def assert_same_gradient(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """AssertionError unless |ours - theirs| <= GRADIENT * |theirs| in the 2-norm, and theirs is not zero."""
    assert ours.shape == theirs.shape
    assert theirs.norm() > 0
    worst = ((ours - theirs).norm() / theirs.norm()).item()
    assert worst <= GRADIENT, f"gradients differ by {worst:.2e}, allowed {GRADIENT:.2e}"


def assert_same_elements(ours: torch.Tensor, theirs: torch.Tensor, *, gradient: bool = False) -> None:
    """AssertionError unless each element of these attention outputs, or gradients, is within :data:`ELEMENT`."""
    size = GRADIENT_SIZE if gradient else OUTPUT_SIZE
    torch.testing.assert_close(ours, theirs, rtol=ELEMENT, atol=size * ELEMENT)


def assert_same_training(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """AssertionError unless these are the weights of the same training, within :data:`TRAINED`."""
    assert ours.keys() == theirs.keys()

    def same(name: str) -> None:
        torch.testing.assert_close(ours[name], theirs[name], rtol=TRAINED, atol=TRAINED_LEAST, msg=lambda m: f"{name}: {m}")

    for name in ours:
        same(name)
