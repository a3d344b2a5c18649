# SPDX-License-Identifier: Apache-2.0
"""torch.nn's attention modules with every mask, activated, converted and both, against PyTorch."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pytransformer as pt
from pytransformer.ops._core.registry import trace
from support.hugging_face import distance, model_distance_limit

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:enable_nested_tensor is True",
        "ignore:Support for mismatched",
        "ignore:The PyTorch API of nested",
    ),
]

LIMIT = model_distance_limit(torch.float32)
B, L, M, E, H = 2, 7, 5, 16, 4
SIZES: dict[str, Any] = dict(d_model=E, nhead=H, dim_feedforward=24, dropout=0.0)


def layers(kind: str, **settings: Any) -> nn.Module:
    if kind == "MultiheadAttention":
        return nn.MultiheadAttention(E, H, batch_first=settings["batch_first"])
    if kind == "Transformer":
        return nn.Transformer(E, H, 1, 1, 24, 0.0, **settings)
    layer = (nn.TransformerEncoderLayer if "Encoder" in kind else nn.TransformerDecoderLayer)(
        **SIZES, **settings
    )
    if kind.endswith("Layer"):
        return layer
    return nn.TransformerEncoder(layer, 2) if "Encoder" in kind else nn.TransformerDecoder(layer, 2)


KINDS = (
    "MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer",
    "TransformerEncoder", "TransformerDecoder",
    "Transformer",
)  # fmt: skip


def attention_masks(queries: int, keys: int) -> dict[str, torch.Tensor | None]:
    """Return masks that each keep every query's first key visible."""
    hidden = torch.rand(B * H, queries, keys, generator=torch.Generator().manual_seed(7)) < 0.4
    hidden[:, :, 0] = False
    later = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    return {
        "none": None, "causal": later,
        "causal, -inf": torch.zeros(queries, keys).masked_fill(later, -torch.inf),
        "bool": hidden[0], "bool by head": hidden,
        "additive": torch.linspace(-2, 2, queries * keys).view(queries, keys),
    }  # fmt: skip


def paddings(length: int) -> dict[str, torch.Tensor | None]:
    hidden = torch.arange(length) >= torch.tensor([length, length - 3])[:, None]
    return {
        "none": None,
        "bool": hidden,
        "-inf": torch.zeros(B, length).masked_fill(hidden, -torch.inf),
    }


def calls(kind: str) -> Iterator[tuple[str, tuple[int, ...], dict[str, Any]]]:
    """Yield (name, lengths of the inputs, keywords) of each combination of masks."""
    names = (
        ("attn_mask", "key_padding_mask")
        if kind.startswith("Multi")
        else ("src_mask", "src_key_padding_mask")
    )
    if kind == "TransformerEncoder":
        names = ("mask", "src_key_padding_mask")
    if "Decoder" in kind:
        names = ("tgt_mask", "tgt_key_padding_mask")
    for (mask, m), (padding, p) in itertools.product(
        attention_masks(L, L).items(), paddings(L).items()
    ):
        keywords: dict[str, Any] = {names[0]: m, names[1]: p}
        name = f"mask {mask}, padding {padding}"
        if kind == "MultiheadAttention":
            yield name, (L, L, L), keywords | dict(need_weights=False)
            if mask.startswith("causal") and padding == "none":
                yield (
                    f"{name}, hint",
                    (L, L, L),
                    keywords | dict(need_weights=False, is_causal=True),
                )
        elif "Encoder" in kind:
            yield name, (L,), keywords
            if mask == "causal":
                yield f"{name}, hint", (L,), keywords | dict(is_causal=True)
        else:
            memory = dict(
                memory_mask=None if m is None else attention_masks(L, M)[mask],
                memory_key_padding_mask=paddings(M)[padding],
            )
            if kind == "Transformer":
                yield (
                    name,
                    (M, L),
                    dict(
                        tgt_mask=m,
                        tgt_key_padding_mask=p,
                        src_key_padding_mask=paddings(M)[padding],
                        **memory,
                    ),
                )
            else:
                yield name, (L, M), keywords | memory


