# SPDX-License-Identifier: Apache-2.0
"""Tiny Hugging Face models with random weights from configs, without downloads.

Building needs transformers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from pytransformer.testing.bounds import AS_EXACT as AS_EXACT
from pytransformer.testing.bounds import MANY as MANY
from pytransformer.testing.bounds import conditioned_limit as conditioned_limit
from pytransformer.testing.bounds import model_distance_limit as model_distance_limit

from .models import random_sum

VOCABULARY, PAD = 61, 0


@dataclass(frozen=True)
class Family:
    """A Hugging Face model class, its tiny config, and the form of its inputs."""

    model: str
    config: str
    settings: dict[str, Any]
    kind: str  # "encoder" | "decoder" | "seq2seq" | "image" | "audio"
    attentions: int = 2  # calls of the attention interface in one forward pass
    # Factor on initial weights, which are too small for scores to affect attention.
    gain: float = 3.0

    def build(self, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
        """Return the model in eval mode with the same weights each time."""
        import transformers

        config = copy.deepcopy(getattr(transformers, self.config)(**self.settings))
        torch.manual_seed(7)
        model = getattr(transformers, self.model)._from_config(
            config, attn_implementation=implementation
        )
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(self.gain) if p.dim() > 1 else p.add_(0.1 * torch.randn_like(p))
        return model.to(dtype).eval()


def _decoder(**more: Any) -> dict[str, Any]:
    return dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PAD, bos_token_id=1,
        eos_token_id=None, **more,
    )  # fmt: skip


_T5 = dict(
    vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20, pad_token_id=PAD, decoder_start_token_id=PAD,
    eos_token_id=None, dropout_rate=0.1,
)  # fmt: skip

FAMILIES = {
    "bert": Family("BertForMaskedLM", "BertConfig", dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=PAD), "encoder"),
    "bert-decoder": Family("BertLMHeadModel", "BertConfig", dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=PAD, is_decoder=True, bos_token_id=1,
        eos_token_id=None), "decoder"),
    "roberta": Family("RobertaForMaskedLM", "RobertaConfig", dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64, type_vocab_size=1, pad_token_id=PAD), "encoder"),
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", dict(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, pad_token_id=PAD,
        bos_token_id=1,
        eos_token_id=None), "decoder"),
    "llama": Family("LlamaForCausalLM", "LlamaConfig", _decoder(), "decoder"),
    "mistral": Family("MistralForCausalLM", "MistralConfig", _decoder(sliding_window=5, head_dim=8),
        "decoder"),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", _decoder(
        sliding_window=5, head_dim=8, attn_logit_softcapping=3.0, query_pre_attn_scalar=8),
        "decoder"),
    "t5": Family("T5ForConditionalGeneration", "T5Config", _T5, "seq2seq", attentions=6, gain=1.0),
    "t5-gated": Family("T5ForConditionalGeneration", "T5Config", dict(
        _T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False), "seq2seq", attentions=6,
        gain=1.0),
    "bart": Family("BartForConditionalGeneration", "BartConfig", dict(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=64, pad_token_id=PAD,
        bos_token_id=1, eos_token_id=2, forced_eos_token_id=None, decoder_start_token_id=2),
        "seq2seq", attentions=6),
    "marian": Family("MarianMTModel", "MarianConfig", dict(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=64, pad_token_id=PAD,
        bos_token_id=1, eos_token_id=2, forced_eos_token_id=None, decoder_start_token_id=2),
        "seq2seq", attentions=6),
    "whisper": Family("WhisperForConditionalGeneration", "WhisperConfig", dict(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32, pad_token_id=PAD, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None), "audio", attentions=6),
    "vit": Family("ViTForImageClassification", "ViTConfig", dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        image_size=24, patch_size=8,
        num_labels=5), "image"),
    "deit": Family("DeiTForImageClassification", "DeiTConfig", dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        image_size=24, patch_size=8,
        num_labels=5), "image"),
    "clip": Family("CLIPForImageClassification", "CLIPConfig", dict(
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, image_size=24,
                           patch_size=8, hidden_act="gelu"), num_labels=5), "image"),
}  # fmt: skip


def inputs_of(
    family: Family, padding: str, length: int = 11, batch: int = 3
) -> dict[str, torch.Tensor]:
    """Return random inputs; ``padding`` is "left", "right" or "none"."""
    generator = torch.Generator().manual_seed(3)
    if family.kind == "image":
        return {"pixel_values": torch.randn(batch, 3, 24, 24, generator=generator)}
    if family.kind == "audio":
        tokens = torch.randint(3, VOCABULARY, (batch, 6), generator=generator)
        return {
            "input_features": torch.randn(batch, 8, 40, generator=generator),
            "decoder_input_ids": tokens,
        }
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding != "none":
        for row in range(batch):
            mask[row, length - (0, 4, 7)[row % 3] :] = 0
        if padding == "left":
            mask = mask.flip(1)
        ids = ids.masked_fill(mask == 0, PAD)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family.kind == "seq2seq":
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, 6), generator=generator)
        inputs["decoder_attention_mask"] = torch.ones(batch, 6, dtype=torch.long)
        if padding != "none":
            inputs["decoder_attention_mask"][1, :2] = 0
            if padding == "right":
                inputs["decoder_attention_mask"][1] = inputs["decoder_attention_mask"][1].flip(0)
    return inputs


def real_tokens(family: Family, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mask of output positions that are not padding."""
    if family.kind == "image":
        return torch.ones(inputs["pixel_values"].shape[0], dtype=torch.bool)
    if family.kind == "audio":
        return torch.ones_like(inputs["decoder_input_ids"], dtype=torch.bool)
    return inputs["decoder_attention_mask" if family.kind == "seq2seq" else "attention_mask"].bool()


def run(
    model: Any, family: Family, inputs: dict[str, torch.Tensor], real: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logits of real tokens, and the gradients of a loss on these tokens."""
    model.zero_grad()
    logits = model(**inputs).logits[real_tokens(family, inputs) if real is None else real]
    random_sum(logits).backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the relative 2-norm of the difference."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def flat(grads: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return all gradients as one vector."""
    return torch.cat([g.flatten() for _, g in sorted(grads.items())])
