# SPDX-License-Identifier: Apache-2.0
"""T5's span corruption and mixtures, SpanBERT's objective, baselines, labeled texts."""

from __future__ import annotations

import collections
import itertools
import math

import pytest
import torch

from pytransformer.models import BERT, BERTConfig
from pytransformer.training import IGNORED, Vocabulary, mask_spans, masked_collate
from pytransformer.training.denoising import (
    TextToText,
    corrupt_spans,
    mixed,
    sampling_rates,
    text_to_text_collate,
)
from pytransformer.training.quality import from_memory, most_alike
from pytransformer.training.text import Pair
from support.models import CURVE
from training_tasks.data.baselines import (
    Bigrams,
    MostFrequent,
    label_scores,
    majority,
    share_right,
)
from training_tasks.data.cleaning import sentence_key
from training_tasks.data.labelled import (
    Labelled,
    catalogue_texts,
    halves,
    read_labelled,
    split_texts,
)

SENTINELS = list(range(100, 120))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_inputs_and_targets_reassemble_the_text():
    chance = generator()
    for length in [2, 3, 4, 7, 20, 50, 61]:
        text = list(range(length))
        read, output = corrupt_spans(text, SENTINELS, chance)
        parts: dict[int, list[int]] = {}
        for token in output:
            if token >= 100:
                parts[token] = []
            else:
                parts[list(parts)[-1]].append(token)
        used = [token for token in read if token >= 100]
        assert (
            list(parts) == SENTINELS[: len(used) + 1] == [*used, SENTINELS[len(used)]]
            and parts[output[-1]] == []
        )
        assert [t for token in read for t in (parts[token] if token >= 100 else [token])] == text
        hidden = sum(map(len, parts.values()))
        assert hidden == max(1, round(0.15 * length)) and all(parts[token] for token in used)
        assert len(used) == max(1, round(hidden / 3))
        assert not any(a >= 100 and b >= 100 for a, b in itertools.pairwise(read)), (
            "a token is kept between two spans"
        )


def test_spans_are_uniform():
    """6 of 40 tokens are removed in 2 spans: lengths 1 to 5 are equally likely, the mean is 3.

    Every token is removed in some draw.
    """
    lengths, gone, chance = collections.Counter(), collections.Counter(), generator(1)
    for _ in range(4000):
        read, output = corrupt_spans(list(range(40)), SENTINELS, chance)
        gone.update(set(range(40)) - set(read))
        lengths[output.index(101) - 1] += 1
    assert set(lengths) == {1, 2, 3, 4, 5} and all(
        abs(n / 4000 - 0.2) < 0.03 for n in lengths.values()
    )
    assert (
        all(abs(gone[i] / 4000 - 0.15) < 0.05 for i in range(3, 37))
        and min(gone[0], gone[39]) > 100
    )
    with pytest.raises(ValueError, match="2 spans want 3 sentinels, got 2"):
        corrupt_spans(list(range(40)), SENTINELS[:2], chance)
    with pytest.raises(ValueError, match="at least two tokens, got 1"):
        corrupt_spans([1], SENTINELS, chance)


def test_tasks_share_a_batch():
    collate = text_to_text_collate(0, 1, 2, SENTINELS)
    examples = [TextToText([5, 6, 7], [8, 9]), TextToText([50, 51, *range(10, 30)], None, 2)]
    batch = collate(examples, generator())
    assert batch["input_ids"][0, :4].tolist() == [5, 6, 7, 2] and batch["labels"][
        0, :4
    ].tolist() == [8, 9, 2, IGNORED]
    assert batch["input_ids"][1, :2].tolist() == [50, 51], "a prefix stays"
    assert 100 in batch["input_ids"][1].tolist() and batch["labels"][1, 0] == 100
    assert not torch.equal(collate(examples, generator(5))["input_ids"], batch["input_ids"]), (
        "left out anew each time"
    )


