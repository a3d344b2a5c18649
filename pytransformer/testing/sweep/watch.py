# SPDX-License-Identifier: Apache-2.0
"""Which modules do attention by themselves, past the interface: seen from inside their ``forward``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

F = torch.nn.functional
SOFTMAXES = frozenset({torch.softmax, F.softmax, torch.Tensor.softmax})
BY_ITSELF = SOFTMAXES | {torch._C._nn.scaled_dot_product_attention, F.multi_head_attention_forward}
ATTENTION = re.compile(r"att(entio)?n", re.IGNORECASE)


@contextmanager
def watch(functions: frozenset[Any] = BY_ITSELF) -> Iterator[set[str]]:
    """The classes of attention modules that call one of `functions` inside the block: softmax or PyTorch's attention. Under
    ``activate()`` only :data:`SOFTMAXES` are their own."""
    stack: list[torch.nn.Module] = []
    seen: set[str] = set()

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in functions:
                name = next((type(m).__name__ for m in reversed(stack) if not isinstance(m, torch.nn.Softmax)), "")
                if ATTENTION.search(name):
                    seen.add(name)
            return function(*args, **(kwargs or {}))

    def enter(module: torch.nn.Module, args: Any) -> None:
        stack.append(module)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        while stack and stack.pop() is not module:
            continue

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with Mode():
            yield seen
    finally:
        for hook in hooks:
            hook.remove()
