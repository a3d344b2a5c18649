# SPDX-License-Identifier: Apache-2.0
"""A transformers cache with spare capacity returns DynamicCache's tensors, without its copies."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pytransformer as pt
from support.hugging_face import FAMILIES, inputs_of

pytest.importorskip("transformers")
from transformers.cache_utils import DynamicCache, DynamicLayer

from pytransformer.integrations.hugging_face.growing import GrowingLayer

growing_cache = pt.integrations.transformers.growing_cache


def states(rows: int, seed: int, batch: int = 2, **options: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, 3, rows, 8, generator=generator).requires_grad_(
            options.get("grad", False)
        )
        for _ in range(2)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_generation_equals_dynamic_cache(
    hugging_face: Any, name: str, settings: dict[str, Any]
) -> None:
    family = FAMILIES[name]
    model = family.build("pytransformer")
    inputs = inputs_of(family, "left")
    if "prompt_lookup_num_tokens" in settings:  # for one sequence
        inputs = {key: t[:1] for key, t in inputs_of(family, "none").items()}
    found = []
    for cache in (DynamicCache(config=model.config), growing_cache(model)):
        torch.manual_seed(0)
        found.append(
            model.generate(
                **inputs,
                **settings,
                max_new_tokens=12,
                past_key_values=cache,
                **({} if "do_sample" in settings else {"do_sample": False}),
            )
        )
    assert torch.equal(*found)
    assert name == "mistral" or all(
        type(layer) is GrowingLayer for layer in growing_cache(model).layers
    )


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_cache_of_an_encoder_decoder_keeps_tokens(hugging_face: Any, name: str) -> None:
    """Self-attention and cross-attention need separate caches; padding shows a mix-up in both."""
    model = FAMILIES[name].build("eager")
    inputs = {
        k: v for k, v in inputs_of(FAMILIES[name], "left").items() if not k.startswith("decoder_")
    }
    how = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    cache = growing_cache(model)
    grown = model.generate(**inputs, **how, past_key_values=cache)
    assert torch.equal(grown, model.generate(**inputs, **how, use_cache=False))
    assert all(type(layer) is GrowingLayer for layer in cache.self_attention_cache.layers)


CHANGES: dict[str, Callable[[Any], None]] = {
    "crop": lambda layer: layer.crop(-1),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1, 1])),
    # Before 5.23 DynamicCache fills returned tensors with zeros and continues behind them.
    **({"reset": lambda layer: layer.reset()} if "reset" in vars(DynamicLayer) else {}),
    "offload": lambda layer: (layer.offload(), layer.prefetch()) if layer.is_initialized else None,
}


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_equal_dynamic_cache(seed: int) -> None:
    """Updates return equal values, and neither returned tensors nor copies change later."""
    rng = random.Random(seed)
    ours, theirs, kept = GrowingLayer(), DynamicLayer(), []
    for i in range(60):
        change = rng.choice([None, None, None, "copy", "branch", *CHANGES])
        if change in CHANGES and ours.is_initialized and ours.get_seq_length() > 1:
            for layer in (ours, theirs):
                CHANGES[change](layer)
        elif change == "copy":
            ours = rng.choice([copy.copy, copy.deepcopy])(ours)
        elif change == "branch":  # the copy continues separately
            other = copy.copy(ours)
            with torch.no_grad():
                kept += [(t, t.clone()) for t in other.update(*states(2, 1000 + i))]
        with torch.inference_mode() if rng.random() < 0.3 else torch.no_grad():
            new = states(rng.choice([1, 1, 1, 5, 80]), i)
            given, want = ours.update(*new), theirs.update(*new)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert all(torch.equal(a, b) for a, b in zip(given, want))
        kept += [(a, b.clone()) for a, b in zip(given, want)]
    assert all(torch.equal(a, b) for a, b in kept)


def test_tokens_are_written_in_place_if_capacity_allows() -> None:
    layer = GrowingLayer()
    with torch.no_grad():
        first = layer.update(*states(100, 0))[0].data_ptr()
        places = [layer.update(*states(1, i))[0].data_ptr() for i in range(64)]
        assert set(places) == {first}
        assert layer.update(*states(1, 1))[0].data_ptr() != first


def test_gradients_equal_dynamic_cache() -> None:
    """This includes cached tensors and queries that saw the cache before it grew."""
    grads = []
    for layer in (GrowingLayer(), DynamicLayer()):
        with torch.no_grad():
            layer.update(*states(3, 5))
        first, second = states(4, 0, grad=True), states(1, 1, grad=True)
        layer.update(*first)
        query = torch.ones(8, requires_grad=True)
        (keys, values), (more, _) = layer.update(*second), layer.update(*states(1, 3))
        loss = (keys * values.cos() * query).sum() + (more * query).sum()
        with torch.no_grad():
            layer.update(*states(1, 2))
        loss.backward()
        grads.append([t.grad for t in (*first, *second, query)])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_backward_uses_the_keys_of_its_forward() -> None:
    """Queries need a gradient and keys need none, token after token."""
    layer, query, total = GrowingLayer(), torch.ones(8, requires_grad=True), torch.zeros(())
    for i in range(4):
        total = total + (layer.update(*states(1, i))[0] * query).sum()
    total.backward()
