# SPDX-License-Identifier: Apache-2.0
"""Models with sequences split over ranks: losses and summed gradients equal one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.models import CURVE
from support.ranks import Pool
from support.split_models import make
from support.split_training import CONFIGS, in_context, loss_and_gradients

ROWS, LENGTH = 3, 13  # not an even number of rows for any number of ranks
NOTHING = {"dropout": 0.0}


def ids(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(2, 61, (ROWS, length), generator=torch.Generator().manual_seed(length))


def padded_at_the_end(length: int) -> torch.Tensor:
    return (torch.arange(length) < torch.tensor([[length], [length - 5], [4]])).long()


LENGTHS = torch.tensor([LENGTH, 6, 0])
LABELS = torch.where(torch.arange(LENGTH) < 2, ids(), -100)  # on the first rank only
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GPT": ("GPT", {}, {}),
    "GPT, padding on the left": ("GPT", {}, {"attention_mask": padded_at_the_end(LENGTH).flip(1)}),
    "GPT, lengths": ("GPT", {}, {"attention_mask": LENGTHS}),
    "GPT, a prefix": ("GPT", {"num_kv_heads": 2}, {"prefix_lengths": torch.tensor([5, 0, 9])}),
    "GPT, ALiBi and a window": (
        "GPT",
        {"positions": "alibi", "window": 5},
        {"attention_mask": padded_at_the_end(LENGTH) > 0},
    ),
    "GPT, other places": ("GPT", {}, {"position_ids": ids() % 16}),
    "GPT, attention's dropout": ("GPT", {"attention_dropout": 0.3}, {}),
    "GPT, labels of one rank": ("GPT", {"label_smoothing": 0.1}, {"labels": LABELS}),
    "T5": ("T5", {"gated": True}, {"decoder_input_ids": ids(7), "labels": ids(7)}),
    "T5, padding": (
        "T5",
        {},
        {"attention_mask": LENGTHS, "decoder_attention_mask": padded_at_the_end(LENGTH)},
    ),
    "Transformer": (
        "Transformer",
        {"positions": "learned"},
        {"attention_mask": padded_at_the_end(LENGTH)},
    ),
    "Transformer, pre-norm": (
        "Transformer",
        {"norm": "pre"},
        {"decoder_input_ids": ids(7), "labels": ids(7)},
    ),
}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_one_process(pool: Pool, name: str, ranks: int) -> None:
    model, changes, more = CASES[name]
    made = model, CONFIGS[model] | NOTHING | changes, torch.float64
    given = {"input_ids": ids(), "labels": ids(), **more}
    want = loss_and_gradients(make(*made), given)
    for found in pool.run(ranks, in_context, made, given):
        assert found.keys() == want.keys()
        for n, t in want.items():
            torch.testing.assert_close(
                found[n], t, rtol=CURVE, atol=CURVE, msg=lambda m, n=n: f"{n}: {m}"
            )
