"""Faults planted in the products by warpgroups, each of which must be caught by matmul_problems.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from planted_texts import Fault, check_caught, check_texts, parameters

RING, WARPGROUP, QUAD = "tile/ring.cuh", "tile/warpgroup.cuh", "tile/quad.cuh"
MATMUL, EPILOGUE, LAUNCH = "matmul/sm90_matmul.cuh", "matmul/epilogue.cuh", "matmul/sm90_launch.cuh"
NT, NN, TN, TWO, TILES, ODD, LED = (
    "rows with rows", "rows with columns", "columns with columns", "two loops", "more tiles than blocks", "odd sizes", "led",
)  # fmt: skip
LATE, READS, OUTSIDE = "not ordered after", "wgmma reads", "outside global memory"
DEADLOCK = "deadlock"

FAULTS = (
    # the ring
    Fault("phase of empty flipped", RING, "await(empty(n), parity(n) ^ 1);", "await(empty(n), parity(n));", NT, DEADLOCK),
    Fault("phase of full flipped", RING, "await(full(n), parity(n));", "await(full(n), parity(n) ^ 1);", NT, READS),
    Fault("a phase a use", RING, "uint32_t(n / Stages) & 1;", "uint32_t(n) & 1;", NT),
    Fault("stages share their buffers", RING, "uint32_t(n % Stages) * kBytes;", "0;", NT),
    Fault("loaded before it is empty", MATMUL, "    ring.await_empty(use);\n    ring.announce(use, kTile", "    ring.announce(use, kTile",
          NT),
    Fault("fewer bytes announced", MATMUL, "announce(use, kTile.a_bytes() + uint32_t(args.halves) * kHalfBytes)",
          "announce(use, kTile.a_bytes())", NT),
    Fault("a step not awaited", MATMUL, "      ring.await_full(use);\n      multiply", "      multiply", NT, READS, False),
    Fault("released too early", MATMUL, "ptx::wgmma_wait<1>();  // the step before\n      if (s > 0) release_by_warp(ring, use - 1);",
          "if (s > 0) release_by_warp(ring, use - 1);\n      ptx::wgmma_wait<1>();", NT, LATE),
    Fault("the step itself released", MATMUL, "if (s > 0) release_by_warp(ring, use - 1);", "release_by_warp(ring, use);", NT, LATE),
    Fault("the last step not released", MATMUL, "    ptx::wgmma_wait<0>();\n    release_by_warp(ring, use - 1);",
          "    ptx::wgmma_wait<0>();", TILES, DEADLOCK),
    Fault("sums not awaited", MATMUL, "    ptx::wgmma_wait<0>();\n", "", NT, LATE),
    Fault("released by one consumer", WARPGROUP, "if (lane_id() == 0) ring", "if (lane_id() == 0 && consumer() == 0) ring", NT, DEADLOCK),
    Fault("a product without its fence", MATMUL, "    ptx::wgmma_fence();\n", "", NT, "without a wgmma.fence"),
    Fault("barriers not made visible", WARPGROUP, "    ptx::fence_mbarrier_init();\n", "", NT, "not made visible to the async proxy"),
    # where things lie
    Fault("a step of a product too short", MATMUL, "kInside = 32", "kInside = 16", NT),
    Fault("half the rows of a step", MATMUL, "kGroups = 2 * kSwizzleAtom", "kGroups = kSwizzleAtom", TN),
    Fault("panels of columns in one place", MATMUL, "kGroups : kInside), kPanel), accumulate", "kGroups : kInside), 0), accumulate", NN),
    Fault("the other consumer's rows", MATMUL, "a = ring.buffer(use) + uint32_t(tile_part()",
          "a = ring.buffer(use) + uint32_t((1 - tile_part())", NT),
    Fault("groups of eight closer together", WARPGROUP, "panel_bytes, kSwizzleAtom", "panel_bytes, kSwizzleAtom / 2", NT),
    Fault("the first panel of A twice", MATMUL, "inside(row + p * kPanelColumns, args.rows)", "inside(row, args.rows)", TN),
    Fault("the first panel of B in each place", MATMUL, "column + h * kHalf + (K::gated ? 0 : q * (kHalf / kParts))", "column + h * kHalf",
          NN),
    Fault("panels of B on top of each other", MATMUL, "* kHalfBytes + q * (kHalfBytes / kParts);", "* kHalfBytes;", NN),
    Fault("both halves of B in one place", MATMUL, "b + uint32_t(h) * kHalfBytes", "b", LED),
    Fault("the first half of B twice", MATMUL, "column + h * kHalf + (K", "column + (K", LED),
    Fault("narrow tiles a wide one apart", MATMUL, "at.column * args.halves * kHalf", "at.column * 2 * kHalf", NT),
    Fault("both halves of a result in one place", MATMUL, "column + h * kHalf, args.rows", "column, args.rows", LED),
    Fault("the second half left out", MATMUL, "column + kHalf >= args.columns", "true", LED),
    # the lead
    Fault("nobody is led on", MATMUL, "leads && first ? kTile.lead - 1 : -1", "-1", LED, DEADLOCK, False),
    Fault("led by itself", MATMUL, "leads && first ? kTile", "leads && !first ? kTile", LED, DEADLOCK),
    Fault("a lead longer than a tile", MATMUL, " && steps() >= kTile.stages", "", TILES, DEADLOCK),
    Fault("the sums of the tile before kept", MATMUL, "multiply(x, use, s > 0);", "multiply(x, use, true);", TILES),
    Fault("the second loop from the first operands", MATMUL, "load_step(use++, pair,", "load_step(use++, 0,", TWO),
    Fault("a step left out", LAUNCH, "(p.a[i].width() + kStep - 1) / kStep", "p.a[i].width() / kStep", NT),
    Fault("every block makes all tiles", MATMUL, "n += int(gridDim.x)", "n += 1", TILES),
    # the result
    Fault("bias one column off", EPILOGUE, "= load_one(p + column);", "= load_one(p + column + 1);", NN),
    Fault("biases of the other half", EPILOGUE, "uint32_t(place.half * kHalfColumns)", "uint32_t((1 - place.half) * kHalfColumns)", NN),
    Fault("a bias read before it is there", EPILOGUE, "{ sync_consumer(); }", "{}", TILES),
    Fault("a bias written under its readers", EPILOGUE, "    sync_consumer();  // those of the tile before have been read\n", "", TILES,
          LATE),
    Fault("consumers share their scratch", MATMUL, "scratch + uint32_t(consumer()) * E::kScratch", "scratch", NT, LATE),
    Fault("a row past the last", EPILOGUE, "place.own(r) >= place.rows ?", "place.own(r) > place.rows ?", ODD, OUTSIDE),
    Fault("columns past the last", EPILOGUE, "< left_[r]; }", "<= left_[r]; }", TN),
    Fault("words not exchanged", EPILOGUE, "  transpose_quad(words);\n", "", NT),
    Fault("words exchanged with another lane", QUAD, "shfl_xor_u32(upper ? a0 : b0, 2)", "shfl_xor_u32(upper ? a0 : b0, 1)", NT),
    Fault("the lane's other row", EPILOGUE, "c / 2 * 4 + 2 * r + c % 2;", "c / 2 * 4 + 2 * (1 - r) + c % 2;", NT),
)  # fmt: skip

# In the variant whose consumers have tiles of their own.
PING_PONG = Fault("ping-pong", "matmul/config.h", "kMatmulTile{};", "kMatmulTile = kPingPong;")
PING_PONG_FAULTS = (
    Fault("order barrier dropped", MATMUL, "    if (turn.awaits) await_turn();\n", "", NT, slow=False),
    Fault("a turn too early", MATMUL, "more ? steps() - 1 : -1", "more ? 0 : -1", NT),
    Fault("a turn not passed", MATMUL, "more ? steps() - 1 : -1", "-1", TILES, DEADLOCK),
    Fault("the first tile waits for its turn", MATMUL, "consumer(), n > 0, more", "consumer(), true, more", TILES, DEADLOCK),
    Fault("a turn passed to itself", MATMUL, "if (consumer() == 0) ptx::bar_arrive(4", "if (consumer() == 1) ptx::bar_arrive(4", TILES),
    Fault("phase of full flipped", RING, "await(full(n), parity(n));", "await(full(n), parity(n) ^ 1);", TILES),
    Fault("each consumer makes every tile", MATMUL, "n % kTile.consumers == consumer(), n", "true, n", TILES),
    Fault("the other consumer's steps not passed over", MATMUL, "use += steps() + panels(column);", "", TILES),
    Fault("the other consumer's tile", MATMUL, "n % kTile.consumers == consumer(), n", "n % kTile.consumers == 0, n", TILES),
    Fault("the other consumer's part of a tile", MATMUL, "kMatmulTile.ping_pong ? 0 : consumer()", "consumer()", TILES),
    Fault("stages wait for both", "matmul/config.h", "return rows() / 16;", "return 4 * consumers;", TILES, DEADLOCK),
    Fault("scratch of both in one place", MATMUL, "scratch + uint32_t(consumer()) * E::kScratch", "scratch", TILES, LATE),
)  # fmt: skip


def test_a_fault_changes_what_it_says() -> None:
    check_texts(FAULTS)
    check_texts((PING_PONG, *PING_PONG_FAULTS))


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, builder: ModuleType, tmp_path: Path) -> None:
    check_caught(fault, "matmul_problems", "matmul", builder, tmp_path, path="sm90")


@pytest.mark.parametrize("fault", parameters(PING_PONG_FAULTS))
def test_a_planted_fault_of_ping_pong_is_caught(fault: Fault, builder: ModuleType, tmp_path: Path) -> None:
    check_caught(fault, "matmul_problems", "matmul", builder, tmp_path, path="sm90", variant=PING_PONG)
