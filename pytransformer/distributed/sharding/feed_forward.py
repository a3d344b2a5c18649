# SPDX-License-Identifier: Apache-2.0
"""Splits of the feed-forward network by rows of x or by the hidden dimension.

The hidden split is Megatron's: ``out = sum_r act(x w1_rᵀ) w2_rᵀ``, with one all-reduce in forward
and one of the gradient of x in backward; b2 is added once.

Source: Shoeybi et al., "Megatron-LM" (2019), section 3.
"""

from __future__ import annotations

from typing import Any

from .call import Rule, named, rows_from
from .ways import Start, Way

HIDDEN = {"w1": 0, "b1": 0, "w2": 1, "gate_weight": 0, "gate_bias": 0}


def feed_forward(a: Any) -> list[Way]:
    lead = a.x.dim() - 1
    ways = [
        Way(f"dimension {d} of x", {"x": d}, (d,), **rows_from(a, d, lead)) for d in range(lead)
    ]
    starts = {"column_start": Start("w1", 0)} if a.dropout_p else {}
    return [*ways, Way("hidden", named(HIDDEN, a), (None,), once=frozenset({"b2"}), starts=starts)]


RULES: dict[str, Rule] = {"feed_forward": feed_forward}
