# SPDX-License-Identifier: Apache-2.0
"""The reported limit of a row, from roofs, call floor, kernel-only time and a settled clock."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch

from pytransformer.cli import OK, main, providers
from pytransformer.cli.benchmark import clock, limits, memory, plan, report, results, runner

pytestmark = [pytest.mark.unpoisoned, pytest.mark.usefixtures("one_thread")]

# 1 TFLOP/s; 100 GB/s in cache, 10 outside it, 20 for reads only.
PEAKS = {
    "tflops": {"float32": 1.0},
    "gbps": 10.0,
    "read_gbps": 20.0,
    "warm_gbps": 100.0,
    "copy_gbps": {"1000000": 100.0, "1000000000": 10.0},
}


def row(
    gflop: float,
    megabytes: float,
    ms: float,
    floor: float,
    alone: float | None,
    cache: str = "warm",
) -> dict:
    return {
        "dtype": "float32", "median_ms": ms, "tflops": gflop / ms, "gbps": megabytes / ms,
        "cache": cache,
        "floor_ms": floor, "alone_ms": alone,
    }  # fmt: skip


# Work, traffic and times with one dominant part, in a call of 10 ms.
KNOWN = [
    ("product", 0.8, row(8, 1, 10, 0.01, 9.9)),
    ("bandwidth", 0.9, row(1, 180, 10, 0.01, 9.9)),  # exceeds the cache: at 20 GB/s
    ("bandwidth", 0.9, row(0.01, 18, 1, 0.01, 0.99, "cold")),
    ("kernel", 0.81, row(0.01, 18, 1, 0.01, 0.99)),  # the same in cache: 0.18 ms
    ("call", 0.7, row(0.1, 0.1, 10, 7, 2)),
    ("allocator", 0.6, row(1, 1, 10, 0.1, 3.9)),
    ("kernel", 0.85, row(1, 1, 10, 0.5, 9.5)),
    ("rest", 0.8, row(1, 1, 10, 1, None)),
    ("call", 1.0, row(1e-6, 1e-6, 10, 12, 9)),  # a tiny call that took longer than this one
]


@pytest.mark.parametrize(("name", "share", "measured"), KNOWN)
def test_limit_is_the_largest_part(name: str, share: float, measured: dict) -> None:
    found, shares = limits.of(measured, PEAKS)
    assert found == name and name in limits.LIMITS
    assert shares[name] == pytest.approx(share, abs=0.03)
    assert set(shares) <= set(limits.LIMITS) and min(shares.values()) >= 0


def test_missing_measurements_give_no_limit() -> None:
    measured = KNOWN[0][2]
    assert limits.of(measured, None) is None
    assert limits.of({**measured, "floor_ms": None}, PEAKS) is None
    assert limits.of({**measured, "dtype": "float64"}, PEAKS) is None
    assert limits.of(measured, {k: v for k, v in PEAKS.items() if k != "copy_gbps"}) is None


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return the document of a small benchmark with peaks."""
    folder: Path = tmp_path_factory.mktemp("limits")
    small = (
        "--size",
        "small",
        "--min-time",
        "0",
        "--threads",
        "1",
        "--no-memory",
        "--no-plots",
        "--mode",
        "fwd,fwd+bwd",
    )
    assert main(["bench", "layer_norm", "--case", "layer_norm", *small, "--out", str(folder)]) == OK
    assert " limit " in (folder / "report.md").read_text()
    return json.loads((folder / "results.json").read_text())


def test_every_row_has_a_limit(written: dict) -> None:
    assert results.validate(written) == []
    for found in written["rows"]:
        assert (found["limit"], found["limit_shares"]) == limits.of(found, written["peaks"])
        assert found["floor_ms"] > 0 and (found["alone_ms"] is not None) == (
            found["backend"] == "cpu"
        )
        share = found["limit_shares"][found["limit"]]
        assert report.table_row(found)[-1] == f"{found['limit']} {share:.0%}"
        assert (
            sum(v for k, v in found["limit_shares"].items() if k not in ("product", "bandwidth"))
            <= 2
        )


