# SPDX-License-Identifier: Apache-2.0
"""timm and diffusers models, activated and converted, against themselves.

A missing library skips.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import pytransformer as pt
from pytransformer.ops._core.registry import trace
from support.hugging_face import distance, model_distance_limit
from support.models import random_sum
from support.sweep import libraries

LIMIT = model_distance_limit(torch.float32)


def load(name: str) -> ModuleType:
    """Import the library or skip with the reason."""
    try:
        return libraries.load(name)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{name} cannot be imported: {str(error).splitlines()[0]}")


@pytest.fixture(scope="module")
def timm() -> ModuleType:
    return load("timm")


@pytest.fixture(autouse=True)
def _strict(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")


def run(model: nn.Module, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and all gradients of a loss on it, as one vector."""
    model.zero_grad()
    out = model(*inputs)
    out = getattr(out, "sample", out)
    random_sum(out).backward()
    return out.detach(), torch.cat(
        [p.grad.flatten() for _, p in sorted(model.named_parameters()) if p.grad is not None]
    )


def vit(timm: ModuleType, **settings: Any) -> nn.Module:
    sizes = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=7)
    torch.manual_seed(3)
    model = timm.models.vision_transformer.VisionTransformer(**sizes, **settings)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@pytest.mark.parametrize(
    "settings",
    [{}, dict(qk_norm=True), dict(init_values=0.5), dict(class_token=False, global_pool="avg")],
)
def test_timm_vision_transformers_equal_their_own_code(
    timm: ModuleType, settings: dict[str, Any]
) -> None:
    images = torch.randn(3, 3, 32, 32)
    model = vit(timm, **settings).eval()
    out, grads = run(model, images)
    done = pt.integrations.convert(model)
    with pt.activate(), trace() as ran:
        ours, our_grads = run(model, images)
    assert {op for op, _ in ran} >= {
        "attention_fwd",
        "attention_bwd",
        "feed_forward_bwd",
        "add_norm_bwd",
        "layer_norm_bwd",
    }
    assert (
        sum(op == "attention_fwd" for op, _ in ran)
        == sum(op == "feed_forward_fwd" for op, _ in ran)
        == 2
    )
    assert {of for _, of, _ in done.converted} == {
        "LayerNorm",
        "Linear",
        "Mlp",
        "Block",
    } and done.skipped == []
    assert distance(ours, out) < LIMIT and distance(our_grads, grads) < LIMIT
    done.revert()
    assert torch.equal(run(model, images)[0], out)


def test_timm_dropouts_apply_in_the_same_places(timm: ModuleType) -> None:
    """Dropout with probability 1 is deterministic; each place is tested alone."""
    images = torch.randn(2, 3, 32, 32)
    theirs, ours = (
        vit(timm, drop_rate=0.5, proj_drop_rate=0.5, attn_drop_rate=0.5).train() for _ in range(2)
    )
    pt.integrations.convert(ours)
    places = [[m for m in model.modules() if isinstance(m, nn.Dropout)] for model in (theirs, ours)]
    assert len(places[0]) == len(places[1]) > 6
    for i in range(len(places[0])):
        for model in places:
            for j, dropout in enumerate(model):
                dropout.p = float(i == j)
        out, grads = run(theirs, images)
        with pt.activate():
            mine, my_grads = run(ours, images)
        if out.norm() > 0:
            assert distance(mine, out) < LIMIT and distance(my_grads, grads) < LIMIT, places[0][i]
        else:
            assert mine.norm() == 0


def test_unsupported_timm_settings_are_reported(timm: ModuleType) -> None:
    model = vit(timm, scale_mlp_norm=True)
    reasons = {of: reason for _, of, reason in pt.integrations.convert(model).skipped}
    assert "norm between its linear layers" in reasons["Mlp"]


def test_diffusers_models_equal_their_own_code(timm: ModuleType) -> None:
    """A conditional U-Net (self- and cross-attention) and a diffusion Transformer run."""
    diffusers = load("diffusers")
    torch.manual_seed(3)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(32, 64), norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=24, attention_head_dim=8,
    ).eval()  # fmt: skip
    dit = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8,
        patch_size=2,
        norm_num_groups=4, num_embeds_ada_norm=10,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for p in dit.parameters():  # its last layer starts at zero
            p.add_(0.1 * torch.randn_like(p))
    noise, steps = torch.randn(2, 4, 8, 8), torch.tensor([3, 7])
    for model, inputs in (
        (unet, (noise, steps, torch.randn(2, 5, 24))),
        (dit, (noise, steps, torch.tensor([1, 2]))),
    ):
        out, grads = run(model, *inputs)
        done = pt.integrations.convert(model)
        with pt.activate(), trace() as ran:
            ours, our_grads = run(model, *inputs)
        calls = [op for op, _ in ran if op.startswith("attention")]
        assert calls.count("attention_fwd") == calls.count("attention_bwd") >= 2
        assert done.converted
        assert distance(ours, out) < LIMIT and distance(our_grads, grads) < LIMIT
