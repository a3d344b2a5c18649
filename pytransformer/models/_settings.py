# SPDX-License-Identifier: Apache-2.0
"""Type and range checks of settings from a file, before a model is built from them."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Limit of a setting that no tensor of the file bounds, such as a position table's length.
MAX_SIZE = 1 << 20


def check_settings(
    config: type[Any], settings: Mapping[str, Any], state: Mapping[str, torch.Tensor], source: str
) -> None:
    """Check the fields of a config against their annotations and against the size of the file.

    A model has a tensor for each layer, and no dimension is larger than the file. Building a model
    from accepted settings costs no more than reading its weights.

    Raises:
        ValueError: the message names the field.
    """
    hints = typing.get_type_hints(config)
    largest = max(MAX_SIZE, sum(t.numel() for t in state.values()))
    for name, value in settings.items():
        if name not in hints:
            raise ValueError(f"{source}: {config.__name__} has no field {name}")
        if not _has_type(value, hints[name]):
            raise ValueError(f"{source}: {name} must be {_words(hints[name])}, got {value!r:.60}")
        limit = len(state) if "layers" in name else largest
        if isinstance(value, int) and abs(value) > limit:
            raise ValueError(
                f"{source}: {name} must be at most {limit} for weights of this size, got {value}"
            )


def _has_type(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_has_type(value, each) for each in arguments)
    if origin is typing.Literal:
        return any(type(value) is type(each) and value == each for each in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(each, arguments[0]) for each in value)
    if hint is float:
        return (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    plain = origin or hint
    return not isinstance(plain, type) or isinstance(value, plain)


def _words(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


class Undrawn(TorchFunctionMode):
    """Skip random initialization; on the meta device the first call imports for two seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "trunc_normal_"):
            return args[0] if args else kwargs["tensor"]
        if func in (torch.randn, torch.rand):
            func = torch.empty
        return func(*args, **(kwargs or {}))
