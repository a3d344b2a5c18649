# SPDX-License-Identifier: Apache-2.0
"""docs/scaling-limits.md: what a token leaves for backward is counted, and the page is what the tool says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pytransformer import models

ROOT = Path(__file__).resolve().parents[2]
WIDTH, HEADS = 64, 4


@pytest.fixture(scope="module")
def limits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scaling_limits", ROOT / "bench" / "tools" / "scaling_limits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def saved_bytes(model: torch.nn.Module, length: int) -> int:
    """What forward leaves for backward, the parameters aside; a storage counts once."""
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.Tensor] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in mine:
            held[t.untyped_storage().data_ptr()] = t
        return t

    ids = torch.randint(5, 100, (1, length))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        assert model(input_ids=ids, labels=ids).loss.requires_grad
    return sum(t.untyped_storage().nbytes() for t in held.values())


@pytest.mark.parametrize("name", ["BERT", "GPT", "T5"])
def test_a_layer_keeps_so_many_elements_of_a_token(name: str, limits: ModuleType) -> None:
    kind = getattr(models, name)
    options: dict[str, Any] = {"vocab_size": 100, "d_model": WIDTH, "num_heads": HEADS, "hidden": 4 * WIDTH, "dropout": 0.1}
    options |= {"head_dim": WIDTH // HEADS} if name == "T5" else {"max_length": 512, "attention_dropout": 0.1}

    def saved(layers: int, length: int) -> int:
        torch.manual_seed(0)
        return saved_bytes(kind(kind.Config(num_layers=layers, **options)).bfloat16().train(), length)

    a_token = (saved(2, 256) - saved(1, 256) - saved(2, 128) + saved(1, 128)) / 128
    elements = limits.ENCODER + (limits.DECODER if name == "T5" else 0)
    extra = a_token - elements * WIDTH * limits.ELEMENT
    calls = 5 if name == "T5" else 2
    # lse of each head and two statistics of each norm, in float32; where tokens are counted once a call, nothing more.
    assert 0 <= extra <= 4 * (3 * HEADS if name == "T5" else HEADS) + 8 * calls


def test_rows_that_hide(limits: ModuleType) -> None:
    """At just so many rows a step's tiles and messages take equally long."""
    for of, groups in ((limits.FORWARD, 1), (limits.BACKWARD, 4)):
        rows = limits.rows_that_hide(of, 600e12, 450e9, groups)
        assert of.flops * rows**2 * groups / 600e12 == pytest.approx(of.sent * rows / 450e9)


def test_the_longest_sequence_fits_and_twice_as_long_does_not(limits: ModuleType) -> None:
    size = limits.Size(parameters=10**9, width=1024, encoder=24)
    for recompute in (False, True):
        rows = limits.longest(size, 80e9, 8, recompute=recompute, shard=True)
        per_row = (size.recomputed if recompute else size.saved) + limits.RING * size.width
        for many, fits in ((rows, True), (2 * rows, False)):
            assert (many * per_row / 8 + 16e9 / 8 <= 0.9 * 80e9) is fits
    assert limits.longest(size, 16e9, 1, recompute=True, shard=False) == 0, "parameters alone are too many"


@pytest.mark.unpoisoned  # hundreds of layers without memory
def test_the_page_is_what_the_tool_says(limits: ModuleType) -> None:
    assert limits.page() == limits.PAGE.read_text(), "run: python bench/tools/scaling_limits.py --write"
