// SPDX-License-Identifier: Apache-2.0
// Attention backward, shared by its kernels. One block owns each sum and adds in a fixed order: no
// atomics.
//
//   P = e^(s - lse),  D = rows of (out * d_out) - d_lse
//   dP = keep * keep_scale * (d_out @ value^T),  dS = P * (dP - D)
//   dX = dS * (1 - tanh^2) with softcap, else dS
//   d_value = (keep * keep_scale * P)^T @ d_out
//   d_query = scale * dX @ key;  d_key = scale * dX^T @ query
//   d_mask, d_bias, d_slopes, d_table: sums of dS
#pragma once

#include "cuda/attention/block_mask.cuh"

namespace pt::cuda {

// Row stats: the maximum in natural units (or lse; +inf for a row without visible keys), log2 of
// the sum, and delta.
struct RowStats {
  float row_max, log2_sum, delta;
};
PT_DEVICE RowStats read_row_stats(const AttentionBackward& g, int64_t at, bool here) {
  return {here ? load_one(g.row_max + at) : infinity(),
          here && g.log2_sum ? load_one(g.log2_sum + at) : 0.0f,
          here ? load_one(g.delta + at) : 0.0f};
}

// Store the sums of dS for distances before the range of T5's table and after it.
PT_DEVICE void store_far(float* sums, const AttentionProblem& p, float below, float above) {
  store_one(sums, below);
  if (p.before + p.after > 0) store_one(sums + p.before + p.after, above);
  else store_one(sums, below + above);
}

// Compute dX from x (= q.k) and dS from dp (= d_out.v), in place; weights becomes P after dropout,
// unscaled. row_stats(n, r) returns the stats of an element's query; ask_mask() is as in ScoreMod.
// Returns the visible mask.
template <class K, bool Transposed, int NB, class A, class F>
PT_DEVICE uint32_t gradients(const AttentionProblem& p, const ScoreMod<Transposed>& score_mod,
                             float (&x)[NB][4], float (&dp)[NB][4], float (&weights)[NB][4],
                             const Place& at, uint32_t visible, bool cut, A ask_mask, F row_stats) {
  if constexpr (K::has_score_mod) {
    float slope[NB][4];
    visible = score_mod.apply(x, slope, at, visible, ask_mask);
    const uint32_t keep_mask =
        p.drop_threshold ? score_mod.template keep_mask<NB>(at) : 0xffffffffu;
    each<NB>([&](int n, int r, uint32_t bit) {
      const RowStats row = row_stats(n, r);
      const float w = visible & bit
                          ? ptx::exp2(ptx::fma_rn(x[n][r] - row.row_max, kLog2e, -row.log2_sum))
                          : 0.0f;
      const float down = keep_mask & bit ? dp[n][r] * p.keep_scale : 0.0f;
      const float ds = visible & bit ? w * (down - row.delta) : 0.0f;
      weights[n][r] = keep_mask & bit ? w : 0.0f;
      dp[n][r] = ds;
      x[n][r] = p.softcap != 0.0f && visible & bit ? ds * slope[n][r] : ds;
    });
  } else {
    const float scale_log2 = p.scale * kLog2e;
    each<NB>([&](int n, int r, uint32_t bit) {
      const RowStats row = row_stats(n, r);
      float w = ptx::exp2(ptx::fma_rn(x[n][r], scale_log2, -row.row_max * kLog2e));
      float ds = w * (dp[n][r] - row.delta);
      if (cut && !(visible & bit)) w = ds = 0.0f;
      weights[n][r] = w;
      x[n][r] = ds;
    });
  }
  return visible;
}

}  // namespace pt::cuda
