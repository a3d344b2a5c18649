# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the cross-entropy kernels, each of which must be caught by cross_entropy_problems.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Fault, check_caught, check_names, parameters

TILES, CHUNKS, WEIGHTED, ODD, ONLY_BIAS = "several tiles", "chunks", "weighted rows", "odd sizes", "only the bias"
OUTSIDE, LATE = "outside global memory", "not ordered after"

FAULTS = (
    # forward
    Fault("a_sum_not_rescaled", TILES, slow=False),
    Fault("a_logarithm_to_base_two", CHUNKS),
    Fault("columns_past_the_last_class", TILES),
    Fault("the_mean_over_whole_tiles", TILES),
    Fault("the_maximum_of_two_lanes", TILES),
    Fault("the_sum_of_two_lanes", TILES),
    Fault("odd_targets_left_out", CHUNKS),
    Fault("the_target_of_the_first_tile", TILES),
    Fault("targets_written_under_their_readers", WEIGHTED, LATE),
    Fault("the_target_of_the_lanes_other_row", TILES),
    Fault("targets_of_half_the_rows", TILES),
    Fault("ignored_rows_count", TILES),
    Fault("the_last_tile_left_out", TILES),
    Fault("warps_left_out", TILES),
    Fault("no_barrier_in_the_losses_second_stage", TILES, "ld.shared"),
    Fault("partials_of_the_first_tile", CHUNKS),
    Fault("partials_of_a_row_past_the_last", TILES, OUTSIDE),
    Fault("the_loss_of_a_row_past_the_last", TILES, OUTSIDE),
    Fault("the_smoothing_left_out", TILES),
    Fault("the_target_keeps_its_share", TILES),
    Fault("the_other_rows_logits", CHUNKS),
    # backward
    Fault("ignored_rows_have_a_gradient", TILES),
    Fault("lse_for_the_upstream_gradient", WEIGHTED),
    Fault("a_rows_stats_in_one_place", WEIGHTED),
    Fault("the_upstream_gradient_left_out", WEIGHTED),
    Fault("the_gradients_smoothing_left_out", WEIGHTED),
    Fault("smoothing_over_whole_tiles", WEIGHTED),
    Fault("the_targets_gradient_keeps_its_share", WEIGHTED),
    Fault("the_column_beside_the_target", WEIGHTED),
    Fault("targets_of_the_first_eight_columns", WEIGHTED),
    Fault("the_gradient_without_the_bias", TILES),
    Fault("the_gradient_of_the_other_row", WEIGHTED),
    Fault("exponentials_to_base_two", WEIGHTED),
    Fault("the_last_strip_left_out", CHUNKS),
    Fault("class_bias_sums_of_one_row_of_two", ONLY_BIAS),
    Fault("class_bias_sums_read_before_they_are_there", ONLY_BIAS),
    Fault("a_bias_read_before_it_is_there", TILES, LATE),
    Fault("the_biases_of_the_first_half", CHUNKS),
    # sums in float32
    Fault("a_chunks_sums_forgotten", CHUNKS),
    Fault("even_and_odd_columns_exchanged", TILES),
    Fault("neighbours_of_eight_columns_exchanged", TILES),
    Fault("a_results_row_past_the_last", ODD, OUTSIDE),
)


def test_each_fault_has_a_hook() -> None:
    check_names(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "cross_entropy_problems", emulated, "sm90")
