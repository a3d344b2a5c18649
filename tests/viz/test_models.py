# SPDX-License-Identifier: Apache-2.0
"""Attention weights of models: requested stacks, layers, heads and rows equal the definition."""

from __future__ import annotations

import json

import pytest
import torch

from pytransformer import viz
from pytransformer.models import (
    BERT,
    GPT,
    BERTConfig,
    FNet,
    FNetConfig,
    GPTConfig,
    Transformer,
    TransformerConfig,
)

IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread):
    """Use one thread: all models here are tiny."""


def gpt():
    return GPT(GPTConfig(vocab_size=20, d_model=16, num_layers=3, num_heads=4, max_length=8))


def test_weights_of_a_causal_decoder_equal_the_definition():
    model = gpt().train()
    seen = viz.attention_of(model, {"input_ids": IDS})
    assert seen.which == "decoder" and model.training, "the model is left as it was"
    weights = seen.weights()
    assert weights.shape == (3, 4, 5, 5)
    assert (weights.triu(1) == 0).all(), "causal"
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 4, 5))
    query, key = seen.taps[1].query[0], seen.taps[1].key[0]
    scores = (query @ key.mT / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(weights[1], scores.softmax(-1))
    torch.testing.assert_close(
        seen.weights(layers=[2], heads=[3, 0], rows=[4]), weights[2:, [3, 0], 4:]
    )
    apart = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    torch.testing.assert_close(seen.distances(), (weights * apart).sum(-1).mean(-1))
    with pytest.raises(ValueError, match="layer must be between 0 and 2, got 3"):
        seen.weights(layers=[3])


def test_stack_is_named_or_selected():
    small = dict(
        vocab_size=20,
        d_model=16,
        hidden=16,
        num_heads=4,
        num_encoder_layers=1,
        num_decoder_layers=2,
    )
    model = Transformer(TransformerConfig(**small))
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :3]}
    assert viz.attention_of(model, inputs).which == "cross"
    shapes = {
        which: tuple(viz.attention_of(model, inputs, which).weights().shape)
        for which in ("encoder", "decoder", "cross")
    }
    assert shapes == {"encoder": (1, 4, 5, 5), "decoder": (2, 4, 3, 3), "cross": (2, 4, 3, 5)}
    with pytest.raises(ValueError, match="GPT has no cross attention; it has decoder"):
        viz.attention_of(gpt(), {"input_ids": IDS}, "cross")
    fnet = FNet(FNetConfig(vocab_size=20, d_model=16, num_layers=1, hidden=16, max_length=8))
    with pytest.raises(ValueError, match="FNet mixes tokens without attention"):
        viz.attention_of(fnet, {"input_ids": IDS})


def test_models_load_by_the_config_of_their_folder(tmp_path):
    model = BERT(
        BERTConfig(vocab_size=20, d_model=16, num_layers=1, num_heads=2, hidden=16, max_length=8)
    ).eval()
    model.save(tmp_path)
    loaded = viz.load_model(tmp_path)
    assert torch.equal(loaded(IDS).last_hidden_state, model(IDS).last_hidden_state)
    assert torch.equal(viz.position_table(loaded), model.positions.weight)
    with pytest.raises(ValueError, match="GPT has no table of positions"):
        viz.position_table(
            GPT(GPTConfig(vocab_size=20, d_model=16, num_layers=1, num_heads=4, positions="alibi"))
        )
    for facts, output in [
        ({"model": "Nonsense"}, "holds a Nonsense"),
        ({"model_type": "llama"}, "of type 'llama'; expected one of bert"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(facts))
        with pytest.raises(ValueError, match=output):
            viz.load_model(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        viz.load_model(tmp_path / "none")
