# SPDX-License-Identifier: Apache-2.0
"""BERT: pre-trained on masked tokens and next sentences, then fine-tuned.

Texts are lowercased. A sentence pair is the two halves of a text or, half of
the time, halves of two texts. 15 % of the tokens are predicted (80 % masked, 10
% random, 10 % unchanged). Fine-tuning then learns a text's label from [CLS],
the start and end of the text with a given label among three, and the case of
each word. Held-out accuracy is shown beside a simple baseline.

    python examples/train.py bert --data gettext:Django,Sphinx,wagtail
"""

from __future__ import annotations

import argparse

from ._run import Figure, Run
from ._text import add_steps, add_texts, texts_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_texts(parser)
    add_steps(
        parser,
        {"rate": 1e-3, "fine_rate": 1e-3},
        steps=2500,
        classify_steps=1500,
        answer_steps=2500,
        tag_steps=400,
    )


def train(run: Run) -> int:
    from pytransformer.training import mask_tokens

    from ._fine_tuning import answers, classification, fine_tune, tagging
    from ._masked import by_neighbour, by_words_in_common, masked_figures, pre_train, uncased_words

    a = run.arguments
    texts = uncased_words(*texts_of(run), a.vocabulary)
    model, pairs, checked = pre_train(run, texts, ("mlm", "nsp"), mask_tokens)
    found = masked_figures(model, checked)
    asked = int(found["asked"])
    figures = [
        Figure("masked tokens", found["masked_accuracy"], by_neighbour(texts, checked),
            "what most often follows the token before",
               1 / texts.words.known, asked),
        Figure("next sentence or random", found["next_accuracy"], by_words_in_common(pairs),
            "a token in common", 0.5, len(pairs)),
    ]  # fmt: skip
    steps = (a.classify_steps, a.answer_steps, a.tag_steps)
    for question, many in zip((classification(texts), answers(run, texts), tagging(texts)), steps):
        figure = fine_tune(run, model, question, many, texts.words.tokenizer.pad_id)
        figures += [figure] if figure else []
    return run.report(
        figures, texts=[len(texts.train), len(texts.held_out)], vocabulary=texts.words.known
    )
