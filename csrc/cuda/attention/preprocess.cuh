// SPDX-License-Identifier: Apache-2.0
// Attention backward, bwd_preprocess: delta and lse of each query.
#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/tile/numbers.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vectors.cuh"

namespace pt::cuda {

// Eight lanes per query: they read 16 bytes at a time and do not wait for lse.
constexpr int kRowLanes = 8, kRowsOfABlock = 128 / kRowLanes;

template <class K>
__global__ void __launch_bounds__(128)
    attention_bwd_preprocess_kernel(const __grid_constant__ AttentionPreprocess r) {
  const AttentionProblem& p = r.p;
  LaneTeam team(kRowLanes);
  const int64_t row = int64_t(blockIdx.x) * kRowsOfABlock + team.team(),
                per_sequence = int64_t(p.heads) * p.num_queries;
  // the warp has no rows
  if (row - team.team() % (32 / kRowLanes) >= p.sequences * per_sequence) return;
  const bool exists = row < p.sequences * per_sequence;
  const int b = exists ? int(row / per_sequence) : 0, h = int(row % per_sequence / p.num_queries),
            i = int(row % p.num_queries);
  const Sequence s(p, b);
  const bool live = exists && i < s.num_q;
  float sum = 0.0f;
  if (live)
    with_type(p.dtype, [&](auto t) {
      using T = decltype(t);
      const T *out = head_of<T>(r.out, b, h, s.row_q + i),
              *d_out = head_of<T>(r.d_out, b, h, s.row_q + i);
      const bool aligned =
          r.columns % kVector == 0 &&
          (reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(d_out)) % 16 == 0;
      for (int c = kVector * team.rank(); c < r.columns; c += kVector * kRowLanes) {
        if (aligned) {
          Raw<T> x, y;
          x.template load<false>(out + c), y.template load<false>(d_out + c);
          PT_UNROLL
          for (int e = 0; e < kVector; ++e) sum = ptx::fma_rn(x[e], y[e], sum);
        } else {
          for (int e = c; e < min(c + kVector, r.columns); ++e)
            sum = ptx::fma_rn(load_one(out + e), load_one(d_out + e), sum);
        }
      }
    });
  sum = team.sum({sum, 0.0f}).a;
  if (!live || team.rank() != 0) return;
  const int64_t at = row_stat_at(r.at, b, h, s.row_q + i);
  const float lse = load_one(r.lse + at);
  const bool dead = lse <= sink_of(p, h);
  store_one(r.delta + at, dead ? 0.0f : sum - (r.d_lse ? load_one(r.d_lse + at) : 0.0f));
  store_one(r.row_max + at, dead ? infinity() : lse);
}

}  // namespace pt::cuda
