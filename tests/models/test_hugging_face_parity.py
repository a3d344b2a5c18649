"""Our models give the logits of Hugging Face's, weight for weight, on random small configs and padded batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pytransformer import models
from pytransformer.testing.models import assert_same_logits

VOCABULARY, PAD = 61, 0


@dataclass(frozen=True)
class Case:
    ours: str
    theirs: str
    config: str
    settings: dict[str, Any]
    kind: str = "encoder"

    def pair(self, hugging_face: Any) -> tuple[Any, Any]:
        """Their model in eval mode with weights large enough that attention matters, and ours made from it."""
        torch.manual_seed(5)
        config = getattr(hugging_face, self.config)(**self.settings)
        theirs = getattr(hugging_face, self.theirs)._from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for p in theirs.parameters():
                if p.requires_grad:
                    p.mul_(3.0) if p.dim() > 1 and "t5" not in type(theirs).__name__.lower() else p.add_(
                        0.1 * torch.randn_like(p)
                    )
        return theirs, getattr(models, self.ours).from_hf(theirs)


CASES = {
    "gpt2": Case("GPT", "GPT2LMHeadModel", "GPT2Config", dict(
        vocab_size=VOCABULARY, n_positions=40, n_embd=24, n_layer=2, n_head=3, n_inner=40, pad_token_id=PAD, bos_token_id=1,
        eos_token_id=2), "decoder"),
    "gpt2-untied": Case("GPT", "GPT2LMHeadModel", "GPT2Config", dict(
        vocab_size=VOCABULARY, n_positions=40, n_embd=32, n_layer=1, n_head=4, activation_function="relu",
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2), "decoder"),
    "marian": Case("Transformer", "MarianMTModel", "MarianConfig", dict(
        vocab_size=VOCABULARY, decoder_vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40,
        max_position_embeddings=40, pad_token_id=PAD, decoder_start_token_id=PAD, bos_token_id=1, eos_token_id=2,
        forced_eos_token_id=None, scale_embedding=True, activation_function="swish"), "seq2seq"),
    "marian-two-vocabularies": Case("Transformer", "MarianMTModel", "MarianConfig", dict(
        vocab_size=VOCABULARY, decoder_vocab_size=53, d_model=24, encoder_layers=1, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=40, decoder_ffn_dim=40,
        max_position_embeddings=40, pad_token_id=PAD, decoder_start_token_id=PAD, bos_token_id=1, eos_token_id=2,
        forced_eos_token_id=None, activation_function="gelu", share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False), "seq2seq"),
}  # fmt: skip


def inputs_of(kind: str, padding: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    if kind == "image":
        return {"pixel_values": torch.randn(3, 3, 24, 24, generator=generator)}

    def text(length: int, padded: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(3, 53, (3, length), generator=generator)
        mask = torch.ones_like(ids)
        for row, n in enumerate(padded if padding != "none" else ()):
            mask[row, length - n :] = 0
        if padding == "left":
            mask = mask.flip(1)
        return ids.masked_fill(mask == 0, PAD), mask

    ids, mask = text(11, (0, 4, 7))
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind == "encoder":
        inputs["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=generator)
    if kind == "seq2seq":
        inputs["decoder_input_ids"], inputs["decoder_attention_mask"] = text(6, (0, 2, 3))
    return inputs


def real(inputs: dict[str, torch.Tensor]) -> Any:
    """Which positions of the logits are not padding."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return slice(None) if mask is None else mask.bool()


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", CASES)
def test_logits(hugging_face: Any, no_grad: None, name: str, padding: str) -> None:
    case = CASES[name]
    if case.kind == "image" and padding != "none":
        return
    theirs, ours = case.pair(hugging_face)
    inputs = inputs_of(case.kind, padding)
    chosen = real(inputs)
    a, b = ours(**inputs).logits, theirs(**inputs).logits
    if a.dim() < 3:
        chosen = slice(None)
    assert_same_logits(a[chosen], b[chosen])


@pytest.mark.parametrize("name", CASES)
def test_a_folder_of_hugging_face_loads(hugging_face: Any, no_grad: None, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    theirs, ours = case.pair(hugging_face)
    theirs.save_pretrained(tmp_path)
    loaded = getattr(models, case.ours).load_hf(tmp_path)
    inputs = inputs_of(case.kind, "none")
    assert not loaded.training
    assert loaded.config == ours.config
    assert torch.equal(loaded(**inputs).logits, ours(**inputs).logits)


@pytest.mark.parametrize("name", CASES)
def test_parameter_counts(hugging_face: Any, name: str) -> None:
    case = CASES[name]
    theirs, ours = case.pair(hugging_face)
    trained = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    extra = sum(b.numel() for n, b in theirs.named_buffers() if n == "final_logits_bias")  # Marian never trains it
    assert ours.num_parameters() == trained + extra


@pytest.mark.parametrize("name", CASES)
def test_loss(hugging_face: Any, no_grad: None, name: str) -> None:
    case = CASES[name]
    theirs, ours = case.pair(hugging_face)
    inputs = inputs_of(case.kind, "right")
    labels = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    labels = torch.tensor([1, 0, 1]) if labels is None else labels.masked_fill(labels == PAD, -100)
    torch.testing.assert_close(ours(**inputs, labels=labels).loss, theirs(**inputs, labels=labels).loss, rtol=1e-5, atol=1e-5)
