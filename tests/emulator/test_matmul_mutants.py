# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the products by warpgroups, each of which must be caught by matmul_problems.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from planted import Fault, check_caught, check_names, parameters

NT, NN, TN, TWO = "rows with rows", "rows with columns", "columns with columns", "two loops"
TILES, ODD, LED = "more tiles than blocks", "odd sizes", "led"
LATE, READS, OUTSIDE = "not ordered after", "wgmma reads", "outside global memory"
DEADLOCK = "deadlock"

FAULTS = (
    # the ring
    Fault("phase_of_empty_flipped", NT, DEADLOCK),
    Fault("phase_of_full_flipped", NT, READS),
    Fault("a_phase_a_use", NT),
    Fault("stages_share_their_buffers", NT),
    Fault("a_step_loaded_before_its_stage_is_empty", NT),
    Fault("fewer_bytes_committed", NT),
    Fault("a_step_not_awaited", NT, READS, slow=False),
    Fault("a_step_released_too_early", NT, LATE),
    Fault("the_step_itself_released", NT, LATE),
    Fault("the_last_step_not_released", TILES, DEADLOCK),
    Fault("sums_not_awaited", NT, LATE),
    Fault("a_warps_release_by_one_consumer", NT, DEADLOCK),
    Fault("a_product_without_its_fence", NT, "without a wgmma.fence"),
    Fault("barriers_not_made_visible", NT, "not made visible to the async proxy"),
    # where things lie
    Fault("a_step_along_k_too_short", NT),
    Fault("half_the_rows_of_a_step", TN),
    Fault("panels_of_columns_in_one_place", NN),
    Fault("the_other_consumers_rows_of_a", NT),
    Fault("groups_of_eight_closer_together", NT),
    Fault("the_first_panel_of_a_twice", TN),
    Fault("the_first_panel_of_b_in_each_place", NN),
    Fault("panels_of_b_on_top_of_each_other", NN),
    Fault("both_halves_of_b_in_one_place", LED),
    Fault("the_first_half_of_b_twice", LED),
    Fault("narrow_tiles_a_wide_one_apart", NT),
    Fault("both_halves_of_a_result_in_one_place", LED),
    Fault("the_second_half_left_out", LED),
    # the lead
    Fault("nobody_is_led_on", LED, DEADLOCK, slow=False),
    Fault("led_by_itself", LED, DEADLOCK),
    Fault("a_lead_longer_than_a_tile", TILES, DEADLOCK),
    Fault("the_sums_of_the_tile_before_kept", TILES),
    Fault("the_second_loop_from_the_first_operands", TWO),
    Fault("a_step_left_out", NT),
    Fault("every_block_makes_all_tiles", TILES),
    # the result
    Fault("a_bias_one_column_off", NN),
    Fault("the_biases_of_the_first_half", NN),
    Fault("a_bias_read_before_it_is_there", TILES),
    Fault("a_bias_written_under_its_readers", TILES, LATE),
    Fault("consumers_share_their_scratch", NT, LATE),
    Fault("a_results_row_past_the_last", ODD, OUTSIDE),
    Fault("columns_past_the_last", TN),
    Fault("words_not_exchanged", NT),
    Fault("words_not_exchanged_between_halves", NT),
    Fault("a_result_of_the_lanes_other_row", NT),
)

# In the variant whose consumers have tiles of their own.
PING_PONG_FAULTS = (
    Fault("order_barrier_dropped", NT, slow=False),
    Fault("a_turn_too_early", NT),
    Fault("a_turn_not_passed", TILES, DEADLOCK),
    Fault("the_first_tile_waits_for_its_turn", TILES, DEADLOCK),
    Fault("a_turn_passed_to_itself", TILES),
    Fault("phase_of_full_flipped", TILES),
    Fault("each_consumer_makes_every_tile", TILES),
    Fault("the_other_consumers_steps_not_passed_over", TILES),
    Fault("the_other_consumers_tile", TILES),
    Fault("the_other_consumers_part_of_a_tile", TILES),
    Fault("stages_wait_for_both", TILES, DEADLOCK),
    Fault("consumers_share_their_scratch", TILES, LATE),
)


@pytest.fixture(scope="module")
def ping_pong(builder: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of that variant."""
    return builder.library(tmp_path_factory.mktemp("ping_pong"), stem="matmul", defines=["-DPT_MATMUL_TILE=kPingPong"])


def test_each_fault_has_a_hook() -> None:
    check_names(FAULTS)
    check_names(PING_PONG_FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "matmul_problems", emulated, "sm90")


@pytest.mark.parametrize("fault", parameters(PING_PONG_FAULTS))
def test_a_planted_fault_of_ping_pong_is_caught(fault: Fault, ping_pong: Path) -> None:
    check_caught(fault, "matmul_problems", ping_pong, "sm90")
