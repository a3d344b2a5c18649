# SPDX-License-Identifier: Apache-2.0
"""`Run`, shared by all tasks of `examples/train.py`: resumed stages, fixed options, reports."""

from __future__ import annotations

import argparse
import json

import pytest
import torch
import train as examples

from pytransformer.cli import OK, USAGE, main
from pytransformer.training import Batches, warmup_cosine
from pytransformer.training.checkpoint import checkpoints, read_checkpoint
from pytransformer.training.distributed import World
from training_tasks._run import Figure, Run


def start(out, *, resume=False, steps=6, seed=0, width=1):
    arguments = argparse.Namespace(
        task="toy", argv=["toy"], out=out, resume=resume, steps=steps, seed=seed,
        width=width, accumulate=1,
        bf16=False, save_every=2, device="cpu", threads=None,
    )  # fmt: skip
    run = Run(arguments, World())
    run.begin()
    return run


def two_stages(run, toy, weights=None):
    """Add a second stage that starts from the first one's model."""
    examples = torch.randint(toy.WORDS, (24, 6), generator=run.seed("examples")).tolist()
    batches = Batches(examples, 4, toy.collate, seed=run.arguments.seed)
    run.seed("model")
    model, steps = toy.Toy(), run.arguments.steps
    for stage in ("first", "second"):
        run.fit(stage, model, batches, warmup_cosine(0.01, 1, 20), steps, objective=toy.objective,
                evaluate=lambda m: {"accuracy": 0.5})  # fmt: skip
        again = toy.Toy()
        again.load_state_dict(model.state_dict())
        model = again
    return run


def newest(out, stage):
    return read_checkpoint(checkpoints(out / stage)[-1]).tensors


def test_interrupted_runs_end_with_the_same_bits(toy, tmp_path, capsys):
    """The newest checkpoint of the second stage is lost, then the full stage."""
    whole = two_stages(start(tmp_path / "whole"), toy).out
    for lost in (1, 2):
        out = two_stages(start(tmp_path / f"parts{lost}"), toy).out
        for path in checkpoints(out / "second")[-lost:]:
            path.unlink()
        capsys.readouterr()
        two_stages(start(out, resume=True), toy)
        output = capsys.readouterr().out
        assert "going on from step 6" in output and ("going on from step 4" in output) == (
            lost == 1
        )
        for stage in ("first", "second"):
            a, b = newest(whole, stage), newest(out, stage)
            assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_runs_with_other_options_are_refused(toy, tmp_path):
    out = two_stages(start(tmp_path / "out"), toy).out
    with pytest.raises(ValueError, match="has checkpoints already: resume with --resume"):
        start(out)
    with pytest.raises(ValueError, match="was begun with width=1 instead of 2: use those"):
        start(out, resume=True, width=2)
    with pytest.raises(
        ValueError, match=r"second began with other weights or data than now.*remove that folder"
    ):
        two_stages(start(out, resume=True, steps=8), toy)
    assert newest(out, "first")["optimizer.0.step"].item() == 8, "the first stage may go on"


def test_report_has_figures_baselines_and_chance(toy, tmp_path, capsys, html_problems):
    run = two_stages(start(tmp_path / "out"), toy)
    assert (
        run.report(
            [Figure("accuracy", 0.75, 0.5, "the most frequent", 0.1, 40), Figure("loss", 2.0)],
            data="dice",
        )
        == OK
    )
    output = capsys.readouterr().out
    assert "0.500 (the most frequent)" in output and "0.750" in output
    report = json.loads((run.out / "report.json").read_text())
    assert report["figures"][0] == {
        "what": "accuracy", "value": 0.75, "baseline": 0.5, "by": "the most frequent",
        "chance": 0.1, "of": 40,
    }  # fmt: skip
    assert report["figures"][1] == {"what": "loss", "value": 2.0}
    page = (run.out / "report.html").read_text()
    assert html_problems(page) == []
    assert "the most frequent" in page and "second: accuracy" in page and "width" in page
    assert (
        report["command"] == "examples/train.py toy"
        and report["data"] == "dice"
        and report["versions"]["torch"]
    )
    assert report["stages"]["second"]["step"] == 6 and report["stages"]["second"]["accuracy"] == 0.5
    assert (
        report["seconds"] >= report["stages"]["first"]["training_seconds"] >= 0
        and report["threads"] >= 1
    )


@pytest.mark.parametrize("name", examples.TASKS)
def test_every_task_has_its_help(name, capsys):
    with pytest.raises(SystemExit) as stop:
        examples.main([name, "--help"])
    output = capsys.readouterr().out
    assert (
        stop.value.code == OK
        and "--resume" in output
        and examples.TASKS[name].__doc__.split("\n")[0].rstrip(".") in output
    )


@pytest.mark.parametrize("option", ["--layers", "--width", "--batch", "--vocabulary", "--epochs"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_sizes_below_one_are_refused(option, value, capsys, tmp_path):
    arguments = ["train", "translate", "--data", "x", "--out", str(tmp_path), option, value]
    assert main(arguments) == USAGE
    assert f"{option} must be at least 1, got {value}" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_device_cuda_without_a_gpu_is_an_error_of_one_line(capsys, tmp_path):
    arguments = ["train", "translate", "--data", "x", "--out", str(tmp_path), "--device", "cuda"]
    assert main(arguments) == USAGE
    said = capsys.readouterr().err
    assert "torch sees no CUDA GPU here" in said and said.count("\n") == 1


def test_threads_are_counted_from_one(capsys, tmp_path):
    assert (
        main(["train", "translate", "--data", "x", "--threads", "0", "--out", str(tmp_path)])
        == USAGE
    )
    assert "--threads must be at least 1, got 0" in capsys.readouterr().err
