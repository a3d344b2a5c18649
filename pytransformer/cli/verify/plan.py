# SPDX-License-Identifier: Apache-2.0
"""The checks and timings of `pytransformer verify`, and how their results rank backends.

Ops and cases come from the registry and pytransformer.testing.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from pytransformer.ops._backends.cuda import library as cuda_library
from pytransformer.ops._core.registry import BACKENDS, HOME, OPS
from pytransformer.ops._core.verification import DECLINED, RIGHT, UNCHECKED, size_class
from pytransformer.testing.cases import APART, FORWARD_ONLY, Case, cases

# Most used first, because the time may run out.
DTYPES = ("bfloat16", "float32", "float16", "float64")
WIDE = (128, 256)  # head sizes beyond the cases' own that select other kernels
# Replaces a last dimension: cases with this tag, at a size that selects other kernels.
LARGE = "large"
LARGE_SHAPE = {"B": 1, "Hq": 8, "Hkv": 8, "Lq": 1024, "Lk": 1024}
TIMED = ("bfloat16", "float32")
# Medium cases to time, each small enough for a second.
SHAPES = {
    "cpu": {"B": 1, "Hq": 4, "Hkv": 4, "Lq": 512, "Lk": 512, "rows": 512},
    "cuda": {"B": 4, "Hq": 16, "Hkv": 16, "Lq": 2048, "Lk": 2048, "rows": 8192},
}
# A backend precedes another if its mean is faster by this factor and no case is slower by it.
MARGIN = 1.1
FIELDS = ("op", "backend", "dtype", "case", "last", "size", "outcome", "detail", "bound_used")

Line = dict[str, Any]


def is_for(backend: str, kind: str) -> bool:
    """Return True if the backend supports this device type, natively, interpreted or emulated."""
    if HOME.get(backend, kind) == kind:
        return True
    return kind == "cpu" and (
        (backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1")
        or (backend == "cuda" and cuda_library.emulating())
    )


def checks(backend: str, kind: str, ops: Iterable[str]) -> list[Line]:
    """Return a job for each op, dtype and case; cases tagged core come first."""
    found: list[tuple[Any, Line]] = []
    for op in ops:
        if backend not in OPS[op].backends:
            continue
        for rank, (case, last) in enumerate(_sized(op, kind)):
            size = size_of(case if last is None else sized(case, last))
            for dtype in DTYPES:
                job = {
                    "do": "check", "op": op, "backend": backend, "dtype": dtype, "device": kind,
                    "case": case.name, "last": last,
                    "size": size,
                }  # fmt: skip
                found.append(
                    ((last is not None, "core" not in case.tags, DTYPES.index(dtype), rank), job)
                )
    return [job for _, job in sorted(found, key=lambda pair: pair[0])]


def _sized(op: str, kind: str) -> list[tuple[Case, int | str | None]]:
    own = cases_of(op)
    wide = [c for c in own if "core" in c.tags and "D" in c.shape]
    # The interpreter takes minutes per case.
    large = [c for c in own if LARGE in c.tags and kind == "cuda"]
    return [*((c, None) for c in own), *((c, LARGE) for c in large), *itertools.product(wide, WIDE)]


def cases_of(op: str) -> list[Case]:
    return [
        *cases(op),
        *cases(op, tags={APART, LARGE}),
        *cases(op, tags={APART, FORWARD_ONLY}),
    ]  # one block mask is enough, because kernels treat all patterns alike


def checked(line: Line) -> Line:
    """Return the stored part of a check."""
    return {name: line.get(name) for name in FIELDS}


def continued(
    before: Line | None, jobs: dict[str, list[Line]]
) -> tuple[list[Line], dict[str, list[Line]]]:
    """Return the results that stay valid and the remaining jobs of each backend.

    After an unfinished run, the remaining jobs are the unchecked and the failed ones; otherwise
    they are all jobs.
    """
    ours = {_name_of(job): backend for backend, own in jobs.items() for job in own}
    known = {
        _name_of(line): line
        for line in (before or {}).get("checks", [])
        if "last" in line and _name_of(line) in ours
    }
    unfinished = {ours[name] for name, line in known.items() if line["outcome"] == UNCHECKED}
    done = {
        name: line
        for name, line in known.items()
        if ours[name] in unfinished and line["outcome"] in (RIGHT, DECLINED)
    }
    left = {
        backend: [job for job in own if _name_of(job) not in done] for backend, own in jobs.items()
    }
    return list(done.values()), left


def _name_of(line: Line) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in ("op", "backend", "dtype", "case", "last", "size"))


def complete(found: Iterable[Line]) -> list[list[str]]:
    """Return each (op, backend, dtype) with every case checked; an unchecked size counts."""
    outcomes: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for line in found:
        outcomes[line["op"], line["backend"], line["dtype"]].append(line["outcome"])
    return [list(key) for key, own in outcomes.items() if RIGHT in own and "not checked" not in own]


def timings(found: Iterable[Line], kind: str, ops: Iterable[str]) -> list[Line]:
    """Return a job for each core case and dtype in which two backends are right."""
    right = {
        (line["op"], line["case"], line["dtype"], line["backend"])
        for line in found
        if line["outcome"] == RIGHT
    }
    jobs = []
    for dtype, op in itertools.product(TIMED, ops):
        for case in cases(op, "medium", {"core"}):
            backends = [
                b for b in BACKENDS if b != "reference" and (op, case.name, dtype, b) in right
            ]
            if len(backends) > 1:
                shape = {
                    k: v
                    for k, v in SHAPES[kind].items()
                    if k in case.shape and not _special(case, k)
                }
                jobs.append({
                    "do": "time", "op": op, "case": case.name, "dtype": dtype, "device": kind,
                    "backends": backends, "shape": shape,
                    "threads": torch.get_num_threads(),
                })  # fmt: skip
    return jobs


def sized(case: Case, last: int | str) -> Case:
    """Return the case with this last dimension of its first tensor, or LARGE."""
    if last == LARGE:
        return case.resize(**LARGE_SHAPE)
    return case.resize(**{name: int(last) for name in ("D", "d") if name in case.shape})


def size_of(case: Case) -> int:
    """Return the size class of the case's call, equal for every dtype and device."""
    args, kwargs = case.make("cpu", torch.float32, seed=1)
    return size_class(OPS[case.op].prepare(*args, **kwargs)[0])


