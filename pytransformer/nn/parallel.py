# SPDX-License-Identifier: Apache-2.0
"""How modules are split over the ranks of a device mesh: the styles that a model's ``tensor_parallel_plan()`` gives to
``torch.distributed.tensor.parallel.parallelize_module``. See docs/distributed.md.

Between modules the hidden states are plain tensors, the same on every rank of the mesh. Every parameter becomes a DTensor: split where a
style says so, else whole.
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
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ..distributed.sharding.call import from_local, whole
from .attention import MultiHeadAttention
from .experts import Experts
from .feed_forward import FeedForward
from .heads import Classifier
from .layer_norm import Norm
from .positions import RelativePositionTable
from .relative import RelativeMultiHeadAttention
from .rotary import RotaryMultiHeadAttention

# Modules whose parameters go to our ops alone, which take them as DTensors beside plain tensors.
_BY_OPS = (Norm, RelativePositionTable)


def plan_of(model: nn.Module) -> dict[str, ParallelStyle]:
    """A style for every module of the model that has parameters.

    Raises:
        ValueError: the model has mixtures of experts, which are split by experts.
    """
    plan: dict[str, ParallelStyle] = {"": ModelParallel()}
    vocabulary, done = VocabularyParallel(), list[str]()
    for name, module in model.named_modules():
        if any(name.startswith(f"{outer}.") for outer in done) or not name:
            continue
        if isinstance(module, Experts):
            raise ValueError(
                f"tensor_parallel_plan: {name} is a mixture's experts: split those over the ranks with MixtureOfExperts.parallelize(group)"
            )
        if _is_whole(module):
            plan[name] = CopiesParallel()
            done.append(name)
        elif isinstance(module, (MultiHeadAttention, FeedForward)):
            plan[name] = HeadsParallel() if isinstance(module, MultiHeadAttention) else HiddenParallel()
            done.append(name)
        elif isinstance(module, (nn.Embedding, Classifier)):
            plan[name] = vocabulary
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue  # torch has no batch norm of DTensors beside its running statistics: plain, and the same on every rank
        elif next(module.parameters(recurse=False), None) is not None:
            plan[name] = WholeParallel()
    return plan


def gathered_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What ``state()`` of a model that was split is in one process: whole tensors under the names from before. Every rank must call."""
    names, full = [*dict(model.named_parameters()), *dict(model.named_buffers())], model.state_dict()
    return gathered(model, {name: full[name] for name in names if name in full})


def gathered(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], *, keep: bool = True, device: torch.device | None = None
) -> dict[str, torch.Tensor]:
    """Of tensors by the names of the model's parameters (they, their gradients, an optimizer's state) what one process has.

    Args:
        keep: whether this rank wants them; one that does not holds one whole tensor at a time, and gets {}.
        device: where they go; None: they stay where they are.
    """
    before = names_before(model, tensors)
    found: dict[str, torch.Tensor] = {}
    for name, t in tensors.items():
        full = (t.full_tensor() if isinstance(t, DTensor) else t).detach()
        if keep:
            full, then = full.to(device or full.device), before[name]
            found[then] = torch.cat([found[then], full]) if then in found else full  # in the order of the parts
    return found


