# SPDX-License-Identifier: Apache-2.0
"""Faults in training: non-finite values, damaged files, failing writes, two runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pytransformer.models import _files
from pytransformer.training import Batches, Recipe, Trainer
from pytransformer.training.checkpoint import checkpoints, locked, read_checkpoint
from pytransformer.training.trainer import Diverged


class Line(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(3))


def objective(model: Line, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return an objective with a finite loss and a non-finite gradient in one batch."""
    loss = batch["x"].mean() * model.w.sum()
    return (loss + (model.w * 0).sum().sqrt() if batch["x"].max() > 2 else loss), 4


def trainer(out: Path | None, bad: int = 0, **recipe: Any) -> Trainer:
    examples = [1.0 + i / 40 for i in range(20)] + [3.0] * bad
    data = Batches(examples, 1, lambda ex, g: {"x": torch.tensor(ex)}, seed=1)
    settings = {"steps": 20, "log_every": 20, "save_every": 1, **recipe}
    return Trainer(Line(), objective, data, Recipe(**settings), lambda s: 0.01, out=out)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_non_finite_gradients_stop_the_run(clip: float | None, tmp_path: Path) -> None:
    run = trainer(tmp_path, bad=1, steps=21, keep=1, clip=clip)
    with pytest.raises(Diverged, match="the gradient's norm is"):
        run.fit()
    assert run.model.w.isfinite().all()
    for path in checkpoints(tmp_path):
        assert read_checkpoint(path).tensors["model.w"].isfinite().all()


def test_non_finite_parameters_are_not_written(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.fit(until=2)
    before = checkpoints(tmp_path)
    with torch.no_grad():
        run.model.w[0] = float("inf")
    with pytest.raises(Diverged, match="w is not finite at step 2"):
        run.save()
    assert checkpoints(tmp_path) == before


def test_newest_readable_checkpoint_is_resumed(tmp_path: Path) -> None:
    whole = trainer(None)
    whole.fit()
    trainer(tmp_path).fit(until=10)
    older, newest = checkpoints(tmp_path)
    os.truncate(newest, 100)
    run = trainer(tmp_path)
    with pytest.warns(
        RuntimeWarning, match=rf"resuming from {older.name}, because .*{newest.name}"
    ):
        assert run.resume()
    assert run.step == 9
    run.fit()
    assert torch.equal(run.model.w, whole.model.w)
    for path in checkpoints(tmp_path):
        os.truncate(path, 100)
    with pytest.raises(ValueError, match="no readable checkpoint"):
        trainer(tmp_path).resume()


def test_metrics_after_a_resume_equal_one_run(tmp_path: Path) -> None:
    whole = trainer(None)
    whole.fit()
    trainer(tmp_path).fit(until=15)
    run = trainer(tmp_path)
    run.resume()
    run.fit()
    assert run.metrics.rows[-1]["loss"] == whole.metrics.rows[-1]["loss"]


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from pytransformer.training.checkpoint import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="another run writes into"):
            trainer(tmp_path).fit()
        other.stdin.close()
    trainer(tmp_path).fit(until=1)


def test_locks_leave_no_empty_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("call", ["fsync", "fchmod", "replace"])
def test_failing_calls_leave_resumable_runs(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail each call of the run in turn, as a full disk does."""
    whole, real = trainer(None, steps=3, log_every=1), getattr(os, call)
    whole.fit()
    for number in range(100):
        out, count = tmp_path / str(number), 0

        def fail(*args: Any, number: int = number) -> Any:
            nonlocal count
            count += 1
            if count == number + 1:
                raise OSError(28, "No space left on device")
            return real(*args)

        run = trainer(out, steps=3, log_every=1)
        monkeypatch.setattr(_files.os, call, fail)
        try:
            run.fit()
            break
        except OSError as error:
            assert "No space left" in str(error)
        finally:
            monkeypatch.setattr(_files.os, call, real)
        assert not list(out.glob(".*"))
        again = trainer(out, steps=3, log_every=1)
        again.resume()
        again.fit()
        assert torch.equal(again.model.w, whole.model.w)
        assert [r["loss"] for r in again.metrics.rows] == [r["loss"] for r in whole.metrics.rows]
    assert 3 <= number < 99
