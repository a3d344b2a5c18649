# SPDX-License-Identifier: Apache-2.0
"""`pytransformer train translate`, `translate` and `attention-map` with a model of one second."""

from __future__ import annotations

import argparse
import json
import shutil
import sys

import pytest
import torch

from pytransformer.cli import OK, USAGE, main
from pytransformer.cli.attention_map import _load
from pytransformer.training import Pair, Translator, read_metrics, read_pairs, write_pairs
from pytransformer.training.checkpoint import checkpoints, read_checkpoint
from pytransformer.training.translation import (
    TranslationPlan,
    exactness,
    new_translator,
    translate_all,
)

SMALL = ["--layers", "2", "--width", "16", "--batch", "8", "--vocabulary", "150", "--device", "cpu"]


def train(out, *more, steps=6, expect=OK):
    long = [] if steps is None else ["--steps", str(steps)]
    code = main(["train", "translate", "--out", str(out), *long, *SMALL, *more])
    assert code == expect
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, portuguese):
    """Return the options for a corpus of 80 sentences."""
    folder = tmp_path_factory.mktemp("corpus")
    portuguese.main(["--sentences", "80", "--held-out", "6", "--out", str(folder)])
    return ["--data", str(folder / "train.tsv"), "--held-out", str(folder / "held-out.tsv")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, corpus):
    return train(tmp_path_factory.mktemp("translator"), *corpus)


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


def needs_matplotlib():
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra viz)")


def test_training_writes_every_reported_file(trained, corpus, capsys):
    needs_matplotlib()
    report = json.loads((trained / "report.json").read_text())
    assert report["held_out"] == 6 and 0 <= report["exact"] <= 6 and report["plan"]["d_model"] == 16
    pairs, held_out = read_pairs(corpus[1]), read_pairs(corpus[3])
    assert len(pairs) == 80 and not {p.source for p in pairs} & {p.source for p in held_out}
    rows = read_metrics(trained / "metrics.jsonl")
    assert rows[-1]["step"] == 6 and 0 <= rows[-1]["accuracy"] <= 1
    assert (trained / "loss.png").stat().st_size > 3000
    assert [path.name for path in checkpoints(trained)] == ["checkpoint-0000006.safetensors"]


def test_html_report_shows_losses_samples_and_settings(trained, corpus, html_problems):
    text = (trained / "report.html").read_text()
    assert html_problems(text) == []
    assert "Losses" in text and "<svg" in text and "d_model" in text
    assert read_pairs(corpus[3])[0].source in text


def test_small_corpora_are_learned_exactly(portuguese):
    """Capacity and steps suffice for 24 sentences.

    The saved and loaded model translates every one too.
    """
    from pytransformer.training import Recipe
    from pytransformer.training.translation import translation_trainer

    pairs = [Pair(s.source, s.target) for s in portuguese.make_corpus(24, 0, seed=2).train]
    plan = TranslationPlan(
        layers=1, d_model=32, vocabulary=300, batch_size=24, steps=150, warmup=40, dropout=0.0
    )
    translator = new_translator(pairs, plan)
    trainer = translation_trainer(translator, pairs, pairs, plan, Recipe(steps=plan.steps))
    trainer.fit()
    result = exactness(pairs, translate_all(translator, [p.source for p in pairs]))
    assert result.right >= 23, result.wrong
    assert (
        exactness(
            pairs[:3], translate_all(translator, [p.source for p in pairs[:3]], beams=3)
        ).right
        >= 2
    )
    assert trainer.metrics.rows[-1]["accuracy"] > 0.98


def test_training_resumes_bit_for_bit(trained, corpus, tmp_path, capsys):
    """The newest checkpoint is lost; the run resumes from the previous one."""
    out = train(tmp_path / "parts", *corpus, "--save-every", "4")
    assert "try: pytransformer translate" in capsys.readouterr().out
    train(out, *corpus, expect=USAGE)
    assert "has checkpoints already: resume with --resume" in capsys.readouterr().err
    assert len(checkpoints(out)) == 2
    checkpoints(out)[-1].unlink()
    train(out, *corpus, "--resume")
    assert "going on from step 4" in capsys.readouterr().out
    parts, whole = (read_checkpoint(checkpoints(f)[-1]).tensors for f in (out, trained))
    assert parts.keys() == whole.keys() and all(
        torch.equal(parts[name], whole[name]) for name in whole
    )


