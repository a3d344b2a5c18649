# SPDX-License-Identifier: Apache-2.0
"""What a reader of a tree meets, as numbers: long files and functions, many parameters, import circles, words in docs, lines, kernels.

    python bench/tools/census.py            # of this tree
    python bench/tools/census.py OLD NEW    # two trees side by side, as rows of a Markdown table

Counted by the rules of this tree's tests/test_layout.py and tests/test_layers.py, whatever the tree: `git archive COMMIT | tar x -C OLD`
makes one. docs/decisions/0108-before-and-after.md has the figures.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
CODE = (".py", ".h", ".cpp", ".cuh", ".cu", ".sh")
LEFT_OUT = {"build", "dist", "results", "__pycache__", ".venv", ".git"}
WRITTEN = {"accuracy-tables.md", "architectures.md", "performance.md"}  # by scripts


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"census_{path.stem}", path)
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def files(root: Path, *suffixes: str) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if path.suffix in suffixes and not LEFT_OUT & set(path.relative_to(root).parts) and path.is_file():
            yield path


def sizes(root: Path) -> dict[str, int]:
    """Files over 400 lines, functions over 80 (kernels 150), more than 12 parameters; ops' raw functions have their schema's."""
    measure = module(ROOT / "bench" / "tools" / "sizes.py")
    found = {"files over 400 lines": 0, "functions over 80 lines (kernels 150)": 0, "functions of more than 12 parameters": 0}
    for path in files(root, *CODE[:-1]):
        text = path.read_text()
        fixed = set(re.findall(r"TORCH_BOX\(&(\w+)\)", text))
        found["files over 400 lines"] += len(text.splitlines()) > 400
        for function in measure.functions(path):
            found["functions over 80 lines (kernels 150)"] += function.lines > (150 if function.kernel else 80)
            public = path.parent.name == "ops"
            found["functions of more than 12 parameters"] += (
                function.parameters > 12 and function.name not in fixed and not public
            )
    return found


def circles(root: Path) -> dict[str, int]:
    """Of the package's files, imports within functions counted."""
    layers = module(ROOT / "tests" / "test_layers.py")
    layers.ROOT = root
    found = layers.circles(layers.graph())
    return {"import circles": len(found), "files in import circles": sum(map(len, found))}


def words(root: Path) -> dict[str, int]:
    pages = [*files(root / "docs", ".md"), *(root / name for name in ("README.md", "CONTRIBUTING.md"))]
    counts = [len(page.read_text().split()) for page in pages if page.name not in WRITTEN]
    return {"pages of docs": len(counts), "words in docs": sum(counts), "words in the longest page": max(counts)}


def lines(root: Path) -> dict[str, int]:
    total = {"lines in all": 0, "of them tests": 0}
    for path in files(root, *CODE):
        count = len(path.read_text().splitlines())
        total["lines in all"] += count
        total["of them tests"] += count if path.relative_to(root).parts[0] == "tests" else 0
    return total


def kernels(root: Path) -> dict[str, int]:
    """In the CUDA library's committed table: of each architecture, and of attention's directions on the one that has most."""
    table = json.loads((root / "tests" / "cuda" / "resources.json").read_text())["kernels"]
    arch = collections.Counter(key.split()[0] for key in table)
    attention = [key for key in table if "attention" in key and key.startswith("sm_90a sm90_")]
    found = {f"CUDA kernels for {name}": arch[name] for name in sorted(arch)}
    for direction in ("fwd", "bwd"):
        found[f"attention {direction} written for sm_90a"] = sum(f"_{direction}" in key for key in attention)
    return found


def census(root: Path) -> dict[str, int]:
    return {k: v for part in (sizes, circles, words, lines, kernels) for k, v in part(root).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="*", type=Path, default=[ROOT], metavar="TREE")
    roots = [root.resolve() for root in parser.parse_args().roots]
    counted = [census(root) for root in roots]
    for name in dict.fromkeys(name for found in counted for name in found):
        print(f"| {name} | " + " | ".join(f"{found[name]:,}" if name in found else "–" for found in counted) + " |")


if __name__ == "__main__":
    main()
