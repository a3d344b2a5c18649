# SPDX-License-Identifier: Apache-2.0
"""Tokens a second of whole models: transformers with each of its attentions, with ours, converted, and our own, in one interleaved run.

    python bench/tools/tokens.py                                    # print; minutes for each case
    python bench/tools/tokens.py --models gpt2 --batches 1 --prompts 512 --out FILE.json
    python bench/tools/tokens.py --write                            # the committed run's table, into docs/decoding-speed.md

Weights are random, made here from the config. Every contender of a case generates greedily from the same prompts, one after the other
in each round; "prompt" is the time to the first token, "step" the median time between tokens, of the median round. "bound" is the time
to read, at the rate of a sum over memory measured in the same run, what a step must read: all weights but those of embeddings that are
looked up, and the keys and values of the middle step. A contender whose logits after the prompt differ from eager code's in float32 is
not timed.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pytransformer as pt
from pytransformer.cli.benchmark import results
from pytransformer.models import GPT, GPTConfig, generate

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "bench" / "results" / "amd-epyc-zen5-2-cores" / "tokens.json"
DOCUMENT = ROOT / "docs" / "decoding-speed.md"
START, END = "<!-- tokens: start, written by bench/tools/tokens.py --write -->", "<!-- tokens: end -->"
PEER = "transformers, sdpa"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
now = CLOCKS["wall"]
POSITIONS = 2304  # of the models: the longest prompt and what follows
DISTANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of logits to eager code's in float32; a wrong mask is at 0.5 and more


class Case(NamedTuple):
    model: str
    dtype: torch.dtype
    batch: int
    prompt: int
    new: int


class Contender(NamedTuple):
    """``run`` generates and returns when it began and when each token was there; ``logits`` are those behind the prompts, if they are to
    be eager code's."""

    run: Callable[[], list[float]]
    logits: Callable[[], torch.Tensor] | None


def their_model(name: str) -> Any:
    import transformers

    if name == "gpt2":  # 12 layers of 768
        config: Any = transformers.GPT2Config(n_positions=POSITIONS, eos_token_id=None, bos_token_id=1, pad_token_id=0)
    else:  # 8 layers of 1,024, four heads of keys for sixteen of queries
        config = transformers.LlamaConfig(
            vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
            num_key_value_heads=4, max_position_embeddings=POSITIONS, eos_token_id=None, bos_token_id=1, pad_token_id=0,
        )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def our_rotary_model(name: str) -> GPT:
    """Of the sizes of the other; in place of Llama's gated network one with as many weights."""
    torch.manual_seed(0)
    if name == "gpt2":
        return GPT(GPTConfig(positions="rotary", max_length=POSITIONS)).eval()
    sizes = dict(vocab_size=32000, d_model=1024, num_layers=8, num_heads=16, num_kv_heads=4, hidden=4224)
    return GPT(GPTConfig(**sizes, positions="rotary", max_length=POSITIONS, tied=False)).eval()


def theirs(
    model: Any, implementation: str, ids: torch.Tensor, case: Case, growing: bool = False, **settings: Any
) -> Contender:
    from transformers import StoppingCriteriaList

    def run() -> list[float]:
        model.set_attn_implementation(implementation)
        cache = {"past_key_values": pt.integrations.transformers.growing_cache(model)} if growing else {}
        stamps = [now()]

        def stamp(tokens: torch.Tensor, scores: Any, **others: Any) -> torch.Tensor:
            stamps.append(now())
            return torch.zeros(len(tokens), dtype=torch.bool)

        with torch.inference_mode():
            model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=case.new, do_sample=False,
                stopping_criteria=StoppingCriteriaList([stamp]), **settings, **cache,  # type: ignore[list-item]  # any callable will do
            )  # fmt: skip
        return stamps

    def logits() -> torch.Tensor:
        model.set_attn_implementation(implementation)
        with torch.inference_mode():
            return model(input_ids=ids, logits_to_keep=1).logits[:, -1]

    return Contender(run, logits)


def ours(model: GPT, cache: str, ids: torch.Tensor, case: Case, same: bool) -> Contender:
    def run() -> list[float]:
        stamps: list[float] = []
        hook = model.register_forward_pre_hook(lambda *a: stamps.append(now()))
        try:
            generate(model, ids, max_new_tokens=case.new, cache=cache)
        finally:
            hook.remove()
        return [*stamps, now()]

    def logits() -> torch.Tensor:
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=1).logits
            assert logits is not None
            return logits[:, -1]

    return Contender(run, logits if same else None)


