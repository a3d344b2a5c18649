# SPDX-License-Identifier: Apache-2.0
"""The trainer learns, resumes with equal bits, survives interruptions and names errors."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from pytransformer.console import Console
from pytransformer.models import _files
from pytransformer.training import (
    Diverged,
    Recipe,
    plot_epochs,
    plot_losses,
    read_checkpoint,
    read_metrics,
)
from pytransformer.training.checkpoint import checkpoints


def state(trainer):
    """Return everything that a run writes, by name."""
    optimizer = trainer.optimizer.state_dict()["state"]
    tensors = dict(trainer.model.state_dict()) | {
        f"{i}.{k}": t for i, entries in optimizer.items() for k, t in entries.items()
    }
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same_bits(left, right):
    return (
        left.keys() == right.keys()
        and len(left) > 20
        and all(torch.equal(left[name], right[name]) for name in left)
    )


@pytest.mark.parametrize(
    "recipe", [{}, {"accumulate": 3, "clip": 0.5}, {"autocast": torch.bfloat16}], ids=str
)
def test_trainer_learns_and_resumes_bit_for_bit(toy, tmp_path, recipe):
    """Another trainer resumes within an epoch with the same weights, moments and metrics."""
    whole = toy.make_trainer(tmp_path / "whole", **recipe)
    whole.fit()
    rows = read_metrics(tmp_path / "whole" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(5, 31, 5)) and rows[-1]["loss"] < 0.8 * rows[
        0
    ]["loss"]
    first = toy.make_trainer(tmp_path / "parts", **recipe)
    first.fit(until=13)
    assert not same_bits(state(first), state(whole))
    second = toy.make_trainer(tmp_path / "parts", **recipe)
    torch.manual_seed(999)  # other draws of the process have no effect
    assert second.resume() and second.step == 13
    assert same_bits(state(second), state(first))
    second.fit()
    assert same_bits(state(second), state(whole))
    again = {row["step"]: row["loss"] for row in read_metrics(tmp_path / "parts" / "metrics.jsonl")}
    assert all(again[row["step"]] == row["loss"] for row in rows[3:]), (
        "the steps after resuming have the same losses"
    )


def test_training_preserves_the_callers_rng(toy):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trainer = toy.make_trainer()
    torch.manual_seed(5)
    trainer.fit(until=2)
    assert torch.equal(torch.rand(3), expected)


def test_accumulated_batches_weigh_tokens_equally(toy):
    """Two batches with different numbers of labels equal one batch with both."""
    trainer = toy.make_trainer(dropout=0.0, accumulate=2)
    batches = list(trainer.batches.epoch(0, start=0))[:2]
    counts = [int((b["labels"] != -100).sum()) for b in batches]
    assert counts[0] != counts[1], "choose another seed: equal counts prove nothing"
    joined = {name: torch.cat([b[name] for b in batches]) for name in batches[0]}
    loss, count = toy.objective(trainer.model, joined)
    loss.backward()
    assert count == sum(counts)
    expected = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.fit(until=1)
    for name, parameter in trainer.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_interrupted_checkpoint_writes_lose_nothing(toy, tmp_path, monkeypatch):
    trainer = toy.make_trainer(tmp_path)
    trainer.fit(until=4)
    good = state(trainer)

    def full_disk(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(_files.os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            trainer.fit(until=8)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-0000004.safetensors"]
    again = toy.make_trainer(tmp_path)
    assert again.resume() and again.step == 4 and same_bits(state(again), good)
    again.fit(until=6)
    (tmp_path / ".checkpoint-0000008.safetensors.x").write_text("killed while writing")
    again.save()
    assert not list(tmp_path.glob(".checkpoint-*")), "what the interrupted writing left is removed"


FORKED_RUNS = """
import os, pathlib, sys, torch
sys.path.insert(0, sys.argv[1])
import toy
torch.set_num_threads(1)  # a forked process has no other threads
toy.make_trainer().fit(until=1)  # imports once what every run needs
for _ in sys.stdin:
    process = os.fork()
    if not process:
        trainer = toy.make_trainer(pathlib.Path(sys.argv[2]), steps=100000, save_every=1, keep=3)
        trainer.resume()
        trainer.fit()
    print(process, flush=True)
    os.waitpid(process, 0)
