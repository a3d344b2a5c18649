# SPDX-License-Identifier: Apache-2.0
"""Weights on disk: round trips, interrupted saves, and safetensors as the only format."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from pytransformer import models
from pytransformer.models import _files
from support.small_models import CONFIGS, build, inputs


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_saved_models_round_trip(name: str, tmp_path: Path):
    model = build(name).eval()
    for p in model.parameters():
        p.normal_()
    model.save(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = type(model).load(tmp_path).eval()
    assert loaded.config == model.config
    given = {k: v for k, v in inputs(name).items() if k != "span_bounds"}
    assert torch.equal(loaded(**given).logits, model(**given).logits)
    assert json.loads((tmp_path / "config.json").read_text())["model"] == name.split("-")[0]


def test_dtypes_round_trip_and_settings_may_change(tmp_path: Path):
    build("GPT").to(torch.bfloat16).save(tmp_path)
    loaded = models.GPT.load(tmp_path, dropout=0.5)
    assert loaded.embedding.weight.dtype == torch.bfloat16
    assert loaded.config.dropout == 0.5
    with pytest.raises(ValueError, match="no field depth"):
        models.GPT.load(tmp_path, depth=3)


@pytest.mark.parametrize("moment", ["writing", "moving"])
def test_interrupted_saves_leave_the_old_files(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = build("GPT"), build("GPT")
    first.save(tmp_path)
    with torch.no_grad():
        second.embedding.weight.add_(1)
    real = _files._safetensors().torch.save_file

    def half(tensors: dict[str, torch.Tensor], path: Path, **more: Any) -> None:
        real(tensors, path, **more)
        Path(path).write_bytes(Path(path).read_bytes()[:100])
        raise OSError("no space left on device")

    def refuse(*_: Any) -> None:
        raise OSError("no space left on device")

    if moment == "writing":
        monkeypatch.setattr(_files._safetensors().torch, "save_file", half)
    else:
        monkeypatch.setattr(_files.os, "replace", refuse)
    with pytest.raises(OSError, match="no space"):
        second.save(tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(models.GPT.load(tmp_path).embedding.weight, first.embedding.weight)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "weights.pt", "model.safetensors", "weights"]
)
def test_pickles_are_refused_with_a_conversion_command(name: str, tmp_path: Path):
    torch.save(build("GPT").state_dict(), tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for load in (models.GPT.load, models.GPT.load_hf):
        targets = (
            (tmp_path / name, tmp_path)
            if name != "weights" or load is models.GPT.load_hf
            else (tmp_path / name,)
        )
        for target in targets:
            with pytest.raises(
                ValueError, match=r"is a pickle.*\n.*torch\.load.*weights_only=True"
            ):
                load(target)


def test_conversion_command_converts(tmp_path: Path):
    """The test runs the command of the message."""
    model, file = build("GPT"), tmp_path / "weights.bin"
    torch.save(model.state_dict(), file)
    with pytest.raises(ValueError) as refusal:
        models.GPT.load(file)
    command = str(refusal.value).splitlines()[1].strip()
    program, option, code = shlex.split(command)
    assert (program, option) == ("python", "-c")
    exec(code)
    state, _ = _files.tensors(tmp_path / "model.safetensors")
    assert state.keys() == model.state_dict().keys()


def test_mismatched_tensors_are_named(tmp_path: Path):
    build("GPT").save(tmp_path)
    state, about = _files.read(tmp_path)

    def expect(changed: dict[str, torch.Tensor], message: str) -> None:
        _files.write(tmp_path, changed, about)
        with pytest.raises(ValueError, match=message):
            models.GPT.load(tmp_path)

    name = "decoder.blocks.0.mixing.qkv.weight"
    expect(state | {name: state[name][:3]}, rf"{name} is \(3, 16\), GPT wants \(48, 16\)")
    expect({k: v for k, v in state.items() if k != name}, f"{name} is missing")
    expect(state | {"poem": state[name].clone()}, "poem is unknown")
    model = build("GPT")
    before = {k: v.clone() for k, v in model.state().items()}
    with pytest.raises(ValueError, match=f"; and {len(before) - 8} more"):
        model.load_state({}, "nothing")
    with pytest.raises(ValueError, match="poem"):
        model.load_state(
            {k: v + 1 for k, v in before.items()} | {"poem": torch.zeros(1)}, "one too many"
        )
    assert all(torch.equal(v, before[k]) for k, v in model.state().items())


def test_other_files_are_refused(tmp_path: Path):
    build("GPT").save(tmp_path)
    with pytest.raises(ValueError, match="holds a GPT, not a BERT"):
        models.BERT.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        models.GPT.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors"):
        models.GPT.load(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        models.GPT.load_hf(tmp_path / "empty")
    (tmp_path / "model.safetensors").write_bytes(
        (tmp_path / "model.safetensors").read_bytes()[:200]
    )
    with pytest.raises(ValueError, match="not a safetensors file, or an incomplete one"):
        models.GPT.load(tmp_path)
    _files._safetensors().torch.save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="not written by pytransformer"):
        models.GPT.load(tmp_path)


def test_sharded_hugging_face_folders_load(hugging_face: Any, tmp_path: Path):
    config = hugging_face.GPT2Config(vocab_size=31, n_positions=12, n_embd=16, n_layer=3, n_head=4)
    theirs = hugging_face.GPT2LMHeadModel(config)
    theirs.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert torch.equal(models.GPT.load_hf(tmp_path).embedding.weight, theirs.transformer.wte.weight)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["x"] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="outside its folder"):
        models.GPT.load_hf(tmp_path)


def test_hugging_face_models_without_a_counterpart_are_refused(hugging_face: Any):
    small = dict(vocab_size=31, n_positions=12, n_embd=16, n_layer=1, n_head=4)
    bert = dict(
        vocab_size=31,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=24,
    )
    for model, config, message in (
        (
            "GPT2LMHeadModel",
            hugging_face.GPT2Config(**small, scale_attn_by_inverse_layer_idx=True),
            "inverse_layer_idx",
        ),
        ("GPT2LMHeadModel", hugging_face.GPT2Config(**small, embd_pdrop=0.3), "one dropout"),
        (
            "GPT2LMHeadModel",
            hugging_face.GPT2Config(**small, activation_function="tanh"),
            "'tanh' has no fused",
        ),
        (
            "GPT2ForSequenceClassification",
            hugging_face.GPT2Config(**small),
            r"no place here: score\.weight",
        ),
        ("BertForMaskedLM", hugging_face.BertConfig(**bert), "takes gpt2"),
    ):
        with pytest.raises(ValueError, match=message):
            models.GPT.from_hf(getattr(hugging_face, model)(config))
    with pytest.raises(ValueError, match="BertForMultipleChoice"):
        models.BERT.from_hf(hugging_face.BertForMultipleChoice(hugging_face.BertConfig(**bert)))
