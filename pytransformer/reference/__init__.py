# SPDX-License-Identifier: Apache-2.0
"""Every op in plain PyTorch: simple code, differentiable to any order, also in float64.

Tests compare each backend with these functions. Signatures equal the public ops' signatures without
``backend``, ``strict`` and ``deterministic``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ..ops._core.op import Op
from ..ops._core.registry import OPS

if TYPE_CHECKING:  # same names, arguments and results
    from ..ops.public import *  # noqa: F403


@functools.cache
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


def __getattr__(name: str) -> Any:
    """Return the function of an op; ops may be declared after this module is imported."""
    if name not in OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _public(OPS[name])


def __dir__() -> list[str]:
    return sorted(OPS)
