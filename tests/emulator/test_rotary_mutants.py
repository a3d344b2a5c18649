# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the rotary kernels, each of which must be caught by rotary_problems.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Fault, check_caught, check_names, parameters

OUTSIDE = "outside global memory"

FAULTS = (
    Fault("turned_the_other_way", "halves"),
    Fault("weight_offset_ignored", "interleaved"),
    Fault("turned_back_forward", "halves"),
    Fault("the_norm_taken_for_a_constant", "norm"),
    Fault("padding_written", "cache"),
    Fault("pages_of_the_first_sequence", "pages"),
    Fault("eps_outside_the_root", "norm"),
    Fault("the_row_of_a_page_lost", "pages"),
    Fault("norm_of_queries_for_keys", "pages"),
    Fault("one_head_for_all", "halves"),
    Fault("one_position_for_all", "halves"),
    Fault("a_head_past_the_last", "halves", OUTSIDE),
    Fault("keys_one_slot_late", "pages"),
    Fault("a_head_past_the_last_backward", "halves", OUTSIDE),
    Fault("a_vector_past_the_heads_end", "wide"),
    Fault("dweight_of_the_last_row", "norm"),
    Fault("a_warps_sums_never_begun", "any"),
    Fault("pieces_of_heads_that_are_not_aligned", "unaligned", "not a multiple of 16"),
)


def test_each_fault_has_a_hook() -> None:
    check_names(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS, every=6))
def test_a_planted_fault_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "rotary_problems", emulated)
