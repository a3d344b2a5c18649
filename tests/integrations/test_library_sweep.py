# SPDX-License-Identifier: Apache-2.0
"""The sweep over timm's families and diffusers' models: committed results and planted faults.

The full sweep needs the libraries.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import pytransformer as pt
from support.sweep import libraries
from support.sweep.report import kinds

RESULTS = libraries.load_results()["rows"]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Callable[[str], libraries.Rows]:
    """Return the row of a subject; skip if its library is not installed."""
    monkeypatch.setenv("PYTRANSFORMER_STRICT", "1")

    def rows(subject: str) -> libraries.Rows:
        library = subject.partition("/")[0]
        try:
            (
                libraries.load("timm"),
                libraries.load(library),
            )  # timm lacks declarations that torchvision, which diffusers imports, needs
        except (ImportError, RuntimeError) as error:
            pytest.skip(f"{library} cannot be imported: {str(error).splitlines()[0]}")
        return libraries.rows(subject)

    return rows


def test_no_model_is_wrong() -> None:
    assert {row["verdict"] for row in RESULTS.values()} <= libraries.VERDICTS.keys() - {"wrong"}
    assert sum(row["verdict"].startswith("ours") for row in RESULTS.values()) > 35


def test_page_equals_the_results() -> None:
    made = libraries.page(libraries.load_results())
    assert libraries.DOC.read_text() == made, (
        "run: PYTHONPATH=tests/support python -m support.sweep.libraries --write"
    )


@pytest.mark.unpoisoned
@pytest.mark.parametrize(
    "subject", sorted(name.partition(":")[0] for name, row in RESULTS.items() if "cells" in row)
)
def test_subjects_match_the_results(found: Callable[[str], libraries.Rows], subject: str) -> None:
    for name, row in found(subject).items():
        assert kinds(row) == kinds(RESULTS[name]), name


class Masked(nn.Module):
    """One head of attention over a float mask, with its own scale."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.attention(x)[:, None]
        mask = torch.zeros(5, 5).masked_fill(torch.arange(5) > 2, -torch.inf)
        return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=0.9)


FAULTS = {"mask": 3, "scale": 6}  # their positions among the arguments of drop_in._lower


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_planted_faults_are_detected(
    monkeypatch: pytest.MonkeyPatch, one_thread: None, fault: str | None
) -> None:
    """Without a library, a call that loses its mask or its scale is wrong.

    A call that loses nothing is ours.
    """
    from pytransformer import drop_in
    from pytransformer.ops._core import fast_path
    from support.sweep.subjects import stirred

    torch.manual_seed(3)
    model, inputs = stirred(Masked()), {"x": torch.randn(2, 5, 8)}
    theirs = libraries.run(model, inputs)
    if fault is not None:
        true, lost = drop_in._lower, FAULTS[fault]
        monkeypatch.setattr(drop_in, "_lower", lambda *a: true(*a[:lost], None, *a[lost + 1 :]))
    with fast_path.off():  # this call would not use drop_in
        verdict = libraries.row(model, inputs, theirs)["verdict"]
    assert verdict == ("ours" if fault is None else "wrong")
    assert not pt.fallbacks()
