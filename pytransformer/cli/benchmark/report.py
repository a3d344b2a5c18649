# SPDX-License-Identifier: Apache-2.0
"""The output of a benchmark: table on screen, report.md, results.csv, results.json."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytransformer import _html
from pytransformer.cli.benchmark import results
from pytransformer.cli.providers import PEERS
from pytransformer.console import clean, escape_csv, escape_markdown, table_width

Row = dict[str, Any]
ONE_SAMPLE = "*"  # beside a time
MOST_BARS = 40  # a longer chart is folded
SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}

COLUMNS = tuple(
    "case,shape,dtype,mode,backend,ms,p20-p80,x torch,x naive,TFLOP/s,GB/s,peak MB,saved MB,error,"
    "/naive,limit".split(",")
)
RIGHT = COLUMNS[5:-1]

OURS = ("cpu", "triton", "cuda", "reference", "cuda_any_order")
LABELS = {
    "torch": "PyTorch",
    "torch_flash": "PyTorch SDPA (FlashAttention-2)",
    "torch_efficient": "PyTorch SDPA (efficient)",
    "torch_cudnn": "PyTorch SDPA (cuDNN)",
    "torch_math": "PyTorch SDPA (math)",
    "naive": "naive code",
    "compile": "torch.compile",
    "flex": "FlexAttention",
    "flash_attn": "FlashAttention",
    "liger": "Liger-Kernel",
    "quack": "quack",
}

# Liger-Kernel's benchmark columns in its order, so that its tools read our results; the last holds
# our version.
LIGER_COLUMNS = (
    "kernel_name kernel_provider kernel_operation_mode metric_name metric_unit x_name x_label"
    " x_value y_value_50 y_value_20 y_value_80 extra_benchmark_config_str gpu_name timestamp"
    " liger_version"
).split()
_LIGER_MODES = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "full"}


def shape_text(shape: Mapping[str, int]) -> str:
    """Return the shape in one word: B2 H8/2 L512x512 D64, or 1024x512x2048 for row-wise ops."""
    if "Lq" not in shape:
        return "x".join(str(n) for n in shape.values())
    heads = str(shape["Hq"]) if shape["Hq"] == shape["Hkv"] else f"{shape['Hq']}/{shape['Hkv']}"
    queries, keys = shape["Lq"], shape.get("Lk", shape["Lq"])
    lengths = str(queries) if queries == keys else f"{queries}x{keys}"
    return f"B{shape['B']} H{heads} L{lengths} D{shape['D']}" + (
        f"/{shape['Dv']}" if "Dv" in shape else ""
    )


def figure(value: float | None, digits: int = 3) -> str:
    """Format `value` with `digits` significant digits, in plain form if readable, or as "-"."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{max(1, digits - 2)}e}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}"


def megabytes(value: int | None) -> str:
    return figure(None if value is None else value / 1e6)


def label_of(backend: str) -> str:
    """Return the name of an implementation in a figure."""
    return LABELS.get(backend, f"pytransformer ({backend})" if backend in OURS else backend)


def time_text(row: Row) -> str:
    """Return the median in milliseconds, marked if it is one sample only."""
    return figure(row["median_ms"]) + ONE_SAMPLE * (row["samples"] == 1)


def spread_text(row: Row) -> str:
    if row["samples"] == 1:
        return "one sample"
    return f"{figure(row['p20_ms'])}-{figure(row['p80_ms'])}"


def mode_text(row: Row) -> str:
    """Return the mode, marked if the CPU caches were emptied; they are warm by default."""
    return row["mode"] + (" cold" if row.get("cache") == "cold" and row["device"] == "cpu" else "")


def table_row(row: Row) -> list[str]:
    """Return the cells of COLUMNS."""
    return [
        row["case"], shape_text(row["shape"]), SHORT[row["dtype"]], mode_text(row), row["backend"],
        time_text(row), spread_text(row),
        figure(row["speedup_torch"]), figure(row["speedup_naive"]), figure(row["tflops"]),
        figure(row["gbps"]), megabytes(row["peak_bytes"]), megabytes(row.get("saved_bytes")),
        figure(row["error"], 2), figure(row["error_ratio_naive"], 2), limit_text(row),
    ]  # fmt: skip


