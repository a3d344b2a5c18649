# SPDX-License-Identifier: Apache-2.0
"""Two torchrun processes over gloo equal one process that accumulates two batches."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from pytransformer.training import read_metrics
from pytransformer.training.checkpoint import checkpoints, read_checkpoint
from support.models import TRAINED, assert_same_training

SCRIPT = """
import pathlib, sys, torch
sys.path.insert(0, sys.argv[1])
import toy
from pytransformer.training import distributed
torch.set_num_threads(1)
with distributed("cpu") as world:
    assert world.size == 2
    recipe = {"dropout": 0.0, "steps": 12, "log_every": 4, "epoch_steps": 6}
    trainer = toy.make_trainer(
        pathlib.Path(sys.argv[2]), world=world, accumulate=int(sys.argv[3]), **recipe
    )
    trainer.resume()
    trainer.fit(until=int(sys.argv[4]))
    # Sums of float32 values are exact in float64.
    flat = torch.cat([p.detach().double().flatten() for p in trainer.model.parameters()])
    assert torch.equal(world.total(flat.clone()), 2 * flat), "the processes have come apart"
    value = torch.zeros(3)
    references = sys.getrefcount(value)
    for _ in range(100):  # a reference in a gloo thread would outlive the interpreter
        held = sys.getrefcount(world.total(value)) - references
        assert held == 0, "a thread of gloo still holds the tensor"
"""


def torchrun(toy, environment, folder, *arguments):
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    where = os.path.dirname(toy.__file__)
    done = subprocess.run(
        [*command, where, str(folder), *map(str, arguments)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def weights(folder):
    return read_checkpoint(checkpoints(folder)[-1]).tensors


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_processes_equal_one(toy, subprocess_environment, tmp_path):
    alone = toy.make_trainer(
        tmp_path / "one", dropout=0.0, steps=12, log_every=4, epoch_steps=6, accumulate=2
    )
    alone.fit()
    torchrun(toy, subprocess_environment, tmp_path / "two", 1, 12)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert_same_training(two, one)
    first, second = (read_metrics(tmp_path / n / "metrics.jsonl") for n in ("one", "two"))
    assert [row["step"] for row in second] == [4, 6, 8, 12, 12], "one process writes the metrics"
    for a, b in zip(first, second):
        name = "epoch_loss" if "epochs" in a else "loss"
        assert b[name] == pytest.approx(a[name], rel=TRAINED), (
            "the loss told is that of all processes"
        )


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_processes_resume_bit_for_bit_while_accumulating(toy, subprocess_environment, tmp_path):
    torchrun(toy, subprocess_environment, tmp_path / "whole", 2, 12)
    torchrun(toy, subprocess_environment, tmp_path / "parts", 2, 5)
    torchrun(toy, subprocess_environment, tmp_path / "parts", 2, 12)
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
