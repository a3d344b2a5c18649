"""What the tests measure the peak memory of, for :func:`pytransformer.integrations.proof_memory.peaks`. Needs transformers.

===================  ======================================================================================================
"t5 LENGTH"          a training step of a tiny T5 on one sequence: "sdpa", or "converted" with our attention
"bert checkpointed"  a training step of a converted BERT: "kept" or "checkpointed" activations
===================  ======================================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import pytransformer as pt
from pytransformer.testing.hugging_face import FAMILIES, Family

HEADS = FAMILIES["t5"].settings["num_heads"]


@dataclass(frozen=True)
class Subject:
    """A model, how a variant of it is chosen, and one training step."""

    model: nn.Module
    select: Callable[[str], Any]
    loss: Callable[[], torch.Tensor]

    def trained(self) -> None:
        self.loss().backward()


def t5(length: int) -> Subject:
    model = FAMILIES["t5"].build("sdpa")
    ids = torch.randint(3, 50, (1, length), generator=torch.Generator().manual_seed(0))

    @contextlib.contextmanager
    def select(variant: str) -> Iterator[None]:
        if variant == "converted":
            model.set_attn_implementation("pytransformer")
            pt.integrations.convert(model)
        yield

    return Subject(model, select, lambda: model(input_ids=ids, decoder_input_ids=ids).logits.float().sum())


def checkpointed_bert() -> Subject:
    """Sixteen layers, of which checkpoints keep the inputs only."""
    bert = FAMILIES["bert"]
    sizes = dict(num_hidden_layers=16, hidden_size=64, intermediate_size=256, max_position_embeddings=512)
    model = Family(bert.model, bert.config, bert.settings | sizes, bert.kind, attentions=16).build("pytransformer")
    pt.integrations.convert(model)
    ids = torch.randint(3, 50, (8, 512), generator=torch.Generator().manual_seed(0))

    @contextlib.contextmanager
    def select(variant: str) -> Iterator[None]:
        if variant == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        yield

    return Subject(model, select, lambda: model(input_ids=ids).logits.sum())


def build(name: str) -> Subject:
    """The subject of a name in the module's table."""
    pt.integrations.transformers.register()
    return checkpointed_bert() if name == "bert checkpointed" else t5(int(name.removeprefix("t5 ")))
