// SPDX-License-Identifier: Apache-2.0
// Positions of an accumulator's elements. m16n8 (mma.sync) and m64nNk16 (wgmma, 16 rows per warp)
// agree: register i of a lane is element
//   (lane / 4 + 8 (i / 2 % 2), 8 (i / 4) + 2 (lane % 4) + i % 2).
// Two neighboring n8 pieces, packed to pairs, are the A fragment of the next product's k16 step.
#pragma once

#include "cuda/ptx/platform.cuh"

namespace pt::cuda {

PT_DEVICE int lane_id() { return int(threadIdx.x) % 32; }

PT_HOST_DEVICE constexpr int fragment_row(int lane, int i) { return lane / 4 + 8 * (i / 2 % 2); }
PT_HOST_DEVICE constexpr int fragment_column(int lane, int i) {
  return 8 * (i / 4) + 2 * (lane % 4) + i % 2;
}

}  // namespace pt::cuda
