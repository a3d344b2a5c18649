# SPDX-License-Identifier: Apache-2.0
"""Fused linear layer and cross entropy: public function and raw op.

See docs/ops/cross_entropy.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, get_args, overload

import torch

from ..reference._cross_entropy import cross_entropy_forward
from ._backends.cpu import cross_entropy as cpu
from ._backends.cuda import cross_entropy as cuda
from ._backends.triton import cross_entropy as triton
from ._core import fast_path
from ._core.autograd import needs_gradient, transforming
from ._core.op import Op, may_overwrite_saved
from ._core.registry import Backend, check_backend
from ._core.tensors import (
    as_integer,
    autocast,
    check_choice,
    check_number,
    check_same,
    check_tensor,
    empty_in_order,
    is_sharded,
    shape_of,
)
from ._problem.cross_entropy import reduced_z_loss
from .options import Reduction

# softcap 0 disables the cap. accuracy: forward writes `correct`. save: what forward saves for
# backward besides the split lse: "" without a backward, "logits" if they are small and on the CPU,
# or the gradients of a reduced loss, by the names of x, weight and bias that need one.
ARGUMENTS = (
    "Tensor x, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight, int ignore_index,"
    " float label_smoothing, float softcap, float z_loss_weight, str reduction, bool accuracy,"
    " str save"
)
DIFFERENTIABLE = ("x", "weight", "bias")
REDUCTIONS = get_args(Reduction)
# up to this size forward saves x weightᵀ, which saves backward one of three products
KEPT_BYTES = 64 << 20
KEPT_DEPTH = (
    # minimum depth (twice that in bfloat16); below it the product takes less time than its memory
    # traffic
    128
)


def _empty(a: Any) -> tuple[torch.Tensor, ...]:
    work = torch.float64 if a.x.dtype == torch.float64 else torch.float32
    rows = a.target.shape
    shape = rows if a.reduction == "none" else ()
    kept = (*rows, a.weight.shape[0]) if keeps(a) else (0,)
    loss, split_lse, product, correct = (
        torch.empty(s, dtype=work, device=a.x.device)
        for s in (shape, (2, *rows), kept, rows if a.accuracy else (0,))
    )
    early = early_names(a)
    gradients = (
        empty_in_order(t) if name in early else a.x.new_empty(0)
        for name, t in zip(DIFFERENTIABLE, (a.x, a.weight, a.bias))
    )
    return loss, split_lse, product, *gradients, correct


def early_names(a: Any) -> list[str]:
    """Return the names of the gradients that forward computes."""
    return [] if a.save == "logits" else a.save.split()


def keeps(a: Any) -> bool:
    """Return true if forward saves x weightᵀ for backward.

    Only the CPU does; GPU backward kernels recompute it.
    """
    if a.save != "logits" or a.x.device.type != "cpu":
        return False
    classes, depth = a.weight.shape
    size = math.prod(a.target.shape) * classes * (8 if a.x.dtype == torch.float64 else 4)
    return size <= KEPT_BYTES and depth > KEPT_DEPTH * (2 if a.x.dtype == torch.bfloat16 else 1)


def _product_flops(a: Any) -> int:
    return 2 * a.x.numel() * a.weight.shape[0]


def _forward_flops(a: Any) -> int:
    return (1 + len({"x", "weight"}.intersection(early_names(a)))) * _product_flops(a)


def _backward_flops(a: Any) -> int:
    """Count the products for x, for weight, and of the recomputed logits."""
    return (0 if early_names(a) else 2 if keeps(a) else 3) * _product_flops(a)


linear_cross_entropy_op = Op(
    "linear_cross_entropy",
    arguments=ARGUMENTS,
    outputs=("loss", "split_lse", "product", "early_x", "early_weight", "early_bias", "correct"),
    differentiable_outputs=1,
    differentiable=DIFFERENTIABLE,
    saved=("split_lse", "product", "early_x", "early_weight", "early_bias"),
    empty_outputs=_empty,
    flops=(_forward_flops, _backward_flops),
    family="cross_entropy",
)


@overload
def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss_weight: float = 0.0,
    reduction: Reduction = "mean",
    return_z_loss: Literal[False] = False,
    return_accuracy: Literal[False] = False,
    backend: str | None = None,
    strict: bool = False,
) -> torch.Tensor: ...
@overload
def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss_weight: float = 0.0,
    reduction: Reduction = "mean",
    return_z_loss: bool = False,
    return_accuracy: bool = False,
    backend: str | None = None,
    strict: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]: ...
def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss_weight: float = 0.0,
    reduction: Reduction = "mean",
    return_z_loss: bool = False,
    return_accuracy: bool = False,
    backend: str | None = None,
    strict: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Compute ``cross_entropy(x @ weightᵀ + bias, target)`` without storing all logits.

    Args:
        x: (..., d), float32, bfloat16, float16 or float64.
        weight: (classes, d), as in torch.nn.Linear, of x's dtype.
        target: (...), int64 class indices. Values outside [0, classes) other than ignore_index
            raise on the CPU.
        bias: (classes,), any floating dtype, or None.
        class_weight: (classes,), any floating dtype, or None: ``weight`` of
            torch.nn.functional.cross_entropy. It scales every class's term of the loss; the mean
            divides by the sum of the targets' weights. It gets no gradient.
        ignore_index: rows with this target have loss 0 and no gradient, even if they hold NaN.
        label_smoothing: in [0, 1]; the share of the target spread evenly over all classes.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None disables it.
        z_loss_weight: adds ``z_loss_weight * logsumexp(logits)²`` to the loss of each row, without
            class weights. The mean divides it by the number of targets that are not ignored.
        reduction: ``"mean"`` over the targets that are not ignored (NaN if there is none),
            ``"sum"`` or ``"none"``.
        return_z_loss: return the z-loss too, which the loss contains; it has no gradient.
        return_accuracy: return the accuracy too: for ``"none"`` 1.0 for each target that is the
            argmax of its row (the first of equal maxima) and 0.0 for others and ignored targets,
            otherwise the mean over the targets that are not ignored.
        backend: force ``"triton"``, ``"cuda"``, ``"cpu"`` or ``"reference"``; raises if
            unsupported.
        strict: raise instead of running on the reference.

    Returns:
        The loss, float32 (float64 for float64): a scalar, or target's shape for ``"none"``. With
        return_z_loss or return_accuracy a tuple: loss, then z-loss, then accuracy.

    Raises:
        TypeError, ValueError: an argument is invalid; the message names it.
        BackendError: a forced backend does not support the call, or ``strict`` and only the
            reference supports it.

    Sources: Chowdhery et al., "PaLM" (2022), section 5 (z-loss); Gemma Team, "Gemma 2" (2024),
    section 2 (softcap).
    """
    if not torch.compiler.is_compiling():
        found = fast_path.entries.linear_cross_entropy(
            x, weight, target, bias, class_weight, ignore_index, label_smoothing, softcap,
            z_loss_weight, reduction, return_z_loss, return_accuracy, backend, strict,
        )  # fmt: skip
        if found is not NotImplemented:
            return found
    a, backend, strict = _prepare(
        x, weight, target, bias=bias, class_weight=class_weight, ignore_index=ignore_index,
        label_smoothing=label_smoothing, softcap=softcap, z_loss_weight=z_loss_weight,
        reduction=reduction, return_accuracy=return_accuracy, backend=backend, strict=strict,
    )  # fmt: skip
    loss, *rest = linear_cross_entropy_op(a, backend, strict)
    if not (return_z_loss or return_accuracy):
        return loss
    return loss, *_parts(a, rest, return_z_loss, return_accuracy)


