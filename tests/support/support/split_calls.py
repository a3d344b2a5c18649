# SPDX-License-Identifier: Apache-2.0
"""Named cases of every op on a device mesh, for the tests of pytransformer.distributed.sharding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from pytransformer.distributed.sharding import RULES, WHOLE, Way
from pytransformer.ops._core.registry import OPS
from pytransformer.testing.case import named
from pytransformer.testing.cases import case
from pytransformer.testing.kits import kit_of
from pytransformer.testing.oracle import Solution

from . import fuzz_cross_entropy
from .sharding_faults import planted

SEED = 1
ARGUMENT = {"attn_mask": "mask"}  # keyword -> name in the raw op


@functools.cache
def mesh_of(group: dist.ProcessGroup, shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh over the group, or one with more dimensions over all processes."""
    return (
        DeviceMesh.from_group(group, "cpu")
        if len(shape) == 1
        else init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    )


def ways_of(name: str) -> list[Way]:
    """Return the ways to split the case, including refused ones and full replication."""
    chosen = case(name)
    a, _, _ = _prepared(chosen.op, *chosen.make("cpu", torch.float64, SEED))
    return [WHOLE, *RULES[chosen.op](a)]


def _prepared(op: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, str | None, bool]:
    with torch.no_grad():
        return OPS[op].prepare(*args, **kwargs)


def upstream(name: str, dtype: torch.dtype) -> list[Tensor]:
    """Return gradients of the returned outputs."""
    chosen = case(name)
    a, _, _ = _prepared(chosen.op, *chosen.make("cpu", dtype, SEED))
    op, generator = OPS[chosen.op], torch.Generator().manual_seed(SEED)
    outputs = op.empty_outputs(a)[: len(op.returned)]
    return [
        torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs
    ]


def solution(name: str, dtype: torch.dtype) -> Solution:
    """Return the exact results of one process."""
    chosen = case(name)
    args, kwargs = chosen.make("cpu", dtype, SEED)
    return kit_of(chosen.op).solve(chosen.op, named(chosen.op, args, kwargs), upstream(name, dtype))


def placements(name: str, t: Tensor, ways: Sequence[Way]) -> list[Placement]:
    """Return an argument's placements for the ways; broadcast dimensions are replicated."""
    found = [way.argument(ARGUMENT.get(name, name)) for way in ways]
    fits = (
        p
        if isinstance(p, Replicate) or (p.dim < t.dim() and t.shape[p.dim] > 1)  # type: ignore[attr-defined]
        else Replicate()
        for p in found
    )
    return [p if name not in ("attn_mask", "bias") or t.dim() == 4 else Replicate() for p in fits]


def compute(
    rank: int,
    group: dist.ProcessGroup,
    name: str,
    dtype: torch.dtype,
    split: Sequence[str],
    shape: tuple[int, ...],
    fault: str | None = None,
) -> dict[str, Tensor | None] | str:
    """Return the case's full outputs and gradients by name, or why it is refused.

    ``split`` has a way for each dimension of the mesh.
    """
    chosen, mesh = case(name), mesh_of(group, shape)
    known = {way.name: way for way in ways_of(name)}
    ways = [known[way] for way in split]
    args, kwargs = chosen.make("cpu", dtype, SEED)
    values = named(chosen.op, args, kwargs)
    found: dict[str, Tensor] = {}

    def placed(argument: str, t: Tensor) -> Tensor:
        """Distribute a floating tensor as a leaf; a replicated integer tensor stays plain."""
        where = placements(argument, t, ways)
        if not t.is_floating_point() and all(isinstance(p, Replicate) for p in where):
            return t
        t = distribute_tensor(t, mesh, where)
        return found.setdefault(argument, t.requires_grad_()) if t.is_floating_point() else t

    for argument, value in values.items():
        if isinstance(value, Tensor) and argument != "dropout_seed":
            values[argument] = placed(argument, value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type) and argument == "bias":
            part = "slopes" if hasattr(value, "slopes") else "table"
            values[argument] = dataclasses.replace(
                value, **{part: placed(part, getattr(value, part))}
            )
    with planted(fault):
        try:
            return _run(
                chosen.op,
                values,
                found,
                [g.to(dtype) if g.dim() else g for g in upstream(name, dtype)],
                mesh,
            )
        except ValueError as error:
            return str(error)


