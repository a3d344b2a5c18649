# SPDX-License-Identifier: Apache-2.0
"""bench/tools/full_models.py: errors, and one complete comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pytransformer.cli import OK, USAGE, main

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "tools"))
import full_models

pytest.importorskip("transformers", reason='transformers is not installed (the extra "hf")')


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bert5"], "unknown model bert5; there are bert, gpt2, t5, vit"),
        (["--dtype", "int8"], "--dtype: int8 is not one of"),
        (["--layers", "13"], "--layers must be from 1 to 12, got 13"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, parser=full_models.build_parser()) == USAGE
    assert said in capsys.readouterr().err


@pytest.mark.slow  # base-size models
@pytest.mark.unpoisoned
def test_one_model_is_measured(tmp_path: Path) -> None:
    arguments = [
        "vit",
        "--layers",
        "1",
        "--seconds",
        "0",
        "--dtype",
        "float32",
        "--no-memory",
        "--out",
        str(tmp_path),
    ]
    assert main(arguments, parser=full_models.build_parser()) == OK
    rows = json.loads((tmp_path / "models.json").read_text())["rows"]
    assert {(r["mode"], r["variant"]) for r in rows} == {
        (mode, variant)
        for mode in ("forward", "training_step")
        for variant in ("eager", "sdpa", "pytransformer")
    }
    assert {row["model"] for row in rows} == {"ViT-B/16, 1 of 12 layers"}
    assert all(r["wrong"] is None and r["median_ms"] > 0 and r["speedup_sdpa"] > 0 for r in rows)
