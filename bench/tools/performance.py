# SPDX-License-Identifier: Apache-2.0
"""Write the tables of docs/performance.md and README from the committed medians.

    python bench/tools/performance.py                        # print the tables
    python bench/tools/performance.py --write                # write them into both pages
    python bench/tools/performance.py --run --machine NAME   # run the suite first (25 minutes)

A ratio is PyTorch's time over ours in one interleaved run: 2 is twice as fast. Ratios below 1 are
bold.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import NamedTuple

sys.path.append(str(Path(__file__).parent))
import medians  # beside this file
from medians import Row, Run

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE, README = (
    ROOT / "bench" / "results",
    ROOT / "docs" / "performance.md",
    ROOT / "README.md",
)
MACHINES = (
    "amd-epyc-zen5-2-cores",
    "amd-epyc-zen4-2-cores",
    "amd-epyc-zen2-2-cores",
    "intel-xeon-amx-2-cores",
)
GPU = "nvidia-h100-80gb-hbm3"
GPU_TABLE = RESULTS / GPU / "table.csv"
# Runs in the GPU's folder, in the page's order; each problem appears in its newest run only.
GPU_RUNS = (
    "second/fwd64", "second/fwd128", "second/bwd64", "second/bwd128", "long", "d256",
    "second/decode1_32", "second/decode16", "terms", "norms_4096", "cross_entropy",
    "as-found/feed_forward",
)  # fmt: skip
# README's rows: folder of the run, case, shape and direction.
GPU_SHOWN = (
    ("second/fwd128", "full", "fwd"),
    ("second/fwd128", "causal", "fwd"),
    ("second/bwd128", "causal", "bwd"),
    ("terms", "window", "fwd"),
    ("terms", "t5_bias", "fwd"),
    ("terms", "dropout", "bwd"),
    ("second/decode1_32", "decode_pages", "fwd"),
)
GPU_PEERS = {
    "torch": "PyTorch",
    "torch_cudnn": "cuDNN",
    "torch_flash": "flash",
    "torch_efficient": "efficient",
}
START = "<!-- performance: start, written by bench/tools/performance.py -->"
END = "<!-- performance: end -->"
COMMANDS = (
    "-m pytransformer bench --suite aims --out .",
    (
        "-m pytransformer bench --suite isa --isa avx2 --no-plots --no-memory --providers cpu,torch"
        " --out isa-avx2"
    ),
    "{tools}/full_models.py --layers 2 --seconds 1.5 --out .",
    "{tools}/step_time.py --out step-time.json",
)
OURS, PEER = "cpu", "torch"
GRID = ("full", "causal")
TILES = "amx_bf16"
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
SLOWER = 0.995  # lower ratios print as less than 1.00


class Aim(NamedTuple):
    """The target of some ops: a min ratio, or a min share of a measured peak."""

    title: str
    ops: tuple[str, ...]  # ops or cases
    dtype: str
    threshold: float
    peak: str = ""  # the peak's key; empty: PyTorch's time over ours
    min_keys: int = 0
    threshold_on_tiles: float | None = None  # the threshold on a CPU with AMX


AIMS = (
    Aim(
        "attention f32, L >= 1024, share of the matrix product's rate",
        GRID,
        "float32",
        0.95,
        "tflops",
        1024,
    ),
    Aim(
        "attention bf16, L >= 1024, share of the matrix product's rate",
        GRID,
        "bfloat16",
        0.9,
        "tflops",
        1024,
        0.75,
    ),
    Aim("decoding f32, share of the read bandwidth", ("decode",), "float32", 0.85, "read_gbps"),
    Aim("decoding bf16, share of the read bandwidth", ("decode",), "bfloat16", 0.85, "read_gbps"),
    Aim("layer_norm and add_norm f32, over PyTorch", ("layer_norm", "add_norm"), "float32", 1.5),
    Aim("layer_norm and add_norm bf16, over PyTorch", ("layer_norm", "add_norm"), "bfloat16", 1.5),
)


# ---- cells


def times(value: float | None) -> str:
    """Return a ratio as text, in bold if we are slower."""
    if value is None:
        return "–"
    return f"**{value:.2f}**" if value < SLOWER else f"{value:.2f}"


def span(values: Iterable[float | None]) -> str:
    """Return the min and max ratio."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return "–"
    return times(known[0]) if len(known) == 1 else f"{times(known[0])} to {times(known[-1])}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def sizes(row: Row) -> dict[str, int]:
    """Return the dimensions of a row's problem."""
    return {
        name: int(size) for name, _, size in (word.partition("=") for word in row["shape"].split())
    }


