# SPDX-License-Identifier: Apache-2.0
"""Splits of rotary embedding by batch, heads or positions.

A cache is local to a rank: append_kv accepts local tensors.
"""

from __future__ import annotations

from typing import Any

from .call import Rule
from .ways import Way


def rotary(a: Any) -> list[Way]:
    tables = {name: 0 for name in ("cos", "sin") if getattr(a, name).shape[0] > 1}
    return [
        Way("batch", {"x": 0, **tables}, (0,)),
        Way("heads", {"x": 1}, (1,)),
        Way("positions", {"x": 2, "cos": 1, "sin": 1}, (2,)),
    ]


RULES: dict[str, Rule] = {"rotary": rotary}
