# SPDX-License-Identifier: Apache-2.0
"""GPT: learn next tokens, then complete, translate or summarize from prompts.

One causal model reads pairs of texts, `source <to> target`, each after zero to
four similar pairs, and learns every next token; there is no other training. It
then answers a source and the delimiter, chooses the true one of four targets or
of four second halves of a text by likelihood, and completes texts, with zero,
one and four training pairs in the prompt.

  python examples/train.py gpt --data gettext:Django,Sphinx,wagtail --from pt --to en
  python examples/train.py gpt --data docstrings:torch,numpy   # target: summary
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from ._run import Figure, Run
from ._text import add_model, add_pairs, add_steps, package_names, pairs_of

SHOTS = (0, 1, 4)
SAID = 200  # held-out sources to answer
LOOKED_AT = 1000  # candidate texts for the most similar ones
DELIMITER = "<to>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pairs(parser)
    add_model(parser, vocabulary=6000, batch=24)
    add_steps(parser, {"rate": 2e-3}, steps=3000)


def train(run: Run) -> int:
    from pytransformer.training import causal_collate

    from ._language_model import bigram_loss, by_length, new_gpt, next_token_figures
    from ._text import in_batches, rate, words_of

    a = run.arguments
    pairs, held_out = pairs_of(run)
    words = words_of([text for pair in pairs for text in pair], a.vocabulary, [DELIMITER])
    tokenizer = words.tokenizer
    alone, checked = (
        [[tokenizer.start_id, *ids] for ids in encoded(tokenizer, part)]
        for part in (pairs, held_out)
    )
    learned = with_examples(alone, neighbours(pairs), random.Random(a.seed))
    collate = causal_collate(tokenizer.pad_id)
    batches = in_batches(sorted(checked, key=len), a.batch, collate)
    model = new_gpt(run, words.known)

    def evaluate(model: Any) -> dict[str, float]:
        return next_token_figures(model, batches)

    run.fit(
        "gpt",
        model,
        by_length(learned, collate, run),
        rate(a.rate, a.steps),
        a.steps,
        evaluate=evaluate,
    )
    tokenizer.save(run.out / "tokenizer.json")
    figures = [
        Figure("next token, nats", next_token_figures(model, batches)["validation_loss"],
               bigram_loss(alone, checked, words.known), "counts of two tokens in a row",
               _uniform(words.known),
               sum(len(s) - 1 for s in checked)),
    ]  # fmt: skip
    what = "translation" if package_names(a.data, "docstrings") is None else "summary"
    prompted = Prompted(run, model, tokenizer, _shots(pairs, held_out), what)
    figures += [*_answers(prompted, pairs, held_out), *_choices(prompted, held_out)]
    _complete(prompted, held_out)
    return run.report(figures, pairs=[len(pairs), len(held_out)], vocabulary=words.known)


def _uniform(vocabulary: int) -> float:
    import math

    return math.log(vocabulary)


def encoded(tokenizer: Any, pairs: Sequence[Any]) -> list[list[int]]:
    """Return `source <to> target </s>` of each pair; a side has at most 60 tokens."""
    delimiter = tokenizer.id(DELIMITER)
    sources, targets = (tokenizer.encode_all([pair[side] for pair in pairs]) for side in (0, 1))
    return [[*s[:60], delimiter, *t[:60], tokenizer.end_id] for s, t in zip(sources, targets)]


def neighbours(pairs: Sequence[Any]) -> list[list[int]]:
    """Return, for each pair, the pairs with the most similar sources, best first.

    Pairs with an equal side are excluded, because no held-out pair has one in training either.
    """
    from pytransformer.training.quality import most_alike

    from .data.cleaning import sentence_key

    sources = [pair.source for pair in pairs]
    keys = [[sentence_key(text) for text in pair] for pair in pairs]
    found = most_alike(sources, sources, 3 * max(SHOTS), LOOKED_AT)
    return [
        [i for i in alike if all(a != b for a, b in zip(keys[i], mine, strict=True))][: max(SHOTS)]
        for alike, mine in zip(found, keys)
    ]


def with_examples(
    sequences: Sequence[list[int]], alike: Sequence[Sequence[int]], chance: random.Random
) -> list[list[int]]:
    """Return each sequence `<s> ...` once, after zero to four similar ones, most similar last.

    Prompts have the same form, so examples in a prompt are worth attending to (Shi et al.,
    "In-Context Pretraining", 2023).
    """
    rows = []
    for (start, *ids), near in zip(sequences, alike, strict=True):
        shown = [sequences[i][1:] for i in near[: chance.randint(0, max(SHOTS))]]
        rows.append([start, *_examples(shown, 1 + len(ids)), *ids])
    return rows


def _examples(sequences: Sequence[list[int]], taken: int) -> list[int]:
    """Return the sequences that fit beside `taken` tokens, the most similar last."""
    from ._language_model import LENGTH

    before: list[int] = []
    for ids in sequences:
        if len(ids) + len(before) + taken <= LENGTH:
            before = ids + before
    return before


class Prompted(NamedTuple):
    """A trained model that answers prompts."""

    run: Run
    model: Any
    tokenizer: Any
    shots: dict[str, list[Any]]  # held-out source -> training pairs that may precede it
    what: str  # kind of target: "translation", "summary"

    def prompt(self, source: str, shots: int) -> list[int]:
        """Return `<s>`, `shots` pairs or as many as fit, the source and the delimiter."""
        tail = [*self.tokenizer.encode(source)[:60], self.tokenizer.id(DELIMITER)]
        before = _examples(encoded(self.tokenizer, self.shots[source][:shots]), len(tail) + 62)
        return [self.tokenizer.start_id, *before, *tail]


def _shots(pairs: Sequence[Any], held_out: Sequence[Any]) -> dict[str, list[Any]]:
    """Return, per held-out source, the training pairs that share most words with it, best first."""
    from pytransformer.training.quality import most_alike

    sources = [pair.source for pair in held_out]
    return dict(
        zip(
            sources,
            (
                [pairs[i] for i in found]
                for found in most_alike([p.source for p in pairs], sources, max(SHOTS))
            ),
        )
    )


def _answers(prompted: Prompted, pairs: Sequence[Any], held_out: Sequence[Any]) -> list[Figure]:
    """Return chrF of greedy answers, beside that of the most similar training text."""
    from pytransformer.models import generate
    from pytransformer.training import pad, translation_scores
    from pytransformer.training.batching import attention_mask
    from pytransformer.training.quality import from_memory

    run, tokenizer = prompted.run, prompted.tokenizer
    asked = random.Random(run.arguments.seed).sample(list(held_out), min(SAID, len(held_out)))
    wanted = [pair.target for pair in asked]
    figures = []
    try:
        memory = translation_scores(from_memory(pairs, [pair.source for pair in asked]), wanted)[
            "chrf"
        ]
        for shots in SHOTS:
            said: list[str] = []
            for first in range(0, len(asked), 40):
                prompts = [
                    prompted.prompt(pair.source, shots) for pair in asked[first : first + 40]
                ]
                ids, mask = (
                    pad(prompts, tokenizer.pad_id, left=True),
                    attention_mask(prompts, left=True),
                )
                device = next(prompted.model.parameters()).device
                made = generate(
                    prompted.model,
                    ids.to(device),
                    mask.to(device),
                    max_new_tokens=60,
                    stop=(tokenizer.end_id,),
                )
                said += [tokenizer.decode(tokens) for tokens in made.lists()]
            for pair, text in list(zip(asked, said))[: 3 if shots == 0 else 0]:
                run.say(f"   {pair.source}\n     output    {text}\n     expected  {pair.target}")
            chrf = translation_scores(said, wanted)["chrf"]
            figures.append(
                Figure(
                    f"{prompted.what}, {shots} examples before it, chrF",
                    chrf,
                    memory,
                    "the most similar training text's",
                    None,
                    len(asked),
                )
            )
    except ImportError as error:
        run.say(f"no chrF: {error}")
    return figures


def _choices(prompted: Prompted, held_out: Sequence[Any]) -> list[Figure]:
    """Return the accuracy of the likeliest target and of a text's likeliest second half.

    Targets are scored with and without examples.
    """
    from ._language_model import (
        CHOICES,
        by_letters_in_common,
        choices,
        chosen_right,
        log_likelihoods,
    )
    from .data.labelled import halves

    tokenizer, seed = prompted.tokenizer, prompted.run.arguments.seed
    asked = choices([p.source for p in held_out], [p.target for p in held_out], random.Random(seed))
    figures = []
    for shots in SHOTS if asked else ():
        prompts = [prompted.prompt(c.prompt, shots) for c in asked]
        rows = [
            (p, [*tokenizer.encode(e)[:60], tokenizer.end_id])
            for p, c in zip(prompts, asked)
            for e in c.endings
        ]
        right = chosen_right(log_likelihoods(prompted.model, rows, tokenizer.pad_id), asked)
        figures.append(Figure(f"the {prompted.what} of {CHOICES}, {shots} examples before it",
            right, by_letters_in_common(asked),
                              "most letters in common", 1 / CHOICES, len(asked)))  # fmt: skip
    cut = [parts for pair in held_out if len(parts := halves(pair.target, 6)) == 2]
    asked = choices([parts[0] for parts in cut], [parts[1] for parts in cut], random.Random(seed))
    if not asked:
        prompted.run.say(
            "no text to complete by choice: too few held-out targets of six words or more"
        )
        return figures
    # A text of the target language begins after a delimiter.
    begun = [
        [tokenizer.start_id, tokenizer.id(DELIMITER), *tokenizer.encode(c.prompt)[:60]]
        for c in asked
    ]
    rows = [(p, tokenizer.encode(e)[:60]) for p, c in zip(begun, asked) for e in c.endings]
    right = chosen_right(log_likelihoods(prompted.model, rows, tokenizer.pad_id), asked)
    return [*figures, Figure(f"the second half of a text, of {CHOICES}", right,
        by_letters_in_common(asked),
                             "most letters in common", 1 / CHOICES, len(asked))]  # fmt: skip


def _complete(prompted: Prompted, held_out: Sequence[Any]) -> None:
    """Print the model's completions of three beginnings, greedy and sampled."""
    import torch

    from pytransformer.models import generate

    tokenizer = prompted.tokenizer
    device = next(prompted.model.parameters()).device
    ways: list[dict[str, Any]] = [{}, {"sample": True, "top_p": 0.9}]
    for pair in held_out[:3]:
        words = pair.target.split()
        begun = " ".join(words[: max(1, len(words) // 2)])
        ids = torch.tensor(
            [[tokenizer.start_id, tokenizer.id(DELIMITER), *tokenizer.encode(begun)[:60]]],
            device=device,
        )
        draw = torch.Generator(device).manual_seed(prompted.run.arguments.seed)
        for how in ways:
            made = generate(
                prompted.model,
                ids,
                max_new_tokens=24,
                stop=(tokenizer.end_id,),
                generator=draw,
                **how,
            )
            prompted.run.say(f"   {begun} ... {tokenizer.decode(made.lists()[0])}")
