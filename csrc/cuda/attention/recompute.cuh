// SPDX-License-Identifier: Apache-2.0
// Results computed twice where the first time was too optimistic: see Recompute in problem.h. Exact, and the same at every run.
#pragma once

#include "cuda/attention/work.cuh"
#include "cuda/ptx/arithmetic.cuh"

namespace pt::cuda {

// By the optimistic kernel: what holds row `row` of head h of sequence b must be recomputed.
PT_DEVICE void flag_nonfinite(const Recompute& recompute, int64_t head, int row) {
  ptx::st_global_u32(recompute.flags + head * recompute.tiles + row / recompute.rows, 1);
}

// Whether rows [first, end) of a head (b * heads + h) must be recomputed.
PT_DEVICE bool is_flagged(const Recompute& recompute, int64_t head, int first, int end) {
  for (int tile = max(first, 0) / recompute.rows; tile < recompute.tiles && tile * recompute.rows < end; ++tile)
    if (ptx::ld_global_u32(recompute.flags + head * recompute.tiles + tile)) return true;
  return false;
}

// What a block of a careful kernel does: calls make for its tile, a Work, or, where there are flags, for those of tiles blockIdx.x,
// blockIdx.x + gridDim.x, ... that must be recomputed. There each lane asks for one: few blocks see to all, and wait once for 32 of them.
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
    ptx::syncthreads();  // nobody reads its rows in shared memory any more
  }
}

// Whether some of the sums of a lane's two rows, laid out as accumulators, are NaN or infinite; rows whose factor is zero do not count.
template <int N>
PT_DEVICE bool not_finite(const float (&x)[N], const float (&factor)[2]) {
  float zero = 0.0f;
  PT_UNROLL
  for (int i = 0; i < N; ++i) zero = ptx::fma_rn(factor[i / 2 % 2] == 0.0f ? 0.0f : x[i], 0.0f, zero);
  return zero != 0.0f;  // NaN
}

}  // namespace pt::cuda
