# SPDX-License-Identifier: Apache-2.0
"""Draw docs/images/h100.png: attention on the H100 beside PyTorch's kernels.

    python bench/tools/pictures.py                  # into docs/images
    python bench/tools/pictures.py --out FOLDER

The figures are those of the committed runs that docs/performance.md lists.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
import performance  # beside this file

from pytransformer.cli.benchmark.plots import STYLES, figure_of
from pytransformer.cli.benchmark.report import label_of

Row = dict[str, Any]
IMAGES = performance.ROOT / "docs" / "images"
NAME = "h100.png"
SYSTEMS = ("cuda", "torch_cudnn", "torch_flash")
# Folders of the runs, in the figure's order.
RUNS = {
    "fwd": ("second/fwd64", "second/fwd128", "long", "d256"),
    "bwd": ("second/bwd64", "second/bwd128", "long"),
}
NOTE = "one GPU, runs of 2026-11-26; a system without a bar was not measured there"
TITLES = {"fwd": "forward", "bwd": "backward"}


def rows_of(mode: str) -> dict[str, dict[str, Row]]:
    """Return the rows of full and causal attention by problem and system."""
    found: dict[str, dict[str, Row]] = {}
    for causal in ("full", "causal"):
        for run in RUNS[mode]:
            path = performance.RESULTS / performance.GPU / run / "results.json"
            for row in json.loads(path.read_text())["rows"]:
                if row["case"] == causal and row["mode"] == mode and row["backend"] in SYSTEMS:
                    shape = row["shape"]
                    name = f"{causal}\nD {shape['D']}\n{shape['Lk']:,} keys"
                    found.setdefault(name, {})[row["backend"]] = row
    return {name: {s: rows[s] for s in SYSTEMS if s in rows} for name, rows in found.items()}


def draw(path: Path) -> Path:
    """Draw TFLOP/s by head size and length, forward above backward."""
    figure = figure_of(10, 7.4)
    axes = figure.subplots(len(RUNS), 1)
    for axis, mode in zip(axes, RUNS, strict=True):
        problems = rows_of(mode)
        for system in SYSTEMS:
            measured = [
                (i, list(rows), rows[system])
                for i, rows in enumerate(problems.values())
                if system in rows
            ]
            heights = [row["tflops"] for _, _, row in measured]
            offsets = [
                i + 0.27 * (present.index(system) - (len(present) - 1) / 2)
                for i, present, _ in measured
            ]
            color = STYLES[system][0]
            axis.bar(offsets, heights, 0.26, color=color, label=label_of(system))
            for x, height in zip(offsets, heights, strict=True):
                axis.text(x, height + 8, f"{height:.0f}", ha="center", fontsize=7)
        axis.set_xticks(range(len(problems)), problems, fontsize=8)
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(0, 1.12 * axis.get_ylim()[1])
        axis.set_title(f"{TITLES[mode]}, by mask, head size and length", fontsize=10)
        axis.grid(axis="y", color="0.9")
        axis.set_axisbelow(True)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(SYSTEMS),
        frameon=False,
        title=NOTE,
        title_fontsize=7,
    )
    figure.suptitle("Attention on an NVIDIA H100 80GB, bfloat16", fontsize=12, fontweight="bold")
    figure.savefig(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder (default docs/images)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print(draw(arguments.out / NAME))


if __name__ == "__main__":
    main()
