# SPDX-License-Identifier: Apache-2.0
"""bench/tools/compare.py: changes and noise."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pytransformer.cli import OK, USAGE, WRONG, main
from pytransformer.cli.benchmark import results

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "tools"))
import compare

ENVIRONMENT = {
    "device": "cpu",
    "device_name": "A processor",
    "cpu": "A processor",
    "cores": 2,
    "threads": 2,
    "isa": None,
    "gpu": None,
}
ENVIRONMENT |= {
    "system": "Linux",
    "python": "3.11",
    "torch": "2.13",
    "triton": None,
    "pytransformer": "0",
    "commit": None,
}
ENVIRONMENT |= {"date": "2026-01-01", "load": None, "command": "pytransformer bench"}


def row(backend: str, ms: float, **more: Any) -> dict[str, Any]:
    shape = {"B": 1, "Hq": 2, "Hkv": 2, "Lq": 64, "Lk": 64, "D": 32}
    base = {
        "op": "attention",
        "backend": backend,
        "provider": backend,
        "case": "full",
        "shape": shape,
        "dtype": "float32",
        "mode": "fwd",
    }
    base |= {
        "device": "cpu",
        "median_ms": ms,
        "p20_ms": 0.98 * ms,
        "p80_ms": 1.02 * ms,
        "samples": 9,
        "tflops": 1.0,
        "gbps": 1.0,
    }
    base |= {
        "peak_bytes": None,
        "error": 1e-7,
        "error_bound": 1e-6,
        "bound_used": 0.2,
        "errors": {"out": 1e-7},
    }
    base |= {"error_ratio_naive": None, "speedup_naive": None, "speedup_torch": None, "note": ""}
    return base | more


def document(*rows: dict[str, Any], not_run: tuple[Any, ...] = ()) -> dict[str, Any]:
    made = {
        "schema_version": results.SCHEMA_VERSION,
        "environment": ENVIRONMENT,
        "complete": True,
        "rows": list(rows),
    }
    made["not_run"] = list(not_run)
    assert results.validate(made) == []
    return made


BEFORE = document(row("cpu", 1.0), row("torch", 2.0))


def kinds(after: dict[str, Any], threshold: float = 0.1) -> list[str]:
    return [change.kind for change in compare.compare(BEFORE, after, threshold)]


def test_equal_results_are_no_change() -> None:
    assert kinds(copy.deepcopy(BEFORE)) == []


def test_slowed_kernels_are_flagged() -> None:
    (change,) = compare.compare(BEFORE, document(row("cpu", 1.3), row("torch", 2.0)))
    assert (change.kind, change.worse) == ("slower", True)
    assert change.ratio == pytest.approx(1.3)
    assert change.detail == "0.500 before, 0.650 now of PyTorch's time"


def test_slower_machines_are_not_flagged() -> None:
    assert kinds(document(row("cpu", 3.0), row("torch", 6.0))) == []


def test_faster_machines_hide_no_change() -> None:
    assert kinds(document(row("cpu", 0.8), row("torch", 1.0))) == ["slower"]


def test_noise_and_small_changes_are_not_flagged() -> None:
    assert kinds(document(row("cpu", 1.3, p20_ms=1.01, p80_ms=1.4), row("torch", 2.0))) == [], (
        "the intervals meet"
    )
    assert kinds(document(row("cpu", 1.08), row("torch", 2.0))) == [], "below the threshold"
    assert kinds(document(row("cpu", 1.08), row("torch", 2.0)), threshold=0.05) == ["slower"]


def test_noise_is_estimated_from_unchanged_rows() -> None:
    old = document(row("cpu", 1.0), row("torch", 2.0), row("naive", 4.0))
    for naive in (8.0, 2.0):  # twice as slow, or as fast, without a change
        new = document(row("cpu", 1.8), row("torch", 2.0), row("naive", naive))
        assert compare.noise(old, new) == pytest.approx(1.95), (
            "between no change at all and the one row's"
        )
        assert compare.compare(old, new) == []
        worse = document(row("cpu", 2.5), row("torch", 2.0), row("naive", naive))
        assert [c.kind for c in compare.compare(old, worse)] == ["slower"]
    assert (
        compare.noise(old, old)
        == 1.0
        == compare.noise(document(row("cpu", 1.0)), document(row("cpu", 3.0)))
    )


def test_changes_of_a_peer_alone_are_not_flagged() -> None:
    others = [
        row(name, 3.0, case=case) for case in ("causal", "window") for name in ("torch", "naive")
    ]
    old = document(row("cpu", 1.0), row("naive", 8.0), *others)
    for theirs in (2.0, 32.0):
        assert compare.compare(old, document(row("cpu", 1.05), row("naive", theirs), *others)) == []
    for ours, kind in ((4.0, "slower"), (0.25, "faster")):
        (change,) = compare.compare(old, document(row("cpu", ours), row("naive", 8.0), *others))
        assert change.kind == kind
    elsewhere = document(row("cpu", 1.0), row("naive", 2.0), *others)
    elsewhere["environment"] = ENVIRONMENT | {"device_name": "Another"}
    assert [c.kind for c in compare.compare(old, elsewhere)] == ["slower"], (
        "times of two devices say nothing"
    )


def test_several_runs_are_combined() -> None:
    runs = [document(row("cpu", ms), row("torch", 2.0)) for ms in (0.9, 1.0, 1.6)]
    together = compare.merged(runs)
    assert [(r["p20_ms"], r["median_ms"], r["p80_ms"]) for r in together["rows"][:1]] == [
        (0.98 * 0.9, 1.0, 1.02 * 1.6)
    ]
    assert compare.compare(together, document(row("cpu", 1.5), row("torch", 2.0))) == [], (
        "one of the runs was as slow"
    )
    assert [
        c.kind for c in compare.compare(together, document(row("cpu", 2.0), row("torch", 2.0)))
    ] == ["slower"]


def test_faster_kernels_are_reported_and_no_regression() -> None:
    changes = compare.compare(BEFORE, document(row("cpu", 0.5), row("torch", 2.0)))
    assert [(c.kind, c.worse) for c in changes] == [("faster", False)]


def test_quantiles_of_few_samples_are_not_trusted() -> None:
    few = {"samples": 5, "p20_ms": 1.1, "p80_ms": 1.3}
    assert kinds(document(row("cpu", 1.2, **few), row("torch", 2.0))) == [], (
        "widened, the intervals meet"
    )
    assert kinds(document(row("cpu", 1.2, **few | {"samples": 200}), row("torch", 2.0))) == [
        "slower"
    ]
    assert kinds(document(row("cpu", 9.0), row("torch", 2.0))) == ["slower"]
    for ours, theirs in ((4, 9), (9, 1)):
        assert (
            kinds(document(row("cpu", 9.0, samples=ours), row("torch", 2.0, samples=theirs))) == []
        ), "too few to say anything"


def test_naive_code_is_the_baseline_without_pytorch() -> None:
    old = document(row("cpu", 1.0), row("naive", 4.0))
    assert compare.compare(old, document(row("cpu", 1.5), row("naive", 6.0))) == []
    (change,) = compare.compare(old, document(row("cpu", 1.5), row("naive", 4.0)))
    assert (change.kind, change.detail) == (
        "slower",
        "0.250 before, 0.375 now of naive code's time",
    )


def test_absolute_times_count_without_peers() -> None:
    (change,) = compare.compare(document(row("cpu", 1.0)), document(row("cpu", 1.5)))
    assert (change.kind, change.detail) == ("slower", "1.00 ms before, 1.50 ms now")


def test_only_errors_of_the_reference_are_compared() -> None:
    old = document(row("reference", 1.0), row("torch", 2.0))
    assert compare.compare(old, document(row("reference", 9.0), row("torch", 2.0))) == []
    (change,) = compare.compare(
        old, document(row("reference", 1.0, bound_used=0.9), row("torch", 2.0))
    )
    assert change.kind == "less exact"


def test_growing_errors_are_flagged() -> None:
    assert kinds(document(row("cpu", 1.0, bound_used=0.9), row("torch", 2.0))) == ["less exact"]
    assert kinds(document(row("cpu", 1.0, bound_used=0.3), row("torch", 2.0))) == []


def test_missing_rows_are_flagged() -> None:
    assert kinds(document(row("torch", 2.0))) == ["lost"]
    reason = {
        "op": "attention",
        "backend": "cpu",
        "case": "full",
        "dtype": "float32",
        "mode": "fwd",
        "status": "wrong",
    }
    reason |= {"reason": "out is off", "error": None, "error_bound": None}
    assert kinds(document(row("torch", 2.0), not_run=(reason,))) == ["wrong"]
    assert kinds(document()) == [], "a line-up that was not run says nothing"


def test_peers_are_not_compared() -> None:
    assert kinds(document(row("cpu", 1.0), row("torch", 2.0), row("naive", 9.0))) == []


def run(*arguments: str) -> int:
    return main(arguments, compare.build_parser())


def test_command_prints_changes_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, made in (("a", BEFORE), ("b", document(row("cpu", 1.5), row("torch", 2.0)))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(made))
    a, b = str(tmp_path / "a"), str(tmp_path / "b" / "results.json")
    assert run(a, a) == OK
    assert run(a, b) == WRONG
    output = capsys.readouterr().out
    assert "2 rows in both; 1 worse, 0 better." in output
    assert "slower" in output
    (tmp_path / "c.json").write_text("{}")
    assert run(a, str(tmp_path / "c.json")) == USAGE
    assert run(a, str(tmp_path / "none.json")) == USAGE
    assert run(a, b, "--threshold", "-1") == USAGE
    output = capsys.readouterr().err
    assert "is not a results file of schema" in output
    assert "cannot read" in output
    assert "--threshold must be 0 or more" in output


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_runs_without_a_common_row_of_ours_fail(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (row("torch", 2.0), row(backend, 1.0, case="causal"))
    (tmp_path / "a.json").write_text(json.dumps(document(row("cpu", 1.0), row("torch", 2.0))))
    (tmp_path / "b.json").write_text(json.dumps(document(*rows)))
    assert run(str(tmp_path / "a.json"), str(tmp_path / "b.json")) == WRONG
    assert "the runs have no row of ours in common" in capsys.readouterr().out
