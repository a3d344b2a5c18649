# SPDX-License-Identifier: Apache-2.0
"""Parameter counts by part equal published and worked ones."""

from __future__ import annotations

import pytest
import torch

from pytransformer import models
from support.small_models import CONFIGS, build


def table(name: str, preset: str) -> models.ParameterTable:
    with torch.device("meta"):
        return getattr(models, name).from_preset(preset).parameter_table()


@pytest.mark.unpoisoned  # nothing is allocated on meta
def test_translator_has_the_published_parameter_count():
    """TensorFlow's tutorial prints these counts.

    They are encoder and decoder with embeddings, and the last layer with its bias.
    """
    counted = table("Transformer", "notes")
    assert counted.parts == {"encoder": 3_632_768, "decoder": 5_647_104, "output": 904_290}
    assert counted.total == 10_184_162
    each = {(row.part, row.kind): (row.parameters // row.times, row.times) for row in counted}
    d, heads = 128, 8
    wide = (
        3 * (d * heads * d + heads * d) + heads * d * d + d
    )  # queries, keys and values of 8 heads of 128, and the output
    assert each["encoder", "self-attention"] == each["decoder", "cross-attention"] == (wide, 4)
    assert each["encoder", "feed-forward"] == (2 * d * 512 + 512 + d, 4)
    assert each["decoder", "norms"] == (3 * 2 * d, 4)
    assert each["encoder", "source embedding"] == (7765 * d, 1) and each["output", "head"] == (
        7010 * (d + 1),
        1,
    )


@pytest.mark.unpoisoned
def test_bert_and_vit_have_the_published_parameter_counts():
    bert = table("BERT", "base").parts
    assert bert["embeddings"] == (30522 + 512 + 2 + 2) * 768, (
        "words, positions, segments, and a norm's two vectors"
    )
    layer = 4 * 768 * 769 + 2 * 768 * 3072 + 3072 + 768 + 4 * 768
    assert bert["encoder"] == 12 * layer and bert["pooler"] == 768 * 769
    vit = table("ViT", "B/16").parts
    assert vit == {
        "embeddings": 768 + (16 * 16 * 3 + 1) * 768 + 197 * 768,
        "encoder": 12 * layer + 2 * 768,
        "output": 769 * 1000,
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_is_counted_once(name: str):
    model = build(name)
    counted = model.parameter_table()
    assert counted.total == model.num_parameters() == sum(counted.parts.values())
    assert set(counted.parts) <= {"embeddings", "encoder", "decoder", "pooler", "output"}
    assert all(row.parameters > 0 and row.times > 0 for row in counted)
    lines = str(counted).splitlines()
    assert lines[-1].split() == ["total", f"{counted.total:,}"]
    assert len(lines) == len(counted.rows) + len(counted.parts) + 1


def test_shared_embeddings_are_a_separate_part():
    assert list(build("Transformer").parameter_table().parts) == [
        "embeddings",
        "encoder",
        "decoder",
    ], "tied: no output of its own"
    assert (
        build("Transformer-wide", target_vocab_size=29).parameter_table().parts["output"] == 29 * 17
    )
