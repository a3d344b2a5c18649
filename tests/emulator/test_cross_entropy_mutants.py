"""Faults planted in the cross-entropy kernels, each of which must be caught by ce_problems.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from planted_texts import Fault, check_caught, check_texts, parameters

FWD, BWD, SUMS = "cross_entropy/fwd.cuh", "cross_entropy/bwd.cuh", "matmul/epilogue.cuh"
LAUNCH, LABELS = "cross_entropy/sm90_bwd.cu", "cross_entropy/labels.cuh"
TILES, CHUNKS, WEIGHTED, ODD, ONLY_BIAS = "several tiles", "chunks", "weighted rows", "odd sizes", "only the bias"
OUTSIDE, LATE = "outside global memory", "not ordered after"
SYNC = "{ sync_consumer(); }"

# By the file that is compiled with the fault; the rest comes from the library without one.
FAULTS_OF = {
    "cross_entropy/sm90_fwd.cu": (
        Fault("a sum not rescaled", FWD, "sum = sum * ptx::exp2((top - base) * kLog2e) +", "sum = sum +", TILES, slow=False),
        Fault("a logarithm to base two", FWD, "ptx::fma_rn(ptx::log2(all.sum), kLn2, all.top)", "ptx::log2(all.sum) + all.top", CHUNKS),
        Fault("columns past the last class", FWD, "z[i] = column_of(i) < end ? z[i] : minus", "z[i] = true ? z[i] : minus", TILES),
        Fault("the mean over whole tiles", FWD, "total / float(f.classes)", "total / float(128 * f.tiles)", TILES),
        Fault("the maximum of two lanes", FWD, "return fmaxf(x, ptx::shfl_xor(x, 2));", "return x;", TILES),
        Fault("the sum of two lanes", FWD, "return x + ptx::shfl_xor(x, 2);", "return x;", TILES),
        Fault("odd targets left out", FWD, "at % 8 > 1", "at % 8 > 0", CHUNKS),
        Fault("the target of the first tile", FWD, "get(r)) - place.column - 2", "get(r)) - 2", TILES),
        Fault("targets written under their readers", FWD, "    else sync_consumer();      ", "    else {}  ", WEIGHTED, LATE),
        Fault("the target of the lane's other row", LABELS, "lane_id() / 4 + 8 * r", "lane_id() / 4 + 8 * (1 - r)", TILES),
        Fault("targets of half the rows", LABELS, "i < 64 &&", "i < 32 &&", TILES),
        Fault("ignored rows count", FWD, "== f.labels.ignore_index ? 0.0f : loss", "== -7 ? 0.0f : loss", TILES),
        Fault("the last tile left out", FWD, "tile < f.tiles;", "tile < f.tiles - 1;", TILES),
        Fault("warps left out", FWD, "w < kLossWarps; ++w", "w < 2; ++w", TILES),
        Fault("no barrier in the second stage", FWD, "  ptx::syncthreads();\n", "", TILES, "ld.shared"),
        Fault("parts of the first tile", FWD, "(kind * tiles + place.column / kClassTile)", "(kind * tiles)", CHUNKS),
        Fault("parts of a row past the last", FWD, "if (row < place.rows && kind", "if (row <= place.rows && kind", TILES, OUTSIDE),
        Fault("the loss of a row past the last", FWD, "here = row < f.rows,", "here = row <= f.rows,", TILES, OUTSIDE),
        Fault("the smoothing left out", FWD, "if (smooth) loss -=", "if (false) loss -=", TILES),
        Fault("the target keeps its share", FWD, "lse - f.labels.on_target *", "lse - 1.0f *", TILES),
        Fault("the other row's logits", FWD, "x[sum_at(strip, r, c)]", "x[sum_at(strip, 1 - r, c)]", CHUNKS),
    ),
    "cross_entropy/sm90_bwd.cu": (
        Fault("ignored rows have a gradient", BWD, "row.counts ? v[c] * row.g : 0.0f", "v[c] * row.g", TILES),
        Fault("lse for the upstream gradient", BWD, "numbers(place, 2).get(r)", "numbers(place, 1).get(r)", WEIGHTED),
        Fault("a row's numbers in one place", BWD, "uint32_t(which) * RowNumbers::kBytes", "0", WEIGHTED),
        Fault("the upstream gradient left out", BWD, "v[c] * row.g :", "v[c] :", WEIGHTED),
        Fault("the gradient's smoothing left out", BWD, " * kLog2e) - share;", " * kLog2e);", WEIGHTED),
        Fault("smoothing over whole tiles", LAUNCH, "float(f.product.columns)", "float(256 * plan.grid.across)", WEIGHTED),
        Fault("the target's gradient keeps its share", BWD, "v[c] -= labels.on_target;", "v[c] -= 1.0f;", WEIGHTED),
        Fault("the column beside the target", BWD, "c / 2 * 8 + c % 2) v", "c / 2 * 8 + 1 - c % 2) v", WEIGHTED),
        Fault("targets of the first eight columns", BWD, "at < kStripColumns)", "at < 8)", WEIGHTED),
        Fault("the gradient without the bias", BWD, "x[sum_at(strip, r, c)] + b[c] - row", "x[sum_at(strip, r, c)] - row", TILES),
        Fault("the gradient of the other row", BWD, "const Row& row = rows[r];", "const Row& row = rows[1 - r];", WEIGHTED),
        Fault("exponentials to base two", BWD, "- row.lse) * kLog2e)", "- row.lse))", WEIGHTED),
        Fault("the last strip left out", BWD, "strip < R / 16; ++strip", "strip < R / 16 - 1; ++strip", CHUNKS),
        Fault("sums of one row of two", BWD, "sum[c] = r == 0 ? v[c] : sum[c] + v[c];", "sum[c] = v[c];", ONLY_BIAS),
        Fault("sums read before they are there", BWD, "    sync_consumer();\n    sums.store", "    sums.store", ONLY_BIAS),
        Fault("biases read, and sums written, too early", SUMS, SYNC, "{}", TILES, LATE),
        Fault("the gradient's bias of the first half", SUMS, "place.half * kHalfColumns", "0", CHUNKS),
    ),
    "matmul/sm90_sums.cu": (
        Fault("a chunk's sums forgotten", SUMS, "      if (add) {\n", "      if (false) {\n", CHUNKS),
        Fault("even and odd columns exchanged", SUMS, "v{{even[2 * half], odd[2 * half],", "v{{odd[2 * half], even[2 * half],", TILES),
        Fault("neighbours of eight columns exchanged", SUMS, "st_global_v4(to + 4 * half", "st_global_v4(to + 4 * (1 - half)", TILES),
        Fault("sums of a row past the last", SUMS, "place.own(r) >= place.rows ?", "place.own(r) > place.rows ?", ODD, OUTSIDE),
    ),
}  # fmt: skip
FAULTS = tuple(fault for faults in FAULTS_OF.values() for fault in faults)


def test_a_fault_changes_what_it_says() -> None:
    check_texts(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, builder: ModuleType, tmp_path: Path) -> None:
    only = next(file for file, faults in FAULTS_OF.items() if fault in faults)
    check_caught(fault, "ce_problems", "*", builder, tmp_path, only, "sm90")
