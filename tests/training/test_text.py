# SPDX-License-Identifier: Apache-2.0
"""Files of texts and images, tokenizers, batches, and the errors for bad ones."""

from __future__ import annotations

import functools
import json
import operator
import sys

import pytest
import torch

from pytransformer.training import (
    IGNORED,
    Batches,
    ImageFolder,
    Pair,
    Tokenizer,
    causal_collate,
    check_tokenizer,
    collate_images,
    pad,
    read_pairs,
    read_texts,
    split_pairs,
    translation_collate,
    write_pairs,
)

TEXTS = ["o gato preto dorme.", "duas casas, em 21 de março?", "ela não vê o pão."] * 3


def test_pairs_round_trip(tmp_path):
    pairs = [Pair("um gato", "a cat"), Pair("não", "no")]
    write_pairs(tmp_path / "pairs.tsv", pairs)
    assert read_pairs(tmp_path / "pairs.tsv") == pairs
    (tmp_path / "windows.tsv").write_bytes("\ufeffum\tone\r\n\r\n dois \ttwo".encode())
    assert read_pairs(tmp_path / "windows.tsv") == [("um", "one"), ("dois", "two")]
    with pytest.raises(ValueError, match=r"without tabs and line breaks, got \('a\\tb', 'c'\)"):
        write_pairs(tmp_path / "wrong.tsv", [("a\tb", "c")])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"um\tone\n\ndois two\n",
            r"line 3: expected two texts with a tab between them, got 1 column: 'dois two'",
        ),
        (b"a\tb\tc\n", "line 1: .* got 3 columns"),
        (b"um\tone\ndois\t \n", "line 2: .* got an empty column"),
        (b"", "is empty: expected sentence pairs"),
        (b"\n \n", "is empty"),
        (b"caf\xe9\tcoffee\n", "is not UTF-8 text"),
    ],
)
def test_malformed_pairs_are_named_by_their_line(tmp_path, content, said):
    (tmp_path / "pairs.tsv").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_pairs(tmp_path / "pairs.tsv")


def test_texts_are_read(tmp_path):
    (tmp_path / "texts").write_text("one\n\n two \n")
    assert read_texts(tmp_path / "texts") == ["one", "two"]
    (tmp_path / "texts").write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        read_texts(tmp_path / "texts")


def test_sources_are_on_one_side_of_a_split():
    pairs = [Pair(f"s{i % 300}", f"t{i}") for i in range(600)]
    train, held_out = split_pairs(pairs, every=10)
    assert len(train) + len(held_out) == 600 and 20 < len(held_out) < 120
    assert not {p.source for p in train} & {p.source for p in held_out}


