# SPDX-License-Identifier: Apache-2.0
"""Faults planted in the attention kernels, each of which must be caught by attention_problems.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from planted import Fault, check_caught, check_names, parameters

LATE = "not ordered after the"

FAULTS = (
    # memory and order
    Fault("another_swizzle_for_products_with_rows", "plain 64"),
    Fault("no_swizzle_where_tiles_are_written", "plain 64"),
    Fault("a_chunk_past_the_columns", "plain 128"),
    Fault("a_tiles_row_past_the_last", "plain 64"),
    Fault("no_wait_for_keys", "plain 64", slow=False),
    Fault("no_barrier_after_keys_have_come", "plain 64"),
    Fault("no_barrier_after_values_have_come", "plain 64"),
    Fault("no_barrier_in_dq", "plain 64"),
    Fault("no_barrier_in_dkdv", "plain 64"),
    Fault("the_other_stage", "plain 64"),
    Fault("one_stage_only", "plain 64"),
    Fault("no_barrier_before_diagonals_are_added", "T5 of one direction, softcap"),
    Fault("tiles_of_a_masks_gradient_used_again_too_early", "hidden keys, segments", LATE),
    # bounds
    Fault("one_key_too_many", "plain 64"),
    Fault("a_window_one_too_wide", "plain 128"),
    Fault("queries_of_a_key_one_off", "plain 128"),
    Fault("a_tile_left_out", "plain 64"),
    Fault("a_cut_tile_taken_whole", "plain 64"),
    Fault("prefix_ignored_by_keys", "wide heads, prefix"),
    # global keys
    Fault("tiles_of_global_keys_skipped", "global keys", slow=False),
    Fault("a_gap_to_the_last_window", "global keys"),
    Fault("a_gap_of_any_tiles", "global keys", slow=False),
    Fault("pairs_in_a_gap_visible", "global keys"),
    Fault("a_block_kept_across_a_gap", "global keys, blocks"),
    Fault("keys_in_a_gap_are_read", "global keys", slow=False),
    Fault("queries_of_a_global_key_by_its_window", "global keys"),
    Fault("a_tile_with_global_keys_taken_whole", "global keys, T5, dropout"),
    # key padding
    Fault("padding_first_key_one_too_early", "padding"),
    Fault("padding_first_key_one_too_late", "padding"),
    Fault("padding_last_key_one_too_late", "padding"),
    Fault("padding_last_key_one_too_early", "padding"),
    Fault("bounds_of_the_first_sequence", "padding"),
    Fault("padding_gaps_of_the_first_sequence", "padding with holes"),
    Fault("another_word_of_the_bitmap", "padding with holes", slow=False),
    Fault("another_bit_of_the_bitmap", "padding with holes"),
    Fault("no_padding_gaps", "padding with holes"),
    Fault("padding_gaps_of_the_other_row", "padding with holes"),
    Fault("padding_gaps_of_other_columns", "padding with holes"),
    Fault("queries_that_see_but_padding_gaps_kept", "padding and window"),
    Fault("padding_gaps_in_a_biass_gradient", "padding, bias and dropout"),
    Fault("the_last_key_that_is_no_padding", "padding"),
    Fault("padding_found_by_one_warp", "padding of 1100 keys"),
    Fault("padding_found_by_two_lanes", "padding of 1100 keys"),
    Fault("padding_gaps_not_counted", "padding with holes"),
    # terms
    Fault("alibi_forgets_its_offset", "T5 of one direction, softcap"),
    Fault("softcaps_derivative", "T5 of one direction, softcap"),
    Fault("biases_overflow", "rows that see nothing, finfo.min"),
    Fault("pairs_dropout_of_another_group", "dropout and ALiBi"),
    Fault("dropouts_halves_exchanged_between_lanes", "dropout and ALiBi"),
    Fault("invisible_columns_are_read", "hidden keys, segments"),
    # sums
    Fault("the_maximum_of_half_a_row", "plain 64"),
    Fault("no_alpha_for_the_sums", "plain 64"),
    Fault("dropped_weights_left_out_of_the_sum", "dropout and ALiBi"),
    Fault("lse_without_its_maximums_scale", "plain 64"),
    Fault("sink_of_the_first_head", "sinks", slow=False),
    Fault("outputs_without_the_sinks_share", "sinks"),
    Fault("lse_down_to_its_sink", "sinks"),
    Fault("the_sign_of_the_sinks_gradient", "sinks"),
    Fault("sinks_alone_without_lses_gradient", "sinks alone, finfo.min"),
    Fault("delta_forgotten", "dropout and ALiBi"),
    Fault("half_a_rows_products", "plain 128"),
    Fault("rows_of_two_added_up", "plain 64"),
    Fault("a_head_of_a_group_left_out", "plain 128"),
    Fault("far_diagonals_lost", "T5 of one direction, softcap"),
    Fault("tiles_left_out_of_a_biass_gradient", "wide heads, prefix"),
    Fault("float32_weights_not_passed_around", "float32"),
    # block masks
    Fault("a_visible_block_skipped", "blocks", slow=False),
    Fault("a_partial_block_lost", "blocks"),
    Fault("a_partial_block_taken_whole", "blocks"),
    Fault("bits_of_another_word", "blocks", slow=False),
    Fault("bits_of_another_query", "blocks"),
    Fault("bits_of_another_key", "blocks"),
    Fault("block_lists_not_transposed", "blocks of 32, T5, dropout", slow=False),
    Fault("block_lists_of_the_first_head", "blocks"),
    Fault("block_lists_of_the_first_sequence", "blocks, causal, lengths"),
    # lists of a dense mask
    Fault("half_of_a_masks_block_unseen", "listed, words of 16, causal", slow=False),
    Fault("listed_for_the_first_head", "listed"),
    Fault("a_block_listed_by_one_warp", "listed"),
    Fault("a_block_with_hidden_pairs_taken_whole", "listed"),
    Fault("listed_blocks_not_transposed", "listed"),
    Fault("a_list_without_its_last_block", "listed"),
)
# Lists that were changed after they were checked.
LISTS = (
    Fault("block_offsets_not_clamped", "a list that ends behind the last entry"),
    Fault("places_of_bits_not_clamped", "bits behind the last", slow=False),
)


def test_each_fault_has_a_hook() -> None:
    check_names((*FAULTS, *LISTS))


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "attention_problems", emulated)


@pytest.mark.parametrize("fault", parameters(LISTS))
def test_a_planted_fault_in_reading_lists_is_caught(fault: Fault, emulated: Path) -> None:
    check_caught(fault, "block_list_problems", emulated)
