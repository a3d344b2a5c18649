# SPDX-License-Identifier: Apache-2.0
"""Each op in plain PyTorch: naive, readable, differentiable to any order, float64 too. The oracle of every backend.

The functions have the public ops' signatures without ``backend``, ``strict`` and ``deterministic``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..ops._core.registry import OPS, Op

if TYPE_CHECKING:  # the same names, arguments and results
    from ..ops.public import *  # noqa: F403


def _public(op: Op) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        for name in ("backend", "strict", "deterministic"):
            if name in kwargs:
                raise TypeError(
                    f"reference.{op.name}: {name} must be left out, got {kwargs[name]!r}; pytransformer.{op.name} accepts it"
                )
        a, _, _ = op.prepare(*args, **kwargs)
        results = op.reference(a)
        wanted = 2 if kwargs.get("return_lse") else len(op.returned)
        return results[0] if wanted == 1 else tuple(results[:wanted])

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = f"Plain PyTorch for pytransformer.{op.name}; the same arguments, checked the same way."
    return function


def publish() -> None:
    """Give every op its function here. Once, when all are declared: importing a module of the op's name would put itself in its place."""
    globals().update({name: _public(op) for name, op in OPS.items()})
