# SPDX-License-Identifier: Apache-2.0
"""Measured peaks of this machine: the roofs of the roofline.

The arithmetic peak is the best rate over a few sizes of torch.mm and, on a CPU, of this package's
matmul, because MKL runs no AVX-512 on AMD processors and then reaches half of their float32 peak.
The bandwidths are those of a copy between buffers beyond every cache (reads plus writes), of a sum
over one of them (reads only), of a copy of 8192 x 1024 floats, which fit large caches, and of
smaller copies. All are rates that a library reaches here with the current threads, not nominal
figures.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from pytransformer.cli.benchmark import clock
from pytransformer.ops._backends.cpu.linear import forward as own_product

SIZES = (1024, 2048)
WARM_BYTES = 8192 * 1024 * 4
COPY_BYTES = (1 << 16, 1 << 19, 1 << 22)  # smaller buffers
Fastest = Callable[[Callable[[], object]], float]


def measure(device: str, dtypes: list[torch.dtype], seconds: float) -> dict[str, object]:
    """Return measured rates by name, each from `seconds` of calls, five at least.

    The keys are "tflops" (by dtype name), "gbps", "read_gbps", "warm_gbps" and "copy_gbps" (by
    bytes of traffic).
    """
    fastest = partial(_fastest, device, seconds)
    memory, warm = (_copy(device, fastest, size) for size in (clock.evicting_bytes(), WARM_BYTES))
    smaller = {str(2 * size): _copy(device, fastest, size) for size in COPY_BYTES}
    return {
        "tflops": {str(d).removeprefix("torch."): _product(device, d, fastest) for d in dtypes},
        "gbps": memory,
        "read_gbps": _read(device, fastest, clock.evicting_bytes()),
        "warm_gbps": warm,
        "copy_gbps": {
            **smaller,
            str(2 * WARM_BYTES): warm,
            str(2 * clock.evicting_bytes()): memory,
        },
    }


def _product(device: str, dtype: torch.dtype, fastest: Fastest) -> float:
    """Return the best FLOP/s.

    An implementation that is hopeless at one size skips the next; torch's bf16 takes a minute there
    without AVX-512.
    """
    best, rates = 0.0, dict[str, float]()
    for n in SIZES:
        a, b, out = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
        products: dict[str, Callable[[], object]] = {"torch": partial(torch.mm, a, b, out=out)}
        if device == "cpu":
            products["ours"] = partial(own_product, a, b, None)
        asked = {
            who: call
            for who, call in products.items()
            if rates.get(who, best) * clock.HOPELESS >= best
        }
        rates |= {who: 2 * n**3 / fastest(call) / 1e12 for who, call in asked.items()}
        best = max(best, *rates.values())
    return best


def _copy(device: str, fastest: Fastest, size: int) -> float:
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / fastest(lambda: target.copy_(source)) / 1e9


def _read(device: str, fastest: Fastest, size: int) -> float:
    source = torch.ones(size // 4, device=device)
    return size / min(fastest(source.sum), fastest(lambda: torch.dot(source, source))) / 1e9


def _fastest(device: str, seconds: float, call: Callable[[], object]) -> float:
    """Return the 20 % quantile of call seconds, which a busy machine disturbs least."""
    return (
        clock.interleaved(
            {"": clock.Contender(call, nullcontext)}, min_time=seconds, device=device
        )[""].p20_ms
        * 1e-3
    )
