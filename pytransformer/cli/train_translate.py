# SPDX-License-Identifier: Apache-2.0
"""An encoder-decoder that translates sentences.

It learns from any file with two tab-separated columns, such as the one that
`python examples/portuguese.py` in a clone writes. There, examples/train.py has
further tasks and reads the translations of installed packages too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..models import _files
from ..training.text import Pair, read_pairs, split_pairs
from . import OK, UsageError, training_html

if TYPE_CHECKING:
    from .train import Run

PAIRS = "pairs of texts, two columns separated by a tab"
_SHOWN = 5  # wrong translations in the report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--data", required=True, metavar="FILE", help=PAIRS)
    add_held_out(data)
    add_sizes(parser)


def add_held_out(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--held-out", type=Path, metavar="FILE",
        help="pairs to check with (default: one in 20 of --data)")  # fmt: skip


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the options of model and training."""
    model = parser.add_argument_group("model")
    # fmt: off
    model.add_argument("--preset", choices=["notes-small", "notes"], default="notes-small",
        help="notes: head dim equal to the model's width, 4 layers, no label smoothing "
        "(default %(default)s)")
    model.add_argument("--layers", type=int,
        help="of encoder and decoder each (default 2; of notes 4)")
    model.add_argument("--width", type=int, default=128,
        help="d_model, a multiple of 8 (default %(default)s)")
    model.add_argument("--vocabulary", type=int, default=7000,
        help="tokens a language at most (default %(default)s)")
    # fmt: on
    how = parser.add_argument_group("training")
    # fmt: off
    how.add_argument("--steps", type=int, help="default 1500")
    how.add_argument("--epochs", type=int,
        help="instead of --steps; each reports loss and masked accuracy, and is plotted")
    how.add_argument("--batch", type=int, default=64, help="pairs in a batch (default %(default)s)")
    how.add_argument("--warmup", type=int, default=300,
        help="steps until the highest learning rate (default %(default)s)")
    how.add_argument("--dropout", type=float, default=0.1, help="default %(default)s")
    # fmt: on


def _plan(arguments: argparse.Namespace, pairs: int, processes: int) -> tuple[Any, Any]:
    """Return the model's and the trainer's settings; an epoch's steps are rounded down."""
    from ..models import Transformer
    from ..training import Recipe
    from ..training.translation import TranslationPlan

    if arguments.epochs is not None and arguments.steps is not None:
        raise UsageError(
            "--epochs and --steps both set the length of training; expected one of them"
        )
    a_step = arguments.batch * arguments.accumulate * processes
    if arguments.epochs is not None and (arguments.epochs < 1 or pairs < a_step):
        raise UsageError(
            f"--epochs {arguments.epochs}: expected at least 1, of as many pairs as a step has"
            f" ({a_step}; got {pairs})"
        )
    epoch = pairs // a_step if arguments.epochs else 0
    steps = (
        arguments.epochs * epoch if epoch else 1500 if arguments.steps is None else arguments.steps
    )
    preset = Transformer.PRESETS[arguments.preset]
    layers = 2 if arguments.preset == "notes-small" else preset.num_encoder_layers
    if arguments.layers is not None:
        layers = arguments.layers
    plan = TranslationPlan(
        preset=arguments.preset, layers=layers, d_model=arguments.width,
        vocabulary=arguments.vocabulary,
        batch_size=arguments.batch, steps=steps, epochs=arguments.epochs or 0,
        warmup=arguments.warmup,
        dropout=arguments.dropout, seed=arguments.seed,
    )  # fmt: skip
    recipe = Recipe(
        steps=steps, accumulate=arguments.accumulate,
        autocast=torch.bfloat16 if arguments.bf16 else None,
        log_every=min(100, steps), evaluate_every=0 if epoch else 500, epoch_steps=epoch,
        save_every=arguments.save_every,
        seed=arguments.seed,
    )  # fmt: skip
    return plan, recipe