def test_notes_preset_trains_by_epochs(tmp_path, corpus, capsys):
    needs_matplotlib()
    train(
        tmp_path / "out", *corpus, "--preset", "notes", "--epochs", "2", "--layers", "1", steps=None
    )
    rows = [row for row in read_metrics(tmp_path / "out" / "metrics.jsonl") if "epochs" in row]
    assert [(row["step"], row["epochs"]) for row in rows] == [(10, 1), (20, 2)], (
        "80 pairs, 8 a step"
    )
    assert all(
        {"epoch_loss", "validation_loss", "accuracy", "training_accuracy"} <= row.keys()
        for row in rows
    )
    assert rows[1]["epoch_loss"] < rows[0]["epoch_loss"]
    assert (
        "epoch 2: loss " in capsys.readouterr().out
        and (tmp_path / "out" / "epochs.png").stat().st_size > 3000
    )
    config = Translator.load(tmp_path / "out").model.config
    assert (config.head_dim, config.logits_bias, config.label_smoothing) == (128, True, 0.0)
    train(tmp_path / "both", *corpus, "--epochs", "2", expect=USAGE)
    assert "--epochs and --steps both set the length of training" in capsys.readouterr().err


def test_two_column_files_are_supported(tmp_path, capsys):
    letters = "abcdefghij"
    pairs = [
        (f"{x} {y} {z}", f"{z} {y} {x}") for x in letters for y in letters for z in letters[:2]
    ]
    write_pairs(tmp_path / "pairs.tsv", pairs)
    train(tmp_path / "out", "--data", str(tmp_path / "pairs.tsv"), steps=2)
    assert f"from {tmp_path / 'pairs.tsv'}" in capsys.readouterr().out
    write_pairs(tmp_path / "held.tsv", pairs[:4])
    train(
        tmp_path / "two",
        "--data",
        str(tmp_path / "pairs.tsv"),
        "--held-out",
        str(tmp_path / "held.tsv"),
        "--bf16",
        steps=2,
    )
    assert json.loads((tmp_path / "two" / "report.json").read_text())["held_out"] == 4


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        ("", [], "is empty: expected sentence pairs"),
        ("a\tb\nc\n", [], "line 2: expected two texts with a tab between them, got 1 column: 'c'"),
        ("a\tb\n", [], "too few sentence pairs to hold one in 20 out"),
        (None, [], "No such file"),
        ("a\tb\n", ["--width", "12"], "d_model 12 is not a multiple of num_heads 8"),
        ("a\tb\n", ["--steps", "0"], "steps must be at least 1, got 0"),
    ],
)
def test_unusable_data_is_named(tmp_path, capsys, content, more, said):
    path = tmp_path / "pairs.tsv"
    if content is not None:
        path.write_text(content)
    held_out = ["--held-out", str(path)] if more else []
    train(tmp_path / "out", "--data", str(path), *held_out, *more, expect=USAGE)
    assert said in capsys.readouterr().err
    assert not checkpoints(tmp_path / "out")


def test_translate_prints_and_plots_attention(trained, tmp_path, capsys):
    needs_matplotlib()
    picture = tmp_path / "map.svg"
    assert (
        main(
            [
                "translate",
                "hoje é sábado.",
                "--model",
                str(trained),
                "--map",
                str(picture),
                "--layer",
                "0",
            ]
        )
        == OK
    )
    printed = capsys.readouterr().out.splitlines()
    translator = Translator.load(trained)
    assert printed == [
        translator.translate(["hoje é sábado."], beams=4)[0],
        f"cross-attention: {picture}",
    ]
    assert picture.read_text().startswith("<?xml")
    assert (
        main(
            [
                "translate",
                "uma casa",
                "um gato",
                "--model",
                str(trained),
                "--beams",
                "1",
                "--head",
                "1",
            ]
        )
        == OK
    )
    assert {"attention.png", "attention-2.png"} <= {path.name for path in trained.iterdir()}
    capsys.readouterr()
    for wrong, output in [
        (["--layer", "2"], "--layer must be between 0 and 1, got 2"),
        (["--head", "8"], "between 0 and 7, got 8"),
    ]:
        assert main(["translate", "uma casa", "--model", str(trained), *wrong]) == USAGE
        assert output in capsys.readouterr().err


def test_alignment_equals_cross_attention(trained):
    translator = Translator.load(trained)
    aligned = translator.align("hoje é sábado.")
    assert aligned.source_tokens[-1] == aligned.target_tokens[-1] == "</s>"
    assert aligned.weights.shape == (2, 8, len(aligned.target_tokens), len(aligned.source_tokens))
    torch.testing.assert_close(aligned.weights.sum(-1), torch.ones(aligned.weights.shape[:3]))
    assert aligned.text == translator.translate(["hoje é sábado."])[0]
    assert aligned.weights.std() > 1e-4, "weights that are all alike would be right by accident"


