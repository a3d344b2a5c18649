# SPDX-License-Identifier: Apache-2.0
"""Models trained on several processes, for the tests of tensor_parallel_plan() and FSDP2."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from pytransformer import models
from pytransformer.nn.blocks import Block
from pytransformer.nn.parallel import gathered, gathered_state

from . import small_models
from .sharding_faults import planted
from .split_calls import mesh_of

Batch = Mapping[str, torch.Tensor]


def make(name: str, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the same model in every process."""
    torch.manual_seed(0)
    kind = getattr(models, name)
    return kind(kind.Config(**config)).to(dtype).train()


def train(
    model: nn.Module, batches: Sequence[Batch], seed: int = 1, clip: float | None = 0.5
) -> list[torch.Tensor]:
    """Return the loss of each AdamW step."""
    torch.manual_seed(seed)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.detach().clone())
    return losses


def split(model: nn.Module, data: DeviceMesh | None, tensor: DeviceMesh | None) -> nn.Module:
    if tensor is not None:
        parallelize_module(model, tensor, model.tensor_parallel_plan())  # type: ignore[operator]
    if data is not None:
        for block in [m for m in model.modules() if isinstance(m, Block)]:
            fully_shard(block, mesh=data)
        fully_shard(model, mesh=data)
    return model


def trained(
    rank: int,
    group: dist.ProcessGroup,
    made: tuple[str, Mapping[str, Any], torch.dtype],
    batches: Sequence[Batch],
    sizes: tuple[int, int],
    fault: str | None = None,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses and trained parameters; ``sizes`` = (data ranks, head ranks)."""
    ranks = sizes[0] * sizes[1]
    data: DeviceMesh | None
    tensor: DeviceMesh | None
    if min(sizes) > 1:
        both = mesh_of(group, sizes)
        data, tensor = both[both.mesh_dim_names[0]], both[both.mesh_dim_names[1]]  # type: ignore[index]
        part = both.get_local_rank(0)
    else:
        one = mesh_of(group, (ranks,))
        data, tensor, part = (one, None, rank) if sizes[0] > 1 else (None, one, 0)
    with planted(fault):
        model = split(make(*made), data, tensor)
        mine = [{n: t.chunk(sizes[0])[part] for n, t in batch.items()} for batch in batches]
        losses = train(model, mine)
    if data is not None:
        for loss in losses:
            dist.all_reduce(loss, group=data.get_group())
            loss /= sizes[0]
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return losses, {name: t.clone() for name, t in gathered_state(model).items()}


class Given(TorchDispatchMode):
    """A counter of the bytes that this process passes to collectives, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            # The DTensor op calls the collectives on its parts, which come here.
            return NotImplemented
        kind = (
            func.name()
            .split("::")[1]
            .strip("_")
            .removesuffix("_into_tensor")
            .replace("all_gather", "allgather")
        )
        if "c10d" in func.name() and kind in (
            "all_reduce",
            "allgather",
            "broadcast",
            "all_to_all_single",
            "reduce_scatter",
        ):
            first = args[1] if func.name() == "c10d::allgather_" else args[0]
            self.bytes[kind] += (first[0] if isinstance(first, list) else first).nbytes
        return func(*args, **(kwargs or {}))


def bytes_given(
    rank: int,
    group: dist.ProcessGroup,
    made: tuple[str, Mapping[str, Any], torch.dtype],
    batch: Batch,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes passed to collectives, forward and backward, under a plan."""
    model = split(make(*made), None, mesh_of(group, (dist.get_world_size(group),)))
    torch.manual_seed(0)
    with Given() as forward:
        loss = model(**batch).loss
    with Given() as backward:
        loss.backward()
    return dict(forward.bytes), dict(backward.bytes)


def sizes(
    rank: int,
    group: dist.ProcessGroup,
    made: tuple[str, Mapping[str, Any], torch.dtype],
    by_data: int,
) -> dict[str, tuple[int, int]]:
    """Return each parameter's local and total number of elements."""
    tensor = dist.get_world_size(group) // by_data
    both = mesh_of(group, (by_data, tensor))
    model = split(make(*made), both["data"], both["tensor"])
    found = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        found[name] = (p.to_local().numel(), p.numel())
    return found


def small(name: str) -> nn.Module:
    """Return a small float64 model with dropout and without experts, which plans refuse."""
    wanted: dict[str, Any] = {"attention_dropout": 0.1, "activation_dropout": 0.1, "experts": None}
    fields = {f.name for f in dataclasses.fields(small_models.CONFIGS[name])}
    model: nn.Module = small_models.build(name, **{n: v for n, v in wanted.items() if n in fields})
    return model.double().train()


def loss_and_gradients(model: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Return loss and gradients for padded inputs."""
    given = {
        n: t.double() if t.is_floating_point() else t for n, t in small_models.inputs(name).items()
    }
    torch.manual_seed(5)
    loss = model(**given).loss
    loss.backward()
    return {"loss": loss.detach()} | gathered(
        model, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    )


def split_gradients(rank: int, group: dist.ProcessGroup, name: str) -> dict[str, torch.Tensor]:
    return loss_and_gradients(
        split(small(name), None, mesh_of(group, (dist.get_world_size(group),))), name
    )


def refusal(
    rank: int,
    group: dist.ProcessGroup,
    made: tuple[str, Mapping[str, Any], torch.dtype],
    seeds: bool,
    **batch: Any,
) -> str:
    """Return the error of a plan or of a training call; ``seeds`` makes the ranks' RNGs differ."""
    try:
        model = split(make(*made), None, mesh_of(group, (dist.get_world_size(group),)))
        torch.manual_seed(rank if seeds else 0)
        model(**batch)
    except ValueError as error:
        return str(error)
    return ""


def saved_and_back(
    rank: int,
    group: dist.ProcessGroup,
    made: tuple[str, Mapping[str, Any], torch.dtype],
    folder: str,
) -> tuple[str, bool]:
    """Return the error of saving a split model, and whether its gathered state loads again."""
    model, refused = split(make(*made), None, mesh_of(group, (dist.get_world_size(group),))), ""
    assert isinstance(model, models.GPT)
    try:
        model.save(folder)
    except ValueError as error:
        refused = str(error)
    state, fresh = gathered_state(model), make(*made)
    assert isinstance(fresh, models.GPT)
    for p in fresh.parameters():
        nn.init.zeros_(p)
    fresh.load_state(state, "the split model")
    again = make(*made).state_dict()
    return refused, all(torch.equal(t, again[n]) for n, t in fresh.state_dict().items())


def converted(rank: int, group: dist.ProcessGroup, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Return losses of a converted Hugging Face model under FSDP2, for the full batch."""
    model = hugging_face_model()
    data = mesh_of(group, (dist.get_world_size(group),))
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    losses = train(
        model, [{n: t.chunk(data.size())[rank] for n, t in batch.items()} for batch in batches]
    )
    for loss in losses:
        dist.all_reduce(loss, group=group)
        loss /= data.size()
    return losses


def hugging_face_model() -> Any:
    """Return a small converted BERT with a classifier."""
    import transformers

    from pytransformer.integrations.convert import convert

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
    }
    config = transformers.BertConfig(
        **sizes,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForSequenceClassification(config).double().train()
    convert(model)
    return model