def _parts(
    a: Any, rest: list[torch.Tensor], return_z_loss: bool, return_accuracy: bool
) -> list[torch.Tensor]:
    """Return the z-loss and the accuracy, if requested, from the outputs after the loss."""
    if not rest:
        raise ValueError(
            "linear_cross_entropy: return_z_loss and return_accuracy must be False for DTensors,"
            " got True; compute them from local tensors"
        )
    parts = [reduced_z_loss(a, rest[0].detach())] if return_z_loss else []
    if return_accuracy:
        correct = rest[-1].detach()
        count = (a.target != a.ignore_index).sum()
        parts.append(correct if a.reduction == "none" else correct.sum() / count)
    return parts


def _prepare(
    x: Any,
    weight: Any,
    target: Any,
    *,
    bias: Any = None,
    class_weight: Any = None,
    ignore_index: Any = -100,
    label_smoothing: Any = 0.0,
    softcap: Any = None,
    z_loss_weight: Any = 0.0,
    reduction: Any = "mean",
    return_z_loss: Any = False,
    return_accuracy: Any = False,
    backend: Any = None,
    strict: bool = False,
) -> tuple[Any, str | None, bool]:
    op = "linear_cross_entropy"
    check_tensor(op, "x", x, floating=True)
    check_tensor(op, "weight", weight, floating=True, ndim=2)
    check_tensor(op, "target", target)
    for name, t in (("weight", weight), ("target", target)):
        check_same(op, "x", x, name, t)
    if target.dtype != torch.int64:
        raise TypeError(f"{op}: target must be int64 class indices, got {target.dtype}")
    if x.dim() == 0 or x.shape[:-1] != target.shape:
        raise ValueError(
            f"{op}: target must have x's leading shape, got {shape_of(target)} for x of shape"
            f" {shape_of(x)}"
        )
    x, weight = autocast(x.device, x, weight)
    check_same(op, "x", x, "weight", weight, dtype=True)
    if weight.shape[1] != x.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"{op}: weight must be (classes, d) with d = {x.shape[-1]} and classes > 0, got"
            f" {shape_of(weight)}"
        )
    for name, t in (("bias", bias), ("class_weight", class_weight)):
        if t is None:
            continue
        check_tensor(op, name, t, floating=True)
        check_same(op, "x", x, name, t)
        if tuple(t.shape) != (weight.shape[0],):
            raise ValueError(
                f"{op}: {name} must have shape ({weight.shape[0]},), got {shape_of(t)}"
            )
    if class_weight is not None and class_weight.requires_grad:
        raise ValueError(
            f"{op}: class_weight must not require a gradient, because the op computes none;"
            " pass class_weight.detach()"
        )
    if (index := as_integer(ignore_index)) is None:
        raise TypeError(f"{op}: ignore_index must be an int, got {type(ignore_index).__name__}")
    smoothing = check_number(op, "label_smoothing", label_smoothing)
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must be between 0 and 1, got {smoothing}")
    cap = 0.0 if softcap is None else check_number(op, "softcap", softcap, positive=True)
    z_weight = check_number(op, "z_loss_weight", z_loss_weight)
    if z_weight < 0.0:
        raise ValueError(f"{op}: z_loss_weight must be at least 0, got {z_weight}")
    check_choice(op, "reduction", reduction, REDUCTIONS)
    check_backend(op, backend)
    a = linear_cross_entropy_op.Arguments(
        x, weight, target, bias, class_weight, index, smoothing, cap, z_weight, reduction,
        bool(return_accuracy), "logits" if needs_gradient(x, weight, bias) else "",
    )  # fmt: skip
    if a.save and _computes_gradients(a, backend):
        named = zip(DIFFERENTIABLE, (x, weight, bias))
        a = a._replace(save=" ".join(n for n, t in named if t is not None and t.requires_grad))
    return a, backend, bool(strict)


