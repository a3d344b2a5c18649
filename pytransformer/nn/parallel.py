# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel styles of a model's ``tensor_parallel_plan()``; see docs/distributed.md.

``torch.distributed.tensor.parallel.parallelize_module`` applies them to a device mesh. Hidden
states between modules are plain tensors, the same on every rank. Every parameter becomes a DTensor,
sharded or replicated by its style.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ..distributed.sharding.call import from_local, whole
from .attention import MultiHeadAttention
from .experts import Experts
from .feed_forward import FeedForward
from .heads import Classifier
from .layer_norm import Norm
from .positions import RelativePositionTable
from .relative import RelativeMultiHeadAttention
from .rotary import RotaryMultiHeadAttention

# Modules whose parameters only our ops read, which accept DTensors beside plain tensors.
_BY_OPS = (Norm, RelativePositionTable)


def plan_of(model: nn.Module) -> dict[str, ParallelStyle]:
    """Return a style for every module of the model that has parameters.

    Raises:
        ValueError: the model has mixtures of experts, which use expert parallelism.
    """
    plan: dict[str, ParallelStyle] = {"": ModelParallel()}
    vocabulary, done = VocabularyParallel(), list[str]()
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in done) or not name:
            continue
        if isinstance(module, Experts):
            raise ValueError(
                f"tensor_parallel_plan: {name} is a mixture's experts: split those over the ranks"
                " with MixtureOfExperts.parallelize(group)"
            )
        if _is_whole(module):
            plan[name] = CopiesParallel()
            done.append(name)
        elif isinstance(module, (MultiHeadAttention, FeedForward)):
            plan[name] = (
                HeadsParallel() if isinstance(module, MultiHeadAttention) else HiddenParallel()
            )
            done.append(name)
        elif isinstance(module, (nn.Embedding, Classifier)):
            plan[name] = vocabulary
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            # Torch's batch norm does not support DTensors beside its running statistics; parameters
            # are plain and replicated.
            continue
        elif next(module.parameters(recurse=False), None) is not None:
            plan[name] = WholeParallel()
    return plan


def gathered_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the full, unsplit ``state()`` of a split model. Every rank must call."""
    names, full = (
        [*dict(model.named_parameters()), *dict(model.named_buffers())],
        model.state_dict(),
    )
    return gathered(model, {name: full[name] for name in names if name in full})


def gathered(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    *,
    keep: bool = True,
    device: torch.device | None = None,
) -> dict[str, torch.Tensor]:
    """Gather tensors named like the model's parameters: parameters, gradients, optimizer state.

    Args:
        keep: whether this rank needs the result; otherwise it holds one full tensor at a time and
            returns {}.
        device: device of the result; None means the current device of each tensor.
    """
    before = names_before(model, tensors)
    found: dict[str, torch.Tensor] = {}
    for name, t in tensors.items():
        full = (t.full_tensor() if isinstance(t, DTensor) else t).detach()
        if keep:
            full, then = full.to(device or full.device), before[name]
            # In the order of the parts.
            found[then] = torch.cat([found[then], full]) if then in found else full
    return found


def parted(model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Rename :func:`gathered` tensors to the split model's parameters; they stay full.

    Every part gets a copy of scalars, such as an optimizer's step count.
    """
    found: dict[str, Any] = {}
    offsets: dict[str, int] = {}
    full = dict(model.state_dict())
    for name, then in names_before(model, full).items():
        if then not in tensors:
            continue
        value = tensors[then]
        if name != then and isinstance(value, torch.Tensor) and value.dim():
            first, rows = offsets.get(then, 0), full[name].shape[0]
            offsets[then] = first + rows
            value = value[first : first + rows]
        found[name] = value
    return found


