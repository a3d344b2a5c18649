# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: a small GPT, a paged cache, and a fixed number of slots.

    python examples/continuous_batching.py                    a few seconds on two cores
    python examples/continuous_batching.py --requests 200 --slots 16

Requests join and leave between the steps of one loop. They arrive at random, with prompts of
different lengths, many with a common prefix, some sampled and some greedy. Each result is compared
with generate on that prompt alone. The model is untrained, so its tokens have no meaning.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

import torch

from pytransformer.models import GPT, Batcher, Decoding, GPTConfig, generate


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=60, help="default %(default)s")
    parser.add_argument(
        "--slots", type=int, default=8, help="requests at a time (default %(default)s)"
    )
    parser.add_argument(
        "--pages", type=int, default=64, help="of 16 positions (default %(default)s)"
    )
    parser.add_argument(
        "--piece", type=int, default=32, help="tokens of a prompt a step (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    return parser.parse_args(arguments)


def draw(rng: random.Random, beginnings: list[list[int]]) -> tuple[list[int], Decoding, int]:
    """Return a prompt, its decoding settings, and its RNG seed."""
    prompt = rng.choice(beginnings) + [rng.randrange(4, 500) for _ in range(rng.randint(1, 30))]
    drawn = {"sample": True, "temperature": 0.8, "top_p": 0.95} if rng.random() < 0.5 else {}
    return (
        prompt,
        Decoding(max_new_tokens=rng.randint(1, 30), stop=(3,), **drawn),
        rng.randrange(2**31),
    )


def main(arguments: Sequence[str] | None = None) -> tuple[int, int]:
    """Return the number of requests, and how many match generate on the prompt alone."""
    settings = parse(arguments)
    rng = random.Random(settings.seed)
    torch.manual_seed(settings.seed)
    model = GPT(
        GPTConfig(vocab_size=500, d_model=128, num_layers=4, num_heads=4, max_length=256)
    ).eval()
    cache = model.make_paged_cache(settings.pages, page_size=16)
    batcher = Batcher(model, cache, slots=settings.slots, piece=settings.piece)
    beginnings = [[rng.randrange(4, 500) for _ in range(n)] for n in (0, 40, 80)]
    asked: dict[int, tuple[list[int], Decoding, int]] = {}
    same = steps = told = 0
    began = time.perf_counter()
    while batcher.busy or len(asked) < settings.requests:
        # Arrivals between two steps.
        for _ in range(min(rng.choice([0, 0, 1, 2]), settings.requests - len(asked))):
            prompt, how, seed = draw(rng, beginnings)
            asked[batcher.submit(prompt, how, generator=torch.Generator().manual_seed(seed))] = (
                prompt,
                how,
                seed,
            )
        for finished in batcher.step():
            prompt, how, seed = asked[finished.request]
            alone = generate(
                model,
                torch.tensor([prompt]),
                decoding=how,
                generator=torch.Generator().manual_seed(seed),
            )
            same += alone.lists() == [finished.tokens]
            told += len(finished.tokens)
        steps += 1
    print(
        f"{len(asked)} requests, {told} tokens, {steps} steps, {time.perf_counter() - began:.1f} s"
        " with each checked alone"
    )
    print(
        f"{same} equal to generate alone; {cache.pages.available} of {settings.pages} pages without"
        " a request"
    )
    return len(asked), same


if __name__ == "__main__":
    main()
