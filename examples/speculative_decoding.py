# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: guess several tokens from repeated text, check them in one call.

    python examples/speculative_decoding.py                   seconds on two cores
    python examples/speculative_decoding.py --branches 1      a chain of guesses, not a tree
    python examples/speculative_decoding.py --cache paged --tokens 150

Earlier occurrences of the last tokens, up to ``--branches`` of them, propose continuations.
Proposals with a common prefix share nodes of a tree. One model call reads the tree; each node sees
only its path. The longest path that matches the model's tokens is accepted, the model adds one more
token, and ``crop`` drops the rest of the cache. Every token equals that of greedy decoding, which
the example checks at the end.

The model is a small GPT, trained briefly on repetitive text, so that guesses can match.

Sources: Leviathan et al., "Fast inference from transformers via speculative decoding" (2023); Miao
et al., "SpecInfer" (2024) for trees.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

import torch

from pytransformer import nn
from pytransformer.models import GPT, Decoding, GPTConfig, generate

VOCABULARY, LENGTH = 60, 384


class Tree:
    """Tokens to read, parents before children: a chain of certain tokens, then guesses."""

    def __init__(self, certain: Sequence[int]) -> None:
        self.certain, self.tokens = len(certain), list(certain)
        self.parents = list(range(-1, len(certain) - 1))

    def add(self, path: Sequence[int]) -> None:
        """Add a guess after the certain tokens; it shares nodes with a common prefix."""
        node = self.certain - 1
        for token in path:
            known = [
                n
                for n in range(self.certain, len(self.tokens))
                if self.parents[n] == node and self.tokens[n] == token
            ]
            if not known:
                self.tokens.append(token)
                self.parents.append(node)
            node = known[0] if known else len(self.tokens) - 1

    def seen(self) -> torch.Tensor:
        """Return (nodes, nodes) bool: each node sees itself and its path."""
        found = torch.eye(len(self.tokens), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                found[node] |= found[parent]
        return found

    def right(self, answers: Sequence[int]) -> list[int]:
        """Return the guessed nodes on the path that matches the model's answers."""
        path = [self.certain - 1]
        for node in range(self.certain, len(self.tokens)):
            if self.parents[node] == path[-1] and self.tokens[node] == answers[path[-1]]:
                path.append(node)
        return path[1:]


def look_up(text: list[int], branches: int, depth: int, same: int = 2) -> list[list[int]]:
    """Return the continuations of earlier occurrences of the last ``same`` tokens, latest first."""
    places = (
        end for end in range(len(text) - 1, same - 1, -1) if text[end - same : end] == text[-same:]
    )
    return [text[end : end + depth] for end, _ in zip(places, range(branches))]


def step(
    model: GPT, cache: nn.DecoderCache, text: list[int], branches: int, depth: int
) -> list[int]:
    """Call the model once; return the tokens that are then certain.

    The cache holds a prefix of ``text`` and grows.
    """
    held = cache.length
    tree = Tree(text[held:])
    for guess in look_up(text, branches, depth):
        tree.add(guess)
    nodes = len(tree.tokens)
    sees = torch.cat((torch.ones(nodes, held, dtype=torch.bool), tree.seen()), 1)
    answers = (
        model(torch.tensor([tree.tokens]), sees[None], past_key_values=cache)
        .logits[0]
        .argmax(-1)
        .tolist()
    )
    path = tree.right(answers)
    # Keys are in the order of nodes. Accepted consecutive nodes stay; the next tree reads the rest
    # again.
    stay = tree.certain + next(
        (i for i, node in enumerate(path) if node != tree.certain + i), len(path)
    )
    cache.crop(held + stay)
    return [tree.tokens[node] for node in path] + [answers[path[-1] if path else tree.certain - 1]]


def trained(steps: int, rng: random.Random) -> tuple[GPT, list[list[int]]]:
    """Return a model trained on phrases in random order, and the phrases."""
    phrases = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(4, 9))] for _ in range(12)]
    model = GPT(
        GPTConfig(vocab_size=VOCABULARY, d_model=64, num_layers=2, num_heads=4, max_length=LENGTH)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        ids = torch.tensor([write(phrases, 64, rng) for _ in range(8)])
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval(), phrases


def write(phrases: list[list[int]], length: int, rng: random.Random) -> list[int]:
    found: list[int] = []
    while len(found) < length:
        found += rng.choice(phrases)
    return found[:length]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=120, help="new tokens (default %(default)s)")
    parser.add_argument(
        "--branches", type=int, default=3, help="places to guess from (default %(default)s)"
    )
    parser.add_argument(
        "--depth", type=int, default=6, help="tokens of a guess (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=150, help="of training (default %(default)s)")
    parser.add_argument(
        "--cache", choices=("contiguous", "paged"), default="contiguous", help="default %(default)s"
    )
    parser.add_argument("--seed", type=int, default=1, help="default %(default)s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> tuple[list[int], list[int], int]:
    """Return the tokens, those of greedy decoding, and the number of model calls."""
    settings = parse(arguments)
    rng = random.Random(settings.seed)
    torch.manual_seed(settings.seed)
    model, phrases = trained(settings.steps, rng)
    prompt = write(phrases, 80, rng)
    cache = (
        model.make_cache()
        if settings.cache == "contiguous"
        else model.make_paged_cache(LENGTH // 16, page_size=16)
    )
    text, calls, began = list(prompt), 0, time.perf_counter()
    with torch.inference_mode():
        while len(text) < len(prompt) + settings.tokens:
            text += step(model, cache, text, settings.branches, settings.depth)
            calls += 1
    took = time.perf_counter() - began
    told = text[len(prompt) :][: settings.tokens]
    began = time.perf_counter()
    plain = generate(
        model, torch.tensor([prompt]), decoding=Decoding(max_new_tokens=settings.tokens)
    ).lists()[0]
    print(
        f"{len(told)} tokens in {calls} calls, {took:.2f} s; one by one"
        f" {time.perf_counter() - began:.2f} s"
    )
    print("equal to greedy decoding" if told == plain else f"not greedy decoding's: {told} {plain}")
    return told, plain, calls


if __name__ == "__main__":
    main()
