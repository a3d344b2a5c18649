# SPDX-License-Identifier: Apache-2.0
"""`python bench/tools/full_models.py`: Hugging Face models beside sdpa and eager code.

Base-size models with random weights run at realistic lengths and padding.
"pytransformer" is the model after `integrations.transformers.register()`,
`integrations.transformers.switch(model)` and `integrations.convert(model)`. A
training step is forward and backward with dropout on; the optimizer, equal for
all variants, is left out. Before timing, the logits and gradients (dropout off)
of each variant are compared with the model's eager code in float64. The error
of ours may be at most twice that of eager code in the same dtype.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import pytransformer as pt
from pytransformer.cli import OK, WRONG, UsageError, main
from pytransformer.cli.benchmark import clock, plan, report, results
from pytransformer.console import Console
from pytransformer.ops._core.registry import trace

sys.path.append(str(Path(__file__).resolve().parent))  # the helper process imports this file
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from support import model_memory

SCHEMA_VERSION = 1
EAGER, SDPA, OURS = VARIANTS = ("eager", "sdpa", "pytransformer")
REGISTERED = "registered"  # ours in attention alone, without `convert`
MODES = ("forward", "training_step")
ALLOWED = 2.0  # times the error of eager code
IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Subject:
    """One model and its variants.

    `select(variant)` runs the model as that variant inside a with block. `call()` runs the model
    once and returns the outputs at real tokens and the loss.
    """

    batch: str
    model: torch.nn.Module
    select: Callable[[str], AbstractContextManager[None]]
    call: Callable[[], tuple[torch.Tensor, torch.Tensor]]

    def trained(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the outputs at real tokens and the gradient of every parameter."""
        outputs, loss = self.call()
        loss.backward()
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return outputs.detach(), grads


# ---- the models; each returns (model, inputs, labels, mask of real outputs, batch description)

Parts = tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor, str]
TOKENS = {63: (8, 63, 4), 512: (2, 512, 256)}  # rows, longest and shortest row by Ask.tokens


def _tokens(
    batch: int, length: int, words: int, *, min_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and mask; lengths spread evenly from `min_length` to `length`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, words, (batch, length), generator=generator)
    lengths = torch.linspace(min_length, length, batch).round().long()
    mask = torch.arange(length)[None] < lengths[:, None]
    return ids * mask, mask.long()


def _text(batch: int, length: int, mask: torch.Tensor) -> str:
    return f"{batch} x {length} tokens, {1 - mask.float().mean().item():.0%} padding"


def bert(layers: int | None, tokens: int | None) -> Parts:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(num_hidden_layers=layers or 12)
    rows, longest, shortest = (8, 128, 64) if tokens is None else TOKENS[tokens]
    ids, mask = _tokens(rows, longest, config.vocab_size, min_length=shortest)
    labels = ids.masked_fill(
        (torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) > 0.15) | (mask == 0),
        IGNORED,
    )
    return (
        BertForMaskedLM(config),
        {"input_ids": ids, "attention_mask": mask},
        labels,
        _text(rows, longest, mask),
    )


def gpt2(layers: int | None, tokens: int | None) -> Parts:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers or 12)
    ids, mask = _tokens(4, 256, config.vocab_size, min_length=192)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1)).masked_fill(mask == 0, IGNORED)
    return (
        GPT2LMHeadModel(config),
        {"input_ids": ids, "attention_mask": mask},
        labels,
        _text(4, 256, mask),
    )


def t5(layers: int | None, tokens: int | None) -> Parts:
    from transformers import T5Config, T5ForConditionalGeneration

    n = layers or 12
    config = T5Config(
        d_model=768,
        d_kv=64,
        d_ff=3072,
        num_layers=n,
        num_decoder_layers=n,
        num_heads=12,
        decoder_start_token_id=0,
    )
    rows, longest, shortest = (4, 256, 128) if tokens is None else TOKENS[tokens]
    ids, mask = _tokens(rows, longest, config.vocab_size, min_length=shortest)
    target, real = _tokens(rows, 64, config.vocab_size, min_length=32)
    labels = target.masked_fill(real == 0, IGNORED)
    inputs = {
        "input_ids": ids,
        "attention_mask": mask,
        "decoder_input_ids": target,
        "decoder_attention_mask": real,
    }
    return (
        T5ForConditionalGeneration(config),
        inputs,
        labels,
        _text(rows, longest, mask) + ", 64 in the target",
    )


