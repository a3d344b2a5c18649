// SPDX-License-Identifier: Apache-2.0
// Rotary positions, backward: dy rotates back. With a norm, g = dy (weight + offset), xhat = x
// rstd:
//   dx = rstd (g - xhat mean(g xhat)),   dweight = sum over the rows of dy xhat
// dweight is a two-stage sum in fixed order: runs of blocks, whose number depends only on the
// shape, then all runs.
#pragma once

#include "cpu/core/column_sums.h"
#include "cpu/rotary/fwd.h"

namespace pt {
namespace PT_ISA {

template <class X>
struct RotaryBackwardPlan {
  using acc = typename X::acc;
  int64_t padded, runs, per_run;
  Scratch scratch;
  RotaryBackwardPlan(const RotaryProblem& p, int64_t blocks, bool sums)
      : padded(round_up(p.dim, X::width)), runs(sums ? clamp<int64_t>(blocks, 1, 256) : blocks),
        per_run(ceil_div(blocks, runs)) {
    scratch.local = Arena::bytes_for<acc>(padded);
    if (sums) scratch.shared = Arena::bytes_for<acc>(runs * padded);
  }
};

// Process one row with a norm. dy: scratch for one row. dx and dweight, this run's sums, may be
// null.
template <class X>
INLINE void rotary_norm_row_backward(const RotaryProblem& p, const typename X::acc* weight,
                                     const Angles<X>& angles, const typename X::elem* d_out,
                                     const typename X::elem* x, typename X::acc rstd,
                                     typename X::acc* dy, typename X::elem* dx,
                                     typename X::acc* dweight) {
  using A = Acc<X>;
  using vec = typename X::vec;
  turn_row<X, -1>(
      p, angles, [&](int64_t j, auto lanes) { return X::load(d_out + j, lanes); },
      [&](int64_t j, auto lanes, vec v) { A::store(dy + j, lanes, v); });
  const vec rs = set1<vec>(rstd), offset = set1<vec>(typename X::acc(p.weight_offset));
  RowSum<vec> sum;
  columns<X::width>(
      p.dim,
      [&](int64_t j, int slot, auto lanes) {
        const vec d = A::load(dy + j, lanes), xhat = X::load(x + j, lanes) * rs;
        if (dweight) store(dweight + j, fma(d, xhat, load(dweight + j)));
        sum.add_product(slot, vec(d * (A::load(weight + j, lanes) + offset)), xhat);
      },
      sum);
  if (!dx) return;
  const vec mean = set1<vec>(sum.total() / typename X::acc(p.dim));
  each_vector<X::width>(0, p.dim, [&](int64_t j, auto lanes) {
    const vec g = A::load(dy + j, lanes) * (A::load(weight + j, lanes) + offset),
              xhat = X::load(x + j, lanes) * rs;
    X::store(dx + j, lanes, rs * (g - xhat * mean));
  });
}

template <class X>
void rotary_backward(const RotaryProblem& p, const RotaryBackward& f) {
  using acc = typename X::acc;
  using vec = typename X::vec;
  const PositionBlocks blocks(p);
  const RotaryBackwardPlan<X> plan(p, blocks.tasks, f.dweight);
  const auto *weight = static_cast<const acc*>(f.weight), *rstd = static_cast<const acc*>(f.rstd);
  acc* sums = nullptr;
  if (f.dweight) {
    shared_arena.reset(plan.scratch.shared);
    sums = shared_arena.take<acc>(plan.runs * plan.padded);
  }
  for_each_task(plan.runs, p.threads, [&](int64_t run) {
    local_arena.reset(plan.scratch.local);
    acc *dy = local_arena.take<acc>(plan.padded),
        *dweight = sums ? sums + run * plan.padded : nullptr;
    for (int64_t j = 0; dweight && j < plan.padded; j++) dweight[j] = 0;
    for (int64_t task = run * plan.per_run, end = min(blocks.tasks, task + plan.per_run);
         task < end; task++) {
      const int64_t b = blocks.sequence(task);
      rows_of_block(f.d_out.strides, f.d_out.heads, blocks.first(task), blocks.last(task),
                    [&](int64_t h, int64_t l) {
                      const Angles<X> angles(p, b, l);
                      const auto* d_out = row_of<X>(f.d_out, b, h, l);
                      auto* dx = f.dx.data ? row_of<X>(f.dx, b, h, l) : nullptr;
                      if (weight)
                        return rotary_norm_row_backward<X>(
                            p, weight, angles, d_out, row_of<X>(f.x, b, h, l),
                            rstd[(b * f.x.heads + h) * p.length + l], dy, dx, dweight);
                      turn_row<X, -1>(
                          p, angles,
                          [&](int64_t j, auto lanes) { return X::load(d_out + j, lanes); },
                          [&](int64_t j, auto lanes, vec v) { X::store(dx + j, lanes, v); });
                    });
    }
  });
  if (f.dweight) add_blocks(sums, plan.runs, plan.padded, 0, p.dim, static_cast<acc*>(f.dweight));
}

}  // namespace PT_ISA
}  // namespace pt
