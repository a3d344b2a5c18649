# SPDX-License-Identifier: Apache-2.0
"""The code cells of examples/quickstart.ipynb run in order, and the file holds no outputs."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "quickstart.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last else None


@pytest.mark.unpoisoned
@pytest.mark.falls_back
@pytest.mark.usefixtures("one_thread")
def test_notebook_runs_and_shows_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, html_problems
) -> None:
    for module in ("transformers", "matplotlib"):
        pytest.importorskip(module, reason=f"the notebook shows {module}")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "notebook"}
    shown = [run("".join(c["source"]), names) for c in CELLS if c["cell_type"] == "code"]
    results = [v for v in shown if hasattr(v, "_repr_html_")]
    tables = [t for v in results if (t := v._repr_html_())]  # a figure without pyplot has None
    assert len(tables) >= 3 and all(html_problems(t) == [] and "<table>" in t for t in tables)


def test_notebook_has_no_outputs() -> None:
    code = [c for c in CELLS if c["cell_type"] == "code"]
    assert len(code) >= 5
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in code)
