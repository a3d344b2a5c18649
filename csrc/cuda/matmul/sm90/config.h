// SPDX-License-Identifier: Apache-2.0
// Every compile-time choice of the products by warpgroups.
#pragma once

#include <cstdint>

namespace pt::cuda {

constexpr int kHalfColumns = 128;  // of a tile: what an epilogue takes at a time. A narrow tile has one half, a wide one two

// A block is a producer warpgroup, one thread of which loads by TMA, and two consumer warpgroups that share a tile, 64 rows each. A stage
// has `step` columns of the rows of A and rows of B.
//
// 128 x 256: a wgmma of 256 columns reads least of shared memory for its work (10 KB in the 128 cycles it takes; 64 x 128 would read 6 KB
// in 64), and a step of 1024 cycles loads 48 KB. docs/cuda/other-ops.md explains the choice.
struct MatmulTile {
  int columns = 256, step = 64, stages = 4, consumers = 2;
  int lead = 3;  // steps by which the first consumer begins a shared tile before the other
  int producer_registers = 24, consumer_registers = 240;

  constexpr int rows() const { return 64 * consumers; }
  constexpr int readers() const { return rows() / 16; }  // warps that multiply with a stage
  constexpr int threads() const { return 128 * (consumers + 1); }
  constexpr int sums() const { return columns / 2; }  // accumulators of a lane
  constexpr uint32_t a_bytes() const { return uint32_t(rows() * step * 2); }
  constexpr uint32_t stage_bytes() const { return uint32_t((rows() + columns) * step * 2); }
};
constexpr MatmulTile kMatmulTile;

constexpr int kPanelColumns = 64;        // of a panel: 128 bytes, the width of the swizzle
constexpr uint32_t kMatmulSlack = 1024;  // to begin at a multiple of 1024

// Scratch: of an epilogue, for each consumer.
constexpr uint32_t matmul_smem(const MatmulTile& t, uint32_t scratch) {
  return kMatmulSlack + uint32_t(t.stages) * (t.stage_bytes() + 16) + uint32_t(t.consumers) * scratch;
}

constexpr uint32_t kMatmulMaxScratch = 8192;  // for each consumer
constexpr bool matmul_fits(const MatmulTile& t) {
  constexpr uint32_t kMaxSmem = 232448;  // of a block
  constexpr int kSpare = 64;             // registers for addresses, and for an epilogue that works on 32 columns at a time
  const int launched = 65536 / t.threads() / 8 * 8 * (t.consumers + 1);
  return matmul_smem(t, kMatmulMaxScratch) <= kMaxSmem && t.sums() + kSpare <= t.consumer_registers &&
         t.producer_registers + t.consumers * t.consumer_registers <= launched && t.step == kPanelColumns &&
         t.columns == 2 * kHalfColumns && t.lead <= t.stages;
}
static_assert(matmul_fits(kMatmulTile));

// What a kernel is instantiated with, and what its name shows: how operands lie (A: as (rows, k) or, transposed, (k, rows); B: as
// (columns, k) or (k, columns)), and whether two products share A, each with half of the columns of each half of a tile.
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
