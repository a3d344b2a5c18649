# SPDX-License-Identifier: Apache-2.0
"""A model split over the ranks of a mesh, and its state as a single process has it.

torch.distributed does the splitting: `parallelize_module` with the model's plan, and FSDP2's
`fully_shard`. `fully_shard` also reduces gradients over the data if parameters stay unsplit (a mesh
of (replicas, 1)), because DDP does not support DTensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from ..nn.blocks import Block
from ..nn.parallel import gathered, names_before, parted
from .mesh import Mesh

# An optimizer whose step on an element depends on the rest of the matrix is wrong on a part.
BY_MATRIX = ("Adafactor", "Muon", "LBFGS")


class SplitModel:
    """The part of a model on this rank.

    Args:
        whole: the model, equal on all ranks. It loses its parameters until :meth:`give_back`.
        mesh: the mesh to split the model over.
        device: the device of the part.

    Attributes:
        model: the part, ready for training.

    Raises:
        ValueError: the model has no plan, or its plan does not fit the mesh.
    """

    def __init__(self, whole: nn.Module, mesh: Mesh, device: torch.device) -> None:
        self.whole, self.mesh = whole, mesh
        self._shapes = {name: t.shape for name, t in whole.state_dict().items()}
        self._order = [name for name, _ in whole.named_parameters()]
        # The copy shares the model's tensors, so that no rank holds two models.
        shared = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in whole.parameters()}
        self.model = copy.deepcopy(whole, shared).to(device)
        _split(self.model, mesh)
        for p in whole.parameters():
            p.data = p.data.new_empty(0)
        self._parameters = dict(self.model.named_parameters())

    def make_optimizer(
        self, make: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]
    ) -> torch.optim.Optimizer:
        """Return an optimizer of the part's parameters, grouped by mesh.

        A fused optimizer kernel accepts parameters of one mesh only.

        Raises:
            ValueError: `make` is an optimizer instead of a factory, or its step depends on a full
                matrix.
        """
        if isinstance(make, torch.optim.Optimizer):
            raise ValueError(
                f"Trainer: optimizer must be a function of parameters, because the mesh {self.mesh}"
                f" splits them; pass partial(torch.optim.{type(make).__name__}, lr=0.0)"
            )
        optimizer = make(
            [{"params": group} for group in by_mesh(self._parameters.values()).values()]
        )
        if (name := type(optimizer).__name__) in BY_MATRIX:
            raise ValueError(
                f"Trainer: {name} needs full matrices, of which a rank of {self.mesh} has"
                " parts; use an elementwise optimizer such as AdamW, or a mesh of data alone,"
                " without shard"
            )
        return optimizer

    def state(self, keep: bool) -> dict[str, torch.Tensor]:
        """Return the full model's state_dict on the CPU, {} unless `keep`; every rank calls it."""
        return gathered(self.model, self.model.state_dict(), keep=keep, device=torch.device("cpu"))

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load this rank's part of a full model's state_dict.

        Raises:
            ValueError: other names or shapes.
        """
        wrong = sorted(self._shapes.keys() ^ state.keys())
        wrong += [
            f"{n} is {tuple(t.shape)}, expected {tuple(self._shapes[n])}"
            for n, t in state.items()
            if n in self._shapes and t.shape != self._shapes[n]
        ]
        if wrong:
            raise ValueError(f"missing, unknown or of another shape: {'; '.join(wrong[:8])}")
        parts = parted(self.model, state)
        with torch.no_grad():
            for name, t in self.model.state_dict().items():
                local(t).copy_(local(like(parts[name], t)))

    def optimizer_state(self, optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
        """Return the full optimizer's state_dict on the CPU, or {} unless `keep`.

        Every rank must call.
        """
        state = optimizer.state_dict()
        by_name = {name: state["state"].get(i, {}) for i, name in enumerate(self._names(optimizer))}
        entries = dict.fromkeys(entry for found in by_name.values() for entry in found)
        found: dict[int, dict[str, Any]] = {}
        for entry in entries:
            values = {
                name: by_name[name][entry] for name in self._parameters if entry in by_name[name]
            }
            tensors = {
                name: t for name, t in values.items() if isinstance(t, torch.Tensor) and t.dim()
            }
            before = names_before(self.model, values)
            # Entries such as the step count.
            whole = {before[name]: value for name, value in values.items() if name not in tensors}
            whole |= gathered(self.model, tensors, keep=keep, device=torch.device("cpu"))
            for name, value in whole.items():
                found.setdefault(self._order.index(name), {})[entry] = value
        group = {k: v for k, v in state["param_groups"][0].items() if k != "params"}
        return (
            {"state": found, "param_groups": [group | {"params": list(range(len(self._order)))}]}
            if keep
            else {}
        )

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of the full optimizer's state_dict."""
        entries = dict.fromkeys(entry for found in state["state"].values() for entry in found)
        found: dict[int, dict[str, Any]] = {}
        for entry in entries:
            whole = {
                self._order[i]: values[entry]
                for i, values in state["state"].items()
                if entry in values
            }
            parts = parted(self.model, whole)
            for i, name in enumerate(self._names(optimizer)):
                if name in parts:
                    value = parts[name]
                    # Parts of a matrix have separate step counts.
                    if isinstance(value, torch.Tensor):
                        value = (
                            like(value, self._parameters[name]) if value.dim() else value.clone()
                        )
                    found.setdefault(i, {})[entry] = value
        own = optimizer.state_dict()["param_groups"]
        groups = [state["param_groups"][0] | {"params": group["params"]} for group in own]
        optimizer.load_state_dict({"state": found, "param_groups": groups})

    def _names(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names of the optimizer's parameters in its order."""
        names = {id(p): name for name, p in self._parameters.items()}
        return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]

    def sync_gradients(self, now: bool) -> None:
        """Set whether the next backward reduces gradients over the data."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(now)

    def finish_gradients(
        self, parameters: Iterable[torch.Tensor], factor: float, clip: float | None
    ) -> float:
        """Scale gradients by a factor, clip them to a global norm, and return that norm."""
        kinds = list(by_mesh(parameters).values())
        gradients = [[p.grad for p in kind if p.grad is not None] for kind in kinds]
        for kind in gradients:
            torch._foreach_mul_(kind, factor)
        norms = [nn.utils.get_total_norm(kind) for kind in gradients]
        total = torch.stack(
            [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
        ).norm()
        for kind in kinds if clip is not None else ():
            nn.utils.clip_grads_with_norm_(kind, clip or 0.0, total)
        return total.item()

    def give_back(self) -> None:
        """Return the trained parameters and buffers to the full model.

        Every rank must call and needs memory for all of them.
        """
        state, own = self.state(keep=True), self.whole.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, t in state.items():
                own[name].data = t.to(own[name].device, copy=True)


def _split(model: nn.Module, mesh: Mesh) -> None:
    if mesh.tensor > 1:
        plan = getattr(model, "tensor_parallel_plan", None)
        if plan is None:
            raise ValueError(
                f"Trainer: a mesh with tensor={mesh.tensor} needs a model with"
                " tensor_parallel_plan(), as those of pytransformer.models have, got"
                f" {type(model).__name__}: use data alone, with shard if its parameters are many"
            )
        parallelize_module(model, mesh.wrapping["tensor"], plan())
    if mesh.replicas > 1:
        data = mesh.wrapping["shard"] if mesh.shard else mesh.wrapping["replica", "shard"]
        for block in [m for m in model.modules() if isinstance(m, Block)]:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)


def local(t: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def like(whole: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Return the full tensor split like `t`, without communication, because every rank has it."""
    if not isinstance(t, DTensor):
        return whole.to(t.device)
    return distribute_tensor(whole.to(t.device), t.device_mesh, t.placements, src_data_rank=None)


def by_mesh(tensors: Iterable[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """Return the tensors grouped by mesh, for multi-tensor calls; plain tensors form one group."""
    found: dict[Any, list[torch.Tensor]] = {}
    for t in tensors:
        found.setdefault(t.device_mesh if isinstance(t, DTensor) else None, []).append(t)
    return found
