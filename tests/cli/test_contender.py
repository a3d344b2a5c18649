# SPDX-License-Identifier: Apache-2.0
"""`bench --contender`: a user's file is checked like a peer, timed, and refused if it is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pytransformer.cli import OK, USAGE, WRONG, main, providers
from pytransformer.cli.benchmark import memory, report

pytestmark = [pytest.mark.unpoisoned, pytest.mark.usefixtures("one_thread")]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md"
SMALL = ("--shape", "B=1,Hq=2,Hkv=2,L=48,D=16", "--min-time", "0", "--no-peaks", "--no-plots")


def bench(folder: Path, source: str, *options: str) -> tuple[int, dict]:
    """Return the exit code and the results of the source as the contender `mine`."""
    (folder / "mine.py").write_text(source)
    arguments = ["bench", "--contender", str(folder / "mine.py"), "--out", str(folder), *SMALL]
    code = main([*arguments, *options])
    return code, report.load(folder / "results.json")


def example() -> str:
    """Return the block of docs/benchmarks.md."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (b for b in blocks if "def attention" in b)
    return block


def test_documented_example_runs_beside_our_backends(tmp_path: Path) -> None:
    assert len(example().strip().splitlines()) <= 18
    options = ("--case", "full,causal,gqa,window,decode", "--no-memory")
    code, document = bench(tmp_path, example(), *options)
    assert code == OK
    timed = {(r["case"], r["mode"], r["backend"]) for r in document["rows"]}
    for case in ("full", "causal", "gqa"):
        for mode in ("fwd", "fwd+bwd"):
            assert {(case, mode, name) for name in ("mine", "torch", "naive")} <= timed
    reasons = {e["case"]: e["reason"] for e in document["not_run"] if e["backend"] == "mine"}
    assert reasons == {"window": "has no argument window", "decode": "declined: top_left only"}
    rows = [r for r in document["rows"] if r["backend"] == "mine"]
    assert all(r["error"] <= r["error_bound"] and r["shape"]["Lk"] == 48 for r in rows)
    assert all(r["speedup_torch"] > 0 and r["provider"] == "mine.py: attention" for r in rows)


@pytest.mark.skipif(memory.why_not() is not None, reason=str(memory.why_not()))
def test_peak_memory_of_a_contender_is_measured(tmp_path: Path) -> None:
    options = ("--case", "full", "--mode", "fwd", "--providers", "torch")
    code, document = bench(tmp_path, example(), *options)
    assert code == OK and {r["backend"] for r in document["rows"]} == {"mine", "torch"}
    assert all(r["peak_bytes"] is not None for r in document["rows"])


WRONG_FORWARD = (
    example() + "\n\nright = attention\ndef attention(*a, **k): return 1.01 * right(*a, **k)\n"
)
WRONG_BACKWARD = (
    example()
    + "\n\nright = attention\ndef attention(q, *a, **k):"
    + " return right(q * 0.5 + q.detach() * 0.5, *a, **k)\n"
)
CRASH = "def attention(query, key, value): return (query[0] / 0).no_such()\n"
NONE = "def attention(query, key, value): pass\n"


@pytest.mark.parametrize(
    ("source", "mode", "status", "reason"),
    [
        (WRONG_FORWARD, "fwd", "wrong", "out is off by"),
        (WRONG_BACKWARD, "fwd+bwd", "wrong", "query is off by"),
        (CRASH, "fwd", "failed", "no_such"),
        (NONE, "fwd", "failed", "must return 1 tensor(s), got NoneType"),
    ],
)
def test_wrong_contender_is_not_timed_and_fails(
    tmp_path: Path,
    source: str,
    mode: str,
    status: str,
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--case", "full", "--mode", mode, "--no-memory")
    code, document = bench(tmp_path, source, *options)
    assert code == WRONG
    assert "mine" not in {row["backend"] for row in document["rows"]}
    (entry,) = [e for e in document["not_run"] if e["backend"] == "mine"]
    assert entry["status"] == status and reason in entry["reason"]
    assert ("WRONG, not timed" if status == "wrong" else "failed: ") in capsys.readouterr().out


def test_contender_without_a_row_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--case", "window", "--mode", "fwd", "--no-memory")
    code, _ = bench(tmp_path, example(), *options)
    assert code == WRONG
    assert "mine has no row" in capsys.readouterr().out


def test_contender_without_backward_is_timed_forward_only(tmp_path: Path) -> None:
    source = (
        example().replace("@ value\n", "@ value.detach()\n").replace("query @", "query.detach() @")
    )
    source = source.replace("key.transpose", "key.detach().transpose")
    code, document = bench(tmp_path, source, "--case", "full", "--no-memory")
    assert code == OK
    assert {r["mode"] for r in document["rows"] if r["backend"] == "mine"} == {"fwd"}
    (entry,) = [e for e in document["not_run"] if e["backend"] == "mine"]
    assert "has no backward" in entry["reason"]


def test_contender_with_dropout_is_checked_without(tmp_path: Path) -> None:
    source = (
        "import torch\ndef attention(query, key, value, *, dropout_p=0.0):\n    return torch.nn."
    )
    source += "functional.scaled_dot_product_attention(query, key, value, None, dropout_p)\n"
    code, document = bench(tmp_path, source, "--case", "dropout", "--no-memory")
    assert code == OK
    assert {r["mode"] for r in document["rows"] if r["backend"] == "mine"} == {"fwd", "fwd+bwd"}


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("torch.py", "", "torch.py has the name of an implementation, torch"),
        ("mine.py", "x = 1", "has no function with the name of an op; the ops are attention"),
        ("mine.py", "import no_such_module", "raised ModuleNotFoundError: No module named"),
        ("absent.py", None, "absent.py is not a Python file"),
    ],
)
def test_unusable_file_is_named(
    tmp_path: Path, name: str, source: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if source is not None:
        (tmp_path / name).write_text(source)
    try:
        code = main(["bench", "--contender", str(tmp_path / name)])
    except SystemExit as stop:
        code = stop.code
    assert code == USAGE
    assert message in capsys.readouterr().err


def test_two_contenders_of_one_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a" / "mine.py", tmp_path / "b" / "mine.py"]
    options = [word for file in files for word in ("--contender", str(file))]
    assert main(["bench", *options]) == USAGE
    assert "two files have the name mine" in capsys.readouterr().err


def test_contender_is_held_to_the_bound_of_peers() -> None:
    assert providers.Provider("mine", lambda problem: None, Path("mine.py")).peer
    assert not providers.Provider("cpu", lambda problem: None).peer
