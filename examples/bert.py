# SPDX-License-Identifier: Apache-2.0
"""BERT from scratch: pre-training, then fine-tuning a classifier; no files, no network.

    python examples/bert.py            about two minutes on two cores
    python examples/bert.py --steps 20 --classify-steps 10
    python examples/bert.py --layers 6 --heads 12 --out results/bert

--out saves the model for pictures: pytransformer attention-map results/bert. Pre-training uses
masked tokens and next sentences. The texts are stories by the grammar of portuguese.py, the English
sentences of one person each. The classes are whether a sentence contains a number, a date, both, or
neither.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch

from pytransformer.console import Console
from pytransformer.models import BERT, BERTConfig
from pytransformer.training import (
    Batches,
    Recipe,
    Tokenizer,
    Trainer,
    Vocabulary,
    mask_spans,
    masked_collate,
    next_sentence_pairs,
    of_model,
    pad,
    warmup_cosine,
)
from pytransformer.training.batching import attention_mask
from pytransformer.training.tokenizer import END, START

sys.path.insert(0, str(Path(__file__).parent))  # for PYTHONSAFEPATH
from portuguese import make_corpus

CLASSES = ("neither", "number", "date", "both")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=400, help="of pre-training (default %(default)s)"
    )
    parser.add_argument(
        "--classify-steps", type=int, default=120, help="of fine-tuning (default %(default)s)"
    )
    parser.add_argument("--width", type=int, default=96, help="d_model (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="default %(default)s")
    parser.add_argument("--heads", type=int, default=4, help="of each layer (default %(default)s)")
    parser.add_argument("--sentences", type=int, default=4000, help="default %(default)s")
    parser.add_argument(
        "--out",
        type=Path,
        help="folder for the pre-trained model and its tokenizer (default: not kept)",
    )
    return parser.parse_args(arguments)


def train(model: BERT, batches: Batches, steps: int, peak: float) -> None:
    recipe = Recipe(steps=steps, log_every=max(1, steps // 4), clip=1.0)
    Trainer(
        model, of_model, batches, recipe, warmup_cosine(peak, steps // 10, steps), console=Console()
    ).fit()


def save(model: BERT, tokenizer: Tokenizer, folder: Path) -> None:
    """Save the model and a tokenizer.json that adds special tokens: <s> a </s> b </s>."""
    model.save(folder)
    tokenizer.save(folder / "tokenizer.json")
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{START} $A {END}", pair=f"{START} $A {END} $B:1 {END}:1",
        special_tokens=[(START, tokenizer.start_id), (END, tokenizer.end_id)],
    )  # fmt: skip
    inner.save(str(folder / "tokenizer.json"))


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """Return the held-out accuracy, and that of the most frequent class."""
    options = parse(arguments)
    corpus = make_corpus(options.sentences, max(16, options.sentences // 10), seed=1)
    tokenizer = Tokenizer.train([s.target for s in corpus.train], 1000)
    special = frozenset(
        [
            tokenizer.pad_id,
            tokenizer.unknown_id,
            tokenizer.start_id,
            tokenizer.end_id,
            tokenizer.mask_id,
        ]
    )
    vocabulary = Vocabulary(len(tokenizer), tokenizer.mask_id, special)

    # A story uses one template, so that a sentence predicts the next one.
    stories: dict[str, list[list[int]]] = {}
    for sentence in corpus.train:
        stories.setdefault(sentence.combination.template, []).append(
            tokenizer.encode(sentence.target)
        )
    pairs = next_sentence_pairs(
        list(stories.values()),
        tokenizer.start_id,
        tokenizer.end_id,
        torch.Generator().manual_seed(1),
    )
    torch.manual_seed(0)
    shape = dict(
        d_model=options.width, hidden=4 * options.width, num_layers=options.layers, max_length=128
    )
    model = BERT(
        BERTConfig(
            vocab_size=len(tokenizer),
            num_heads=options.heads,
            heads=("mlm", "nsp", "boundary"),
            **shape,
        )
    )
    print(
        f"{len(pairs)} pairs of sentences, {model.num_parameters() / 1e6:.2f} million parameters;"
        " pre-training"
    )
    collate = masked_collate(tokenizer.pad_id, vocabulary, mask_spans)
    train(
        model, Batches(pairs, 32, collate, lengths=[len(p.ids) for p in pairs]), options.steps, 1e-3
    )
    if options.out is not None:
        save(model, tokenizer, options.out)

    def example(sentence) -> tuple[list[int], int]:
        ids = [tokenizer.start_id, *tokenizer.encode(sentence.target), tokenizer.end_id]
        return ids, (sentence.combination.number is not None) + 2 * (
            sentence.combination.date is not None
        )

    def classify_collate(examples, generator) -> dict[str, torch.Tensor]:
        ids = [ids for ids, _ in examples]
        labels = torch.tensor([label for _, label in examples])
        return {
            "input_ids": pad(ids, tokenizer.pad_id),
            "attention_mask": attention_mask(ids),
            "labels": labels,
        }

    # fine-tuning needs few labels
    few = [example(s) for s in corpus.train[: max(64, options.sentences // 8)]]
    classifier = model.with_heads("classification", num_labels=len(CLASSES))
    print(f"fine-tuning on {len(few)} labelled sentences")
    train(classifier, Batches(few, 32, classify_collate), options.classify_steps, 5e-4)
    batch = classify_collate([example(s) for s in corpus.held_out], None)
    classifier.eval()
    with torch.no_grad():
        said = classifier(batch["input_ids"], batch["attention_mask"]).logits.argmax(-1)
    share = (said == batch["labels"]).float().mean().item()
    most = batch["labels"].bincount().max().item() / len(said)
    print(
        f"{100 * share:.1f} % of {len(said)} held-out sentences classified right; always the same"
        f" class: {100 * most:.1f} %"
    )
    for sentence, label in list(zip(corpus.held_out, said.tolist()))[:4]:
        print(f"   {CLASSES[label]:8} {sentence.target}")
    return share, most


if __name__ == "__main__":
    main()
