# SPDX-License-Identifier: Apache-2.0
"""Sizes that the raw ops get as integers are symbols to torch.compile: one graph for the first call, one for every other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode

import pytransformer as pt
from pytransformer.ops._core.tensors import dropout_arguments


def _packed(length: int) -> torch.Tensor:
    x, cu = torch.randn(2 * length, 2, 16), torch.tensor([0, length, 2 * length])
    return pt.attention_varlen(x, x, x, cu, cu, length, length, causal="top_left")


def _windowed(x: torch.Tensor, left: int) -> torch.Tensor:
    return pt.attention(x, x, x, causal="top_left", window=(left, None))


CALLS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "max_seqlen": (_packed, lambda n: (n,)),
    "window": (_windowed, lambda n: (torch.randn(1, 2, 64, 16), n)),
}


@pytest.mark.parametrize("name", CALLS)
def test_sizes_are_symbols(name: str) -> None:
    function, arguments = CALLS[name]
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter)
    for n in (10, 20, 33, 47):
        compiled(*arguments(n))
    assert counter.frame_count <= 2


class _Recorded(TorchDispatchMode):
    """The aten ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seed", [0, 3, 2**63 - 1, -(2**63)])
def test_a_seed_is_filled_in_on_the_device(seed: int) -> None:
    """A copy of a number of the host's would wait for the device, and is illegal while a CUDA graph is captured."""
    with _Recorded() as recorded:
        dropout_arguments("attention", 0.5, seed, torch.device("meta"))
    assert recorded.names == ["aten.full.default"]
    _, found = dropout_arguments("attention", 0.5, seed, torch.device("cpu"))
    assert found is not None and found.item() == seed and found.dtype == torch.int64 and found.shape == ()
