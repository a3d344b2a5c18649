# SPDX-License-Identifier: Apache-2.0
"""Named cases and random problems through Triton's JIT and launcher without a GPU: see gpu.py.

python tests/triton/stub/launches.py --arch 90 --cases 2 --random 20      every second case, 20
                                                                          random problems per op
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu import Gpu

import pytransformer as pt
from pytransformer.testing.cases import Case, cases, leaves

sys.path.append(str(Path(__file__).resolve().parents[2] / "support"))
from support import (
    draw_attention,
    fuzz_attention,
    fuzz_cross_entropy,
    fuzz_feed_forward,
    fuzz_layer_norm,
    fuzz_rotary,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DRAWN = {
    "attention": (draw_attention.draw, fuzz_attention.run),
    "layer_norm": (fuzz_layer_norm.draw, fuzz_layer_norm.run),
    "feed_forward": (fuzz_feed_forward.draw, fuzz_feed_forward.run),
    "cross_entropy": (fuzz_cross_entropy.draw, fuzz_cross_entropy.run),
    "rotary": (fuzz_rotary.draw, fuzz_rotary.run),
}
SEED = 77
BF16 = torch.bfloat16
FUSED = ("attention_weights", "attention_summary")  # not supported by the backend


def differentiated(returned: Any, inputs: Any) -> None:
    outputs = [
        o for o in (returned if isinstance(returned, tuple) else (returned,)) if o.requires_grad
    ]
    expected = [t for t in inputs if t.requires_grad]
    if outputs:
        torch.autograd.grad(
            outputs, expected, [torch.ones_like(o) for o in outputs], allow_unused=True
        )


def run_case(case: Case, dtype: torch.dtype, **sizes: int) -> None:
    args, kwargs = case.resize(**sizes).make("cpu", dtype, seed=0, requires_grad=True)
    differentiated(
        getattr(pt, case.op)(*args, **kwargs, backend="triton"),
        leaves(case.op, args, kwargs).values(),
    )


def run_random(op: str, number: int) -> None:
    draw, run = DRAWN[op]
    problem = draw(SEED, number)
    if problem.dtype != torch.float64:
        run(problem, "triton")


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16, requires_grad=True)


def smallest() -> Iterator[tuple[str, Callable[[], Any], tuple[torch.Tensor, ...]]]:
    """Yield (name, call, inputs) with 0 and 1, which Triton specializes to constants."""

    def attention(
        name: str, B: int = 2, H: int = 2, Lq: int = 40, Lk: int = 40, D: int = 16, **options: Any
    ) -> Any:
        q, k, v = zeros(B, H, Lq, D), zeros(B, H, Lk, D), zeros(B, H, Lk, D)
        terms = [t for t in options.values() if isinstance(t, torch.Tensor) and t.requires_grad]
        return name, lambda: pt.attention(q, k, v, backend="triton", **options), (q, k, v, *terms)

    yield attention("attention of one", 1, 1, 1, 1, 1)
    yield attention("one query", Lq=1, H=40)
    yield attention("one key", Lq=100, Lk=1, H=1)
    yield attention("threshold 1", dropout_p=1 / 65536, dropout_seed=3)
    yield attention("threshold 16", dropout_p=16 / 65536, dropout_seed=3)
    yield attention("all dropped", dropout_p=1.0, dropout_seed=3)
    yield attention("window of one", window=(1, 1))
    yield attention("window of none", window=(0, 0), causal="top_left")
    yield attention("window of one and one global key", window=(1, 1), global_keys=1)
    yield attention("global keys beside half a window", window=(None, 1), global_keys=9)
    yield attention(
        "global keys of split keys",
        Lq=1,
        Lk=3000,
        window=(900, 0),
        global_keys=900,
        causal="bottom_right",
    )
    yield attention("scale and softcap 1", scale=1.0, softcap=1.0)
    yield attention("mask of one", attn_mask=zeros(1, 1, 1, 1))
    yield attention("mask of one key", Lk=1, attn_mask=zeros(2, 1, 40, 1))
    yield attention("mask that lies across", attn_mask=zeros(1, 1, 40, 40).mT)
    yield attention(
        "T5 of one head", H=1, bias=pt.RelativePositionBias(torch.zeros(4, 1), max_distance=2)
    )
    yield attention("ALiBi of one head", H=1, bias=pt.AlibiBias(torch.zeros(1)))
    ones = torch.ones(2, dtype=torch.int64)
    yield attention("lengths of one", key_lengths=ones, query_lengths=ones, causal="bottom_right")
    yield attention("prefix of one", prefix_lengths=ones, causal="top_left")
    yield attention("split keys", Lq=1, Lk=3000, key_lengths=ones)
    segments = {
        name: torch.ones(2, 40, dtype=torch.int64) for name in ("query_segments", "key_segments")
    }
    yield attention("segments", **segments)
    many = torch.rand(1, 2, 40, 300) < 0.01
    for size in (32, (64, 32), 512):
        blocks = pt.BlockMask.from_dense(many, block_size=size)
        yield attention(f"blocks of {size}", Lk=300, attn_mask=blocks)
        yield attention(
            f"blocks of {size} and more",
            Lk=300,
            attn_mask=blocks,
            causal="bottom_right",
            window=(90, 9),
            key_lengths=ones,
        )
        yield attention(
            f"blocks of {size} and global keys",
            Lk=300,
            attn_mask=blocks,
            window=(9, 9),
            global_keys=7,
        )
    table = torch.zeros(8, 2, requires_grad=True)
    t5 = pt.RelativePositionBias(table)
    *named, inputs = attention(
        "blocks and T5", Lk=300, attn_mask=blocks, bias=t5, dropout_p=0.1, dropout_seed=3
    )
    yield (*named, (*inputs, table))
    yield attention(
        "blocks and a bias", Lk=300, attn_mask=blocks, bias=zeros(1, 2, 40, 300), softcap=9.0
    )
    yield attention(
        "one block, of one", 1, 1, 1, 1, 1, attn_mask=pt.BlockMask.sliding_window(1, (0, 0))
    )
    yield attention(
        "no block", attn_mask=pt.BlockMask.from_dense(torch.zeros(40, 40, dtype=torch.bool))
    )
    yield attention(
        "mask in lists", 4, 2, 1100, 1100, attn_mask=torch.ones(1100, 1100, dtype=torch.bool).tril()
    )
    one, vector, square = zeros(1, 1), zeros(64), zeros(64, 64)
    calls = {
        "norm of one": lambda: pt.layer_norm(one, (1,), one[0], one[0], backend="triton"),
        "norm of one row": lambda: pt.rms_norm(vector, (64,), vector, backend="triton"),
        "norm with gaps": lambda: pt.layer_norm(
            square[:, ::2][:, None].mT, (1,), one[0], one[0], backend="triton"
        ),
        "add_norm, threshold 1": lambda: pt.add_norm(
            square, square, vector, vector, dropout_p=1 / 65536, dropout_seed=1, backend="triton"
        ),
        "network of one": lambda: pt.feed_forward(one, one, one[0], one, one[0], backend="triton"),
        "network, threshold 1": lambda: pt.feed_forward(
            square,
            square,
            vector,
            square.mT,
            vector,
            dropout_p=1 / 65536,
            dropout_seed=1,
            backend="triton",
        ),
        "network, one hidden": lambda: pt.feed_forward(
            square, vector[None], one[0], vector[:, None], vector, backend="triton"
        ),
        "one class": lambda: pt.linear_cross_entropy(
            square,
            vector[None],
            torch.zeros(64, dtype=torch.int64),
            bias=one[0],
            label_smoothing=0.1,
            backend="triton",
        ),
        "one row, ignored class 1": lambda: pt.linear_cross_entropy(
            vector[None],
            square,
            torch.zeros(1, dtype=torch.int64),
            ignore_index=1,
            backend="triton",
        ),
    }
    for name, call in calls.items():
        yield name, call, (one, vector, square)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--cases", type=int, default=1, help="each case in so many; 0: none")
    parser.add_argument("--random", type=int, default=0, help="problems of each op")
    parser.add_argument(
        "--dtypes", type=int, default=1, help="how many of bfloat16, float16, float32"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    todo: list[tuple[str, Callable[[], None]]] = [
        (name, lambda call=call, inputs=inputs: differentiated(call(), inputs))
        for name, call, inputs in smallest()
    ]
    named = [c for c in cases() if c.op not in FUSED]
    for case in named[:: options.cases] if options.cases else ():
        todo += [
            (f"{case.op} {case.name} {d}", lambda c=case, d=d: run_case(c, d))
            for d in DTYPES[: options.dtypes]
        ]
    todo += [
        (f"{op} {n}", lambda op=op, n=n: run_random(op, n))
        for op in DRAWN
        for n in range(options.random)
    ]
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        gpu = Gpu(options.arch, Path(folder))
        for name, run in todo:
            gpu.wrong.clear()
            try:
                run()
            except Exception:
                gpu.wrong.append(traceback.format_exc(limit=-3))
            failures += bool(gpu.wrong)
            if gpu.wrong:
                print(f"---- {name}", *gpu.wrong[:3], sep="\n", flush=True)
    print(
        f"sm_{options.arch}, Triton {sys.modules['triton'].__version__}: {len(todo)} problems,"
        f" {gpu.launches} launches,"
    )
    print(f"{gpu.variants.total()} kernels lowered {dict(gpu.variants)}, {failures} failures")
    return int(failures > 0 or gpu.launches < len(todo))


if __name__ == "__main__":
    sys.exit(main())
