# SPDX-License-Identifier: Apache-2.0
"""`python bench/tools/compare.py A.json B.json`: significant changes from A to B.

Absolute times of two runs are not comparable, because machine load and
temperature differ. The comparison uses the time relative to PyTorch's op in the
same line-up, round by round; without PyTorch, relative to naive code; without
both, the time itself. A row is slower if that ratio grew by more than the
threshold and the p20 to p80 intervals of the two runs do not overlap. A row is
less exact if its error relative to its bound more than doubled. A row of A that
B lacks, although B ran the line-up, is lost. Rows with fewer than five samples
and rows of the reference are not compared for speed.

The noise of a pair of runs comes from code that did not change: 19 of 20 rows
of naive code and other peers stay within it, relative to PyTorch. Our rows must
exceed it too. A peer itself may change; naive code's time doubles with the
pages that the allocator holds. On one device, a row must therefore also exceed
the noise by its time relative to the median of all peers' times.

A and B may be folders of several runs each, ideally taken in turns
(bench/tools/ab.py). The comparison then uses the median and the union of the
intervals, which covers the variation between processes.

Exit code 0: nothing got worse; 1: something did, or no row is in both runs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any

from pytransformer.cli import OK, WRONG, UsageError, main
from pytransformer.cli.benchmark import clock, report, results
from pytransformer.cli.benchmark.runner import REFERENCE
from pytransformer.cli.providers import NAIVE, PEERS, TORCH
from pytransformer.console import Console

Row = dict[str, Any]
Rows = dict[tuple[str, ...], Row]  # by results.row_key
ERROR_GROWTH = 2.0
LEAST_ERROR = 0.05  # share of the bound; smaller errors vary by chance


@dataclass(frozen=True)
class Change:
    """One row that differs.

    ``kind`` is slower, faster, less exact, lost or wrong; ``ratio`` is new over old, if defined.
    """

    kind: str
    row: Row
    ratio: float | None
    detail: str

    @property
    def worse(self) -> bool:
        return self.kind != "faster"


def compare(old: dict[str, Any], new: dict[str, Any], threshold: float = 0.1) -> list[Change]:
    """Return the changes of our backends between two results documents, the worst first."""
    before, after = (_by_key(document) for document in (old, new))
    threshold, pace = max(threshold, noise(old, new) - 1), drift(old, new)
    line_ups = {results.step_key(row) for row in new["rows"]}
    refused = {
        (e["op"], e["case"], e["dtype"], e["mode"], e["backend"]): e
        for e in new["not_run"]
        if e["status"] in ("wrong", "failed")
    }
    changes = []
    for key, row in before.items():
        if row["backend"] in PEERS:
            continue
        if key in after:
            changes += _changed(row, after[key], _yardsticks(before, after, key), pace, threshold)
            continue
        entry = refused.get((row["op"], row["case"], row["dtype"], row["mode"], row["backend"]))
        if entry is not None:
            changes.append(Change("wrong", row, None, report.verdict(entry)))
        elif results.step_key(row) in line_ups:
            changes.append(Change("lost", row, None, "was timed before and is not any more"))
    return sorted(changes, key=lambda c: (not c.worse, -(c.ratio or float("inf"))))


def noise(old: dict[str, Any], new: dict[str, Any]) -> float:
    """Return the factor that 19 of 20 peer rows stay within; 1 without such rows."""
    before, after = (_by_key(document) for document in (old, new))
    factors = [1.0]
    for key, row in before.items():
        peers = _yardsticks(before, after, key, (TORCH,))
        if row["backend"] in PEERS and row["backend"] != TORCH and key in after and peers:
            was, now = (_quantiles(r, peer)[1] for r, peer in zip((row, after[key]), peers))
            factors.append(max(was / now, now / was))
    return clock.quantile(sorted(factors), 0.95)


def drift(old: dict[str, Any], new: dict[str, Any]) -> float | None:
    """Return the peers' median slowdown in the second run.

    It is None without peers, and on different devices, because ops then differ by their own
    factors.
    """
    before, after = (_by_key(document) for document in (old, new))
    times = [
        after[key]["median_ms"] / row["median_ms"]
        for key, row in before.items()
        if row["backend"] in PEERS and key in after
    ]
    same = old["environment"]["device_name"] == new["environment"]["device_name"]
    return median_low(times) if same and times else None


def _by_key(document: dict[str, Any]) -> Rows:
    return {results.row_key(row): row for row in document["rows"]}


def _yardsticks(
    before: Rows, after: Rows, key: tuple[str, ...], peers: Sequence[str] = (TORCH, NAIVE)
) -> tuple[Row, Row] | None:
    """Return each row's baseline in each run: the first of `peers` in its line-up in both."""
    line_ups = ((*key[:-1], peer) for peer in peers)
    return next(((before[k], after[k]) for k in line_ups if k in before and k in after), None)


def _changed(
    old: Row, new: Row, peers: tuple[Row, Row] | None, pace: float | None, threshold: float
) -> list[Change]:
    whose = {TORCH: "PyTorch's", NAIVE: "naive code's"}[peers[0]["backend"]] if peers else ""
    of, unit = (f"of {whose} time", "") if peers else ("", " ms")
    (old_low, was, old_high), (new_low, now, new_high) = (
        _quantiles(row, peer) for row, peer in zip((old, new), peers or (None, None))
    )
    detail = f"{report.figure(was)}{unit} before, {report.figure(now)}{unit} now {of}".rstrip()
    changes = []
    own = now / was if pace is None else new["median_ms"] / old["median_ms"] / pace
    if not _judged(old, new, peers):
        pass
    elif min(now / was, own) > 1 + threshold and new_low > old_high:
        changes.append(Change("slower", new, now / was, detail))
    elif max(now / was, own) < 1 / (1 + threshold) and new_high < old_low:
        changes.append(Change("faster", new, now / was, detail))
    used = [row["bound_used"] for row in (old, new)]
    if None not in used and used[1] > max(ERROR_GROWTH * used[0], LEAST_ERROR):
        changes.append(
            Change(
                "less exact",
                new,
                used[1] / used[0] if used[0] else None,
                f"{used[0]:.2g} of the bound before, {used[1]:.2g} now",
            )
        )
    return changes


