# SPDX-License-Identifier: Apache-2.0
"""Time a training step of the small translation models, beside PyTorch's modules.

    python bench/tools/step_time.py                     # print; the preset "notes-small"
    python bench/tools/step_time.py --preset notes      # heads as wide as the model
    python bench/tools/step_time.py --out FILE.json     # write a file too
    python bench/tools/step_time.py --bf16              # bfloat16 autocast, as in training
    python bench/tools/step_time.py --profile           # time by op of ours

The models have 4 layers in encoder and decoder, d_model 128, hidden 512, 8 heads, vocabularies of
7,765 and 7,010 tokens, batch 64, and the preset's dropout and label smoothing. The preset "notes"
has the head size of TensorFlow's tutorial. Sentence lengths follow a log-normal distribution like
that of spoken sentences (median 20 tokens, max 64), padded to the longest of the batch, as without
sorting by length. A step is zero_grad, forward, backward and fused Adam.

pytransformer  models.Transformer
torch          torch.nn.Transformer, which calls PyTorch's fused scaled_dot_product_attention; its
               heads are d_model / num_heads wide, so for "notes" its layers use
               support.eager_twin.WideAttention
eager          the same, with attention as softmax(q k^T / sqrt(d) + mask) v in plain code
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pytransformer.cli.benchmark import results
from pytransformer.cli.benchmark.clock import Contender, interleaved
from pytransformer.models import Transformer
from pytransformer.ops._core.registry import trace
from pytransformer.training import IGNORED, translation_collate

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "support"))
from support.eager_twin import widen

BATCH, MEDIAN, SPREAD, LONGEST = 64, 20, 0.5, 64


class Twin(nn.Module):
    """The same network from PyTorch's modules, with equal sizes and dropout."""

    def __init__(self, config) -> None:
        super().__init__()
        c = config
        self.source, self.target = (
            nn.Embedding(c.vocab_size, c.d_model),
            nn.Embedding(c.target_vocab_size, c.d_model),
        )
        self.transformer = widen(
            nn.Transformer(
                c.d_model,
                c.num_heads,
                c.num_encoder_layers,
                c.num_decoder_layers,
                c.hidden,
                c.dropout,
                batch_first=True,
            ),
            c,
        )
        # post-norm: each block ends with one
        self.transformer.encoder.norm = self.transformer.decoder.norm = None
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = c.attention_dropout
            elif isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                module.dropout.p = c.activation_dropout
        self.output = nn.Linear(c.d_model, c.target_vocab_size, c.logits_bias)
        self.drop, self.scale, self.smoothing = (
            nn.Dropout(c.dropout),
            c.d_model**0.5,
            c.label_smoothing,
        )
        from pytransformer.nn import sinusoidal

        self.register_buffer(
            "positions",
            sinusoidal(c.max_length, c.d_model, halves=c.positions == "sinusoidal-halves"),
        )

    def embed(self, ids: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        return self.drop(embedding(ids) * self.scale + self.positions[: ids.shape[1]])

    def forward(
        self, input_ids, attention_mask, decoder_input_ids, labels, decoder_attention_mask=None
    ) -> torch.Tensor:
        length = decoder_input_ids.shape[1]
        hidden = self.transformer(
            self.embed(input_ids, self.source),
            self.embed(decoder_input_ids, self.target),
            tgt_mask=torch.ones(length, length, dtype=torch.bool).triu(1),
            tgt_is_causal=True,
            src_key_padding_mask=attention_mask == 0,
            memory_key_padding_mask=attention_mask == 0,
        )
        logits = self.output(hidden)
        return F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.smoothing,
        )


