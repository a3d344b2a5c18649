# SPDX-License-Identifier: Apache-2.0
"""One trainer for every model: accumulation, autocast, DDP, metrics, bit-exact resuming."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..console import Console
from ..models.generation import evaluation
from .batching import Batch, Batches, mix
from .checkpoint import (
    Checkpoint,
    checkpoint_path,
    checkpoints,
    locked,
    newest_whole,
    pack_optimizer,
    prune,
    read_checkpoint,
    unpack_optimizer,
    write_checkpoint,
)
from .distributed import World
from .metrics import Metrics
from .schedule import Schedule

if TYPE_CHECKING:
    from .parallel import SplitModel

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]  # of parameters or groups of them
# (model, batch) -> (mean loss, number of tokens or examples in that mean)
Objective = Callable[[nn.Module, Batch], tuple[torch.Tensor, int]]
Evaluate = Callable[[nn.Module], dict[str, float]]


@dataclass(frozen=True)
class Recipe:
    """Training settings; a step weights all tokens of its `accumulate` batches equally."""

    steps: int
    accumulate: int = 1
    # torch.bfloat16: matmuls and attention in bf16, parameters unchanged
    autocast: torch.dtype | None = None
    clip: float | None = None  # max gradient norm
    log_every: int = 50
    evaluate_every: int = 0  # 0: at the end only
    # Steps after which an epoch's mean loss and evaluation are logged; 0: never.
    epoch_steps: int = 0
    save_every: int = 0  # 0: at the end only
    keep: int = 2  # number of checkpoints
    seed: int = 0  # for dropout

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "log_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"Recipe: {name} must be at least 1, got {getattr(self, name)}")


class Diverged(RuntimeError):
    """The loss, the gradient or a parameter is not finite."""


_ADAM = partial(torch.optim.Adam, lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)


class _Step(nn.Module):
    """The model with its objective, wrapped by DDP, whose hooks need one forward call."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Batch) -> tuple[torch.Tensor, int]:
        return self.objective(self.model, batch)


