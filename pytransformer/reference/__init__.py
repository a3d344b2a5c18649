"""Each op in plain PyTorch: naive, readable, differentiable to any order, float64 too. The oracle of every backend.

The functions have the public ops' signatures without ``backend``, ``strict`` and ``deterministic``.
"""

from __future__ import annotations

from typing import Any

# A module imported later would rebind its name in this package, where the function of that name belongs.
from . import attention as _  # noqa: F401


def _public(name: str) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        from ..ops._registry import OPS

        a, _, _ = OPS[name].prepare(*args, **kwargs)
        outputs = OPS[name].reference(a)
        return outputs if kwargs.get("return_lse") else outputs[0]

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Plain PyTorch for pytransformer.{name}; the same arguments, checked the same way."
    return function


attention = _public("attention")
attention_varlen = _public("attention_varlen")