def _computes_gradients(a: Any, backend: str | None) -> bool:
    """Return true if forward computes the gradients of a reduced loss, which backward scales.

    That saves the product of the recomputed logits. Only ``cuda`` gains, in bfloat16 and without a
    softcap (see its module). Transforms and exported programs may need no gradient, so there
    forward computes none.
    """
    if a.x.dtype != torch.bfloat16 or a.reduction == "none" or a.softcap or a.accuracy:
        return False
    if a.class_weight is not None and a.label_smoothing:
        return False
    if torch.compiler.is_exporting() or is_sharded(a):
        return False
    if torch.compiler.is_compiling():  # choices and fast path are those of eager calls
        chosen = backend == "cuda" or (backend is None and a.x.is_cuda)
        return chosen and cuda.runs_on(a.x.device.type, a.x.device.index)
    if _product_flops(a) < cuda.early_flops() or transforming():
        return False
    return linear_cross_entropy_op.selects("cuda", a, backend)


linear_cross_entropy_op.prepare = _prepare
linear_cross_entropy_op.overwrites_saved = True
fast_path.facts |= {"kept_bytes": KEPT_BYTES, "kept_depth": KEPT_DEPTH}


def check_values(a: Any) -> None:
    wrong = (a.target != a.ignore_index) & ((a.target < 0) | (a.target >= a.weight.shape[0]))
    if bool(wrong.any()):
        raise ValueError(
            f"linear_cross_entropy: target must be between 0 and {a.weight.shape[0] - 1} or"
            f" ignore_index {a.ignore_index}, got {a.target[wrong][0].item()}"
        )


