# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the norm kernels, each of which must be caught by layer_norm_problems.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Fault, check_caught, check_names, parameters

UNFINISHED, OUTSIDE, LATE = "ld.shared", "outside global memory", "not ordered after the"

FAULTS = (
    Fault("no_barrier_in_a_blocks_sum", message=UNFINISHED),
    Fault("one_buffer_for_a_blocks_sums", message=LATE),
    Fault("a_warp_left_out_of_a_blocks_sum"),
    Fault("a_step_left_out_of_a_rows_sum"),
    Fault("a_column_past_the_rows_end", message=OUTSIDE, slow=False),
    Fault("a_norms_row_past_the_last", message=OUTSIDE),
    Fault("a_norms_row_of_another_outer"),
    Fault("no_barrier_after_a_norms_weights", message=UNFINISHED),
    Fault("no_barrier_before_partials_are_summed", message=UNFINISHED),
    Fault("a_partials_memory_used_again_too_early", message=LATE),
    Fault("no_barrier_in_the_norms_second_stage", message=UNFINISHED),
    Fault("a_blocks_partials_left_out"),
    Fault("partials_of_the_wrong_block"),
    Fault("a_partial_never_begun"),
    Fault("the_residuals_gradient_forgotten"),
    Fault("the_mean_taken_off_in_an_rms_norm"),
    Fault("rows_dropout_of_another_group"),
    Fault("words_not_exchanged_between_halves"),
    Fault("dropouts_threshold_too_high"),
    Fault("dropout_in_a_divergent_warp", message="deadlock"),
    Fault("pieces_of_rows_that_are_not_aligned", message="not a multiple of 16"),
)


def test_each_fault_has_a_hook() -> None:
    check_names(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "layer_norm_problems", emulated)