def contenders(case: Case, ids: torch.Tensor, exact: Any, compiled: bool) -> dict[str, Contender]:
    """By name. exact: the model in float32, which is read only."""
    made = copy.deepcopy(exact).to(case.dtype)
    converted = copy.deepcopy(made)
    pt.integrations.convert(converted)
    found = {
        "transformers, eager": theirs(made, "eager", ids, case),
        PEER: theirs(made, "sdpa", ids, case),
        f"{PEER}, growing cache": theirs(made, "sdpa", ids, case, growing=True),
        "transformers, our attention": theirs(made, "pytransformer", ids, case),
        "the same, converted": theirs(converted, "pytransformer", ids, case),
        "the same, converted, growing cache": theirs(converted, "pytransformer", ids, case, growing=True),
    }
    if compiled:
        from transformers import CompileConfig

        how = CompileConfig(mode="default")
        how._compile_all_devices = True  # no field: the CPU is for tests there
        static = dict(cache_implementation="static", compile_config=how)
        found["transformers, sdpa, compiled, static cache"] = theirs(copy.deepcopy(made), "sdpa", ids, case, **static)
    own = {"our GPT, rotary": our_rotary_model(case.model).to(case.dtype)}
    if case.model == "gpt2":
        own = {"our GPT": GPT.from_hf(made).eval(), **own}
    for name, model in own.items():
        for cache in ("contiguous", "paged"):
            found[f"{name}, {cache}"] = ours(model, cache, ids, case, same=name == "our GPT")
    return found