"""


@pytest.mark.parametrize("kills", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_runs_resume_bit_for_bit(toy, subprocess_environment, tmp_path, kills):
    """Each run resumes the last one and is killed at a random moment.

    The newest checkpoint is always complete and has the bits of an uninterrupted run.
    """
    command = [sys.executable, "-c", FORKED_RUNS, os.path.dirname(toy.__file__), str(tmp_path)]
    random_time, steps = random.Random(1), []
    uninterrupted = toy.make_trainer(steps=100000)
    with subprocess.Popen(
        command,
        env=subprocess_environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        for _ in range(kills):
            parent.stdin.write("\n")
            parent.stdin.flush()
            process = int(parent.stdout.readline())
            last, start = checkpoints(tmp_path), time.monotonic()
            while checkpoints(tmp_path) == last and time.monotonic() < start + 60:
                time.sleep(0.01)
            time.sleep(random_time.uniform(0, 0.1))
            os.kill(process, signal.SIGKILL)
            tensors, facts = read_checkpoint(checkpoints(tmp_path)[-1])
            steps.append(facts["place"][0])
            uninterrupted.fit(until=steps[-1])
            expected = state(uninterrupted)
            assert all(
                torch.equal(tensors[f"model.{name}"], expected[name])
                for name in uninterrupted.model.state_dict()
            )
        parent.stdin.close()
    assert steps == sorted(set(steps)), "each run got further than the one before"
    trainer = toy.make_trainer(tmp_path, steps=100000)
    assert trainer.resume()
    uninterrupted.fit(until=trainer.step)
    assert same_bits(state(trainer), state(uninterrupted))


def test_checkpoints_are_kept_and_pruned(toy, tmp_path):
    trainer = toy.make_trainer(tmp_path, save_every=3, steps=12, keep=2)
    trainer.fit()
    assert [path.stem for path in checkpoints(tmp_path)] == [
        "checkpoint-0000009",
        "checkpoint-0000012",
    ]
    tensors, facts = read_checkpoint(checkpoints(tmp_path)[-1])
    assert torch.equal(tensors["model.embedding.weight"], tensors["model.output.weight"]), (
        "tied weights are written for each name"
    )
    assert facts["place"][0] == 12
    assert json.dumps(facts), "everything but tensors is JSON"


def test_unsuitable_checkpoints_are_refused(toy, tmp_path):
    assert not toy.make_trainer(tmp_path).resume(), "nothing there to resume"
    toy.make_trainer(tmp_path).fit(until=2)
    with pytest.raises(ValueError, match="of another run: it has batch_size 4 instead of 8"):
        toy.make_trainer(tmp_path, batch_size=8).resume()
    with pytest.raises(ValueError, match="it has seed 0 instead of 1"):
        toy.make_trainer(tmp_path, seed=1).resume()
    (path,) = checkpoints(tmp_path)
    other = toy.make_trainer(tmp_path)
    other.model.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="does not fit the model"):
        other.resume()
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"\x80\x04\x95pickle"):
        path.write_bytes(content)
        with pytest.raises(
            ValueError,
            match=r"checkpoint-0000002\.safetensors is (not a safetensors file|a pickle)",
        ):
            toy.make_trainer(tmp_path).resume()
    import safetensors.torch

    safetensors.torch.save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="is not a checkpoint of a training run"):
        read_checkpoint(path)


def test_metrics_of_lost_steps_are_dropped(toy, tmp_path):
    trainer = toy.make_trainer(tmp_path, log_every=1, save_every=4)
    trainer.fit(until=4)
    log = tmp_path / "metrics.jsonl"
    with open(log, "a") as file:  # steps after the checkpoint, with a truncated last line
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    again = toy.make_trainer(tmp_path, log_every=1)
    again.resume()
    again.fit(until=6)
    assert [row["step"] for row in read_metrics(log)] == [1, 2, 3, 4, 5, 6]
    log.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(ValueError, match="line 2: no JSON object: 'nonsense'"):
        read_metrics(log)


def test_evaluation_sees_the_model_without_dropout(toy, tmp_path):
    seen = []

    def evaluate(model):
        seen.append((model.training, torch.is_grad_enabled()))
        return {"validation_loss": 2.5}

    stream = io.StringIO()
    trainer = toy.make_trainer(
        tmp_path, evaluate=evaluate, evaluate_every=4, steps=10, console=Console(stream)
    )
    trainer.model.train()
    trainer.model.norm.eval()
    trainer._figures()
    assert trainer.model.training and not trainer.model.norm.training, (
        "a frozen submodule stays frozen"
    )
    seen.clear()
    trainer.fit()
    assert seen == [(False, False)] * 3 and trainer.model.training
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "validation_loss" in row]
    assert [row["step"] for row in rows] == [4, 8, 10]
    assert "step     10/10  validation_loss 2.5000" in stream.getvalue()
    assert "step      5/10  loss " in stream.getvalue()


def test_epochs_report_the_mean_loss_of_their_steps(toy, tmp_path):
    """An interruption within or between epochs does not change the mean."""
    stream = io.StringIO()
    options = {
        "steps": 10,
        "log_every": 1,
        "epoch_steps": 4,
        "evaluate": lambda model: {"accuracy": 0.25},
    }
    toy.make_trainer(tmp_path, console=Console(stream), **options).fit(until=7)
    again = toy.make_trainer(tmp_path, console=Console(stream), **options)
    assert again.resume()
    again.fit()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    losses, epochs = (
        [row["loss"] for row in rows if "loss" in row],
        [row for row in rows if "epoch_loss" in row],
    )
    assert len(losses) == 10 and [(row["step"], row["epochs"]) for row in epochs] == [
        (4, 1),
        (8, 2),
    ]
    labels = [  # labels weigh a step's loss
        (batch["labels"] != -100).sum().item()
        for batch in (b for e in range(2) for b in again.batches.epoch(e))
    ]
    for number, row in enumerate(epochs):
        part = slice(4 * number, 4 * number + 4)
        mean = sum(n * x for n, x in zip(labels[part], losses[part])) / sum(labels[part])
        assert row["epoch_loss"] == pytest.approx(mean, rel=1e-9) and row["accuracy"] == 0.25
    assert (
        "step      8/10  epoch 2: loss " in stream.getvalue()
        and "masked accuracy 0.2500" in stream.getvalue()
    )


def test_non_finite_losses_stop_the_run(toy, tmp_path):
    trainer = toy.make_trainer(tmp_path)
    trainer.fit(until=3)
    with torch.no_grad():
        trainer.model.norm.bias[0] = torch.nan
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(Diverged, match="the loss is nan at step 4"):
        trainer.fit()
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(before, trainer.model.parameters())
    )


def test_losses_are_plotted(toy, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra viz)")
    rows = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 2.0, "validation_loss": 2.5},
        {"step": 2, "accuracy": 0.5},
    ]
    for name in ("loss.png", "loss.svg"):
        path = plot_losses(rows, tmp_path / name, "a run for $5")
        assert path.stat().st_size > 2000
    assert "validation loss" in (tmp_path / "loss.svg").read_text(), "the legend says what is drawn"


def test_epochs_are_plotted(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra viz)")
    rows = [
        {"step": 1, "loss": 3.0},
        {"step": 5, "epochs": 1, "epoch_loss": 3.0, "validation_loss": 2.5, "accuracy": 0.5},
    ]
    assert "masked accuracy" in plot_epochs(rows, tmp_path / "epochs.svg").read_text()
    with pytest.raises(ValueError, match="no epoch among the rows"):
        plot_epochs(rows[:1], tmp_path / "none.svg")


@pytest.mark.parametrize(
    "wrong", [{"steps": 0}, {"steps": 5, "accumulate": 0}, {"steps": 5, "log_every": 0}]
)
def test_invalid_recipes_are_refused(wrong):
    name = list(wrong)[-1]
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Recipe(**wrong)
