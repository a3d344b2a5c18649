# SPDX-License-Identifier: Apache-2.0
"""Measure the accuracy cost of an eight-bit cache on attention, logits and tokens.

    python bench/tools/cache_bits.py [--steps 120] [--speed]

*Attention*: 64 queries over 2,048 keys of size 128, with keys and values stored as named, against
float64 on the original numbers: ||error|| / ||exact||. The numbers are normal, Student's t with 3
degrees of freedom, or normal with 4 columns 20 times larger, as in keys of trained models.

*Model*: a GPT of 4 layers trained here on the bytes of this tree's docs, except the last pages. The
results are the perplexity of those pages with the cache, and the number of greedy tokens that equal
those of the float32 cache before the first difference.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch

import pytransformer as pt
from pytransformer.models import GPT, GPTConfig
from pytransformer.models.generation import Decoding, generate

ROOT = Path(__file__).resolve().parents[2]
KINDS: dict[str, torch.dtype | None] = {
    "float32": None,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
LENGTH = 256


def drawn(kind: str, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(1, 4, 2048, 128, generator=generator)
    if kind == "Student t":
        x = x / (torch.randn(3, *x.shape, generator=generator).square().mean(0)).sqrt()
    if kind == "4 large columns":
        x[..., :4] *= 20
    return x


def attention_errors(kind: str) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 64, 128, generator=generator)
    key, value = drawn(kind, generator), drawn(kind, generator)
    exact = pt.attention(query.double(), key.double(), value.double())
    found = {}
    for name, dtype in KINDS.items():
        if dtype is None or dtype == torch.bfloat16:
            rows = (t.to(dtype or t.dtype).float() for t in (key, value))
            out = pt.attention(query, *rows)
        else:
            (k, ks), (v, vs) = pt.quantize_kv(key, dtype), pt.quantize_kv(value, dtype)
            out = pt.attention(query, k, v, key_scale=ks, value_scale=vs)
        found[name] = float((out - exact).norm() / exact.norm())
    return found


def trained(text: torch.Tensor, steps: int) -> GPT:
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            vocab_size=256,
            d_model=128,
            num_layers=4,
            num_heads=4,
            max_length=2 * LENGTH,
            dropout=0.0,
            attention_dropout=0.0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = (
                2e-3 * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
            )
        starts = torch.randint(len(text) - LENGTH - 1, (8,)).tolist()
        ids = torch.stack([text[s : s + LENGTH + 1] for s in starts])
        loss = torch.nn.functional.cross_entropy(
            model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def perplexity(model: GPT, pages: torch.Tensor, dtype: torch.dtype | None) -> float:
    """Return the perplexity of bytes, from calls that read keys from the cache."""
    logits = model(pages[:, :-1], past_key_values=model.make_cache(LENGTH, dtype)).logits
    return float(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), pages[:, 1:].flatten()).exp()
    )


def kept_tokens(
    model: GPT, prompts: torch.Tensor, dtype: torch.dtype | None
) -> tuple[int, int, int]:
    """Return greedy tokens before the first difference from float32, all tokens, equal prompts."""
    made = [
        generate(
            model, prompts, decoding=Decoding(max_new_tokens=64), cache=model.make_cache(LENGTH, d)
        ).lists()
        for d in (None, dtype)
    ]
    same = [
        next((i for i, (a, b) in enumerate(zip(*pair)) if a != b), len(pair[0]))
        for pair in zip(*made)
    ]
    return (
        sum(same),
        sum(map(len, made[0])),
        sum(n == len(tokens) for n, tokens in zip(same, made[0])),
    )


def speed(heads: int, copies: int = 6, rounds: int = 5) -> dict[str, float]:
    """Return the min ms of one token over 8,192 keys, 8 heads, size 128.

    Calls are interleaved and use ``copies`` of the cache in turn.
    """
    query, times = (
        torch.randn(1, heads, 1, 128).bfloat16(),
        {name: [math.inf] for name in KINDS if name != "float32"},
    )
    calls: dict[str, list[tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]]] = {}
    for name in times:
        calls[name] = []
        for _ in range(copies):
            key, value = torch.randn(2, 1, 8, 8192, 128).bfloat16().unbind()
            scales: dict[str, torch.Tensor] = {}
            if name != "bfloat16":
                key, scales["key_scale"] = pt.quantize_kv(key, KINDS[name] or torch.int8)
                value, scales["value_scale"] = pt.quantize_kv(value, KINDS[name] or torch.int8)
            calls[name].append(((key, value), scales))
    for i in range(copies * rounds):
        for name, made in calls.items():
            pair, scales = made[i % copies]
            start = time.perf_counter()
            pt.attention(query, *pair, **scales, backend="cpu")  # type: ignore[call-overload]
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: min(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument(
        "--speed",
        action="store_true",
        help="only the time of a decoding step on one thread of the CPU",
    )
    options = parser.parse_args()
    if options.speed:
        torch.set_num_threads(1)
        for heads in (8, 32):
            print(
                f"{heads} query heads, ms:"
                f" { {name: round(t, 2) for name, t in speed(heads).items()} }",
                flush=True,
            )
        return
    for kind in ("normal", "Student t", "4 large columns"):
        errors = {name: f"{error:.2g}" for name, error in attention_errors(kind).items()}
        print(f"{kind}: {errors}", flush=True)
    text = torch.tensor(
        [*b"\n".join(path.read_bytes() for path in sorted(ROOT.glob("docs/**/*.md")))]
    )
    cut = len(text) * 19 // 20
    model = trained(text[:cut], options.steps)
    pages = text[cut : cut + 32 * (LENGTH + 1)].view(32, LENGTH + 1)
    for name, dtype in KINDS.items():
        if dtype != torch.bfloat16:
            kept, tokens, whole = kept_tokens(model, pages[:, :64], dtype)
            value = perplexity(model, pages, dtype)
            print(
                f"{name}: perplexity {value:.4f}, {kept} of {tokens} tokens, {whole} of"
                f" {len(pages)} prompts",
                flush=True,
            )


if __name__ == "__main__":
    main()
