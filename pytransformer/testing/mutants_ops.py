"""Wrong norms, feed-forward networks and cross entropies that the fuzzer must find: each is the reference with one fault of a
kind that kernels have had. The counterpart of `mutants` for layer_norm, feed_forward and cross_entropy.

    with mutant_backends("feed_forward") as names:
        pytransformer.feed_forward(x, w1, b1, w2, b2, backend=names[0])
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..ops._core.registry import OPS, Backend
from .mutants import stored

# The modules: the package holds functions of the same names.
norms = importlib.import_module("pytransformer.reference.layer_norm")
networks = importlib.import_module("pytransformer.reference.feed_forward")
entropies = importlib.import_module("pytransformer.reference.cross_entropy")

Outputs = tuple[Tensor, ...]
Fault = Callable[[Any, Callable[[Any], Outputs]], Outputs]
OPS_OF = {
    "layer_norm": ("layer_norm", "rms_norm", "add_norm"),
    "feed_forward": ("feed_forward",),
    "cross_entropy": ("linear_cross_entropy",),
}


def value_of(value: Tensor, gradient_of: Tensor) -> Tensor:
    """The value of one tensor with the derivative of another."""
    return value.detach() + (gradient_of - gradient_of.detach())


def _replacing(**change: Callable[[Any], Any]) -> Fault:
    """A fault that changes arguments; None means that this problem does not have the argument."""

    def fault(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
        present = {n: f(a) for n, f in change.items() if getattr(a, n, None) is not None}
        return forward(a._replace(**present))

    return fault


def _outputs(change: Callable[[Tensor], Tensor]) -> Fault:
    """A fault that changes the first output."""

    def fault(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
        first, *rest = forward(a)
        return change(first), *rest

    return fault


def _patching(module: Any, **names: Callable[..., Any]) -> Fault:
    """A fault that replaces functions of the reference's module; each gets the original first."""

    def fault(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
        with contextlib.ExitStack() as stack:
            for name, f in names.items():
                original = getattr(module, name)
                stack.enter_context(mock.patch.object(module, name, lambda *x, f=f, o=original: f(o, *x)))
            return forward(a)

    return fault


def _one_pass_variance(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    """rstd from E[h^2] - E[h]^2."""
    out, *rest = forward(a)
    if getattr(a, "rms", a.__class__.__name__.startswith("rms")):
        return out, *rest
    h = (rest[0] if len(rest) == 3 else a.x).detach().to(rest[-1].dtype)
    over = tuple(range(-a.dims, 0))
    variance = h.square().mean(over) - h.mean(over).square()
    wrong = (variance.clamp(min=0) + a.eps).rsqrt() / rest[-1].detach()
    factor = wrong.reshape(*wrong.shape, *(1,) * a.dims)
    bias = 0.0 if a.bias is None else a.bias.to(h.dtype)
    return ((out.to(h.dtype) - bias) * factor + bias).to(out.dtype), *rest


def _norm_of_the_unrounded_sum(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    if not hasattr(a, "residual"):
        return forward(a)
    wide = (
        a._replace(x=a.x.float(), residual=None if a.residual is None else a.residual.float())
        if a.x.dtype != torch.float64
        else a
    )
    normed, _, *rest = forward(wide)
    return normed.to(a.x.dtype), forward(a)[1], *rest


def _stream_gradient_ignored(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    outputs = forward(a)
    return (
        outputs if len(outputs) < 4 else (outputs[0], outputs[1].detach() + 0 * outputs[0].to(outputs[1].dtype), *outputs[2:])
    )


def _different_every_time(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    out, *rest = forward(a)
    return out * (1 + 1e-7 * torch.rand(()).to(out.dtype)), *rest


def _as_contiguous(t: Tensor) -> Tensor:
    """The elements that a kernel finds which takes t for contiguous."""
    end = t.storage_offset() + t.numel()
    if end * t.element_size() > t.untyped_storage().nbytes():
        return t.new_zeros(t.shape)
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.contiguous().stride())


def _shifted(keep: Callable[..., Tensor], *arguments: Any) -> Tensor:
    return keep(*arguments).roll(1, -1)


def _mean_over_all_targets(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    loss, *rest = forward(a)
    return (loss if a.reduction != "mean" else loss * (a.target != a.ignore_index).sum() / a.target.numel()), *rest


def _largest_logit_not_subtracted(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    """exp overflows float32 where a logit is past 88."""
    with mock.patch.object(torch, "logsumexp", lambda z, dim: z.float().exp().sum(dim).log().to(z.dtype)):
        return forward(a)


def _last_class_dropped(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    """From the normaliser: what a kernel does that takes whole vectors of classes only."""
    whole = torch.logsumexp
    with mock.patch.object(torch, "logsumexp", lambda z, dim: whole(z[..., :-1] if z.shape[-1] > 1 else z, dim)):
        return forward(a)


def _ignored_rows_counted(a: Any, forward: Callable[[Any], Outputs]) -> Outputs:
    fits = (a.target >= 0) & (a.target < a.weight.shape[0])
    return forward(a._replace(ignore_index=-12345, target=torch.where(fits, a.target, 0)))


FAITHFUL: Fault = lambda a, forward: forward(a)

FAULTS: dict[str, dict[str, Fault]] = {
    "layer_norm": {
        "faithful": FAITHFUL,
        "scale_off_by_0.4_percent": _outputs(lambda y: y * 1.004),
        "one_pass_variance": _one_pass_variance,
        "eps_ignored": _replacing(eps=lambda a: 0.0),
        "eps_always_1e-5": _replacing(eps=lambda a: 1e-5),
        "weight_ignored": _replacing(weight=lambda a: value_of(torch.ones_like(a.weight), a.weight)),
        "bias_ignored": _replacing(bias=lambda a: value_of(torch.zeros_like(a.bias), a.bias)),
        "weight_rounded_to_half": _replacing(weight=lambda a: value_of(a.weight.half().to(a.weight.dtype), a.weight)),
        "weight_gradient_dropped": _replacing(weight=lambda a: a.weight.detach()),
        "bias_gradient_dropped": _replacing(bias=lambda a: a.bias.detach()),
        "bias_gradient_off_by_0.4_percent": _replacing(bias=lambda a: value_of(a.bias, 1.004 * a.bias)),
        "residual_gradient_dropped": _replacing(residual=lambda a: a.residual.detach()),
        "stream_gradient_ignored": _stream_gradient_ignored,
        "norm_of_the_unrounded_sum": _norm_of_the_unrounded_sum,
        "dropout_shifted_by_a_column": _patching(norms, column_keep_mask=_shifted),
        "dropout_with_the_tag_of_feed_forward": _patching(norms, column_keep_mask=lambda keep, *a: keep(*a[:-1], 0x80000002)),
        "dropout_not_scaled": _patching(norms, keep_scale=lambda scale, p: 1.0),
        "dropout_scaled_by_p_alone": _patching(norms, keep_scale=lambda scale, p: 1 / (1 - p) if p < 1 else 0.0),
        "x_read_as_contiguous": _replacing(x=lambda a: value_of(_as_contiguous(a.x), a.x)),
        "different_every_time": _different_every_time,
    },
    "feed_forward": {
        "faithful": FAITHFUL,
        "scale_off_by_0.4_percent": _outputs(lambda y: y * 1.004),
        "b1_ignored": _replacing(b1=lambda a: value_of(torch.zeros_like(a.b1), a.b1)),
        "b2_ignored": _replacing(b2=lambda a: value_of(torch.zeros_like(a.b2), a.b2)),
        "gate_bias_ignored": _replacing(gate_bias=lambda a: value_of(torch.zeros_like(a.gate_bias), a.gate_bias)),
        "b1_gradient_dropped": _replacing(b1=lambda a: a.b1.detach()),
        "b2_gradient_dropped": _replacing(b2=lambda a: a.b2.detach()),
        "gate_gradient_dropped": _replacing(gate_weight=lambda a: a.gate_weight.detach()),
        "w2_gradient_off_by_0.4_percent": _replacing(w2=lambda a: value_of(a.w2, 1.004 * a.w2)),
        "gelu_by_tanh": _replacing(activation=lambda a: "gelu_tanh" if a.activation == "gelu" else a.activation),
        "silu_for_gelu": _replacing(activation=lambda a: "silu" if a.activation == "gelu" else a.activation),
        "gate_and_up_exchanged": lambda a, forward: forward(
            a if a.gate_weight is None else a._replace(w1=a.gate_weight, gate_weight=a.w1, b1=a.gate_bias, gate_bias=a.b1)
        ),
        "dropout_shifted_by_a_column": _patching(networks, column_keep_mask=_shifted),
        "dropout_with_the_tag_of_add_norm": _patching(networks, column_keep_mask=lambda keep, *a: keep(*a[:-1], 0x80000001)),
        "dropout_not_scaled": _patching(networks, keep_scale=lambda scale, p: 1.0),
        "w1_rounded_to_bfloat16": _replacing(w1=lambda a: value_of(a.w1.bfloat16().to(a.w1.dtype), a.w1)),
        "w2_read_as_contiguous": _replacing(w2=lambda a: value_of(_as_contiguous(a.w2), a.w2)),
        "different_every_time": _different_every_time,
    },
    "cross_entropy": {
        "faithful": FAITHFUL,
        "loss_off_by_0.4_percent": _outputs(lambda y: y * 1.004),
        "loss_rounded_to_bfloat16": _outputs(lambda y: value_of(y.bfloat16().to(y.dtype), y)),
        "bias_ignored": _replacing(bias=lambda a: value_of(torch.zeros_like(a.bias), a.bias)),
        "bias_gradient_dropped": _replacing(bias=lambda a: a.bias.detach()),
        "weight_gradient_dropped": _replacing(weight=lambda a: a.weight.detach()),
        "x_gradient_off_by_0.4_percent": _replacing(x=lambda a: value_of(a.x, 1.004 * a.x)),
        "label_smoothing_ignored": _replacing(label_smoothing=lambda a: 0.0),
        "label_smoothing_over_the_other_classes": _replacing(
            label_smoothing=lambda a: min(1.0, a.label_smoothing * a.weight.shape[0] / max(1, a.weight.shape[0] - 1))
        ),
        "mean_over_all_targets": _mean_over_all_targets,
        "sum_for_mean": _replacing(reduction=lambda a: "sum" if a.reduction == "mean" else a.reduction),
        "ignored_rows_counted": _ignored_rows_counted,
        "last_class_dropped": _last_class_dropped,
        "largest_logit_not_subtracted": _largest_logit_not_subtracted,
        "targets_shifted": _replacing(
            target=lambda a: torch.where(a.target == a.ignore_index, a.target, (a.target + 1) % a.weight.shape[0])
        ),
        "weight_rounded_to_bfloat16": _replacing(weight=lambda a: value_of(a.weight.bfloat16().to(a.weight.dtype), a.weight)),
        "x_read_as_contiguous": _replacing(x=lambda a: value_of(_as_contiguous(a.x), a.x)),
        "different_every_time": _different_every_time,
    },
}
BackwardFault = Callable[[Any, list[Any]], tuple[Any, list[Any]]]
BACKWARD_FAULTS: dict[str, BackwardFault] = {
    "gradient_read_as_contiguous": lambda a, grads: (a, [None if g is None else _as_contiguous(g) for g in grads]),
    "backward_with_another_dropout_mask": lambda a, grads: (
        a if getattr(a, "dropout_seed", None) is None else a._replace(dropout_seed=a.dropout_seed + 1),
        grads,
    ),
}


def _backend(op_name: str, name: str, fault: Fault, backward_fault: BackwardFault) -> Backend:
    op = OPS[op_name]

    def wrong(a: Any) -> Outputs:
        return fault(a, op.reference)

    def forward(a: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(e.copy_(r) for e, r in zip(op.empty_outputs(a), wrong(a)))

    def backward(a: Any, grads: Any, saved: Any, wanted: Sequence[bool]) -> Sequence[Tensor | None]:
        places = [p for p, want in zip(op.positions, wanted) if want]
        with torch.enable_grad():
            leaves = [a[p].detach().requires_grad_() for p in places]
            replaced, grads = backward_fault(
                a._replace(**{a._fields[p]: leaf for p, leaf in zip(places, leaves)}), list(grads)
            )
            pairs = [(o, g) for o, g in zip(wrong(replaced), grads) if g is not None and o.requires_grad]
            found: Sequence[Tensor | None] = [None] * len(leaves)
            if pairs:
                found = torch.autograd.grad([o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
        return stored(op, a, wanted, dict(zip(places, found)))

    return Backend(name, forward, backward, lambda a: None)


def backward_faults(kind: str) -> dict[str, BackwardFault]:
    """Those of BACKWARD_FAULTS that ops of this kind can have: linear_cross_entropy knows no dropout."""
    return {n: f for n, f in BACKWARD_FAULTS.items() if kind != "cross_entropy" or "dropout" not in n}


@contextlib.contextmanager
def mutant_backends(kind: str) -> Iterator[list[str]]:
    """Register every mutant of one stem as a backend for the length of the block; yields their names."""
    faults = {n: (f, lambda a, grads: (a, grads)) for n, f in FAULTS[kind].items()}
    faults |= {n: (FAITHFUL, f) for n, f in backward_faults(kind).items()}
    saved = {op: dict(OPS[op].backends) for op in OPS_OF[kind]}
    for op in OPS_OF[kind]:
        OPS[op].backends.update({n: _backend(op, n, *pair) for n, pair in faults.items()})
    try:
        yield list(faults)
    finally:
        for op, backends in saved.items():
            OPS[op].backends = backends
