# SPDX-License-Identifier: Apache-2.0
"""`examples/train.py bert|spanbert|gpt|t5|moe` on small corpora: learning, resuming, errors.

Each task learns in seconds and resumes with equal figures.
"""

from __future__ import annotations

import collections
import itertools
import json
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from train import main

from pytransformer.cli import OK, USAGE
from pytransformer.training import write_pairs
from pytransformer.training.checkpoint import checkpoints

THINGS = {  # label: things and their actions
    "weather": ("rain snow wind fog storm hail", "falls melts blows lifts turns"),
    "food": ("bread soup rice fish cake salad", "bakes boils steams fries cools"),
    "travel": ("train ship car bike plane tram", "leaves sails drives rolls waits"),
}
PLACES = "Lima Oslo Rome Bern Kyiv Cairo Delhi Quito".split()
COLOURS = {"red": "vermelho", "green": "verde", "white": "branco", "black": "preto", "blue": "azul"}
NOUNS = {
    "house": "casa",
    "dog": "cachorro",
    "book": "livro",
    "table": "mesa",
    "bird": "passaro",
    "door": "porta",
}
SMALL = [
    "--width",
    "32",
    "--layers",
    "2",
    "--batch",
    "32",
    "--vocabulary",
    "200",
    "--device",
    "cpu",
]
STEPS = {
    "bert": {
        "--steps": 60,
        "--classify-steps": 40,
        "--answer-steps": 60,
        "--tag-steps": 25,
        "--rate": 0.01,
        "--fine-rate": 0.005,
    },
    "spanbert": {"--steps": 60, "--answer-steps": 20, "--rate": 0.01},
    "gpt": {"--steps": 90, "--rate": 0.01},
    "t5": {"--steps": 150, "--rate": 0.03},
    "moe": {"--steps": 60, "--rate": 0.01},
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Write (texts with labels, pairs), 500 and more of each."""
    folder, chance = tmp_path_factory.mktemp("corpora"), random.Random(0)
    lines = []
    for label, (things, acts) in THINGS.items():
        everything = list(itertools.product(things.split(), acts.split(), PLACES))
        for thing, act, place in chance.sample(everything, 200):
            lines.append(f"{label}\tThe {thing} {act} in {place}, then the {thing} stops.")
    chance.shuffle(lines)
    (folder / "texts.tsv").write_text("\n".join(lines) + "\n")
    things = list(itertools.product(COLOURS, NOUNS))
    pairs = [
        (
            f"the {a} {b} and the {c} {d}",
            f"a {NOUNS[b]} {COLOURS[a]} e a {NOUNS[d]} {COLOURS[c]}",
        )
        for (a, b), (c, d) in chance.sample(list(itertools.product(things, things)), 600)
    ]
    write_pairs(folder / "pairs.tsv", pairs)
    return folder / "texts.tsv", folder / "pairs.tsv"


def train(task, data, out, *more, expect=OK, **changed):
    steps = [str(part) for option in (STEPS[task] | changed).items() for part in option]
    assert main([task, "--data", str(data), "--out", str(out), *SMALL, *steps, *more]) == expect
    return out


def figures(out):
    return {
        figure["what"]: figure
        for figure in json.loads((out / "report.json").read_text())["figures"]
    }


@pytest.fixture(scope="module")
def trained(corpora, tmp_path_factory):
    """Return the folder of a task's run, trained once."""
    made = {}

    def folder(task):
        if task not in made:
            data = corpora[task in ("gpt", "t5")]
            made[task] = train(
                task, data, tmp_path_factory.mktemp(task) / "out", "--save-every", "15"
            )
        return made[task]

    return folder


@pytest.mark.unpoisoned  # hundreds of steps
def test_bert_learns_five_tasks(trained):
    found = figures(trained("bert"))
    masked, following = found["masked tokens"], found["next sentence or random"]
    assert masked["value"] > 0.4 > 20 * masked["chance"] and masked["of"] >= 30
    assert (
        following["chance"] == 0.5 and following["of"] == found["a text's label, from [CLS]"]["of"]
    )
    label, tags = found["a text's label, from [CLS]"], found["case of a word read in lower case"]
    assert label["value"] >= 0.9 and label["chance"] < 0.7
    assert tags["value"] > tags["chance"] + 0.1
    ends = found["start and end of the text with a label, of 3"]
    assert ends["value"] > 2 * 0.01, "both ends of about 30 places each"
    for stage in ("pretrain", "classification", "answer", "tagging"):
        assert (trained("bert") / stage / "model.safetensors").exists(), stage


@pytest.mark.unpoisoned  # hundreds of steps
def test_spanbert_learns_tokens_and_span_bounds(trained):
    found = figures(trained("spanbert"))
    for what in ("tokens of masked spans", "the same, from the spans' bounds alone"):
        assert found[what]["value"] > 0.25 > 20 * found[what]["chance"], what


@pytest.mark.unpoisoned  # hundreds of steps
def test_gpt_learns_next_tokens_and_answers_with_and_without_examples(trained):
    found = figures(trained("gpt"))
    loss = found["next token, nats"]
    assert loss["value"] < 0.4 * loss["chance"] and loss["baseline"] < loss["chance"]
    asked = [found[f"the translation of 4, {shots} examples before it"] for shots in (0, 1, 4)]
    assert all(f["chance"] == 0.25 and f["of"] == asked[0]["of"] > 20 for f in asked)


@pytest.mark.unpoisoned  # hundreds of steps
def test_t5_learns_its_tasks_together(trained):
    report = json.loads((trained("t5") / "report.json").read_text())
    filled = figures(trained("t5"))["fill in: tokens of left-out spans"]
    assert filled["value"] > 0.15 > 20 * filled["chance"]
    assert report["rates"] == pytest.approx(
        dict.fromkeys(["translate source to target:", "restore case:", "fill in:"], 1 / 3)
    )
    assert report["stages"]["t5"]["translate source to target accuracy"] > 0.4


@pytest.mark.unpoisoned  # hundreds of steps
def test_experts_cost_as_much_per_token_as_a_dense_model(trained):
    report = json.loads((trained("moe") / "report.json").read_text())
    for what in ("the dense model", "with experts"):
        figure = figures(trained("moe"))[f"next token, nats: {what}"]
        assert figure["value"] < 0.55 * figure["chance"], what
    (total, active), (dense, same) = report["parameters"]["experts"], report["parameters"]["dense"]
    assert dense == same and total > 2 * dense and active - dense == 32 * 8, (
        "the router alone comes on top"
    )
    (mixture,) = report["experts"]
    assert sum(mixture["shares"]) == pytest.approx(1, abs=1e-3) and max(mixture["shares"]) < 0.5
    assert 0 <= mixture["dropped"] < 0.5


@pytest.mark.unpoisoned  # hundreds of steps
@pytest.mark.parametrize("task", STEPS)
def test_interrupted_runs_have_the_same_figures(task, trained, corpora, tmp_path):
    out = shutil.copytree(trained(task), tmp_path / "copy")
    last = list(json.loads((out / "report.json").read_text())["stages"])[-1]
    checkpoints(out / last)[-1].unlink()
    train(task, corpora[task in ("gpt", "t5")], out, "--save-every", "15", "--resume")
    assert figures(out) == figures(trained(task))


@pytest.mark.parametrize("task", STEPS)
def test_invalid_options_raise_with_a_hint(task, corpora, tmp_path, capsys):
    pairs = task in ("gpt", "t5")
    few = tmp_path / "few.tsv"
    few.write_text("a\tb\n" * 3)
    for data, more, output in [
        (
            few,
            [],
            "too few sentence pairs to hold one in 20 out" if pairs else "too few to hold 20 out",
        ),
        (tmp_path / "none.tsv", [], "No such file"),
        ("gettext:", [], "--data gettext: names no package; expected gettext:PACKAGE"),
        ("gettext:nosuchpackage", [], "no such package is installed; pip install nosuchpackage"),
        (corpora[pairs], ["--steps", "0"], "steps must be at least 1, got 0"),
        (corpora[pairs], ["--threads", "0"], "--threads must be at least 1, got 0"),
        *(
            [(corpora[1], ["--from", "pt"], "choose among the languages of gettext:PACKAGE")]
            if pairs
            else []
        ),
        *(
            [
                (
                    corpora[1],
                    ["--temperature", "0.5"],
                    "expected a temperature and sizes of at least 1",
                )
            ]
            if task == "t5"
            else []
        ),
        *(
            [(corpora[0], ["--tag-steps", "0"], "--tag-steps must be at least 1, got 0")]
            if task == "bert"
            else []
        ),
        *(
            [(corpora[0], ["--layers", "1"], "--layers must be at least 2, got 1")]
            if task == "moe"
            else []
        ),
        *(
            [(corpora[0], ["--choices", "9"], "choices must be between 1 and 8 experts")]
            if task == "moe"
            else []
        ),
    ]:
        train(task, data, tmp_path / "out", *more, expect=USAGE)
        assert output in capsys.readouterr().err
        assert not list((tmp_path / "out").glob("**/checkpoint*"))


@pytest.mark.unpoisoned  # hundreds of steps
def test_unlabeled_texts_skip_tasks_with_labels(corpora, tmp_path, capsys):
    plain = tmp_path / "plain.txt"
    plain.write_text(
        "".join(line.partition("\t")[2] + "\n" for line in corpora[0].read_text().splitlines())
    )
    out = train(
        "bert", plain, tmp_path / "out", **{name: 2 for name in STEPS["bert"] if "steps" in name}
    )
    output = capsys.readouterr().out
    assert (
        "classification is left out: " in output
        and "answer is left out: " in output
        and "a label and a tab before each" in output
    )
    assert len(figures(out)) == 3


def test_gettext_packages_are_labels(install, mo, tmp_path):
    """T5 then has one more task."""
    chance = random.Random(1)
    for name, label in (("onepackage", "weather"), ("twopackage", "food")):
        things, acts = (words.split() for words in THINGS[label])
        texts = [
            f"The {t} {a} in {p}."
            for t, a, p in chance.sample(list(itertools.product(things, acts, PLACES)), 200)
        ]
        install(
            name, {"locale/pt/LC_MESSAGES/x.mo": mo({text: f"PT {text[4:]}" for text in texts})}
        )
    out = train(
        "t5",
        "gettext:onepackage,twopackage",
        tmp_path / "out",
        "--from",
        "pt",
        "--to",
        "en",
        **{"--steps": 2},
    )
    report = json.loads((out / "report.json").read_text())
    assert report["sources"] == [
        f"{name} 1.2, licence MIT: 200 pairs" for name in ("onepackage", "twopackage")
    ]
    assert set(report["rates"]) == {
        "translate pt to en:",
        "which program:",
        "restore case:",
        "fill in:",
    }
    label = figures(out)["which program: the very name"]
    assert 0.2 < label["chance"] < 0.8 and label.get("baseline", 1.0) > 0.9


@pytest.mark.slow
def test_two_processes_train_every_stage(corpora, tmp_path, train_script, subprocess_environment):
    """DDP waits for every parameter's gradient, so a head without one in some stage would hang."""
    steps = [part for option in STEPS["bert"] if "steps" in option for part in (option, "2")]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        train_script,
    ]
    done = subprocess.run(
        [*command, "bert", "--data", str(corpora[0]), "--out", str(tmp_path / "out"), *SMALL,
            *steps, "--threads", "1"],
        env=subprocess_environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(figures(tmp_path / "out")) == 5


# ---- parts


def test_examples_precede_a_pair_by_similarity():
    from pytransformer.training import Pair
    from training_tasks._language_model import LENGTH
    from training_tasks.gpt import neighbours, with_examples

    pairs = [
        Pair(f"open the {thing} {place}", f"{thing} {place}")
        for thing in "file door book".split()
        for place in PLACES
    ]
    pairs += [Pair("Open the file: Lima!", "other"), Pair("nothing else", "alike")]
    near = neighbours(pairs)
    for n, pair in enumerate(pairs[:24]):
        assert len(near[n]) == 4 and n not in near[n]
        best = pairs[near[n][0]].source.split()
        assert set(best) & set(pair.source.split()[2:]), "more than the common words"
    assert 24 not in near[0] and 0 not in near[24], "the same letters are no example"
    assert near[25] == [], "no word in common"

    sequences = [[-1, *(100 * n + i for i in range(1 + 7 * n % 50))] for n in range(26)]
    rows = with_examples(sequences, near, random.Random(0))
    shown = collections.Counter()
    for n, row in enumerate(rows):
        assert (
            row[0] == -1
            and len(row) <= LENGTH
            and row[len(row) + 1 - len(sequences[n]) :] == sequences[n][1:]
        )
        firsts = [
            token // 100 for token in row[1 : len(row) + 1 - len(sequences[n])] if token % 100 == 0
        ]
        assert firsts == [i for i in reversed(near[n]) if i in firsts], "the most alike stands last"
        shown[len(firsts)] += 1
    assert set(shown) == {0, 1, 2, 3, 4}


def test_best_answer_ends_at_or_after_its_start():
    from pytransformer.models.bert import best_answers

    torch.manual_seed(0)
    logits = torch.randn(50, 12, 2)
    for (first, last), row in zip(best_answers(logits).tolist(), logits.tolist()):
        every = {(i, j): row[i][0] + row[j][1] for j in range(12) for i in range(j + 1)}
        assert (first, last) == max(every, key=every.get)
    apart = logits.argmax(1)
    assert (apart[:, 0] > apart[:, 1]).any(), "else the two ends could be taken apart"


def test_choices_contain_the_true_ending_once_among_equal_lengths():
    from training_tasks._language_model import CHOICES, choices, chosen_right

    endings = ["x" * n for n in range(1, 60)]
    asked = choices([f"prompt {n}" for n in range(1, 60)], endings, random.Random(0))
    assert len(asked) == 59 and {c.answer for c in asked} == set(range(CHOICES))
    for choice in asked:
        true = int(choice.prompt.split()[1])
        assert choice.endings[choice.answer] == "x" * true and len(set(choice.endings)) == CHOICES
        assert all(abs(len(e) - true) <= 10 for e in choice.endings)
    output = [float(e == "x" * int(c.prompt.split()[1])) for c in asked for e in c.endings]
    assert (
        chosen_right(output, asked) == 1.0 and chosen_right([1 - x for x in output], asked) == 0.0
    )


def test_likelihoods_cover_the_ending_only():
    from pytransformer.models import GPT, GPTConfig
    from training_tasks._language_model import log_likelihoods

    torch.manual_seed(0)
    model = GPT(
        GPTConfig(vocab_size=20, d_model=32, num_layers=1, num_heads=2, max_length=192)
    ).eval()
    asked = [([1, 2, 3], [4, 5]), ([1], [6, 7, 8, 9]), ([3] * 200, [4])]
    for (prompt, ending), found in zip(asked, log_likelihoods(model, asked, 0)):
        prompt = prompt[-(192 - len(ending)) :]
        logs = model(torch.tensor([[*prompt, *ending]])).logits[0].log_softmax(-1)
        each = [logs[len(prompt) + i - 1, token].item() for i, token in enumerate(ending)]
        assert found == pytest.approx(sum(each) / len(each), abs=1e-4)


@pytest.mark.parametrize("choices", [1, 2])
def test_expert_usage_counts_match_the_layer(choices):
    """A token beyond the capacity gets nothing from that expert.

    With one choice its row is zero.
    """
    from pytransformer.models import GPT, GPTConfig
    from training_tasks.moe import active_parameters, expert_use

    torch.manual_seed(0)
    options = {"num_experts": 4, "every": 2, "choices": choices, "capacity_factor": 0.6}
    model = GPT(
        GPTConfig(
            vocab_size=30, d_model=32, num_layers=2, num_heads=2, max_length=16, experts=options
        )
    ).eval()
    batch = {"input_ids": torch.randint(30, (5, 16))}
    seen = []
    mixture = model.decoder.blocks[1].feed_forward
    handle = mixture.register_forward_hook(lambda m, i, out: seen.append((i[0], out)))
    (use,) = expert_use(model, [batch])
    handle.remove()
    x, out = seen[0]
    rows = x.flatten(0, -2)
    best = (rows @ mixture.router.weight.t()).topk(choices, -1).indices
    assert use["shares"] == pytest.approx(
        [(best == e).float().mean().item() for e in range(4)], abs=1e-3
    )
    if choices == 1:
        assert use["dropped"] == pytest.approx(
            (out.flatten(0, -2) == 0).all(-1).float().mean().item(), abs=1e-3
        )
    assert 0.1 < use["dropped"] < 0.8
    idle = (4 - choices) * sum(p[0].numel() for p in mixture.experts.parameters())
    assert active_parameters(model) == model.num_parameters() - idle


def test_answer_bounds_match_the_text_with_the_label(corpora):
    from training_tasks._fine_tuning import LENGTH, answers
    from training_tasks._masked import uncased_words
    from training_tasks.data.labelled import read_labelled

    texts = read_labelled(corpora[0]).texts
    of = {t.text.lower(): t.label for t in texts}
    learned = uncased_words(texts[:500], texts[500:], 200)
    question = answers(SimpleNamespace(arguments=SimpleNamespace(seed=3)), learned)
    tokenizer, places = learned.words.tokenizer, collections.Counter()
    for example in question.train:
        ids, (first, last) = example.ids, example.labels
        asked = tokenizer.decode(ids[: ids.index(tokenizer.end_id)])
        assert (
            of[tokenizer.decode(ids[first : last + 1])] == asked
            and ids[last + 1] == tokenizer.end_id
        )
        places[ids[:first].count(tokenizer.end_id)] += 1
        assert len(ids) == len(example.segments) <= LENGTH
    assert len(question.train) == 500 and set(places) == {1, 2, 3} and min(places.values()) > 100


def test_word_cases_are_classified():
    from training_tasks._fine_tuning import case_of

    assert [
        case_of(word) for word in ("abc", "Abc", "ABC", "A", "1", "(Abc", "iPad", "{0}", "A1B")
    ] == [
        0,
        1,
        2,
        1,
        0,
        1,
        0,
        0,
        2,
    ]
