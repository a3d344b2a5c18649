# SPDX-License-Identifier: Apache-2.0
"""Count recompilations by size: the keys of Triton's cache over runs with many sizes.

Nothing is compiled. For each run and kernel it prints [keys, keys without sizes]; the second counts
constants, options and absent arguments. See gpu.py for the stub.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu import Gpu
from triton.runtime.jit import compute_cache_key

from pytransformer import BlockMask, KeyValues
from pytransformer.kernels import _lang
from pytransformer.ops._core.registry import OPS

BF16 = torch.bfloat16
seen: dict[str, tuple[set[Any], set[Any]]] = defaultdict(lambda: (set(), set()))


def observe(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    binder = kernel.device_caches[0][-1]
    _, specialization, found = binder(*arguments, **options, debug=False)
    keys, features = seen[kernel.fn.__name__]
    keys.add(compute_cache_key({}, specialization, found))
    features.add((*(_feature(p, a) for p, a in zip(kernel.params, arguments)), str(options)))


def _feature(parameter: Any, argument: Any) -> Any:
    """Return the part of an argument that is no size: a constant, a dtype, or None."""
    if parameter.is_constexpr or argument is None:
        return argument
    if isinstance(argument, tuple):
        return tuple(_feature(parameter, x) for x in argument)
    return argument.dtype if isinstance(argument, torch.Tensor) else type(argument)


def _with_gradient(argument: Any) -> Any:
    real = isinstance(argument, torch.Tensor) and argument.is_floating_point()
    return argument.detach().requires_grad_() if real else argument


def call(name: str, *args: Any, backward: bool = True, **kwargs: Any) -> None:
    """Run an op forward and backward; launches are recorded, not run."""
    op = OPS[name]
    if backward:
        args = tuple(map(_with_gradient, args))
        kwargs = {name: _with_gradient(argument) for name, argument in kwargs.items()}
    a, _, _ = op.prepare(*args, **kwargs)
    backend = op.backends["triton"]
    with torch.no_grad():
        outputs = backend.forward(a)
        if backward:
            saved = [outputs[op.outputs.index(n)] for n in op.saved]
            expected = [isinstance(a[i], torch.Tensor) for i in op.positions]
            backend.backward(a, outputs[: len(op.grad_names)], saved, expected)


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=BF16)


def decode() -> None:
    for keys in range(1, 4097):
        call(
            "attention",
            empty(1, 8, 1, 64),
            empty(1, 2, keys, 64),
            empty(1, 2, keys, 64),
            causal="bottom_right",
            backward=False,
        )


def decode_pages() -> None:
    """Decode with growing tables, pools and batches of many sizes, one token and several."""
    for pages in range(1, 257):
        batch, tokens, pool = (1, 2, 3, 8, 16)[pages % 5], (1, 1, 4)[pages % 3], 256 + 7 * pages
        table = torch.zeros(batch, pages, dtype=torch.int32)
        lengths = torch.full((batch,), 16 * pages)
        keys = empty(pool, 2, 16, 64)
        options = {"page_table": table, "key_lengths": lengths, "causal": "bottom_right"}
        call("attention", empty(batch, 8, tokens, 64), keys, keys, **options, backward=False)


def append() -> None:
    """Append to growing caches and tables, with batches and chunks of many sizes."""
    for pages in range(1, 257):
        batch, tokens, pool = (1, 2, 3, 8, 16)[pages % 5], (1, 2, 7, 64)[pages % 4], 256 + 7 * pages
        q, k, tables = (
            empty(batch, 8, tokens, 64),
            empty(batch, 2, tokens, 64),
            empty(batch, tokens, 64),
        )
        positions, table = (
            torch.zeros(batch, tokens, dtype=torch.int64),
            torch.zeros(batch, pages, dtype=torch.int32),
        )
        caches = (
            KeyValues(empty(batch, 2, tokens + pages, 64), empty(batch, 2, tokens + pages, 64)),
            KeyValues(empty(pool, 2, 16, 64), empty(pool, 2, 16, 64), table),
        )
        for cache in caches:
            call("append_kv", q, k, k, cache, positions, rotary=(tables, tables), backward=False)
        call("rotary", q, cos=tables, sin=tables, backward=False)


def window() -> None:
    """Run windows and global keys of every size; decode with a growing bound."""
    for number in range(1, 300, 3):
        q, k = empty(1, 4, 200, 16), empty(1, 2, 2048, 16)
        call("attention", q, q, q, window=(number, 16), global_keys=number)
        call(
            "attention",
            q[:, :, :1],
            k,
            k,
            window=(1000, 0),
            global_keys=number,
            causal="bottom_right",
            backward=False,
        )


def train() -> None:
    for length in range(1, 513):
        batch = (1, 2, 3, 8, 16)[length % 5]
        q = empty(batch, 4, length, 16)
        call("attention", q, q, q, causal="top_left")


def train_with_bias() -> None:
    for length in range(33, 513, 5):
        q = empty(2, 4, length, 16)
        call(
            "attention",
            q,
            q,
            q,
            bias=empty(1, 4, length, length),
            key_lengths=torch.ones(2, dtype=torch.int64),
        )


def blocks() -> None:
    """Run masks with no, one and many entries and partial blocks, shared or per head."""
    for length in range(33, 513, 5):
        q, half = empty(2, 4, length, 16), length // 2
        mask = BlockMask.sliding_window(
            length, (half, half) if length % 3 else (length, length), block_size=32
        )
        if length % 4 == 0:
            mask &= BlockMask.from_dense(
                torch.zeros(2, 4, length, length, dtype=torch.bool), block_size=32
            )
        call("attention", q, q, q, attn_mask=mask)


def packed() -> None:
    for length in range(33, 513, 5):
        q, cu = empty(2 * length, 4, 16), torch.tensor([0, length, 2 * length])
        call("attention_varlen", q, q, q, cu, cu, length, length, causal="top_left")


def rows() -> None:
    weight, vector = empty(64, 64), empty(64)
    for length in range(65, 512, 3):
        x = empty(length, 64)
        call("add_norm", x, x, vector, vector, dropout_p=0.1, dropout_seed=length)
        call("feed_forward", x, weight, vector, weight, vector)
        call("linear_cross_entropy", x, weight, torch.zeros(length, dtype=torch.int64), bias=vector)


RUNS: tuple[Callable[[], None], ...] = (
    decode,
    decode_pages,
    append,
    window,
    train,
    train_with_bias,
    blocks,
    packed,
    rows,
)


def main() -> int:
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        Gpu(90, Path(folder))
        for run in RUNS:
            seen.clear()
            with _lang.observed(observe):
                run()
            found[run.__name__] = {
                name: [len(keys), len(features)] for name, (keys, features) in seen.items()
            }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
