# SPDX-License-Identifier: Apache-2.0
"""Our models give the logits of Hugging Face's on random small configs and padded batches."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pytransformer import models
from support.models import assert_same_logits

VOCABULARY, PAD = 61, 0


@dataclass(frozen=True)
class Case:
    ours: str
    theirs: str
    config: str
    settings: dict[str, Any]
    kind: str = "encoder"

    def pair(self, hugging_face: Any) -> tuple[Any, Any]:
        """Return their model in eval mode, with weights large enough for attention, and ours."""
        torch.manual_seed(5)
        config = getattr(hugging_face, self.config)(**self.settings)
        theirs = (
            getattr(hugging_face, self.theirs)
            ._from_config(config, attn_implementation="eager")
            .eval()
        )
        gain = 1.0 if self.ours == "T5" else 3.0  # T5's weights are large already
        with torch.no_grad():
            for p in theirs.parameters():
                if p.requires_grad:
                    p.mul_(gain) if p.dim() > 1 else p.add_(0.1 * torch.randn_like(p))
            if self.settings.get("tie_word_embeddings") is False and self.ours == "T5":
                theirs.lm_head.weight = torch.nn.Parameter(torch.randn_like(theirs.lm_head.weight))
        return theirs, getattr(models, self.ours).from_hf(theirs)


_BERT = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=40, pad_token_id=PAD,
)  # fmt: skip
_T5 = dict(
    vocab_size=VOCABULARY, d_model=32, d_kv=12, d_ff=40, num_layers=2, num_decoder_layers=3,
    num_heads=3,
    relative_attention_num_buckets=8, relative_attention_max_distance=12, pad_token_id=PAD,
    decoder_start_token_id=PAD,
)  # fmt: skip
_VIT = dict(
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    image_size=24,
    patch_size=8,
)

CASES = {
    "bert": Case("BERT", "BertForPreTraining", "BertConfig", _BERT),
    "bert-masked": Case("BERT", "BertForMaskedLM", "BertConfig",
        dict(_BERT, hidden_act="gelu_new", layer_norm_eps=1e-5)),
    "bert-classifier": Case("BERT", "BertForSequenceClassification", "BertConfig",
        dict(_BERT, num_labels=3), "classifier"),
    "bert-tagging": Case("BERT", "BertForTokenClassification", "BertConfig",
        dict(_BERT, num_labels=60), "encoder"),
    "bert-answer": Case("BERT", "BertForQuestionAnswering", "BertConfig", _BERT, "answer"),
    "fnet": Case("FNet", "FNetForPreTraining", "FNetConfig", dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
        max_position_embeddings=40,
        tpu_short_seq_length=40, pad_token_id=PAD), "fourier"),
    "t5": Case("T5", "T5ForConditionalGeneration", "T5Config", _T5, "seq2seq"),
    "t5-v1.1": Case("T5", "T5ForConditionalGeneration", "T5Config", dict(
        _T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False), "seq2seq"),
    "vit": Case("ViT", "ViTForImageClassification", "ViTConfig", dict(_VIT, num_labels=5), "image"),
    "vit-no-bias": Case("ViT", "ViTForImageClassification", "ViTConfig", dict(
        _VIT, qkv_bias=False, num_labels=3, hidden_dropout_prob=0.1), "image"),
    "gpt2": Case("GPT", "GPT2LMHeadModel", "GPT2Config", dict(
        vocab_size=VOCABULARY, n_positions=40, n_embd=24, n_layer=2, n_head=3, n_inner=40,
        pad_token_id=PAD, bos_token_id=1,
        eos_token_id=2), "decoder"),
    "gpt2-untied": Case("GPT", "GPT2LMHeadModel", "GPT2Config", dict(
        vocab_size=VOCABULARY, n_positions=40, n_embd=32, n_layer=1, n_head=4,
        activation_function="relu",
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2), "decoder"),
    "marian": Case("Transformer", "MarianMTModel", "MarianConfig", dict(
        vocab_size=VOCABULARY, decoder_vocab_size=VOCABULARY, d_model=32, encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_position_embeddings=40, pad_token_id=PAD, decoder_start_token_id=PAD, bos_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=None, scale_embedding=True, activation_function="swish"), "seq2seq"),
    "marian-two-vocabularies": Case("Transformer", "MarianMTModel", "MarianConfig", dict(
        vocab_size=VOCABULARY, decoder_vocab_size=53, d_model=24, encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_position_embeddings=40, pad_token_id=PAD, decoder_start_token_id=PAD, bos_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=None, activation_function="gelu",
        share_encoder_decoder_embeddings=False,
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
    inputs = {"input_ids": ids}
    if kind != "fourier":  # FNet mixes padding in; Hugging Face's takes no mask
        inputs["attention_mask"] = mask
    if kind in ("encoder", "classifier", "answer", "fourier"):
        inputs["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=generator)
    if kind == "seq2seq":
        inputs["decoder_input_ids"], inputs["decoder_attention_mask"] = text(6, (0, 2, 3))
    return inputs


def labels_of(case: Case, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if case.kind in ("image", "classifier"):
        return {"labels": torch.tensor([1, 0, 2])}
    if case.kind == "answer":  # truncation removed the second one's end
        last = int(inputs["attention_mask"][2].nonzero()[-1])
        return {"labels": torch.tensor([[1, 3], [5, 40], [last, last]])}
    ids = inputs.get("decoder_input_ids", inputs["input_ids"])
    # Padding predicts the token after left padding, so its value is undefined.
    after_padding = torch.nn.functional.pad(ids[:, :-1] == PAD, (1, 0))
    labels = {"labels": ids.masked_fill((ids == PAD) | after_padding, -100)}
    if case.theirs.endswith("ForPreTraining"):
        labels["next_sentence_label"] = torch.tensor([1, 0, 1])
    return labels


def their_labels(case: Case, labels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if case.kind != "answer":
        return labels
    return dict(zip(("start_positions", "end_positions"), labels["labels"].unbind(1)))


def their_logits(found: Any) -> torch.Tensor:
    if "start_logits" in found:
        return torch.stack([found.start_logits, found.end_logits], -1)
    return found.get("prediction_logits", found.get("logits"))


def real(inputs: dict[str, torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """Return the logits at real tokens."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return logits if mask is None or logits.dim() < 3 else logits[mask.bool()]


