# SPDX-License-Identifier: Apache-2.0
"""`pytransformer demo`: its output, and exit code 1 for wrong results."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pytransformer.cli import OK, WRONG, demo, main, proof, proof_models

pytestmark = pytest.mark.unpoisoned


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the problems small: a batch of two short rows, one round."""
    monkeypatch.setattr(demo, "SHAPE", {"B": 1, "Hq": 2, "Hkv": 2, "Lq": 64, "Lk": 64, "D": 16})
    monkeypatch.setattr(demo, "MIN_TIME", 0.0)
    monkeypatch.setattr(demo, "CASES", ("causal", "t5_bias"))
    monkeypatch.setattr(demo.doctor, "self_check", list)
    monkeypatch.setattr(proof, "ROUNDS", 1)
    text = proof_models.read_text()
    short = proof_models.Text(
        text.ids[:2, :12].contiguous(), text.real[:2, :12].contiguous(), text.words
    )
    monkeypatch.setattr(proof_models, "read_text", lambda long=False: short)


def test_demo_ends_with_fastest_slowest_and_no_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert main(["demo", "--models", "bert", "--seconds", "0"]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[-2].startswith("Fastest: ")
        and lines[-2].endswith("Wrong: 0.")
        and lines[-1].startswith("Next: ")
    )
    for row in ("causal", "t5 bias", "registered", "converted"):
        assert any(row in line and "x" in line for line in lines), row


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
    assert main(["demo", "--models"]) == WRONG
    assert "WRONG: attention causal" in capsys.readouterr().out


def test_demo_without_kernels_times_no_attention(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    explanation = demo.pt.explain("attention", *(torch.zeros(1, 1, 4, 8),) * 3)
    monkeypatch.setattr(
        demo.pt, "explain", lambda *_: dataclasses.replace(explanation, backend="torch")
    )
    assert main(["demo", "--models"]) == OK
    assert "no kernels are built here" in capsys.readouterr().out


def test_long_rows_have_512_tokens_and_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    text = proof_models.read_text(long=True)
    assert text.ids.shape == (2, proof_models.LONG)
    assert not torch.equal(text.real[0], text.real[1])
