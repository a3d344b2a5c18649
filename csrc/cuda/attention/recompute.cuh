// SPDX-License-Identifier: Apache-2.0
// Recomputes results of kernels that do not mask hidden rows: see Recompute in problem.h. Exact and
// deterministic.
#pragma once

#include "cuda/attention/work.cuh"
#include "cuda/ptx/arithmetic.cuh"

namespace pt::cuda {

// Flag the tile of row `row` of a head (b * heads + h) for recomputation.
PT_DEVICE void flag_nonfinite(const Recompute& recompute, int64_t head, int row) {
  ptx::st_global_u32(recompute.flags + head * recompute.tiles + row / recompute.rows, 1);
}

// Return true if rows [first, end) of a head (b * heads + h) must be recomputed.
PT_DEVICE bool is_flagged(const Recompute& recompute, int64_t head, int first, int end) {
  for (int tile = max(first, 0) / recompute.rows;
       tile < recompute.tiles && tile * recompute.rows < end; ++tile)
    if (ptx::ld_global_u32(recompute.flags + head * recompute.tiles + tile)) return true;
  return false;
}

// Call make for this block's tile, a Work; or, if there are flags, for the flagged ones of tiles
// blockIdx.x, blockIdx.x + gridDim.x, ... Each lane reads the flags of one tile, so few blocks
// cover all tiles and wait once per 32 of them.
template <class Work, class K, class Make>
PT_DEVICE void recompute_tiles(const AttentionProblem& p, const Recompute& recompute, Make make) {
  const auto make_one = [&](uint32_t n) { make(Work(p, Work::place(p, n))); };
  if constexpr (!K::has_score_mod) return make_one(blockIdx.x);
  const uint32_t all = uint32_t(p.sequences * Work::heads(p) * Work::tiles(p));
  const auto must = [&](uint32_t n) {
    const TilePlace at = Work::place(p, n);
    const int first = Work::first_row(p, at.tile);
    return is_flagged(recompute, at.head, first, first + Work::kRows);
  };
  for (uint32_t n = blockIdx.x; n < all;) {
    uint32_t found = n;
    if (recompute.flags) {
      const uint32_t own = n + uint32_t(lane_id()) * gridDim.x;
      found = own < all && must(own) ? own : all;
      PT_UNROLL
      for (int d = 1; d < 32; d *= 2) {
        const uint32_t other = ptx::shfl_xor_u32(found, d);
        found = other < found ? other : found;
      }
    }
    n = found < all ? found + gridDim.x : n + 32 * gridDim.x;
    if (found == all) continue;
    make_one(found);
    ptx::syncthreads();  // all reads of its shared memory are done
  }
}

// Return true if an accumulator of the lane's two rows is NaN or infinite; rows with factor 0 do
// not count.
template <int N>
PT_DEVICE bool not_finite(const float (&x)[N], const float (&factor)[2]) {
  float zero = 0.0f;
  PT_UNROLL
  for (int i = 0; i < N; ++i)
    zero = ptx::fma_rn(factor[i / 2 % 2] == 0.0f ? 0.0f : x[i], 0.0f, zero);
  return zero != 0.0f;  // NaN
}

}  // namespace pt::cuda
