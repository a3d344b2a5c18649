# SPDX-License-Identifier: Apache-2.0
"""convert(): torch.nn's attention and transformer layers against themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pytransformer as pt
from support.hugging_face import AS_EXACT, MANY, model_distance_limit
from support.models import random_sum

LIMIT = model_distance_limit(torch.float32)
B, L, M, E, H = 3, 9, 7, 32, 4


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")


def padding(length: int) -> torch.Tensor:
    hidden = torch.zeros(B, length, dtype=torch.bool)
    hidden[1, -3:] = True
    hidden[2, -1:] = True
    return hidden


def causal(length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    return mask if dtype.is_floating_point else mask.isinf()


def additive(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))


def both(
    module: nn.Module, inputs: tuple[torch.Tensor, ...], **kwargs: Any
) -> list[list[torch.Tensor]]:
    """Return output and gradients of the module and of its converted twin."""
    twin = copy.deepcopy(module)
    assert pt.integrations.convert(twin).converted
    results = []
    for m in (module, twin):
        leaves = [t.clone().requires_grad_() for t in dict.fromkeys(inputs)]
        by_input = dict(zip(dict.fromkeys(inputs), leaves))
        out = m(*(by_input[t] for t in inputs), **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        random_sum(out).backward()
        results.append([out.detach(), *(t.grad for t in leaves), *(p.grad for p in m.parameters())])
    return results


def check(results: list[list[torch.Tensor]]) -> None:
    theirs, ours = results
    assert len(theirs) == len(ours) > 4
    for a, b in zip(ours, theirs):
        if b.norm() > 0:
            assert ((a - b).norm() / b.norm()).item() < LIMIT
        else:
            assert a.norm() == 0


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": dict(key_padding_mask=padding(L)),
    "additive padding": dict(key_padding_mask=additive(padding(L))),
    "causal, bool": dict(attn_mask=causal(L, torch.bool)),
    "causal, hinted": dict(attn_mask=causal(L), is_causal=True),
    "causal, hinted, padding": dict(
        attn_mask=causal(L), is_causal=True, key_padding_mask=additive(padding(L))
    ),
    "causal and padding": dict(attn_mask=causal(L, torch.bool), key_padding_mask=padding(L)),
    "per head": dict(
        attn_mask=torch.rand(B * H, L, L, generator=torch.Generator().manual_seed(1)) < 0.3
    ),
    "additive": dict(
        attn_mask=torch.randn(L, L, generator=torch.Generator().manual_seed(2)),
        key_padding_mask=additive(padding(L)),
    ),
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_equals_torch(masks: str, batch_first: bool) -> None:
    module = nn.MultiheadAttention(E, H, batch_first=batch_first)
    x = torch.randn(B, L, E) if batch_first else torch.randn(L, B, E)
    check(both(module, (x, x, x), need_weights=False, **MASKS[masks]))


@pytest.mark.parametrize("settings", [{}, dict(kdim=20, vdim=24), dict(bias=False)])
def test_cross_attention_equals_torch(settings: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(E, H, batch_first=True, **settings)
    x, k, v = (
        torch.randn(B, L, E),
        torch.randn(B, M, settings.get("kdim", E)),
        torch.randn(B, M, settings.get("vdim", E)),
    )
    check(both(module, (x, k, v), need_weights=False, key_padding_mask=padding(M)))


def test_weights_equal_torch() -> None:
    module = nn.MultiheadAttention(E, H, batch_first=True)
    twin = copy.deepcopy(module)
    pt.integrations.convert(twin)
    x = torch.randn(B, L, E)
    assert torch.equal(twin(x, x, x)[1], module(x, x, x)[1])


@pytest.mark.parametrize("settings", [dict(add_bias_kv=True), dict(add_zero_attn=True)])
def test_extra_keys_use_torch(settings: dict[str, Any]) -> None:
    report = pt.integrations.convert(nn.MultiheadAttention(E, H, **settings))
    assert report.converted == []
    assert next(iter(settings)) in report.skipped[0][2]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_layers_equal_torch(
    norm_first: bool, batch_first: bool, activation: str
) -> None:
    settings = dict(
        dropout=0.0, activation=activation, norm_first=norm_first, batch_first=batch_first
    )
    module = nn.Transformer(E, H, 2, 2, 48, **settings)
    source, target = (torch.randn(B, n, E) if batch_first else torch.randn(n, B, E) for n in (M, L))
    check(both(
        module, (source, target), tgt_mask=causal(L), src_key_padding_mask=padding(M),
        tgt_key_padding_mask=padding(L),
        memory_key_padding_mask=padding(M), tgt_is_causal=True,
    ))  # fmt: skip


@pytest.mark.parametrize("norm_first", [True, False])
def test_dropout_applies_where_torch_applies_it(norm_first: bool) -> None:
    """Dropout with probability 1 is deterministic; each of the six places is tested alone."""
    layer = nn.TransformerDecoderLayer(E, H, 48, 0.0, norm_first=norm_first, batch_first=True)
    x, memory = torch.randn(B, L, E), torch.randn(B, M, E)
    for name in ("dropout", "dropout1", "dropout2", "dropout3"):
        dropped = copy.deepcopy(layer)
        getattr(dropped, name).p = 1.0
        check(both(dropped, (x, memory)))
    for name in ("self_attn", "multihead_attn"):
        dropped = copy.deepcopy(layer)
        getattr(dropped, name).dropout = 1.0
        check(both(dropped, (x, memory)))


def test_inference_does_not_use_the_torch_fast_path() -> None:
    """nn.TransformerEncoder packs batches and fuses layers in inference, unless converted."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(E, H, 48, batch_first=True), 2
    ).eval()
    twin = copy.deepcopy(encoder)
    pt.integrations.convert(twin)
    x, hidden = torch.randn(B, L, E), padding(L)
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=hidden)[~hidden]
        ours = twin(x, src_key_padding_mask=hidden)[~hidden]
    assert ((ours - expected).norm() / expected.norm()).item() < LIMIT


def test_half_precision_and_autocast_equal_torch() -> None:
    exact = nn.TransformerEncoderLayer(E, H, 48, 0.0, batch_first=True)
    x = torch.randn(MANY, L, E)
    expected = exact(x)

    def error(module: nn.Module, autocast: bool, ours: bool) -> float:
        module = copy.deepcopy(module)
        if ours:
            pt.integrations.convert(module)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = module(x if autocast else x.bfloat16())
        return ((out.float() - expected).norm() / expected.norm()).item()

    for module, autocast in ((copy.deepcopy(exact).bfloat16(), False), (exact, True)):
        assert error(module, autocast, True) < AS_EXACT * error(module, autocast, False)


@pytest.mark.parametrize("norm_first", [True, False])
def test_compiles_without_a_graph_break(norm_first: bool) -> None:
    module = nn.TransformerEncoderLayer(E, H, 48, 0.0, norm_first=norm_first, batch_first=True)
    x, hidden = torch.randn(B, L, E), padding(L)
    expected = module(x, src_key_padding_mask=hidden)
    pt.integrations.convert(module)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert (
        (compiled(x, src_key_padding_mask=hidden) - expected).norm() / expected.norm()
    ).item() < LIMIT
