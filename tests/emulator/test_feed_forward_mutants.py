"""Faults planted in the feed-forward kernels, each of which must be caught by ffn_problems.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from planted_texts import Fault, check_caught, check_texts, parameters

FWD, BWD, ACTIVATIONS = "feed_forward/fwd.cuh", "feed_forward/bwd.cuh", "feed_forward/activations.cuh"
DROPOUT, PHILOX, MATMUL, LAUNCH = (
    "feed_forward/dropout.cuh",
    "tile/philox.cuh",
    "matmul/sm90_matmul.cuh",
    "matmul/sm90_launch.cuh",
)
EDGE, SUMS = "feed_forward/feed_forward.cpp", "matmul/row_sums.cuh"
LATE, DEADLOCK = "not ordered after", "deadlock"
SYNC = "    sync_consumer();  // the sums of the half before have been read\n"
FENCE = "    ptx::fence_proxy_async();  // ldmatrix has read what TMA writes next\n"
RELU, GATED, ODD, NO_BIASES, ONLY_BIASES = "relu", "gated", "odd sizes", "no biases", "only biases"

# By the file of the op that is compiled with the fault; the rest comes from the library without one.
FAULTS_OF = {
    "feed_forward/sm90_fwd.cu": (
        Fault("the gate's sums for the first product's", FWD, "u[c] = x[kOf + at]", "u[c] = x[at]", GATED),
        Fault("a gate not activated", FWD, "v[c] *= activate<A>(u[c]).value", "v[c] *= u[c]", GATED, slow=False),
        Fault("the other product activated", FWD, "v[c] *= activate<A>(u[c]).value", "v[c] = u[c] * activate<A>(v[c]).value", GATED),
        Fault("the gate's bias of w1", FWD, "biases.load(g, 1,", "biases.load(g, 0,", GATED),
        Fault("hidden kept as the pre-activation", FWD, "        if (pre.data) pre_rows.store(strip, r, v);\n", "", RELU),
        Fault("a strip left out", FWD, "strip < kOf / 16; ++strip", "strip < kOf / 16 - 1; ++strip", RELU),
        Fault("strips beyond the end only", FWD, "Columns >= place.columns) continue;", "Columns < place.columns) continue;", RELU),
        Fault("half a gated stage loaded twice", MATMUL, "args.b[K::gated ? q : pair]", "args.b[K::gated ? 0 : pair]", GATED),
        Fault("the second weight over the first", MATMUL, "* kHalfBytes + q * (kHalfBytes / kParts);", "* kHalfBytes;", GATED),
        Fault("boxes of a gated stage too high", LAUNCH, "kHalfColumns / K::products)", "kHalfColumns)", GATED),
        # dropout
        Fault("another tag", PHILOX, "kTagFeedForward = 0x80000002u", "kTagFeedForward = 0x80000003u", RELU),
        Fault("dropout of another group", PHILOX, "column / 32 * 4 + threadIdx.x % 4,", "column / 32 * 4 + threadIdx.x % 2,", RELU),
        Fault("dropout of the lane's other row", DROPOUT, "place.own(r),", "place.own(1 - r),", RELU),
        Fault("dropout of the strip before", DROPOUT, "strip * kStripColumns)", "(strip ^ 1) * kStripColumns)", RELU),
        Fault("kept values not scaled", DROPOUT, "v[c] * scale : 0.0f", "v[c] : 0.0f", RELU),
        Fault("half the seed", DROPOUT, "ptx::ld_global_u64(drop.seed)", "ptx::ld_global_u32(drop.seed)", RELU),
        # activations
        Fault("a coefficient of gelu", ACTIVATIONS, "0.216050282f", "0.516050282f", ODD),
    ),
    "feed_forward/sm90_bwd.cu": (
        Fault("gelu's density forgotten", ACTIVATIONS, "ptx::fma_rn(x * kDensity, e, cdf)", "cdf", ODD),
        Fault("a third of the cubic's slope", ACTIVATIONS, "3.0f * kCubic", "kCubic", NO_BIASES),
        Fault("silu's slope without its second term", ACTIVATIONS, "ptx::fma_rn(x * s, 1.0f - s, s)", "s", GATED),
        Fault("relu's slope everywhere", ACTIVATIONS, "x > 0.0f ? 1.0f : 0.0f}", "1.0f}", RELU),
        Fault("panels not awaited", MATMUL, "    ring.await_full(use);\n    PT_UNROLL", "    PT_UNROLL", RELU),
        Fault("panels not released", MATMUL, "    release_by_warp(ring, use++);", "    use++;", RELU, DEADLOCK),
        Fault("panels released before they are read", MATMUL, f"    f(readers);\n{FENCE}    release_by_warp(ring, use++);",
              "    release_by_warp(ring, use++);\n    f(readers);", RELU, LATE),
        Fault("panels given back without a fence", MATMUL, FENCE, "", RELU, "loaded without a later fence.proxy.async"),
        Fault("panels loaded before it is empty", MATMUL, "    ring.await_empty(use);\n    ring.announce(use, E",
              "    ring.announce(use, E", RELU),
        Fault("the panel of other columns", MATMUL, "ring.full(use), column, row);", "ring.full(use), 0, row);", RELU),
        Fault("panels of the first columns only", MATMUL, "p < panels(column); ++p", "p < 1; ++p", RELU),
        Fault("panels on top of each other", MATMUL, "ring.buffer(use) + i * MatmulPanels::kBytes", "ring.buffer(use)", GATED),
        Fault("a panel's rows of the other consumer", MATMUL, "i * kBytes + uint32_t(tile_part() * 64 * kSwizzleRow)", "i * kBytes", RELU),
        Fault("matrices of a panel exchanged", MATMUL, "8 * (matrix % 2);", "8 * (matrix / 2);", RELU),
        Fault("a panel not swizzled", MATMUL, "swizzle128(uint32_t(row), uint32_t(eight + matrix / 2))",
              "uint32_t(row) * 128 + uint32_t(eight + matrix / 2) * 16", RELU),
        Fault("half a panel twice", BWD, "4 * half + 2 * i);\n            if", "2 * i);\n            if", RELU),
        Fault("the lane's other row of pre", BWD, "c / 2 % 2 * 2 + r]", "c / 2 % 2 * 2 + 1 - r]", RELU),
        Fault("the gradient not dropped", BWD, "            dropout.apply(d, place, strip, r);\n", "", RELU),
        Fault("hidden not dropped", BWD, "            dropout.apply(h, place, strip, r);\n", "", RELU),
        Fault("d_gate without its slope", BWD, "d[c] * p * act.slope", "d[c] * p", GATED),
        Fault("d_gate from d_pre", BWD, "dg[c] = d[c] * p * act.slope, d[c] *= act.value;",
              "d[c] *= act.value, dg[c] = d[c] * p * act.slope;", GATED),
        Fault("hidden without its gate", BWD, "h[c] = act.value * p,", "h[c] = p,", GATED),
        Fault("the bias's gradient before its slope", BWD, "d[c] *= act.slope;\n", "b1_sum[c] += d[c], d[c] *= act.slope;\n", RELU),
        Fault("sums of one row of two", BWD, "b1_sum[c] += d[c];", "b1_sum[c] = d[c];", RELU),
        Fault("half the rows of a sum", SUMS, "ptx::shfl_xor(odd ? two[0] : two[1], 4)", "0.0f", RELU),
        Fault("columns of a sum exchanged", SUMS, "(middle ? four[2 + i] : four[i])", "(middle ? four[i] : four[2 + i])", RELU),
        Fault("a warp's sum left out", SUMS, "warp < 4; ++warp", "warp < 3; ++warp", RELU),
        Fault("sums of a wrong tile", SUMS, "place.row / kRowsOfAPart * place.columns", "place.row / 128 * place.columns", ONLY_BIASES),
        Fault("sums of the other bias", BWD, "gate_bias.put(strip, gate_sum)", "gate_bias.put(strip, b1_sum)", GATED),
        Fault("two biases in one place", BWD, "gate_bias{place.scratch + BiasSums::kBytes}", "gate_bias{place.scratch}", GATED),
        Fault("consumers share their scratch", MATMUL, "scratch + uint32_t(consumer()) * E::kScratch", "scratch", RELU),
        Fault("sums read before they are there", BWD, "    sync_consumer();\n    b1.store", "    b1.store", RELU),
        Fault("sums written under their readers", BWD, SYNC, "", RELU, LATE),
        Fault("a row of sums past the last", SUMS, "|| place.row >= place.rows", "", ODD, "outside global memory"),
    ),
    EDGE: (Fault("the threshold rounded down", EDGE, "std::nearbyint(65536 * p)", "65000 * p", GATED),),
}  # fmt: skip
FAULTS = tuple(fault for faults in FAULTS_OF.values() for fault in faults)


def test_a_fault_changes_what_it_says() -> None:
    check_texts(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, builder: ModuleType, tmp_path: Path) -> None:
    only = next(file for file, faults in FAULTS_OF.items() if fault in faults)
    check_caught(fault, "ffn_problems", "*", builder, tmp_path, only, "sm90")
