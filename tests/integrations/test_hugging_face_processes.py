# SPDX-License-Identifier: Apache-2.0
"""Registered models in other processes, and the report of register() if an import fails."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pytransformer as pt
from support.hugging_face import FAMILIES

LOAD = """
import pickle, sys, torch
model, expected = pickle.load(open(sys.argv[1], "rb"))
assert model.config._attn_implementation == "pytransformer"
torch.testing.assert_close(model(input_ids=torch.tensor([[5, 6, 7]])).logits, expected)
"""


@pytest.mark.parametrize("converted", [False, True])
def test_pickled_model_runs_in_a_new_process(
    hugging_face: Any, tmp_path: Path, converted: bool
) -> None:
    model = FAMILIES["llama"].build("pytransformer")
    if converted:
        pt.integrations.convert(model)
    expected = model(input_ids=torch.tensor([[5, 6, 7]])).logits.detach()
    path = tmp_path / "model.pickle"
    path.write_bytes(pickle.dumps((model, expected)))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_config_of_another_implementation_pickles_unchanged(hugging_face: Any) -> None:
    config = FAMILIES["llama"].build("eager").config
    assert b"pytransformer" not in pickle.dumps(config)


def test_register_reports_the_failing_import(
    hugging_face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pytransformer.integrations.hugging_face", None)
    monkeypatch.delattr(pt.integrations, "hugging_face")
    with pytest.raises(
        ImportError, match=r"cannot be registered with transformers 5.*hugging_face"
    ):
        pt.integrations.transformers.register()