def _run(
    op: str,
    values: Mapping[str, Any],
    found: Mapping[str, Tensor],
    grads: list[Tensor],
    mesh: DeviceMesh,
) -> dict[str, Tensor | None]:
    import pytransformer as pt

    outputs = getattr(pt, op)(**values)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sent = [
        distribute_tensor(g.to(o.dtype), mesh, [Replicate()] * mesh.ndim)
        for g, o in zip(grads, outputs)
    ]
    of = torch.autograd.grad(outputs, list(found.values()), sent, allow_unused=True)
    results = dict(zip(OPS[op].returned, outputs)) | dict(zip(found, of))
    return {n: None if t is None else _full(t) for n, t in results.items()}


def loss_of(
    rank: int,
    group: dist.ProcessGroup,
    number: int,
    shape: tuple[int, ...],
    places: Any,
    fault: str | None,
    **options: Any,
) -> dict[str, Tensor | None] | str:
    """Return the full loss and gradients of a random linear_cross_entropy.

    ``placements`` are by name; None leaves a tensor plain.
    """
    import pytransformer as pt

    problem, mesh = fuzz_cross_entropy.draw(SEED, number), mesh_of(group, shape)
    t = dict(problem.tensors)
    grad = t.pop("grad_out", None)
    keywords = {n: v for n, v in problem.keywords.items() if not n.startswith("return_")}
    for name, where in places.items():
        if where is not None and name in t:
            t[name] = distribute_tensor(t[name], mesh, where)
    leaves = {n: t[n].requires_grad_() for n in problem.wanted}
    with planted(fault):
        try:
            loss = pt.linear_cross_entropy(
                t["x"], t["weight"], t["target"], bias=t.get("bias"),
                class_weight=t.get("class_weight"), **keywords, **options,
            )  # fmt: skip
            found = dict.fromkeys(leaves, None)
            if leaves:
                assert grad is not None
                sent = (
                    distribute_tensor(grad, mesh, [Replicate()] * mesh.ndim)
                    if isinstance(loss, DTensor)
                    else grad
                )
                found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), sent)))
        except ValueError as error:
            return str(error)
    return {n: None if r is None else _full(r) for n, r in {"loss": loss, **found}.items()}


def sums_meet_norms(
    rank: int, group: dist.ProcessGroup, whole: Mapping[str, Tensor], place: int | None
) -> dict[str, Tensor]:
    """Feed a hidden-split feed-forward network, a pending sum, into add_norm.

    add_norm is split by rows (``place`` 0) or replicated (None). Return outputs and gradients.
    """
    import pytransformer as pt

    mesh = mesh_of(group, (dist.get_world_size(group),))
    split = {"w1": [Shard(0)], "w2": [Shard(1)]}
    t = {
        n: distribute_tensor(x, mesh, split.get(n, [Replicate()])).requires_grad_()
        for n, x in whole.items()
        if n != "grad"
    }
    inner = pt.feed_forward(t["x"], t["w1"], None, t["w2"], t["b2"])
    assert isinstance(inner, DTensor) and inner.placements[0].is_partial()
    residual = t["x"]
    if place is not None:
        assert isinstance(residual, DTensor)
        residual = residual.redistribute(placements=[Shard(place)])
    normed, stream = pt.add_norm(inner, residual, t["weight"])
    grad = distribute_tensor(whole["grad"], mesh, [Replicate()])
    found = torch.autograd.grad([normed, stream], list(t.values()), [grad, grad])
    return {n: _full(r) for n, r in zip(["normed", "stream", *t], [normed, stream, *found])}


