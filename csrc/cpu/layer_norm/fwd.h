// SPDX-License-Identifier: Apache-2.0
// Layer norm forward. A row is read from memory once, remains in cache, and is written once.
//
// The first pass over a row sums h and h^2. If the mean is small relative to the deviation, E[h^2]
// - mean^2 cancels almost nothing, and one pass is enough. Other rows get a second pass: the sums
// of d = h - mean and of d^2 give the variance about the true mean, and lo, the mean's rounding
// error; the result is (d - lo) rstd. So a row of mean 100 and standard deviation 0.1 is as
// accurate as its input. A row's sums are used only after the previous row is written, so that the
// CPU overlaps their reduction with that work.
#pragma once

#include <cmath>

#include "cpu/core/parallel.h"
#include "cpu/core/row_sum.h"
#include "cpu/layer_norm/plan.h"

namespace pt {
namespace PT_ISA {

template <class T>
INLINE const typename T::elem* row_of(const Rows& t, int64_t outer, int64_t inner) {
  return static_cast<const typename T::elem*>(t.data) + outer * t.outer + inner * t.inner;
}
template <class T>
INLINE typename T::elem* row_of(const RowsOut& t, int64_t outer, int64_t inner) {
  return static_cast<typename T::elem*>(t.data) + outer * t.outer + inner * t.inner;
}

// Prefetch the cache line of row[j], once per line; slot counts the vectors. The hardware
// prefetcher falls behind between rows and stops at the end of a page: without this, reading was
// half the time of a row (4 KB pages, 512 floats).
template <bool WRITE, class E>
INLINE void fetch(const E* row, int64_t j, int slot) {
  constexpr int vectors = int(64 / (kWidth<vf> * sizeof(E)));  // vectors of E per line
  if (vectors <= 1 || slot % vectors == 0) __builtin_prefetch(row + j, WRITE);
}

// Moments of a row: the mean is mu + lo, with the variance about it. settled: one pass was enough.
template <class A>
struct Moments {
  A mu, lo, variance;
  bool settled;
};

// One row of the forward pass in steps, which the caller interleaves with other rows.
template <class X, class R, bool ADD, bool DROP, bool STORE, bool STREAM>
struct NormForwardRow {
  using acc = typename X::acc;
  using vec = typename X::vec;
  // True if input and output are 16-bit: an error of a float bit then does not affect the result.
  static constexpr bool kHalf = sizeof(typename X::elem) == 2 && sizeof(typename R::elem) == 2;
  // Max mean^2 / variance for one pass. rstd's error in eps of float, 4096 rows of 1024: 1.8 with
  // 1, 5.6 with 4, 0.9 with 1/64.
  static constexpr acc kMost = kHalf ? acc(1) : acc(1) / 64;
  const NormProblem& p;
  const NormForward& f;
  acc scale;      // scale of elements that dropout keeps
  int64_t ahead;  // prefetch distance in rows

  // A division takes as long as 20 vectors.
  int64_t outer_of(int64_t row) const { return p.outer == 1 ? 0 : row / p.inner; }

  // Return h after the first pass: its source, its destination, or `cached` if the destination was
  // streamed.
  INLINE const typename R::elem* h_of(int64_t o, int64_t q, const typename R::elem* cached) const {
    if constexpr (!STORE) return row_of<R>(f.x, o, q);
    else return STREAM ? cached : row_of<R>(f.residual_out, o, q);
  }

  // Compute h = residual + dropout(x), rounded as in residual_out, and its moments.
  INLINE Moments<acc> read(int64_t i, const ColumnKeep* keep, typename R::elem* cached) const {
    const int64_t o = outer_of(i), q = i - o * p.inner, n = p.columns;
    const auto* x = row_of<X>(f.x, o, q);
    const auto* residual = ADD ? row_of<R>(f.residual, o, q) : nullptr;
    auto* residual_out = STORE ? row_of<R>(f.residual_out, o, q) : nullptr;
    const auto* out = row_of<X>(f.out, o, q);
    RowSum<vec> sum, square;
    // Capture by value: the compiler would reload pointers behind a reference after each store.
    const auto h = [=, scale = scale](int64_t j, int slot, auto lanes) {
      vec h = X::load(x + j, lanes);
      if constexpr (DROP) h = select(keep->at(j), h * set1<vec>(scale), vec{});
      if constexpr (ADD) h = R::load(residual + j, lanes) + h;
      if constexpr (STORE && STREAM) h = put_twice<R>(residual_out + j, cached + j, h);
      else if constexpr (STORE) h = put<R, false>(residual_out + j, lanes, h);
      if constexpr (!STREAM) fetch<true>(out, j, slot);
      return h;
    };
    columns<X::width>(
        n,
        [&](int64_t j, int slot, auto lanes) {
          const vec at = h(j, slot, lanes);
          sum.add(slot, at);
          square.add_product(slot, at, at);
        },
        sum, square);
    const acc mean = p.rms ? 0 : sum.total() / acc(n),
              variance = square.total() / acc(n) - mean * mean;
    return {mean, 0, variance,
            p.rms || (mean * mean <= kMost * variance && variance < kInfinity<acc>)};
  }

