# SPDX-License-Identifier: Apache-2.0
"""Each example runs from beginning to end, with settings too small to learn much."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = {
    "bert": ["--steps", "3", "--classify-steps", "3", "--width", "16", "--sentences", "200"],
    "gpt": ["--steps", "3", "--width", "16", "--sentences", "120"],
    "vit": ["--steps", "3", "--width", "16", "--count", "64"],
}


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith("portuguese")} == set(TINY)  # test_grammar


@pytest.mark.parametrize("name", TINY)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    share = load(name).main(TINY[name])
    assert 0 <= share <= 1
    printed = capsys.readouterr().out
    assert "million parameters" in printed and "% of" in printed
    if name == "vit" and importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "vit-distance.png").stat().st_size > 3000


def test_the_summarizer_as_a_prefix_lm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert 0 <= load("gpt").main([*TINY["gpt"], "--prefix"]) <= 1


def test_the_vit_takes_pictures_of_one_s_own(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow (the extra viz)")
    monkeypatch.chdir(tmp_path)
    for name, light in (("dark", 10), ("light", 240)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(10):
            image.new("L", (20, 20), light + i).save(tmp_path / "images" / name / f"{i}.png")
    assert load("vit").main(["--steps", "40", "--width", "16", "--images", "images"]) == 1.0, "dark and light are told apart"
