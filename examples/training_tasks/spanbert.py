# SPDX-License-Identifier: Apache-2.0
"""SpanBERT: pre-trained on masked spans, then fine-tuned to find answers.

Texts are lowercased and read one at a time, without next-sentence prediction.
Spans of geometric length, at most 10 tokens, are masked until they cover 15 %.
Each masked token is predicted from itself and, in the boundary loss, from the
two tokens around its span and its position in the span. Fine-tuning then learns
the start and end of the text with a given label among three, as `train bert`
does.

    python examples/train.py spanbert --data gettext:Django,Sphinx,wagtail
"""

from __future__ import annotations

import argparse

from ._run import Figure, Run
from ._text import add_steps, add_texts, texts_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_texts(parser)
    add_steps(parser, {"rate": 1e-3, "fine_rate": 1e-3}, steps=3000, answer_steps=2000)


def train(run: Run) -> int:
    from pytransformer.training import mask_spans

    from ._fine_tuning import answers, fine_tune
    from ._masked import boundary_accuracy, by_neighbour, masked_figures, pre_train, uncased_words

    a = run.arguments
    texts = uncased_words(*texts_of(run), a.vocabulary)
    model, _, checked = pre_train(run, texts, ("mlm", "boundary"), mask_spans)
    found = masked_figures(model, checked)
    asked, chance, neighbour = (
        int(found["asked"]),
        1 / texts.words.known,
        by_neighbour(texts, checked),
    )
    by = "what most often follows the token before"
    figures = [
        Figure("tokens of masked spans", found["masked_accuracy"], neighbour, by, chance, asked),
        Figure(
            "the same, from the spans' bounds alone",
            boundary_accuracy(model, checked),
            neighbour,
            by,
            chance,
            asked,
        ),
    ]
    figure = fine_tune(
        run, model, answers(run, texts), a.answer_steps, texts.words.tokenizer.pad_id
    )
    figures += [figure] if figure else []
    return run.report(
        figures, texts=[len(texts.train), len(texts.held_out)], vocabulary=texts.words.known
    )
