# SPDX-License-Identifier: Apache-2.0
"""bench/tools/inference.py: errors, reasons, the check before timing, engines on small models."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pytransformer.cli import OK, USAGE, WRONG, main

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "tools"))
import engines
import inference

transformers = pytest.importorskip(
    "transformers", reason='transformers is not installed (the extra "hf")'
)
SIZES = dict(
    vocab_size=1001,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
)
PADDED = (inference._ids((3, 8, 5, 8), words=1001),)


def tiny_bert() -> Any:
    return inference.bert(**SIZES)


def tiny_gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=1001)
    )


SMALL = {
    "bert": inference.Row("tiny BERT", tiny_bert, engines.Work("encoder", PADDED)),
    "query": inference.Row(
        "tiny BERT, one query", tiny_bert, engines.Work("encoder", (inference._ids((4,), 1001),))
    ),
    "gpt2": inference.Row(
        "tiny GPT-2",
        tiny_gpt2,
        engines.Work("decoder", ({"input_ids": PADDED[0]["input_ids"][1:2]},), 3),
    ),
}


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "ROWS", SMALL)


def bench(path: Path, *arguments: str) -> tuple[int, dict[tuple[str, str, str], dict[str, str]]]:
    """Run the command and return its exit code and the CSV's rows."""
    code = main(
        [*arguments, "--seconds", "0", "--out", str(path / "x.csv")], inference.build_parser()
    )
    with (path / "x.csv").open() as file:
        assert file.readline().startswith('# {"environment"')
        rows = {(r["work"], r["dtype"], r["engine"]): r for r in csv.DictReader(file)}
    return code, rows


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bert5"], "row must be of bert, query, gpt2, got bert5"),
        (["--dtype", "int8"], "--dtype must be of float32, bfloat16, got int8"),
        (["--engines", "eager,tvm"], "got tvm"),
    ],
)
def test_bad_input_is_named(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, inference.build_parser()) == USAGE
    assert said in capsys.readouterr().err


@pytest.mark.unpoisoned
def test_engines_of_torch_are_checked_and_timed(tmp_path: Path) -> None:
    names = "eager,sdpa,convert,packed,unpadded"
    code, rows = bench(tmp_path, "bert", "gpt2", "--engines", names, "--dtype", "float32,bfloat16")
    assert code == OK
    assert len(rows) == 2 * 2 * 5
    for (work, _, engine), row in rows.items():
        if engine == "unpadded" and work != "tiny BERT":
            assert row["reason"] == "the batches have no padding" and not row["median_ms"]
        else:
            assert float(row["median_ms"]) > 0 and row["weights"] == "random", row


@pytest.mark.unpoisoned
def test_wrong_and_absent_engines_are_reported_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off(work: engines.Work, model: Any, dtype: torch.dtype) -> engines.Call:
        call = engines.converted(work, model, dtype)
        return lambda: [o * 1.01 for o in call()]

    monkeypatch.setitem(engines.ENGINES, "convert", off)
    for package in ("onnxruntime", "openvino", "ctranslate2"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it raises ImportError
    code, rows = bench(
        tmp_path, "query", "--engines", "convert,onnxruntime,openvino,ctranslate2",
        "--dtype", "float32",
    )  # fmt: skip
    assert code == WRONG
    assert all(not row["median_ms"] for row in rows.values())
    reasons = {engine: row["reason"] for (_, _, engine), row in rows.items()}
    assert reasons.pop("convert").startswith("WRONG: off by 0.01")
    assert all("pip install" in reason for reason in reasons.values()), reasons


@pytest.mark.unpoisoned
@pytest.mark.parametrize("engine", ["convert", "sdpa"])
@pytest.mark.parametrize("late", [False, True], ids=["prepared", "called"])
def test_failures_are_listed_and_fail_the_run_if_ours(
    engine: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(engines.ENGINES, engine, lambda *_: fails if late else fails())
    code, rows = bench(tmp_path, "query", "--engines", f"eager,{engine}", "--dtype", "float32")
    assert code == (WRONG if engine == "convert" else OK)
    reasons = {name: row["reason"] for (_, _, name), row in rows.items()}
    assert reasons == {"eager": "", engine: "FAILED: RuntimeError: out of luck"}


@pytest.mark.slow  # exports and compiles
@pytest.mark.unpoisoned
@pytest.mark.parametrize("engine", ["compile", "onnxruntime", "openvino", "ctranslate2"])
def test_peer_agrees_with_the_eager_model(engine: str, tmp_path: Path) -> None:
    if engine != "compile":
        pytest.importorskip(engine, reason=f'{engine} is not installed (the extra "peers")')
    code, rows = bench(tmp_path, "--engines", engine, "--dtype", "float32")
    assert code == OK
    for (work, _, _), row in rows.items():
        unsupported = work == "tiny GPT-2" and engine in ("onnxruntime", "openvino")
        assert bool(row["median_ms"]) != unsupported, row["reason"]
