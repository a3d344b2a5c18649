# SPDX-License-Identifier: Apache-2.0
"""Checks CUDA graph requirements without a GPU: no host reads, replayable operations."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# Operations whose result, or result size, the host waits for.
WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "is_nonzero",
    "equal",
    "unique",
    "_unique2",
    "unique_consecutive",
)


class HostRead(AssertionError):
    """An operation that the host would wait for."""


class DeviceOnly(TorchDispatchMode):
    """A mode that records operations and raises :class:`HostRead` at host copies of tensor data.

    ``checks=True`` allows reads, because argument checks read values on the CPU but not on a GPU.
    """

    def __init__(self, checks: bool = False) -> None:
        super().__init__()
        self.checks, self.tape = checks, list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in WAITS and not self.checks:
            raise HostRead(f"{func} reads a tensor on the host")
        found = func(*args, **kwargs)
        devices = {
            t.device
            for t in tree_flatten((args, kwargs, found))[0]
            if isinstance(t, Tensor) and t.dim()
        }
        if len(devices) > 1:
            raise HostRead(f"{func} copies between {' and '.join(sorted(map(str, devices)))}")
        self.tape.append((func, args, kwargs, found))
        return found

    def replay(self) -> None:
        """Run the recorded operations again on the same tensors, as a graph does."""
        now: dict[int, Tensor] = {}

        def current(t: Any) -> Any:
            return now.get(id(t), t) if isinstance(t, Tensor) else t

        for func, args, kwargs, made in self.tape:
            again = func(*tree_map(current, args), **tree_map(current, kwargs))
            for before, after in zip(tree_flatten(made)[0], tree_flatten(again)[0]):
                if isinstance(before, Tensor) and current(before) is not after:
                    now[id(before)] = after