def vit(layers: int | None, tokens: int | None) -> Parts:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_hidden_layers=layers or 12, num_labels=1000)
    images = torch.randn(4, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(4)
    return (
        ViTForImageClassification(config),
        {"pixel_values": images},
        labels,
        "4 images of 224 x 224",
    )


MODELS: dict[str, tuple[str, Callable[[int | None, int | None], Parts]]] = {
    "bert": ("BERT-base", bert),
    "gpt2": ("GPT-2", gpt2),
    "t5": ("T5-base", t5),
    "vit": ("ViT-B/16", vit),
}


@dataclasses.dataclass(frozen=True)
class Ask:
    """One line-up, with a text form for other processes.

    `tokens` selects other rows of BERT and T5, a key of TOKENS.
    """

    model: str
    dtype: str
    layers: int | None
    tokens: int | None = None

    def __str__(self) -> str:
        return f"{self.model} {self.dtype} {self.layers or 0} {self.tokens or 0}"

    @staticmethod
    def parse(text: str) -> Ask:
        model, dtype, layers, tokens = text.split()
        return Ask(model, dtype, int(layers) or None, int(tokens) or None)

    @property
    def title(self) -> str:
        name = MODELS[self.model][0]
        return f"{name}, {self.layers} of 12 layers" if self.layers else name


def build(text: str) -> Subject:
    """Build the subject of an :class:`Ask`, with the same random weights each time."""
    ask = Ask.parse(text)
    pt.integrations.transformers.register()
    torch.manual_seed(0)
    model, inputs, labels, batch = MODELS[ask.model][1](ask.layers, ask.tokens)
    dtype = plan.DTYPES[ask.dtype]
    model.to(dtype).eval()
    inputs = {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}
    real = labels != IGNORED

    @contextlib.contextmanager
    def select(variant: str) -> Iterator[None]:
        pt.integrations.transformers.switch(model, OURS if variant == REGISTERED else variant)
        with contextlib.ExitStack() as undo:
            if variant == OURS:
                undo.callback(pt.integrations.convert(model).revert)
            yield

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(**inputs).logits
        loss = cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED)
        return logits[real], loss

    return Subject(batch, model, select, call)


# ---- measurement


def measure(
    ask: Ask, seconds: float, with_memory: bool, timed: Sequence[str] = VARIANTS
) -> list[dict[str, Any]]:
    """Return the rows of one model in one dtype; only the variants `timed` have times.

    VARIANTS have rows, and so do others that are timed.
    """
    variants = [*VARIANTS, *(v for v in timed if v not in VARIANTS)]
    mine = [v for v in variants if v not in (EAGER, SDPA)]
    exact = _results(build(str(dataclasses.replace(ask, dtype="float64"))), EAGER)
    subject = build(str(ask))
    pt.clear_fallbacks()
    errors, records = {}, {}
    for variant in variants:
        with trace() as records[variant]:
            errors[variant] = _errors(exact, _results(subject, variant))
    wrong = {
        variant: f"{what} off by {error:.2g}, eager code by {errors[EAGER][what]:.2g}"
        for variant in (SDPA, *mine)
        for what, error in errors[variant].items()
        if not error <= ALLOWED * errors[EAGER][what]
    }
    fell = [f"{f.op}: {f.reason}" for f in pt.fallbacks()]
    for variant in mine:
        backends = {backend for raw, backend in records[variant] if raw.startswith("attention")}
        if not backends or "reference" in backends:
            ran = ", ".join(sorted(backends)) or "no kernel of ours"
            wrong[variant] = f"attention ran on {ran}"
        if fell:
            wrong[variant] = f"fell back: {fell[0]}"
    peaks = _peaks(ask) if with_memory else {}
    rows = []
    for mode in MODES:
        timings = _timings(subject, mode, [v for v in timed if v not in wrong], seconds)
        for variant in variants:
            timing = timings.get(variant)
            rows.append({
                "model": ask.title, "batch": subject.batch, "dtype": ask.dtype, "mode": mode,
                "variant": variant,
                **(timing.figures() if timing else dict.fromkeys(("median_ms", "p20_ms", "p80_ms",
                    "samples"))),
                "speedup_sdpa": _speedup(timings, SDPA, timing),
                "speedup_eager": _speedup(timings, EAGER, timing),
                "peak_bytes": peaks.get((str(ask), variant)) if mode == "training_step" else None,
                **{f"{what}_error": error for what, error in errors[variant].items()},
                "wrong": wrong.get(variant),
            })  # fmt: skip
    return rows


