# SPDX-License-Identifier: Apache-2.0
"""Gradients and training curves equal torch.nn.Transformer and Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytransformer import models
from support.eager_twin import EagerTransformer
from support.models import CURVE, assert_same_gradient, assert_same_logits
from support.small_models import build, inputs

pytestmark = pytest.mark.filterwarnings(
    "ignore:enable_nested_tensor"
)  # PyTorch about its own pre-norm encoder

LAYOUTS = {
    "post": {},
    "post-last-norm": dict(final_norm=True, activation="gelu"),
    "post-wide-heads": dict(
        head_dim=8, value_dim=6, tied=False, logits_bias=True, positions="sinusoidal-halves"
    ),
    "pre": dict(norm="pre", tied=False, logits_bias=True, target_vocab_size=29),
}


def _pair(
    layout: str, dtype: torch.dtype = torch.float32
) -> tuple[models.Transformer, EagerTransformer]:
    ours = build("Transformer", dropout=0.0, label_smoothing=0.1, **LAYOUTS[layout]).to(dtype)
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return ours, EagerTransformer(ours)


def _batch(padding: str) -> dict[str, torch.Tensor]:
    given = inputs("Transformer")
    if padding == "left":
        given["attention_mask"] = given["attention_mask"].flip(1)
    return given | {"decoder_input_ids": torch.randint(3, 29, (3, 7))}


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_gradients_equal_torch_nn_transformer(layout: str, padding: str):
    """Gradients are float64.

    In float32 rounding may move a hidden unit across ReLU's kink (4e-9 once) on one side only.
    """
    ours, theirs = _pair(layout)
    given = _batch(padding)
    labels = given.pop("labels")
    for dtype in (torch.float32, torch.float64):
        out = ours.to(dtype)(**given, labels=labels)
        logits = theirs.to(dtype)(**given)
        assert_same_logits(out.logits, logits)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)
        assert_same_logits(out.loss, loss)
    assert ours.num_parameters() == sum(p.numel() for p in theirs.parameters())
    out.loss.backward()
    loss.backward()
    # Gradients by name, translated like the weights.
    with torch.no_grad():
        for p in ours.parameters():
            p.copy_(p.grad)
    theirs_grad = {n: p.grad for n, p in theirs.named_parameters()}
    for name, grad in theirs.translated(ours).items():
        if name in theirs_grad:
            assert_same_gradient(grad, theirs_grad[name])


FAMILIES = {
    "t5": ("T5", "T5ForConditionalGeneration", "T5Config", dict(
        vocab_size=31, d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=9, pad_token_id=0, decoder_start_token_id=0,
        dropout_rate=0.0)),
    "gpt2": ("GPT", "GPT2LMHeadModel", "GPT2Config", dict(
        vocab_size=31, n_positions=12, n_embd=16, n_layer=2, n_head=4, bos_token_id=1,
        eos_token_id=2, embd_pdrop=0.0,
        resid_pdrop=0.0, attn_pdrop=0.0)),
    "bert": ("BERT", "BertForMaskedLM", "BertConfig", dict(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=12, pad_token_id=0, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0)),
}  # fmt: skip


def _hugging_face_pair(
    hugging_face: Any, name: str, dtype: torch.dtype
) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    ours, model, config, settings = FAMILIES[name]
    torch.manual_seed(3)
    config = getattr(hugging_face, config)(**settings)
    theirs = (
        getattr(hugging_face, model)
        ._from_config(config, attn_implementation="eager")
        .to(dtype)
        .train()
    )
    given = inputs({"t5": "T5", "gpt2": "GPT", "bert": "GPT"}[name])
    given["labels"] = given["labels"].masked_fill(torch.rand(given["labels"].shape) < 0.3, -100)
    return getattr(models, ours).from_hf(theirs), theirs, given


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_hugging_face(hugging_face: Any, name: str):
    """This covers every parameter, T5's relative-position tables among them."""
    ours, theirs, given = _hugging_face_pair(hugging_face, name, torch.float32)
    ours(**given).loss.backward()
    theirs(**given).loss.backward()
    conversion = ours.CONVERSIONS[theirs.config.model_type]
    expected = conversion.translate(ours.state(), {n: p.grad for n, p in theirs.named_parameters()})
    mine = dict(ours.named_parameters())
    for parameter, grad in expected.items():
        assert_same_gradient(mine[parameter].grad, grad)
    if name == "t5":
        assert {"encoder_bias.table", "decoder_bias.table"} <= expected.keys()


def _curve(
    model: torch.nn.Module, loss: Callable[[], torch.Tensor], steps: int = 50
) -> torch.Tensor:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        values.append(value.detach())
    return torch.stack(values)


def _assert_same_curve(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs[-1] < 0.7 * theirs[0]  # the loss falls; equal curves prove little otherwise
    worst = ((ours - theirs) / theirs).abs().max().item()
    assert worst <= CURVE, f"losses differ by {worst:.1e} of themselves, allowed {CURVE:.0e}"


@pytest.mark.parametrize("layout", ["post", "pre"])
def test_training_curves_equal_torch_nn_transformer(layout: str):
    ours, theirs = _pair(layout, torch.float64)
    given = _batch("right")
    labels = given.pop("labels")
    curve = _curve(ours, lambda: ours(**given, labels=labels).loss)
    twin = _curve(
        theirs,
        lambda: F.cross_entropy(
            theirs(**given).flatten(0, 1), labels.flatten(), label_smoothing=0.1
        ),
    )
    _assert_same_curve(curve, twin)


@pytest.mark.parametrize("name", ["bert", "gpt2"])  # T5's modules always compute in float32
def test_training_curves_equal_hugging_face(hugging_face: Any, name: str):
    ours, theirs, given = _hugging_face_pair(hugging_face, name, torch.float64)
    labels = given.pop("labels")
    following = labels if name == "bert" else F.pad(labels[:, 1:], (0, 1), value=-100)

    def their_loss() -> torch.Tensor:  # their loss casts logits to float32
        return F.cross_entropy(theirs(**given).logits.flatten(0, 1), following.flatten())

    _assert_same_curve(
        _curve(ours, lambda: ours(**given, labels=labels).loss), _curve(theirs, their_loss)
    )


@pytest.mark.unpoisoned
@torch.no_grad()
def test_decoders_compile_to_one_graph():
    """No part of a decoder breaks the graph; the compiler's eager backend suffices for this."""
    model, ids = build("GPT").eval(), torch.randint(3, 29, (2, 8))
    mask = torch.ones_like(ids)
    compiled = torch.compile(lambda: model(ids, mask).logits, fullgraph=True, backend="eager")
    assert_same_logits(compiled(), model(ids, mask).logits)
