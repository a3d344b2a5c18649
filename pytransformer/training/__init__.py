# SPDX-License-Identifier: Apache-2.0
"""Training: corpora, tokenizers, batches, masks, schedules, one trainer, bit-exact resuming.

`pytransformer train` uses these parts; see docs/training.md. Optional libraries are imported only
when used.
"""

from .batching import IGNORED, Batches, causal_collate, pad, translation_collate
from .checkpoint import read_checkpoint, write_checkpoint
from .distributed import World, distributed
from .images import ImageFolder, collate_images, read_image
from .masking import (
    SentencePair,
    Vocabulary,
    mask_spans,
    mask_tokens,
    masked_collate,
    next_sentence_pairs,
)
from .metrics import plot_epochs, plot_losses, plot_runs, read_metrics
from .objective import of_model
from .quality import translation_scores
from .schedule import cooled_down, warmup_cosine, warmup_inverse_square_root
from .text import Pair, read_pairs, read_texts, split_pairs, write_pairs
from .tokenizer import Tokenizer, check_tokenizer
from .trainer import Diverged, Recipe, Trainer
from .translation import Translator

__all__ = [
    "IGNORED",
    "Batches",
    "Diverged",
    "ImageFolder",
    "Pair",
    "Recipe",
    "SentencePair",
    "Tokenizer",
    "Trainer",
    "Translator",
    "Vocabulary",
    "World",
    "causal_collate",
    "check_tokenizer",
    "collate_images",
    "cooled_down",
    "distributed",
    "mask_spans",
    "mask_tokens",
    "masked_collate",
    "next_sentence_pairs",
    "of_model",
    "pad",
    "plot_epochs",
    "plot_losses",
    "plot_runs",
    "read_checkpoint",
    "read_image",
    "read_metrics",
    "read_pairs",
    "read_texts",
    "split_pairs",
    "translation_collate",
    "translation_scores",
    "warmup_cosine",
    "warmup_inverse_square_root",
    "write_checkpoint",
    "write_pairs",
]