def limit_text(row: Row) -> str:
    """Return the row's limit and the share of its time that it explains."""
    return f"{row['limit']} {row['limit_shares'][row['limit']]:.0%}" if row.get("limit") else "-"


def fitting(rows: list[list[str]], width: int | None) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return (columns, rows) without the least important columns that exceed `width` characters."""
    left = list(COLUMNS)
    for column in ",p20-p80,saved MB,GB/s,/naive,limit,shape,TFLOP/s,x naive".split(","):
        if column:
            left.remove(column)
        places = [COLUMNS.index(name) for name in left]
        cells = [[row[place] for place in places] for row in rows]
        if width is None or table_width(left, cells) <= width:
            break
    return tuple(left), cells


def refusal_row(entry: Row) -> list[str]:
    """Return one line for an entry that was not timed: case, dtype, mode, backend, reason."""
    return [entry["case"], SHORT[entry["dtype"]], entry["mode"], entry["backend"], verdict(entry)]


def refusals(entries: Iterable[Row]) -> list[list[str]]:
    """Return one line per op, backend and reason, with its cases; wrong results come first."""
    groups: dict[tuple[str, str, str], list[list[str]]] = {}
    for entry in sorted(entries, key=lambda e: results.STATUSES.index(e["status"]), reverse=True):
        *row, backend, why = refusal_row(entry)
        groups.setdefault((entry["op"], backend, why), []).append(row)
    return [
        [op, *(", ".join(dict.fromkeys(words)) for words in zip(*rows)), backend, why]
        for (op, backend, why), rows in groups.items()
    ]


REFUSAL_COLUMNS = ("op", "case", "dtype", "mode", "backend", "why")
REGIME_COLUMNS = (*COLUMNS[:6], "burst ms", "sustained ms", "sustained/burst")


def regime_rows(rows: Iterable[Row]) -> list[list[str]]:
    """Return burst time beside sustained time, if measured."""
    return [
        [*table_row(row)[:6], *map(figure, (burst, long, long / burst))]
        for row in rows
        if (long := row.get("sustained_ms")) and (burst := row["burst_ms"])
    ]


KERNEL_COLUMNS = (*COLUMNS[:6], "kernel ms", "kernel/all")


def kernel_rows(rows: Iterable[Row]) -> list[list[str]]:
    """Return kernel time beside call time, on GPUs."""
    return [
        [*table_row(row)[:6], figure(row["kernel_ms"]), figure(row["kernel_ms"] / row["median_ms"])]
        for row in rows
        if row.get("kernel_ms")
    ]


def verdict(entry: Row) -> str:
    if entry["status"] == "wrong":
        return f"WRONG, not timed: {entry['reason']}"
    return f"failed: {entry['reason']}" if entry["status"] == "failed" else entry["reason"]


def by_op(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["op"], []).append(row)
    return groups


def geomean(values: list[float]) -> float:
    return math.exp(sum(math.log(v) for v in values) / len(values))


def summary(rows: list[Row]) -> list[list[str]]:
    """Return one line per backend and mode, peers left out: row count, comparison, worst row.

    Rows of one sample count, but their speed is not compared.
    """
    lines = []
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["backend"] not in PEERS:
            groups.setdefault((row["backend"], row["mode"], row["dtype"]), []).append(row)
    for (backend, mode, dtype), members in groups.items():
        several = [r for r in members if r["samples"] > 1]
        compared = [r for r in several if r["speedup_torch"]]
        naive = [r["speedup_naive"] for r in several if r["speedup_naive"]]
        worst = min(compared, key=lambda r: r["speedup_torch"], default=None)
        lines.append([
            backend, mode, SHORT[dtype], str(len(members)),
            figure(geomean([r["speedup_torch"] for r in compared])) if compared else "-",
            f"{figure(worst['speedup_torch'])} ({worst['case']})" if worst else "-",
            figure(geomean(naive)) if naive else "-",
            figure(max((r["bound_used"] for r in members if r["bound_used"] is not None),
                default=None), 2),
        ])  # fmt: skip
    return lines


SUMMARY_COLUMNS = (
    "backend", "mode", "dtype", "rows", "x torch, mean", "x torch, worst", "x naive, mean",
    "bound used, max",
)  # fmt: skip
Table = tuple[str, Sequence[str], list[list[str]], Sequence[str]]


def tables(document: dict[str, Any], width: int | None = None) -> Iterator[Table]:
    """Yield (title, columns, rows, columns aligned right) of every table but the summary."""
    rows = document["rows"]
    for op, members in by_op(rows).items():
        yield op, *fitting([table_row(row) for row in members], width), RIGHT
    if regimes := regime_rows(rows):
        yield "Burst and sustained", REGIME_COLUMNS, regimes, REGIME_COLUMNS[5:]
    if kernels := kernel_rows(rows):
        yield "Kernels alone", KERNEL_COLUMNS, kernels, KERNEL_COLUMNS[5:]
    if refused := refusals(document["not_run"]):
        yield "Not timed, and why", REFUSAL_COLUMNS, refused, ()


# ---- HTML


def page(document: dict[str, Any]) -> str:
    """Return the whole report in one file: ratios first, then every table."""
    rows, where = document["rows"], document["environment"]
    parts = [_html.paragraph(environment_text(where))]
    parts.append(_html.paragraph(f"Command: {where['command']}", note=True))
    if not document["complete"]:
        parts.append(_html.paragraph("Stopped before the end: these are partial results."))
    wrong = [e for e in document["not_run"] if e["status"] in ("wrong", "failed")]
    parts += [
        _html.paragraph(f"{e['op']} {' '.join(refusal_row(e)[:4])}: {verdict(e)}") for e in wrong
    ]
    lines = summary(rows)
    parts.append(_html.table(SUMMARY_COLUMNS, lines, SUMMARY_COLUMNS[3:], caption="Summary"))
    parts += _ratio_bars(rows)
    for title, columns, cells, right in tables(document):
        content = _html.table(columns, cells, right)
        parts.append(_html.details(f"{title}: {len(cells)} rows", content))
    parts.append(_html.paragraph(LEGEND.replace("`", ""), note=True))
    return _html.page("pytransformer benchmark", parts)


def _ratio_bars(rows: list[Row]) -> list[str]:
    """Return a bar chart of the speed-up over PyTorch for each backend and mode, peers left out."""
    groups: dict[tuple[str, str], list[tuple[str, float]]] = {}
    for row in rows:
        if row["backend"] not in PEERS and row["speedup_torch"] and row["samples"] > 1:
            label = f"{row['case']} {SHORT[row['dtype']]} {shape_text(row['shape'])}"
            groups.setdefault((row["backend"], row["mode"]), []).append(
                (label, row["speedup_torch"])
            )
    parts = []
    for (backend, mode), values in groups.items():
        values.sort(key=lambda entry: entry[1], reverse=True)
        count = len(values)
        title = f"Speed-up over PyTorch: {label_of(backend)}, {mode}"
        chart = _html.bars(values)
        few = _html.heading(title) + chart
        parts.append(few if count <= MOST_BARS else _html.details(f"{title}: {count} rows", chart))
    return parts


# ---- files


def write_all(folder: Path, document: dict[str, Any], plots: list[str]) -> list[Path]:
    """Write results.json, results.csv, report.md and report.html, with `plots` beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "results.json": json.dumps(document, indent=1, allow_nan=False) + "\n",
        "results.csv": csv_text(document),
        "report.md": markdown(document, plots),
        "report.html": page(document),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def csv_text(document: dict[str, Any]) -> str:
    """Return the rows in LIGER_COLUMNS, one line each for speed and memory; x is length or rows."""
    where = document["environment"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(LIGER_COLUMNS)
    for row in document["rows"]:
        shape = row["shape"]
        name = next(n for n in ("Lk", "Lq", "rows") if n in shape)
        x = (
            *{"Lk": ("L", "key length"), "Lq": ("L", "length"), "rows": ("rows", "rows")}[name],
            shape[name],
        )
        config = json.dumps({"case": row["case"], "dtype": row["dtype"], **shape}, sort_keys=True)
        metrics = [("speed", "ms", row["median_ms"], row["p20_ms"], row["p80_ms"])]
        if row["peak_bytes"] is not None:
            metrics.append(("memory", "MB", *[row["peak_bytes"] / 1e6] * 3))
        for metric, unit, *values in metrics:
            cells = [
                row["op"], row["backend"], _LIGER_MODES[row["mode"]], metric, unit, *x, *values,
                config,
                where["device_name"], where["date"], f"pytransformer {where['pytransformer']}",
            ]  # fmt: skip
            writer.writerow([escape_csv(c) if isinstance(c, str) else c for c in cells])
    return out.getvalue()


def markdown_table(
    columns: Iterable[str], rows: Iterable[Iterable[str]], right: Iterable[str] = ()
) -> str:
    columns, right = list(columns), set(right)
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("--:" if c in right else "---" for c in columns) + "|",
    ]
    lines += ["| " + " | ".join(escape_markdown(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def markdown(document: dict[str, Any], plots: list[str]) -> str:
    """Return the whole report as Markdown."""
    where, rows = document["environment"], document["rows"]
    parts = ["# pytransformer benchmark", environment_text(where, escape_markdown)]
    if not document["complete"]:
        parts.append("**Stopped before the end: these are partial results.**")
    parts += ["## Summary", markdown_table(SUMMARY_COLUMNS, summary(rows), SUMMARY_COLUMNS[3:])]
    parts += [f"![{name}]({name})" for name in plots]
    for title, columns, cells, right in tables(document):
        parts += [f"## {escape_markdown(title)}", markdown_table(columns, cells, right)]
    parts.append(LEGEND)
    return "\n\n".join(parts) + "\n"


LEGEND = """\
`ms`: median of one call, beside its 20 % and 80 % quantiles, all contenders interleaved; `*`: a
single sample, which the summary does not compare. `x torch`, `x naive`: speed-up over PyTorch's
op and over naive code in the same run. `TFLOP/s`: useful work only. `GB/s`: every input read
once and every output written once. `peak MB`: memory above the inputs, in a fresh process.
`saved MB`: tensors that forward saves for backward, beyond the inputs. Caches are warm (as calls
in a loop leave them) unless the mode is "cold". `error`: norm of the error against float64 over
the norm of the result, the max of output and gradients; `/naive`: relative to naive code's
error. `limit`: the largest share of the time: the rate of a matrix product, the bandwidth of a
copy, the call (its time at a tiny shape), the allocator (fresh pages for outputs) or the kernel;
"rest" for peers is one of the last two."""


def environment_text(where: dict[str, Any], escape: Any = clean) -> str:
    """Return one paragraph: machine, versions, commit, date."""
    threads = f"{where['threads']} thread{'s' if where['threads'] != 1 else ''}"
    words = [
        f"{where['device_name']}, {where['cores']} cores, {threads}",
        where.get("pinning"),
        f"instruction set {where['isa']}" if where["isa"] else None,
        f"torch {where['torch']}",
        f"triton {where['triton']}" if where["triton"] else None,
        f"pytransformer {where['pytransformer']}"
        + (f" at {where['commit']}" if where["commit"] else ""),
        f"Python {where['python']}",
        f"load {where['load']} at the start" if where["load"] is not None else None,
        where["date"],
    ]
    return escape("; ".join(word for word in words if word)) + "."


class Results(dict[str, Any]):
    """The content of a results.json; a notebook shows its summary as a table."""

    def _repr_html_(self) -> str:
        lines = summary(self["rows"])
        place = _html.paragraph(environment_text(self["environment"]), note=True)
        return _html.table(SUMMARY_COLUMNS, lines, SUMMARY_COLUMNS[3:]) + place


def load(path: Path) -> Results:
    """Return a checked results.json; raise ValueError naming the fault."""
    document = json.loads(path.read_text(encoding="utf-8"))
    problems = results.validate(document)
    if problems:
        raise ValueError(
            f"{path} is not a results file of schema {results.SCHEMA_VERSION}:"
            f" {'; '.join(problems[:5])}"
        )
    return Results(document)
