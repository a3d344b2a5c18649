// SPDX-License-Identifier: Apache-2.0
// Layer norm backward: dx, dresidual and this task's share of dweight and dbias in one pass over the rows.
//
// The saved mean is rounded, which shifts every xhat of a row by the same amount. The sum of the xhat, zero but for that,
// measures the shift, and the second look at the row takes it out. The parameters' gradients are sums over rows in two
// stages, both in fixed order: blocks of rows, whose number depends on the shape alone, then the blocks.
#pragma once

#include "cpu/core/column_sums.h"
#include "cpu/layer_norm/fwd.h"

namespace pt {
namespace PT_ISA {

template <class X, class R, bool DROP, bool PARAMETERS, bool STREAM>
struct NormBackwardRow {
  using acc = typename X::acc;
  using vec = typename X::vec;
  using A = Acc<X>;
  const NormProblem& p;
  acc* xhat;                   // scratch, one row
  acc *dweight, *dbias;        // this block's sums
  acc scale;                   // of kept elements
  int64_t next_h, next_d_out;  // how far the next row is

  // h: what was normalized; d_residual_out, dx, dresidual may be null.
  void operator()(const typename X::elem* d_out, const typename R::elem* h, const typename R::elem* d_residual_out, acc mean, acc rstd,
                  const ColumnKeep& keep, typename X::elem* dx, typename R::elem* dresidual) const {
    const int64_t n = p.columns;
    const acc* w = static_cast<const acc*>(p.weight);
    const vec rs = set1<vec>(rstd);
    RowSum<vec> sum_x, sum_g, sum_gx;
    columns<X::width>(
        n,
        [&](int64_t j, int slot, auto lanes) {
          const vec x = in_row((R::load(h + j, lanes) - set1<vec>(mean)) * rs, lanes);
          vec g = X::load(d_out + j, lanes);
          if (w) g = g * A::load(w + j, lanes);
          store(xhat + j, x);
          if (d_residual_out) fetch<false>(d_residual_out, j, slot);
          if (!STREAM && dresidual) fetch<true>(dresidual, j, slot);
          if (!STREAM && dx) fetch<true>(dx, j, slot);
          sum_x.add(slot, x);
          sum_g.add(slot, g);
          sum_gx.add_product(slot, g, x);
        },
        sum_x, sum_g, sum_gx);
    const acc shift = p.rms ? 0 : sum_x.total() / acc(n), mean_g = p.rms ? 0 : sum_g.total() / acc(n);
    const acc mean_gx = sum_gx.total() / acc(n) - shift * mean_g;
    columns<X::width>(n, [&](int64_t j, int slot, auto lanes) {
      fetch<false>(h + next_h, j, slot);
      fetch<false>(d_out + next_d_out, j, slot);
      const vec x = load(xhat + j) - set1<vec>(shift), dy = X::load(d_out + j, lanes);
      if constexpr (PARAMETERS) {
        store(dweight + j, fma(dy, x, load(dweight + j)));
        store(dbias + j, load(dbias + j) + dy);
      }
      const vec g = w ? dy * A::load(w + j, lanes) : dy;
      vec dh = rs * (g - set1<vec>(mean_g) - x * set1<vec>(mean_gx));
      if (d_residual_out) dh = dh + R::load(d_residual_out + j, lanes);
      if (dresidual) put<R, STREAM>(dresidual + j, lanes, dh);
      if constexpr (DROP) dh = select(keep.at(j), dh * set1<vec>(scale), vec{});
      if (dx) put<X, STREAM>(dx + j, lanes, dh);
    });
  }
};

template <class X, class R, bool DROP, bool PARAMETERS, bool STREAM = false>
void layer_norm_backward_rows(const NormProblem& p, const NormBackward& f) {
  using acc = typename X::acc;
  const NormPlan<X, PARAMETERS> plan(p);
  if constexpr (!STREAM && kVecBytes > 16)
    if (plan.template streams<X, R>(f.dx, f.dresidual)) return layer_norm_backward_rows<X, R, DROP, PARAMETERS, true>(p, f);
  const int64_t n = p.columns, padded = plan.padded, blocks = plan.blocks;
  acc *dweight = nullptr, *dbias = nullptr;
  if constexpr (PARAMETERS) {
    shared_arena.reset(plan.scratch.shared);
    dweight = shared_arena.take<acc>(blocks * padded);
    dbias = shared_arena.take<acc>(blocks * padded);
  }
  for_each_task(blocks, p.threads, [&](int64_t block) {
    local_arena.reset(plan.scratch.local);
    acc* xhat = local_arena.take<acc>(padded);
    ColumnKeep keep(p.seed, p.drop_threshold, kTagAddNorm, 0, n, local_arena);
    acc *dw = PARAMETERS ? dweight + block * padded : nullptr, *db = PARAMETERS ? dbias + block * padded : nullptr;
    if constexpr (PARAMETERS)
      for (int64_t j = 0; j < padded; j++) dw[j] = db[j] = 0;
    const NormBackwardRow<X, R, DROP, PARAMETERS, STREAM> row{p, xhat, dw, db, acc(keep_scale(p.drop_threshold)), f.h.inner, f.d_out.inner};
    for (int64_t i = block * plan.per_block, end = min(plan.rows, i + plan.per_block); i < end; i++) {
      const int64_t o = i / p.inner, q = i - o * p.inner;
      if constexpr (DROP) keep.row(i + p.row_start);
      row(row_of<X>(f.d_out, o, q), row_of<R>(f.h, o, q), f.d_residual_out.data ? row_of<R>(f.d_residual_out, o, q) : nullptr,
          f.mean ? static_cast<const acc*>(f.mean)[i] : acc(0), static_cast<const acc*>(f.rstd)[i], keep,
          f.dx.data ? row_of<X>(f.dx, o, q) : nullptr, f.dresidual.data ? row_of<R>(f.dresidual, o, q) : nullptr);
    }
    if constexpr (STREAM) stream_fence();
  });
  if constexpr (PARAMETERS) {
    constexpr int64_t kStep = 1024;
    for_each_task(ceil_div(n, kStep), p.threads, [&](int64_t task) {
      const int64_t first = task * kStep, last = min(n, first + kStep);
      if (f.dweight) add_blocks(dweight, blocks, padded, first, last, static_cast<acc*>(f.dweight));
      if (f.dbias) add_blocks(dbias, blocks, padded, first, last, static_cast<acc*>(f.dbias));
    });
  }
}

template <class X, class R>
void layer_norm_backward(const NormProblem& p, const NormBackward& f) {
  const bool drop = p.drop_threshold > 0 && f.dx.data;
  if (f.dweight || f.dbias)
    return drop ? layer_norm_backward_rows<X, R, true, true>(p, f) : layer_norm_backward_rows<X, R, false, true>(p, f);
  return drop ? layer_norm_backward_rows<X, R, true, false>(p, f) : layer_norm_backward_rows<X, R, false, false>(p, f);
}

}  // namespace PT_ISA
}  // namespace pt
