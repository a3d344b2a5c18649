# SPDX-License-Identifier: Apache-2.0
"""Shared code of the text tasks: options, data, a tokenizer, held-out figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from pytransformer.cli import UsageError, train_translate
from pytransformer.cli.train_translate import PAIRS, add_held_out
from pytransformer.training import (
    Pair,
    Tokenizer,
    Vocabulary,
    warmup_cosine,
)
from pytransformer.training.batching import Batch, Collate
from pytransformer.training.schedule import Schedule

from ._run import Run
from .data.catalogues import catalogue_pairs
from .data.cleaning import sentence_key
from .data.docstrings import docstring_pairs
from .data.labelled import Labelled, catalogue_texts, read_labelled, split_texts

FEWEST = 20  # min held-out examples for a figure
_SUCH_AS = {"gettext": "gettext:Django,Sphinx", "docstrings": "docstrings:torch,numpy"}


def add_texts(parser: argparse.ArgumentParser, vocabulary: int = 4000) -> None:
    """Add --data for single texts and the sizes of a small model."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", required=True, metavar="FILE|gettext:PACKAGE[,PACKAGE]",
        help="one text per line, optionally after a label and a tab; or the English messages of "
        "installed packages with gettext catalogues, labeled with the package",
    )  # fmt: skip
    add_model(parser, vocabulary)


def add_pairs(parser: argparse.ArgumentParser) -> None:
    """Add --data for sentence pairs."""
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", required=True,
        metavar="FILE|gettext:NAMES|docstrings:NAMES",
        help=f"{PAIRS}; or installed packages, separated by "
        "commas: the translations in their gettext catalogues, or their docstrings and their "
        "summary lines",
    )  # fmt: skip
    add_held_out(data)
    data.add_argument(
        "--from",
        dest="source",
        metavar="LANG",
        help="of gettext: as catalogues say, pt, de, pt_BR (default pt)",
    )
    data.add_argument(
        "--to",
        dest="target",
        metavar="LANG",
        help="of gettext (default en, the language of the messages)",
    )


def add_model(
    parser: argparse.ArgumentParser, vocabulary: int = 4000, layers: int = 3, batch: int = 64
) -> None:
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=int, default=layers, help="default %(default)s")
    model.add_argument(
        "--width", type=int, default=128, help="d_model, a multiple of 32 (default %(default)s)"
    )
    model.add_argument(
        "--vocabulary", type=int, default=vocabulary, help="tokens at most (default %(default)s)"
    )
    model.add_argument(
        "--dropout",
        type=float,
        default=0.1,
        metavar="P",
        help="of every kind (default %(default)s)",
    )
    model.add_argument(
        "--batch", type=int, default=batch, help="examples in a batch (default %(default)s)"
    )


def add_steps(parser: argparse.ArgumentParser, rates: Mapping[str, float], **stages: int) -> None:
    """Add an option per peak learning rate and per stage's steps.

    The option is `--steps` for `steps` and `--tag-steps` for `tag_steps`.
    """
    group = parser.add_argument_group("training")
    for name, steps in stages.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=steps,
            metavar="N",
            help="default %(default)s",
        )
    for name, rate in rates.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            default=rate,
            metavar="R",
            help="highest learning rate (default %(default)s)",
        )


def package_names(data: str, kind: str = "gettext") -> list[str] | None:
    """Return the packages of gettext:PACKAGE[,PACKAGE] or another kind; None for other data."""
    found, colon, names = data.partition(":")
    if not colon or found != kind:
        return None
    packages = [name.strip() for name in names.split(",") if name.strip()]
    if not packages:
        raise UsageError(
            f"--data {kind}: names no package; expected {kind}:PACKAGE[,PACKAGE], such as"
            f" {_SUCH_AS[kind]}"
        )
    return packages


def texts_of(run: Run) -> tuple[list[Labelled], list[Labelled]]:
    """Return (training, held-out) texts of --data; print their source."""
    data = run.arguments.data
    packages = package_names(data)
    found = read_labelled(data) if packages is None else catalogue_texts(packages)
    tell_source(run, found.described, found.left_out)
    train, held_out = split_texts(found.texts, run.arguments.seed)
    if len(held_out) < FEWEST:
        raise UsageError(
            f"{data} has {len(found.texts)} texts, too few to hold {FEWEST} out of one in 20:"
            " expected at least 500"
        )
    run.say(f"{len(train)} texts to learn from and {len(held_out)} held out, from {data}")
    return train, held_out


def tell_source(run: Run, described: Sequence[str], left_out: dict[str, int]) -> None:
    run.sources += described
    for line in described:
        run.say(line)
    run.say(
        "left out: "
        + (
            ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
            or "nothing"
        )
    )


def pairs_of(run: Run) -> tuple[list[Pair], list[Pair]]:
    """Return (training, held-out) pairs of --data; print their source."""
    arguments = run.arguments
    packages = package_names(arguments.data)
    documented = package_names(arguments.data, "docstrings")
    pairs: list[Pair] | None = None
    key = None
    if packages is not None:
        corpus = catalogue_pairs(packages, arguments.source or "pt", arguments.target or "en")
        tell_source(run, corpus.packages, corpus.left_out)
        pairs, key = corpus.pairs, sentence_key
    elif arguments.source or arguments.target:
        raise UsageError(
            "--from and --to choose among the languages of gettext:PACKAGE; the columns of a file"
            " are what they are"
        )
    elif documented is not None:
        corpus = docstring_pairs(documented)
        tell_source(run, corpus.packages, corpus.left_out)
        pairs, key = corpus.pairs, sentence_key
    return train_translate.pairs_of(run, pairs, key)


class Words(NamedTuple):
    """A tokenizer and the data that masking needs from it."""

    tokenizer: Tokenizer
    vocabulary: Vocabulary

    @property
    def known(self) -> int:
        return len(self.tokenizer)


def words_of(texts: Sequence[str], size: int, special: Sequence[str] = ()) -> Words:
    """Train a tokenizer on the texts."""
    tokenizer = Tokenizer.train(texts, size, special=special)
    ids = {
        tokenizer.pad_id,
        tokenizer.unknown_id,
        tokenizer.start_id,
        tokenizer.end_id,
        tokenizer.mask_id,
    }
    return Words(
        tokenizer,
        Vocabulary(
            len(tokenizer), tokenizer.mask_id, frozenset(ids | {tokenizer.id(s) for s in special})
        ),
    )


def rate(peak: float, steps: int) -> Schedule:
    """Return the schedule: warm up to `peak` for a tenth of the steps, then half a cosine to 0."""
    return warmup_cosine(peak, steps // 10, steps)


def baseline_or_none(run: Run, compute: Callable[[], float]) -> float | None:
    """Return a baseline's figure; print why and return None without the library it needs."""
    try:
        return compute()
    except ImportError as error:
        run.say(f"no baseline: {error}")
        return None


def in_batches(examples: Sequence[Any], size: int, collate: Collate, seed: int = 0) -> list[Batch]:
    """Return every example in batches of at most `size`.

    Random choices such as masks are drawn once, so that each figure uses the same questions.
    """
    generator = torch.Generator().manual_seed(seed)
    return [collate(list(examples[i : i + size]), generator) for i in range(0, len(examples), size)]


@torch.no_grad()
def each_batch(model: torch.nn.Module, batches: Sequence[Batch]) -> Iterator[tuple[Batch, Any]]:
    """Yield (batch, output) of every batch, with the model in eval mode on its device."""
    device = next(model.parameters()).device
    model.eval()
    for batch in batches:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        yield batch, model(**batch)
