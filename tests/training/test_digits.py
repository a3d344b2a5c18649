# SPDX-License-Identifier: Apache-2.0
"""`examples/train.py vit|mixer|fnet|conformer`: learning, bitwise resuming, data.

Each learns within seconds.
"""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from train import main

from pytransformer.cli import OK, USAGE
from pytransformer.models import Conformer, ViT
from pytransformer.training.checkpoint import checkpoints, read_checkpoint
from training_tasks.data.digits import (
    LEVELS,
    Digits,
    drawn_at,
    edits,
    image_collate,
    level_collate,
    load_digits,
    make_strips,
    reading_errors,
    strip_collate,
)

pytestmark = pytest.mark.unpoisoned  # hundreds of steps
sklearn = pytest.importorskip(
    "sklearn", reason="needs scikit-learn (the extra corpora), which has the digits"
)


def trained(task: str, out, *options: str) -> dict:
    assert main([task, "--out", str(out), "--threads", "1", *options]) == OK
    return json.loads((out / "report.json").read_text())


def test_vit_learns_and_is_fine_tuned_at_another_size(tmp_path, capsys):
    options = [
        "--shares",
        "0.25",
        "1",
        "--steps",
        "200",
        "--width",
        "48",
        "--layers",
        "2",
        "--rate",
        "3e-3",
        "--tune-steps",
        "40",
    ]
    report = trained("vit", tmp_path / "vit", *options)
    few, all_of_them, before, after = report["figures"]
    assert all_of_them["value"] > 0.5 and all_of_them["chance"] == 0.1 and all_of_them["of"] == 597
    assert 0.85 < few["baseline"] < all_of_them["baseline"] < 0.95, "logistic regression"
    assert before["value"] > 0.15 and after["value"] > after["baseline"] + 0.05, (
        "what was learned at 8 x 8 helps at 12 x 16"
    )
    assert report["size"] == [12, 16] and [n for n, _ in report["accuracy_by_digits"]["ViT"]] == [
        300,
        1200,
    ]
    assert torch.tensor(report["attention_distance_in_pixels"]).shape == (2, 4)
    assert ViT.load(tmp_path / "vit" / "resized").config.image_size == (12, 16)
    if (tmp_path / "vit" / "training.png").exists():
        assert (tmp_path / "vit" / "accuracy.png").stat().st_size > 3000
    assert (
        main(
            [
                "vit",
                "--out",
                str(tmp_path / "x"),
                "--size",
                "11x16",
                "--steps",
                "1",
                "--shares",
                "0.1",
            ]
        )
        == USAGE
    )
    assert "image_size (11, 16) is not a multiple of patch_size 2" in capsys.readouterr().err


def test_mixers_learn_and_resume_with_the_same_bits(tmp_path):
    options, out = (
        ["--steps", "100", "--width", "48", "--layers", "2", "--shift", "0", "--save-every", "50"],
        tmp_path / "mixer",
    )
    report = trained("mixer", out, *options)
    assert all(figure["value"] > 0.4 and figure["chance"] == 0.1 for figure in report["figures"])
    newest = checkpoints(out / "convolution")[-1]
    expected = read_checkpoint(newest).tensors
    newest.unlink()
    again = trained("mixer", out, *options, "--resume")
    found = read_checkpoint(newest).tensors
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
    assert again["figures"] == report["figures"]


def test_fnet_learns_from_gray_levels(tmp_path):
    report = trained("fnet", tmp_path / "fnet", "--steps", "150", "--width", "48")
    assert report["figures"][0]["value"] > 0.3 and "BERT" in report["figures"][0]["by"]


def test_conformer_learns_to_read(tmp_path):
    """Few steps only teach it to output nothing, so some strip must be read.

    The local model sees only the subsampling's context.
    """
    options = [
        "--steps",
        "120",
        "--width",
        "48",
        "--layers",
        "1",
        "--strips",
        "1500",
        "--held-out",
        "50",
        "--longest",
        "4",
    ]
    report = trained("conformer", tmp_path / "conformer", *options)
    assert "UCI repository, CC BY 4.0" in report["sources"][0]
    ours, local = report["found"]["conformer"], report["found"]["no-blocks"]
    assert ours["digit_errors"] < 0.5 and ours["digit_errors"] < local["digit_errors"] - 0.1
    assert ours["exact"] > 0.15
    assert Conformer.load(tmp_path / "conformer" / "conformer").config.ctc


