// SPDX-License-Identifier: Apache-2.0
// Layer norm backward: dx, dresidual and this task's share of dweight and dbias in one pass over
// the rows.
//
// The saved mean is rounded, which shifts all xhat of a row by the same amount. Their sum,
// otherwise zero, measures the shift, and the second pass over the row subtracts it. The
// parameters' gradients are two-stage sums over rows in fixed order: blocks of rows, whose number
// depends only on the shape, then all blocks.
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
  const NormBackward& f;
  acc *dweight, *dbias;  // this block's sums
  acc scale;             // scale of elements that dropout keeps
  int64_t ahead;         // prefetch distance in rows

  // One row and its first-pass results: xhat is (h - mean) rstd - shift. Gradients may be null.
  struct Row {
    const typename X::elem* d_out;
    const typename R::elem *h, *d_residual_out;
    typename X::elem* dx;
    typename R::elem* dresidual;
    acc rstd, mean, shift, mean_g, mean_gx;

    // Return xhat + shift. The fma's error is the same across the row, so shift removes it; a
    // separately rounded product's error is not.
    INLINE vec unshifted(vec h) const {
#if defined(__FMA__)
      return fma(h, set1<vec>(rstd), set1<vec>(-mean * rstd));
#else
      return (h - set1<vec>(mean)) * set1<vec>(rstd);
#endif
    }
  };

  INLINE Row look(int64_t i) const {
    const int64_t o = p.outer == 1 ? 0 : i / p.inner, q = i - o * p.inner, n = p.columns;
    Row r{row_of<X>(f.d_out, o, q),
          row_of<R>(f.h, o, q),
          f.d_residual_out.data ? row_of<R>(f.d_residual_out, o, q) : nullptr,
          f.dx.data ? row_of<X>(f.dx, o, q) : nullptr,
          f.dresidual.data ? row_of<R>(f.dresidual, o, q) : nullptr,
          static_cast<const acc*>(f.rstd)[i],
          0,
          0,
          0,
          0};
    if (f.mean) r.mean = static_cast<const acc*>(f.mean)[i];
    RowSum<vec> sum_x, sum_g, sum_gx;
    columns<X::width>(
        n,
        [=, &sum_x, &sum_g, &sum_gx, w = static_cast<const acc*>(p.weight)](int64_t j, int slot,
                                                                            auto lanes) {
          const vec x = in_row(r.unshifted(R::load(r.h + j, lanes)), lanes);
          vec g = X::load(r.d_out + j, lanes);
          if (w) g = g * A::load(w + j, lanes);
          if (!STREAM && r.dresidual) fetch<true>(r.dresidual, j, slot);
          if (!STREAM && r.dx) fetch<true>(r.dx, j, slot);
          sum_x.add(slot, x);
          sum_g.add(slot, g);
          sum_gx.add_product(slot, g, x);
        },
        sum_x, sum_g, sum_gx);
    if (!p.rms) r.shift = sum_x.total() / acc(n), r.mean_g = sum_g.total() / acc(n);
    r.mean_gx = sum_gx.total() / acc(n) - r.shift * r.mean_g;
    return r;
  }

  INLINE void write(const Row& r, const ColumnKeep& keep) const {
    // Prefetch ahead. A branch in the loop costs more than a second prefetch of a line.
    const auto *h = r.h + ahead * f.h.inner,
               *residual = r.d_residual_out ? r.d_residual_out + ahead * f.d_residual_out.inner : h;
    const auto* d_out = r.d_out + ahead * f.d_out.inner;
    columns<X::width>(
        p.columns, [=, &keep, w = static_cast<const acc*>(p.weight), dweight = dweight,
                    dbias = dbias, scale = scale](int64_t j, int slot, auto lanes) {
          fetch<false>(h, j, slot);
          fetch<false>(d_out, j, slot);
          fetch<false>(residual, j, slot);
          const vec x = r.unshifted(R::load(r.h + j, lanes)) - set1<vec>(r.shift);
          const vec dy = X::load(r.d_out + j, lanes);
          if constexpr (PARAMETERS) {
            store(dweight + j, fma(dy, x, load(dweight + j)));
            store(dbias + j, load(dbias + j) + dy);
          }
          const vec g = w ? dy * A::load(w + j, lanes) : dy;
          vec dh = fma(g, set1<vec>(r.rstd), set1<vec>(-r.rstd * r.mean_g));
          dh = fma(x, set1<vec>(-r.rstd * r.mean_gx), dh);
          if (r.d_residual_out) dh = dh + R::load(r.d_residual_out + j, lanes);
          const auto store = [=, &keep] {
            if (r.dresidual) put<R, STREAM>(r.dresidual + j, lanes, dh);
            const vec kept = DROP ? select(keep.at(j), dh * set1<vec>(scale), vec{}) : dh;
            if (r.dx) put<X, STREAM>(r.dx + j, lanes, kept);
          };
          if constexpr (kLateStores<typename X::elem>) return store;
          else store();
        });
  }
};

template <class X, class R, bool DROP, bool PARAMETERS, bool STREAM = false>
void layer_norm_backward_rows(const NormProblem& p, const NormBackward& f) {
  using acc = typename X::acc;
  const NormPlan<X, PARAMETERS> plan(p);
  if constexpr (!STREAM && kVecBytes > 16)
    if (plan.template streams<X, R>(f.dx, f.dresidual))
      return layer_norm_backward_rows<X, R, DROP, PARAMETERS, true>(p, f);
  const int64_t n = p.columns, padded = plan.padded, blocks = plan.blocks;
  acc *dweight = nullptr, *dbias = nullptr;
  if constexpr (PARAMETERS) {
    shared_arena.reset(plan.scratch.shared);
    dweight = shared_arena.take<acc>(blocks * padded);
    dbias = shared_arena.take<acc>(blocks * padded);
  }
  for_each_task(blocks, p.threads, [&](int64_t block) {
    local_arena.reset(plan.scratch.local);
    ColumnKeep keep(p.seed, p.drop_threshold, kTagAddNorm, 0, n, local_arena);
    acc *dw = PARAMETERS ? dweight + block * padded : nullptr,
        *db = PARAMETERS ? dbias + block * padded : nullptr;
    if constexpr (PARAMETERS)
      for (int64_t j = 0; j < padded; j++) dw[j] = db[j] = 0;
    const NormBackwardRow<X, R, DROP, PARAMETERS, STREAM> row{
        p,
        f,
        dw,
        db,
        acc(keep_scale(p.drop_threshold)),
        rows_ahead(n * (sizeof(typename X::elem) + sizeof(typename R::elem)))};
    for (int64_t i = block * plan.per_block, end = min(plan.rows, i + plan.per_block); i < end;
         i++) {
      if constexpr (DROP) keep.row(i + p.row_start);
      row.write(row.look(i), keep);
    }
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
    return drop ? layer_norm_backward_rows<X, R, true, true>(p, f)
                : layer_norm_backward_rows<X, R, false, true>(p, f);
  return drop ? layer_norm_backward_rows<X, R, true, false>(p, f)
              : layer_norm_backward_rows<X, R, false, false>(p, f);
}

}  // namespace PT_ISA
}  // namespace pt
