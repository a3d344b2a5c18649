# SPDX-License-Identifier: Apache-2.0
"""One run of a task: stages that resume, figures beside baselines, report and picture."""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from pytransformer.cli import OK, machine, train, training_html
from pytransformer.models import _files
from pytransformer.models._base import Model
from pytransformer.training import Batches, Recipe, Trainer, of_model, plot_runs
from pytransformer.training.batching import mix
from pytransformer.training.checkpoint import checkpoints
from pytransformer.training.distributed import World
from pytransformer.training.metrics import Row
from pytransformer.training.schedule import Schedule
from pytransformer.training.trainer import Evaluate, MakeOptimizer, Objective

_LIBRARIES = ("pytransformer-kernels", "torch", "tokenizers", "scikit-learn", "sacrebleu")


class Figure(NamedTuple):
    """A model's result on held-out examples, beside a simple baseline."""

    what: str  # "next sentences told from random ones, accuracy"
    value: float
    baseline: float | None = None
    by: str = ""  # the baseline: "bag of words, logistic regression"
    chance: float | None = None
    of: int | None = None  # number of held-out examples


class Run(train.Run):
    """The context of a task with several stages.

    Attributes:
        stages: the trainers by stage.
        sources: the data sets with version and license; a task adds to them.
    """

    def __init__(self, arguments: argparse.Namespace, world: World) -> None:
        super().__init__(arguments, world)
        self.stages: dict[str, Trainer] = {}
        self.sources: list[str] = []

    def seed(self, *names: object) -> torch.Generator:
        """Return a generator seeded by the seed and the names; seed torch's global RNG too."""
        number = mix(self.arguments.seed, *(hash_of(str(name)) for name in names))
        torch.manual_seed(number)
        return torch.Generator().manual_seed(number)

    def fit(
        self,
        stage: str,
        model: nn.Module,
        batches: Batches,
        schedule: Schedule,
        steps: int,
        *,
        evaluate: Evaluate | None = None,
        evaluations: int = 5,
        objective: Objective = of_model,
        clip: float | None = 1.0,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    ) -> Trainer:
        """Train in the folder `stage` of --out and return the model in eval mode.

        An interrupted run continues from its checkpoint. The trained model is saved there if it
        supports saving.

        Args:
            evaluations: the number of calls of `evaluate` during training.

        Raises:
            ValueError: the folder's checkpoints began with other weights or batches.
        """
        options, folder = self.arguments, self.out / stage
        mark = _fingerprint(model, batches)
        if options.resume and checkpoints(folder) and (folder / "begin.txt").read_text() != mark:
            raise ValueError(
                f"--resume: {folder} began with other weights or data than now (an earlier stage"
                " trained for longer, perhaps): remove that folder to train it anew, or name"
                " another --out"
            )
        recipe = Recipe(
            steps=steps, accumulate=options.accumulate,
            autocast=torch.bfloat16 if options.bf16 else None, clip=clip,
            log_every=max(1, min(100, steps // 20)), evaluate_every=max(1, steps // evaluations),
            save_every=options.save_every, seed=options.seed,
        )  # fmt: skip
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        trainer = Trainer(
            model, objective, batches, recipe, schedule, out=folder, optimizer=optimizer,
            evaluate=evaluate,
            world=self.world, console=self.console,
        )  # fmt: skip
        if self.world.first:
            self.write_options()
            _files.write_text(folder / "begin.txt", mark)
        self.say(
            f"{stage}: {parameters:.2f} million parameters, {len(batches.examples)} examples,"
            f" {steps} steps"
        )
        if options.resume and trainer.resume():
            self.say(f"going on from step {trainer.step}")
        trainer.fit()
        trainer.gather()
        model.eval()
        if self.world.first and isinstance(model, Model):
            model.save(folder)
        self.stages[stage] = trainer
        return trainer

    def report(self, figures: Sequence[Figure], **facts: Any) -> int:
        """Print the figures, write the reports and training.png, and return the exit code.

        `facts` are further entries of the report.
        """
        if not self.world.first:
            return OK
        rows = [
            (
                f.what,
                _short(f.value),
                _short(f.baseline) + (f" ({f.by})" if f.by else ""),
                _short(f.chance),
                f.of or "",
            )
            for f in figures
        ]
        self.console.table(
            ("held out", "model", "baseline", "chance", "of"), rows, right=("model", "chance", "of")
        )
        seconds = round(time.monotonic() - self.started, 1)
        report = {
            "command": shlex.join(["examples/train.py", *getattr(self.arguments, "argv", [])]),
            "figures": [
                {name: value for name, value in f._asdict().items() if value not in (None, "")}
                for f in figures
            ],
            "stages": {name: _summary(trainer) for name, trainer in self.stages.items()},
            **({"sources": self.sources} if self.sources else {}),
            **facts,
            "seconds": seconds,
            "processor_seconds": round(time.process_time(), 1),
            "cpu": machine.cpu_name(),
            "isa": machine.active_isa(),
            "threads": torch.get_num_threads(),
            "versions": {
                name: version for name in _LIBRARIES if (version := machine.version_of(name))
            },
        }
        _files.write_text(
            self.out / "report.json", json.dumps(report, indent=2, ensure_ascii=False) + "\n"
        )
        runs = {name: trainer.metrics.rows for name, trainer in self.stages.items()}
        training_html.write(self.out, self.arguments.task, runs, report, self._options)
        try:
            plot_runs(runs, self.out / "training.png", self.arguments.task)
        except ImportError as error:
            self.say(f"no plot: {error}")
        self.say(
            f"models, metrics.jsonl, report.json, report.html and training.png are in {self.out};"
            f" {seconds:.0f} s"
        )
        return OK


def hash_of(text: str) -> int:
    """Return a hash of the text that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _fingerprint(model: nn.Module, batches: Batches) -> str:
    """Return a value that is equal for runs with the same initial weights and first batch."""
    digest = hashlib.blake2b(digest_size=16)
    first = batches.batch(0, 0, batches.plan(0)[0])
    for name, tensor in [*model.state_dict().items(), *first.items()]:
        digest.update(
            f"{name} {tuple(tensor.shape)} {torch.hash_tensor(tensor.detach()).item()}".encode()
        )
    return digest.hexdigest()


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _summary(trainer: Trainer) -> dict[str, Any]:
    rows: list[Row] = trainer.metrics.rows
    logged = [row for row in rows if "milliseconds_a_step" in row]
    steps = [
        after["step"] - before
        for before, after in zip([0, *(row["step"] for row in logged)], logged)
    ]
    seconds = sum(n * row["milliseconds_a_step"] for n, row in zip(steps, logged)) / 1e3
    last = {
        name: value
        for row in rows
        for name, value in row.items()
        if "milliseconds" not in name and "a_second" not in name
    }
    parameters = sum(p.numel() for p in trainer.model.parameters())
    return {
        "parameters": parameters,
        "examples": len(trainer.batches.examples),
        "training_seconds": round(seconds, 1),
        **last,
    }
