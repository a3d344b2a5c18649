# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tasks on handwritten digits: options and one classifier."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from pytransformer.cli import machine

from ._run import Run


def add_sizes(
    parser: argparse.ArgumentParser, *, steps: int, width: int, layers: int, batch: int, rate: float
) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=layers, help="default %(default)s")
    model.add_argument(
        "--width", type=int, default=width, help="d_model, a multiple of 4 (default %(default)s)"
    )
    model.add_argument("--dropout", type=float, default=0.1, help="default %(default)s")
    how = parser.add_argument_group("training")
    how.add_argument("--steps", type=int, default=steps, help="of each model (default %(default)s)")
    how.add_argument(
        "--batch", type=int, default=batch, help="examples in a batch (default %(default)s)"
    )
    how.add_argument(
        "--rate", type=float, default=rate, help="the highest learning rate (default %(default)s)"
    )


def add_shift(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument(
        "--shift", type=int, default=default, metavar="N",
        help="images are moved by up to N pixels while they are learned (default %(default)s)",
    )  # fmt: skip


def image_collates(run: Run) -> tuple[Any, Any]:
    """Return the collate functions for training and for evaluation."""
    from .data.digits import image_collate

    if run.arguments.shift < 0:
        raise ValueError(f"--shift must be at least 0, got {run.arguments.shift}")
    return image_collate(run.arguments.shift), image_collate()


def digits(run: Run) -> tuple[Any, Any]:
    """Return training and held-out digits; the report names their source."""
    from .data.digits import load_digits

    found = load_digits()
    run.sources.append(
        f"scikit-learn {machine.version_of('scikit-learn')}: handwritten digits of the UCI"
        " repository, CC BY 4.0"
    )
    return found


def schedule(run: Run, steps: int) -> Any:
    from pytransformer.training import warmup_cosine

    return warmup_cosine(run.arguments.rate, steps // 10, steps)


def on_device(run: Run, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {name: tensor.to(run.world.device) for name, tensor in batch.items()} for batch in batches
    ]


def held_out_batch(run: Run, held_out: Any, collate: Any) -> list[dict[str, Any]]:
    """Return all held-out digits as one batch."""
    return on_device(run, [collate([held_out[i] for i in range(len(held_out))], None)])


def classify(
    run: Run,
    stage: str,
    model: Any,
    examples: Any,
    held_out: Any,
    collates: tuple[Any, Any],
    steps: int | None = None,
    also: Callable[[Any, Any], dict[str, float]] = lambda model, batch: {},
) -> float:
    """Train a digit classifier and return its held-out accuracy.

    `collates` are for training and evaluation. `also` computes further metrics during training from
    the model and all held-out digits.
    """
    from pytransformer.training import Batches
    from pytransformer.training.objective import held_out_loss

    batch = held_out_batch(run, held_out, collates[1])
    batches = Batches(examples, run.arguments.batch, collates[0], seed=run.arguments.seed)
    steps = run.arguments.steps if steps is None else steps
    run.fit(
        stage,
        model,
        batches,
        schedule(run, steps),
        steps,
        evaluate=lambda m: held_out_loss(m, batch) | also(m, batch[0]),
    )
    return held_out_loss(model, batch)["accuracy"]
