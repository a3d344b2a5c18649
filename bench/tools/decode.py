# SPDX-License-Identifier: Apache-2.0
"""Time one decoded token of attention on the CPU, as a share of the memory read rate.

    OMP_NUM_THREADS=1 python bench/tools/decode.py [--keys 8192] [--rounds 7] [--peers]
                                                   [--dtype bfloat16 float32] [--out FILE.json]

The tool allocates caches of ``--bytes`` in total and each call uses the next one, so that no read
hits a processor cache. Each round measures in turn a sum over as many bytes, contiguous keys,
shuffled pages of 16 and 64 keys and, with ``--peers``, scaled_dot_product_attention. The clock is
this thread's CPU time with one thread and wall time otherwise; the fastest fifth of the rounds
counts. The target is 85 % of the sum's rate for contiguous keys.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F

import pytransformer as pt
from pytransformer.cli.machine import cpu_name, usable_cores

SHAPES = (
    (1, 1, 1, 128), (1, 8, 8, 64), (1, 8, 8, 128), (1, 16, 8, 128), (1, 32, 8, 128),
    (1, 64, 8, 128), (1, 32, 32, 128), (4, 8, 8, 128),
          (16, 8, 2, 128), (16, 1, 1, 128))  # fmt: skip
PAGES = (16, 64)
Call = Callable[[], object]


def clock() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def paged(x: torch.Tensor, size: int, order: torch.Tensor) -> torch.Tensor:
    """Return (B, H, L, D) as a pool (B * L / size, H, size, D), page i at order[i]."""
    pages = x.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)
    pool = torch.empty_like(pages, memory_format=torch.contiguous_format)
    pool[order] = pages
    return pool


def contenders(
    shape: tuple[int, int, int, int], keys: int, dtype: torch.dtype, size: int, peers: bool
) -> tuple[dict[str, Call], int]:
    """Return the calls, and the bytes that each reads."""
    batch, heads, kv_heads, head_dim = shape
    one = 2 * batch * kv_heads * keys * head_dim * dtype.itemsize
    caches = [
        tuple(torch.randn(batch, kv_heads, keys, head_dim).to(dtype) for _ in "kv")
        for _ in range(max(2, size // one))
    ]
    query = torch.randn(batch, heads, 1, head_dim).to(dtype)
    flat = torch.ones(len(caches) * one // 4)
    lengths = torch.full((batch,), keys)
    found: dict[str, Call] = {
        "read": flat.sum,
        "contiguous": lambda: [pt.attention(query, k, v, strict=True) for k, v in caches],
    }
    for page in PAGES:
        order = torch.randperm(batch * keys // page)
        pools = [tuple(paged(x, page, order) for x in cache) for cache in caches]
        table = order.view(batch, -1).to(torch.int32)
        found[f"pages of {page}"] = lambda pools=pools, table=table: [
            pt.attention(query, k, v, page_table=table, key_lengths=lengths, strict=True)
            for k, v in pools
        ]
    if peers:
        grouped = heads != kv_heads
        found["sdpa"] = lambda: [
            F.scaled_dot_product_attention(query, k, v, enable_gqa=grouped) for k, v in caches
        ]
    return found, flat.nbytes


def measure(calls: dict[str, Call], size: int, rounds: int) -> dict[str, float]:
    """Return the GB/s of each call."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            seconds[name].append(clock() - start)
    return {name: size / sorted(times)[len(times) // 5] / 1e9 for name, times in seconds.items()}


def rows(arguments: argparse.Namespace) -> Iterable[dict[str, Any]]:
    for name in arguments.dtype:
        for shape in SHAPES:
            torch.manual_seed(0)
            calls, size = contenders(
                shape, arguments.keys, getattr(torch, name), arguments.bytes, arguments.peers
            )
            with torch.inference_mode():
                found = measure(calls, size, arguments.rounds)
            yield {
                "dtype": name,
                "shape": dict(zip(("B", "Hq", "Hkv", "D"), shape, strict=True)),
                "gbps": found,
            }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--keys", type=int, default=8192, help="of each sequence, a multiple of 64 (default 8192)"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--bytes", type=int, default=3 << 28, help="of all caches together (default 768 MiB)"
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["bfloat16", "float32"],
        choices=["bfloat16", "float16", "float32"],
    )
    parser.add_argument(
        "--peers", action="store_true", help="PyTorch's scaled_dot_product_attention too (slow)"
    )
    parser.add_argument("--out", help="a JSON file")
    arguments = parser.parse_args()
    document = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "keys": arguments.keys,
        "rows": [],
    }
    for row in rows(arguments):
        document["rows"].append(row)
        read = row["gbps"]["read"]
        shares = "  ".join(
            f"{name} {rate:.1f} ({rate / read:.2f})" for name, rate in row["gbps"].items()
        )
        print(row["dtype"], *(f"{k}{v}" for k, v in row["shape"].items()), " ", shares, flush=True)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump(document, file, indent=1)


if __name__ == "__main__":
    main()