def first_checks(op: str, last: int) -> list[Case]:
    """Return the checks at first use for the call's last dimension.

    The case with every feature at once comes first, then the core cases. The time limit decides how
    many of them run.
    """
    chosen = [c for c in cases(op) if "self_check" in c.tags] + [
        c for c in cases(op) if "core" in c.tags
    ]
    return [sized(c, last) for c in {c.name: c for c in chosen}.values()]


def _special(case: Case, name: str) -> bool:
    """Return True if the size is the point of the case: few queries, fewer key heads."""
    plain = cases(case.op, "medium")[0].shape
    return case.shape[name] != plain.get(name)


def order(times: Iterable[Line]) -> dict[str, list[str]]:
    """Return, by op, the backends ordered by their times; ops with the default order are absent."""
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    for line in times:
        if line.get("ms"):
            rows[line["op"]].append(line["ms"])
    found = {}
    for op, own in rows.items():
        before = [b for b in OPS[op].backends if any(b in ms for ms in own)]
        after: list[str] = []
        for backend in before:
            place = len(after)
            while place and _faster(backend, after[place - 1], own):
                place -= 1
            after.insert(place, backend)
        if after != before:
            found[op] = after
    return found


def _faster(one: str, other: str, rows: list[dict[str, float]]) -> bool:
    ratios = [ms[one] / ms[other] for ms in rows if one in ms and other in ms]
    if not ratios:
        return False
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return mean < 1 / MARGIN and max(ratios) < MARGIN