def _reference(a: Any) -> tuple[torch.Tensor, ...]:
    loss, split_lse, product, correct = cross_entropy_forward(a)
    none = a.x.new_zeros(0)
    kept = product if keeps(a) else product.new_zeros(0)
    return loss, split_lse, kept, none, none, none, correct


def _with_gradients(backend: Backend) -> Backend:
    """Return the backend with gradients in forward, which its backward scales.

    ``cuda`` saves a product. Another backend, if the choice changed after the call was prepared,
    runs its backward in forward.
    """

    def forward(a: Any) -> tuple[torch.Tensor, ...]:
        names = early_names(a)
        if not names or backend.name == "cuda":
            return backend.forward(a)
        loss, split_lse, product, *none, correct = backend.forward(a._replace(save=""))
        found = backend.backward(
            a, (torch.ones_like(loss),), (split_lse, product), [n in names for n in DIFFERENTIABLE]
        )
        early = (e if t is None else t for t, e in zip(found, none))
        return loss, split_lse, product, *early, correct

    def backward(
        a: Any,
        grads: Sequence[torch.Tensor | None],
        saved: Sequence[torch.Tensor],
        wanted: Sequence[bool],
    ) -> Sequence[torch.Tensor | None]:
        grad, early = grads[0], saved[2:]
        complete = early and all(t.numel() for t, want in zip(early, wanted) if want)
        if grad is None or not complete:
            return backend.backward(a, grads, saved[:2], wanted)
        last = may_overwrite_saved()
        return [cuda.scaled(t, grad, last) if want else None for t, want in zip(early, wanted)]

    return dataclasses.replace(backend, forward=forward, backward=backward)


def _reference_bytes(a: Any) -> int:
    """Return the bytes of the logits and their exponentials."""
    return (
        2 * math.prod(a.target.shape) * a.weight.shape[0] * (8 if a.x.dtype == torch.float64 else 4)
    )


linear_cross_entropy_op.add_reference(
    _reference, extra_bytes=_reference_bytes, check_values=check_values
)
for _backend in (
    linear_cross_entropy_op.backends["reference"],
    triton.backend(linear_cross_entropy_op, check_values),
    cuda.backend(linear_cross_entropy_op, check_values),
    cpu.backend(linear_cross_entropy_op, check_values, keeps),
):
    linear_cross_entropy_op.backend(_with_gradients(_backend))