  // Run the second pass.
  INLINE void look_again(int64_t i, const typename R::elem* cached, Moments<acc>& m) const {
    const int64_t o = outer_of(i), q = i - o * p.inner, n = p.columns;
    RowSum<vec> first, second;
    columns<X::width>(
        n,
        [&, h = h_of(o, q, cached), mu = set1<vec>(m.mu)](int64_t j, int slot, auto lanes) {
          const vec d = in_row(R::load(h + j, lanes) - mu, lanes);
          first.add(slot, d);
          second.add_product(slot, d, d);
        },
        first, second);
    m.lo = first.total() / acc(n), m.variance = second.total() / acc(n) - m.lo * m.lo;
    if (m.variance < 0) m.variance = 0;  // not max(), which would lose a NaN
  }

  // Write the row of results. With 16-bit results and one pass, h rstd - mean rstd is within their
  // bound and saves a subtraction. It cancels in a row with a large mean relative to its deviation:
  // a constant row gave 0.4 instead of 0.
  INLINE void write(int64_t i, const typename R::elem* cached, const Moments<acc>& m) const {
    if (kHalf && m.settled) write_row<false>(i, cached, m);
    else write_row<true>(i, cached, m);
  }

 private:
  template <bool CENTER>
  INLINE void write_row(int64_t i, const typename R::elem* cached, const Moments<acc>& m) const {
    const int64_t o = outer_of(i), q = i - o * p.inner;
    const auto *w = static_cast<const acc*>(p.weight), *b = static_cast<const acc*>(p.bias);
    auto* out = row_of<X>(f.out, o, q);
    const auto* x = row_of<X>(f.x, o, q) + ahead * f.x.inner;
    const auto* residual = ADD ? row_of<R>(f.residual, o, q) + ahead * f.residual.inner : nullptr;
    // Round once: three roundings in float exceeded out's bound.
    const acc rs = acc(1 / std::sqrt(double(m.variance) + p.eps));
    if (f.mean) static_cast<acc*>(f.mean)[i] = m.mu + m.lo;
    if (f.rstd) static_cast<acc*>(f.rstd)[i] = rs;
    const vec to_unit = set1<vec>(rs), mean = set1<vec>(m.mu),
              shift = set1<vec>(-(CENTER ? m.lo : m.mu + m.lo) * rs);
    const auto each = [=, n = p.columns, h = h_of(o, q, cached)](const auto parameters) {
      columns<X::width>(n, [=](int64_t j, int slot, auto lanes) {
        fetch<false>(x, j, slot);
        if constexpr (ADD) fetch<false>(residual, j, slot);
        vec d = R::load(h + j, lanes);
        if constexpr (CENTER) d = d - mean;
        const auto store = [=, y = parameters(fma(d, to_unit, shift), j, lanes)] {
          put<X, STREAM>(out + j, lanes, y);
        };
        if constexpr (kLateStores<typename X::elem>) return store;
        else store();
      });
    };
    using A = Acc<X>;
    if (w && b)
      each([=](vec y, int64_t j, auto lanes) {
        return fma(y, A::load(w + j, lanes), A::load(b + j, lanes));
      });
    else if (w) each([=](vec y, int64_t j, auto lanes) { return y * A::load(w + j, lanes); });
    else if (b) each([=](vec y, int64_t j, auto lanes) { return y + A::load(b + j, lanes); });
    else each([](vec y, int64_t, auto) { return y; });
  }
};

template <class X, class R, bool ADD, bool DROP, bool STORE, bool STREAM = false>
void layer_norm_forward_rows(const NormProblem& p, const NormForward& f) {
  using acc = typename X::acc;
  const NormPlan<X, false> plan(p);
  if constexpr (!STREAM && kVecBytes > 16)
    if (plan.template streams<X, R>(f.out, f.residual_out))
      return layer_norm_forward_rows<X, R, ADD, DROP, STORE, true>(p, f);
  const NormForwardRow<X, R, ADD, DROP, STORE, STREAM> row{
      p, f, acc(keep_scale(p.drop_threshold)),
      rows_ahead(p.columns * (sizeof(typename X::elem) + ADD * sizeof(typename R::elem)))};
  for_each_task(plan.blocks, p.threads, [&](int64_t task) {
    local_arena.reset(plan.scratch.local);
    typename R::elem* cached[2] = {};
    if constexpr (STORE && STREAM)
      for (auto& row : cached) row = local_arena.take<typename R::elem>(plan.padded);
    ColumnKeep keep(p.seed, p.drop_threshold, kTagAddNorm, 0, p.columns, local_arena);
    Moments<acc> moments[2];
    const int64_t first = task * plan.per_block, end = min(plan.rows, first + plan.per_block);
    for (int64_t i = first; i < end; i++) {
      if constexpr (DROP) keep.row(i + p.row_start);
      moments[i & 1] = row.read(i, &keep, cached[i & 1]);
      if (i > first) row.write(i - 1, cached[~i & 1], moments[~i & 1]);
      if (!moments[i & 1].settled) row.look_again(i, cached[i & 1], moments[i & 1]);
    }
    row.write(end - 1, cached[(end - 1) & 1], moments[(end - 1) & 1]);
  });
}

template <class X, class R>
void layer_norm_forward(const NormProblem& p, const NormForward& f) {
  const bool drop = p.drop_threshold > 0;
  if constexpr (std::is_same_v<X, R>) {
    if (!f.residual_out.data) return layer_norm_forward_rows<X, X, false, false, false>(p, f);
    if (!f.residual.data)
      return drop ? layer_norm_forward_rows<X, X, false, true, true>(p, f)
                  : layer_norm_forward_rows<X, X, false, false, true>(p, f);
  }
  return drop ? layer_norm_forward_rows<X, R, true, true, true>(p, f)
              : layer_norm_forward_rows<X, R, true, false, true>(p, f);
}

}  // namespace PT_ISA
}  // namespace pt
