# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a mesh resume on other meshes and alone, after a kill too, or are refused."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import pytransformer
from pytransformer.training import read_checkpoint, read_metrics
from pytransformer.training.checkpoint import checkpoints
from support.ranks import Pool
from support.split_training import Job, difference, on_a_mesh, refusal_to_resume

MESH = {"data": 2, "tensor": 2}
SECONDS = 20.0  # max seconds that a process waits for another, startup included


@pytest.mark.parametrize("model", ["GPT", pytest.param("T5", marks=pytest.mark.slow)])
def test_runs_resume_on_other_meshes(pool: Pool, tmp_path: Path, model: str) -> None:
    """Meshes are 2 x 2, sharded over the data, 4 x 1, 1 x 4 and one process.

    Losses and weights equal those of an uninterrupted run.
    """
    job = Job(model, steps=20, a_step=4)
    want = job.run()
    job = job._replace(out=str(tmp_path))
    for until, sizes, shard in (
        (4, MESH, False),
        (8, MESH, True),
        (12, {"data": 4}, False),
        (16, {"tensor": 4}, False),
    ):
        pool.run(4, on_a_mesh, job._replace(until=until), sizes, shard)
        assert checkpoints(tmp_path)[-1].name == f"checkpoint-{until:07}.safetensors"
    found = job.run()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 21))
    assert difference(found, want) < 1e-9
    assert all(
        t.device.type == "cpu" and type(t) is torch.Tensor
        for t in read_checkpoint(checkpoints(tmp_path)[-2]).tensors.values()
    )


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "shard"])
def test_same_mesh_resumes_bit_for_bit(pool: Pool, tmp_path: Path, shard: bool) -> None:
    job = Job("GPT", steps=8, dtype=torch.float32)
    want = pool.run(4, on_a_mesh, job, MESH, shard)
    pool.run(4, on_a_mesh, job._replace(out=str(tmp_path), until=3), MESH, shard)
    for found, whole in zip(
        pool.run(4, on_a_mesh, job._replace(out=str(tmp_path)), MESH, shard), want
    ):
        assert found.losses == whole.losses and all(
            torch.equal(t, whole.state[n]) for n, t in found.state.items()
        )


def test_other_batches_per_step_are_refused(pool: Pool, tmp_path: Path) -> None:
    job = Job("GPT", steps=6, until=1, out=str(tmp_path))
    job.run()
    for changed, output in (
        (job._replace(a_step=4), "it has batches a step 2 instead of 4"),
        (
            job._replace(changes={"hidden": 32}),
            r"does not fit the model.*w1.weight is \(24, 16\), expected \(32, 16\)",
        ),
    ):
        assert all(
            re.search(output, error) for error in pool.run(4, refusal_to_resume, changed, MESH)
        )


SCRIPT = """
import sys, torch
from support.split_training import Job
from pytransformer.training import distributed
torch.set_num_threads(1)
with distributed("cpu", mesh={"data": 2, "tensor": 2}, timeout=float(sys.argv[2])) as world:
    Job("GPT", out=sys.argv[1]).run(world)
"""


def start(out: Path) -> list[subprocess.Popen[str]]:
    """Start four processes like torchrun, without a parent that ends the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [
        str(Path(pytransformer.__file__).parents[1]),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    shared = {
        **os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1", "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, str(out), str(SECONDS)]
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(4)]
    return [
        subprocess.Popen(
            command, env=e, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        for e in environments
    ]


@pytest.mark.parametrize("how", [
    signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow),
], ids=lambda s: s.name)  # fmt: skip
def test_lost_process_ends_the_others_and_the_run_resumes(
    tmp_path: Path, how: signal.Signals
) -> None:
    """One is killed or stopped after the first checkpoint; the others report it and end.

    A restart ends like one process.
    """
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    want = Job("GPT").run()
    processes = start(tmp_path)
    try:
        deadline = time.monotonic() + 120
        while (
            not checkpoints(tmp_path)
            and time.monotonic() < deadline
            and all(p.poll() is None for p in processes)
        ):
            time.sleep(0.01)
        processes[3].send_signal(how)
        message = "another process of the run has ended, or did not answer within 20 s"
        for process in processes[:3]:
            stderr = process.communicate(timeout=SECONDS + 60)[1]
            assert process.returncode == 1
            assert f"LostProcess: {message}" in stderr
    finally:
        for process in processes:
            process.kill()
            process.wait()
    reached = int(checkpoints(tmp_path)[-1].stem.split("-")[1])
    assert 10 <= reached < 50, "choose another moment: it was to be killed on the way"
    again = start(tmp_path)
    assert [(p.communicate(timeout=240)[1], p.returncode)[1] for p in again] == [0] * 4
    tensors = read_checkpoint(checkpoints(tmp_path)[-1]).tensors
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 51))
    found = type(want)(
        [row["loss"] for row in rows],
        {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")},
    )
    assert difference(found, want) < 1e-9
