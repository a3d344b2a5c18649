# SPDX-License-Identifier: Apache-2.0
"""ViT with rectangular images, and with other sizes than in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytransformer import viz
from pytransformer.cli import OK, USAGE, main
from pytransformer.models import Mixer, MixerConfig, ViT, ViTConfig
from support.models import assert_same_logits

SMALL = {
    "patch_size": 4,
    "channels": 1,
    "d_model": 16,
    "num_layers": 2,
    "num_heads": 2,
    "hidden": 24,
    "num_labels": 3,
}


def vit(image_size: int | tuple[int, int]) -> ViT:
    torch.manual_seed(3)
    model = ViT(ViTConfig(image_size=image_size, **SMALL)).eval()
    torch.nn.init.normal_(model.positions.weight)
    return model


def test_rectangles_equal_transposed_images(tmp_path: Path) -> None:
    model, images = vit((16, 32)), torch.randn(2, 1, 16, 32)
    out = model(images)
    assert out.last_hidden_state.shape == (2, 1 + 16 * 32 // 4**2, 16)
    model.save(tmp_path)
    assert torch.equal(ViT.load(tmp_path).eval()(images).logits, out.logits)
    # The transposed image, with transposed positions and patch pixels, is the same model.
    turned = vit((32, 16))
    state = model.state()
    state["positions.weight"] = torch.cat(
        [
            state["positions.weight"][:1],
            state["positions.weight"][1:].view(4, 8, 16).transpose(0, 1).flatten(0, 1),
        ]
    )
    state["patches.projection.weight"] = (
        state["patches.projection.weight"].view(16, 4, 4).transpose(1, 2).flatten(1)
    )
    turned.load_state(state, "the turned one")
    assert_same_logits(turned(images.transpose(2, 3)).logits, out.logits)
    mixer = Mixer(
        MixerConfig(
            image_size=(8, 16),
            patch_size=4,
            channels=1,
            d_model=16,
            num_layers=1,
            token_hidden=6,
            hidden=8,
        )
    )
    assert mixer(torch.randn(2, 1, 8, 16)).last_hidden_state.shape == (2, 8, 16)


@pytest.mark.parametrize("size", [(16, 16), (32, 48), (8, 24)])
def test_interpolated_positions_equal_transformers(size: tuple[int, int]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=24,
        patch_size=4,
        num_channels=1,
    )
    torch.manual_seed(5)
    theirs = transformers.ViTForImageClassification(config).eval()
    torch.nn.init.normal_(theirs.vit.embeddings.position_embeddings)
    ours = ViT.from_hf(theirs)
    images = torch.randn(2, 1, *size)
    found = ours.resized(size)
    assert found.config.image_size == size and not found.training
    assert_same_logits(found(images).logits, theirs(images, interpolate_pos_encoding=True).logits)
    assert torch.equal(
        ours.resized(24)(torch.ones(1, 1, 24, 24)).logits, ours(torch.ones(1, 1, 24, 24)).logits
    )


def test_mean_distances_are_two_dimensional() -> None:
    model = vit((8, 12))  # 2 x 3 patches
    images = torch.randn(2, 1, 8, 12)
    seen = viz.attention_of(model, {"pixel_values": images})
    far = seen.patch_distances(model)
    places = [(4 * r, 4 * c) for r in range(2) for c in range(3)]
    for layer in range(2):
        for head in range(2):
            total = 0.0
            for b in range(2):
                weights = seen.weights([layer], [head], batch=b)[0, 0, 1:, 1:]
                weights = weights / weights.sum(-1, keepdim=True)
                for i, (r, c) in enumerate(places):
                    total += sum(
                        weights[i, j].item() * ((r - y) ** 2 + (c - x) ** 2) ** 0.5
                        for j, (y, x) in enumerate(places)
                    )
            assert far[layer, head].item() == pytest.approx(total / (2 * len(places)), rel=1e-5)


@pytest.mark.parametrize("kind", ["distance", "gallery", "heat", "lines", "positions"])
def test_attention_map_plots_an_image(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    vit((8, 12)).save(tmp_path / "model")
    image.new("RGB", (30, 20), (200, 10, 60)).save(tmp_path / "picture.png")
    out = tmp_path / "map.png"
    picture = [] if kind == "positions" else [str(tmp_path / "picture.png")]
    assert (
        main(
            ["attention-map", str(tmp_path / "model"), *picture, "--kind", kind, "--out", str(out)]
        )
        == OK
    )
    assert out.stat().st_size > 3000
    if kind == "distance":
        assert main(["attention-map", str(tmp_path / "model"), "--kind", kind]) == USAGE
        assert "needs an image for the model to look at" in capsys.readouterr().err
        assert (
            main(
                [
                    "attention-map",
                    str(tmp_path / "model"),
                    str(out.with_suffix(".txt")),
                    "--kind",
                    kind,
                ]
            )
            == USAGE
        )
        assert "cannot be read as an image" in capsys.readouterr().err
