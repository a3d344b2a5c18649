# SPDX-License-Identifier: Apache-2.0
"""T5: several tasks in one text-to-text model, selected by a prefix.

    "translate pt to en: ..."  the translation ("summarize: ..." for docstrings:
                               their first line)
    "which program: ..."       the package of a message (gettext with several
                               packages)
    "restore case: ..."        the original of a lowercased text
    "fill in: ..."             the spans that were left out

A task's share of the batches follows its size, smoothed by --temperature.

  python examples/train.py t5 --data gettext:Django,Sphinx,wagtail --from pt --to en
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ._run import Figure, Run
from ._text import add_model, add_pairs, add_steps, package_names, pairs_of

SENTINELS = tuple(f"<x{i}>" for i in range(20))
LENGTH = 64  # tokens of a text
ASKED = 200  # held-out examples of each task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pairs(parser)
    parser.add_argument(
        "--temperature",
        type=float,
        default=2.0,
        help="1: by task size; larger: more uniform (default %(default)s)",
    )
    add_model(parser, vocabulary=6000, layers=2)
    # The authors' optimizer. Its steps are relative to each matrix's magnitude, and T5's embedding
    # is ten times larger than the rest.
    parser.add_argument(
        "--optimizer", choices=["adafactor", "adamw"], default="adafactor",
        help="adafactor needs full matrices: with a mesh that splits them use adamw and a --rate "
        "of about 2e-3 (default %(default)s)",
    )  # fmt: skip
    add_steps(parser, {"rate": 2e-2}, steps=6000)


class Task(NamedTuple):
    """Source and target texts; a target is None if its spans are to be filled in."""

    prefix: str
    train: list[tuple[str, str | None]]
    held_out: list[tuple[str, str | None]]


def train(run: Run) -> int:
    import torch

    from pytransformer.training import Batches
    from pytransformer.training.denoising import mixed, sampling_rates, text_to_text_collate

    from ._text import in_batches, rate, words_of

    a = run.arguments
    pairs, held_out = pairs_of(run)
    tasks = _tasks(run, pairs, held_out)
    words = words_of(
        [text for pair in pairs for text in pair] + [t.prefix for t in tasks],
        a.vocabulary,
        SENTINELS,
    )
    tokenizer = words.tokenizer
    sentinels = [tokenizer.id(s) for s in SENTINELS]
    learned, checked = (
        {t.prefix: _encoded(tokenizer, t.prefix, part) for t, part in zip(tasks, parts)}
        for parts in ([t.train for t in tasks], [t.held_out for t in tasks])
    )
    rates = sampling_rates({name: len(part) for name, part in learned.items()}, a.temperature)
    for name, share in rates.items():
        run.say(f"   {100 * share:4.1f} % {name} {len(learned[name])} examples")
    examples = mixed(learned, a.temperature)
    collate = text_to_text_collate(
        tokenizer.pad_id, tokenizer.start_id, tokenizer.end_id, sentinels
    )
    batches = Batches(
        examples,
        a.batch,
        collate,
        lengths=[len(e.source) + len(e.target or []) for e in examples],
        seed=a.seed,
    )
    in_parts = {name: in_batches(part, a.batch, collate, a.seed) for name, part in checked.items()}

    def evaluate(model: Any) -> dict[str, float]:
        from pytransformer.training.objective import held_out_loss

        found = {name: held_out_loss(model, part) for name, part in in_parts.items()}
        told = {
            f"{name.partition(':')[0]} accuracy": figures["accuracy"]
            for name, figures in found.items()
        }
        return {
            "validation_loss": sum(f["validation_loss"] for f in found.values()) / len(found)
        } | told

    model = _new_t5(run, words)
    optimizer = partial(
        {"adafactor": torch.optim.Adafactor, "adamw": torch.optim.AdamW}[a.optimizer], lr=a.rate
    )
    run.fit(
        "t5", model, batches, rate(a.rate, a.steps), a.steps, evaluate=evaluate, optimizer=optimizer
    )
    tokenizer.save(run.out / "tokenizer.json")
    figures = _figures(run, model, tokenizer, tasks)
    figures.append(_filled_in(model, tokenizer, tasks[-1], in_parts["fill in:"]))
    return run.report(figures, rates=rates, vocabulary=words.known)


def _new_t5(run: Run, words: Any) -> Any:
    from pytransformer.models import T5, T5Config

    a, tokenizer = run.arguments, words.tokenizer
    run.seed("model")
    return T5(
        T5Config(
            vocab_size=words.known, d_model=a.width, hidden=4 * a.width, num_layers=a.layers,
            num_heads=max(1, a.width // 32),
            head_dim=32, dropout=a.dropout, pad_token_id=tokenizer.pad_id,
            start_token_id=tokenizer.start_id,
        )
    )  # fmt: skip


def _tasks(run: Run, pairs: Sequence[Any], held_out: Sequence[Any]) -> list[Task]:
    """Return the tasks of --data; a text held out of one task is held out of all."""
    from .data.cleaning import sentence_key
    from .data.labelled import catalogue_texts, split_texts

    a = run.arguments
    packages = package_names(a.data)
    source, target = (
        ("source", "target") if packages is None else (a.source or "pt", a.target or "en")
    )
    documented = package_names(a.data, "docstrings") is not None
    texts, held_texts = [pair.target for pair in pairs], [pair.target for pair in held_out]
    first = "summarize:" if documented else f"translate {source} to {target}:"
    tasks = [Task(first, [tuple(p) for p in pairs], [tuple(p) for p in held_out])]
    if packages is not None and len(packages) > 1:
        labelled = catalogue_texts(packages).texts
        apart = {sentence_key(text) for pair in held_out for text in pair}
        learned, asked = split_texts(
            [t for t in labelled if sentence_key(t.text) not in apart], a.seed
        )
        tasks.append(
            Task(
                "which program:",
                [(t.text, t.label) for t in learned],
                [(t.text, t.label) for t in asked],
            )
        )
    else:
        run.say("no labeling task: it needs --data gettext: with two packages or more")
    tasks.append(
        Task("restore case:", [(t.lower(), t) for t in texts], [(t.lower(), t) for t in held_texts])
    )
    return [*tasks, Task("fill in:", [(t, None) for t in texts], [(t, None) for t in held_texts])]


def _encoded(tokenizer: Any, prefix: str, part: Sequence[tuple[str, str | None]]) -> list[Any]:
    from pytransformer.training.denoising import TextToText

    begin = tokenizer.encode(prefix)
    sources = tokenizer.encode_all([source for source, _ in part])
    targets = tokenizer.encode_all([target or "" for _, target in part])
    made = [
        TextToText([*begin, *s[:LENGTH]], None if target is None else t[:LENGTH], len(begin))
        for s, t, (_, target) in zip(sources, targets, part)
    ]
    # Shorter texts leave nothing to read.
    return [e for e in made if e.target is not None or len(e.source) >= len(begin) + 4]


def _said(model: Any, tokenizer: Any, task: Task) -> tuple[list[str], list[str], list[str]]:
    """Return (source, greedy output, target) of held-out examples."""
    from pytransformer.models import generate
    from pytransformer.training import pad
    from pytransformer.training.batching import attention_mask

    step = max(1, len(task.held_out) // ASKED)
    asked = [(s, t) for s, t in task.held_out[::step][:ASKED] if t is not None]
    said: list[str] = []
    for first in range(0, len(asked), 50):
        ids = [
            [*e.source, tokenizer.end_id]
            for e in _encoded(tokenizer, task.prefix, asked[first : first + 50])
        ]
        device = next(model.parameters()).device
        made = generate(
            model, pad(ids, tokenizer.pad_id).to(device), attention_mask(ids).to(device),
            max_new_tokens=LENGTH,
            stop=(tokenizer.end_id,), pad_token_id=tokenizer.pad_id,
        )  # fmt: skip
        said += [tokenizer.decode(tokens) for tokens in made.lists()]
    return [s for s, _ in asked], said, [t for _, t in asked]


def _figures(run: Run, model: Any, tokenizer: Any, tasks: Sequence[Task]) -> list[Figure]:
    """Return the score of each task's answers beside a simple baseline."""
    figures = []
    for task in tasks:
        if task.prefix == "fill in:":
            continue
        read, said, wanted = _said(model, tokenizer, task)
        judge = (
            _answered
            if task is tasks[0]
            else _labelled
            if task.prefix.startswith("which")
            else _cased
        )
        figures += judge(run, task, read, said, wanted)
        for text, answer in list(zip(read, said))[:2]:
            run.say(f"   {task.prefix} {text}\n     said    {answer[:120]}")
    return figures


