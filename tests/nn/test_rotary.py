# SPDX-License-Identifier: Apache-2.0
"""Rotary self-attention equals transformers' modules with the same weights; cache and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pytransformer as pt
from pytransformer import nn
from pytransformer.models import GPT, GPTConfig
from support.models import assert_same_gradient, assert_same_logits

LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def _theirs(name: str) -> tuple[Any, Any]:
    """Return the module of a tiny model with random weights, and its source of cos and sin."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    if name == "llama":
        from transformers.models.llama.modeling_llama import LlamaAttention as Attention
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as Embedding

        config = transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA_3)
    else:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention as Attention
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding as Embedding

        config = transformers.Qwen3Config(**SIZES, num_hidden_layers=1)
    config._attn_implementation = "eager"
    return Attention(config, 0), Embedding(config)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_module_equals_transformers(name: str) -> None:
    """Compare outputs and the gradients of x and every weight."""
    theirs, embedding = _theirs(name)
    norm = name == "qwen3"
    turning = pt.RotaryPositions.from_hugging_face(theirs.config)
    ours = nn.RotaryMultiHeadAttention(
        64, 4, num_kv_heads=2, head_dim=16, bias=False, rotary=turning, qk_norm=norm
    )
    with torch.no_grad():
        if norm:
            for weight in (theirs.q_norm.weight, theirs.k_norm.weight):
                weight.normal_().add_(1)
            ours.query_norm.copy_(theirs.q_norm.weight)
            ours.key_norm.copy_(theirs.k_norm.weight)
        ours.qkv.weight.copy_(torch.cat([getattr(theirs, f"{n}_proj").weight for n in "qkv"]))
        ours.out.weight.copy_(theirs.o_proj.weight)
    x, grad = torch.randn(2, 40, 64, requires_grad=True), torch.randn(2, 40, 64)
    tables = embedding(x, torch.arange(40)[None])
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
    expected, _ = theirs(x, position_embeddings=tables, attention_mask=mask)
    found = ours(x, causal="top_left")
    assert_same_logits(found, expected)
    their_weights = [
        theirs.q_proj.weight,
        theirs.k_proj.weight,
        theirs.v_proj.weight,
        theirs.o_proj.weight,
    ]
    their_weights += [theirs.q_norm.weight, theirs.k_norm.weight] if norm else []
    dx, dq, dk, dv, *others = torch.autograd.grad(expected, [x, *their_weights], grad)
    our_weights = [
        ours.qkv.weight,
        ours.out.weight,
        *([ours.query_norm, ours.key_norm] if norm else []),
    ]
    for mine, other in zip(
        torch.autograd.grad(found, [x, *our_weights], grad), [dx, torch.cat((dq, dk, dv)), *others]
    ):
        assert_same_gradient(mine, other)


def test_cached_steps_equal_the_full_sequence() -> None:
    layer, x = (
        nn.RotaryMultiHeadAttention(
            32, 4, rotary=pt.RotaryPositions(4, interleaved=True), qk_norm=True
        ),
        torch.randn(2, 7, 32),
    )
    with torch.no_grad():
        whole, cache = layer(x, causal="top_left"), nn.LayerCache(7)
        steps = [layer(x[:, i : i + 1], cache=cache, causal="bottom_right") for i in range(7)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_results_depend_on_distances_only() -> None:
    layer, x = nn.RotaryMultiHeadAttention(32, 2), torch.randn(1, 6, 32)
    moved = torch.cat((torch.randn(1, 5, 32), x), 1)
    lengths = torch.arange(11) >= 5
    found = layer(moved, attn_mask=lengths[None, None, None], causal="top_left")[:, 5:]
    torch.testing.assert_close(found, layer(x, causal="top_left"))
    assert not torch.allclose(layer(x.flip(1)).flip(1), layer(x)), "and they do"


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="leave cross and pattern out"):
        nn.RotaryMultiHeadAttention(32, 2, cross=True)
    with pytest.raises(ValueError, match="rotary turns 32 dimensions, and head_dim is 16"):
        nn.RotaryMultiHeadAttention(32, 2, rotary=pt.RotaryPositions(32))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_packed_equals_padded(qk_norm: bool) -> None:
    layer, lengths = (
        nn.RotaryMultiHeadAttention(32, 4, num_kv_heads=2, qk_norm=qk_norm),
        torch.tensor([5, 1, 9]),
    )
    x = torch.randn(3, 9, 32)
    whole = layer(x, causal="top_left", key_lengths=lengths)
    real = torch.arange(9) < lengths[:, None]
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    places = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 9, "max_seqlen_k": 9}
    torch.testing.assert_close(layer(x[real], causal="top_left", **places), whole[real])


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_cached_sequences_rotate_by_their_own_positions(kind: str) -> None:
    """Two steps of a cache with sequences of different lengths equal each sequence alone."""
    torch.manual_seed(0)
    model = pt.models.GPT(
        pt.models.GPTConfig(
            vocab_size=50, d_model=32, num_layers=2, num_heads=2, max_length=32, positions="rotary"
        )
    ).eval()
    first, second = torch.tensor([3, 9, 1]), torch.tensor([2, 1, 4])
    ids = torch.randint(50, (3, 13))
    cache = model.make_cache(16) if kind == "contiguous" else model.make_paged_cache(16, 4)
    with torch.no_grad():
        model(ids[:, :9], first, past_key_values=cache)
        new = torch.stack([row[n : n + 4] for row, n in zip(ids, first.tolist())])
        out = model(new, first + second, past_key_values=cache)
        for b in range(3):
            total = int(first[b] + second[b])
            alone = model(ids[b : b + 1, :total]).logits[0]
            assert_same_logits(out.logits[b, : second[b]], alone[int(first[b]) :])


def test_plan_splits_heads_but_not_modules_with_norms() -> None:
    from pytransformer.nn.parallel import CopiesParallel, HeadsParallel, plan_of

    model = torch.nn.ModuleDict(
        {n: nn.RotaryMultiHeadAttention(32, 4, qk_norm=n == "norm") for n in ("norm", "plain")}
    )
    plan = plan_of(model)
    assert type(plan["norm"]) is CopiesParallel and type(plan["plain"]) is HeadsParallel


@pytest.mark.parametrize("cache", ["contiguous", "paged"])
def test_models_build_their_tables_once_per_call(
    monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    """All layers use one cos and sin for each sequence's positions.

    Logits equal those of the full sequences without a cache.
    """
    model = GPT(
        GPTConfig(
            vocab_size=50, d_model=32, num_layers=3, num_heads=4, positions="rotary", max_length=32
        )
    ).eval()
    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    made: list[int] = []
    own = pt.RotaryPositions.tables
    with torch.no_grad():
        want = model(ids).logits
        monkeypatch.setattr(
            pt.RotaryPositions,
            "tables",
            lambda self, *a, **k: (made.append(1), own(self, *a, **k))[1],
        )
        kept = model.make_cache(32) if cache == "contiguous" else model.make_paged_cache(8, 8)
        first = torch.tensor([5, 3])
        model(ids[:, :5], first, past_key_values=kept)
        rows = torch.arange(2)
        for step in range(4):
            out = model(ids[rows, first + step][:, None], past_key_values=kept)
            assert torch.allclose(out.logits[:, 0], want[rows, first + step], atol=1e-5)
    assert len(made) == 5
