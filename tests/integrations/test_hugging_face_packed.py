# SPDX-License-Identifier: Apache-2.0
"""Packed batches in registered models equal separate sequences, with linear memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from pytransformer.ops._core.registry import trace
from support.hugging_face import FAMILIES, distance, model_distance_limit

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (7, 12, 1, 5)
OFFSETS = torch.tensor([0, 7, 19, 20, 25], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
GIVEN: dict[str, dict[str, Any]] = {
    "position_ids": {"position_ids": POSITIONS},
    "offsets": {
        "cu_seq_lens_q": OFFSETS,
        "cu_seq_lens_k": OFFSETS,
        "max_length_q": 12,
        "max_length_k": 12,
    },
}
GIVEN["both"] = GIVEN["position_ids"] | GIVEN["offsets"]


def gradients(model: Any, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    model.zero_grad()
    (logits * torch.randn(logits.shape, generator=generator)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt2"])
def test_packed_sequences_equal_separate_ones(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch, name: str, given: str
) -> None:
    """Offsets leave positions to the model, so the separate calls continue them."""
    from pytransformer.integrations.hugging_face import lowering, mask

    model = FAMILIES[name].build("pytransformer")
    for module in (lowering, mask):
        monkeypatch.delattr(module, "dense_mask")
    ids = torch.randint(4, 30, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    places = POSITIONS if given != "offsets" else torch.arange(ids.shape[1])[None]
    with trace() as ran:
        packed = model(input_ids=ids, use_cache=False, **GIVEN[given]).logits
    assert {op for op, _ in ran} == {"attention_varlen_fwd"}
    packed_gradients = gradients(model, packed)
    parts = [
        model(input_ids=i, position_ids=p, use_cache=False).logits
        for i, p in zip(ids.split(LENGTHS, 1), places.split(LENGTHS, 1))
    ]
    separate = torch.cat(parts, 1)
    torch.testing.assert_close(packed, separate)
    for key, gradient in gradients(model, separate).items():
        assert distance(packed_gradients[key], gradient) < model_distance_limit(torch.float32), key


def test_packed_rows_with_weights_equal_eager(hugging_face: Any) -> None:
    """Two rows have different boundaries; weights need segments in place of offsets."""
    ids = torch.randint(4, 30, (2, 25), generator=torch.Generator().manual_seed(3))
    places = torch.cat([POSITIONS, torch.arange(25)[None]])
    results = [
        FAMILIES["llama"].build(how)(
            input_ids=ids, position_ids=places, use_cache=False, output_attentions=True
        )
        for how in ("pytransformer", "eager")
    ]
    torch.testing.assert_close(results[0].logits, results[1].logits)
    for ours, theirs in zip(results[0].attentions, results[1].attentions):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cu_seq_lens_q": OFFSETS}, "must get equal cu_seq_lens_q and cu_seq_lens_k"),
        (
            {"cu_seq_lens_q": OFFSETS - 1, "cu_seq_lens_k": OFFSETS - 1},
            "must end at the number of tokens, got 24",
        ),
    ],
)
def test_wrong_offsets_are_refused(hugging_face: Any, given: dict[str, Any], message: str) -> None:
    model = FAMILIES["llama"].build("pytransformer")
    with pytest.raises(ValueError, match=message):
        model(input_ids=torch.ones(1, 25, dtype=torch.long), use_cache=False, **given)


@pytest.mark.parametrize(
    "column",
    [
        "token_type_ids",
        "length",
        "special_tokens_mask",
        "completion_mask",
        "seq_idx",
        "labels_mask",
    ],
)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_columns_of_a_batch_are_ignored(hugging_face: Any, name: str, column: str) -> None:
    model, ids = FAMILIES[name].build("pytransformer"), torch.tensor([[5, 6, 7]])
    assert torch.equal(model(ids, **{column: torch.ones(1, 3)}).logits, model(ids).logits)


@pytest.mark.parametrize(
    "name", ["block_mask", "score_mod", "attn_bias", "alibi_slopes", "cu_seqlens_q"]
)
def test_keywords_that_change_attention_are_refused(hugging_face: Any, name: str) -> None:
    model, ids = FAMILIES["llama"].build("pytransformer"), torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match=f"hands its attention the keyword '{name}'"):
        model(ids, **{name: torch.ones(3)})


PEAK = """
import resource, sys, torch, transformers as T, pytransformer as pt
pt.integrations.transformers.register()
length = int(sys.argv[1])
config = T.LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)
model = T.LlamaModel._from_config(config, attn_implementation="pytransformer")
places = torch.arange(512).repeat(length // 512)[None]
out = model(input_ids=places % 32, position_ids=places, use_cache=False)
out.last_hidden_state.sum().backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.unpoisoned
def test_packed_memory_is_linear(hugging_face: Any) -> None:
    """One (L, L) bool mask of 32,768 tokens takes 1,074 MB."""
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", PEAK, str(n)], capture_output=True, text=True, check=True
            ).stdout
        )
        for n in (2048, 32768)
    ]
    assert peaks[1] - peaks[0] < 200_000, f"{peaks} KB"
