# SPDX-License-Identifier: Apache-2.0
"""Linear cross entropy, split by rows or by classes (vocabulary-parallel).

::

    m = max_r m_r,   l = log(sum_r exp(m_r - m + l_r))
    loss = l - (1 - s) (sum_r z_r,target - m) - s (sum_r sum_c z_rc / V - m) + lambda (m + l)^2

In forward the ranks exchange three numbers per row: the maximum logit m_r of their classes, the
logarithm l_r of the sum of exponentials relative to it, and the target's logit if they own its
class. Label smoothing s adds the sum of their logits. No rank receives another rank's logits. In
backward each rank computes the gradients of its classes from m and l; the gradient of x is a sum
over ranks.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ...ops._core.op import Op
from ...ops._core.tensors import looks_at_values
from ...ops._problem.cross_entropy import weight_of_targets
from ...ops.cross_entropy import check_values
from ..tile import BY_LSE
from .call import Rule, from_local, named, tensors_of, to_local, whole
from .ways import Way, mesh_of, ways_of

VOCABULARY = "classes"
IGNORED = -100  # ignore_index of the calls on a rank's classes


def ways(a: Any) -> list[Way]:
    both = a.class_weight is not None and a.z_loss_weight and a.reduction == "mean"
    refused = (
        "class_weight and z_loss_weight have different means; use reduction='sum'" if both else None
    )
    rows = [
        Way(f"dimension {d} of x", {"x": d, "target": d}, (d,), refused=refused)
        for d in range(a.x.dim() - 1)
    ]
    classes = named({"weight": 0, "bias": 0}, a)
    return [*rows, Way(VOCABULARY, classes, (None,), refused=_not_by_classes(a))]


def _not_by_classes(a: Any) -> str | None:
    """Return why the classes cannot be split, and a hint, or None."""
    given = {"softcap": bool(a.softcap), "class_weight": a.class_weight is not None}
    names = " and ".join(name for name, used in given.items() if used)
    return f"{names} not supported; split the rows of x" if names else None


def linear_cross_entropy(op: Op, a: Any, backend: str | None, strict: bool) -> tuple[torch.Tensor]:
    tensors = tensors_of(op, a)
    mesh = mesh_of(op.name, tensors)
    chosen = ways_of(op.name, tensors, mesh, ways(a))
    arguments, gradients = (
        [getattr(way, kind) for way in chosen] for kind in ("argument", "gradient")
    )
    local = {
        n: to_local(t, mesh, [f(n) for f in arguments], [f(n) for f in gradients])
        for n, t in tensors.items()
    }
    part = a._replace(**local, reduction="none")
    by_rows = [mesh.get_group(i) for i, way in enumerate(chosen) if "x" in way.arguments]
    valid = _valid(a._replace(target=part.target), by_rows)
    if a.class_weight is not None:
        valid = weight_of_targets(part)
        for group in by_rows:
            dist.all_reduce(valid, group=group)
    by_classes = [i for i, way in enumerate(chosen) if way.name == VOCABULARY]
    if by_classes:
        own = _own_classes(a.weight.shape[0], mesh, by_classes)
        losses = _Losses.apply(
            part.x,
            part.weight,
            part.bias,
            part.target,
            _Part(op, a, own, mesh, by_classes, backend, strict),
        )
    else:
        losses = op(part, backend, strict)[0]
    result = from_local(*_reduced(a, losses, valid, mesh, chosen))
    return (result if isinstance(a.x, DTensor) else whole(result),)


def _valid(a: Any, by_rows: Sequence[dist.ProcessGroup]) -> torch.Tensor:
    """Return the number of targets of all ranks that are not ignored.

    An invalid target of one rank raises on every rank.
    """
    error: ValueError | None = None
    if looks_at_values(a.target.device):
        try:
            check_values(a)
        except ValueError as found:
            error = found
    counts = torch.stack(
        [
            (a.target != a.ignore_index).sum(),
            torch.tensor(int(error is not None), device=a.target.device),
        ]
    )
    for group in by_rows:
        dist.all_reduce(counts, group=group)
    if error is not None:
        raise error
    if looks_at_values(a.target.device) and bool(counts[1]):
        raise ValueError(
            "linear_cross_entropy: another rank's target is out of range: see its error"
        )
    return counts[0]


def _own_classes(classes: int, mesh: DeviceMesh, places: Sequence[int]) -> range:
    """Return this rank's classes, split like torch.chunk."""
    own = range(classes)
    for place in places:
        size = -(-len(own) // mesh.size(place))
        first = min(mesh.get_local_rank(place) * size, len(own))
        own = own[first : first + size]
    return own


def _reduced(
    a: Any, losses: torch.Tensor, valid: torch.Tensor, mesh: DeviceMesh, chosen: Sequence[Way]
) -> tuple[torch.Tensor, DeviceMesh, list[Placement], list[int]]:
    """Return the arguments of :func:`from_local` for the reduction of this rank's losses."""
    splits = [way.arguments.get("x") for way in chosen]
    if a.reduction == "none":
        return (
            losses,
            mesh,
            [Replicate() if d is None else Shard(d) for d in splits],
            list(a.target.shape),
        )
    total = losses.double().sum()
    total = (total / valid if a.reduction == "mean" else total).to(losses.dtype)
    return total, mesh, [Replicate() if d is None else Partial() for d in splits], []


@dataclasses.dataclass(frozen=True)
class _Part:
    """The non-tensor inputs of a rank's computation; ``a`` are the arguments of the full call."""

    op: Op
    a: Any
    own: range
    mesh: DeviceMesh
    places: Sequence[int]
    backend: str | None
    strict: bool

    @property
    def smoothing(self) -> float:
        smoothing: float = self.a.label_smoothing
        return smoothing

    def gathered(
        self, t: torch.Tensor, merge: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the ranks' ``t`` merged in rank order, so it is bitwise equal on all ranks."""
        for place in self.places:
            shares = [torch.empty_like(t) for _ in range(self.mesh.size(place))]
            dist.all_gather(shares, t, group=self.mesh.get_group(place))
            t = merge(torch.stack(shares))
        return t

    def call(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: Any,
        smoothing: float,
        z_loss_weight: float,
    ) -> Any:
        """Return the arguments of a call on this rank's classes."""
        return self.op.Arguments(
            x, weight, target, bias, None, IGNORED, smoothing, 0.0, z_loss_weight, "none", False,
            "",
        )  # fmt: skip


def _merged(shares: torch.Tensor) -> torch.Tensor:
    """Merge (ranks, 3 or 4, rows): row_max, log_sum, target logit and sum of logits."""
    row_max = shares[:, :1].amax(0)
    base = torch.where(row_max == -torch.inf, 0.0, row_max)  # these ranks have no class
    log_sum = torch.logsumexp(shares[:, :1] - base + shares[:, 1:2], 0)
    return torch.cat([row_max, log_sum, shares[:, 2:].sum(0)])


class _Losses(torch.autograd.Function):
    """The loss of each row, equal on every rank. The gradient of x is this rank's share."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        target: torch.Tensor,
        part: _Part,
    ) -> torch.Tensor:
        work = torch.float64 if x.dtype == torch.float64 else torch.float32
        valid = target != part.a.ignore_index
        mine = valid & (target >= part.own.start) & (target < part.own.stop)
        place = torch.where(mine, target - part.own.start, 0)
        own = torch.stack(
            [
                *_split_lse(part, x, weight, bias, valid, work),
                *_logits(part, x, weight, bias, mine, place, work),
            ]
        )
        row_max, log_sum, picked, *rest = part.gathered(own, _merged)
        ctx.save_for_backward(x, weight, bias, valid, mine, place, torch.stack([row_max, log_sum]))
        ctx.part = part
        loss = log_sum - (1.0 - part.smoothing) * (picked - row_max)
        for total in rest:
            loss = loss - part.smoothing * (total / part.a.weight.shape[0] - row_max)
        if part.a.z_loss_weight:
            loss = loss + part.a.z_loss_weight * (row_max + log_sum) ** 2
        return torch.where(valid, loss, 0.0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        wanted = list(ctx.needs_input_grad[:3])
        return *_gradients(ctx.part, ctx.saved_tensors, grad.contiguous(), wanted), None, None


def _split_lse(
    part: _Part, x: Any, weight: Any, bias: Any, valid: torch.Tensor, work: torch.dtype
) -> torch.Tensor:
    """Return (2, rows): row_max and log_sum over this rank's classes."""
    if not len(weight):
        return torch.full((2, *valid.shape), -torch.inf, dtype=work, device=x.device)
    any_class = torch.where(valid, 0, IGNORED)
    call = part.call(x, weight, any_class, bias, 0.0, 0.0)
    split_lse = part.op.run(call, part.backend, part.strict)[1]
    return torch.where(valid, split_lse, 0.0)


def _logits(
    part: _Part,
    x: Any,
    weight: Any,
    bias: Any,
    mine: torch.Tensor,
    place: torch.Tensor,
    work: torch.dtype,
) -> list[torch.Tensor]:
    """Return the target's logit if this rank owns its class, else 0.

    With label smoothing, also return the sum of this rank's logits.
    """
    nothing = torch.zeros(mine.shape, dtype=work, device=x.device)
    if not len(weight):
        return [nothing, nothing] if part.smoothing else [nothing]
    rows = x.to(work)
    picked = (rows * weight[place].to(work)).sum(-1)
    found = [torch.where(mine, picked if bias is None else picked + bias[place].to(work), 0.0)]
    if part.smoothing:
        total = rows @ weight.sum(0, dtype=work)
        found.append(total if bias is None else total + bias.sum(dtype=work))
    return found


def _gradients(
    part: _Part, saved: Any, grad: torch.Tensor, wanted: list[bool]
) -> list[torch.Tensor | None]:
    """Return the gradients of x (this rank's share), weight and bias.

    The raw op accepts the split lse of all ranks and one target per row. A row whose target belongs
    to another rank gets one extra class, of weight 0 and bias -inf, with zero probability and
    gradient. Smoothing divides by the number of classes: with s' = s (own + 1) / V the share of
    each is s / V, and only the target's differs, by s' - s.
    """
    x, weight, bias, valid, mine, place, split_lse = saved
    own, classes = weight.shape[0], part.a.weight.shape[0]
    if not own:
        return [
            torch.zeros_like(t) if want and t is not None else None
            for t, want in zip((x, weight, bias), wanted)
        ]
    wanted = [want and t is not None for t, want in zip((x, weight, bias), wanted)]
    s = part.smoothing * (own + 1) / classes
    target = torch.where(valid, torch.where(mine, place, own), IGNORED)
    more = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
    biases = F.pad(split_lse.new_zeros(own) if bias is None else bias, (0, 1), value=-torch.inf)
    a = part.call(x, more, target, biases, s, part.a.z_loss_weight)
    if part.op.select(a, part.backend, part.strict).name not in BY_LSE:
        return _plain(part, saved, grad, wanted)
    results = part.op.backward(
        grad, *a, split_lse, *[split_lse.new_empty(0)] * 4, wanted, part.backend, part.strict
    )
    d_x, d_weight, d_bias = (r if want else None for r, want in zip(results, wanted))
    d_weight, d_bias = (None if t is None else t[:own] for t in (d_weight, d_bias))
    if s:
        factor = torch.where(mine, (part.smoothing - s) * grad, 0.0)
        rows, to = torch.where(mine[..., None], x, 0).reshape(-1, x.shape[-1]), place.flatten()
        if d_x is not None:
            of_targets = torch.where(mine[..., None], weight[place], 0)
            d_x = (d_x.to(split_lse.dtype) + factor[..., None] * of_targets).to(x.dtype)
        if d_weight is not None:
            share = (factor.flatten()[:, None] * rows).to(split_lse.dtype)
            d_weight = d_weight.to(split_lse.dtype).index_add(0, to, share).to(weight.dtype)
        if d_bias is not None:
            d_bias = d_bias.to(split_lse.dtype).index_add(0, to, factor.flatten()).to(bias.dtype)
    return [d_x, d_weight, d_bias]


def _plain(
    part: _Part, saved: Any, grad: torch.Tensor, wanted: list[bool]
) -> list[torch.Tensor | None]:
    """Return :func:`_gradients` for the reference, whose backward recomputes m and l.

    dz = g ((1 + 2 lambda (m + l)) exp(z - m - l) - (1 - s) [c = target] - s / V)
    """
    x, weight, bias, valid, mine, place, split_lse = saved
    rows = torch.where(valid[..., None], x.to(split_lse.dtype), 0.0)
    w = weight.to(split_lse.dtype)
    own = len(weight)
    z = F.linear(rows, w, None if bias is None else bias.to(split_lse.dtype))
    factor = 1.0 + 2.0 * part.a.z_loss_weight * split_lse.sum(0)
    dz = (
        factor[..., None] * torch.exp(z - split_lse[0][..., None] - split_lse[1][..., None])
        - part.smoothing / part.a.weight.shape[0]
    )
    dz = dz.scatter_add(
        -1, place[..., None], ((part.smoothing - 1.0) * mine.to(dz.dtype))[..., None]
    )
    dz = torch.where(valid[..., None], dz * grad[..., None], 0.0)
    flat, rows = dz.reshape(-1, own), rows.reshape(-1, x.shape[-1])
    makers = (lambda: dz @ w, lambda: flat.T @ rows, lambda: flat.sum(0))
    return [
        make().to(t.dtype) if want else None
        for make, t, want in zip(makers, (x, weight, bias), wanted)
    ]


RULES: dict[str, Rule] = {"linear_cross_entropy": ways}
RUNS: dict[str, Any] = {"linear_cross_entropy": linear_cross_entropy}