def ratio(row: Row) -> float | None:
    """Return PyTorch's time over the row's, or None if PyTorch did not compute the case."""
    return float(row["torch_over_this"]) if row["torch_over_this"] else None


def ours(run: Run, suite: str = "aims") -> list[Row]:
    """Return our rows of a suite."""
    return [row for row in run.rows if row["suite"] == suite and row["implementation"] == OURS]


# ---- tables


def per_machine(runs: dict[str, Run], cells: Callable[[Run], dict[str, str]], first: str) -> str:
    """Return a table with one column per machine of what `cells` returns by row title."""
    columns = {name: cells(run) for name, run in runs.items()}
    titles = list(dict.fromkeys(title for column in columns.values() for title in column))
    heads = [
        f"{name.removesuffix('-2-cores')}, {run.environment['isa']}" for name, run in runs.items()
    ]
    rows = ([title, *(column.get(title, "–") for column in columns.values())] for title in titles)
    return table((first, *heads), rows)


def group_of(row: Row) -> str:
    """Return the title of the line that a row belongs to in the table by op."""
    dtype = SHORT[row["dtype"]]
    if not row["op"].startswith("attention"):
        return f"{row['op']} {dtype}"
    if row["case"] == "decode":
        return f"attention, decoding, {dtype}"
    plain = row["case"] in GRID
    return f"attention, {'full and causal' if plain else 'masks, biases, dropout'}, {dtype}"


def by_op(run: Run) -> dict[str, str]:
    """Return the ranges of the ratios by op, and the count of slower rows."""
    groups: dict[str, list[Row]] = {}
    compared = [row for row in ours(run) if ratio(row) is not None]
    for row in compared:
        groups.setdefault(group_of(row), []).append(row)
    cells = {}
    for title, rows in groups.items():
        directions = (
            span(ratio(r) for r in rows if r["direction"] == d) for d in ("fwd", "fwd+bwd")
        )
        cells[title] = " / ".join(directions)
    held = [ratio(row) for row in ours(run, "isa")]
    if held:
        cells["every op, both restricted to AVX2"] = span(held)
    for row in ours(run, "step"):
        cells["training step of a small translator, over `torch.nn.Transformer`"] = times(
            ratio(row)
        )
    slower = sum((ratio(row) or 1.0) < SLOWER for row in compared)
    cells["rows slower than PyTorch"] = f"{slower} of {len(compared)}"
    return cells


def aims(run: Run) -> dict[str, str]:
    """Return the median of each aim's values and how many of them reach it."""
    cells = {}
    for aim in AIMS:
        values = list(aim_values(aim, run))
        on_tiles = run.environment["isa"] == TILES and aim.threshold_on_tiles
        threshold = on_tiles or aim.threshold
        shown = f"{threshold:.0%}" if aim.peak else f"{threshold:g}"
        if values:
            middle = f"{median(values):.0%}" if aim.peak else times(median(values))
            reached = sum(v >= threshold for v in values)
            cells[aim.title] = f"{middle}; {reached} of {len(values)} reach {shown}"
    return cells


def aim_values(aim: Aim, run: Run) -> Iterable[float]:
    """Yield the ratio, or the share of the peak, of each row that an aim covers."""
    peak = run.peaks.get(aim.peak)
    whole = peak.get(aim.dtype) if isinstance(peak, dict) else peak
    for row in ours(run):
        covered = {row["op"], row["case"]} & set(aim.ops) and row["dtype"] == aim.dtype
        if not covered or sizes(row).get("Lk", aim.min_keys) < aim.min_keys:
            continue
        value = ratio(row)
        if aim.peak:
            value = (
                float(row["tflops" if aim.peak == "tflops" else "gbps"]) / whole if whole else None
            )
        if value is not None:
            yield value