def parted(model: nn.Module, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of :func:`gathered`: by the names of the split model's parameters, each still whole. What is no matrix or vector, as
    an optimizer's count of steps, every part gets."""
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
    """What names of a split model's parameters were before: those of the parts of a matrix have one in common."""
    split = [f"{name}." for name, m in model.named_modules() if isinstance(m, SplitProjection)]
    inside = {name: next((prefix for prefix in split if name.startswith(prefix)), None) for name in names}
    return {name: name if prefix is None else prefix + name.rsplit(".", 1)[1] for name, prefix in inside.items()}


def _is_whole(module: nn.Module) -> bool:
    """Whether every rank computes all of it: an attention whose scores mix parameters with plain tensors outside of our ops, or one that
    norms each head with a weight that all heads share, of whose gradient a rank's heads would give a part."""
    if isinstance(module, RotaryMultiHeadAttention):
        return module.query_norm is not None
    return isinstance(module, RelativeMultiHeadAttention)


def _distribute(module: nn.Module, name: str, mesh: DeviceMesh, dim: int | None, source: int | None) -> None:
    """Make the parameter a DTensor, split by a dimension or whole. That of rank ``source`` counts; None: each rank's own."""
    old = getattr(module, name)
    if old is not None and not isinstance(old, DTensor):
        t = distribute_tensor(old.detach(), mesh, [Replicate() if dim is None else Shard(dim)], src_data_rank=source)
        module.register_parameter(name, nn.Parameter(t, requires_grad=old.requires_grad))


def _mesh(style: str, mesh: DeviceMesh) -> int:
    """The number of ranks of a mesh of one dimension."""
    if mesh.ndim != 1:
        raise ValueError(f"{style}: the mesh must have one dimension, got {mesh}; of a larger one give mesh['its name']")
    return mesh.size()


class WholeParallel(ParallelStyle):
    """Parameters whole on every rank, as DTensors: all of a model's are then alike to optimizers and to gradient clipping."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _mesh("WholeParallel", device_mesh)
        for name, _ in list(module.named_parameters(recurse=False)):
            _distribute(module, name, device_mesh, None, self.src_data_rank)
        if not isinstance(module, _BY_OPS):
            _in_dtensors(module, device_mesh)
        return module


class CopiesParallel(ParallelStyle):
    """Plain parameters, the same on every rank: each computes all of the module, and finds the same gradients."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _mesh("CopiesParallel", device_mesh)
        if self.src_data_rank is not None:
            group = device_mesh.get_group()
            for p in module.parameters():
                dist.broadcast(p.detach(), dist.get_global_rank(group, self.src_data_rank), group=group)
        return module


def _in_dtensors(module: nn.Module, mesh: DeviceMesh) -> None:
    """Plain tensors become DTensors before the module's forward, and its results plain ones again."""

    def enter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(_as_dtensor(t, mesh) if isinstance(t, torch.Tensor) else t for t in inputs)

    def leave(module: nn.Module, inputs: Any, output: Any) -> Any:
        return whole(output) if isinstance(output, torch.Tensor) else output

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _as_dtensor(t: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return t if isinstance(t, DTensor) else from_local(t, mesh, [Replicate()])


class ModelParallel(WholeParallel):
    """Of a whole model: parameters of its own, and a check that the ranks draw the same dropout masks."""

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
    """ValueError on every rank unless their generators are alike: hidden states would no longer be the same on all of them."""
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    own = torch.tensor([zlib.crc32(state.numpy().tobytes())], device=device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    if any(int(other) != int(found[0]) for other in found):
        raise ValueError(
            "tensor parallel: the ranks' random generators differ, and so would their dropout masks: call torch.manual_seed with the same "
            "number on all ranks of the mesh before training"
        )


class VocabularyParallel(ParallelStyle):
    """The rows of an embedding's or classifier's weight over the ranks; each rank keeps all of it where there are too few.

    One object for all modules that may share a weight: they share it afterwards too.
    """

    def __init__(self) -> None:
        self._made: list[tuple[torch.Tensor, torch.Tensor]] = []  # before and after

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
    """A :class:`FeedForward`: each rank has some columns of the hidden layer, and one sum over the ranks follows (Megatron-LM's)."""

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
    """The projections that one matrix held, each split by heads. Returns them as a tuple."""

    def __init__(self, linear: nn.Linear, widths: Mapping[str, int], mesh: DeviceMesh, source: int | None) -> None:
        super().__init__()
        self.mesh = mesh
        weights = linear.weight.detach().split_with_sizes(list(widths.values()))
        biases = [None] * len(widths) if linear.bias is None else linear.bias.detach().split_with_sizes(list(widths.values()))
        for (name, width), weight, bias in zip(widths.items(), weights, biases):
            part = nn.Linear(linear.in_features, width, bias is not None, device="meta")
            part.weight, part.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
            _distribute(part, "weight", mesh, 0, source)
            _distribute(part, "bias", mesh, 0, source)
            self.add_module(name, part)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = _as_dtensor(x, self.mesh)
        return tuple(part(x) for part in self.children())


class HeadsParallel(ParallelStyle):
    """A :class:`MultiHeadAttention`: each rank has some of the heads, and one sum over the ranks follows (Megatron-LM's).

    The ranks' number must divide the heads of queries and of keys. ``qkv`` becomes three matrices. A cache is refused.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ranks = _mesh("HeadsParallel", device_mesh)
        assert isinstance(module, MultiHeadAttention)
        heads, key_heads = (width // module.head_dim for width in module.widths[:2])
        if heads % ranks or key_heads % ranks:
            raise ValueError(
                f"HeadsParallel: {ranks} ranks must divide the {heads} heads of queries and the {key_heads} of keys: use fewer ranks in "
                "this dimension of the mesh, and more in that of the data"
            )
        names = dict(zip(("query", "key", "value"), module.widths))
        if module.cross:
            parallelize_module(
                module.query, device_mesh, ColwiseParallel(use_local_output=False), src_data_rank=self.src_data_rank
            )
            names.pop("query")
            module.key_value = SplitProjection(module.key_value, names, device_mesh, self.src_data_rank)  # type: ignore[assignment]
        else:
            module.qkv = SplitProjection(module.qkv, names, device_mesh, self.src_data_rank)  # type: ignore[assignment]
        if module.sinks is not None:
            _distribute(module, "sinks", device_mesh, 0, self.src_data_rank)
        parallelize_module(module.out, device_mesh, RowwiseParallel(), src_data_rank=self.src_data_rank)
        module.register_forward_pre_hook(_refuse_cache, with_kwargs=True)
        return module


def _refuse_cache(module: nn.Module, inputs: Any, options: dict[str, Any]) -> None:
    if options.get("cache") is not None:
        raise ValueError(
            "MultiHeadAttention: a cache of keys is not split over ranks: generate with the whole model, from gathered_state()"
        )
