# SPDX-License-Identifier: Apache-2.0
"""The table in drop_in.md equals a new comparison of each architecture with its eager code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import drop_in_table
from support.drop_in_table import FEATURES, Different, lines, row
from support.hugging_face import FAMILIES

DOC = Path(__file__).with_name("drop_in.md")


@pytest.fixture(autouse=True)
def _quick_and_strict(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")


def without_numbers(line: str) -> str:
    """Return a row without the numbers of its reasons, which depend on earlier rows."""
    return "".join(c for c in line if c not in "()0123456789")


@pytest.mark.unpoisoned  # compiles
@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("bert", "gpt2", "t5", "llama")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_each_row_equals_a_new_comparison(hugging_face: Any, name: str) -> None:
    """A cell with "ours" raises on a difference; the document equals the cells."""
    made = lines({name: row(name)})
    written = DOC.read_text().splitlines()
    assert made[0] in written, (
        "run: PYTHONPATH=tests/support python -m support.drop_in_table --write"
    )
    (documented,) = [line for line in written if line.startswith(f"| {name} |")]
    assert without_numbers(documented) == without_numbers(made[2])
    for reason in made[4:]:
        assert any(line.endswith(reason.partition(" ")[2]) for line in written), reason


def test_silent_differences_raise(hugging_face: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bert = FAMILIES["bert"]
    same = drop_in_table.FEATURES["right"]
    with monkeypatch.context() as patch:
        patch.setattr(
            drop_in_table, "build", lambda family, implementation, *a: family.build("eager")
        )
        with pytest.raises(Different, match="attention ran as"):
            same(bert)
    with monkeypatch.context() as patch:
        from transformers import AttentionMaskInterface

        from pytransformer.integrations import hugging_face as ours

        blind = lambda *args, attention_mask=None, **more: ours.attention_mask(*args, **more)
        patch.setitem(AttentionMaskInterface._global_mapping, "pytransformer", blind)
        with pytest.raises(Different, match="logits differ"):
            same(bert)
        with pytest.raises(
            Different, match="other tokens"
        ):  # random weights may give equal results for any mask: one of a few must differ
            for name in ("t5", "bart", "gpt2", "llama"):
                FEATURES["tokens"](FAMILIES[name])