def models(runs: dict[str, Run]) -> str:
    """Return the table of whole models: the ratio to sdpa, and to eager code."""
    rows = []
    for name, run in runs.items():
        at: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
        for row in run.rows:
            if row["suite"] == "models":
                key = (
                    name.removesuffix("-2-cores"),
                    row["case"],
                    row["shape"],
                    SHORT[row["dtype"]],
                )
                at.setdefault(key, {})[row["direction"], row["implementation"]] = float(
                    row["median_ms"]
                )
        for key, ms in at.items():
            cells = (
                " / ".join(
                    times(ms[direction, peer] / ms[direction, OURS]) for peer in ("sdpa", "eager")
                )
                for direction in ("forward", "training_step")
            )
            rows.append([*key, *cells])
    heads = (
        "machine",
        "model",
        "batch",
        "dtype",
        "forward: over sdpa / eager",
        "training step: over sdpa / eager",
    )
    return table(heads, rows)


class GpuRow(NamedTuple):
    """The times of one problem on the GPU, in milliseconds by implementation."""

    case: str
    shape: str
    direction: str
    ms: dict[str, float]
    tflops: float

    def best_peer(self) -> str | None:
        """Return the fastest kernel of PyTorch, or None if none took part."""
        return min(self.ms.keys() & GPU_PEERS, key=self.ms.__getitem__, default=None)

    def peer_cells(self) -> list[str]:
        """Return the time of PyTorch's fastest kernel, and that time over the time of `cuda`."""
        best = self.best_peer()
        if best is None:
            return ["–", "–"]
        return [f"{self.ms[best]:.3f} ({GPU_PEERS[best]})", times(self.ms[best] / self.ms["cuda"])]


def gpu_rows(name: str) -> list[GpuRow]:
    """Return the problems of one committed run on the GPU."""
    document = json.loads((RESULTS / GPU / name / "results.json").read_text())
    problems: dict[tuple[str, str, str], GpuRow] = {}
    for row in document["rows"]:
        shape = " ".join(f"{size}={n}" for size, n in row["shape"].items())
        key = (row["case"], shape, row["mode"])
        entry = problems.setdefault(key, GpuRow(*key, {}, 0.0))
        entry.ms[row["backend"]] = row["median_ms"]
        if row["backend"] == "cuda":
            problems[key] = entry._replace(tflops=row["tflops"])
    return list(problems.values())


def gpu() -> list[dict[str, str]]:
    """Return the rows of GPU_TABLE: milliseconds of our kernels and of PyTorch's fastest."""
    rows = []
    for name in GPU_RUNS:
        for row in gpu_rows(name):
            best = row.best_peer()
            rows.append({
                "case": row.case, "shape": row.shape, "direction": row.direction,
                "cuda_ms": f"{row.ms['cuda']:.3f}",
                "triton_ms": f"{row.ms['triton']:.3f}" if "triton" in row.ms else "",
                "cuda_tflops": f"{row.tflops:.0f}",
                "torch_ms": f"{row.ms[best]:.3f}" if best else "",
                "torch_kernel": GPU_PEERS[best] if best else "",
                "torch_over_cuda": f"{row.ms[best] / row.ms['cuda']:.2f}" if best else "",
                "run": name,
            })  # fmt: skip
    return rows


def gpu_table() -> str:
    """Return the text of GPU_TABLE."""
    rows, text = gpu(), io.StringIO()
    written = csv.DictWriter(text, rows[0], lineterminator="\n")
    written.writeheader()
    written.writerows(rows)
    return text.getvalue()


def gpu_summary() -> str:
    """Return README's table of the H100: wins and losses of `cuda` at a few problems."""
    rows = []
    for name, case, direction in GPU_SHOWN:
        row = next(row for row in gpu_rows(name) if (row.case, row.direction) == (case, direction))
        size = dict(word.split("=") for word in row.shape.split())
        problem = f"{case.replace('_', ' ')}, D {size['D']}, {int(size['Lk']):,} keys"
        rows.append(
            [
                problem,
                {"fwd": "forward", "bwd": "backward"}[direction],
                f"{row.ms['cuda']:.3f}",
                *row.peer_cells(),
            ]
        )
    return table(
        ("attention on an H100, bf16", "", "ours, ms", "fastest of PyTorch, ms", "speed-up"), rows
    )


def cpu_summary(runs: dict[str, Run]) -> str:
    """Return README's CPU table: mean speed-up over PyTorch, its min, and the slower rows."""
    return per_machine(runs, means, "two cores")