def run(
    model: nn.Module, lengths: tuple[int, ...], keywords: dict[str, Any], batch_first: bool
) -> list[torch.Tensor]:
    """Return the output at real positions, and gradients if the model trains."""
    generator = torch.Generator().manual_seed(11)
    inputs = [
        torch.randn(B, n, E, generator=generator).transpose(0, 0 if batch_first else 1)
        for n in lengths
    ]
    if isinstance(model, nn.MultiheadAttention):
        inputs = inputs[:1] * 3
    leaves = [t.detach().clone().requires_grad_(model.training) for t in dict.fromkeys(inputs)]
    model.zero_grad()
    with torch.set_grad_enabled(model.training):
        out = model(
            *(leaves * 3 if isinstance(model, nn.MultiheadAttention) else leaves), **keywords
        )
    out = (out[0] if isinstance(out, tuple) else out).transpose(0, 0 if batch_first else 1)
    out = torch.cat([out[0], out[1, : out.shape[1] - 3]])  # padding() keeps these
    if not model.training:
        return [out]
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    return [
        out.detach(),
        *(t.grad for t in leaves),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


@pytest.fixture(autouse=True)
def _slow_path(never_left_active: None) -> Iterator[None]:
    """Disable torch.nn's fast path: it reads an additive mask as a bool mask (2.13)."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("way", ["activate", "convert", "both"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize(
    "settings", [dict(), dict(batch_first=True), dict(batch_first=True, norm_first=True)], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_mask_equals_pytorch(
    kind: str, settings: dict[str, bool], training: bool, way: str
) -> None:
    settings = dict(batch_first=False) | settings
    if kind == "MultiheadAttention" and "norm_first" in settings:
        settings = dict(batch_first=True)
    torch.manual_seed(5)
    model = layers(kind, **settings).train(training)
    ours = copy.deepcopy(model)
    if way != "activate":
        assert pt.integrations.convert(ours).converted
    for name, lengths, keywords in calls(kind):
        want = run(model, lengths, keywords, settings["batch_first"])
        with trace() as ran:
            if way == "convert":
                got = run(ours, lengths, keywords, settings["batch_first"])
            else:
                with pt.activate():
                    got = run(ours, lengths, keywords, settings["batch_first"])
        assert "attention_fwd" in {op for op, _ in ran}, name
        assert len(got) == len(want)
        for mine, theirs in zip(got, want):
            assert theirs.isfinite().all(), name
            assert distance(mine, theirs) < LIMIT or (mine - theirs).norm() < LIMIT, name


SETTINGS_OF_ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {}, "no biases": dict(bias=False), "a key and a value added": dict(add_bias_kv=True),
    "a zero added": dict(add_zero_attn=True),
    "both added": dict(add_bias_kv=True, add_zero_attn=True),
    "other widths": dict(kdim=12, vdim=20),
}  # fmt: skip


@pytest.mark.parametrize(
    "weights", [None, True, False], ids=["no weights", "weights, mean", "weights by head"]
)
@pytest.mark.parametrize("way", ["activate", "convert", "both"])
@pytest.mark.parametrize("name", SETTINGS_OF_ATTENTION)
def test_every_setting_of_attention_equals_pytorch(
    name: str, way: str, weights: bool | None
) -> None:
    """Cross-attention runs with each option, each mask, and the weights of `need_weights`."""
    settings = SETTINGS_OF_ATTENTION[name]
    torch.manual_seed(5)
    model = nn.MultiheadAttention(E, H, batch_first=True, **settings)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))  # its biases start at zero
    ours = copy.deepcopy(model)
    if way != "activate":
        pt.integrations.convert(ours)
    widths = (E, settings.get("kdim", E), settings.get("vdim", E))
    leaves = [torch.randn(B, n, width, requires_grad=True) for n, width in zip((L, M, M), widths)]
    for (mask, m), (padding, p) in itertools.product(
        attention_masks(L, M).items(), paddings(M).items()
    ):
        keywords: dict[str, Any] = dict(
            attn_mask=m, key_padding_mask=p, need_weights=weights is not None
        )
        keywords |= {} if weights is None else dict(average_attn_weights=weights)
        want = attended(model, leaves, keywords)
        with trace() as ran, contextlib.nullcontext() if way == "convert" else pt.activate():
            got = attended(ours, leaves, keywords)
        assert weights is not None or way == "convert" or "attention_fwd" in {op for op, _ in ran}
        assert len(got) == len(want)
        for mine, theirs in zip(got, want):
            assert theirs.isfinite().all(), (mask, padding)
            assert distance(mine, theirs) < LIMIT or (mine - theirs).norm() < LIMIT, (mask, padding)


def attended(
    model: nn.Module, leaves: list[torch.Tensor], keywords: dict[str, Any]
) -> list[torch.Tensor]:
    """Return the output, the weights if requested, and all gradients."""
    out, weights = model(*leaves, **keywords)
    assert (weights is not None) == keywords["need_weights"]
    parameters = list(model.parameters())
    loss = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
    found = [out.detach(), *([] if weights is None else [weights.detach()])]
    return found + list(torch.autograd.grad(loss, [*leaves, *parameters]))
