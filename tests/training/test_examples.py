# SPDX-License-Identifier: Apache-2.0
"""Each example runs to its end in seconds and learns more than chance."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUICK = {
    "bert": ["--steps", "10", "--classify-steps", "200", "--width", "64", "--sentences", "2400"],
    "continuous_batching": ["--requests", "20", "--pages", "24"],
    "gpt": ["--steps", "100", "--width", "64", "--sentences", "800"],
    "speculative_decoding": ["--tokens", "60"],
    "vit": ["--patch", "8", "--steps", "250", "--width", "32", "--count", "1500"],
}
pytestmark = pytest.mark.unpoisoned  # hundreds of steps


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    elsewhere = {"portuguese", "portuguese_lexicon", "train"}  # test_grammar, test_training_run
    assert {path.stem for path in EXAMPLES.glob("*.py")} == elsewhere | set(QUICK)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_classifiers_learn(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    share, most = load(name).main(QUICK[name])
    assert 0.2 < most < 0.4 and share > most + 0.15, (
        f"{share:.2f} told right, {most:.2f} by saying the same of all"
    )
    printed = capsys.readouterr().out
    assert "million parameters" in printed and f"{100 * share:.1f} % of" in printed
    if name == "vit" and importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "vit-distance.png").stat().st_size > 3000


def test_request_tokens_do_not_depend_on_other_requests(capsys):
    requests, same = load("continuous_batching").main(QUICK["continuous_batching"])
    assert same == requests == 20
    assert "24 of 24 pages without a request" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options", [[], ["--branches", "1"], ["--cache", "paged", "--seed", "3"]], ids=str
)
def test_speculative_tokens_equal_greedy_decoding(options, capsys):
    output, plain, calls = load("speculative_decoding").main(
        [*QUICK["speculative_decoding"], *options]
    )
    assert output == plain and len(output) == 60
    assert calls < 30  # at least two tokens per call
    assert "equal to greedy decoding" in capsys.readouterr().out


def learned_summaries(*options):
    """Check that half of the entropy above token frequencies is learned from the article."""
    _, loss, unigram = load("gpt").main([*QUICK["gpt"], *options])
    assert 3.0 < unigram < 4.0 and loss < 0.7 * unigram, (
        f"{loss:.2f} nats a token, by frequency {unigram:.2f}"
    )


def test_summarizer_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learned_summaries()


def test_prefix_lm_summarizer_learns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learned_summaries("--prefix", "--steps", "60", "--sentences", "500")


def test_vit_reads_a_folder_of_images(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow (the extra viz)")
    monkeypatch.chdir(tmp_path)
    for name, light in (("dark", 10), ("light", 240)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(10):
            image.new("L", (20, 20), light + i).save(tmp_path / "images" / name / f"{i}.png")
    share, _ = load("vit").main(
        ["--patch", "8", "--steps", "40", "--width", "16", "--images", "images"]
    )
    assert share == 1.0, "dark and light are told apart"
