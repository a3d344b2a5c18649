// SPDX-License-Identifier: Apache-2.0
// Choice of the rotary kernel and its lanes per row. Pure functions of the problem, reachable from
// Python as pytransformer._C.cuda_rotary_plan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"

namespace pt::cuda {

constexpr int kRotaryThreads = 128, kChunkColumns = 16;
// 32-bit row indices, including those of a block past the last row
constexpr int64_t kMaxRotaryRows = (int64_t(1) << 31) - (1 << 14);
constexpr int kMaxRotaryColumns = 4096;  // a lane adds up to 128 squares sequentially

struct RotaryShape {
  int64_t rows;
  int dim, turned;
  // aligned: all rows, of tables and weights too, start at multiples of 16 bytes
  bool interleaved, aligned;
};

// A row is divided into chunks of 16 columns, two vectors of eight, so that a pair is within one
// chunk: first the chunks with pairs, then the rest.
struct RotaryPlan {
  // True: a lane has at most one chunk, held in registers and loaded 16 bytes at a time. False: any
  // alignment and width, read twice.
  bool whole;
  int pair_chunks, chunks;
  int lanes;  // lanes per row: 4, 8, 16 or 32
  int64_t blocks;
  uint32_t smem_bytes;

  int rows_per_block() const { return kRotaryThreads / lanes; }
};

constexpr int chunks_of(int64_t columns) {
  return int((columns + kChunkColumns - 1) / kChunkColumns);
}
inline int lanes_of(int chunks) {
  int lanes = 4;
  while (lanes < chunks && lanes < 32) lanes *= 2;
  return lanes;
}

// For dweight sums the grid is as large as runs at once, 16 warps per SM, because each block writes
// partial sums.
inline RotaryPlan plan_rotary(const RotaryShape& s, bool sums, int multiprocessors) {
  RotaryPlan plan{};
  plan.pair_chunks = chunks_of(s.turned),
  plan.chunks = plan.pair_chunks + chunks_of(s.dim - s.turned);
  const bool vectors = s.dim % 8 == 0 && s.turned % (s.interleaved ? 8 : 16) == 0;
  plan.whole = s.aligned && vectors && plan.chunks <= 32;
  plan.lanes = plan.whole ? lanes_of(plan.chunks) : 32;
  plan.blocks = (s.rows + plan.rows_per_block() - 1) / plan.rows_per_block();
  if (!sums) return plan;
  plan.blocks = std::min<int64_t>(plan.blocks, int64_t(multiprocessors) * 4);
  if (plan.whole) plan.smem_bytes = uint32_t(plan.rows_per_block()) * uint32_t(s.dim) * 4;
  return plan;
}

}  // namespace pt::cuda