def plain_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    """Compute scaled_dot_product_attention step by step."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf
        )
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, -torch.inf)
            if attn_mask.dtype == torch.bool
            else scores + attn_mask
        )
    return F.dropout(scores.softmax(-1), dropout_p) @ value


@contextmanager
def eager() -> Iterator[None]:
    kept = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = plain_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = kept


def typical_batch(config, generator: torch.Generator) -> dict[str, torch.Tensor]:
    lengths = (
        (MEDIAN * torch.exp(SPREAD * torch.randn(2, BATCH, generator=generator)))
        .clamp(3, LONGEST)
        .int()
        .tolist()
    )

    def sentence(length: int, vocabulary: int) -> list[int]:
        return torch.randint(5, vocabulary, (length,), generator=generator).tolist()

    pairs = [
        (sentence(s, config.vocab_size), sentence(t, config.target_vocab_size))
        for s, t in zip(*lengths)
    ]
    return translation_collate(0, 2, 3)(pairs, generator)


def stepper(
    model: nn.Module,
    loss_of: Callable[..., torch.Tensor],
    batch: dict[str, torch.Tensor],
    bf16: bool,
) -> Callable[[], None]:
    optimizer = torch.optim.Adam(
        model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, fused=True
    )
    model.train()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = loss_of(**batch)
        loss.backward()
        optimizer.step()

    return step


def profile(step: Callable[[], None], steps: int = 5) -> None:
    """Print the self-time shares of the ops that dominate the step."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            step()
    found = sorted(seen.key_averages(), key=lambda e: e.self_cpu_time_total, reverse=True)
    total = sum(e.self_cpu_time_total for e in found)
    print(f"{total / steps / 1e3:.1f} ms a step")
    for e in found[:20]:
        print(
            f"{e.self_cpu_time_total / total:6.1%} {e.self_cpu_time_total / steps / 1e3:8.2f} ms "
            f" {e.count // steps:4} x  {e.key}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset",
        choices=["notes-small", "notes"],
        default="notes-small",
        help="default %(default)s",
    )
    parser.add_argument("--threads", type=int, default=2, help="default %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of timing for each (default %(default)s)"
    )
    parser.add_argument("--bf16", action="store_true", help="under bfloat16 autocast")
    parser.add_argument(
        "--profile", action="store_true", help="instead of timing, print where our step's time goes"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ours = Transformer.from_preset(options.preset)
    batch = typical_batch(ours.config, torch.Generator().manual_seed(0))
    twins = Twin(ours.config), Twin(ours.config)
    assert sum(p.numel() for p in twins[0].parameters()) == ours.num_parameters(), (
        "not the same network"
    )
    steps = {
        "pytransformer": Contender(
            stepper(ours, lambda **b: ours(**b).loss, batch, options.bf16), nullcontext
        ),
        "torch": Contender(stepper(twins[0], twins[0], batch, options.bf16), nullcontext),
        "eager": Contender(stepper(twins[1], twins[1], batch, options.bf16), eager),
    }
    with trace() as record:
        steps["pytransformer"].call()
    if options.profile:
        return profile(steps["pytransformer"].call)
    timed = interleaved(steps, min_time=options.seconds)
    fastest = timed["pytransformer"].median_ms
    rows = {
        name: {
            "median_ms": t.median_ms,
            "p20_ms": t.p20_ms,
            "p80_ms": t.p80_ms,
            "samples": t.samples,
            "ratio": t.median_ms / fastest,
        }
        for name, t in timed.items()
    }
    shapes = {name: list(tensor.shape) for name, tensor in batch.items()}
    for name, row in rows.items():
        print(
            f"{name:14} {row['median_ms']:8.1f} ms  ({row['p20_ms']:.1f} to {row['p80_ms']:.1f},"
            f" {row['samples']} samples)  {row['ratio']:.2f} times ours"
        )
    backends = sorted({f"{raw}: {backend}" for raw, backend in record})
    print(f"source {shapes['input_ids']}, target {shapes['labels']}; {', '.join(backends)}")
    if options.out is not None:
        environment = results.environment(
            "cpu", f"python bench/tools/step_time.py --preset {options.preset}"
        )
        facts = {
            "environment": environment,
            "model": options.preset,
            "bf16": options.bf16,
            "shapes": shapes,
            "backends": backends,
            "rows": rows,
        }
        options.out.write_text(json.dumps(facts, indent=2) + "\n")
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
