# SPDX-License-Identifier: Apache-2.0
"""Peak memory subjects for `support.model_memory.peaks`; needs transformers.

===================  ============================================================================
"t5 LENGTH"          a training step of a tiny, converted T5 on one sequence: "ours"
"t5-sdpa LENGTH"     the same on PyTorch's attention, not converted: "theirs"
"bert checkpointed"  a training step of a converted BERT: "kept" or "checkpointed" activations
===================  ============================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import pytransformer as pt
from support.hugging_face import FAMILIES, Family

HEADS = FAMILIES["t5"].settings["num_heads"]


@dataclass(frozen=True)
class Subject:
    """A model, its variants, and one training step."""

    model: nn.Module
    select: Callable[[str], Any]
    loss: Callable[[], torch.Tensor]

    def trained(self) -> None:
        self.loss().backward()


def t5(length: int, implementation: str) -> Subject:
    model = FAMILIES["t5"].build(implementation)
    if implementation == "pytransformer":
        pt.integrations.convert(model)
    ids = torch.randint(3, 50, (1, length), generator=torch.Generator().manual_seed(0))
    return Subject(
        model,
        lambda _: contextlib.nullcontext(),
        lambda: model(input_ids=ids, decoder_input_ids=ids).logits.float().sum(),
    )


def checkpointed_bert() -> Subject:
    """Build sixteen layers; checkpoints save only their inputs."""
    bert = FAMILIES["bert"]
    sizes = dict(
        num_hidden_layers=16, hidden_size=64, intermediate_size=256, max_position_embeddings=512
    )
    model = Family(bert.model, bert.config, bert.settings | sizes, bert.kind, attentions=16).build(
        "pytransformer"
    )
    pt.integrations.convert(model)
    ids = torch.randint(3, 50, (8, 512), generator=torch.Generator().manual_seed(0))

    @contextlib.contextmanager
    def select(variant: str) -> Iterator[None]:
        if variant == "checkpointed":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        yield

    return Subject(model, select, lambda: model(input_ids=ids).logits.sum())


def build(name: str) -> Subject:
    """Build the subject of a name in the module's table."""
    pt.integrations.transformers.register()
    if name == "bert checkpointed":
        return checkpointed_bert()
    model, length = name.split()
    return t5(int(length), {"t5": "pytransformer", "t5-sdpa": "sdpa"}[model])
