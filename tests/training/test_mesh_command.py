# SPDX-License-Identifier: Apache-2.0
"""`pytransformer train --mesh`: refused meshes, and a torchrun run resumed by one process."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest
import torch
from train import main

from pytransformer.cli import OK, USAGE
from pytransformer.training import read_metrics, write_pairs
from support.models import TRAINED

SMALL = [
    "--width",
    "64",
    "--layers",
    "1",
    "--batch",
    "16",
    "--vocabulary",
    "200",
    "--device",
    "cpu",
    "--dropout",
    "0",
    "--threads",
    "1",
]


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    words = list(
        itertools.product(
            "red green white".split(), "house dog book table".split(), "falls turns sings".split()
        )
    )
    write_pairs(
        path,
        [
            (f"the {a} {b} {c} and the {d} waits", f"{b} {a} {c} e {d}")
            for a, b, c in words
            for d in ("cat", "cow", "hen")
        ],
    )
    return path


@pytest.mark.parametrize("options, told", [
    (["--mesh", "tensor=2"],
        "needs several processes, got one: start them with torchrun --nproc-per-node"),
    (["--mesh", "heads=2"], "a mesh is written as data=2,tensor=2"),
    (["--timeout", "0"], "--timeout must be more than 0 seconds, got 0"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_invalid_meshes_are_refused(pairs, tmp_path, capsys, options, told):
    assert (
        main(["gpt", "--data", str(pairs), "--out", str(tmp_path / "out"), *SMALL, *options])
        == USAGE
    )
    assert told in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_one_process_resumes_a_run_on_a_mesh(pairs, tmp_path, train_script, subprocess_environment):
    """Two processes split the heads, then one continues: the losses equal those of one process."""
    task = ["gpt", "--data", str(pairs), *SMALL, "--accumulate", "2", "--save-every", "3"]
    assert main([*task, "--out", str(tmp_path / "alone"), "--steps", "6"]) == OK
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        train_script,
    ]
    options = ["--out", str(tmp_path / "mesh"), "--steps", "6", "--mesh", "tensor=2"]
    done = subprocess.run(
        [*command, *task, *options],
        env=subprocess_environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "mesh" / "report.json").read_text())
    assert report["stages"]["gpt"]["step"] == 6 and report["figures"], (
        "the whole model is back and answers"
    )
    losses, want = (
        read_metrics(tmp_path / name / "gpt" / "metrics.jsonl") for name in ("mesh", "alone")
    )
    (tmp_path / "mesh" / "gpt" / "checkpoint-0000006.safetensors").unlink()
    for found in (losses, _went_on(task, tmp_path)):
        assert [row["step"] for row in found] == [row["step"] for row in want]
        for a, b in zip(found, want):
            output = {
                name: value for name, value in b.items() if name in ("loss", "validation_loss")
            }
            assert {name: a[name] for name in output} == pytest.approx(output, rel=TRAINED)


def _went_on(task, tmp_path):
    assert main([*task, "--out", str(tmp_path / "mesh"), "--steps", "6", "--resume"]) == OK
    return read_metrics(tmp_path / "mesh" / "gpt" / "metrics.jsonl")
