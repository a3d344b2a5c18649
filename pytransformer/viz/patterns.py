# SPDX-License-Identifier: Apache-2.0
"""Search for heads with known patterns: next or previous token, same word or sentence, null."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..console import escape_plot
from ._figure import check_tokens, figure
from .maps import COLOURS, _ticks


class Text(NamedTuple):
    """Tokens of a text with their sentences.

    Attributes:
        tokens: the tokens as strings.
        sentences: (L,), the sentence of each token.
        special: (L,) bool, [CLS], [SEP] and similar tokens.
    """

    tokens: Sequence[str]
    sentences: torch.Tensor
    special: torch.Tensor


class Found(NamedTuple):
    """The head with the highest score of a pattern: its mean weight on the pattern's keys."""

    pattern: str
    layer: int
    head: int
    score: float


def _shifted(by: int) -> Callable[[Text], torch.Tensor]:
    return lambda text: torch.ones(len(text.tokens), len(text.tokens)).triu(by).tril(by).bool()


def _same_word(text: Text) -> torch.Tensor:
    names = {word: n for n, word in enumerate(dict.fromkeys(text.tokens))}
    ids = torch.tensor([names[word] for word in text.tokens])
    return (ids[:, None] == ids) & ~torch.eye(len(ids), dtype=torch.bool)


def _same_sentence(text: Text) -> torch.Tensor:
    return (text.sentences[:, None] == text.sentences) & ~text.special


# The pattern's keys of each query, (L, L) bool.
PATTERNS: dict[str, Callable[[Text], torch.Tensor]] = {
    "next token": _shifted(1),
    "previous token": _shifted(-1),
    "same word elsewhere": _same_word,
    "same sentence": _same_sentence,
    "null: special tokens": lambda text: text.special.expand(len(text.tokens), -1),
}


def pattern_scores(weights: torch.Tensor, text: Text) -> dict[str, torch.Tensor]:
    """Return the score (layers, heads) of each pattern.

    The score is the weight on the pattern's keys, averaged over the queries with such keys. Special
    tokens are not queries. Patterns without queries are omitted.

    Args:
        weights: (layers, heads, L, L).

    Source: Clark et al., "What does BERT look at?" (2019), section 3.
    """
    length = len(text.tokens)
    if weights.dim() != 4 or tuple(weights.shape[2:]) != (length, length):
        raise ValueError(
            f"pattern_scores: weights must be (layers, heads, {length}, {length}), got"
            f" {tuple(weights.shape)}"
        )
    found = {}
    for name, keys_of in PATTERNS.items():
        keys = keys_of(text)
        queries = keys.any(1) & ~text.special
        if queries.any():
            found[name] = (weights.cpu() * keys).sum(-1)[..., queries].mean(-1)
    return found


def find_patterns(weights: torch.Tensor, text: Text) -> list[Found]:
    """Return the highest-scoring head of each pattern; arguments as in :func:`pattern_scores`."""
    found = []
    for name, scores in pattern_scores(weights, text).items():
        layer, head = divmod(int(scores.argmax()), scores.shape[1])
        found.append(Found(name, layer, head, float(scores[layer, head])))
    return found


def plot_patterns(weights: torch.Tensor, text: Text, *, title: str = "") -> Any:
    """Plot a heat map of each pattern's highest-scoring head."""
    words, found = (
        check_tokens("plot_patterns", "tokens", text.tokens, len(text.tokens)),
        find_patterns(weights, text),
    )
    side, columns = 1.4 + 0.19 * len(text.tokens), min(len(found), 3)
    rows = -(-len(found) // columns)
    fig = figure(side * columns + 0.8, (side + 0.3) * rows + 0.6)
    axes = list(fig.subplots(rows, columns, squeeze=False).flat)
    for axis, (name, layer, head, score) in zip(axes, found):
        image = axis.imshow(
            weights[layer, head].cpu().numpy(),
            vmin=0,
            vmax=1,
            cmap=COLOURS,
            interpolation="nearest",
        )
        _ticks(axis.xaxis, words, len(text.tokens), rotation=90)
        _ticks(axis.yaxis, words, len(text.tokens))
        axis.tick_params(labelsize=7)
        head_of = escape_plot(f"layer {layer}, head {head}: {score:.0%}")
        axis.set_title(f"{escape_plot(name)}\n{head_of}", fontsize=8)
    for axis in axes[len(found) :]:
        axis.set_axis_off()
    fig.colorbar(image, ax=axes, shrink=0.6, label="weight")
    fig.suptitle(escape_plot(title), fontsize=10)
    return fig
