# SPDX-License-Identifier: Apache-2.0
"""Plots of attention: their contents, their files, and errors for bad input."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

import pytransformer as pt
from pytransformer import viz

TOKENS = ["<s>", "▁the", "▁cat", "▁cost", "▁$", "5", "<b>"]


@pytest.fixture(autouse=True)
def _matplotlib(request):
    if "without" not in request.node.name:
        pytest.importorskip("matplotlib", reason="needs matplotlib (the extra viz)")


@pytest.fixture
def weights():
    return torch.randn(3, 4, 7, 7).softmax(-1)


def texts(figure):
    return {t.get_text() for t in figure.findobj(lambda o: hasattr(o, "get_text"))}


def draw_all(weights):
    yield viz.heat_map(weights[0, 0], TOKENS, TOKENS, title="costs $5")
    yield viz.gallery(weights, title="all", layers=[0, 2, 5], heads=[1, 2, 3, 7])
    yield viz.head_lines(weights[0, 0], TOKENS, TOKENS)
    yield viz.plot_distances(weights.mean((2, 3)) * 50)
    yield viz.plot_positions(torch.randn(20, 8))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_every_plot_can_be_saved(tmp_path, weights, suffix):
    for number, figure in enumerate(draw_all(weights)):
        path = viz.save(figure, tmp_path / f"{number}{suffix}")
        content = path.read_bytes()
        assert len(content) > 3000
        assert content.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
        if suffix == ".svg":
            assert b"<b>" not in content and b"<script" not in content, (
                "a token must not become markup"
            )
    assert "matplotlib.pyplot" not in sys.modules, (
        "pyplot keeps every figure, and looks for a display"
    )


def test_equal_plots_have_equal_bytes(tmp_path, weights):
    first, second = (
        viz.save(next(draw_all(weights)), tmp_path / f"{i}.svg").read_bytes() for i in (1, 2)
    )
    assert first == second


def test_heat_map_shows_weights_and_tokens(weights):
    figure = viz.heat_map(weights[0, 0], TOKENS, TOKENS[::-1], title="costs $5")
    axis = figure.axes[0]
    assert (axis.images[0].get_array() == weights[0, 0].numpy()).all()
    assert axis.images[0].get_clim() == (0, 1)
    assert [t.get_text() for t in axis.get_yticklabels()] == [
        "<s>",
        "the",
        "cat",
        "cost",
        "\\$",
        "5",
        "<b>",
    ]
    assert next(t.get_text() for t in axis.get_xticklabels()) == "<b>"
    assert axis.get_title() == "costs \\$5", "no mathematics out of a dollar sign"


def test_labels_do_not_overlap(weights):
    """A label at 9 points needs an eighth of an inch, also for 60 tokens."""
    many = torch.rand(60, 60)
    figure = viz.heat_map(many, [f"token{i}" for i in range(60)], [f"token{i}" for i in range(60)])
    figure.canvas.draw()
    boxes = [t.get_window_extent() for t in figure.axes[0].get_yticklabels()]
    assert len(boxes) == 60
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in itertools.pairwise(boxes))
    assert all(box.x0 >= 0 for box in boxes), "a label is cut off at the left"


def test_gallery_has_a_plot_per_head(weights):
    figure = viz.gallery(weights, layers=[0, 2, 5], heads=[1, 2, 3, 7])
    shown = [axis.images[0].get_array() for axis in figure.axes]
    assert len(shown) == 12 and all(
        (a == w.numpy()).all() for a, w in zip(shown, weights.flatten(0, 1))
    )
    assert {"layer 5", "head 7"} <= texts(figure) and "layer 1" not in texts(figure)
    with pytest.raises(ValueError, match=r"names of \(3, 4\) layers and heads, got 2, 4"):
        viz.gallery(weights, layers=[0, 1])


def test_line_plot_has_a_line_per_significant_weight():
    weights = torch.tensor([[0.9, 0.1, 0.0], [0.0, 0.01, 0.99]])
    (lines,) = viz.head_lines(weights, ["a", "b"], ["x", "y", "z"], least=0.02).axes[0].collections
    drawn = [(int(s[0][1]), int(s[1][1])) for s in lines.get_segments()]
    assert drawn == [(0, 0), (0, 1), (1, 2)]
    assert lines.get_colors()[:, 3].tolist() == pytest.approx([0.9, 0.1, 0.99])


def test_mean_distances_exclude_padding():
    query, key = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6, 8)
    lengths = torch.tensor([6, 4])
    _, lse = pt.attention(query, key, key, key_lengths=lengths, return_lse=True)
    distance = pt.attention_summary(query, key, lse, kinds=("distance",), key_lengths=lengths)[
        "distance"
    ]
    weights = pt.attention_weights(query, key, lse, key_lengths=lengths)
    apart = (torch.arange(6)[:, None] - torch.arange(6)).abs()
    each = (weights * apart).sum(-1)
    valid = torch.arange(6) < lengths[:, None]
    expected = torch.stack([torch.cat([each[0, h], each[1, h, :4]]).mean() for h in range(3)])
    torch.testing.assert_close(viz.mean_distances(distance, valid), expected)
    torch.testing.assert_close(viz.mean_distances(distance), each.mean((0, 2)))
    assert not torch.allclose(viz.mean_distances(distance), expected), (
        "the padding of this case must count"
    )


def test_block_map_has_a_square_per_computed_block():
    mask = pt.BlockMask.sliding_window(256, (64, 0))
    figure = viz.block_map(mask)
    full, partial = (len(c.get_paths()) for c in figure.axes[0].collections)
    assert (full, partial) == (0, 7) and "43.8% of the blocks run" in texts(figure)
    with pytest.raises(TypeError, match=r"expected a pytransformer\.BlockMask, got Tensor"):
        viz.block_map(mask.to_dense())


def test_bad_input_is_named(tmp_path, weights):
    with pytest.raises(
        ValueError, match=r"heat_map: weights must have 2 dimensions, .* got shape \(3, 4, 7, 7\)"
    ):
        viz.heat_map(weights)
    with pytest.raises(TypeError, match="gallery: weights must be a tensor, got list"):
        viz.gallery([[1.0]])
    with pytest.raises(ValueError, match="head_lines: expected 7 keys, one for each, got 2"):
        viz.head_lines(weights[0, 0], TOKENS, ["a", "b"])
    with pytest.raises(ValueError, match=r"ends with \.png or \.svg, got .*x\.pdf"):
        viz.save(viz.heat_map(weights[0, 0]), tmp_path / "x.pdf")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch, weights):
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ImportError, match=r"drawing needs matplotlib, .*pytransformer-kernels\[viz\]"
    ):
        viz.heat_map(weights[0, 0])


def test_curves_have_lines_and_ticks_at_points(tmp_path):
    figure = viz.plot_curves(
        {"a": [(10, 0.5), (40, 0.7)], "b": [(10, 0.6)]}, "digits", "right", title="x<y", log_x=True
    )
    (axis,) = figure.axes
    assert [line.get_label() for line in axis.lines] == ["a", "b"] and axis.get_xscale() == "log"
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ["10", "40"]
    assert viz.save(figure, tmp_path / "curves.svg").stat().st_size > 2000
