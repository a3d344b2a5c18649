# SPDX-License-Identifier: Apache-2.0
"""Errors for arguments that have no counterpart."""

from __future__ import annotations

from typing import Any

import torch


def describe(value: Any) -> str:
    """Return a value as an error quotes it; a tensor by its shape."""
    return f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def refuse(function: str, hint: str, **given: tuple[Any, Any]) -> None:
    """Raise ValueError if an argument, a pair (value, default), differs from its default."""
    for name, (value, default) in given.items():
        if value is not default and (isinstance(value, torch.Tensor) or value != default):
            raise ValueError(
                f"{function}: {name} must be {default!r}, got {describe(value)}; {hint}"
            )