class Trainer:
    """A training run that writes metrics (metrics.jsonl) and checkpoints to `out`.

    Each random number of a step depends only on the seed, the step and the rank; each batch depends
    on the seed and its position. A checkpoint needs no generator state, and a resumed run is
    bit-identical to an uninterrupted one.

    Args:
        model: any module; it moves to the world's device.
        objective: (model, batch) -> (mean loss, count). Gradients belong to the mean over the
            counts of all processes and accumulated batches, so accumulation and DDP change the
            result by rounding only.
        batches: the training data.
        recipe: the settings.
        schedule: the learning rate of each step, counted from 1.
        out: folder for metrics and checkpoints; None writes none.
        optimizer: an optimizer of the model's parameters or a factory such as
            `partial(torch.optim.AdamW, lr=0.0)`, which a mesh that splits parameters requires.
            Default: Adam with betas (0.9, 0.98) and eps 1e-9 (Vaswani et al. 2017, section 5.3).
        evaluate: model (in eval mode, without gradients) -> figures for the metrics.
        world: from `distributed()`; None: this process alone, on the model's device. If its mesh
            splits parameters, `trainer.model` is this process's part, and `model` has no parameters
            until :meth:`gather`.
        console: the output for progress; None: no output.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        batches: Batches,
        recipe: Recipe,
        schedule: Schedule,
        *,
        out: Path | None = None,
        optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
        evaluate: Evaluate | None = None,
        world: World | None = None,
        console: Console | None = None,
    ) -> None:
        self.world = world or World(device=next(model.parameters()).device)
        if len(batches) < self.world.parts:
            raise ValueError(
                f"Trainer: {len(batches)} batches an epoch do not suffice for {self.world.parts}"
                " processes"
            )
        self.batches, self.recipe, self.schedule = batches, recipe, schedule
        self.evaluate, self.console = evaluate, console if self.world.first else None
        self.split: SplitModel | None = None
        if self.world.splits:
            from .parallel import SplitModel  # imports slower than all of this package

            assert self.world.mesh is not None
            self.split = SplitModel(model, self.world.mesh, self.world.device)
            self.model, self.optimizer = (
                self.split.model,
                self.split.make_optimizer(optimizer or _ADAM),
            )
        else:
            self.model = model.to(self.world.device)
            made = optimizer or _ADAM
            self.optimizer = (
                made if isinstance(made, torch.optim.Optimizer) else made(model.parameters())
            )
        self._step: _Step | nn.parallel.DistributedDataParallel = _Step(self.model, objective)
        if self.split is None and self.world.replicas > 1:
            group = None if self.world.mesh is None else self.world.mesh.replica_group
            self._step = nn.parallel.DistributedDataParallel(self._step, process_group=group)
        self.out = out
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        self.metrics = Metrics(
            out / "metrics.jsonl" if out is not None and self.world.first else None
        )
        self.step, self.epoch, self.position = 0, 0, 0  # position: batches used in this epoch
        self.last_loss = math.nan
        # Loss * labels and labels of this process since the last epoch row.
        self.epoch_sums = [0.0, 0.0]
        self.log_sums = [0.0, 0.0]  # the same since the last metrics row
        self._damaged: list[Path] = []

    def fit(self, until: int | None = None) -> None:
        """Train up to step `until`, or the recipe's last step; write a checkpoint at the end.

        Raises:
            Diverged: the loss or the gradient is not finite.
            ValueError: another run trains in the same folder.
        """
        with locked(self.out) if self.out is not None and self.world.first else nullcontext():
            self._fit(until)

    def _fit(self, until: int | None) -> None:
        last = self.recipe.steps if until is None else min(until, self.recipe.steps)
        if self.step >= last:
            return
        stream, steps, tokens, start = self._stream(), 0, 0, time.monotonic()
        self.model.train()
        progress = (
            self.console.progress(last - self.step)
            if self.console and self.console.terminal
            else nullcontext()
        )
        with (
            torch.random.fork_rng(
                devices=[self.world.device] if self.world.device.type == "cuda" else []
            ),
            progress as bar,
        ):
            while self.step < last:
                loss, count = self._train_step(stream)
                self.log_sums = [self.log_sums[0] + loss * count, self.log_sums[1] + count]
                steps, tokens = steps + 1, tokens + count
                self.epoch_sums = [self.epoch_sums[0] + loss * count, self.epoch_sums[1] + count]
                if bar is not None:
                    bar.advance()
                    bar.step(f"step {self.step}, loss {self.last_loss:.3f}")
                if self.step % self.recipe.log_every == 0 or self.step == last:
                    self._log(steps, tokens, time.monotonic() - start)
                    steps, tokens, start = 0, 0, time.monotonic()
                if self.recipe.epoch_steps and self.step % self.recipe.epoch_steps == 0:
                    self._tell_epoch()
                elif self._due(self.recipe.evaluate_every, last):
                    self._evaluate()
                if self._due(self.recipe.save_every, last):
                    self._gather_sums()
                    self.save()

    def gather(self) -> None:
        """Return the trained parameters to the original model if they were split.

        Every process must call and needs memory for all of them.
        """
        if self.split is not None:
            self.split.give_back()

    def save(self) -> Path | None:
        """Write a checkpoint of this step, prune older ones to `recipe.keep`, and return its path.

        Every process must call; the first one writes. A split model is gathered on the CPU.

        Raises:
            Diverged: a parameter is not finite. Nothing is written.
        """
        if self.out is None or not (self.world.first or self.split):
            return None
        if self.split is None:
            state, of_optimizer = self.model.state_dict(), self.optimizer.state_dict()
        else:
            state = self.split.state(keep=self.world.first)
            of_optimizer = self.split.optimizer_state(self.optimizer, keep=self.world.first)
        if not self.world.first:
            return None
        if wrong := [
            name for name in self._trained(state) if not bool(state[name].isfinite().all())
        ]:
            raise Diverged(
                f"{', '.join(wrong[:3])} is not finite at step {self.step}; no checkpoint is"
                " written"
            )
        tensors, rest = pack_optimizer(of_optimizer)
        named = {f"model.{name}": tensor for name, tensor in state.items()}
        named |= {f"optimizer.{name}": tensor for name, tensor in tensors.items()}
        facts = {
            "place": [self.step, self.epoch, self.position],
            "optimizer": rest,
            "run": self._run(),
        }
        facts |= {"epoch_sums": self.epoch_sums, "log_sums": self.log_sums}
        path = checkpoint_path(self.out, self.step)
        write_checkpoint(path, Checkpoint(named, facts))
        for damaged in self._damaged:  # otherwise it would count as one of the newest
            if damaged != path:
                damaged.unlink(missing_ok=True)
        self._damaged = []
        prune(self.out, self.recipe.keep)
        return path

    def resume(self, path: Path | None = None) -> bool:
        """Load a checkpoint, by default the newest readable one of `out`; return False without one.

        Damaged checkpoints give a warning.

        Raises:
            ValueError: the checkpoint is damaged or belongs to another model, or to a run with
                other batches or seeds. With the same number of batches per step, another mesh
                continues up to rounding, and the same mesh bit for bit.
        """
        if path is None:
            result = newest_whole(self.out) if self.out is not None else None
            if result is None or self.out is None:
                return False
            path, checkpoint, wrong = result
            self._damaged = [each for each in checkpoints(self.out) if each.name > path.name]
            if wrong:
                warnings.warn(
                    f"resuming from {path.name}, because {'; '.join(wrong)}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        else:
            checkpoint = read_checkpoint(path)
        then, now = checkpoint.facts["run"], self._run()
        if different := [
            f"{name} {then.get(name)} instead of {now[name]}"
            for name in now
            if then.get(name) != now[name]
        ]:
            raise ValueError(f"{path} is of another run: it has {', '.join(different)}")
        state = {
            n.removeprefix("model."): t
            for n, t in checkpoint.tensors.items()
            if n.startswith("model.")
        }
        try:
            self.model.load_state_dict(state) if self.split is None else self.split.load(state)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{path} does not fit the model: {error}") from error
        tensors = {
            n.removeprefix("optimizer."): t
            for n, t in checkpoint.tensors.items()
            if n.startswith("optimizer.")
        }
        of_optimizer = unpack_optimizer(tensors, checkpoint.facts["optimizer"])
        if self.split is None:
            self.optimizer.load_state_dict(of_optimizer)
        else:
            self.split.load_optimizer(self.optimizer, of_optimizer)
        self.step, self.epoch, self.position = checkpoint.facts["place"]
        sums = checkpoint.facts.get("epoch_sums", [0.0, 0.0])
        self.epoch_sums = list(sums) if self.world.first else [0.0, 0.0]
        sums = checkpoint.facts.get("log_sums", [0.0, 0.0])
        self.log_sums = list(sums) if self.world.first else [0.0, 0.0]
        self.metrics.resume(self.step)
        return True

    def _run(self) -> dict[str, Any]:
        """Return the settings that a resumed run must share.

        The number of steps and the assignment of batches to processes may change.
        """
        recipe = {
            k: str(v) for k, v in asdict(self.recipe).items() if k in ("autocast", "clip", "seed")
        }
        batches = {
            "examples": len(self.batches.examples),
            "batch_size": self.batches.batch_size,
            "order": self.batches.seed,
        }
        parts = self.world.parts
        counts = {
            "batches a step": self.recipe.accumulate * parts,
            "batches an epoch": len(self.batches) // parts * parts,
        }
        return recipe | batches | counts

    def _due(self, every: int, last: int) -> bool:
        return self.step == last or (every > 0 and self.step % every == 0)

    def _stream(self) -> Iterator[Batch]:
        while True:
            for batch in self.batches.epoch(
                self.epoch, start=self.position, rank=self.world.part, world=self.world.parts
            ):
                self.position += self.world.parts
                yield {name: tensor.to(self.world.device) for name, tensor in batch.items()}
            self.epoch, self.position = self.epoch + 1, 0

    def _train_step(self, stream: Iterator[Batch]) -> tuple[float, int]:
        """Take one optimizer step; return this process's mean loss and count."""
        recipe, device = self.recipe, self.world.device
        self.step += 1
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, count_sum = torch.zeros((), device=device, dtype=torch.float64), 0
        for number in range(recipe.accumulate):
            batch = next(stream)
            # Seed by the batch's position in the step, so that dropout masks are equal on every
            # mesh.
            torch.manual_seed(
                mix(
                    recipe.seed,
                    self.step,
                    number * self.world.parts + self.world.part,
                    *self.world.rows,
                )
            )
            with self._no_sync(number), self._context():
                with torch.autocast(
                    device.type, dtype=recipe.autocast, enabled=recipe.autocast is not None
                ):
                    loss, count = self._step(batch)
                (loss * count).backward()
            loss_sum += loss.detach().double() * count
            count_sum += count
        sums = torch.stack(
            [loss_sum, torch.tensor(float(count_sum), device=device, dtype=torch.float64)]
        )
        total_loss, total = self.world.total(sums).tolist()
        rate = self.schedule(self.step)
        self.last_loss = loss_sum.item() / count_sum
        if not math.isfinite(total_loss):  # on every process, so that none waits for a failed one
            raise Diverged(
                f"the loss is {total_loss / total} at step {self.step} (learning rate {rate:.3g}):"
                " a lower rate, a longer warm-up or a bound of the gradient's norm may help; the"
                " checkpoints of before are as they were"
            )
        # DDP has already divided by the number of replicas
        norm = self._finish_gradients(self.world.replicas / total)
        if not math.isfinite(norm):
            raise Diverged(
                f"the gradient's norm is {norm} at step {self.step} (loss"
                f" {total_loss / total:.4g}); the parameters and the checkpoints of before are as"
                " they were"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return self.last_loss, count_sum

    def _no_sync(self, number: int) -> AbstractContextManager[Any]:
        """Skip the gradient reduction for all but the step's last batch."""
        if self.split is not None:
            self.split.sync_gradients(number == self.recipe.accumulate - 1)
        if (
            isinstance(self._step, nn.parallel.DistributedDataParallel)
            and number < self.recipe.accumulate - 1
        ):
            return self._step.no_sync()
        return nullcontext()

    def _context(self) -> AbstractContextManager[None]:
        """Split a batch's sequences over the processes that share it."""
        mesh = self.world.mesh
        if mesh is None or mesh.context_group is None:
            return nullcontext()
        from ..nn.context import context_parallel

        return context_parallel(self.model, mesh.context_group)

    def _finish_gradients(self, factor: float) -> float:
        """Scale and clip the gradients; return the norm before clipping."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.split is not None:
            return self.split.finish_gradients(parameters, factor, self.recipe.clip)
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(gradients, factor)
        norm = nn.utils.get_total_norm(gradients)
        if self.recipe.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.recipe.clip, norm)
        return norm.item()

    def _log(self, steps: int, tokens: int, seconds: float) -> None:
        sums = self._over_processes([*self.log_sums, tokens])
        # Else fit(until=...) ends here.
        if self.step % self.recipe.log_every == 0 or self.step == self.recipe.steps:
            self.log_sums = [0.0, 0.0]
        row = {
            "step": self.step,
            "epoch": self.epoch,
            "loss": sums[0] / sums[1],
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "milliseconds_a_step": 1e3 * seconds / steps,
            "tokens_a_second": sums[2] / max(seconds, 1e-9),
        }
        self._tell(row, f"loss {row['loss']:.4f}  {row['milliseconds_a_step']:.0f} ms a step")

    def _over_processes(self, numbers: list[float]) -> list[float]:
        """Return the sums over all processes."""
        return self.world.total(
            torch.tensor(numbers, dtype=torch.float64, device=self.world.device)
        ).tolist()

    def _figures(self) -> dict[str, float]:
        """Return the results of `evaluate`."""
        if self.evaluate is None:
            return {}
        with evaluation(self.model), torch.no_grad():
            return self.evaluate(self.model)

    def _evaluate(self) -> None:
        if self.evaluate is None:
            return
        figures = self._figures()
        told = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        self._tell({"step": self.step} | figures, told)

    def _gather_sums(self) -> None:
        """Send the sums of all processes to the first one, which writes the checkpoint."""
        sums = self._over_processes([*self.epoch_sums, *self.log_sums])
        self.epoch_sums, self.log_sums = (
            (sums[:2], sums[2:]) if self.world.first else ([0.0, 0.0], [0.0, 0.0])
        )

    def _trained(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of parameters in a state dict; a buffer may be infinite."""
        buffers = {name for name, _ in self.model.named_buffers()}
        return [name for name, t in state.items() if name not in buffers and t.is_floating_point()]

    def _tell_epoch(self) -> None:
        loss_sum, count = self._over_processes(self.epoch_sums)
        self.epoch_sums = [0.0, 0.0]
        figures = {"epoch_loss": loss_sum / count} | self._figures()
        number = self.step // self.recipe.epoch_steps
        names = {
            name: (
                name.removeprefix("epoch_").replace("accuracy", "masked accuracy").replace("_", " ")
            )
            for name in figures
        }
        told = "  ".join(f"{names[name]} {value:.4f}" for name, value in figures.items())
        self._tell(
            {"step": self.step, "epochs": number} | figures, f"epoch {number}: {told}", always=True
        )

    def _tell(self, row: dict[str, Any], text: str, always: bool = False) -> None:
        """Write a row; print it without a progress bar, or `always` above the bar."""
        if self.world.first:
            self.metrics.add(row)
        if self.console is not None and (always or not self.console.terminal):
            self.console.print(f"step {self.step:6}/{self.recipe.steps}  {text}")
