# SPDX-License-Identifier: Apache-2.0
"""The HTML writer, and the tables that notebooks show for results."""

from __future__ import annotations

import pytest
import torch

import pytransformer as pt
from pytransformer import _html

NASTY = '<script>alert("1")</script>&\x1b[31m'


@pytest.mark.parametrize(
    "part",
    [
        _html.paragraph(NASTY, note=True),
        _html.table((NASTY, "b"), [(NASTY, 1), (2, 3)], ("b",), caption=NASTY),
        _html.details(NASTY, _html.heading(NASTY)),
        _html.bars([(NASTY, 2.0), ("slow", 0.5), ("same", 1.0)]),
        _html.lines({NASTY: [(0, 1.0), (5, 2.0)], "flat": [(0, 1.0)]}, NASTY, NASTY),
    ],
)
def test_text_is_escaped_and_nothing_is_loaded(part: str, html_problems) -> None:
    page = _html.page(NASTY, [part])
    assert html_problems(page) == []
    assert "<script" not in page and "\x1b" not in page
    assert "default-src 'none'" in page


def test_problems_are_seen(html_problems) -> None:
    assert html_problems("<p><b></p>") and html_problems('<img src="x">')


def test_bars_start_at_one_and_change_color_below() -> None:
    drawn = _html.bars([("fast", 4.0), ("slow", 0.5)])
    assert drawn.count(_html.COLORS[0]) == 1 and drawn.count(_html.COLORS[3]) == 1
    assert "4.00x" in drawn and "0.50x" in drawn


def test_ticks_are_round_and_inside() -> None:
    for low, high in ((0.0, 1.0), (0.013, 0.017), (-3.0, 4321.0), (7.0, 8.0)):
        found = _html.ticks(low, high)
        assert 3 <= len(found) <= 12 and low <= found[0] and found[-1] <= high * 1.0001


def test_lines_differ_in_color_or_dash() -> None:
    curves = {str(i): [(0, i), (1, i + 1)] for i in range(12)}
    drawn = _html.lines(curves, "x", "y")
    styles = {part.split('"/>')[0] for part in drawn.split('fill="none" ')[1:]}
    assert len(styles) == 12


def test_explanation_of_a_call_is_a_table(html_problems) -> None:
    q = torch.randn(1, 2, 8, 16)
    shown = pt.explain("attention", q, q, q)
    page = shown._repr_html_()
    assert html_problems(page) == []
    assert page.count("<tr>") == 1 + len(shown.reasons)
    assert all(name in page for name in shown.reasons) and page.count("chosen") == 1
    assert str(shown).startswith("attention: ")


def test_explanation_of_a_model_and_conversion_are_tables(html_problems) -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.MultiheadAttention(16, 2))[:1]
    before = pt.explain(model, torch.randn(2, 16))._repr_html_()
    converted = pt.integrations.convert(model)
    after = pt.explain(model, torch.randn(2, 16))._repr_html_()
    for page in (before, converted._repr_html_(), after):
        assert html_problems(page) == [] and "<table>" in page
    assert "converted 1 modules" in converted._repr_html_() and "layer_norm" in after
    assert str(converted).splitlines()[0].startswith("converted 1 modules")
