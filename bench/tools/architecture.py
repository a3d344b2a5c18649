# SPDX-License-Identifier: Apache-2.0
"""Draw docs/images/architecture.svg: the package's layers and the kernel backends.

    python bench/tools/architecture.py            # print the picture
    python bench/tools/architecture.py --write    # write the file

Each box is a folder. A folder without a box, or a box without a folder, is an error, so that the
picture cannot become stale.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
WIDTH, SIDE, GAP, MARGIN, HEIGHT = (
    900,
    150,
    10,
    20,
    58,
)  # sizes: picture, box beside it, gaps, margin, box


class Box(NamedTuple):
    title: str
    text: str
    folder: str | None = None
    kind: str = "python"


# Rows from the user's API down to the hardware; each row builds on the one below it.
ROWS = (
    (
        Box("your model", "PyTorch, Hugging Face", None, "outside"),
        Box("your code", "pt.attention(…)", None, "outside"),
        Box("your terminal", "pytransformer bench …", None, "outside"),
    ),
    (
        Box("cli", "bench, doctor, explain", "pytransformer/cli"),
        Box("training", "corpora, trainer", "pytransformer/training"),
        Box("viz", "pictures of attention", "pytransformer/viz"),
    ),
    (
        Box("integrations", "activate, transformers, convert", "pytransformer/integrations"),
        Box("compat", "flash-attn, xFormers, Liger", "pytransformer/compat"),
        Box("models", "BERT, GPT, T5, ViT, …", "pytransformer/models"),
    ),
    (Box("nn", "modules and blocks", "pytransformer/nn"),),
    (
        Box(
            "distributed",
            "a sequence split over processes, tile by tile",
            "pytransformer/distributed",
        ),
    ),
    (
        Box(
            "ops",
            "public functions: check the arguments, lower them to one problem",
            "pytransformer/ops",
        ),
    ),
    (
        Box(
            "ops/_core",
            "registry: which backend takes this call, and why not the others; autograd",
            "pytransformer/ops/_core",
        ),
    ),
    (
        Box(
            "reference, torch",
            "plain PyTorch; its fused kernels",
            "pytransformer/reference",
            "backend",
        ),
        Box("_backends/cpu", "allocates, calls", "pytransformer/ops/_backends/cpu", "backend"),
        Box(
            "_backends/triton", "allocates, calls", "pytransformer/ops/_backends/triton", "backend"
        ),
        Box("_backends/cuda", "allocates, calls", "pytransformer/ops/_backends/cuda", "backend"),
    ),
    (
        Box("torch", "any device", None, "outside"),
        Box("csrc/cpu", "C++17, AMX to generic", "csrc/cpu", "kernel"),
        Box("kernels", "Triton", "kernels", "kernel"),
        Box("csrc/cuda", "C++, sm_80 to sm_90a", "csrc/cuda", "kernel"),
    ),
    (
        Box("any device", "", None, "outside"),
        Box("CPU", "the best instruction set", None, "outside"),
        Box("GPU", "or Triton's interpreter", None, "outside"),
        Box("GPU", "or csrc/emulator", "csrc/emulator", "outside"),
    ),
)
BESIDE = Box("testing", "float64 oracle|error bounds|named cases", "pytransformer/testing")
WITHIN = {  # further folders that a box covers
    "pytransformer/ops/_backends",
    "pytransformer/ops/_backends/gpu",  # shared by triton and cuda
    "pytransformer/ops/_backends/torch",  # beside the reference
    "pytransformer/ops/_problem",
    "csrc/common",  # shared by cpu, cuda and the emulator
    "csrc/fast_path",  # ops and ops/_core again, for plain eager calls
}
LOOKED_AT = ("pytransformer", "pytransformer/ops", "pytransformer/ops/_backends", "csrc")
STYLE = """
  .ground { fill: #ffffff }
  text { font-family: system-ui, sans-serif; text-anchor: middle; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 } .text { font-size: 12px }
  rect.box { stroke-width: 1.5 } .outside { fill: #f6f8fa; stroke: #8c959f; stroke-dasharray: 4 3 }
  .python { fill: #ddf4ff; stroke: #0969da } .backend { fill: #fff8c5; stroke: #9a6700 }
  .kernel { fill: #dafbe1; stroke: #1a7f37 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } text { fill: #f0f6fc } .outside { fill: #161b22; stroke: #9198a1 }
    .python { fill: #0c2d6b; stroke: #58a6ff } .backend { fill: #4b2900; stroke: #d29922 }
    .kernel { fill: #033a16; stroke: #3fb950 }
  }
"""


def check_folders() -> None:
    """Raise ValueError unless folders and boxes correspond."""
    drawn = {box.folder for row in ROWS for box in (*row, BESIDE) if box.folder}
    if gone := [folder for folder in sorted(drawn) if not (ROOT / folder).is_dir()]:
        raise ValueError(f"boxes without a folder: {', '.join(gone)}")
    there = {
        str(path.relative_to(ROOT))
        for parent in LOOKED_AT
        for path in (ROOT / parent).iterdir()
        if path.is_dir() and path.name != "__pycache__" and any(path.glob("*.[pch]*"))
    }
    if missing := sorted(there - drawn - WITHIN):
        raise ValueError(f"folders without a box: {', '.join(missing)}")


def draw_box(box: Box, x: float, y: float, width: float, height: float) -> list[str]:
    lines = [line for line in box.text.split("|") if line]
    middle, top = x + width / 2, y + height / 2 - 9 * len(lines) + 5
    drawn = [
        f'<rect class="box {box.kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        ' rx="6"/>'
    ]
    drawn.append(f'<text class="title" x="{middle:g}" y="{top:g}">{escape(box.title)}</text>')
    drawn += [
        f'<text class="text" x="{middle:g}" y="{top + 18 * (i + 1):g}">{escape(line)}</text>'
        for i, line in enumerate(lines)
    ]
    return drawn


def picture() -> str:
    """Return the SVG."""
    check_folders()
    inner = WIDTH - 2 * MARGIN - SIDE - GAP
    drawn, y = [], float(MARGIN)
    for row in ROWS:
        width = (inner - GAP * (len(row) - 1)) / len(row)
        for i, box in enumerate(row):
            drawn += draw_box(box, MARGIN + i * (width + GAP), y, width, HEIGHT)
        y += HEIGHT + GAP
    below = MARGIN + 2 * (HEIGHT + GAP)  # the tested parts begin under the commands
    drawn += draw_box(BESIDE, WIDTH - MARGIN - SIDE, below, SIDE, y - GAP - below - (HEIGHT + GAP))
    height = y - GAP + MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}"'
        f' height="{height:g}" role="img">'
    )
    title = "<title>The layers of pytransformer, from what a user calls down to what runs</title>"
    ground = f'<rect class="ground" width="{WIDTH}" height="{height:g}"/>'
    return "\n".join([head, title, f"<style>{STYLE}</style>", ground, *drawn, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {PICTURE.relative_to(ROOT)}")
    if parser.parse_args().write:
        PICTURE.write_text(picture(), encoding="utf-8")
    else:
        print(picture(), end="")


if __name__ == "__main__":
    main()
