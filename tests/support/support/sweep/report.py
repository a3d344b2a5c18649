# SPDX-License-Identifier: Apache-2.0
"""The committed sweep results, the file of all classes, and the table of docs/compatibility.md."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pytransformer.console import escape_markdown

ROOT = Path(__file__).resolve().parents[4]
RESULTS = ROOT / "tests" / "integrations" / "architectures.json"
DOC, COMPATIBILITY = RESULTS.with_suffix(".md"), ROOT / "docs" / "compatibility.md"
OLDER = RESULTS.with_name("architectures-older.json")  # for the oldest supported transformers
VERDICTS = {
    "ours": "every attention runs on our op and agrees with eager code",
    "ours in part": "the same, but the classes named compute attention themselves",
    "ours by convert": (
        "`attn_implementation` is refused; after `convert` every attention runs on our op and"
        " agrees"
    ),
    "refused": "an error names the reason and the alternative",
    "not on the interface": (
        "the model ignores `attn_implementation`; results agree, after `convert` too"
    ),
    "no attention": "the model has no attention; `convert` works or matches nothing",
    "wrong": "our result differs, or an unexpected error occurs",
    "not built": "a tiny config fails in eager code itself",
}
COLUMNS = {
    "none": "no mask",
    "left": "left",
    "right": "right",
    "tokens": "tokens",
    "convert": "convert",
}
Rows = dict[str, dict[str, Any]]
START = "<!-- compatibility: start, written by support.sweep --write -->"
END = "<!-- compatibility: end -->"
# The model types of docs/compatibility.md, in its order.
FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2",
    "gpt_neox",
    "gpt_oss", "deepseek_v3", "opt", "falcon", "bloom", "mamba", "bert", "roberta", "albert",
    "distilbert",
    "electra", "modernbert", "deberta-v2", "longformer", "big_bird", "xlnet", "t5", "bart",
    "marian",
    "whisper", "wav2vec2", "vit", "swin", "clip", "siglip", "llava",
)  # fmt: skip


def clean(rows: Rows) -> Rows:
    """Remove machine names and object addresses."""
    text = re.sub(
        r"0x[0-9a-f]+|(?<=\W)/(?:\w[\w.+-]*/)+\w[\w.+-]*", "…", json.dumps(rows, ensure_ascii=False)
    )
    return json.loads(text)


def load(path: Path = RESULTS) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def place(version: str) -> Path:
    """Return the results file of this version: :data:`OLDER` if older than :data:`RESULTS`."""
    return OLDER if number(version) < number(load()["transformers"]) else RESULTS


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def kinds(row: dict[str, Any]) -> dict[str, str]:
    """Return verdict and cells without the figures, which differ by machine."""
    return {"verdict": row["verdict"]} | {
        name: cell.partition(":")[0] for name, cell in row.get("cells", {}).items()
    }


def save(rows: Rows, path: Path) -> None:
    """Write one row per line, so that a change affects one line."""
    import torch
    import transformers

    head = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    lines = [
        f"  {json.dumps(name)}: {json.dumps(row, ensure_ascii=False)}"
        for name, row in sorted(clean(rows).items())
    ]
    path.write_text(json.dumps(head)[:-1] + ', "rows": {\n' + ",\n".join(lines) + "\n}}\n")


def counts(rows: Rows) -> dict[str, int]:
    found = Counter(row["verdict"] for row in rows.values())
    return {verdict: found[verdict] for verdict in VERDICTS}


class Notes:
    """Numbered sentences, each listed once."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def number(self, sentence: str) -> str:
        if sentence not in self.sentences:
            self.sentences.append(sentence)
        return f"({self.sentences.index(sentence) + 1})"


def short(cell: str, notes: Notes) -> str:
    kind, _, rest = cell.partition(": ")
    return f"{kind} {notes.number(rest)}" if kind in ("refused", "fails") else escape_markdown(cell)


def sdpa(row: dict[str, Any]) -> str:
    """Return sdpa's worst cell against eager code."""
    said = list(row.get("sdpa", {}).values())
    other = next((s for s in said if not s.startswith("differs")), None)
    return (
        escape_markdown(other)
        if other
        else max(said, key=lambda s: float(s.split()[-1]), default="same")
    )


def line(name: str, row: dict[str, Any], notes: Notes) -> str:
    cells = row.get("cells", {})
    build = cells.get("build")
    told = [
        short(build if build and key != "convert" else cells.get(key, "–"), notes)
        for key in COLUMNS
    ]
    left = (
        ", ".join(row.get("left", ()))
        if row["verdict"] in ("ours in part", "not on the interface")
        else ""
    )
    return f"| {name} | {row['verdict']} | " + " | ".join(told) + f" | {sdpa(row)} | {left} |"


def differences(rows: Rows, older: Rows) -> list[str]:
    """Return the differences of another version, for classes that both versions could build."""
    told = []
    for name in rows.keys() & older.keys():
        pair = (kinds(rows[name]), kinds(older[name]))
        if pair[0] != pair[1] and "not built" not in (pair[0]["verdict"], pair[1]["verdict"]):
            words = [[f"{k}: {p[k]}" for k in p if p[k] != o.get(k)] for p, o in (pair, pair[::-1])]
            told.append(
                f"| {name} | {' | '.join(escape_markdown(', '.join(w)) or '–' for w in words)} |"
            )
    return sorted(told)


