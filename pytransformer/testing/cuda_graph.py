# SPDX-License-Identifier: Apache-2.0
"""Check a call inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def check_cuda_graph(call: Callable[[], Tensor], seed: Tensor) -> None:
    """Assert that a captured call gives what the call gives, and reads ``seed``, a tensor on the GPU, anew at each replay: the dropout
    mask is another one then."""
    want = call()  # and whatever may not happen in a capture: loading, compiling
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    assert torch.equal(out, want)
    seed.add_(1)
    graph.replay()
    assert not torch.equal(out, want) and torch.equal(out, call())
