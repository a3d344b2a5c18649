# SPDX-License-Identifier: Apache-2.0
"""Models split by tensor_parallel_plan(), by FSDP2 and by both against one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from support import small_models
from support.models import CURVE
from support.ranks import Pool
from support.split_models import (
    bytes_given,
    converted,
    hugging_face_model,
    loss_and_gradients,
    make,
    refusal,
    saved_and_back,
    sizes,
    small,
    split_gradients,
    train,
    trained,
)

SIZES: dict[str, Any] = {"d_model": 16, "num_heads": 4, "hidden": 24, "num_layers": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT": {**SIZES, "vocab_size": 61, "max_length": 16, "num_kv_heads": 4,
        "attention_dropout": 0.1},
    "T5": {**SIZES, "vocab_size": 61, "head_dim": 4, "buckets": 8, "gated": True,
        "activation": "silu", "dropout": 0.1},
    "BERT": {**SIZES, "vocab_size": 61, "max_length": 16, "attention_dropout": 0.1,
        "heads": ("mlm", "nsp")},
    "ViT": {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": 10},
    "Transformer": {
        "d_model": 16, "num_heads": 4, "hidden": 24, "num_encoder_layers": 1,
        "num_decoder_layers": 1, "vocab_size": 61, "max_length": 16,
        "dropout": 0.1,
    },
}  # fmt: skip
STEPS = 4


def batches(name: str) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)

    def ids(*shape: int, high: int = 61) -> torch.Tensor:
        return torch.randint(2, high, shape, generator=generator)

    def batch() -> dict[str, torch.Tensor]:
        if name == "ViT":
            return {
                "pixel_values": torch.randn(8, 3, 8, 8, generator=generator, dtype=torch.float64),
                "labels": ids(8, high=10),
            }
        given = {"input_ids": ids(8, 9), "labels": ids(8, 9)}
        return given | ({"next_sentence_label": ids(8) % 2} if name == "BERT" else {})

    return [batch() for _ in range(STEPS)]


def config_of(name: str, data_ranks: int) -> dict[str, Any]:
    """Return a config, without dropout if ranks have different rows: each counts from 0."""
    config = CONFIGS[name]
    return (
        config | {n: 0.0 for n in config.keys() | {"dropout"} if n.endswith("dropout")}
        if data_ranks > 1
        else config
    )


@functools.cache
def alone(name: str, data_ranks: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = make(name, config_of(name, data_ranks), torch.float64)
    return train(model, batches(name)), {n: t.detach() for n, t in model.state().items()}


def difference(found: Any, want: Any) -> float:
    """Return the max difference of losses and parameters, relative to the max of each."""
    (losses, state), (their_losses, their_state) = found, want
    assert state.keys() == their_state.keys()
    pairs = [*zip(losses, their_losses), *((state[n], t) for n, t in their_state.items())]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs)


@pytest.mark.parametrize("name, ranks", [
    ("GPT", (1, 2)), ("GPT", (1, 4)), ("GPT", (2, 1)), ("GPT", (2, 2)),
    ("T5", (1, 2)), ("T5", (2, 1)), ("T5", (2, 2)),
    ("BERT", (1, 2)), ("ViT", (1, 2)), ("ViT", (2, 2)), ("Transformer", (1, 2)),
], ids=str)  # fmt: skip
def test_training_equals_one_process(pool: Pool, name: str, ranks: tuple[int, int]) -> None:
    """Four steps of AdamW with clipped float64 gradients.

    ``ranks`` are the ranks of FSDP2 and of the heads.
    """
    made = name, config_of(name, ranks[0]), torch.float64
    for found in pool.run(ranks[0] * ranks[1], trained, made, batches(name), ranks):
        assert difference(found, alone(name, ranks[0])) < 1e-9


@pytest.mark.parametrize("name", small_models.CONFIGS)
def test_gradients_of_every_model_equal_one_process(pool: Pool, name: str) -> None:
    """Packed padding, grouped queries, ALiBi, any head dim, every head of a model."""
    want = loss_and_gradients(small(name), name)
    for found in pool.run(2, split_gradients, name):
        assert found.keys() == want.keys()
        for n, t in want.items():
            torch.testing.assert_close(found[n], t, rtol=CURVE, atol=CURVE, msg=n)


@pytest.mark.parametrize("fault", [
    "gradients of what is whole are not added up", "results are not added up", "b2 on every rank",
    "lse of the rank's own classes",
])  # fmt: skip
def test_planted_faults_are_detected(pool: Pool, fault: str) -> None:
    made = "GPT", CONFIGS["GPT"], torch.float64
    found = pool.run(2, trained, made, batches("GPT"), (1, 2), fault)
    assert max(difference(f, alone("GPT", 1)) for f in found) > 1e-3


def test_converted_hugging_face_models_run_under_fsdp(pool: Pool) -> None:
    pytest.importorskip("transformers")
    steps = [
        {"input_ids": b["input_ids"], "labels": b["input_ids"][:, 0] % 2} for b in batches("GPT")
    ]
    want = train(hugging_face_model(), steps)
    for losses in pool.run(2, converted, steps):
        torch.testing.assert_close(torch.stack(losses), torch.stack(want), rtol=CURVE, atol=0)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["GPT", "T5"])
def test_bytes_equal_the_formulas(pool: Pool, name: str, ranks: int) -> None:
    """GPT's dropout broadcasts seeds; T5 without dropout broadcasts none.

    Each norm but the first of a stack, its last norm and each attention broadcast one.
    """
    c, rows, width = CONFIGS[name] | ({"dropout": 0.0} if name == "T5" else {}), 8 * 9, 16 * 4
    layers, learned = c["num_layers"], 8 * 8 if name == "GPT" else rows
    sums = {"GPT": (2 * layers + 1, 2 * layers), "T5": (5 * layers + 2, 6 * layers)}[name]
    generators, loss = 8, 3 * learned * 4
    forward = {"all_reduce": sums[0] * rows * width, "allgather": generators + loss}
    backward = {"all_reduce": sums[1] * rows * width + learned * width}
    if name == "GPT":
        forward["broadcast"] = (3 * layers + 1) * 8
    else:
        backward["allgather"] = 2 * layers * c["buckets"] * c["num_heads"] // ranks * 4
    made = name, c, torch.float32
    for found in pool.run(ranks, bytes_given, made, batches(name)[0]):
        assert found == (forward, backward)


def test_parameters_decrease_with_the_ranks(pool: Pool) -> None:
    """Each of 2 x 2 ranks has a quarter of the split matrices and, with FSDP2, half of the rest."""
    made = "GPT", CONFIGS["GPT"] | {"vocab_size": 64}, torch.float32
    for found in pool.run(4, sizes, made, 2):
        for name, (own, full) in found.items():
            matrix = "norm" not in name and name.endswith("weight") and "positions" not in name
            assert own == full // (4 if matrix or "qkv" in name or "w1" in name else 2), name


def test_split_models_save_their_gathered_state(pool: Pool, tmp_path: Path) -> None:
    made = "GPT", CONFIGS["GPT"], torch.float32
    for refused, same in pool.run(2, saved_and_back, made, str(tmp_path)):
        assert "its parameters are split over ranks" in refused and same
    assert not list(tmp_path.iterdir())


REFUSED: dict[str, tuple[str, dict[str, Any], bool, str]] = {
    "heads": (
        "GPT",
        {"num_heads": 1, "num_kv_heads": 1},
        False,
        "2 ranks must divide the 1 heads of queries and the 1 of keys",
    ),
    "generators": ("GPT", {}, True, "call torch.manual_seed with the same number on all ranks"),
    "experts": ("GPT", {"experts": {"num_experts": 2}}, False, "split those over the ranks with"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_rank_refuses(pool: Pool, name: str) -> None:
    model, changes, seeds, why = REFUSED[name]
    made = model, CONFIGS[model] | changes, torch.float64
    for output in pool.run(2, refusal, made, seeds, **batches(model)[0]):
        assert why in output, output
