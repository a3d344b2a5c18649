# SPDX-License-Identifier: Apache-2.0
"""The trainer on a mesh: per-rank test functions, and the same run in one process."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pytransformer import models
from pytransformer.nn.context import context_parallel
from pytransformer.training import (
    Batches,
    Recipe,
    Trainer,
    World,
    causal_collate,
    of_model,
    translation_collate,
    warmup_cosine,
)
from pytransformer.training.mesh import Mesh, make_mesh
from pytransformer.training.parallel import local

from . import small_models
from .sharding_faults import planted
from .split_models import make, small

VOCABULARY = 61
_SIZES = {"d_model": 16, "num_heads": 4, "hidden": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT": {**_SIZES, "num_layers": 2, "vocab_size": VOCABULARY, "max_length": 16,
        "attention_dropout": 0.1, "dropout": 0.1},
    "T5": {**_SIZES, "num_layers": 1, "vocab_size": VOCABULARY, "head_dim": 4, "buckets": 8,
        "dropout": 0.1},
    "Transformer": {
        **_SIZES, "num_encoder_layers": 1, "num_decoder_layers": 1, "vocab_size": VOCABULARY,
        "max_length": 16, "dropout": 0.1,
    },
}  # fmt: skip


class Job(NamedTuple):
    """A training run; ``a_step`` is the number of batches per step over all replicas."""

    model: str
    steps: int = 50
    a_step: int = 2
    dtype: torch.dtype = torch.float64
    clip: float | None = 0.5
    out: str | None = None
    until: int | None = None
    fault: str | None = None
    changes: Mapping[str, Any] = {}

    def trainer(self, world: World | None = None) -> Trainer:
        torch.manual_seed(0)
        kind = getattr(models, self.model)
        model = kind(kind.Config(**{**CONFIGS[self.model], **self.changes})).to(self.dtype)
        parts = world.parts if world else 1
        recipe = Recipe(
            steps=self.steps,
            accumulate=self.a_step // parts,
            clip=self.clip,
            log_every=1,
            save_every=10 if self.out else 0,
        )
        out = None if self.out is None else Path(self.out)
        return Trainer(
            model, of_model, _batches(self.model), recipe, warmup_cosine(0.01, 5, self.steps + 1),
            out=out, world=world,
            optimizer=partial(torch.optim.AdamW, lr=0.0),
        )  # fmt: skip

    def run(self, world: World | None = None) -> Ran:
        with planted(self.fault):
            trainer = self.trainer(world)
            trainer.resume()
            trainer.fit(until=self.until)
        state = (
            dict(trainer.model.state_dict())
            if trainer.split is None
            else trainer.split.state(keep=True)
        )
        return Ran(
            [row["loss"] for row in trainer.metrics.rows],
            {name: t.clone() for name, t in state.items()},
        )


class Ran(NamedTuple):
    """The loss of each step, on the first rank only, and the trained weights."""

    losses: list[float]
    state: dict[str, torch.Tensor]


def _batches(model: str) -> Batches:
    """Return batches of varied lengths, so that padding and label counts vary."""
    generator = torch.Generator().manual_seed(1)

    def sequence() -> list[int]:
        length = int(torch.randint(4, 13, (), generator=generator))
        return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()

    if model == "GPT":
        return Batches([sequence() for _ in range(66)], 4, causal_collate(0), seed=3)
    return Batches(
        [(s := sequence(), [3 + (t * 7) % 58 for t in s]) for _ in range(66)],
        4,
        translation_collate(0, 1, 2),
        seed=3,
    )


@functools.cache
def world_of(sizes: tuple[tuple[str, int], ...], shard: bool) -> World:
    """Return all processes of the default group as a mesh."""
    ranks = dist.get_world_size()
    mesh = Mesh(make_mesh(dict(sizes), ranks, "cpu"), shard=shard)
    return World(dist.get_rank(), ranks, torch.device("cpu"), mesh)


def on_a_mesh(
    rank: int, group: dist.ProcessGroup, job: Job, sizes: Mapping[str, int], shard: bool = False
) -> Ran:
    return job.run(world_of(tuple(sizes.items()), shard))


def refusal_to_resume(
    rank: int, group: dist.ProcessGroup, job: Job, sizes: Mapping[str, int]
) -> str:
    """Return the error of resuming from another run's checkpoint."""
    try:
        job.trainer(world_of(tuple(sizes.items()), False)).resume()
    except ValueError as error:
        return str(error)
    return ""


