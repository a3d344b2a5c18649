// SPDX-License-Identifier: Apache-2.0
// Rotary positions, backward; problem.h has the formulas. For dweight, a fixed number of blocks
// share the rows and write partial sums; the norms' second kernel adds them in order. No atomics,
// so the result is deterministic.
#pragma once

#include "cuda/rotary/plan.h"
#include "cuda/rotary/row.cuh"
#include "cuda/tile/partials.cuh"

namespace pt::cuda {

// A row's dy and, with a norm, its xhat and weight.
struct BackwardChunk {
  Numbers dy, xhat, weight;

  template <class K>
  PT_DEVICE void load(const RotaryProblem& p, const RotaryBackward& f, const HeadAt& at,
                      const Chunk& c, bool here) {
    Angles angles;
    load_chunk<K>(dy, K::at(f.d_out.data, p.dtype, at.in(f.d_out.strides)), p.dtype, c, here);
    if (f.weight.data) {
      load_chunk<K>(xhat, K::at(f.x.data, p.dtype, at.in(f.x.strides)), p.dtype, c, here);
      load_weight<K>(weight, p, f.weight, c);
    }
    angles.load<K>(p, at, c);
    angles.turn<true>(p, c, dy);
    if (!f.weight.data) return;
    const float rstd = here ? load_one(f.rstd + at.flat(p, f.x.heads)) : 0.0f;
    each_number([&](int s, int i) { xhat[s][i] *= rstd; });
  }
};

// Compute one row's dx, and its part of dweight by add(s, chunk, dy xhat of the chunk's vector s).
// The full warp calls it.
template <class K, class Add>
PT_DEVICE void backward_row(const RotaryProblem& p, const RotaryBackward& f, LaneTeam& team,
                            const HeadAt& at, bool here, Add add) {
  BackwardChunk v;
  const auto each = [&](auto apply) {
    each_chunk<K>(p, team, [&](const Chunk& c) {
      if (!K::whole) v.load<K>(p, f, at, c, here);
      apply(c);
    });
  };
  if (K::whole) v.load<K>(p, f, at, Chunk(p, team.rank()), here);
  float mean = 0.0f, rstd = 1.0f;
  if (f.weight.data) {
    float sum = 0.0f;
    each([&](const Chunk& c) {
      PT_UNROLL
      for (int s = 0; s < 2; ++s) {
        float part[kVector];
        PT_UNROLL
        for (int i = 0; i < kVector; ++i) {
          part[i] = v.dy[s][i] * v.xhat[s][i];
          sum = ptx::fma_rn(v.dy[s][i] * v.weight[s][i], v.xhat[s][i], sum);
        }
        if (f.dweight_partials && here) add(s, c, part);
      }
    });
    mean = team.sum({sum, 0.0f}).a / float(p.dim);
    if (here) rstd = load_one(f.rstd + at.flat(p, f.x.heads));
  }
  if (!here || !f.dx.data) return;
  each([&](const Chunk& c) {
    if (f.weight.data)
      each_number([&](int s, int i) {
        v.dy[s][i] = (v.dy[s][i] * v.weight[s][i] - v.xhat[s][i] * mean) * rstd;
      });
    store_chunk<K>(v.dy, K::at(f.dx.data, p.dtype, at.in(f.dx.strides)), p.dtype, c);
  });
}

// Call f(row position, row exists) for a team's rows. Every lane calls f equally often.
template <class F>
PT_DEVICE void each_row(const RotaryProblem& p, int64_t heads, const LaneTeam& team, F f) {
  const uint32_t rows = uint32_t(p.batch) * uint32_t(heads) * uint32_t(p.length),
                 step = gridDim.x * team.teams();
  for (uint32_t first = blockIdx.x * team.teams(); first < rows; first += step) {
    const uint32_t row = first + team.team();
    const bool here = row < rows;
    f(HeadAt(p, heads, here ? row : 0), here);
  }
}

template <class T>
__global__ void __launch_bounds__(kRotaryThreads, 4)
    rotary_bwd_kernel(const __grid_constant__ RotaryProblem p,
                      const __grid_constant__ RotaryBackward f) {
  using K = WholeRows<T>;
  LaneTeam team(p.lanes);
  Numbers dweight = {};
  each_row(p, f.d_out.heads, team, [&](const HeadAt& at, bool here) {
    backward_row<K>(p, f, team, at, here, [&](int s, const Chunk&, const float (&part)[kVector]) {
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) dweight[s][i] = dweight[s][i] + part[i];
    });
  });
  if (!f.dweight_partials) return;
  const Chunk c(p, team.rank());
  store_part(
      team, dweight, [&](int s) { return c.has(s) ? c.column[s] : p.dim; }, f.dweight_partials,
      p.dim);
}

// One warp per row, read twice, for any dtype, alignment and width. The dweight sums are in memory.
template <class K>
__global__ void __launch_bounds__(kRotaryThreads, 2)
    rotary_bwd_any_kernel(const __grid_constant__ RotaryProblem p,
                          const __grid_constant__ RotaryBackward f) {
  LaneTeam team(p.lanes);
  float* sums = f.dweight_partials + (int64_t(blockIdx.x) * team.teams() + team.team()) * p.dim;
  const auto add = [&](int s, const Chunk& c, const float (&part)[kVector]) {
    add_to_part(sums, part, c.column[s], c.end[s], false);
  };
  if (f.dweight_partials)
    each_chunk<K>(p, team, [&](const Chunk& c) {
      const float zeros[kVector] = {};
      for (int s = 0; s < 2; ++s) add_to_part(sums, zeros, c.column[s], c.end[s], true);
    });
  each_row(p, f.d_out.heads, team,
           [&](const HeadAt& at, bool here) { backward_row<K>(p, f, team, at, here, add); });
}

}  // namespace pt::cuda