# ---- data


def test_digits_equal_scikit_learn() -> None:
    from sklearn.datasets import load_digits as theirs

    learned, held_out = load_digits()
    assert (len(learned), len(held_out)) == (1200, 597)
    images, labels = (
        torch.cat([learned.images, held_out.images]),
        torch.cat([learned.labels, held_out.labels]),
    )
    assert torch.equal(((images + 1) * 8)[:, 0].double(), torch.from_numpy(theirs().images))
    assert torch.equal(labels, torch.from_numpy(theirs().target))


def test_images_shift_by_full_pixels() -> None:
    image = torch.full((1, 4, 5), -1.0)
    image[0, 1, 2] = 1.0
    examples = [(image, 7)] * 64
    batch = image_collate(1)(examples, torch.Generator().manual_seed(0))
    places = {
        tuple(place) for place in (batch["pixel_values"][:, 0] == 1.0).nonzero()[:, 1:].tolist()
    }
    assert places == set(itertools.product((0, 1, 2), (1, 2, 3))) and (batch["labels"] == 7).all()
    assert torch.equal(image_collate()(examples, torch.Generator())["pixel_values"][5], image)


def test_gray_levels_are_tokens() -> None:
    _, held_out = load_digits()
    ids = level_collate()([held_out[3]], torch.Generator())["input_ids"]
    assert (
        ids.shape == (1, 65)
        and ids[0, 0] == LEVELS
        and ids[0, 1:].min() == 0
        and ids[0, 1:].max() == LEVELS - 1
    )
    assert torch.equal(ids[0, 1:].view(8, 8) / 8.0 - 1.0, held_out.images[3, 0])


def test_strips_contain_their_digits_in_order() -> None:
    bars = Digits(torch.full((3, 1, 8, 8), -1.0), torch.tensor([0, 1, 2]))
    for label in range(3):
        bars.images[label, 0, 3 * label : 3 * label + 2] = 1.0  # a bar at a label-dependent height
    strips = make_strips(bars, 20, torch.Generator().manual_seed(0), noise=0.0)
    assert {len(strip.digits) for strip in strips} == {2, 3, 4, 5, 6}
    for strip in strips:
        heights = strip.features.argmax(1)[strip.features.amax(1) > 0.5]
        seen = [int(h) // 6 for h in heights]
        assert [d for d, _ in itertools.groupby(seen)] == [
            d for d, _ in itertools.groupby(strip.digits)
        ]
        assert len(seen) >= 12 * len(strip.digits)
    batch = strip_collate()(strips[:2], torch.Generator())
    assert batch["attention_mask"].tolist() == [len(s.features) for s in strips[:2]]
    assert [n - 1 for n in batch["labels"][0].tolist() if n > 0] == strips[0].digits


def test_edit_distance_is_minimal() -> None:
    def by_hand(a: tuple, b: tuple) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(
            by_hand(a[1:], b) + 1, by_hand(a, b[1:]) + 1, by_hand(a[1:], b[1:]) + (a[0] != b[0])
        )

    words = [word for n in range(4) for word in itertools.product((1, 2), repeat=n)]
    assert all(edits(a, b) == by_hand(a, b) for a in words for b in words)


def test_reading_errors_count_digits_and_strips() -> None:
    class Reader:
        def read(self, features, lengths):
            return [[1, 2], [3]]

    labels = torch.tensor([[1, 2, -100], [3, 3, 4]])
    batch = {
        "input_features": torch.zeros(2, 8, 16),
        "attention_mask": torch.tensor([8, 8]),
        "labels": labels,
    }
    assert reading_errors(Reader(), [batch]) == {"digit_errors": 2 / 5, "exact": 1 / 2}


def test_digits_can_be_resized_to_rectangles() -> None:
    _, held_out = load_digits()
    larger = drawn_at(held_out, (12, 16))
    assert larger.images.shape == (597, 1, 12, 16) and larger.images.abs().max() <= 1
    assert drawn_at(held_out, 8) is held_out
