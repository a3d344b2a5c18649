# SPDX-License-Identifier: Apache-2.0
"""Faults planted where keys and values in eight bits are widened, and where they are made: caught by eight_bit_problems.py and
append_problems.py, in which nothing is found without (test_attention_eight_bits.py, test_rotary.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Fault, check_caught, check_names, parameters

ATTENTION = (
    Fault("value_scales_forgotten", "one token in pages"),
    Fault("no_wait_for_eight_bits", "tiles of queries, wide heads"),
    Fault("no_barrier_after_keys_are_widened", "one token in pages"),
    Fault("weights_of_float16_cut_short", "two tiles of rows, ALiBi, mask, dropout"),
    Fault("no_barrier_after_values_are_widened", "one token in pages"),
    Fault("scales_of_hidden_keys_multiplied", "every number of int8, bfloat16"),
    Fault("e4m3_subnormals_lost", "every number of float8_e4m3fn, float16", slow=False),
    Fault("e4m3_signs_lost", "tiles of queries, wide heads"),
    Fault("scales_of_no_key_read", "wide heads, segments"),
)
APPEND = (
    Fault("rows_not_rounded_before", "whole rows in pages"),
    Fault("the_largest_of_half_a_row", "wide rows"),
    Fault("e4m3_ties_up", "whole rows in pages"),
)


def test_each_fault_has_a_hook() -> None:
    check_names((*ATTENTION, *APPEND))


@pytest.mark.parametrize("fault", parameters(ATTENTION))
def test_a_planted_fault_in_attention_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "eight_bit_problems", emulated)


@pytest.mark.parametrize("fault", parameters(APPEND))
def test_a_planted_fault_in_append_kv_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "append_problems", emulated)
