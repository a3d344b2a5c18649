"""Each op in plain PyTorch: naive, readable, differentiable to any order, float64 too. The oracle of every backend.

The functions have the public ops' signatures without ``backend``, ``strict`` and ``deterministic``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names, arguments and results
    from ..ops.attention import attention as attention
    from ..ops.attention_varlen import attention_varlen as attention_varlen
    from ..ops.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from ..ops.feed_forward import feed_forward as feed_forward
    from ..ops.layer_norm import add_norm as add_norm
    from ..ops.layer_norm import layer_norm as layer_norm
    from ..ops.layer_norm import rms_norm as rms_norm
else:
    # A module imported later would rebind its name in this package, where the function of that name belongs.
    from . import attention, cross_entropy, feed_forward, layer_norm  # noqa: F401


def _public(name: str, outputs: int = 1) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        from ..ops._core.registry import OPS

        a, _, _ = OPS[name].prepare(*args, **kwargs)
        results = OPS[name].reference(a)
        wanted = 2 if kwargs.get("return_lse") else outputs
        return results[0] if wanted == 1 else tuple(results[:wanted])

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Plain PyTorch for pytransformer.{name}; the same arguments, checked the same way."
    return function


if not TYPE_CHECKING:
    attention = _public("attention")
    attention_varlen = _public("attention_varlen")
    layer_norm = _public("layer_norm")
    rms_norm = _public("rms_norm")
    add_norm = _public("add_norm", outputs=2)
    feed_forward = _public("feed_forward")
    linear_cross_entropy = _public("linear_cross_entropy")