def means(run: Run) -> dict[str, str]:
    """Return the geometric mean and min of the ratios of attention and of the other ops."""
    groups: dict[str, list[float]] = {}
    for row in ours(run):
        value = ratio(row)
        if value is not None:
            op = "attention" if row["op"].startswith("attention") else "the other ops"
            groups.setdefault(f"{op}, {SHORT[row['dtype']]}", []).append(value)
    cells = {
        title: f"{geometric_mean(values):.1f} ({times(min(values))})"
        for title, values in groups.items()
    }
    values = [value for row in ours(run) if (value := ratio(row)) is not None]
    return {
        **cells,
        "rows where we are slower": f"{sum(v < SLOWER for v in values)} of {len(values)}",
    }


# ---- pages


def load() -> dict[str, Run]:
    """Return the committed run of each CPU machine."""
    return {name: medians.read(RESULTS / name / "medians.csv") for name in MACHINES}


def described(run: Run) -> str:
    """Return a machine, its versions and its peaks in one line."""
    e, rates = run.environment, run.peaks
    products = ", ".join(
        f"{1e3 * rate:.0f} GFLOP/s in {SHORT[dtype]}" for dtype, rate in rates["tflops"].items()
    )
    return (
        f"{e['isa']}: {e['cpu']}, {e['cores']} cores, {e['threads']} threads, torch {e['torch']},"
        f" commit {e['commit']}, {e['date'][:10]}; matrix product {products}; reads"
        f" {rates['read_gbps']:.0f} GB/s"
    )


def section(runs: dict[str, Run]) -> str:
    """Return the generated part of docs/performance.md."""
    return "\n\n".join(
        [
            "## CPU, by op",
            "Range of PyTorch's time over ours, forward / forward with backward.",
            per_machine(runs, by_op, "op"),
            "## CPU, share of the machine's limits",
            "Median, and the number of rows that reach the aim.",
            per_machine(runs, aims, "aim"),
            "## CPU, whole models of transformers",
            "Ours means `attn_implementation=\"pytransformer\"` and `convert`, with dropout in "
            "training.",
            models(runs),
            "## NVIDIA H100 80GB HBM3",
            f"bfloat16, torch 2.11.0+cu130, 2026-11-26, L2 flushed before each call. "
            f"[All {len(gpu())} problems](../bench/results/{GPU}/{GPU_TABLE.name}) with their"
            " runs.",
            gpu_summary(),
            "## Machines",
            "\n".join(f"- `{name}`: {described(run)}" for name, run in runs.items()),
        ]
    )  # fmt: skip


def readme_section(runs: dict[str, Run]) -> str:
    """Return the generated part of README."""
    return "\n\n".join(
        [
            gpu_summary(),
            (
                "Speed-up over PyTorch on CPUs, forward with and without backward: geometric mean"
                " over all rows of the\nsuite, and the minimum in parentheses."
            ),
            cpu_summary(runs),
            (
                "A bold value below 1 means that we are slower. [Performance](docs/performance.md)"
                " has more."
            ),
        ]
    )


def replaced(page: str, text: str) -> str:
    """Return a page with the text between its markers replaced."""
    before, rest = page.split(START)
    return f"{before}{START}\n{text}\n{END}{rest.split(END)[1]}"


def run_all(folder: Path) -> None:
    """Run every command of the suite in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for command in COMMANDS:
        print(f"\n---- python {command.format(tools='bench/tools')}", flush=True)
        words = command.format(tools=ROOT / "bench" / "tools").split()
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=os.environ | {"PYTHONSAFEPATH": "1"}
        )
        if done.returncode > 1:  # 1 means that a backend was wrong, which the results record
            raise SystemExit(f"exit code {done.returncode}: {command}")


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", action="store_true", help="run everything first")
    parser.add_argument(
        "--machine",
        choices=MACHINES,
        default=MACHINES[0],
        help="machine that --run replaces (%(default)s)",
    )
    parser.add_argument(
        "--write", action="store_true", help="write both pages and the H100's CSV file"
    )
    options = parser.parse_args()
    if options.run:
        raw = ROOT / "results" / options.machine  # git ignores this folder
        run_all(raw)
        medians.main([str(raw), str(RESULTS / options.machine / "medians.csv")])
    runs = load()
    if not (options.run or options.write):
        print(section(runs))
        return
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), section(runs)), encoding="utf-8")
    readme = README.read_text(encoding="utf-8")
    README.write_text(replaced(readme, readme_section(runs)), encoding="utf-8")
    GPU_TABLE.write_text(gpu_table(), encoding="utf-8")


if __name__ == "__main__":
    main()