def _answered(
    run: Run, task: Task, read: list[str], said: list[str], wanted: list[str]
) -> list[Figure]:
    from pytransformer.training import Pair, translation_scores
    from pytransformer.training.quality import from_memory

    try:
        memory = translation_scores(
            from_memory([Pair(s, t or "") for s, t in task.train], read), wanted
        )
        scores = translation_scores(said, wanted)
    except ImportError as error:
        run.say(f"no chrF: {error}")
        return []
    return [
        Figure(
            f"{task.prefix} chrF",
            scores["chrf"],
            memory["chrf"],
            "the most similar training text's",
            None,
            len(read),
        )
    ]


def _labelled(
    run: Run, task: Task, read: list[str], said: list[str], wanted: list[str]
) -> list[Figure]:
    from ._text import baseline_or_none
    from .data.baselines import label_scores, majority, share_right

    texts, labels = [s for s, _ in task.train], [t or "" for _, t in task.train]

    def baseline() -> float:
        return share_right(
            [max(s, key=lambda label: s[label]) for s in label_scores(texts, labels, read)], wanted
        )

    chance = share_right([majority(labels)] * len(wanted), wanted)
    return [Figure(f"{task.prefix} the very name", share_right(said, wanted),
        baseline_or_none(run, baseline),
                   "bag of words, logistic regression", chance, len(read))]  # fmt: skip