def test_sampling_depends_on_size_and_temperature():
    sizes = {"large": 1600, "small": 100}
    assert sampling_rates(sizes) == pytest.approx({"large": 16 / 17, "small": 1 / 17})
    assert sampling_rates(sizes, 2) == pytest.approx({"large": 0.8, "small": 0.2})
    assert sampling_rates(sizes, 1, limit=300) == pytest.approx({"large": 0.75, "small": 0.25})
    tasks = {name: [(name, i) for i in range(size)] for name, size in sizes.items()}
    found = collections.Counter(mixed(tasks, 2))
    assert len(found) == 1700 and all(
        found["large", i] == 1 and found["small", i % 100] == 4 for i in range(1600)
    )
    with pytest.raises(ValueError, match=r"a temperature and sizes of at least 1, got 0.5"):
        sampling_rates(sizes, 0.5)


# ---- SpanBERT's objective, from the labels and the weights alone


def gelu_norm(state, name, x):
    x = x @ state[f"{name}.dense.weight"].T + state[f"{name}.dense.bias"]
    x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-12).sqrt()
    return x * state[f"{name}.norm.weight"] + state[f"{name}.norm.bias"]


def test_spanbert_objective_equals_its_definition():
    """L = mean over masked x_i of -log p(x_i | h_i) - log p(x_i | h_{s-1}, h_{e+1}, P_{i-s+1}).

    Joshi et al. 2020, equations 1 to 3; spans are the runs of labels, which never touch.
    """
    torch.manual_seed(0)
    config = BERTConfig(vocab_size=60, d_model=32, num_layers=2, num_heads=2, hidden=64,
        max_length=64, dropout=0.0,
                        attention_dropout=0.0, heads=("mlm", "boundary"))  # fmt: skip
    model = BERT(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn_like(parameter)
            )  # otherwise positions are equal and biases zero
    vocabulary = Vocabulary(60, 4, frozenset(range(5)))
    texts = [
        [2, *torch.randint(5, 60, (n,), generator=generator(n)).tolist(), 3]
        for n in (12, 40, 25, 60)
    ]
    batch = masked_collate(0, vocabulary, mask_spans)(texts, generator(3))
    out = model(**batch)
    state = model.state_dict()
    embedding, losses, lengths = state["embedding.weight"], [], []
    for row, labels in enumerate(batch["labels"].tolist()):
        asked = [i for i, label in enumerate(labels) if label != IGNORED]
        spans = [
            [i for _, i in run]
            for _, run in itertools.groupby(enumerate(asked), lambda pair: pair[1] - pair[0])
        ]
        lengths += [len(span) for span in spans]
        for i, span in [(i, run) for run in spans for i in run]:
            hidden = out.last_hidden_state[row]
            place = state["boundary.places.weight"][i - span[0]]
            around = torch.cat([hidden[span[0] - 1], hidden[span[-1] + 1], place])
            token = gelu_norm(state, "mlm.transform", hidden[i])
            bounds = gelu_norm(state, "boundary.second", gelu_norm(state, "boundary.first", around))
            for name, output in (("mlm", token), ("boundary", bounds)):
                logits = output @ embedding.T + state[f"{name}.output.bias"]
                losses.append(logits.logsumexp(-1) - logits[labels[i]])
    assert max(lengths) >= 3 and len(lengths) >= 5
    torch.testing.assert_close(out.loss, 2 * torch.stack(losses).mean(), rtol=CURVE, atol=0)


# ---- baselines


def test_bigrams_have_witten_bell_smoothing():
    model = Bigrams([[0, 1, 2], [0, 1, 1]], vocabulary=5)
    p = {
        1: (3 + 2 / 5) / (4 + 2),
        2: (1 + 2 / 5) / (4 + 2),
        3: (2 / 5) / (4 + 2),
    }  # two distinct tokens, four in all
    assert model.probability(4, 3) == pytest.approx(p[3]), "nothing is known of what follows 4"
    assert model.probability(0, 1) == pytest.approx((2 + 1 * p[1]) / (2 + 1))
    assert model.probability(1, 2) == pytest.approx((1 + 2 * p[2]) / (2 + 2))
    for a in range(5):
        assert sum(model.probability(a, b) for b in range(5)) == pytest.approx(1)
    assert model.loss([[0, 1, 2]]) == pytest.approx(
        -(math.log(model.probability(0, 1)) + math.log(model.probability(1, 2))) / 2
    )


