# SPDX-License-Identifier: Apache-2.0
"""The check at first use detects faults in the interpreted Triton kernel in its own process.

A GPU or its compiler could cause such faults. The next backend then computes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pytransformer.ops._core.registry import OPS, trace
from support.planted_backend import check_told_once, checked_apart
from support.way_down import WAYS

pytestmark = pytest.mark.falls_back
BEGINNING, SUM = '    b_m = tl.full([C.BM], float("-inf"), tl.float32)\n', "tl.where(m_i, b_l, 0.0)"
# Edits of kernels/attention/fwd.py, and how the result reports them.
FAULTS = {
    "wrong numbers": (SUM, f"1.02 * {SUM}", "verify: wrong here: "),
    "hang": (
        BEGINNING,
        f"    __import__('time').sleep(1000)\n{BEGINNING}",
        "verify: hung here: no answer in ",
    ),
    "crash": (
        BEGINNING,
        f"    __import__('os').abort()\n{BEGINNING}",
        "verify: crashed here: the process ended by SIGABRT",
    ),
}
# Run the other failures once, in slow runs: tests/ops/test_verification.py has them, and the
# interpreter needs 5 s each.
KINDS = [("attention", fault) for fault in FAULTS]
KINDS += [
    pytest.param(way, "wrong numbers", marks=pytest.mark.slow) for way in WAYS if way != "attention"
]


def planting(fault: str, folder: Path) -> str:
    """Return the lines that edit the kernel in the process of the check."""
    old, new, _ = FAULTS[fault]
    edit = ("attention", "fwd.py", old, new)
    return (
        f"import pathlib, kernel_mutants; m = kernel_mutants.mutated(*{edit!r},"
        f" pathlib.Path({str(folder)!r})); m.__enter__()"
    )


@pytest.mark.parametrize("way, fault", KINDS)
def test_broken_kernel_is_detected_and_reported_once(
    way: str, fault: str, tmp_path: Path, capfd
) -> None:
    want = WAYS[way]()
    seconds = 8 if fault == "hang" else 60
    with checked_apart(
        OPS["attention"].backends["triton"],
        planting(fault, tmp_path / "copy"),
        tmp_path,
        seconds=seconds,
    ):
        check_told_once(WAYS[way], want, "triton", FAULTS[fault][2])
    assert (
        list(tmp_path.glob("verification-*.json"))
        and "in a child process, once per machine" in capfd.readouterr().err
    )


def test_kernel_without_a_fault_is_used(tmp_path: Path) -> None:
    """Otherwise the tests above could pass without a backend."""
    with checked_apart(OPS["attention"].backends["triton"], "", tmp_path), trace() as by:
        WAYS["attention"]()
    assert {backend for _, backend in by} == {"triton"}
