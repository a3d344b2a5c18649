# SPDX-License-Identifier: Apache-2.0
"""Trains a model, with its progress, metrics and checkpoints in one folder; again with --resume where it stopped.

translate   an encoder-decoder that translates sentences, on any file with two columns and a tab between them.
            `python examples/portuguese.py`, in a clone, writes such a file.

Started by `torchrun` it trains in several processes, each on its GPU if there are any.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from ..console import Console
from . import OK, UsageError

DEFAULT_OUT = Path("results") / "translate"
_SHOWN = 5  # wrong translations in the report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", choices=["translate"], help="what to learn")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="sentence pairs, two columns, a tab between them"
    )
    data.add_argument("--held-out", type=Path, metavar="FILE", help="pairs to check with (default: one in 20 of --data)")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=2, help="of encoder and decoder each (default %(default)s)")
    model.add_argument("--width", type=int, default=128, help="d_model, a multiple of 8 (default %(default)s)")
    model.add_argument("--vocabulary", type=int, default=7000, help="tokens a language at most (default %(default)s)")
    how = parser.add_argument_group("training")
    how.add_argument("--steps", type=int, default=1500, help="default %(default)s")
    how.add_argument("--batch", type=int, default=64, help="pairs in a batch (default %(default)s)")
    how.add_argument("--accumulate", type=int, default=1, metavar="N", help="batches a step (default %(default)s)")
    how.add_argument("--warmup", type=int, default=300, help="steps until the highest learning rate (default %(default)s)")
    how.add_argument("--dropout", type=float, default=0.1, help="default %(default)s")
    how.add_argument("--bf16", action="store_true", help="matrix products and attention in bfloat16")
    how.add_argument("--seed", type=int, default=0, help="default %(default)s")
    how.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU if there is one")
    how.add_argument("--threads", type=int, help="of the CPU (default: torch's choice)")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="default %(default)s")
    parser.add_argument(
        "--save-every", type=int, default=500, metavar="N", help="steps between checkpoints (default %(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")


def run(arguments: argparse.Namespace) -> int:
    from ..training.distributed import distributed

    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    try:
        with distributed(arguments.device) as world:
            return _train(arguments, world)
    except (ValueError, OSError, ImportError) as error:
        raise UsageError(str(error)) from error


def _pairs(arguments: argparse.Namespace) -> tuple[list[Any], list[Any], str]:
    """(training pairs, held-out pairs, where they are from)."""
    from ..training import read_pairs, split_pairs

    train = read_pairs(arguments.data)
    if arguments.held_out is not None:
        return train, read_pairs(arguments.held_out), str(arguments.data)
    train, held_out = split_pairs(train)
    if not train or not held_out:
        raise UsageError(f"{arguments.data} has too few sentence pairs to hold one in 20 out; name some with --held-out")
    return train, held_out, str(arguments.data)


def _train(arguments: argparse.Namespace, world: Any) -> int:
    from ..training import Recipe
    from ..training.checkpoint import checkpoints
    from ..training.translation import TranslationPlan, exactness, new_translator, translation_trainer

    console, out, started = Console(), arguments.out, time.monotonic()
    say = console.print if world.first else lambda text="": None
    if not arguments.resume and checkpoints(out):
        raise UsageError(f"{out} holds checkpoints already: go on with --resume, or name another folder with --out")
    train, held_out, source = _pairs(arguments)
    plan = TranslationPlan(
        layers=arguments.layers, d_model=arguments.width, vocabulary=arguments.vocabulary, batch_size=arguments.batch,
        steps=arguments.steps, warmup=arguments.warmup, dropout=arguments.dropout, seed=arguments.seed,
    )  # fmt: skip
    recipe = Recipe(
        steps=arguments.steps, accumulate=arguments.accumulate, autocast=torch.bfloat16 if arguments.bf16 else None,
        log_every=min(100, arguments.steps), evaluate_every=500, save_every=arguments.save_every, seed=arguments.seed,
    )  # fmt: skip
    translator = new_translator(train, plan)
    trainer = translation_trainer(translator, train, held_out, plan, recipe, out=out, world=world, console=console)
    say(f"{len(train)} sentence pairs to learn from and {len(held_out)} held out, from {source}")
    size = translator.model.num_parameters() / 1e6
    say(f"{size:.2f} million parameters; {len(translator.source)} and {len(translator.target)} tokens; {recipe.steps} steps")
    if arguments.resume and trainer.resume():
        say(f"going on from step {trainer.step}")
    trainer.fit()
    if not world.first:
        return OK
    translator.model.eval()
    translator.save(out)
    exact = exactness(translator, held_out)
    report = {"exact": exact.right, "held_out": exact.total, "seconds": round(time.monotonic() - started, 1)}
    (out / "report.json").write_text(json.dumps({**report, "plan": dataclasses.asdict(plan)}, indent=2) + "\n")
    say(f"{exact.right} of {exact.total} held-out sentences translated word for word: {100 * exact.share:.1f} %")
    for wrong in exact.wrong[:_SHOWN]:
        say("   {}\n     said    {}\n     wanted  {}".format(*wrong))
    _draw_losses(trainer, out, say)
    say(f"{report['seconds']:.0f} s; model, tokenizers, metrics.jsonl and report.json are in {out}")
    say(f'try: pytransformer translate --model {out} "{held_out[0].source}"')
    return OK


def _draw_losses(trainer: Any, out: Path, say: Any) -> None:
    from ..training import plot_losses

    try:
        plot_losses(trainer.metrics.rows, out / "loss.png", "Loss while training")
    except ImportError as error:
        say(f"no plot of the losses: {error}")
