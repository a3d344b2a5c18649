# SPDX-License-Identifier: Apache-2.0
"""Detects modules that compute attention themselves and bypass the interface.

The observer runs inside their ``forward``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

F = torch.nn.functional
SOFTMAXES = frozenset({torch.softmax, F.softmax, torch.Tensor.softmax})
BY_ITSELF = SOFTMAXES | {torch._C._nn.scaled_dot_product_attention, F.multi_head_attention_forward}
ATTENTION = re.compile(r"att(entio)?n", re.IGNORECASE)


@contextmanager
def watch(functions: frozenset[Any] = BY_ITSELF) -> Iterator[set[str]]:
    """Yield the attention module classes that call one of `functions` inside the block.

    The functions are softmax and PyTorch's attention. Under ``activate()`` only :data:`SOFTMAXES`
    bypass us.
    """
    stack: list[torch.nn.Module] = []
    seen: set[str] = set()

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function in functions:
                name = next(
                    (
                        type(m).__name__
                        for m in reversed(stack)
                        if not isinstance(m, torch.nn.Softmax)
                    ),
                    "",
                )
                if ATTENTION.search(name):
                    seen.add(name)
            return function(*args, **(kwargs or {}))

    call = torch.nn.Module.__call__

    def tracked(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        stack.append(module)
        try:
            return call(module, *args, **kwargs)
        finally:
            stack.pop()

    # Global forward hooks would have the same effect, but a converted module runs its original code
    # while one is set.
    torch.nn.Module.__call__ = tracked  # type: ignore[method-assign]
    try:
        with Mode():
            yield seen
    finally:
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
