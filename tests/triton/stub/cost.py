# SPDX-License-Identifier: Apache-2.0
"""Host time of calls on the backend triton, measured with the stub driver.

    PYTHONPATH=tests/triton/stub python tests/triton/stub/cost.py

Triton's JIT and launcher run on CPU tensors, bfloat16, one thread; the figure is the min of 15
rounds of processor time. A real launch and PyTorch's GPU allocator cost more. "cold": no cache;
"python": by kernels/_launch.py, without the C++ fast path; the last column: as called.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu import Gpu, Lowered

import pytransformer as pt
from pytransformer.kernels import _launch
from pytransformer.ops._core import fast_path

ROUNDS, REPEAT = 15, 30
WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "cold": _launch.cold, "python": fast_path.off, "fast_path": contextlib.nullcontext,
}  # fmt: skip


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def problems() -> dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]]:
    qkv = [normal(2, 4, 64, 64) for _ in range(3)]
    few, many = normal(1, 4, 1, 64), [normal(1, 4, 1024, 64) for _ in range(2)]
    mask, x, w = (
        torch.rand(64, 64) > 0.3,
        [normal(4, 64) for _ in range(2)],
        [normal(64) for _ in range(2)],
    )
    wide, target = [normal(64, 64) for _ in range(2)], torch.randint(0, 64, (4,))
    table, slopes = (torch.randn(*shape, requires_grad=True) for shape in ((32, 4), (4,)))
    return {
        "attention, causal": (
            lambda q, k, v: pt.attention(q, k, v, causal="top_left", backend="triton"),
            qkv,
        ),
        "attention, bool mask": (
            lambda q, k, v: pt.attention(q, k, v, attn_mask=mask, backend="triton"),
            qkv,
        ),
        "decode, split keys": (
            lambda q, k, v: pt.attention(q, k, v, causal="bottom_right", backend="triton"),
            [few, *many],
        ),
        "T5 bias": (
            lambda q, k, v, t: pt.attention(
                q, k, v, bias=pt.RelativePositionBias(t), backend="triton"
            ),
            [*qkv, table],
        ),
        "ALiBi": (
            lambda q, k, v, s: pt.attention(q, k, v, bias=pt.AlibiBias(s), backend="triton"),
            [*qkv, slopes],
        ),
        "layer_norm": (lambda x, w, b: pt.layer_norm(x, 64, w, b, backend="triton"), [x[0], *w]),
        "add_norm": (lambda x, r, w, b: pt.add_norm(x, r, w, b, backend="triton")[0], [*x, *w]),
        "feed_forward": (
            lambda x, a, b, c: pt.feed_forward(x, a, b, c, None, backend="triton"),
            [x[0], wide[0], w[0], wide[1]],
        ),
        "linear_cross_entropy": (
            lambda x, w: pt.linear_cross_entropy(x, w, target, backend="triton"),
            [x[0], wide[0]],
        ),
    }


def least(call: Callable[[], object]) -> float:
    """Return the min time in microseconds."""
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(REPEAT):
            call()
        times.append((time.thread_time() - start) / REPEAT * 1e6)
    return min(times)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        Gpu(90, Path(folder))
        checked = Lowered.run
        print(
            f"{'µs':24}"
            + "".join(f"{f'{way} {what}':>16}" for what in ("fwd", "both") for way in WAYS)
        )
        for name, (call, leaves) in problems().items():

            def forward(call: Any = call, leaves: Any = leaves) -> None:
                with torch.no_grad():
                    call(*leaves)

            def both(call: Any = call, leaves: Any = leaves) -> None:
                out = call(*leaves)
                torch.autograd.grad(out, leaves, torch.ones_like(out))

            found = []
            for run in (forward, both):
                for way in WAYS.values():
                    with way():
                        for _ in range(4):
                            run()
                        Lowered.run = lambda self, *launch: self.launcher(*launch)  # type: ignore[method-assign]  # not compared
                        found.append(least(run))
                        Lowered.run = checked  # type: ignore[method-assign]
            print(f"{name:24}" + "".join(f"{time:16.1f}" for time in found), flush=True)


if __name__ == "__main__":
    main()
