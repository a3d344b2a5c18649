# SPDX-License-Identifier: Apache-2.0
"""Splits of norms by any dimension that is not normalized, because sums need full rows."""

from __future__ import annotations

from typing import Any

from .call import Rule, named, rows_from
from .ways import Way


def norm(a: Any) -> list[Way]:
    return [Way(f"dimension {d} of x", {"x": d}, (d,)) for d in range(a.x.dim() - a.dims)]


def add_norm(a: Any) -> list[Way]:
    lead = a.x.dim() - a.dims
    rows = [(d, named({"x": d, "residual": d}, a)) for d in range(lead)]
    return [
        Way(f"dimension {d} of x", arguments, (d, d), **rows_from(a, d, lead))
        for d, arguments in rows
    ]


RULES: dict[str, Rule] = {"layer_norm": norm, "rms_norm": norm, "add_norm": add_norm}
