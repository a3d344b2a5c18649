# SPDX-License-Identifier: Apache-2.0
"""Host time of calls on the backend triton, by the stub driver: what a call costs before the GPU starts.

    PYTHONPATH=tests/triton/stub python tests/triton/stub/cost.py

Triton's own JIT and launcher, CPU tensors in a GPU's place, bfloat16, one thread; the least of 15 rounds of processor time. A real
driver's launch and PyTorch's allocator on a GPU come on top. "cold" is what every call cost before kernels/_launch.py.
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

ROUNDS, REPEAT = 15, 30


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def problems() -> dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]]:
    qkv = [normal(2, 4, 64, 64) for _ in range(3)]
    few, many = normal(1, 4, 1, 64), [normal(1, 4, 1024, 64) for _ in range(2)]
    mask, x, w = torch.rand(64, 64) > 0.3, [normal(4, 64) for _ in range(2)], [normal(64) for _ in range(2)]
    return {
        "attention, causal": (lambda q, k, v: pt.attention(q, k, v, causal="top_left", backend="triton"), qkv),
        "attention, bool mask": (lambda q, k, v: pt.attention(q, k, v, attn_mask=mask, backend="triton"), qkv),
        "decode, split keys": (lambda q, k, v: pt.attention(q, k, v, causal="bottom_right", backend="triton"), [few, *many]),
        "layer_norm": (lambda x, w, b: pt.layer_norm(x, 64, w, b, backend="triton"), [x[0], *w]),
        "add_norm": (lambda x, r, w, b: pt.add_norm(x, r, w, b, backend="triton")[0], [*x, *w]),
    }


def least(call: Callable[[], object]) -> float:
    """Microseconds."""
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
        print(f"{'µs':24}{'cold fwd':>10}{'fwd':>8}{'cold fwd+bwd':>14}{'fwd+bwd':>9}")
        for name, (call, leaves) in problems().items():

            def forward(call: Any = call, leaves: Any = leaves) -> None:
                with torch.no_grad():
                    call(*leaves)

            def both(call: Any = call, leaves: Any = leaves) -> None:
                out = call(*leaves)
                torch.autograd.grad(out, leaves, torch.ones_like(out))

            found = []
            for run in (forward, both):
                for way in (_launch.cold, contextlib.nullcontext):
                    with way():
                        for _ in range(3):
                            run()
                        Lowered.run = lambda self, *launch: self.launcher(*launch)  # type: ignore[method-assign]  # not compared
                        found.append(least(run))
                        Lowered.run = checked  # type: ignore[method-assign]
            print(f"{name:24}{found[0]:10.1f}{found[1]:8.1f}{found[2]:14.1f}{found[3]:9.1f}", flush=True)


if __name__ == "__main__":
    main()
