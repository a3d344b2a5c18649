// SPDX-License-Identifier: Apache-2.0
// How forward's second stage shares the rows, and how large its parts are: pure functions, reachable from Python as
// pytransformer._C.cuda_cross_entropy_plan.
#pragma once

#include "cuda/matmul/sm90/plan.h"

namespace pt::cuda {

constexpr int kClassTile = kHalfColumns;  // classes of which a product's epilogue leaves the parts of a row
constexpr int kLossWarps = 8;             // of a block, which share the tiles of 32 rows

struct CrossEntropyPlan {
  int64_t tiles;     // of classes
  int64_t partials;  // float32 numbers that tiles leave
  int64_t blocks;    // of the second stage
  uint32_t smem_bytes;
};

inline CrossEntropyPlan plan_cross_entropy(int64_t rows, int64_t classes, bool smooth) {
  const int64_t tiles = (classes + kClassTile - 1) / kClassTile;
  return {tiles, (smooth ? 3 : 2) * tiles * rows, (rows + 31) / 32, 3 * kLossWarps * 32 * sizeof(float)};
}

}  // namespace pt::cuda
