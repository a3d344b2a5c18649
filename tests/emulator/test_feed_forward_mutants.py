# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the feed-forward kernels, each of which must be caught by feed_forward_problems.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Fault, check_caught, check_names, parameters

LATE, DEADLOCK = "not ordered after", "deadlock"
RELU, GATED, ODD, NO_BIASES, ONLY_BIASES = "relu", "gated", "odd sizes", "no biases", "only biases"

FAULTS = (
    # forward
    Fault("the_gates_sums_for_the_first_products", GATED),
    Fault("a_gate_not_activated", GATED, slow=False),
    Fault("the_other_product_activated", GATED),
    Fault("the_gates_bias_of_w1", GATED),
    Fault("the_pre_activation_not_stored", RELU),
    Fault("a_strip_left_out", RELU),
    Fault("strips_beyond_the_end_only", RELU),
    Fault("half_a_gated_stage_loaded_twice", GATED),
    Fault("panels_of_b_on_top_of_each_other", GATED),
    Fault("boxes_of_a_gated_stage_too_high", GATED),
    # dropout
    Fault("dropout_of_another_tag", RELU),
    Fault("fragments_dropout_of_another_group", RELU),
    Fault("dropout_of_the_lanes_other_row", RELU),
    Fault("dropout_of_the_strip_before", RELU),
    Fault("kept_values_not_scaled", RELU),
    Fault("half_the_seed", RELU),
    Fault("dropouts_threshold_too_low", GATED),
    # activations
    Fault("a_coefficient_of_gelu", ODD),
    Fault("gelus_density_forgotten", ODD),
    Fault("a_third_of_the_cubics_slope", NO_BIASES),
    Fault("silus_slope_without_its_second_term", GATED),
    Fault("relus_slope_everywhere", RELU),
    # panels
    Fault("panels_not_awaited", RELU),
    Fault("panels_not_released", RELU, DEADLOCK),
    Fault("panels_released_before_they_are_read", RELU, LATE),
    Fault("panels_given_back_without_a_fence", RELU, "loaded without a later fence.proxy.async"),
    Fault("panels_loaded_before_their_stage_is_empty", RELU),
    Fault("the_panel_of_other_columns", RELU),
    Fault("panels_of_the_first_columns_only", RELU),
    Fault("matrices_panels_on_top_of_each_other", GATED),
    Fault("a_panels_rows_of_the_other_consumer", RELU),
    Fault("matrices_of_a_panel_exchanged", RELU),
    Fault("a_panel_not_swizzled", RELU),
    Fault("half_a_panel_twice", RELU),
    # backward
    Fault("the_lanes_other_row_of_pre", RELU),
    Fault("the_gradient_not_dropped", RELU),
    Fault("hidden_not_dropped", RELU),
    Fault("d_gate_without_its_slope", GATED),
    Fault("d_gate_from_d_pre", GATED),
    Fault("hidden_without_its_gate", GATED),
    # sums over rows
    Fault("the_biass_gradient_before_its_slope", RELU),
    Fault("hidden_bias_sums_of_one_row_of_two", RELU),
    Fault("half_the_rows_of_a_sum", RELU),
    Fault("columns_of_a_sum_exchanged", RELU),
    Fault("a_warps_sum_left_out", RELU),
    Fault("sums_of_a_wrong_tile", ONLY_BIASES),
    Fault("sums_of_the_other_bias", GATED),
    Fault("two_biases_in_one_place", GATED),
    Fault("consumers_share_their_scratch", RELU),
    Fault("hidden_bias_sums_read_before_they_are_there", RELU),
    Fault("bias_sums_written_under_their_readers", RELU, LATE),
    Fault("a_row_of_sums_past_the_last", ODD, "outside global memory"),
)


def test_each_fault_has_a_hook() -> None:
    check_names(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "feed_forward_problems", emulated, "sm90")