def held(
    rank: int, group: dist.ProcessGroup, job: Job, sizes: Mapping[str, int], shard: bool
) -> tuple[int, int]:
    """Return the bytes of parameters and optimizer state on this rank and of the full model."""
    trainer = job.trainer(world_of(tuple(sizes.items()), shard))
    trainer.fit(until=1)
    tensors = [
        *trainer.model.parameters(),
        *(t for entries in trainer.optimizer.state.values() for t in entries.values()),
    ]
    of_matrices = [t.detach() for t in tensors if t.dim()]
    return sum(local(t).nbytes for t in of_matrices), sum(
        t.numel() * t.itemsize for t in of_matrices
    )


def difference(found: Ran, want: Ran) -> float:
    """Return the max difference of losses and weights, relative to the max of each."""
    assert found.state.keys() == want.state.keys()
    # The first rank only.
    losses = [(torch.tensor(found.losses), torch.tensor(want.losses))] if found.losses else []
    assert not losses or losses[0][0].shape == losses[0][1].shape, "as many steps"
    pairs = [*losses, *((found.state[name], t) for name, t in want.state.items())]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


def refusal(rank: int, group: dist.ProcessGroup, name: str) -> str:
    """Return the error of a mesh or of a trainer on one."""
    sizes = (("data", 2), ("tensor", 2))
    recipe, schedule = Recipe(steps=1), warmup_cosine(0.01, 0, 1)
    try:
        if name == "no names":
            Mesh(init_device_mesh("cpu", (2, 2)))
        elif name == "other names":
            Mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "tensor")))
        elif name == "some ranks":
            Mesh(DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",)))
        elif name == "context and tensor":
            Mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "context")))
        elif name == "no context":
            with context_parallel(models.BERT(models.BERTConfig(num_layers=1))):
                pass
        elif name == "heads":
            Job("GPT", changes={"d_model": 12, "num_heads": 3, "num_kv_heads": 3}).trainer(
                world_of(sizes, False)
            )
        else:
            model = (
                torch.nn.Linear(2, 2)
                if name == "no plan"
                else models.GPT(models.GPTConfig(**CONFIGS["GPT"]))
            )
            optimizer: Any = {
                "optimizer": torch.optim.AdamW(model.parameters()),
                "by matrix": partial(torch.optim.Adafactor, lr=0.0)
            }.get(name)  # fmt: skip
            batches = (
                Batches([[3, 4]] * 4, 4, causal_collate(0))
                if name == "few batches"
                else _batches("GPT")
            )
            Trainer(
                model,
                of_model,
                batches,
                recipe,
                schedule,
                optimizer=optimizer,
                world=world_of(sizes, False),
            )
    except ValueError as error:
        return str(error)
    return ""


def small_run(name: str, world: World | None = None) -> Ran:
    """Train any kind of small model for three steps, two batches each; buffers are not compared.

    Adam would amplify rounding in gradients that are zero, such as a bias before a batch norm, to
    full steps.
    """
    given = small_models.inputs(name)
    rows = len(given["labels"])

    def collate(places: list[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
        found = {n: t[[i % rows for i in places]] for n, t in given.items()}
        return {n: t.double() if t.is_floating_point() else t for n, t in found.items()}

    def objective(
        model: torch.nn.Module, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, int]:
        return model(**batch).loss, len(batch["labels"])

    recipe = Recipe(steps=3, accumulate=2 // (world.parts if world else 1), clip=0.5, log_every=1)
    trainer = Trainer(
        small(name), objective, Batches(list(range(24)), 4, collate), recipe, lambda step: 0.01,
        world=world,
        optimizer=partial(torch.optim.SGD, lr=0.0, momentum=0.9),
    )  # fmt: skip
    trainer.fit()
    state = (
        dict(trainer.model.state_dict())
        if trainer.split is None
        else trainer.split.state(keep=True)
    )
    learned = {n for n, _ in small(name).named_parameters()}
    return Ran(
        [row["loss"] for row in trainer.metrics.rows],
        {n: t.clone() for n, t in state.items() if n in learned},
    )


def small_on_a_mesh(
    rank: int, group: dist.ProcessGroup, name: str, sizes: Mapping[str, int]
) -> Ran:
    return small_run(name, world_of(tuple(sizes.items()), False))


def loss_and_gradients(model: Any, given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    loss = model(**given).loss
    loss.backward()
    return {"loss": loss.detach()} | {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


def in_context(
    rank: int,
    group: dist.ProcessGroup,
    made: tuple[str, Mapping[str, Any], torch.dtype],
    given: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """Return the loss of sequences shared by the group's ranks, and the sum of their gradients."""
    model = make(*made)
    with context_parallel(model, group):
        found = loss_and_gradients(model, given)
    for name, t in found.items():
        if name != "loss":
            dist.all_reduce(t, group=group)
    return found
