// SPDX-License-Identifier: Apache-2.0
// Rotary positions, forward: some lanes of a warp per row read it once, normalize it if there is a
// weight, rotate and write it.
#pragma once

#include "cuda/rotary/plan.h"
#include "cuda/rotary/row.cuh"

namespace pt::cuda {

// Loads that are issued before the wait for the row's sum.
struct ForwardChunk {
  Numbers x, weight;
  Angles angles;

  template <class K>
  PT_DEVICE void load(const RotaryProblem& p, const RotaryForward& f, const HeadAt& at,
                      const Chunk& c, bool here) {
    load_chunk<K>(x, K::at(f.x.data, p.dtype, at.in(f.x.strides)), p.dtype, c, here);
    angles.load<K>(p, at, c);
    if (f.weight.data) load_weight<K>(weight, p, f.weight, c);
  }
};

// One row, normalized and rotated, by the full warp. `here` is false without a row or if its result
// is unused.
template <class K>
class TurnedRow {
 public:
  PT_DEVICE TurnedRow(const RotaryProblem& p, const RotaryForward& f, LaneTeam& team,
                      const HeadAt& at, bool here)
      : p_(p), f_(f), team_(team), at_(at), here_(here) {
    if (K::whole) v_.load<K>(p, f, at, Chunk(p, team.rank()), here);
    if (!f.weight.data) return;
    float squares = 0.0f;
    load_each([&](const Chunk&) {
      each_number([&](int s, int i) { squares = ptx::fma_rn(v_.x[s][i], v_.x[s][i], squares); });
    });
    const float mean = team.sum({squares, 0.0f}).a / float(p.dim);
    rstd_ = ptx::div_rn(1.0f, ptx::sqrt_rn(mean + p.eps));
    if (here && f.rstd && team.rank() == 0) store_one(f.rstd + at.flat(p, f.x.heads), rstd_);
  }

  // Call apply(chunk, values) for the lane's chunks. Call each() once for full rows, which rotate
  // in place; after it, again().
  template <class F>
  PT_DEVICE void each(F apply) {
    load_each([&](const Chunk& c) {
      if (f_.weight.data)
        each_number([&](int s, int i) { v_.x[s][i] = v_.x[s][i] * rstd_ * v_.weight[s][i]; });
      v_.angles.turn<false>(p_, c, v_.x);
      apply(c, v_.x);
    });
  }
  template <class F>
  PT_DEVICE void again(F apply) {
    static_assert(K::whole);
    apply(Chunk(p_, team_.rank()), v_.x);
  }

 private:
  template <class F>
  PT_DEVICE void load_each(F apply) {
    each_chunk<K>(p_, team_, [&](const Chunk& c) {
      if (!K::whole) v_.load<K>(p_, f_, at_, c, here_);
      apply(c);
    });
  }

  const RotaryProblem& p_;
  const RotaryForward& f_;
  LaneTeam& team_;
  const HeadAt& at_;
  bool here_;
  float rstd_ = 1.0f;
  ForwardChunk v_;
};

// Write the row to `out`.
template <class K>
PT_DEVICE void forward_row(const RotaryProblem& p, const RotaryForward& f, LaneTeam& team,
                           const HeadAt& at, void* out, bool here) {
  TurnedRow<K> turned(p, f, team, at, here);
  if (here)
    turned.each([&](const Chunk& c, const Numbers& x) { store_chunk<K>(x, out, p.dtype, c); });
}

// Rotate a block's rows of x into out.
template <class K>
PT_DEVICE void forward_rows(const RotaryProblem& p, const RotaryForward& f, uint32_t block) {
  LaneTeam team(p.lanes);
  const uint32_t row = block * team.teams() + team.team(),
                 rows = uint32_t(p.batch) * uint32_t(f.x.heads) * uint32_t(p.length);
  const bool here = row < rows;
  const HeadAt at(p, f.x.heads, here ? row : 0);
  forward_row<K>(p, f, team, at, K::at(f.out.data, p.dtype, at.in(f.out.strides)), here);
}

template <class K>
__global__ void __launch_bounds__(kRotaryThreads, 4)
    rotary_fwd_kernel(const __grid_constant__ RotaryProblem p,
                      const __grid_constant__ RotaryForward f) {
  forward_rows<K>(p, f, blockIdx.x);
}

}  // namespace pt::cuda
