# SPDX-License-Identifier: Apache-2.0
"""Labels of another shape and masks of another meaning raise, in every model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pytransformer.models.generation import generate
from support.small_models import CONFIGS, build, inputs

LABELS = ("labels", "next_sentence_label")


def other_shapes(labels: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the right number of labels, then more and fewer."""
    yield labels.flatten()[:-1]
    yield labels[:, None] if labels.dim() == 1 else labels.flatten()
    yield labels[None]
    if labels.dim() == 2 and labels.shape[0] != labels.shape[1]:
        yield labels.t().contiguous()


@pytest.mark.parametrize("name", CONFIGS)
def test_labels_of_another_shape_raise(name: str) -> None:
    model, given = build(name), inputs(name)
    assert model(**given).loss.isfinite()
    for key in given.keys() & set(LABELS):
        for wrong in other_shapes(given[key]):
            with pytest.raises(ValueError):
                model(**given | {key: wrong})


def test_labels_of_a_square_batch_flattened_raise() -> None:
    model, ids = build("GPT"), torch.randint(3, 29, (3, 4))
    for wrong in (ids.t(), ids.flatten(), ids[:, :3], torch.cat((ids, ids), 1)):
        with pytest.raises(ValueError, match=r"labels must have the shape \(3, 4\)"):
            model(ids, labels=wrong)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "attention_mask" in inputs(name)])
def test_floating_masks_raise(name: str) -> None:
    """An additive mask would hide the tokens and show the padding."""
    model, given = build(name).eval(), inputs(name)
    mask = given["attention_mask"]
    additive = torch.zeros(mask.shape).masked_fill(mask == 0, -torch.inf)
    for wrong in (additive, additive.half(), mask.float()):
        with pytest.raises(ValueError, match="attention_mask must be bool or integers"):
            model(**given | {"attention_mask": wrong})
    assert torch.equal(model(**given | {"attention_mask": additive == 0}).loss, model(**given).loss)
    if name.startswith(("GPT", "T5")):
        with pytest.raises(ValueError, match="attention_mask must be bool or integers"):
            generate(model, given["input_ids"], additive, max_new_tokens=1)
