# SPDX-License-Identifier: Apache-2.0
"""`pytransformer attention-map` supports pytransformer.models and other Hugging Face models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pytransformer import viz
from pytransformer.cli import OK, USAGE, main
from pytransformer.cli.attention_of_hf import attention_of, load
from pytransformer.models import Conformer, Mixer, ViT
from support.models import assert_same_elements, assert_same_logits
from support.small_models import CONFIGS, build

pytest.importorskip("matplotlib", reason="needs matplotlib (the extra viz)")
WORDS = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "saw", "a", "dog"]


@pytest.fixture
def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers (the extra models)")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


@pytest.fixture
def picture(tmp_path: Path) -> str:
    image = pytest.importorskip("PIL.Image", reason="needs Pillow (the extra viz)")
    image.new("L", (40, 9), 200).save(tmp_path / "picture.png")
    return str(tmp_path / "picture.png")


@pytest.fixture
def families() -> Any:
    transformers = pytest.importorskip("transformers", reason="needs transformers (the extra hf)")
    transformers.utils.logging.set_verbosity_error()
    from support import hugging_face

    return hugging_face


def draw(folder: Path, what: str, *options: str) -> tuple[int, str]:
    out = folder / "map.svg"
    out.unlink(missing_ok=True)
    code = main(["attention-map", str(folder), what, "--out", str(out), *options])
    return code, out.read_text() if out.exists() else ""


@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_can_be_plotted(
    name: str, tokenizer: Any, picture: str, tmp_path: Path, capsys: Any
) -> None:
    model, folder = build(name).eval(), tmp_path / "model"
    model.save(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    looks = isinstance(model, (ViT, Mixer, Conformer))
    what = picture if looks else "the cat saw a dog"
    code, drawn = draw(folder, what, "--kind", "gallery")
    if name == "FNet" or isinstance(model, Mixer):
        assert (
            code == USAGE
            and "mixes tokens without attention: there are no weights to plot"
            in capsys.readouterr().err
        )
        return
    assert code == OK and "<!-- head 0 -->" in drawn and "<!-- layer 0 -->" in drawn
    for kind in ("heat", "lines", "distance"):
        options = ["--target", "a dog"] if name.startswith(("T5", "Transformer")) else []
        code, drawn = draw(folder, what, "--kind", kind, *options)
        assert code == OK and "attention" in drawn
        if kind == "heat" and not looks:
            assert "<!-- saw -->" in drawn
    assert main(["attention-map", str(folder)]) == USAGE
    assert (
        "an image for the model" if looks else "a text for the model"
    ) in capsys.readouterr().err


def test_strip_columns_are_conformer_frames(picture: str, tmp_path: Path) -> None:
    """40 x 9 pixels with 9 features are 40 columns, which the subsampling reduces to 9 frames."""
    build("Conformer-ctc").save(tmp_path / "model")
    code, drawn = draw(tmp_path / "model", picture, "--kind", "heat")
    assert code == OK and drawn.count("<!-- 8 -->") == 2 and drawn.count("<!-- 9 -->") == 0


HUGGING_FACE = {
    "roberta": "encoder",
    "llama": "decoder",
    "mistral": "decoder",
    "bart": "cross",
    "deit": "encoder",
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_weights_equal_eager(
    families: Any, name: str, tokenizer: Any, picture: str, tmp_path: Path, capsys: Any
) -> None:
    """The command plots them."""
    family, folder = families.FAMILIES[name], tmp_path / "model"
    whole = family.build("eager")
    whole.base_model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    inputs = {k: v[:1] for k, v in families.inputs_of(family, "none").items()}
    with torch.no_grad():
        theirs = whole.base_model.eval()(**inputs, output_attentions=True)
    seen = attention_of(load(folder), inputs)
    assert seen.which == HUGGING_FACE[name]
    expected = torch.stack(theirs["cross_attentions" if name == "bart" else "attentions"])[:, 0]
    assert_same_elements(seen.weights(), expected)
    assert_same_elements(seen.weights([1], [1, 0], [2, -1]), expected[1:2, [1, 0]][:, :, [2, -1]])
    i, j = (torch.arange(n) for n in expected.shape[2:])
    far = (expected * (j - i[:, None]).abs()).sum(-1).mean(-1)
    assert_same_logits(seen.distances(), far)
    for kind in ("gallery", "heat", "distance"):
        code, _ = draw(folder, picture if family.kind == "image" else "the cat saw", "--kind", kind)
        assert code == OK, capsys.readouterr().err
    if name != "bart":
        assert (
            draw(folder, picture if family.kind == "image" else "the cat", "--which", "cross")[0]
            == USAGE
        )


def test_missing_layers_and_heads_are_named(families: Any, tmp_path: Path) -> None:
    families.FAMILIES["llama"].build("eager").base_model.save_pretrained(tmp_path / "model")
    inputs = {k: v[:1] for k, v in families.inputs_of(families.FAMILIES["llama"], "none").items()}
    with pytest.raises(ValueError, match="LlamaModel has no cross attention; it has decoder"):
        attention_of(load(tmp_path / "model"), inputs, "cross")
    seen = attention_of(load(tmp_path / "model"), inputs)
    with pytest.raises(ValueError, match="heads must be between -4 and 3, got 4"):
        seen.weights(heads=[4])
    with pytest.raises(ValueError, match="the distance only, got entropy"):
        seen.taps[0].summary("entropy")
    assert viz.Returned(torch.eye(3)[None, None]).summary("distance")["distance"].sum() == 0
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="model"):
        load(tmp_path / "model")
