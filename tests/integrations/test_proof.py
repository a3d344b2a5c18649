# SPDX-License-Identifier: Apache-2.0
"""The drop-in proof: it accepts equal results on our kernels and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import pytransformer as pt
from pytransformer.cli import proof, proof_memory, proof_models


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a batch of two short sentences and a narrow encoder."""
    monkeypatch.setattr(proof_models, "WIDTH", 64)
    monkeypatch.setattr(proof_models, "HIDDEN", 128)
    text = proof_models.read_text()
    short = proof_models.Text(
        text.ids[:2, :12].contiguous(), text.real[:2, :12].contiguous(), text.words
    )
    monkeypatch.setattr(proof_models, "read_text", lambda: short)
    monkeypatch.setattr(proof, "ROUNDS", 1)


def entry_of(folder: Path) -> tuple[dict, dict]:
    document = json.loads((folder / "drop-in.json").read_text())
    return document, document["models"][0]


@pytest.mark.unpoisoned
def test_proves_torchs_encoder(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.zeros(1, 1, 1, 8)
    if (reason := pt.explain("attention", x, x, x).reasons["cpu"]) is not None:
        pytest.skip(f"cpu: {reason}")
    assert proof.run(["torch", "--no-memory", "--out", str(tmp_path)]) == 0
    document, entry = entry_of(tmp_path)
    assert document["proven"]
    assert set(entry["layers"].values()) == {"cpu"}
    assert 0 < entry["variants"]["pytransformer"]["gradients_relative_difference"] < proof.LIMIT
    assert "2 of 2 attention layers ran on: cpu" in capsys.readouterr().out


@pytest.mark.unpoisoned
@pytest.mark.falls_back
@pytest.mark.filterwarnings("ignore:pytransformer.scaled_dot_product_attention")
def test_a_fallback_is_not_a_proof(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytransformer.ops._core.registry import OPS

    monkeypatch.setattr(
        OPS["attention"], "backends", {"reference": OPS["attention"].backends["reference"]}
    )
    assert proof.run(["torch", "--no-memory", "--out", str(tmp_path)]) == 1
    document, entry = entry_of(tmp_path)
    assert not document["proven"]
    assert set(entry["layers"].values()) == {"not ours"}
    assert any("fell back" in problem for problem in entry["problems"])


@pytest.mark.unpoisoned
def test_a_wrong_result_is_not_a_proof(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytransformer import drop_in
    from pytransformer.ops._core import fast_path

    prepare = drop_in.attention_op.prepare
    monkeypatch.setattr(
        drop_in.attention_op, "prepare", lambda *a, attn_mask=None, **more: prepare(*a, **more)
    )
    with fast_path.off():  # this path does not call `prepare`
        assert proof.run(["torch", "--no-memory", "--out", str(tmp_path)]) == 1
    _, entry = entry_of(tmp_path)
    assert any("outputs differ" in problem for problem in entry["problems"])


def test_missing_transformers_raises_with_a_hint(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = proof.importlib.util.find_spec
    monkeypatch.setattr(
        proof.importlib.util,
        "find_spec",
        lambda name: None if name == "transformers" else find(name),
    )
    assert proof.run(["bert", "t5", "--no-memory", "--out", str(tmp_path)]) == 1
    assert "pytransformer-kernels[hf]" in capsys.readouterr().out


def test_proof_text_has_uneven_lengths() -> None:
    assert len(proof_models.SENTENCES.read_text(encoding="utf-8").splitlines()) == 32
    text = proof_models.read_text()
    lengths = text.real.sum(1)
    assert lengths.max() == text.ids.shape[1]
    assert lengths.min() < lengths.max() / 4, "there must be padding worth the name"
    assert text.ids.max() < text.words


@pytest.mark.unpoisoned
def test_peak_memory_is_measured_in_fresh_processes() -> None:
    if (reason := proof_memory.why_not()) is not None:
        pytest.skip(reason)
    peaks = proof_memory.peaks([("torch", "torch"), ("torch", "pytransformer")])
    parameters = 4 * sum(p.numel() for p in proof_models.build("torch").model.parameters())
    assert all(parameters < peak < 20 * parameters for peak in peaks.values())
