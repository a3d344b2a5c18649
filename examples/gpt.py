# SPDX-License-Identifier: Apache-2.0
"""GPT from scratch: complete sentences, then summarize articles in the same causal model.

    python examples/gpt.py             about two minutes on two cores
    python examples/gpt.py --steps 20

A sequence is article, delimiter, summary. An article is three sentences by the grammar of
portuguese.py; its summary is their first names and nouns, in order. Only the tokens after the
delimiter are learned. With --prefix, the article's tokens attend to each other (prefix-LM).
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from pytransformer.console import Console
from pytransformer.models import GPT, GPTConfig, generate
from pytransformer.training import (
    Batches,
    Recipe,
    Tokenizer,
    Trainer,
    causal_collate,
    of_model,
    pad,
    warmup_cosine,
)
from pytransformer.training.batching import attention_mask

sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH
from portuguese import make_corpus

DELIMITER = "<sep>"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=500, help="of each of the two trainings (default %(default)s)"
    )
    parser.add_argument("--width", type=int, default=96, help="d_model (default %(default)s)")
    parser.add_argument("--sentences", type=int, default=4000, help="default %(default)s")
    parser.add_argument("--prefix", action="store_true", help="the article's tokens see each other")
    return parser.parse_args(arguments)


def summary_of(sentences: Sequence[str]) -> str:
    """Return the first two words of each sentence."""
    return ", ".join(" ".join(sentence.rstrip(".?").split()[:2]) for sentence in sentences)


def train(model: GPT, examples: list[list[int]], collate, steps: int) -> None:
    batches = Batches(examples, 32, collate, lengths=[len(ids) for ids in examples])
    recipe = Recipe(steps=steps, log_every=max(1, steps // 4), clip=1.0)
    Trainer(
        model, of_model, batches, recipe, warmup_cosine(2e-3, steps // 10, steps), console=Console()
    ).fit()


def surprise(
    model: GPT, examples: list[list[int]], collate, learned: list[list[int]]
) -> tuple[float, float]:
    """Return the held-out loss in nats per token, and the loss of unigram counts of `learned`."""
    batch = collate(examples, None)
    model.eval()
    with torch.no_grad():
        loss = model(**batch).loss.item()
    tokens = collate(learned, None)["labels"]
    counts = torch.ones(model.config.vocab_size).scatter_add_(
        0, tokens[tokens >= 0], torch.ones(int((tokens >= 0).sum()))
    )
    asked = batch["labels"][batch["labels"] >= 0]
    return loss, -(counts / counts.sum()).log()[asked].mean().item()


def main(arguments: Sequence[str] | None = None) -> tuple[float, float, float]:
    """Return the share of exact held-out summaries, their loss, and :func:`surprise`'s baseline."""
    options = parse(arguments)
    corpus = make_corpus(options.sentences, max(24, options.sentences // 20), seed=2)
    tokenizer = Tokenizer.train([s.target for s in corpus.train], 1000, special=[DELIMITER])
    delimiter, end = tokenizer.id(DELIMITER), tokenizer.end_id
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=len(tokenizer),
        d_model=options.width,
        num_layers=2,
        num_heads=4,
        max_length=192,
        attention_dropout=0.0,
    )
    model = GPT(config)
    print(
        f"{len(corpus.train)} sentences, {model.num_parameters() / 1e6:.2f} million parameters;"
        " next tokens"
    )
    texts = [[tokenizer.start_id, *tokenizer.encode(s.target), end] for s in corpus.train]
    train(model, texts, causal_collate(tokenizer.pad_id), options.steps)

    prompts = [
        [tokenizer.start_id, *tokenizer.encode(text)]
        for text in ("there are twenty", "on July 30, Ana", "the old")
    ]
    ids, mask = pad(prompts, tokenizer.pad_id, left=True), attention_mask(prompts, left=True)
    ways = {
        "greedy": {},
        "beam": {"beams": 4},
        "drawn": {"sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95},
    }
    for name, how in ways.items():
        made = generate(
            model,
            ids,
            mask,
            max_new_tokens=24,
            stop=(end,),
            generator=torch.Generator().manual_seed(0),
            **how,
        )
        for prompt, tokens in zip(prompts, made.lists()):
            print(f"   {name:7} {tokenizer.decode([*prompt, *tokens])}")

    def article(part: list, chance: random.Random) -> tuple[list[int], list[int]]:
        chosen = [s.target for s in chance.sample(part, 3)]
        return [tokenizer.start_id, *tokenizer.encode(" ".join(chosen))], [
            *tokenizer.encode(summary_of(chosen)),
            end,
        ]

    chance = random.Random(3)
    learned = [article(corpus.train, chance) for _ in range(options.sentences)]
    held_out = [article(corpus.held_out, chance) for _ in range(40)]
    print(f"{len(learned)} articles with summaries")
    plain = causal_collate(tokenizer.pad_id, delimiter=delimiter)

    def collate(examples, generator) -> dict[str, torch.Tensor]:
        batch = plain(examples, generator)
        if options.prefix:
            batch["prefix_lengths"] = torch.tensor([ids.index(delimiter) + 1 for ids in examples])
        return batch

    examples = [[*text, delimiter, *summary] for text, summary in learned]
    train(model, examples, collate, options.steps)
    loss, unigram = surprise(
        model, [[*text, delimiter, *summary] for text, summary in held_out], collate, examples
    )
    print(
        f"held-out summaries: {loss:.3f} nats a token; by the frequency of each token alone"
        f" {unigram:.3f}"
    )
    prompts = [[*text, delimiter] for text, _ in held_out]
    ids, mask = pad(prompts, tokenizer.pad_id, left=True), attention_mask(prompts, left=True)
    prefix = torch.full((len(prompts),), ids.shape[1]) if options.prefix else None
    summaries = generate(
        model, ids, mask, max_new_tokens=40, stop=(end,), prefix_lengths=prefix
    ).lists()
    right = sum(said == summary[:-1] for said, (_, summary) in zip(summaries, held_out))
    for (text, _), said in list(zip(held_out, summaries))[:3]:
        print(f"   {tokenizer.decode(text)}\n      said: {tokenizer.decode(said)}")
    share = right / len(held_out)
    print(f"{100 * share:.1f} % of {len(held_out)} held-out articles summarized exactly")
    return share, loss, unigram


if __name__ == "__main__":
    main()
