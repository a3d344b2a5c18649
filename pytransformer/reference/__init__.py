# SPDX-License-Identifier: Apache-2.0
"""Every op in plain PyTorch: simple code, differentiable to any order, also in float64.

Tests compare each backend with these functions. Signatures equal the public ops' signatures without
``backend``, ``strict`` and ``deterministic``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..ops._core.op import Op
from ..ops._core.registry import OPS

if TYPE_CHECKING:  # same names, arguments and results
    from ..ops.public import *  # noqa: F403


def _public(op: Op) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        for name in ("backend", "strict", "deterministic"):
            if name in kwargs:
                raise TypeError(
                    f"reference.{op.name}: {name} must be left out, got {kwargs[name]!r};"
                    f" pytransformer.{op.name} accepts it"
                )
        a, _, _ = op.prepare(*args, **kwargs)
        results = op.reference(a)
        wanted = 2 if kwargs.get("return_lse") else len(op.returned)
        return results[0] if wanted == 1 else tuple(results[:wanted])

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = (
        f"Plain PyTorch for pytransformer.{op.name}; the same arguments, checked the same way."
    )
    return function


def publish() -> None:
    """Add a function for every op to this module.

    Call it once, after all ops are declared: importing a module with an op's name later would
    replace the function.
    """
    globals().update({name: _public(op) for name, op in OPS.items()})
