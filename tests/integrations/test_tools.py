# SPDX-License-Identifier: Apache-2.0
"""Tools of others around converted models: adapters, offloading, quantization, embedders.

Each model is compared with its plain twin in eager code, for the tool before convert, after it, and
after a call of the converted model. The extra "tools" has the libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pytransformer as pt
from support.hugging_face import distance, model_distance_limit

LIMIT = model_distance_limit(torch.float32)
ORDERS = ("tool, convert", "convert, tool", "convert, call, tool")
_WIDTHS = dict(
    vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4
)
_T5 = dict(vocab_size=97, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
_GPT2 = dict(vocab_size=97, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
_VIT = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32,
    patch_size=8,
)  # fmt: skip
# Model class, config class, settings, and the names of linear layers in attention and network.
MODELS: dict[str, tuple[str, str, dict[str, Any], list[str], list[str]]] = {
    "llama": (
        "LlamaForCausalLM", "LlamaConfig", _WIDTHS,
        ["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"],
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _WIDTHS, ["query", "value"], ["dense"]),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2, ["c_attn"], ["c_fc", "c_proj"]),
    "t5": (
        "T5ForConditionalGeneration", "T5Config", {**_T5, "decoder_start_token_id": 0},
        ["q", "v"], ["wi", "wo"],
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", _VIT, ["q_proj", "v_proj"], ["fc1", "fc2"]),
}  # fmt: skip
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", {"r": 4, "init_lora_weights": False}),
    "dora": ("LoraConfig", {"r": 4, "init_lora_weights": False, "use_dora": True}),
    "loha": ("LoHaConfig", {"r": 4, "init_weights": False}),
    "ia3": ("IA3Config", {"feedforward_modules": [], "init_ia3_weights": False}),
}
SETUPS = [
    (model, where, adapter)
    for model in MODELS
    for where in ("attention", "network")
    for adapter in ("lora", "ia3")
]
SETUPS += [("llama", "attention", "dora"), ("bert", "network", "loha")]


def build(name: str, attention: str) -> Any:
    import transformers

    model, config, settings, *_ = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**settings)
    return getattr(transformers, model)._from_config(made, attn_implementation=attention).eval()


def logits(name: str, model: nn.Module) -> torch.Tensor:
    ids = torch.arange(3, 15)[None]
    inputs = {"input_ids": ids}
    if name == "vit":
        inputs = {"pixel_values": torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)}
    if name == "t5":
        inputs["decoder_input_ids"] = ids[:, :5]
    found: torch.Tensor = model(**inputs).logits
    return found


def pair(
    name: str, order: str, tool: Callable[[nn.Module], nn.Module]
) -> tuple[nn.Module, nn.Module]:
    """Return the plain model and ours, both with the tool."""
    plain, ours = tool(build(name, "eager")), build(name, "pytransformer")
    for step in order.split(", "):
        if step == "tool":
            ours = tool(ours)
        elif step == "convert":
            report = pt.integrations.convert(ours)
            assert report.converted or report.skipped
        else:
            with torch.no_grad():
                logits(name, ours)
    return plain.eval(), ours.eval()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "where", "adapter"), SETUPS)
def test_adapters_count_forward_and_backward(
    hugging_face: Any, name: str, where: str, adapter: str, order: str
) -> None:
    peft = pytest.importorskip("peft", reason='peft is not installed (the extra "tools")')
    config, settings = ADAPTERS[adapter]
    targets = MODELS[name][3 if where == "attention" else 4]

    def adapt(model: nn.Module) -> nn.Module:
        torch.manual_seed(1)
        made = getattr(peft, config)(target_modules=targets, **settings)
        found: nn.Module = peft.get_peft_model(model, made)
        return found

    plain, ours = pair(name, order, adapt)
    expected, found = logits(name, plain), logits(name, ours)
    assert distance(found, expected) < LIMIT
    for out in (expected, found):
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    grads = {n: p.grad for n, p in ours.named_parameters() if p.requires_grad}
    trained = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert trained and all(grads[n] is not None for n in trained)
    assert all(distance(grads[n], g) < LIMIT for n, g in trained.items() if g.norm() > 1e-6)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_offloaded_weights_are_read(hugging_face: Any, name: str, order: str) -> None:
    accelerate = pytest.importorskip(
        "accelerate", reason='accelerate is not installed (the extra "tools")'
    )

    def offload(model: nn.Module) -> nn.Module:
        accelerate.cpu_offload(model, execution_device="cpu")
        return model

    plain, ours = pair(name, order, offload)
    with torch.no_grad():
        assert distance(logits(name, ours), logits(name, plain)) < LIMIT


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_quantized_weights_count(hugging_face: Any, name: str, order: str) -> None:
    quantization = pytest.importorskip(
        "torchao.quantization", reason='torchao is not installed (the extra "tools")'
    )

    def quantize(model: nn.Module) -> nn.Module:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return model

    plain, ours = pair(name, order, quantize)
    with torch.no_grad():
        assert distance(logits(name, ours), logits(name, plain)) < LIMIT


def test_sentence_transformers_encode_alike(hugging_face: Any, tmp_path: Any) -> None:
    library = pytest.importorskip(
        "sentence_transformers", reason='sentence-transformers is not installed (the extra "tools")'
    )
    import transformers
    from sentence_transformers.sentence_transformer import modules

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "black", "cats", "sleep", "red"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab_file=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**_WIDTHS, "vocab_size": len(words)})
    transformers.BertModel(config).save_pretrained(tmp_path)
    embedder = library.SentenceTransformer(
        modules=[modules.Transformer(str(tmp_path)), modules.Pooling(64)], device="cpu"
    )
    sentences = ["the black cats sleep", "red cats", "the the red black cats sleep sleep", "cats"]
    expected = embedder.encode(sentences, convert_to_tensor=True)
    model = embedder[0].auto_model
    pt.integrations.transformers.switch(model)
    pt.integrations.convert(model, kinds=("norm", "feed_forward", "attention", "block", "linear"))
    found = embedder.encode(sentences, convert_to_tensor=True)
    assert distance(found, expected) < LIMIT
