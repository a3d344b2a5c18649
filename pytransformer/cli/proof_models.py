# SPDX-License-Identifier: Apache-2.0
"""The models of `pytransformer drop-in` and `demo`: real architectures, random weights.

The batch is padded text from the sentences beside this file: one sentence per row, or sentences
joined to rows of up to 512 tokens.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import pytransformer as pt

PAD, START, MASKED, FIRST_WORD = 0, 1, 2, 3
IGNORED = -100
CONVERTED = "pytransformer, converted"  # the variant with fused norms and networks as well
WIDTH, HIDDEN = 512, 2048  # torch's encoder
SENTENCES = Path(__file__).with_name("sentences.txt")
LONG = 512  # tokens of the longest row in a long batch
SUFFIX = f"-{LONG}"


@dataclass(frozen=True)
class Subject:
    """One model and its variants.

    ``select(variant)`` runs the model as that variant inside a with block. The first variant is the
    baseline and the last is ours. ``call()`` runs the model once and returns the outputs at real
    tokens and the loss.
    """

    title: str
    batch: str
    model: torch.nn.Module
    variants: tuple[str, ...]
    select: Callable[[str], AbstractContextManager[None]]
    call: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    attentions: tuple[str, ...]  # modules that call attention, in no particular order

    def trained(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the outputs at real tokens and the gradient of every parameter."""
        outputs, loss = self.call()
        loss.backward()
        grads = {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return outputs.detach(), grads


@dataclass(frozen=True)
class Text:
    """The sentences as word ids, (B, L), and the mask of real tokens."""

    ids: torch.Tensor
    real: torch.Tensor
    words: int

    def __str__(self) -> str:
        hidden = 1 - self.real.float().mean().item()
        return f"{len(self.ids)} x {self.ids.shape[1]} tokens, {hidden:.0%} padding"


def read_text(long: bool = False) -> Text:
    """Return every fourth sentence, including the longest, or two rows of joined sentences.

    The vocabulary covers the whole file.
    """
    lines = [
        re.findall(r"\w+|[^\w\s]", line.lower())
        for line in SENTENCES.read_text(encoding="utf-8").splitlines()
    ]
    numbers = {
        word: n for n, word in enumerate(sorted({w for line in lines for w in line}), FIRST_WORD)
    }
    rows = [torch.tensor([numbers[w] for w in line]) for line in lines[2::4]]
    if long:
        everything = torch.cat([torch.tensor([numbers[w] for w in line]) for line in lines])
        rows = [everything.repeat(2)[start:end] for start, end in ((0, LONG), (LONG // 2, LONG))]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    return Text(ids, ids != PAD, FIRST_WORD + len(numbers))


def bert(text: Text) -> Subject:
    """Build two of BERT-base's twelve layers, trained to fill in 15 % of the words."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=text.words, num_hidden_layers=2, max_position_embeddings=LONG, pad_token_id=PAD
    )
    model = BertForMaskedLM._from_config(config, attn_implementation="eager")
    chosen = (
        torch.rand(text.ids.shape, generator=torch.Generator().manual_seed(0)) < 0.15
    ) & text.real
    inputs = {"input_ids": text.ids.masked_fill(chosen, MASKED), "attention_mask": text.real.long()}
    labels = text.ids.masked_fill(~chosen, IGNORED)
    return _hugging_face(
        "BERT-base, 2 of 12 layers", text, model, inputs, labels, text.real, layers=2
    )


def t5(text: Text) -> Subject:
    """Build T5 v1.1 small with 2 of its 8 layers; the task is the next sentence."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=text.words, d_model=512, d_kv=64, d_ff=1024, num_layers=2, num_heads=6,
        pad_token_id=PAD,
        decoder_start_token_id=START, eos_token_id=None, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )  # fmt: skip
    model = T5ForConditionalGeneration._from_config(config, attn_implementation="eager")
    target, real = text.ids.roll(-1, 0), text.real.roll(-1, 0)
    inputs = {
        "input_ids": text.ids,
        "attention_mask": text.real.long(),
        "decoder_input_ids": torch.nn.functional.pad(target, (1, -1), value=START),
        "decoder_attention_mask": torch.nn.functional.pad(real.long(), (1, -1), value=1),
    }
    return _hugging_face(
        "T5 v1.1 small, 2 + 2 of 8 + 8 layers",
        text,
        model,
        inputs,
        target.masked_fill(~real, IGNORED),
        real,
        layers=6,
    )


def _hugging_face(
    title: str,
    text: Text,
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    labels: torch.Tensor,
    real: torch.Tensor,
    layers: int,
) -> Subject:
    @contextlib.contextmanager
    def select(variant: str) -> Iterator[None]:
        pt.integrations.transformers.switch(
            model, "pytransformer" if variant == CONVERTED else variant
        )
        with contextlib.ExitStack() as undo:
            if variant == CONVERTED:
                undo.callback(pt.integrations.convert(model).revert)
            yield

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(**inputs).logits
        return logits[real], cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED
        )

    attentions = tuple(n for n, m in model.named_modules() if hasattr(m, "is_causal"))
    assert len(attentions) == layers, (
        f"{title}: expected {layers} attention modules, found {attentions}"
    )
    return Subject(
        title,
        str(text),
        model.eval(),
        ("eager", "sdpa", "pytransformer", CONVERTED),
        select,
        call,
        attentions,
    )


class Encoder(torch.nn.Module):
    """torch.nn.TransformerEncoder over an embedding, trained to repeat words one position later."""

    def __init__(self, words: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 8, HIDDEN, activation="gelu", batch_first=True, norm_first=True
        )
        self.embedding = torch.nn.Embedding(words, WIDTH)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, words)

    def forward(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids), src_key_padding_mask=~real))


def torch_encoder(text: Text) -> Subject:
    """Build PyTorch's encoder with and without ``pt.activate()``; needs only torch."""
    model = Encoder(text.words).eval()

    @contextlib.contextmanager
    def select(variant: str) -> Iterator[None]:
        with pt.activate() if variant == "pytransformer" else contextlib.nullcontext():
            yield

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(text.ids, text.real)
        labels = text.ids.roll(1, 1).masked_fill(~text.real, IGNORED)
        return logits[text.real], cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED
        )

    attentions = tuple(
        n for n, m in model.named_modules() if isinstance(m, torch.nn.MultiheadAttention)
    )
    return Subject(
        "torch.nn.TransformerEncoder, 2 layers",
        str(text),
        model,
        ("torch", "pytransformer"),
        select,
        call,
        attentions,
    )


SUBJECTS = {"bert": bert, "t5": t5, "torch": torch_encoder}
NEEDS_TRANSFORMERS = ("bert", "t5")


def build(name: str) -> Subject:
    """Return the subject with the same random weights each time; the name may end in SUFFIX."""
    subject, long = name.removesuffix(SUFFIX), name.endswith(SUFFIX)
    if subject in NEEDS_TRANSFORMERS:
        pt.integrations.transformers.register()
    torch.manual_seed(0)
    return SUBJECTS[subject](read_text(long) if long else read_text())
