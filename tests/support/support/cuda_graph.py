# SPDX-License-Identifier: Apache-2.0
"""Check a call inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def check_cuda_graph(call: Callable[[], Tensor], seed: Tensor) -> None:
    """Assert that a captured call gives the call's result and reads ``seed`` at each replay.

    ``seed`` is a tensor on the GPU; another value must give another dropout mask.
    """
    want = call()  # runs what a capture forbids: loading, compiling
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    assert torch.equal(out, want)
    seed.add_(1)
    graph.replay()
    assert not torch.equal(out, want) and torch.equal(out, call())
