# SPDX-License-Identifier: Apache-2.0
"""How norms may be split: by any dimension that is not normalized. Sums over a normalized one would need all of it."""

from __future__ import annotations

from typing import Any

from .call import Rule, named
from .ways import Way

DROPOUT = (
    "dropout goes by the number of the row, which every rank would count from 0: redistribute x and residual to Replicate(), or use no "
    "dropout"
)


def norm(a: Any) -> list[Way]:
    return [Way(f"dimension {d} of x", {"x": d}, (d,)) for d in range(a.x.dim() - a.dims)]


def add_norm(a: Any) -> list[Way]:
    refused = DROPOUT if a.dropout_p else None
    rows = [(d, named({"x": d, "residual": d}, a)) for d in range(a.x.dim() - a.dims)]
    return [Way(f"dimension {d} of x", arguments, (d, d), refused=refused) for d, arguments in rows]


RULES: dict[str, Rule] = {"layer_norm": norm, "rms_norm": norm, "add_norm": add_norm}
