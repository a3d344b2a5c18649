# SPDX-License-Identifier: Apache-2.0
"""The trainer on a data and tensor mesh against one process with as many batches per step."""

from __future__ import annotations

import functools
import re

import pytest

from pytransformer.training import distributed
from pytransformer.training.mesh import make_mesh, parse_mesh
from support import small_models
from support.ranks import Pool
from support.split_training import (
    Job,
    Ran,
    difference,
    held,
    on_a_mesh,
    refusal,
    small_on_a_mesh,
    small_run,
)

MESH = {"data": 2, "tensor": 2}


@functools.cache
def alone(model: str, a_step: int = 2) -> Ran:
    return Job(model, a_step=a_step).run()


@pytest.mark.parametrize("model, shard", [
    ("GPT", True), ("T5", False),
    *(pytest.param(model, shard, marks=pytest.mark.slow) for model,
        shard in (("GPT", False), ("T5", True))),
    *(pytest.param("Transformer", shard, marks=pytest.mark.slow) for shard in (False, True)),
])  # fmt: skip
def test_fifty_steps_equal_one_process(pool: Pool, model: str, shard: bool) -> None:
    """Clipped float64 AdamW on padded batches with different numbers of labels, all dropouts on."""
    want = alone(model)
    assert want.losses[-1] < 0.97 * want.losses[0], "it learns"
    for found in pool.run(4, on_a_mesh, Job(model), MESH, shard):
        assert difference(found, want) < 1e-9


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "Conformer-ctc" else pytest.mark.slow)
    for name in small_models.CONFIGS
])  # fmt: skip
def test_every_model_trains_on_a_mesh(pool: Pool, name: str) -> None:
    """Some parameters stay plain (relative attention, batch norm).

    They share one optimizer and norm with those of two meshes.
    """
    want = small_run(name)
    for found in pool.run(4, small_on_a_mesh, name, MESH):
        assert difference(found, want) < 1e-9


def test_unsplit_parameters_stay_plain(pool: Pool) -> None:
    """This holds if no dimension shards the data."""
    want = small_run("Conformer-ctc")
    for found in pool.run(4, small_on_a_mesh, "Conformer-ctc", {"tensor": 4}):
        assert difference(found, want) < 1e-9


@pytest.mark.parametrize("model", ["GPT", "T5", "Transformer"])
def test_split_sequences_equal_one_process(pool: Pool, model: str) -> None:
    """Two ranks split sequences, two others batches; lengths are 4 to 12 without dropout."""
    job = Job(model, steps=10, changes={"dropout": 0.0})
    want = job.run()
    for found in pool.run(4, on_a_mesh, job, {"data": 2, "context": 2}, model == "T5"):
        assert difference(found, want) < 1e-9


@pytest.mark.parametrize(
    "sizes, shard", [({"data": 4}, True), ({"tensor": 4}, False), (MESH, True)], ids=str
)
def test_state_decreases_with_the_ranks(pool: Pool, sizes: dict[str, int], shard: bool) -> None:
    """It is exact to the byte with shard; norms, positions and output biases stay full."""
    job = Job("GPT", a_step=4, changes={"vocab_size": 64})
    for own, whole in pool.run(4, held, job, sizes, shard):
        assert own == whole // 4 if sizes == {"data": 4} else whole / 4 <= own <= 0.32 * whole


@pytest.mark.parametrize(
    "text", ["data", "data=two", "data=0", "data=2,data=2", "rows=2", "tensor=2,", "data=-1", ""]
)
def test_invalid_meshes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a mesh is written as data=2,tensor=2.*got '"):
        parse_mesh(text)


def test_meshes_must_have_all_ranks() -> None:
    assert parse_mesh("tensor=2, data=3") == {"tensor": 2, "data": 3}
    for sizes, output in (
        (
            {"data": 2, "tensor": 3},
            "data=2, tensor=3 is a mesh of 6 ranks, and there are 4: start as many with torchrun",
        ),
        ({"tensor": 3}, "tensor=3 is a mesh of a multiple of 3 ranks, and there are 4"),
        ({"rows": 4}, "dimensions are among data, context, tensor, got rows"),
    ):
        with pytest.raises(ValueError, match=output):
            make_mesh(sizes, 4, "cpu")
    one = r"needs several processes, got one: start them with torchrun"
    with pytest.raises(ValueError, match=one), distributed("cpu", mesh={"tensor": 2}):
        pass


REFUSED = {
    "no names": (
        "expected dimensions among data, context, tensor, got none with a name: init_device_mesh"
    ),
    "other names": "expected dimensions among data, context, tensor, got rows, tensor",
    "context and tensor": "context and tensor both split attention: use one of them, with data",
    "no context": (
        "BERT does not take a part of a sequence; GPT, Transformer and T5 do: use data, or tensor"
    ),
    "some ranks": "it must have all 4 ranks, got 2",
    "heads": (
        "2 ranks must divide the 3 heads of queries and the 3 of keys: use fewer ranks in this"
        " dimension"
    ),
    "no plan": "needs a model with tensor_parallel_plan().*got Linear: use data alone",
    "optimizer": r"pass partial\(torch.optim.AdamW, lr=0.0\)",
    "by matrix": (
        "Adafactor needs full matrices, of which a rank of data=2, tensor=2 has parts; use an"
        " elementwise optimizer"
    ),
    "few batches": "1 batches an epoch do not suffice for 2 processes",
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses(pool: Pool, name: str) -> None:
    for output in pool.run(4, refusal, name):
        assert re.search(REFUSED[name], output), output
