# SPDX-License-Identifier: Apache-2.0
"""What limits a row: its time, taken apart by what was measured in the same run.

    product     useful operations at the rate of a large matrix product of the dtype
    bandwidth   every input read and every output written once, at the rate of a copy with about that traffic
    call        the same call at a tiny shape: checks, dispatch, threads
    allocator   the call above its kernels alone, which write into tensors that are already there, and above the tiny call: fresh pages
    kernel      what is left: the kernels are slower than both roofs
    rest        the same of contenders whose kernels cannot be called alone, the peers: kernel or allocator

Products and memory traffic go on at once, so the slower of the two counts, and with the others it makes up the whole time. The largest
share is the row's limit. Shares of a roof can exceed 1: a cache that holds the inputs is faster than the copy.
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


def of(row: Mapping[str, Any], peaks: Mapping[str, Any] | None) -> tuple[str, dict[str, float]] | None:
    """(the limit's name, the share of the row's time that each of LIMITS takes, as far as it can be told); None where nothing tells."""
    if not peaks or row.get("floor_ms") is None or "copy_gbps" not in peaks or row["dtype"] not in peaks["tflops"]:
        return None
    median, floor, alone = row["median_ms"], min(row["floor_ms"], row["median_ms"]), row.get("alone_ms")
    shares = {
        "product": row["tflops"] / peaks["tflops"][row["dtype"]],
        "bandwidth": row["gbps"] / bandwidth(row["gbps"] * median * 1e6, peaks, row.get("cache") == "cold"),
        "call": floor / median,
    }
    if alone is not None:
        shares["allocator"] = max(0.0, median - alone - floor) / median
    roof = max(shares["product"], shares["bandwidth"])
    shares["rest" if alone is None else "kernel"] = max(0.0, 1 - roof - shares["call"] - shares.get("allocator", 0.0))
    parts = {name: share for name, share in shares.items() if name not in ("product", "bandwidth") or share == roof}
    return max(parts, key=lambda name: parts[name]), shares


def bandwidth(traffic: float, peaks: Mapping[str, Any], cold: bool) -> float:
    """GB/s of the copy whose traffic in bytes is nearest; of what caches do not hold, reading alone may be faster."""
    rates: Mapping[str, float] = peaks["copy_gbps"]
    largest = max(rates, key=int)
    nearest = largest if cold else min(rates, key=lambda size: abs(math.log(int(size) / max(traffic, 1.0))))
    return max(rates[nearest], peaks["read_gbps"]) if nearest == largest else rates[nearest]


def label(rows: list[dict[str, Any]], peaks: Mapping[str, Any] | None) -> None:
    """Writes `limit` and `limit_shares` into the rows."""
    for row in rows:
        row["limit"], row["limit_shares"] = of(row, peaks) or (None, None)


# ---- kernels alone


class _Recorder(TorchDispatchMode):
    """Keeps the native calls that write into tensors, and the tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[partial[object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NATIVE and func._schema.is_mutable:
            self.calls.append(partial(func, *args, **kwargs or {}))
        return func(*args, **kwargs or {})


@contextmanager
def _recording(op: str, backend: str, recorder: _Recorder) -> Iterator[None]:
    """Inside, the op's backend runs under the recorder. The C++ fast path stays away from backends that were replaced."""

    def under(function: Any) -> Any:
        def recorded(*args: Any) -> Any:
            with recorder:
                return function(*args)

        return function and recorded

    backends = OPS[op].backends
    declared = backends[backend]
    backends[backend] = replace(
        declared,
        forward=under(declared.forward),
        backward=under(declared.backward),
        infer=under(declared.infer),
        recorded=None,
    )
    try:
        yield
    finally:
        backends[backend] = declared


def native_calls(op: str, backend: str, call: Callable[[], object]) -> list[partial[object]]:
    """The native calls of `call`, one of our ops on `backend`, with the tensors that it allocated for them."""
    recorder = _Recorder()
    with _recording(op, backend, recorder):
        call()
    return recorder.calls


def kernels_alone(op: str, backend: str, call: Callable[[], object]) -> Callable[[], object] | None:
    """`native_calls` once more, one after the other; None where there are none."""
    calls = native_calls(op, backend, call)

    def again() -> None:
        for native in calls:
            native()

    return again if calls else None
