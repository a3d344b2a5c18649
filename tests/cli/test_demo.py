# SPDX-License-Identifier: Apache-2.0
"""bench/tools/demo.py: its output, and exit code 1 for wrong results."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from pytransformer.cli import OK, WRONG, main

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "tools"))
import demo
import full_models as models

pytestmark = pytest.mark.unpoisoned


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the problems small: short rows, a narrow BERT of one layer."""
    monkeypatch.setattr(demo, "SHAPE", {"B": 1, "Hq": 2, "Hkv": 2, "Lq": 64, "Lk": 64, "D": 16})
    monkeypatch.setattr(demo, "MIN_TIME", 0.0)
    monkeypatch.setattr(demo, "CASES", ("causal", "t5_bias"))
    monkeypatch.setattr(demo.doctor, "self_check", list)
    monkeypatch.setitem(models.MODELS, "bert", ("BERT", bert))


def bert(layers: int | None, tokens: int | None) -> models.Parts:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    ids, mask = models._tokens(2, 12, 50, min_length=6)
    inputs = {"input_ids": ids, "attention_mask": mask}
    return BertForMaskedLM(config), inputs, ids.masked_fill(mask == 0, models.IGNORED), "2 x 12"


def run_demo(arguments: list[str]) -> int:
    return main(arguments, parser=demo.build_parser())


def test_demo_ends_with_fastest_slowest_and_no_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert run_demo(["--models", "bert", "--seconds", "0"]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[-2].startswith("Fastest: ")
        and lines[-2].endswith("Wrong: 0.")
        and lines[-1].startswith("Next: ")
    )
    for row in ("causal", "t5 bias", "registered", "converted"):
        assert any(row in line and "x" in line for line in lines), row
    assert sum("BERT, 2 of 12 layers, 2 x 12" in line for line in lines) == 4


def test_wrong_attention_ends_demo_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = demo.Runner._judge

    def wrong(self, step, problem, prepared, *, peer):
        forward = prepared.forward
        if not peer:
            prepared = type(prepared)(
                prepared.label, lambda: tuple(1.02 * o for o in forward()), prepared.context
            )
        return prepare(self, step, problem, prepared, peer=peer)

    monkeypatch.setattr(demo.Runner, "_judge", wrong)
    assert run_demo(["--models"]) == WRONG
    assert "WRONG: attention causal" in capsys.readouterr().out


def test_demo_without_kernels_times_no_attention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    explanation = demo.pt.explain("attention", *(torch.zeros(1, 1, 4, 8),) * 3)
    monkeypatch.setattr(
        demo.pt, "explain", lambda *_: dataclasses.replace(explanation, backend="torch")
    )
    assert run_demo(["--models"]) == OK
    assert "no kernels are built here" in capsys.readouterr().out


@pytest.mark.falls_back
@pytest.mark.filterwarnings("ignore:pytransformer.scaled_dot_product_attention")
def test_a_model_off_our_kernels_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from pytransformer.ops._core.registry import OPS

    reference = {"reference": OPS["attention"].backends["reference"]}
    monkeypatch.setattr(OPS["attention"], "backends", reference)
    assert run_demo(["--models", "bert", "--seconds", "0"]) == WRONG
    assert (
        "WRONG: BERT, 2 of 12 layers, 2 x 12: attention ran on reference" in capsys.readouterr().out
    )
