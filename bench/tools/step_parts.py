# SPDX-License-Identifier: Apache-2.0
"""Where a step of a small model spends its time: in Python of ours, in other Python, in our ops, in PyTorch's, in the backward pass.

    python bench/tools/step_parts.py                 # print
    python bench/tools/step_parts.py --out FILE.json
    python bench/tools/step_parts.py --write         # the committed run's tables, into docs/call-cost.md

Modules so small that calls are all there is: (1, 16, 64), four heads, float32, one thread. "ours" as users call it; "python" without the
C++ lane, which is what each call cost before there was one; "torch" PyTorch's module of the same sizes, or the model of transformers with
sdpa. The parts are shares of a run under cProfile, of the time that a step takes without it; cProfile makes Python look more
expensive than it is.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import cProfile
import json
import pstats
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pytransformer as pt
from pytransformer import nn
from pytransformer.cli.benchmark import results
from pytransformer.cli.benchmark.clock import Contender, interleaved
from pytransformer.ops._core import lane

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "bench" / "results" / "amd-epyc-zen5-2-cores" / "step_parts.json"
DOCUMENT = ROOT / "docs" / "call-cost.md"
START, END = "<!-- parts: start, written by bench/tools/step_parts.py --write -->", "<!-- parts: end -->"
WIDTH, HEADS, HIDDEN, LENGTH = 64, 4, 128, 16
MODES = ("forward", "forward + backward")
PARTS = ("our Python", "other Python", "our ops", "PyTorch's ops", "backward pass")


class Subject(NamedTuple):
    ours: torch.nn.Module
    theirs: torch.nn.Module
    call: Callable[[torch.nn.Module], torch.Tensor]
    their_call: Callable[[torch.nn.Module], torch.Tensor]


def modules() -> dict[str, Subject]:
    x = torch.randn(1, LENGTH, WIDTH)
    block = nn.Block(
        nn.MultiHeadAttention(WIDTH, HEADS),
        nn.FeedForward(WIDTH, HIDDEN, activation="relu"),
        lambda: nn.LayerNorm(WIDTH),
    )
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True)
    attention = torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    return {
        "MultiHeadAttention": Subject(
            nn.MultiHeadAttention(WIDTH, HEADS),
            attention,
            lambda m: m(x),
            lambda m: m(x, x, x, need_weights=False)[0],
        ),
        "Block": Subject(block, layer, lambda m: m(nn.Stream(x), {}).x, lambda m: m(x)),
    }


def hugging_face() -> dict[str, Subject]:
    """Two layers each; ours on our attention, norms and networks converted."""
    import transformers

    pt.integrations.transformers.register()
    ids = torch.randint(3, 90, (1, LENGTH))
    configs = {
        "BERT of transformers": transformers.BertConfig(
            vocab_size=99, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=HIDDEN,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ),
        "GPT-2 of transformers": transformers.GPT2Config(
            vocab_size=99, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_inner=HIDDEN, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
            use_cache=False, bos_token_id=1, eos_token_id=2,
        ),
    }  # fmt: skip
    found = {}
    for name, config in configs.items():
        theirs = transformers.AutoModel.from_config(config, attn_implementation="sdpa")
        ours = copy.deepcopy(theirs)
        ours.set_attn_implementation("pytransformer")
        pt.integrations.convert(ours)
        run = lambda model: model(input_ids=ids).last_hidden_state
        found[name] = Subject(ours, theirs, run, run)
    return found


def runner(module: torch.nn.Module, call: Callable[[torch.nn.Module], torch.Tensor], mode: str) -> Callable[[], object]:
    def forward() -> object:
        with torch.no_grad():
            return call(module)

    def both() -> object:
        return torch.autograd.grad(call(module).sum(), wanted)

    if mode == MODES[0]:
        module.eval()
        return forward
    module.train()
    call(module).sum().backward()
    wanted = [p for p in module.parameters() if p.grad is not None]
    return both


def part_of(entry: tuple[str, int, str]) -> str:
    file, _, name = entry
    if file == "~":  # written in C
        if "run_backward" in name:
            return PARTS[4]
        return PARTS[2] if "pytransformer" in name else PARTS[3]
    return PARTS[0] if "pytransformer" in Path(file).parts and "site-packages" not in Path(file).parts else PARTS[1]


def shares(run: Callable[[], object], repeat: int) -> dict[str, float]:
    profile = cProfile.Profile()
    profile.runcall(lambda: [run() for _ in range(repeat)])
    found = dict.fromkeys(PARTS, 0.0)
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]  # missing in the stubs
    for entry, (_, _, own, _, _) in stats.items():
        found[part_of(entry)] += own
    total = sum(found.values())
    return {part: own / total for part, own in found.items()}


def measure(subject: Subject, mode: str, seconds: float) -> dict[str, Any]:
    mine, theirs = runner(subject.ours, subject.call, mode), runner(subject.theirs, subject.their_call, mode)
    ways = {
        "ours": Contender(mine, contextlib.nullcontext),
        "python": Contender(mine, lane.off),
        "torch": Contender(theirs, contextlib.nullcontext),
    }
    times = interleaved(ways, min_time=seconds)
    row: dict[str, Any] = {f"{way}_us": t.median_ms * 1e3 for way, t in times.items()}
    row["ratio"] = times["ours"].over(times["torch"])
    for way, contender in ways.items():
        with contender.context():
            row[f"{way}_parts"] = shares(contender.call, 300)
    return row


def table(document: dict[str, Any]) -> str:
    where = document["environment"]
    lines = [
        f"One run: {where['cpu']}, one thread, torch {where['torch']}, interleaved, medians in µs. A part: PyTorch's / ours before the "
        "lane / ours.",
        "",
        f"| a step of | PyTorch | before the lane | ours | ratio | {' | '.join(PARTS)} |",
        "|" + "---|" * (5 + len(PARTS)),
    ]
    ways = ("torch", "python", "ours")
    for row in document["rows"]:
        whole = [row[f"{way}_us"] for way in ways]
        parts = [[row[f"{way}_parts"][part] * us for way, us in zip(ways, whole)] for part in PARTS]
        cells = [row["subject"] + ", " + row["mode"], *(f"{us:.0f}" for us in whole), f"{row['ratio'][1]:.2f}"]
        cells += [" / ".join(f"{us:.0f}" for us in part) for part in parts]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="each way is timed for, a row (default %(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    parser.add_argument("--write", action="store_true", help="put the committed run's table into docs/call-cost.md, instead")
    options = parser.parse_args()
    if options.write:
        before, _, rest = DOCUMENT.read_text().partition(START)
        text = table(json.loads(COMMITTED.read_text()))
        DOCUMENT.write_text(f"{before}{START}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name, subject in {**modules(), **hugging_face()}.items():
        for mode in MODES:
            rows.append({"subject": name, "mode": mode} | measure(subject, mode, options.seconds))
            print(
                f"{name:24}{mode:20}{rows[-1]['ours_us']:9.0f}{rows[-1]['torch_us']:9.0f}{rows[-1]['ratio'][1]:8.2f}",
                flush=True,
            )
    document = {"environment": results.environment("cpu", "python bench/tools/step_parts.py"), "rows": rows}
    print("\n" + table(document))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
