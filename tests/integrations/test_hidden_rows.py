# SPDX-License-Identifier: Apache-2.0
"""Queries without visible keys: zeros here, a mean of all values in PyTorch.

Left padding exposes the difference in two models: SeamlessM4T-v2's speech encoder in the gradients
of its LayerNorms, MiniMax-M3 in its logits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from support.hugging_face import distance, model_distance_limit

MASK = torch.ones(2, 23, dtype=torch.int64)
MASK[1, :9] = 0


@pytest.fixture
def gradients(hugging_face: ModuleType, one_thread: None) -> Any:
    from transformers.models.seamless_m4t_v2.modeling_seamless_m4t_v2 import (
        SeamlessM4Tv2SpeechEncoder,
    )

    config = hugging_face.SeamlessM4Tv2Config(
        hidden_size=32, speech_encoder_layers=2, speech_encoder_attention_heads=4,
        speech_encoder_intermediate_size=48,
        feature_projection_input_dim=16, speech_encoder_chunk_size=4,
        speech_encoder_left_chunk_num=1, num_adapter_layers=1,
        left_max_position_embeddings=4, right_max_position_embeddings=4,
    )  # fmt: skip
    features = torch.randn(2, 23, 16, dtype=torch.float64)

    def run(implementation: str, sequences: int) -> torch.Tensor:
        """Return all gradients of a loss on the first sequences, in float64."""
        torch.manual_seed(0)
        model = SeamlessM4Tv2SpeechEncoder._from_config(
            config, attn_implementation=implementation, dtype=torch.float64
        ).eval()
        model(features, attention_mask=MASK).last_hidden_state[:sequences].sin().sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    return run


def give_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make PyTorch's attention return zeros for a query without visible keys."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def with_zeros(
        module: nn.Module, q: Any, k: Any, v: Any, attention_mask: torch.Tensor, **keywords: Any
    ) -> Any:
        out, weights = theirs(module, q, k, v, attention_mask, **keywords)
        seen = (
            attention_mask
            if attention_mask.dtype == torch.bool
            else attention_mask > torch.finfo(out.dtype).min / 2
        )
        return out * seen.any(-1)[:, 0, :, None, None], weights

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", with_zeros)


def test_large_gradients_come_from_rows_of_zeros(
    gradients: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LayerNorm divides a gradient by sqrt(eps) = 1/316 in rows of zeros, layer after layer.

    PyTorch's attention has the same gradients if it returns zeros for padding rows.
    """
    want = gradients("sdpa", 2)
    give_zeros(monkeypatch)
    zeros, ours = gradients("sdpa", 2), gradients("pytransformer", 2)
    assert ours.norm() > 1e6 * want.norm()
    assert (ours - zeros).norm() < 1e-12 * zeros.norm()


def test_losses_on_real_rows_have_pytorchs_gradients(gradients: Any) -> None:
    want, ours = gradients("sdpa", 1), gradients("pytransformer", 1)
    assert want.norm() < 1e4
    assert (ours - want).norm() < 1e-12 * want.norm()


def test_minimax_m3_scores_its_padding(hugging_face: ModuleType, one_thread: None) -> None:
    """The indexer scores padding keys, which then decide the selected blocks.

    These keys come from queries without visible keys in the layer before: zeros in ours and sdpa, a
    mean in eager code. The selected blocks differ.
    """
    from support.sweep.subjects import subjects

    subject = subjects("minimax_m3_vl_text")[0]
    ids = torch.arange(3, 25).view(2, 11)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    kept: list[torch.Tensor] = []
    outs = []
    for implementation in ("eager", "sdpa", "pytransformer"):
        model = subject.build(implementation)
        (indexer,) = (m.indexer for m in model.modules() if getattr(m, "indexer", None) is not None)
        indexer.register_forward_hook(
            lambda module, inputs, blocks: kept.append(blocks.sort(-1).values.transpose(1, 2))
        )
        with torch.no_grad():
            outs.append(model(ids, attention_mask=mask).logits)
    (eager_kept, sdpa_kept, our_kept), (eager, sdpa, ours) = (
        [t[mask.bool()] for t in found] for found in (kept, outs)
    )
    assert torch.equal(our_kept, sdpa_kept) and not torch.equal(our_kept, eager_kept)
    limit = model_distance_limit(torch.float32)
    assert distance(ours, sdpa) < limit < distance(ours, eager)
    assert distance(ours[:11], eager[:11]) < limit  # the sequence without padding