def _cased(
    run: Run, task: Task, read: list[str], said: list[str], wanted: list[str]
) -> list[Figure]:
    from .data.baselines import MostFrequent, share_right

    def known(text: str) -> list[tuple[str, str]]:
        return [
            ("" if i == 0 else word.lower(), _shape(word)) for i, word in enumerate(text.split())
        ]

    shapes = MostFrequent(item for _, text in task.train for item in known(text or ""))
    guessed = [
        " ".join(_shaped(w, shapes(key)) for w, (key, _) in zip(t.split(), known(t))) for t in read
    ]
    return [Figure(f"{task.prefix} the full text right", share_right(said, wanted),
        share_right(guessed, wanted),
                   "each word's most frequent case", None, len(read))]  # fmt: skip


def _shape(word: str) -> str:
    return (
        "upper" if len(word) > 1 and word.isupper() else "title" if word[:1].isupper() else "lower"
    )


def _shaped(word: str, shape: str) -> str:
    return (
        word.upper()
        if shape == "upper"
        else word[:1].upper() + word[1:]
        if shape == "title"
        else word
    )


def _filled_in(model: Any, tokenizer: Any, task: Task, batches: Sequence[Any]) -> Figure:
    """Return the accuracy of the tokens of left-out spans, teacher-forced, without sentinels."""
    import itertools

    from pytransformer.training import IGNORED

    from ._text import each_batch
    from .data.baselines import MostFrequent

    ids = tokenizer.encode_all([text for text, _ in task.train])
    follows = MostFrequent(pair for text in ids for pair in itertools.pairwise(text))
    passed = {IGNORED, tokenizer.end_id, *(tokenizer.id(s) for s in SENTINELS)}
    right = guessed = count = 0
    for batch, out in each_batch(model, batches):
        rows = zip(
            batch["decoder_input_ids"].tolist(),
            batch["labels"].tolist(),
            out.logits.argmax(-1).tolist(),
        )
        for before, wanted, said in (triple for row in rows for triple in zip(*row)):
            if wanted not in passed:
                right, guessed, count = (
                    right + (said == wanted),
                    guessed + (follows(before) == wanted),
                    count + 1,
                )
    return Figure(
        "fill in: tokens of left-out spans",
        right / max(1, count),
        guessed / max(1, count),
        "what most often follows the token before",
        1 / len(tokenizer),
        count,
    )