def bytes_of_a_step(model: Any, case: Case) -> int:
    """Weights, and the keys and values of the middle step."""
    c = model.config
    looked_up = {"transformer.wpe.weight"} | (set() if c.tie_word_embeddings else {"model.embed_tokens.weight"})
    weights = sum(p.numel() for name, p in model.named_parameters() if name not in looked_up)
    heads = getattr(c, "num_key_value_heads", c.num_attention_heads)
    row = 2 * c.num_hidden_layers * heads * (c.hidden_size // c.num_attention_heads)
    return (weights + case.batch * row * (case.prompt + case.new // 2)) * case.dtype.itemsize


def wrong(contender: Contender, want: torch.Tensor, dtype: torch.dtype) -> str | None:
    if contender.logits is None:
        return None
    distance = ((contender.logits().float() - want).norm() / want.norm()).item()
    return None if distance < DISTANCE[dtype] else f"its logits differ from eager code's in float32 by {distance:.2g}"


def measure(case: Case, rounds: int, compiled: bool) -> Iterator[dict[str, Any]]:
    exact = their_model(case.model)
    ids = torch.randint(3, 30000, (case.batch, case.prompt), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want = exact(input_ids=ids, logits_to_keep=1).logits[:, -1]
    size, found = bytes_of_a_step(exact, case), contenders(case, ids, exact, compiled)
    del exact
    where = {"model": case.model, "dtype": str(case.dtype).removeprefix("torch."), "batch": case.batch, "prompt": case.prompt}
    samples: dict[str, list[list[float]]] = {}
    for name, contender in found.items():
        try:
            reason = wrong(contender, want, case.dtype)
            if "compiled" in name:
                contender.run()  # which compiles
        except Exception as error:  # a peer that cannot run is a row with its reason
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if reason is None:
            samples[name] = []
        else:
            yield {**where, "contender": name, "not_run": reason}
    rates = []
    for turn in range(rounds):
        rates.append(read_rate())
        for name in samples if turn % 2 == 0 else reversed(samples):
            stamps = found[name].run()
            samples[name].append([b - a for a, b in itertools.pairwise(stamps)])
    rate = statistics.median(rates)
    prompts = {name: [times[0] for times in runs] for name, runs in samples.items()}
    steps = {name: [statistics.median(times[1:]) for times in runs] for name, runs in samples.items()}
    for name in samples:
        yield {
            **where, "contender": name, "new": case.new, "rounds": rounds, "read_gbps": rate, "step_bytes": size,
            "bound_ms": size / rate / 1e6, "prompt_ms": 1e3 * statistics.median(prompts[name]),
            "step_ms": 1e3 * statistics.median(steps[name]), "steps_ms": [1e3 * s for s in steps[name]],
            "prompt_speedup": statistics.median(a / b for a, b in zip(prompts[PEER], prompts[name])),
            "step_speedup": statistics.median(a / b for a, b in zip(steps[PEER], steps[name])),
        }  # fmt: skip


def read_rate() -> float:
    """GB/s of a sum over 512 MB, by the clock in use."""
    source, found = torch.ones(128 << 20), []
    for _ in range(3):
        start = now()
        source.sum()
        found.append(4 * source.numel() / (now() - start) / 1e9)
    return max(found)


def table(document: dict[str, Any]) -> str:
    where = document["environment"]
    lines = [
        f"One run: {where['cpu']}, {where['threads']} thread(s), load {where['load']}, torch {where['torch']}, transformers "
        f"{document['transformers']}, commit {where['commit']}. Milliseconds of {document['clock']} time of the median round; ×: "
        "sdpa's time over this one's, of the median round.",
    ]
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in document["rows"]:
        cases.setdefault(tuple(row[k] for k in ("model", "dtype", "batch", "prompt")), []).append(row)
    for (model, dtype, batch, prompt), rows in cases.items():
        timed = [row for row in rows if "not_run" not in row]
        lines += ["", f"**{model}, {dtype}, batch {batch}, prompts of {prompt}**"]
        if timed:
            first = timed[0]
            lines[-1] += (
                f": a step reads {first['step_bytes'] / 1e6:,.0f} MB, {first['bound_ms']:.1f} ms at {first['read_gbps']:.1f} GB/s."
            )
        lines += ["", "| | prompt, ms | × | step, ms | × | bound / step | tokens/s |", "|---|---|---|---|---|---|---|"]
        for row in timed:
            cells = [
                row["contender"], f"{row['prompt_ms']:,.0f}", f"{row['prompt_speedup']:.2f}", f"{row['step_ms']:.1f}",
                f"{row['step_speedup']:.2f}", f"{row['bound_ms'] / row['step_ms']:.0%}", f"{1e3 * batch / row['step_ms']:.0f}",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *(f"Not run: {row['contender']}: {row['not_run']}." for row in rows if "not_run" in row)]
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["gpt2", "llama"], choices=["gpt2", "llama"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompts", nargs="+", type=int, default=[512], help=f"up to {POSITIONS} with what follows")
    parser.add_argument("--new", type=int, default=64, help="tokens after each prompt (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor: of a busy machine, with one thread (default wall)"
    )
    parser.add_argument(
        "--compile", action="store_true", help="transformers compiled with a static cache too: minutes more a case"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON file to write, after each case; cases of an older one are kept"
    )
    parser.add_argument(
        "--write", action="store_true", help="put the committed run's table into docs/decoding-speed.md, instead"
    )
    options = parser.parse_args()
    if options.write:
        before, _, rest = DOCUMENT.read_text().partition(START)
        text = table(json.loads(COMMITTED.read_text()))
        DOCUMENT.write_text(f"{before}{START}\n\n{text}\n\n{END}{rest.partition(END)[2]}")
        return
    global now
    now = CLOCKS[options.clock]
    import transformers

    transformers.logging.set_verbosity_error()
    pt.integrations.transformers.register()
    document: dict[str, Any] = {"environment": results.environment("cpu", "python bench/tools/tokens.py")}
    document |= {"transformers": transformers.__version__, "clock": options.clock, "rows": []}
    if options.out is not None and options.out.is_file():
        document["rows"] = json.loads(options.out.read_text())["rows"]
    cases = [
        Case(model, getattr(torch, dtype), batch, prompt, options.new)
        for model in options.models for dtype in options.dtypes for batch in options.batches for prompt in options.prompts
    ]  # fmt: skip
    for case in cases:
        for row in measure(case, options.rounds, options.compile):
            document["rows"].append(row)
            told = row.get("not_run") or f"{row['prompt_ms']:9.0f}{row['step_ms']:9.1f}{row['step_speedup']:8.2f}"
            print(f"{case.model:6}{row['dtype']:10}{case.batch:3}{case.prompt:6}  {row['contender']:45}{told}", flush=True)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
