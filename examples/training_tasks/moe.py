# SPDX-License-Identifier: Apache-2.0
"""MoE: a GPT with experts beside a dense one of the same cost per token.

Every second block replaces its feed-forward network by a mixture of experts. A
token goes to its best expert (--choices 1), so that it uses as many parameters
as in the dense model, plus the router. Both models read the same batches. The
report has the held-out loss per token, the share of tokens of each expert, and
the share dropped at capacity.

    python examples/train.py moe --data gettext:Django,Sphinx,wagtail
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from pytransformer.cli import UsageError

from ._run import Figure, Run
from ._text import add_steps, add_texts, texts_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_texts(parser)
    experts = parser.add_argument_group("experts")
    experts.add_argument(
        "--experts", type=int, default=8, help="of a mixture (default %(default)s)"
    )
    experts.add_argument(
        "--choices", type=int, default=1, help="experts of a token (default %(default)s)"
    )
    experts.add_argument(
        "--capacity",
        type=float,
        default=1.25,
        help="an expert's room, of an equal share; 0: no bound (default %(default)s)",
    )
    experts.add_argument(
        "--balance",
        type=float,
        default=0.01,
        help="weight of the balance loss (default %(default)s)",
    )
    add_steps(parser, {"rate": 2e-3}, steps=2500)


def train(run: Run) -> int:
    from pytransformer.training import causal_collate

    from ._language_model import bigram_loss, by_length, new_gpt, next_token_figures, text_ids
    from ._text import in_batches, rate, words_of

    a = run.arguments
    if a.layers < 2:
        raise UsageError(
            f"--layers must be at least 2, got {a.layers}: every second block has experts"
        )
    texts, held_out = texts_of(run)
    words = words_of([t.text for t in texts], a.vocabulary)
    learned, checked = (
        text_ids(words.tokenizer, [t.text for t in part]) for part in (texts, held_out)
    )
    collate = causal_collate(words.tokenizer.pad_id)
    batches = in_batches(sorted(checked, key=len), a.batch, collate)
    options = {"num_experts": a.experts, "every": 2, "choices": a.choices,
        "capacity_factor": a.capacity or None,
               "balance_weight": a.balance}  # fmt: skip
    found: dict[str, dict[str, float]] = {}
    sizes: dict[str, list[int]] = {}
    use: list[dict[str, Any]] = []
    # Invalid options fail here.
    models = {
        "dense": new_gpt(run, words.known),
        "experts": new_gpt(run, words.known, experts=options),
    }
    for name, model in models.items():

        def evaluate(model: Any, mixtures: bool = name == "experts") -> dict[str, float]:
            told = next_token_figures(model, batches)
            return told | _worst(expert_use(model, batches)) if mixtures else told

        run.fit(
            name,
            model,
            by_length(learned, collate, run),
            rate(a.rate, a.steps),
            a.steps,
            evaluate=evaluate,
        )
        found[name], sizes[name] = (
            next_token_figures(model, batches),
            [model.num_parameters(), active_parameters(model)],
        )
        use = expert_use(model, batches)
    words.tokenizer.save(run.out / "tokenizer.json")
    _tell(run, sizes, use)
    count = sum(len(ids) - 1 for ids in checked)
    bigrams = bigram_loss(learned, checked, words.known)
    figures = [
        Figure("next token, nats: the dense model", found["dense"]["validation_loss"], bigrams,
            "counts of two tokens in a row",
               math.log(words.known), count),
        Figure("next token, nats: with experts", found["experts"]["validation_loss"],
            found["dense"]["validation_loss"],
               "the dense model", math.log(words.known), count),
    ]  # fmt: skip
    return run.report(figures, parameters=sizes, experts=use, vocabulary=words.known)


def _tell(run: Run, sizes: dict[str, list[int]], use: Sequence[dict[str, Any]]) -> None:
    for name, (total, active) in sizes.items():
        run.say(
            f"{name}: {total / 1e6:.2f} million parameters, of which a token meets"
            f" {active / 1e6:.2f}"
        )
    for mixture in use:
        shares = " ".join(f"{100 * share:.1f}" for share in mixture["shares"])
        run.say(
            f"{mixture['name']}: % of the choices to each expert {shares}; without room"
            f" {100 * mixture['dropped']:.1f} %"
        )


def active_parameters(model: Any) -> int:
    """Return the parameter count per token: `choices` experts per mixture, plus routers."""
    from pytransformer.nn.experts import MixtureOfExperts

    idle = 0
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            stacked = sum(p.numel() for p in module.experts.parameters())
            idle += stacked - stacked * module.choices // len(module.experts)
    return model.num_parameters() - idle


def expert_use(model: Any, batches: Sequence[Any]) -> list[dict[str, Any]]:
    """Return, per mixture, each expert's share of the routed tokens and the dropped share."""
    import torch

    from pytransformer.nn.experts import MixtureOfExperts

    from ._text import each_batch

    mixtures = {name: m for name, m in model.named_modules() if isinstance(m, MixtureOfExperts)}
    counts = {name: torch.zeros(len(m.experts), dtype=torch.int64) for name, m in mixtures.items()}
    dropped = dict.fromkeys(mixtures, 0)

    def watch(name: str, mixture: MixtureOfExperts) -> Any:
        def hook(router: Any, inputs: Any, scores: Any) -> None:
            chosen = scores.topk(mixture.choices, -1).indices.flatten().cpu()
            here = chosen.bincount(minlength=len(mixture.experts))
            counts[name] += here
            if mixture.capacity_factor is not None:
                room = math.ceil(len(chosen) / len(mixture.experts) * mixture.capacity_factor)
                dropped[name] += int((here - room).clamp_min(0).sum())

        return mixture.router.register_forward_hook(hook)

    hooks = [watch(name, mixture) for name, mixture in mixtures.items()]
    try:
        for _ in each_batch(model, batches):
            pass
    finally:
        for hook in hooks:
            hook.remove()
    return [
        {
            "name": name,
            "shares": [round(n / int(c.sum()), 4) for n in c.tolist()],
            "dropped": round(dropped[name] / int(c.sum()), 4),
        }
        for name, c in counts.items()
    ]


def _worst(use: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {
        "dropped": max(m["dropped"] for m in use),
        "largest share": max(max(m["shares"]) for m in use),
    }