def names_before(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the names before the split; the parts of one matrix share a name."""
    split = [f"{name}." for name, m in model.named_modules() if isinstance(m, SplitProjection)]
    inside = {
        name: next((prefix for prefix in split if name.startswith(prefix)), None) for name in names
    }
    return {
        name: name if prefix is None else prefix + name.rsplit(".", 1)[1]
        for name, prefix in inside.items()
    }


def _is_whole(module: nn.Module) -> bool:
    """Return whether every rank computes the full module.

    This holds for attention that combines parameters and plain tensors outside our ops, and for
    attention whose per-head norm shares a weight among heads: a rank's heads would give only part
    of its gradient.
    """
    if isinstance(module, RotaryMultiHeadAttention):
        return module.query_norm is not None
    return isinstance(module, RelativeMultiHeadAttention)


def _distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, dim: int | None, source: int | None
) -> None:
    """Make the parameter a DTensor, sharded along ``dim`` or replicated.

    Rank ``source`` provides the values; None: each rank uses its local values.
    """
    old = getattr(module, name)
    if old is not None and not isinstance(old, DTensor):
        t = distribute_tensor(
            old.detach(), mesh, [Replicate() if dim is None else Shard(dim)], src_data_rank=source
        )
        module.register_parameter(name, nn.Parameter(t, requires_grad=old.requires_grad))


def _mesh(style: str, mesh: DeviceMesh) -> int:
    """Return the number of ranks of a one-dimensional mesh."""
    if mesh.ndim != 1:
        raise ValueError(
            f"{style}: the mesh must have one dimension, got {mesh}; of a larger one give mesh['its"
            " name']"
        )
    return mesh.size()


class WholeParallel(ParallelStyle):
    """Replicated parameters as DTensors, so optimizers and gradient clipping see only DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _mesh("WholeParallel", device_mesh)
        for name, _ in list(module.named_parameters(recurse=False)):
            _distribute(module, name, device_mesh, None, self.src_data_rank)
        if not isinstance(module, _BY_OPS):
            _in_dtensors(module, device_mesh)
        return module


class CopiesParallel(ParallelStyle):
    """Plain replicated parameters; each rank computes the full module and the same gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _mesh("CopiesParallel", device_mesh)
        if self.src_data_rank is not None:
            group = device_mesh.get_group()
            for p in module.parameters():
                dist.broadcast(
                    p.detach(), dist.get_global_rank(group, self.src_data_rank), group=group
                )
        return module


def _in_dtensors(module: nn.Module, mesh: DeviceMesh) -> None:
    """Convert inputs to DTensors before the module's forward, and outputs to plain tensors."""

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_as_dtensor(t, mesh) if isinstance(t, torch.Tensor) else t for t in inputs)

    def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
        return whole(output) if isinstance(output, torch.Tensor) else output

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _as_dtensor(t: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return t if isinstance(t, DTensor) else from_local(t, mesh, [Replicate()])


class ModelParallel(WholeParallel):
    """The style of the full model: its direct parameters, and a check of equal RNG states."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _mesh("ModelParallel", device_mesh)
        for name, _ in list(module.named_parameters(recurse=False)):
            _distribute(module, name, device_mesh, None, self.src_data_rank)
        group = device_mesh.get_group()

        def check(module: nn.Module, inputs: Any) -> None:
            if module.training:
                _check_generators(group, next(module.parameters()).device)

        module.register_forward_pre_hook(check)
        return module


def _check_generators(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise ValueError on every rank if RNG states differ; hidden states would diverge."""
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    own = torch.tensor([zlib.crc32(state.numpy().tobytes())], device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    if any(int(other) != int(found[0]) for other in found):
        raise ValueError(
            "tensor parallel: the ranks' random generators differ, and so would their dropout"
            " masks: call torch.manual_seed with the same number on all ranks of the mesh before"
            " training"
        )


class VocabularyParallel(ParallelStyle):
    """Rows of an embedding's or classifier's weight over the ranks, replicated if too few.

    Use one object for all modules that may share a weight, so they still share it afterwards.
    """

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []  # (before, after)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = _mesh("VocabularyParallel", device_mesh)
        assert isinstance(module, (nn.Embedding, Classifier))
        rows = module.weight.shape[0]
        dim = 0 if (ranks - 1) * -(-rows // ranks) < rows else None
        before = module.weight
        shared = [after for known, after in self._made if known is before]
        if shared:
            module.weight = shared[0]
        else:
            _distribute(module, "weight", device_mesh, dim, self.src_data_rank)
            self._made.append((before, module.weight))
        if isinstance(module, Classifier):
            _distribute(module, "bias", device_mesh, dim, self.src_data_rank)
        _in_dtensors(module, device_mesh)
        return module


class HiddenParallel(ParallelStyle):
    """Column- and row-parallel :class:`FeedForward` with one all-reduce (Megatron-LM)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _mesh("HiddenParallel", device_mesh)
        assert isinstance(module, FeedForward)
        for linear in (module.w1, module.gate):
            if linear is not None:
                _distribute(linear, "weight", device_mesh, 0, self.src_data_rank)
                _distribute(linear, "bias", device_mesh, 0, self.src_data_rank)
        _distribute(module.w2, "weight", device_mesh, 1, self.src_data_rank)
        _distribute(module.w2, "bias", device_mesh, None, self.src_data_rank)
        return module


class SplitProjection(nn.Module):
    """The projections of one fused matrix, each split by heads, returned as a tuple."""

    def __init__(
        self, linear: nn.Linear, widths: Mapping[str, int], mesh: DeviceMesh, source: int | None
    ) -> None:
        super().__init__()
        self.mesh = mesh
        weights = linear.weight.detach().split_with_sizes(list(widths.values()))
        biases = (
            [None] * len(widths)
            if linear.bias is None
            else linear.bias.detach().split_with_sizes(list(widths.values()))
        )
        for (name, width), weight, bias in zip(widths.items(), weights, biases):
            part = nn.Linear(linear.in_features, width, bias is not None, device="meta")
            part.weight, part.bias = (
                nn.Parameter(weight),
                None if bias is None else nn.Parameter(bias),
            )
            _distribute(part, "weight", mesh, 0, source)
            _distribute(part, "bias", mesh, 0, source)
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = _as_dtensor(x, self.mesh)
        return tuple(part(x) for part in self.children())


class HeadsParallel(ParallelStyle):
    """A :class:`MultiHeadAttention` with heads split over ranks and one all-reduce (Megatron-LM).

    The number of ranks must divide the query heads and the key heads. ``qkv`` becomes three
    matrices. A cache raises.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = _mesh("HeadsParallel", device_mesh)
        assert isinstance(module, MultiHeadAttention)
        heads, key_heads = (width // module.head_dim for width in module.widths[:2])
        if heads % ranks or key_heads % ranks:
            raise ValueError(
                f"HeadsParallel: {ranks} ranks must divide the {heads} heads of queries and the"
                f" {key_heads} of keys: use fewer ranks in this dimension of the mesh, and more in"
                " that of the data"
            )
        names = dict(zip(("query", "key", "value"), module.widths))
        if module.cross:
            parallelize_module(
                module.query,
                device_mesh,
                ColwiseParallel(use_local_output=False),
                src_data_rank=self.src_data_rank,
            )
            names.pop("query")
            module.key_value = SplitProjection(
                module.key_value, names, device_mesh, self.src_data_rank
            )  # type: ignore[assignment]
        else:
            module.qkv = SplitProjection(module.qkv, names, device_mesh, self.src_data_rank)  # type: ignore[assignment]
        if module.sinks is not None:
            _distribute(module, "sinks", device_mesh, 0, self.src_data_rank)
        parallelize_module(
            module.out, device_mesh, RowwiseParallel(), src_data_rank=self.src_data_rank
        )
        module.register_forward_pre_hook(_refuse_cache, with_kwargs=True)
        return module


def _refuse_cache(module: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
    if options.get("cache") is not None:
        raise ValueError(
            "MultiHeadAttention: a cache of keys is not split over ranks: generate with the whole"
            " model, from gathered_state()"
        )