def test_most_frequent_answers_are_the_baseline():
    known = MostFrequent([("a", 1), ("a", 2), ("a", 2), ("b", 1), ("c", 1), ("d", 1)])
    assert [known(key) for key in "abz"] == [2, 1, 1] and majority("abbc") == "b"
    assert share_right([1, 2, 3], [1, 0, 3]) == pytest.approx(2 / 3)


def test_bag_of_words_classifies():
    pytest.importorskip("sklearn", reason="needs scikit-learn (the extra corpora)")
    scores = label_scores(
        ["red apple", "red cherry", "blue sky", "blue sea"],
        ["fruit", "fruit", "view", "view"],
        ["a red sea", "blue"],
    )
    assert all(
        sum(s.values()) == pytest.approx(1) and s.keys() == {"fruit", "view"} for s in scores
    )
    assert scores[1]["view"] > 0.6 > scores[1]["fruit"]


def test_missing_scikit_learn_raises_with_its_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    with pytest.raises(
        ImportError, match=r"bag of words, needs sklearn, .*pytransformer-kernels\[corpora\]"
    ):
        label_scores(["a"], ["b"], ["c"])


def test_most_similar_texts_come_first():
    memory = ["open the file", "close the file", "a red house", "the"]
    assert most_alike(memory, ["open file", "zzz", "the"], 2) == [[0, 1], [], [3, 0]]
    assert most_alike(memory, ["open file", "zzz", "the"], 2, look_at=2) == [
        [0],
        [],
        [3, 0],
    ], "open meets one, file two more"
    assert from_memory([Pair(m, m.upper()) for m in memory], ["close file", "zzz"]) == [
        "CLOSE THE FILE",
        "zzz",
    ]


# ---- labeled texts


def test_catalogues_give_labeled_texts(install, mo):
    messages = {
        "Save %(name)s now": "Salvar %(name)s",
        "Save %s now": "x %s",
        "Open the <b>file</b>": "Abrir",
        "42": "43",
    }
    install("onepackage", {"l/pt/LC_MESSAGES/x.mo": mo(messages)})
    install(
        "twopackage",
        {"l/de/LC_MESSAGES/x.mo": mo({"Save {0} now!": "Sichern {0}", "Close it": "Zu"})},
    )
    found = catalogue_texts(["onepackage", "twopackage"])
    assert set(found.texts) == {Labelled("Save {0} now", "onepackage"),
        Labelled("Open the file", "onepackage"),
                                Labelled("Close it", "twopackage")}  # fmt: skip
    assert found.left_out == {"a duplicate": 2, "no word": 1}
    assert found.described[0] == "onepackage 1.2, licence MIT: 2 texts"
    with pytest.raises(ValueError, match="no such package is installed"):
        catalogue_texts(["nosuchpackage"])


def test_files_have_texts_with_and_without_labels(tmp_path):
    path = tmp_path / "texts"
    path.write_text("fruit\tA red apple.\nNo label here.\n\nfruit\tA red apple.\n")
    assert read_labelled(path).texts == [
        Labelled("A red apple.", "fruit"),
        Labelled("No label here."),
    ]


def test_texts_that_differ_in_digits_are_on_one_side():
    texts = [
        Labelled(f"{word} number {n}")
        for word in map(chr, range(ord("a"), ord("z") + 1))
        for n in range(10)
    ]
    texts += [
        Labelled(f"{a}{b}") for a, b in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=2)
    ]
    train, held_out = split_texts(texts, seed=1)
    assert len(train) + len(held_out) == len(texts) and 0.01 < len(held_out) / len(texts) < 0.12
    assert not {sentence_key(t.text) for t in train} & {sentence_key(t.text) for t in held_out}
    assert split_texts(texts, seed=1)[1] == held_out != split_texts(texts, seed=2)[1]


def test_texts_are_halved_at_sentences_or_words():
    assert halves("Too short to cut") == ["Too short to cut"]
    assert halves("It works. Press any key to go on.") == ["It works.", "Press any key to go on."]
    assert halves("one two three four five six") == ["one two three", "four five six"]
