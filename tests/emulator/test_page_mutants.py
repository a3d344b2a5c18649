# SPDX-License-Identifier: Apache-2.0
"""Faults planted where keys are found in pages, and where they are split: caught by page_problems.py and split_problems.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Fault, check_caught, check_names, found, parameters

PAGES = (
    Fault("page_of_the_next_key", "pages of 16, tiles of queries"),
    Fault("rows_counted_across_pages", "pages of 7, tiles of queries", "other bits"),
    Fault("pages_of_the_first_sequence", "pages of 7, tiles of queries"),
    Fault("entries_of_pages_not_clamped", "entries outside the pool"),
    Fault("a_row_twice", "pages of 16, split"),
)
SPLITS = (
    Fault("splits_by_the_longest", "in any batch"),
    Fault("splits_overlap", "one token"),
    Fault("rows_of_a_group_of_its_first_head", "ALiBi, mask, dropout"),
    Fault("parts_put_together_without_their_maxima", "one token", slow=False),
    Fault("the_last_split_left_out", "one token"),
    Fault("a_row_of_a_tile_twice", "one token"),
    Fault("a_streams_last_tile_left_out", "one token"),
    Fault("queries_of_other_warps_not_awaited", "one token", slow=False),
    Fault("a_warps_tile_not_awaited", "one token"),
    Fault("a_warps_tile_followed_while_it_is_read", "one token"),
    Fault("no_barrier_before_streams_are_put_together", "one token", slow=False),
    Fault("no_barrier_before_splits_are_put_together", "one token"),
)


def test_each_fault_has_a_hook() -> None:
    check_names((*PAGES, *SPLITS))


@pytest.mark.parametrize("fault", parameters(PAGES))
def test_a_planted_fault_in_pages_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "page_problems", emulated)


@pytest.mark.parametrize("fault", parameters(SPLITS))
def test_a_planted_fault_in_splits_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "split_problems", emulated)


@pytest.mark.parametrize("problems", ["page_problems", "split_problems"])
def test_without_a_fault_nothing_is_found(problems: str, emulated: Path) -> None:
    assert found(emulated, problems, "", 1) == ""