def test_documents_with_a_wrong_limit_are_refused(written: dict) -> None:
    def faults(change) -> str:
        broken = json.loads(json.dumps(written))
        change(broken)
        return "; ".join(results.validate(broken))

    for name in limits.LIMITS:
        if name != written["rows"][0]["limit"]:
            assert "rows[0].limit" in faults(
                lambda d, name=name: d["rows"][0].update(limit=name)
            ), name
    # longer than the tiny call too, whose noise may exceed this call: then its share stays 1
    slow = max(written["rows"][0]["p80_ms"], written["rows"][0]["floor_ms"])
    slower = {"median_ms": slow * 4, "p80_ms": slow * 8}
    assert "rows[0].limit" in faults(lambda d: d["rows"][0].update(slower))
    assert "rows[0].limit" in faults(lambda d: d["rows"][0].update(limit=None, limit_shares=None))
    assert ".limit" in faults(lambda d: d["peaks"].update(copy_gbps={"1000": 1e-3}))
    assert "positive rates" in faults(lambda d: d["peaks"].update(copy_gbps={"1000": 0}))


@pytest.mark.parametrize(
    "name", ["layer_norm", "full", "feed_forward_gelu", "linear_cross_entropy"]
)
def test_kernel_only_calls_write_the_same_results(name: str) -> None:
    case = plan.case(name, "small")
    problem = providers.Problem.make(case, torch.float32, "cpu", seed=5, grad=False)
    found = [p for p in providers.ours(case.op) if p.name == "cpu"]
    try:
        prepared = found[0].prepare(problem)
    except providers.Unsupported as reason:
        pytest.skip(str(reason))
    kept: list = []
    with prepared.context():
        call = runner.work(problem, prepared, "fwd")
        alone = limits.kernels_alone(case.op, "cpu", lambda: kept.append(call()))
        assert alone is not None
        (result,) = kept
        expected = [t.clone() for t in result]
        for t in result:
            t.fill_(float("nan"))
        alone()
    if name != "linear_cross_entropy":  # its loss is a sum over the kernel's output
        assert all(torch.equal(t, w) for t, w in zip(result, expected))


def test_peers_have_no_kernel_only_calls() -> None:
    x = torch.ones(3)
    assert limits.kernels_alone("layer_norm", "cpu", lambda: x + 1) is None


# ---- clock


@pytest.mark.usefixtures("watch")
def test_warm_up_continues_while_calls_get_faster() -> None:
    takes = iter([0.02, 0.015, 0.01, 0.006])

    def call() -> None:
        clock.time.sleep(next(takes, 0.004))

    (timing,) = clock.interleaved(
        {"": clock.Contender(call, contextlib.nullcontext)}, min_time=0.02
    ).values()
    assert timing.median_ms == timing.p80_ms == pytest.approx(4)
    assert timing.samples >= clock.SHORT_ROUNDS


@pytest.mark.usefixtures("watch")
def test_samples_exclude_the_cost_of_the_previous_contender() -> None:
    """The first call after another contender costs nine times as much; no sample includes it."""
    last: list[str] = []

    def contender(name: str) -> clock.Contender:
        def call() -> None:
            clock.time.sleep(0.005 if last == [name] else 0.045)
            last[:] = [name]

        return clock.Contender(call, contextlib.nullcontext)

    timings = clock.interleaved({name: contender(name) for name in "ab"}, min_time=0.05)
    assert all(timing.p80_ms == pytest.approx(5) for timing in timings.values())


def test_limit_measurements_run_on_request_only() -> None:
    step = plan.Step(plan.case("layer_norm", "small"), torch.float32, "fwd")
    for expected in (True, False):
        runs = runner.Runner(
            runner.Options(memory=False, min_time=0.0, limits=expected, backends=("naive",)),
            memory.MemoryProbe(),
        )
        runs.run(step)
        assert (runs.rows[0]["floor_ms"] is not None) == expected and runs.rows[0][
            "alone_ms"
        ] is None