def _full(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def second_derivative(rank: int, group: dist.ProcessGroup) -> str:
    """Return the error of a second derivative; "" for none."""
    import pytransformer as pt

    mesh = mesh_of(group, (dist.get_world_size(group),))
    x, w1 = (
        torch.randn(4, 8, requires_grad=True),
        distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)]),
    )
    y = pt.feed_forward(
        x, w1, None, distribute_tensor(torch.randn(8, 6), mesh, [Shard(1)]), None, activation="gelu"
    )
    try:
        torch.autograd.grad(y.sum(), x, create_graph=True)
    except NotImplementedError as error:
        return str(error)
    return ""


def other_mesh(rank: int, group: dist.ProcessGroup) -> str:
    """Return the error of a call with tensors on two meshes."""
    import pytransformer as pt

    both = mesh_of(group, (2, 2))
    x, weight = (
        distribute_tensor(torch.ones(4, 8)[i], both[name], [Replicate()])
        for i, name in ((slice(None), "data"), (0, "tensor"))
    )
    try:
        pt.rms_norm(x, 8, weight)
    except ValueError as error:
        return str(error)
    return ""


def plain_only(rank: int, group: dist.ProcessGroup) -> list[str]:
    """Return the errors of functions that do not support DTensors."""
    import pytransformer as pt
    from pytransformer.distributed import ring_attention

    mesh, told = mesh_of(group, (dist.get_world_size(group),)), []
    x = distribute_tensor(torch.zeros(1, 2, 8, 8), mesh, [Shard(2)])
    for call in (
        lambda: pt.attention_weights(x, x, x[..., 0]),
        lambda: ring_attention(x, x, x, group=group),
    ):
        try:
            call()
        except ValueError as error:
            told.append(str(error))
    return told


def wrong_target(rank: int, group: dist.ProcessGroup) -> str:
    """Return the error of a row-split loss whose last rank has an out-of-range target."""
    import pytransformer as pt

    mesh = mesh_of(group, (dist.get_world_size(group),))
    x, target = (
        distribute_tensor(t, mesh, [Shard(0)])
        for t in (torch.ones(4, 8), torch.tensor([0, 1, 2, 3]))
    )
    try:
        pt.linear_cross_entropy(x, torch.ones(3, 8), target)
    except ValueError as error:
        return str(error)
    return ""


def mask_drawn(rank: int, group: dist.ProcessGroup) -> Tensor:
    """Return add_norm's dropout mask with generators that differ by rank."""
    import pytransformer as pt

    torch.manual_seed(rank)
    mesh = mesh_of(group, (dist.get_world_size(group),))
    weight = distribute_tensor(torch.ones(64), mesh, [Replicate()])
    return pt.add_norm(torch.ones(8, 64), None, weight, dropout_p=0.5)[1]


def results_of(
    rank: int,
    group: dist.ProcessGroup,
    shape: tuple[int, ...],
    op: str,
    tensors: Any,
    **keywords: Any,
) -> list[Tensor]:
    """Return a call's full outputs; ``tensors`` maps name to (tensor, placements)."""
    import pytransformer as pt

    mesh = mesh_of(group, shape)
    outputs = getattr(pt, op)(
        **{n: distribute_tensor(t, mesh, where) for n, (t, where) in tensors.items()}, **keywords
    )
    return [_full(o) for o in (outputs if isinstance(outputs, tuple) else (outputs,))]


def refusal(
    rank: int,
    group: dist.ProcessGroup,
    shape: tuple[int, ...],
    op: str,
    tensors: Any,
    **keywords: Any,
) -> str:
    """Return the error of a call on zeros; ``tensors`` maps name to (shape, placements)."""
    import pytransformer as pt

    mesh = mesh_of(group, shape)
    given = {
        n: torch.zeros(size) if where is None else distribute_tensor(torch.zeros(size), mesh, where)
        for n, (size, where) in tensors.items()
    }
    try:
        getattr(pt, op)(**given, **keywords)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