def page(results: dict[str, Any], older: dict[str, Any]) -> str:
    rows: Rows = results["rows"]
    built = {name: row for name, row in rows.items() if row["verdict"] != "not built"}
    notes = Notes()
    table = [line(name, row, notes) for name, row in built.items()]
    reasons = [
        f"| {name} | {escape_markdown(row['reason'])} |"
        for name, row in rows.items()
        if name not in built
    ]
    old = counts(older["rows"])
    verdicts = [
        f"| {verdict} | {count} | {old[verdict]} | {VERDICTS[verdict]} |"
        for verdict, count in counts(rows).items()
    ]
    versions = (results["transformers"], older["transformers"])
    return "\n".join([
        "# Architectures of transformers, one by one", "",
        "<!-- generated by python -m support.sweep --write: do not edit -->", "",
        f"Each model type of transformers {results['transformers']}, with a tiny config and random "
        f"weights, built with "
        '`attn_implementation="pytransformer"` as `from_pretrained` sets it, against its own '
        "eager code in float32 on the CPU "
        f"(torch {results['torch']}). One class of each type; encoders that can be decoders also "
        f"as such. Compared are all floating "
        "outputs at real positions and the gradients of all parameters: without a mask, padded "
        "left, padded right; the logits of five "
        "greedy steps where the class generates, and the model after `convert`. The limit is the "
        "one of the other tests, 32 eps in the "
        "relative 2-norm, times the model's own condition number. [Drop-in](../../docs/drop-in.md) "
        "tells what the words mean in "
        "use; timm and "
        "diffusers have [their own page](../../docs/other-libraries.md).", "",
        f"| verdict | {versions[0]} | {versions[1]} | meaning |", "|---|---|---|---|", *verdicts,
        "",
        f"The tables below are those of {versions[0]}; what {versions[1]}, the oldest that we "
        "take, does otherwise stands after them.", "",
        '"as sdpa" in a cell: eager code and sdpa differ there (queries that see nothing are zeros '
        "in one and a mean in the other; eager "
        "outputs of Nemotron ASR are NaN), and ours agrees with sdpa. It counts with padding or "
        "where eager code is not finite, and "
        "nowhere else: what sdpa does wrong (5.17's drops Gemma 2's softcap) is wrong. Where "
        "sdpa's gradients are not finite and ours are, "
        "ours agrees with eager code. The column sdpa says "
        "how transformers' own sdpa does against eager code: the same, by how much it differs, or "
        "that transformers refuses it.", "",
        table_of(("class", "verdict", *COLUMNS.values(), "sdpa", "attention of its own"), table),
        "",
        *(f"({i}) {escape_markdown(sentence)}\n" for i, sentence in enumerate(notes.sentences, 1)),
        f"## What {versions[1]} does otherwise", "",
        table_of(("class", *versions), differences(rows, older["rows"])), "",
        "## Not built", "", table_of(("class", "reason"), reasons), "",
    ])  # fmt: skip


def table_of(columns: Iterable[str], rows: list[str]) -> str:
    names = list(columns)
    return "\n".join(["| " + " | ".join(names) + " |", "|---" * len(names) + "|", *rows])


def compatibility(rows: Rows) -> str:
    """Return the tables of docs/compatibility.md: classes of :data:`FAMILIES` and total counts."""
    lines = [
        compatible(name, row)
        for family in FAMILIES
        for name, row in sorted(rows.items())
        if name.partition("/")[0] == family and not name.endswith(", decoder")
    ]
    heads = ("model", "`activate()`", '`attn_implementation="pytransformer"`', "`convert()`")
    totals = [
        f"| {verdict} | {count} | {VERDICTS[verdict]} |" for verdict, count in counts(rows).items()
    ]
    return "\n\n".join(
        (
            table_of(heads, lines),
            f"Results of all {len(rows)} classes with `attn_implementation`:",
            table_of(("result", "classes", "meaning"), totals),
        )
    )


def compatible(name: str, row: dict[str, Any]) -> str:
    """Return the line of one class."""
    left = ", ".join(row.get("left", ()))
    if row["verdict"] == "no attention":
        cells = ("no attention", "no attention", "norms")
    else:
        has_sdpa = not any(found.startswith("refused") for found in row.get("sdpa", {}).values())
        accepted = {"ours": "yes", "ours in part": f"yes, except {left}"}
        converted = (
            "yes"
            if row["verdict"] == "ours by convert"
            else f"yes, except {left}"
            if left
            else "yes"
        )
        cells = (
            "yes" if has_sdpa else "no sdpa",
            accepted.get(row["verdict"], "refused"),
            converted,
        )
    return f"| {name.partition('/')[2]} | " + " | ".join(cells) + " |"


def with_table(text: str, rows: Rows) -> str:
    """Return the page with the table between its markers replaced."""
    before, rest = text.split(START)
    return f"{before}{START}\n{compatibility(rows)}\n{END}{rest.split(END)[1]}"
