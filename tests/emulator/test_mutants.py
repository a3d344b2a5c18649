"""Faults planted in the norm kernels' source, each of which must be caught by norm_problems.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from planted_texts import Fault, check_caught, check_texts, parameters

REDUCE, PHILOX = "tile/reduce.cuh", "tile/philox.cuh"
FWD, BWD, EDGE = "layer_norm/fwd.cuh", "layer_norm/bwd.cuh", "layer_norm/layer_norm.cpp"
SYNC = "  ptx::syncthreads();"
KEEP = "      const uint32_t keep = p.drop_threshold ? dropout.keep(row, column) : 0;"
CONTINUE = "      if (!inside(v)) continue;\n"
OUTSIDE, LATE = "outside global memory", "not ordered after the"

FAULTS = (
    Fault("no barrier in a block's sum", REDUCE, SYNC, "", message="ld.shared"),
    Fault("one buffer for a block's sums", REDUCE, "turn ^= 1;", "", message=LATE),
    Fault("a warp left out of a block's sum", REDUCE, "for (int w = 0; w < warps", "for (int w = 1; w < warps"),
    Fault("a step left out of a row's sum", REDUCE, "if (d < lanes)", "if (2 * d < lanes)"),
    Fault(
        "a column past the row's end",
        FWD,
        "column_of(team, v) < p.columns;",
        "column_of(team, v) <= p.columns;",
        message=OUTSIDE,
        slow=False,
    ),
    Fault("a row past the last", FWD, "const bool here = row < p.rows;", "const bool here = row <= p.rows;", message=OUTSIDE),
    Fault(
        "a row past the last, backward",
        BWD,
        "const bool here = row < p.rows;",
        "const bool here = row <= p.rows;",
        message=OUTSIDE,
    ),
    Fault("no barrier before a part is summed", BWD, SYNC + "\n  for (int column", "  for (int column", message="ld.shared"),
    Fault("a part's memory used again too early", BWD, SYNC + "  // an earlier use of the memory is over", "", message=LATE),
    Fault("no barrier in the second stage", BWD, SYNC + "\n  if (warp != 0", "  if (warp != 0", message="ld.shared"),
    Fault("a block's part left out", BWD, "b < r.blocks;", "b < r.blocks - 1;"),
    Fault("parts of the wrong block", BWD, "part = int64_t(blockIdx.x) * p.columns;", "part = 0;"),
    Fault("a part never begun", BWD, "const bool begins = row == blockIdx.x;", "const bool begins = false;"),
    Fault("the residual's gradient forgotten", BWD, "dh[i] += d[i];", "dh[i] += 0.0f * d[i];"),
    Fault("the mean taken off in an RMS norm", FWD, "shift = p.rms ? 0.0f : deviation.a / n;", "shift = deviation.a / n;"),
    Fault("dropout of another group", PHILOX, "/ 32 * 4 + lane", "/ 32 * 4 + (lane ^ 1)"),
    Fault(
        "dropout's words not exchanged",
        "tile/quad.cuh",
        "shfl_xor_u32(upper ? a0 : b0, 2)",
        "shfl_xor_u32(upper ? a0 : b0, 1)",
    ),
    Fault("dropout's threshold too high", PHILOX, "d.w[m] >> 16 >= threshold_", "d.w[m] >> 16 >= threshold_ + 600"),
    Fault(
        "dropout in a divergent warp",
        BWD,
        KEEP + "  // the whole warp calls it\n" + CONTINUE,
        CONTINUE + KEEP + "\n",
        message="deadlock",
    ),
    Fault(
        "16 bytes of rows that are not aligned",
        EDGE,
        "aligned_ &= at_piece(r.data) &&",
        "aligned_ &= true ||",
        message="not a multiple of 16",
    ),
)


def test_a_fault_changes_what_it_says() -> None:
    check_texts(FAULTS)


@pytest.mark.parametrize("fault", parameters(FAULTS))
def test_a_planted_fault_is_caught(fault: Fault, builder: ModuleType, tmp_path: Path) -> None:
    check_caught(fault, "norm_problems", "layer_norm", builder, tmp_path)
