// SPDX-License-Identifier: Apache-2.0
// Work split of forward's second kernel and the size of its partials. Pure functions, reachable
// from Python as pytransformer._C.cuda_cross_entropy_plan.
#pragma once

#include "cuda/matmul/sm90/plan.h"

namespace pt::cuda {

constexpr int kClassTile = kHalfColumns;  // classes per partial of a row
constexpr int kLossWarps = 8;             // warps per block, which share the tiles of 32 rows
constexpr int kInPlaceThreads = 256;      // of the blocks that change d_logits and gradients
constexpr int kScaledVectors = 4;         // vectors of 8 gradients per thread

struct CrossEntropyPlan {
  int64_t tiles;     // class tiles
  int64_t partials;  // float32 partials per row
  int64_t blocks;    // blocks of the second kernel
  uint32_t smem_bytes;
};

inline CrossEntropyPlan plan_cross_entropy(int64_t rows, int64_t classes, bool smooth) {
  const int64_t tiles = (classes + kClassTile - 1) / kClassTile;
  return {tiles, (smooth ? 3 : 2) * tiles * rows, (rows + 31) / 32,
          3 * kLossWarps * 32 * sizeof(float)};
}

}  // namespace pt::cuda