def _judged(old: Row, new: Row, peers: tuple[Row, Row] | None) -> bool:
    """Return True if the rows support a comparison of speed."""
    return (
        old["backend"] != REFERENCE
        and min(r["samples"] for r in (old, new, *(peers or ()))) >= clock.MIN_ROUNDS
    )


def _quantiles(row: Row, peer: Row | None) -> tuple[float, float, float]:
    """Return p20, median and p80 of the time relative to the peer, per round if recorded.

    The standard error of p20 and p80 of n normal samples is about 1.4 sigma / sqrt(n), and both are
    0.84 sigma away from the median. Both move outwards by that share of their distance.
    """
    unit = 1.0 if peer is None else peer["median_ms"]
    low, middle, high = (row[name] / unit for name in ("p20_ms", "median_ms", "p80_ms"))
    if peer is not None and peer["backend"] == TORCH and row.get("time_over_torch"):
        low, middle, high = row["time_over_torch"]
    wider = 1 + 1.4 / 0.84 / math.sqrt(row["samples"])
    return middle - wider * (middle - low), middle, middle + wider * (high - middle)


def merged(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merge runs of the same problems: median of figures, union of intervals, max of errors."""
    rows: dict[tuple[str, ...], list[Row]] = {}
    for document in documents:
        for row in document["rows"]:
            rows.setdefault(results.row_key(row), []).append(row)
    not_run = [entry for document in documents for entry in document["not_run"]]
    return {
        **documents[-1],
        "rows": [_merged_row(members) for members in rows.values()],
        "not_run": not_run,
    }


def _merged_row(members: list[Row]) -> Row:
    row = {**members[-1], "median_ms": median(m["median_ms"] for m in members)}
    row |= {
        "p20_ms": min(m["p20_ms"] for m in members),
        "p80_ms": max(m["p80_ms"] for m in members),
    }
    row["samples"] = sum(m["samples"] for m in members)
    ratios = [m["time_over_torch"] for m in members if m.get("time_over_torch")]
    if ratios:
        lows, middles, highs = zip(*ratios)
        row["time_over_torch"] = [min(lows), median(middles), max(highs)]
    used = [m["bound_used"] for m in members if m["bound_used"] is not None]
    return row | {"bound_used": max(used, default=None)}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "old",
        type=Path,
        metavar="A.json",
        help="results.json of a run, or its folder, or a folder of such folders",
    )
    parser.add_argument("new", type=Path, metavar="B.json", help="the same of a later run")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.1,
        metavar="X",
        help="a change counts from this share on (default 0.1)",
    )
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> int:
    if not arguments.threshold >= 0:
        raise UsageError(f"--threshold must be 0 or more, got {arguments.threshold}")
    old, new = _load(arguments.old), _load(arguments.new)
    console = Console()
    for name, document in (("A", old), ("B", new)):
        console.print(f"{name}: {report.environment_text(document['environment'])}")
    if old["environment"]["device_name"] != new["environment"]["device_name"]:
        console.print(
            "The two ran on different devices: only figures relative to PyTorch mean something."
        )
    changes = compare(old, new, arguments.threshold)
    before, after = _by_key(old), _by_key(new)
    common = before.keys() & after.keys()
    console.print(
        f"{len(common)} rows in both; {sum(c.worse for c in changes)} worse,"
        f" {sum(not c.worse for c in changes)} better."
    )
    ours = [key for key in common if key[-1] not in PEERS]
    fused = [key for key in ours if key[-1] != REFERENCE]
    few = sum(
        not _judged(before[key], after[key], _yardsticks(before, after, key)) for key in fused
    )
    if not ours:
        console.print(
            "Nothing to compare: the runs have no row of ours in common; measure the same problems"
            " (--case, --shape, --dtype, --mode)."
        )
    if few:
        console.print(
            f"{few} of our {len(fused)} rows have fewer than {clock.MIN_ROUNDS} samples: their"
            " speed is not judged."
        )
    peers = {key[-1] for key in common} & set(PEERS) - {TORCH}
    if not peers:
        console.print(
            "No peer beside PyTorch in both runs: how far two runs differ when nothing changed, is"
            " not known."
        )
    if (factor := noise(old, new)) > 1 + arguments.threshold:
        console.print(
            "Noise: peers, which did not change, differ by a factor of up to"
            f" {report.figure(factor)}; what is less does not count."
        )
    columns = ("change", "op", "case", "shape", "dtype", "mode", "backend", "new/old", "what")
    console.table(columns, [_line(c) for c in changes], right=("new/old",)) if changes else None
    return WRONG if not ours or any(c.worse for c in changes) else OK


def _line(change: Change) -> list[str]:
    row = change.row
    where = [
        row["op"],
        row["case"],
        report.shape_text(row["shape"]),
        report.SHORT[row["dtype"]],
        row["mode"],
        row["backend"],
    ]
    return [change.kind, *where, report.figure(change.ratio), change.detail]


def _load(path: Path) -> dict[str, Any]:
    file = path / "results.json" if path.is_dir() else path
    several = sorted(path.glob("*/results.json")) if path.is_dir() and not file.exists() else []
    try:
        return merged([report.load(each) for each in several]) if several else report.load(file)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
