// SPDX-License-Identifier: Apache-2.0
// Compile-time choices of the warpgroup gemms.
#pragma once

#include <cstdint>

namespace pt::cuda {

// Columns of a half tile, which an epilogue processes at once. A narrow tile has one half, a wide
// one two.
constexpr int kHalfColumns = 128;

// A block has a producer warpgroup, one thread of which loads by TMA, and two consumer warpgroups
// that share a tile, 64 rows each. A stage holds `step` columns of the tile's rows of A and of B.
//
// 128 x 256: a wgmma of 256 columns reads the least shared memory per unit of work (10 KB in its
// 128 cycles; 64 x 128 would read 6 KB in 64), and a step of 1024 cycles loads 48 KB.
// docs/cuda/other-ops.md explains the choice.
struct MatmulTile {
  int columns = 256, step = 64, stages = 4, consumers = 2;
  int lead = 3;  // steps by which the first consumer leads in a shared tile
  int producer_registers = 24, consumer_registers = 240;

  constexpr int rows() const { return 64 * consumers; }
  constexpr int readers() const { return rows() / 16; }  // warps that read a stage
  constexpr int threads() const { return 128 * (consumers + 1); }
  constexpr int sums() const { return columns / 2; }  // accumulators per lane
  constexpr uint32_t a_bytes() const { return uint32_t(rows() * step * 2); }
  constexpr uint32_t stage_bytes() const { return uint32_t((rows() + columns) * step * 2); }
};
constexpr MatmulTile kMatmulTile;

constexpr int kPanelColumns = 64;        // columns per panel: 128 bytes, the swizzle's row
constexpr uint32_t kMatmulSlack = 1024;  // padding for a start at a multiple of 1024

// scratch: an epilogue's bytes per consumer.
constexpr uint32_t matmul_smem(const MatmulTile& t, uint32_t scratch) {
  return kMatmulSlack + uint32_t(t.stages) * (t.stage_bytes() + 16) +
         uint32_t(t.consumers) * scratch;
}

constexpr uint32_t kMatmulMaxScratch = 8192;  // per consumer
constexpr bool matmul_fits(const MatmulTile& t) {
  constexpr uint32_t kMaxSmem = 232448;  // per block
  constexpr int kSpare = 64;             // for addresses and an epilogue of 32 columns at a time
  const int launched = 65536 / t.threads() / 8 * 8 * (t.consumers + 1);
  return matmul_smem(t, kMatmulMaxScratch) <= kMaxSmem &&
         t.sums() + kSpare <= t.consumer_registers &&
         t.producer_registers + t.consumers * t.consumer_registers <= launched &&
         t.step == kPanelColumns && t.columns == 2 * kHalfColumns && t.lead <= t.stages;
}
static_assert(matmul_fits(kMatmulTile));

// Template argument of a kernel, which its name shows: operand layouts (A as (rows, k) or,
// transposed, (k, rows); B as (columns, k) or (k, columns)), and gated, when two products share A
// and each has half of the columns of each half tile.
template <bool TransA, bool RowsOfB, bool Gated>
struct Operands {
  static constexpr bool a_by_k = TransA, b_by_k = RowsOfB, gated = Gated;
  static constexpr int products = Gated ? 2 : 1;
};
using NT = Operands<false, false, false>;  // x w^T
using NN = Operands<false, true, false>;
using TN = Operands<true, true, false>;
using GatedNT = Operands<false, false, true>;

}  // namespace pt::cuda
