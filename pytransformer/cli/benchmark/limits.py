# SPDX-License-Identifier: Apache-2.0
"""The limit of a row: its time split by costs measured in the same run.

    product     useful operations at the rate of a large matmul of the dtype
    bandwidth   each input read and output written once, at the rate of a copy
                with similar traffic
    call        the same call at a tiny shape: checks, dispatch, threads
    allocator   the call minus its kernels writing to existing tensors and minus
                the tiny call: page faults
    kernel      the remainder: kernels are slower than both roofs
    rest        kernel and allocator together, for peers whose kernels cannot be
                called alone

Products and memory traffic overlap, so the slower of the two counts; with the rest it adds up to
the full time. The largest share is the row's limit. A share of a roof can exceed 1, because a cache
that holds the inputs beats the copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from pytransformer.ops._core.registry import OPS

LIMITS = ("product", "bandwidth", "call", "allocator", "kernel", "rest")
NATIVE = "pytransformer_C"


def of(
    row: Mapping[str, Any], peaks: Mapping[str, Any] | None
) -> tuple[str, dict[str, float]] | None:
    """Return the limit's name and each LIMITS share of the row's time; None if unknown."""
    if (
        not peaks
        or row.get("floor_ms") is None
        or "copy_gbps" not in peaks
        or row["dtype"] not in peaks["tflops"]
    ):
        return None
    median, floor, alone = (
        row["median_ms"],
        min(row["floor_ms"], row["median_ms"]),
        row.get("alone_ms"),
    )
    shares = {
        "product": row["tflops"] / peaks["tflops"][row["dtype"]],
        "bandwidth": row["gbps"]
        / bandwidth(row["gbps"] * median * 1e6, peaks, row.get("cache") == "cold"),
        "call": floor / median,
    }
    if alone is not None:
        shares["allocator"] = max(0.0, median - alone - floor) / median
    roof = max(shares["product"], shares["bandwidth"])
    shares["rest" if alone is None else "kernel"] = max(
        0.0, 1 - roof - shares["call"] - shares.get("allocator", 0.0)
    )
    parts = {
        name: share
        for name, share in shares.items()
        if name not in ("product", "bandwidth") or share == roof
    }
    return max(parts, key=lambda name: parts[name]), shares


def bandwidth(traffic: float, peaks: Mapping[str, Any], cold: bool) -> float:
    """Return GB/s of the copy with the nearest traffic; out of cache, reads count if faster."""
    rates: Mapping[str, float] = peaks["copy_gbps"]
    largest = max(rates, key=int)
    nearest = (
        largest
        if cold
        else min(rates, key=lambda size: abs(math.log(int(size) / max(traffic, 1.0))))
    )
    return max(rates[nearest], peaks["read_gbps"]) if nearest == largest else rates[nearest]


def label(rows: list[dict[str, Any]], peaks: Mapping[str, Any] | None) -> None:
    """Write `limit` and `limit_shares` into the rows."""
    for row in rows:
        row["limit"], row["limit_shares"] = of(row, peaks) or (None, None)


# ---- kernels alone


class _Recorder(TorchDispatchMode):
    """Recorder of the native calls that write into tensors, and of the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[partial[object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NATIVE and func._schema.is_mutable:
            self.calls.append(partial(func, *args, **kwargs or {}))
        return func(*args, **kwargs or {})


@contextmanager
def _recording(op: str, backend: str, recorder: _Recorder) -> Iterator[None]:
    """Run the op's backend under the recorder; the C++ fast path skips replaced backends."""

    def under(function: Any) -> Any:
        def recorded(*args: Any) -> Any:
            with recorder:
                return function(*args)

        return function and recorded

    saved, declared = OPS[op].backends, OPS[op].backends[backend]
    watched = replace(
        declared,
        forward=under(declared.forward),
        backward=under(declared.backward),
        infer=under(declared.infer),
        recorded=None,
    )
    OPS[op].backends = {**saved, backend: watched}
    try:
        yield
    finally:
        OPS[op].backends = saved


def native_calls(op: str, backend: str, call: Callable[[], object]) -> list[partial[object]]:
    """Return the native calls that `call` makes on `backend`, with their allocated tensors."""
    recorder = _Recorder()
    with _recording(op, backend, recorder):
        call()
    return recorder.calls


def kernels_alone(op: str, backend: str, call: Callable[[], object]) -> Callable[[], object] | None:
    """Return a function that replays `native_calls` in order; None if there are none."""
    calls = native_calls(op, backend, call)

    def again() -> None:
        for native in calls:
            native()

    return again if calls else None