def pairs_of(
    run: Run, pairs: list[Pair] | None = None, key: Callable[[str], str] | None = None
) -> tuple[list[Pair], list[Pair]]:
    """Return (training, held-out) pairs, of the file --data by default; print their counts.

    `key` maps a source text to the value that no training text shares with a held-out one.
    """
    arguments = run.arguments
    train = read_pairs(arguments.data) if pairs is None else pairs
    if arguments.held_out is not None:
        held_out = read_pairs(arguments.held_out)
    else:
        train, held_out = split_pairs(train, key=key)
        if not train or not held_out:
            raise UsageError(
                f"{arguments.data} has too few sentence pairs to hold one in 20 out; name some with"
                " --held-out"
            )
    run.say(
        f"{len(train)} sentence pairs to learn from and {len(held_out)} held out, from"
        f" {arguments.data}"
    )
    return train, held_out


def train(run: Run, pairs: tuple[list[Pair], list[Pair]] | None = None) -> int:
    """Train on the (training, held-out) pairs, which default to those of --data."""
    from ..training.translation import new_translator, translation_trainer

    arguments, world, console, out, say = run.arguments, run.world, run.console, run.out, run.say
    train, held_out = pairs_of(run) if pairs is None else pairs
    plan, recipe = _plan(arguments, len(train), world.parts)
    translator = new_translator(train, plan)
    trainer = translation_trainer(
        translator, train, held_out, plan, recipe, out=out, world=world, console=console
    )
    run.write_options()
    size = translator.model.num_parameters() / 1e6
    say(
        f"{size:.2f} million parameters; {len(translator.source)} and {len(translator.target)}"
        f" tokens; {recipe.steps} steps"
    )
    if arguments.resume and trainer.resume():
        say(f"going on from step {trainer.step}")
    trainer.fit()
    trainer.gather()
    if not world.first:
        return OK
    translator.model.eval()
    translator.save(out)
    report, samples = _report(translator, (train, held_out), plan, out, run.started, say)
    runs, settings = {"": trainer.metrics.rows}, report.pop("plan")
    training_html.write(out, arguments.task, runs, report, settings, samples)
    _draw_losses(trainer, out, say)
    say(f"model, tokenizers, metrics.jsonl, report.json and report.html are in {out}")
    say(f'try: pytransformer translate --model {out} "{held_out[0].source}"')
    return OK


def _report(
    translator: Any,
    pairs: tuple[list[Any], list[Any]],
    plan: Any,
    out: Path,
    started: float,
    say: Any,
) -> tuple[dict[str, Any], training_html.Samples]:
    """Score held-out translations beside a memory of the training pairs; write report.json.

    Returns:
        The report and the first sentences with their translations.
    """
    from ..training import translation_scores
    from ..training.quality import from_memory
    from ..training.translation import exactness, translate_all

    train, held_out = pairs
    sources, wanted = ([pair[side] for pair in held_out] for side in (0, 1))
    said = translate_all(translator, sources)
    exact = exactness(held_out, said)
    report: dict[str, Any] = {"exact": exact.right, "held_out": exact.total}
    say(
        f"{exact.right} of {exact.total} held-out sentences translated word for word:"
        f" {100 * exact.share:.1f} %"
    )
    for wrong in exact.wrong[:_SHOWN]:
        say("   {}\n     output    {}\n     expected  {}".format(*wrong))
    try:
        report |= translation_scores(said, wanted)
        remembered = translation_scores(from_memory(train, sources), wanted)
        report |= {f"memory_{name}": remembered[name] for name in ("bleu", "chrf")}
        for who, name in (
            ("this model", ""),
            ("the most similar training sentence's translation", "memory_"),
        ):
            say(f"BLEU {report[f'{name}bleu']:.1f}, chrF {report[f'{name}chrf']:.1f}: {who}")
    except ImportError as error:
        say(f"no BLEU and chrF: {error}")
    report["seconds"] = round(time.monotonic() - started, 1)
    report["plan"] = dataclasses.asdict(plan)
    _files.write_text(out / "report.json", json.dumps(report, indent=2) + "\n")
    say(f"{report['seconds']:.0f} s")
    first = list(zip(sources, said, wanted))[: 2 * _SHOWN]
    return report, (("source", "translation", "expected"), first)


def _draw_losses(trainer: Any, out: Path, say: Any) -> None:
    from ..training import plot_epochs, plot_losses

    try:
        plot_losses(trainer.metrics.rows, out / "loss.png", "Loss while training")
        if trainer.recipe.epoch_steps:
            plot_epochs(
                trainer.metrics.rows, out / "epochs.png", "Loss and masked accuracy by epoch"
            )
    except ImportError as error:
        say(f"no plot of the losses: {error}")