def test_translate_and_attention_map_label_rows_alike(trained, tmp_path) -> None:
    """A row of cross-attention carries the token that the decoder generates from it."""
    aligned = Translator.load(trained).align("hoje é sábado.")
    inputs, texts = _load(trained)[1](
        "hoje é sábado.", argparse.Namespace(second=None, target=None)
    )
    assert texts["cross"].tokens == aligned.target_tokens
    assert texts["encoder"].tokens == aligned.source_tokens
    assert texts["decoder"].tokens[1:] == aligned.target_tokens[:-1]
    assert inputs["decoder_input_ids"].shape[1] == len(aligned.target_tokens)
    pytest.importorskip("matplotlib", reason="needs matplotlib (the extra viz)")
    command = ["attention-map", str(trained), "hoje é sábado.", "--kind", "heat", "--layer", "0"]
    assert main([*command, "--out", str(tmp_path / "map.svg")]) == 0
    assert "<!-- generates -->" in (tmp_path / "map.svg").read_text()


def test_translate_names_missing_files(copy, tmp_path, capsys, monkeypatch):
    assert main(["translate", "casa", "--model", str(tmp_path / "none")]) == USAGE
    assert "train one with `pytransformer train translate --data FILE`" in capsys.readouterr().err
    assert main(["translate", " ", "--model", str(copy)]) == USAGE
    assert "an empty sentence" in capsys.readouterr().err
    long = " ".join(["casa"] * 300)
    assert main(["translate", long, "--model", str(copy)]) == USAGE
    assert "is longer than the model's 256 positions" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "matplotlib", None)
        assert main(["translate", "casa", "--model", str(copy)]) == OK
        assert "no picture: drawing needs matplotlib" in capsys.readouterr().out


def test_tokenizer_of_another_model_is_refused(copy, tmp_path, capsys):
    for name, other, output in [
        ("source", ["zz zz zz"], "tokens, and the model was trained with"),
        ("target", None, "another tokenizer"),
    ]:
        path = copy / f"{name}.tokenizer.json"
        kept = path.read_text()
        if other is None:  # equal size, but two tokens are swapped
            facts = json.loads(kept)
            vocabulary = facts["model"]["vocab"]
            first, second = list(vocabulary)[20:22]
            vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
            path.write_text(json.dumps(facts))
        else:
            from pytransformer.training import Tokenizer

            Tokenizer.train(other, 20).save(path)
        assert main(["translate", "casa", "--model", str(copy)]) == USAGE
        assert output in capsys.readouterr().err
        path.write_text(kept)
    assert main(["translate", "casa", "--no-map", "--model", str(copy)]) == OK


@pytest.mark.parametrize("which", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("kind", ["heat", "lines", "gallery", "distance", "positions"])
def test_attention_map_plots_a_translator(trained, tmp_path, kind, which):
    needs_matplotlib()
    out = tmp_path / "map.png"
    text = [] if kind == "positions" else ["hoje é sábado."]
    assert (
        main(
            [
                "attention-map",
                str(trained),
                *text,
                "--kind",
                kind,
                "--which",
                which,
                "--out",
                str(out),
            ]
        )
        == OK
    )
    assert out.stat().st_size > 3000


def test_attention_map_errors_name_the_argument(trained, tmp_path, capsys):
    for arguments, output in [
        ([str(trained)], "--kind gallery needs a text"),
        ([str(tmp_path / "none"), "x"], "is not a folder"),
        ([str(tmp_path), "x"], "has no config.json"),
        (
            [str(trained), "casa", "--kind", "heat", "--layer", "9"],
            "layer must be between 0 and 1, got 9",
        ),
        ([str(trained), "casa", "--kind", "heat", "--head", "9"], "heads must be between -8 and 7"),
        ([str(trained), "casa", "--out", "map.pdf"], "ends with .png or .svg"),
    ]:
        assert main(["attention-map", *arguments]) == USAGE
        assert output in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.unpoisoned  # guard memory of 1500 steps would need 25 GB
def test_demo_translates_95_percent_exactly(tmp_path, portuguese):
    """It runs the command of docs/training.md: 1500 steps, minutes."""
    portuguese.main(["--out", str(tmp_path)])
    data = ["--data", str(tmp_path / "train.tsv"), "--held-out", str(tmp_path / "held-out.tsv")]
    threads = torch.get_num_threads()
    try:
        assert (
            main(
                [
                    "train",
                    "translate",
                    *data,
                    "--out",
                    str(tmp_path),
                    "--device",
                    "cpu",
                    "--threads",
                    "2",
                ]
            )
            == OK
        )
    finally:
        torch.set_num_threads(threads)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["held_out"] == 500 and report["exact"] >= 475