def test_tokenizers_round_trip(tmp_path):
    tokenizer = Tokenizer.train(TEXTS, 90, special=["<sep>"])
    assert len(tokenizer) <= 90
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_all(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert [
        tokenizer.pad_id,
        tokenizer.unknown_id,
        tokenizer.start_id,
        tokenizer.end_id,
        tokenizer.mask_id,
    ] == list(range(5))
    assert all(
        t.strip("▁").isdigit() or not any(c.isdigit() for c in t)
        for t in tokenizer.tokens(tokenizer.encode("em21em"))
    )
    assert tokenizer.id("<sep>") == 5 and tokenizer.encode("a<sep>o").count(5) == 1
    assert tokenizer.encode("ж")[-1] == tokenizer.unknown_id
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert (
        again.encode_all(TEXTS) == tokenizer.encode_all(TEXTS)
        and again.fingerprint == tokenizer.fingerprint
    )


def test_tokenizers_must_match_their_model(tmp_path):
    tokenizer, other = Tokenizer.train(TEXTS, 60), Tokenizer.train([*TEXTS, "zebra zebra"], 60)
    check_tokenizer("source", tokenizer, 60, tokenizer.fingerprint)
    with pytest.raises(
        ValueError, match="source: the tokenizer has 60 tokens, and the model was trained with 61"
    ):
        check_tokenizer("source", tokenizer, 61)
    with pytest.raises(ValueError, match="source: another tokenizer"):
        check_tokenizer("source", other, 60, tokenizer.fingerprint)
    with pytest.raises(ValueError, match="no token '<sep>' among 60"):
        tokenizer.id("<sep>")
    (tmp_path / "not.json").write_text(json.dumps({"version": "1.0"}))
    with pytest.raises(ValueError, match=r"not\.json is not a tokenizer"):
        Tokenizer.load(tmp_path / "not.json")


def test_batches_contain_each_example_once_by_length():
    lengths = [(7 * i) % 31 + 1 for i in range(640)]
    batches = Batches(
        range(640), 16, lambda examples, g: {"i": torch.tensor(examples)}, lengths=lengths, seed=3
    )
    seen = [batch["i"].tolist() for batch in batches.epoch(0)]
    assert (
        sorted(functools.reduce(operator.iadd, seen, [])) == list(range(640))
        and len(seen) == len(batches) == 40
    )
    assert max(max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in seen) <= 2
    assert (
        seen
        == [b["i"].tolist() for b in batches.epoch(0)]
        != [b["i"].tolist() for b in batches.epoch(1)]
    )
    assert [b["i"].tolist() for b in batches.epoch(0, start=7)] == seen[7:]
    halves = [
        [b["i"].tolist() for b in batches.epoch(0, start=1, rank=rank, world=2)] for rank in (0, 1)
    ]
    assert halves == [seen[1:39:2], seen[2:40:2]], (
        "each process takes its own, and as many as the other"
    )


def test_random_collation_depends_on_the_position_only():
    batches = Batches(range(64), 8, lambda examples, g: {"r": torch.rand(2, generator=g)}, seed=1)
    drawn = [b["r"] for b in batches.epoch(2)]
    assert torch.equal(next(batches.epoch(2, start=5))["r"], drawn[5])
    assert len({tuple(r.tolist()) for r in drawn}) == 8


def test_invalid_batches_are_refused():
    collate = lambda examples, generator: {}
    for arguments, output in [
        ((range(4), 0), "at least 1, got 0"),
        (([], 4), "no example"),
        ((range(4), 2), "each of 4 .* got 1"),
    ]:
        with pytest.raises(ValueError, match=output):
            Batches(*arguments, collate, lengths=[1] if "each" in output else None)
    assert len(Batches(range(4), 99, collate)) == 1


def test_translations_are_collated():
    batch = translation_collate(0, 2, 3)([([7, 8], [9]), ([6], [4, 5])], torch.Generator())
    assert batch["input_ids"].tolist() == [[7, 8, 3], [6, 3, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["decoder_input_ids"].tolist() == [[2, 9, 0], [2, 4, 5]]
    assert batch["labels"].tolist() == [[9, 3, IGNORED], [4, 5, 3]]


def test_causal_sequences_have_labels_after_the_delimiter():
    batch = causal_collate(0, delimiter=5)([[7, 8, 5, 9, 3], [6, 5, 4]], torch.Generator())
    assert batch["input_ids"].tolist() == [[7, 8, 5, 9, 3], [6, 5, 4, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [
        [IGNORED, IGNORED, IGNORED, 9, 3],
        [IGNORED, IGNORED, 4, IGNORED, IGNORED],
    ]
    assert causal_collate(0)([[7, 8, 9]], torch.Generator())["labels"].tolist() == [[7, 8, 9]]
    assert pad([[1], [2, 3]], 0, left=True).tolist() == [[0, 1], [2, 3]]


def test_image_folders_are_read(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="needs Pillow (the extra viz)")
    for name, colour in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        (tmp_path / name).mkdir()
        image.new("RGB", (20, 10), colour).save(tmp_path / name / "one.png")
    folder = ImageFolder(tmp_path, 8)
    assert folder.classes == ["blue", "red"] and len(folder) == 2
    batch = collate_images([folder[0], folder[1]])
    assert batch["pixel_values"].shape == (2, 3, 8, 8) and batch["labels"].tolist() == [0, 1]
    assert batch["pixel_values"][0, :, 0, 0].tolist() == [-1, -1, 1]
    assert ImageFolder(tmp_path, 4, channels=1)[0][0].shape == (1, 4, 4)
    (tmp_path / "blue" / "one.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"one\.png cannot be read as an image"):
        folder[0]
    with pytest.raises(ValueError, match="channels must be 1 or 3, got 2"):
        ImageFolder(tmp_path, 8, channels=2)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no image in"):
        ImageFolder(tmp_path / "none", 8)


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        ("tokenizers", "models", lambda folder: Tokenizer.train(TEXTS, 50)),
        ("PIL", "viz", lambda folder: ImageFolder(folder, 8)),
    ],
)
def test_missing_libraries_are_named_with_their_extra(monkeypatch, tmp_path, module, extra, use):
    for name in [n for n in sys.modules if n.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # as if not installed
    with pytest.raises(
        ImportError, match=rf"needs {module}, .*: pip install 'pytransformer-kernels\[{extra}\]'"
    ):
        use(tmp_path)