PADDED = [
    (name, padding)
    for name, case in CASES.items()
    for padding in (("none",) if case.kind in ("image", "fourier") else ("none", "left", "right"))
]


@pytest.mark.parametrize(("name", "padding"), PADDED)
def test_logits_and_loss_equal_hugging_face(
    hugging_face: Any, no_grad: None, name: str, padding: str
) -> None:
    case = CASES[name]
    theirs, ours = case.pair(hugging_face)
    inputs = inputs_of(case.kind, padding)
    labels = labels_of(case, inputs)
    a, b = ours(**inputs, **labels), theirs(**inputs, **their_labels(case, labels))
    assert_same_logits(real(inputs, a.logits), real(inputs, their_logits(b)))
    if "seq_relationship_logits" in b:
        assert_same_logits(a.next_sentence_logits, b.seq_relationship_logits)
    # Hugging Face lets answers start and end in padding.
    if case.kind == "answer" and padding != "none":
        hidden = inputs["attention_mask"][..., None] == 0
        assert (a.logits.masked_select(hidden) == torch.finfo(a.logits.dtype).min).all()
        assert_same_logits(
            a.loss,
            models.bert.answer_loss(
                their_logits(b).masked_fill(hidden, -torch.inf), labels["labels"]
            ),
        )
        return
    assert_same_logits(a.loss, b.loss)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["bert", "fnet", "gpt2", "marian", "t5", "t5-v1.1", "vit"])
def test_random_configs_equal_hugging_face(
    hugging_face: Any, no_grad: None, name: str, seed: int
) -> None:
    """Sizes, depths, heads, activations, eps and padding are random."""
    draw = random.Random(f"{name} {seed}")
    heads, layers = draw.choice([1, 2, 3, 5]), draw.randint(1, 4)
    names = {
        "width": (heads * draw.choice([4, 7, 16]), ("hidden_size", "n_embd", "d_model")),
        "hidden": (
            draw.randint(3, 70),
            ("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
        ),
        "heads": (
            heads,
            (
                "num_attention_heads",
                "n_head",
                "num_heads",
                "encoder_attention_heads",
                "decoder_attention_heads",
            ),
        ),
        "layers": (layers, ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")),
        "eps": (draw.choice([1e-12, 1e-5, 1e-3]), ("layer_norm_eps", "layer_norm_epsilon")),
        "activation": (
            draw.choice(["relu", "gelu", "gelu_new", "silu"]),
            ("hidden_act", "activation_function"),
        ),
        "buckets": (draw.choice([4, 8, 20]), ("relative_attention_num_buckets",)),
        "head": (draw.choice([1, 5, 16]), ("d_kv",)),
    }
    case = CASES[name]
    known = vars(getattr(hugging_face, case.config)())
    known = known.keys() | getattr(hugging_face, case.config).attribute_map.keys()
    drawn = {key: value for value, keys in names.values() for key in keys if key in known}
    if name == "marian":  # sinusoids need an even width
        drawn["d_model"] = 2 * heads * draw.choice([2, 5])
    case = dataclasses.replace(case, settings=case.settings | drawn)
    theirs, ours = case.pair(hugging_face)
    inputs = inputs_of(
        case.kind,
        (
            draw.choice(["none", "left", "right"])
            if case.kind in ("encoder", "decoder", "seq2seq")
            else "none"
        ),
    )
    b = theirs(**inputs)
    assert_same_logits(real(inputs, ours(**inputs).logits), real(inputs, their_logits(b)))


@pytest.mark.parametrize("name", CASES)
def test_hugging_face_folders_load(
    hugging_face: Any, no_grad: None, name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    theirs, ours = case.pair(hugging_face)
    theirs.save_pretrained(tmp_path)
    loaded = getattr(models, case.ours).load_hf(tmp_path)
    inputs = inputs_of(case.kind, "none")
    assert not loaded.training
    assert loaded.config == ours.config
    assert torch.equal(loaded(**inputs).logits, ours(**inputs).logits)


@pytest.mark.parametrize("name", CASES)
def test_parameter_counts_equal_hugging_face(hugging_face: Any, name: str) -> None:
    case = CASES[name]
    theirs, ours = case.pair(hugging_face)
    trained = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    extra = sum(
        b.numel() for n, b in theirs.named_buffers() if n == "final_logits_bias"
    )  # Marian never trains it
    assert ours.num_parameters() == trained + extra
