# SPDX-License-Identifier: Apache-2.0
"""Output and exit code of each command, run as a process."""

from __future__ import annotations

import argparse
import json
import re

import pytest

import pytransformer
from pytransformer.cli import OK, USAGE, WRONG, doctor, main, providers
from pytransformer.cli.benchmark import plan

NAMES = ("doctor", "explain", "bench", "verify", "train", "translate", "attention-map")


def test_help_names_every_command(cli):
    listed = cli("--help").stdout
    assert cli().stdout == listed, "no command at all must be the same as --help"
    for command in NAMES:
        assert re.search(rf"^ +{command}\s+\w", listed, re.MULTILINE), (
            f"--help does not list {command}"
        )


@pytest.mark.parametrize("command", NAMES)
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == OK
    assert capsys.readouterr().out.startswith(f"usage: pytransformer {command}")


@pytest.mark.parametrize("command", ["", *NAMES, "train translate"])
def test_help_fits_80_columns(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 80] == []


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"pytransformer {pytransformer.__version__}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["bench", "atention"], "unknown op atention; the ops are attention"),
        (["bench", "attention", "--case", "ful"], "no case ful; attention have "),
        (["bench", "--dtype", "int8"], "int8 is not one of float32"),
        (["bench", "--mode", "sideways"], "sideways is not one of fwd, bwd, fwd+bwd"),
        (["bench", "--backends", "tpu"], "tpu is not one of reference, cpu"),
        (["bench", "--shape", "Lq=0"], "'Lq=0' is not NAME=SIZE"),
        (["bench", "--threads", "0"], "--threads must be at least 1, got 0"),
        (
            ["bench", "--quick", "--dtype", "bf16"],
            "--quick chooses its own cases, so it does not go with --dtype",
        ),
        (["bench", "--quick", "--out", "/proc/nowhere"], "cannot make the folder /proc/nowhere"),
        (["explain", "attention", "--shape", "2,8"], "'2' is not NAME=SIZE"),
        (["explain", "attention", "--case", "ful"], "no case ful; attention have "),
        (["explain", "attention", "--shape", "Hq=3,Hkv=2"], "error: attention: "),
        (["explain", "attention", "--backend", "tpu"], "unknown backend 'tpu'"),
    ],
)
def test_errors_have_a_hint(capsys, arguments, said):
    try:
        code = main(arguments)
    except SystemExit as stop:  # argparse's errors
        code = stop.code
    printed = capsys.readouterr()
    assert code == USAGE
    assert said in printed.err
    assert printed.out == ""


def test_errors_print_no_traceback(cli):
    done = cli("bench", "atention", expect=USAGE)
    assert (
        done.stderr
        == f"pytransformer: error: unknown op atention; the ops are {', '.join(plan.OPS)}\n"
    )


def test_doctor_checks_every_op(cli):
    text = cli("doctor").stdout
    for heading in (
        "Installation",
        "CPU",
        "Native CPU library",
        "GPU",
        "Backends",
        "Optional libraries",
        "Self-check",
    ):
        assert re.search(rf"^{heading}", text, re.MULTILINE)
    report = json.loads(cli("doctor", "--json").stdout)
    assert {line["op"] for line in report["self_check"]} == set(plan.OPS)
    assert all(line["verdict"] == "ok" and line["bound_used"] <= 1 for line in report["self_check"])
    backends = {backend["backend"]: backend for backend in report["backends"]}
    assert set(backends) == {"reference", "torch", "cpu", "triton", "cuda"}
    assert set(backends["reference"]["works"]) == set(plan.OPS)
    for backend in backends.values():
        assert backend["works"] or backend["why_not"], (
            f"{backend['backend']} neither works nor says why not"
        )


def test_doctor_fails_when_a_kernel_is_wrong(capsys, monkeypatch):
    prepare = providers.prepare_ours

    def two_percent_off(backend, problem):
        prepared = prepare(backend, problem)
        forward = prepared.forward
        return providers.Prepared(
            "wrong", lambda: tuple(1.02 * o for o in forward()), prepared.context
        )

    monkeypatch.setattr(providers, "prepare_ours", two_percent_off)
    assert doctor.run(argparse.Namespace(json=False)) == WRONG
    output = capsys.readouterr().out
    assert "WRONG" in output and "checks failed" in output


def test_explain_gives_a_reason_for_every_backend_not_chosen(cli):
    text = cli("explain", "attention", "--case", "t5_bias", "--shape", "D=1000", "--grad").stdout
    rows = [
        line.split(None, 2) for line in text.splitlines() if line.startswith(("cpu ", "reference "))
    ]
    verdicts = {row[0]: row[1] for row in rows}
    assert verdicts == {"cpu": "no", "reference": "chosen"}, text
    assert len(next(row for row in rows if row[0] == "cpu")[2]) > 10, "no reason beside the refusal"


@pytest.mark.parametrize("op", plan.OPS)
def test_explain_accepts_every_op_and_option(op, capsys):
    case = plan.cases(op)[0]
    name, size = next(iter(case.shape.items()))
    options = ["--case", case.name, "--shape", f"{name}={size + 8}", "--dtype", "bf16"]
    assert main(["explain", op, *options, "--backend", "reference", "--grad"]) == OK
    output = capsys.readouterr().out
    title = output.partition(":")[0]
    assert op in title and case.name in title and str(size + 8) in title
    assert "bfloat16: reference" in output