def _results(subject: Subject, variant: str) -> tuple[torch.Tensor, torch.Tensor]:
    with subject.select(variant):
        outputs, grads = subject.trained()
    return outputs.double(), torch.cat([g.double().flatten() for _, g in sorted(grads.items())])


def _errors(exact: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return the relative 2-norm of each error."""
    return {
        what: ((a - e).norm() / e.norm()).item()
        for what, e, a in zip(("outputs", "gradients"), exact, found, strict=True)
    }


def _timings(
    subject: Subject, mode: str, variants: Sequence[str], seconds: float
) -> dict[str, clock.Timing]:
    training = mode == "training_step"

    def step() -> None:
        with torch.set_grad_enabled(training):
            _, loss = subject.call()
        if training:
            loss.backward()
            subject.model.zero_grad(set_to_none=True)

    subject.model.train(training)
    contenders = {v: clock.Contender(step, functools.partial(subject.select, v)) for v in variants}
    timings = clock.interleaved(contenders, min_time=seconds, min_rounds=3)
    subject.model.eval()
    return timings


def _speedup(
    timings: dict[str, clock.Timing], peer: str, timing: clock.Timing | None
) -> float | None:
    return timings[peer].median_ms / timing.median_ms if timing and peer in timings else None


def _peaks(ask: Ask) -> dict[tuple[str, str], int]:
    try:
        return model_memory.peaks([(str(ask), v) for v in VARIANTS], Path(__file__).stem)
    except model_memory.Unmeasured:
        return {}


# ---- the command


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help=f"default all: {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--dtype", default="float32,bfloat16", metavar="NAME,...", help="default float32,bfloat16"
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="of the 12 layers, to save time; widths stay (default all)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=4.0,
        metavar="S",
        help="of timing per variant and mode (default 4)",
    )
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure peak memory (default on)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write (default ./results/models-<date>)"
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    asks = _asks(arguments)
    console, rows = Console(), []
    where = results.environment("cpu", " ".join(["full_models.py", *arguments.argv]))
    console.print(report.environment_text(where))
    with console.progress(len(asks)) as progress:
        for ask in asks:
            progress.step(f"{ask.title} {ask.dtype}")
            rows += measure(ask, arguments.seconds, arguments.memory)
            progress.advance()
    console.table(COLUMNS, [_line(row) for row in rows], right=COLUMNS[4:])
    folder = arguments.out or Path("results") / f"models-{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
    folder.mkdir(parents=True, exist_ok=True)
    document = {"schema_version": SCHEMA_VERSION, "environment": where, "rows": rows}
    (folder / "models.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(f"Written to {folder}: models.json")
    for row in (r for r in rows if r["wrong"] and r["mode"] == MODES[0]):
        console.print(
            f"WRONG, not timed: {row['model']} {row['dtype']} {row['variant']}: {row['wrong']}"
        )
    return WRONG if any(row["wrong"] and row["variant"] == OURS for row in rows) else OK


COLUMNS = (
    "model",
    "dtype",
    "mode",
    "variant",
    "ms",
    "p20-p80",
    "x sdpa",
    "x eager",
    "peak MB",
    "outputs off",
    "gradients off",
)


def _line(row: dict[str, Any]) -> list[str]:
    figure, peak = report.figure, row["peak_bytes"]
    spread = "-" if row["p20_ms"] is None else f"{figure(row['p20_ms'])}-{figure(row['p80_ms'])}"
    return [
        row["model"], report.SHORT[row["dtype"]], row["mode"], row["variant"],
        figure(row["median_ms"]), spread,
        figure(row["speedup_sdpa"]), figure(row["speedup_eager"]),
        figure(None if peak is None else peak / 1e6),
        figure(row["outputs_error"], 2), figure(row["gradients_error"], 2),
    ]  # fmt: skip


def _asks(arguments: argparse.Namespace) -> list[Ask]:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            'full_models needs transformers: pip install "pytransformer-kernels[hf]"'
        ) from error
    assert transformers
    names, dtypes = arguments.models or list(MODELS), arguments.dtype.split(",")
    if unknown := [n for n in names if n not in MODELS]:
        raise UsageError(f"unknown model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    if unknown := [d for d in dtypes if d not in plan.DTYPES]:
        raise UsageError(f"--dtype: {', '.join(unknown)} is not one of {', '.join(plan.DTYPES)}")
    if arguments.layers is not None and not 1 <= arguments.layers <= 12:
        raise UsageError(f"--layers must be from 1 to 12, got {arguments.layers}")
    return [
        Ask(name, plan.dtype_name(plan.DTYPES[d]), arguments.layers)
        for name in names
        for d in dtypes
    ]


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
