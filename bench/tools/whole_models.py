# SPDX-License-Identifier: Apache-2.0
"""Time inference of whole models on the CPU before and after convert, in one interleaved run.

    OMP_NUM_THREADS=1 python bench/tools/whole_models.py [MODEL ...] [--dtype float32 bfloat16]

Models have random weights and the sizes of BERT-base (8 x 128 tokens), MiniLM (64 sentences of
mixed length, and one query of 12 tokens) and GPT-2 (a prompt of 512). The contenders are:

sdpa           transformers with attn_implementation="sdpa"
no linear      converted, without the kind "linear"
converted      converted, all kinds
packed         the same with nn.pack_weights

Outputs are compared in float64 norm with those of sdpa in float32 before any timing. The table
gives sdpa's median time and its ratio to each contender's.
"""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import transformers

import pytransformer as pt
from pytransformer.cli.benchmark.clock import Contender, interleaved
from pytransformer.cli.machine import cpu_name
from pytransformer.integrations.convert.rules import KINDS

LENGTHS = (8, 12, 16, 20, 24, 32, 48, 64)  # tokens of MiniLM's sentences, each 8 times
MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.05}


def bert(**sizes: int) -> Any:
    config = transformers.BertConfig(**sizes)
    config._attn_implementation = "sdpa"
    return transformers.BertModel(config, add_pooling_layer=False)


def gpt2() -> Any:
    config = transformers.GPT2Config()
    config._attn_implementation = "sdpa"
    return transformers.GPT2Model(config)


MINILM = dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "BERT-base, 8 x 128": (bert, (128,) * 8),
    "MiniLM, 64 sentences": (functools.partial(bert, **MINILM), LENGTHS * 8),
    "MiniLM, one query": (functools.partial(bert, **MINILM), (12,)),
    "GPT-2, prompt of 512": (gpt2, (512,)),
}


def inputs_of(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    ids = torch.randint(1000, 20000, (len(lengths), max(lengths)))
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    given = {"input_ids": ids.masked_fill(~real, 0)}
    return given if bool(real.all()) else given | {"attention_mask": real.long()}


def contenders(model: Any) -> dict[str, Any]:
    """Return the model before and after conversion."""
    found = {"sdpa": model}
    for name in ("no linear", "converted", "packed"):
        one = copy.deepcopy(model)
        one.set_attn_implementation("pytransformer")
        kinds = [k for k in KINDS if k != "linear" or name != "no linear"]
        pt.integrations.convert(one, kinds=kinds)
        if name == "packed":
            pt.nn.pack_weights(one)
        found[name] = one
    return found


def measure(name: str, dtype: torch.dtype, seconds: float) -> str:
    """Return a line of the table."""
    build, lengths = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    given = inputs_of(lengths)
    real = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    calls = {}
    with torch.inference_mode():
        exact = model(**given).last_hidden_state[real].double()
        for who, one in contenders(model.to(dtype)).items():
            call = functools.partial(one, **given)
            error = (call().last_hidden_state[real].double() - exact).norm() / exact.norm()
            assert error < MAX_ERROR[dtype], f"{name}, {who}: off by {error:.2g}"
            calls[who] = Contender(call, nullcontext)
        medians = {w: t.median_ms for w, t in interleaved(calls, min_time=seconds).items()}
    base = medians.pop("sdpa")
    ratios = "".join(f"{base / ms:11.2f}" for ms in medians.values())
    return f"{name:21} {str(dtype).removeprefix('torch.'):9}{base:10.1f} ms{ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="words of their names; default all")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=4.0, help="per contender and row")
    args = parser.parse_args()
    pt.integrations.transformers.register()
    print(f"{cpu_name()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}")
    print(f"{'':31}{'sdpa':>13}{'no linear':>11}{'converted':>11}{'packed':>11}")
    for name in MODELS:
        if not args.models or any(word in name for word in args.models):
            for dtype in args.dtype:
                print(measure(name, getattr(torch, dtype), args.seconds), flush=True)


if __name__ == "__main__":
    main()
