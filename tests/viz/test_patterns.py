# SPDX-License-Identifier: Apache-2.0
"""Attention patterns, identified by score in constructed heads and plotted by the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pytransformer import viz
from pytransformer.cli import OK, USAGE, main
from pytransformer.models import BERT, GPT, BERTConfig, GPTConfig

WORDS = ["[CLS]", "the", "cat", "saw", "the", "dog", "[SEP]", "the", "dog", "ran", "[SEP]"]
SPECIAL = torch.tensor([word.startswith("[") for word in WORDS])
SENTENCES = torch.tensor([0] * 7 + [1] * 4)
TEXT = viz.Text(WORDS, SENTENCES, SPECIAL)
MADE = {
    "next token": (1, 2),
    "previous token": (0, 1),
    "same word elsewhere": (2, 0),
    "same sentence": (2, 3),
    "null: special tokens": (0, 0),
}


def made() -> torch.Tensor:
    """Return (3 layers, 4 heads): uniform, except heads with nine tenths on their pattern."""
    n = len(WORDS)
    weights = torch.full((3, 4, n, n), 1.0 / n)
    by_hand = {
        "next token": lambda i, j: j == i + 1,
        "previous token": lambda i, j: j == i - 1,
        "same word elsewhere": lambda i, j: i != j and WORDS[i] == WORDS[j],
        "same sentence": lambda i, j: (i < 7) == (j < 7) and WORDS[j][0] != "[",
        "null: special tokens": lambda i, j: WORDS[j][0] == "[",
    }  # fmt: skip
    for name, (layer, head) in MADE.items():
        for i in range(n):
            keys = [j for j in range(n) if by_hand[name](i, j)]
            if keys:
                weights[layer, head, i] = 0.1 / n
                weights[layer, head, i, keys] += 0.9 / len(keys)
    return weights


def test_each_pattern_is_identified_in_its_head() -> None:
    found = {f.pattern: f for f in viz.find_patterns(made(), TEXT)}
    assert {name: (f.layer, f.head) for name, f in found.items()} == MADE
    assert all(0.9 < f.score < 1.0 for f in found.values())
    scores = viz.pattern_scores(made(), TEXT)["next token"]
    assert scores.shape == (3, 4) and scores[0, 2].item() == pytest.approx(1 / len(WORDS))


def test_patterns_missing_in_a_text_are_left_out() -> None:
    text = viz.Text(["a", "b", "c"], torch.zeros(3), torch.tensor([True, False, False]))
    assert "same word elsewhere" not in viz.pattern_scores(torch.full((1, 1, 3, 3), 1 / 3), text)
    with pytest.raises(
        ValueError, match=r"weights must be \(layers, heads, 3, 3\), got \(1, 1, 3, 4\)"
    ):
        viz.pattern_scores(torch.zeros(1, 1, 3, 4), text)


@pytest.fixture
def tokenizer() -> object:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {word: n for n, word in enumerate(dict.fromkeys([*WORDS, "[UNK]"]))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    pairs = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=pairs
    )
    return made


def test_command_line_plots_two_sentences(
    tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder, out = tmp_path / "bert", tmp_path / "map.svg"
    BERT(
        BERTConfig(vocab_size=20, d_model=16, num_layers=2, num_heads=2, hidden=16, max_length=16)
    ).eval().save(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    pair = ["the cat saw the dog", "--second", "the dog ran"]
    assert (
        main(["attention-map", str(folder), *pair, "--kind", "patterns", "--out", str(out)]) == OK
    )
    drawn = out.read_text()
    assert all(
        f"{name}" in drawn
        for name in ("next token", "same word elsewhere", "same sentence", "null: special tokens")
    )
    assert main(["attention-map", str(folder), *pair, "--kind", "gallery", "--out", str(out)]) == OK
    gpt = tmp_path / "gpt"
    GPT(GPTConfig(vocab_size=20, d_model=16, num_layers=1, num_heads=2, max_length=16)).eval().save(
        gpt
    )
    tokenizer.post_processor = None
    tokenizer.save(str(gpt / "tokenizer.json"))
    assert (
        main(["attention-map", str(gpt), "the cat saw", "--kind", "patterns", "--out", str(out)])
        == OK
    )
    assert main(["attention-map", str(gpt), *pair]) == USAGE
    assert (
        "--second is for models that read two sentences, as BERT does; this is a GPT"
        in capsys.readouterr().err
    )
