# SPDX-License-Identifier: Apache-2.0
"""Integer sizes of raw ops are symbols to torch.compile: two graphs serve calls of all sizes."""

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
    """A mode that records the aten ops of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seed", [0, 3, 2**63 - 1, -(2**63)])
def test_seed_is_written_on_the_device(seed: int) -> None:
    """A copy from the host would synchronize, and CUDA graph capture forbids it."""
    with _Recorded() as recorded:
        dropout_arguments("attention", 0.5, seed, torch.device("meta"))
    assert recorded.names == ["aten.full.default"]
    _, found = dropout_arguments("attention", 0.5, seed, torch.device("cpu"))
    assert (
        found is not None
        and found.item() == seed
        and found.dtype == torch.int64
        and found.shape == ()
    )


def _masked(x: torch.Tensor, mask: pt.BlockMask) -> torch.Tensor:
    return pt.attention(x, x, x, attn_mask=mask)


def test_block_masks_are_inputs_of_one_op() -> None:
    """There is no graph break, and a new mask of the same sizes compiles nothing."""
    graphs: list[torch.fx.GraphModule] = []

    def kept(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(_masked, backend=kept, fullgraph=True)
    x = torch.randn(1, 2, 200, 16)
    masks = [pt.BlockMask.sliding_window(200, window) for window in ((20, 20), (25, 30), (30, 12))]
    assert len({tuple(t.shape for t in m.blocks) for m in masks}) == 1
    for mask in masks:
        torch.testing.assert_close(compiled(x, mask), _masked(x, mask))
    assert len(graphs) == 1
    shapes = [
        tuple(n.meta["example_value"].shape) for n in graphs[0].graph.nodes if n.op == "placeholder"
    ]
    assert all(tuple(t.shape) in shapes for t in masks[0].blocks) and len(shapes) == 1 + len(
        masks[0].blocks
    )
    calls = [
        n for n in graphs[0].graph.nodes if n.op == "call_function" and "attention" in str(n.target)
    ]
    assert len(calls) == 1, [str(n.target) for n in graphs[0].graph.nodes]


def test_masks_of_other_sizes_are_symbols() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_masked, backend=counter, fullgraph=True)
    for length, window in ((200, 20), (300, 90), (500, 150), (700, 200)):
        x, mask = (
            torch.randn(1, 2, length, 16),
            pt.BlockMask.sliding_window(length, (window, window)),
        )
        torch.testing.assert_close(compiled(x, mask), _masked(x, mask))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_block_mask_tensors_as_constants(strict: bool) -> None:
    """The op receives each tensor as an argument."""

    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = pt.BlockMask.longformer(200, 40, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _masked(x, self.mask)

    module, x = Masked(), torch.randn(1, 2, 200, 16)
    program = torch.export.export(module, (x,), strict=strict)
    constants = [tuple(t.shape) for t in program.constants.values() if isinstance(t, torch.Tensor)]
    assert sorted(constants) == sorted(tuple(t.shape) for t in module.mask.blocks)
    assert str(program).count("torch.ops.pytransformer.attention_fwd") == 1
    torch.testing.assert_close(program.module()(x), module(x))
