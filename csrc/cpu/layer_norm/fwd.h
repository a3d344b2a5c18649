// SPDX-License-Identifier: Apache-2.0
// Layer norm forward. A row is read once, kept in cache as acc, and written once.
//
// Its statistics take two looks: the mean mu; then the sums of d = h - mu and of d^2, which give the variance about the true mean and lo,
// the rounding error of mu; then the result, from (d - lo) rstd. So a row of mean 100 and standard deviation 0.1 comes out as well as its
// input allows. (One look, about a pivot from the row's first numbers, was a tenth faster and left the bound: c 3.1 of 2.) A row is
// normalized after the next one has been read: the processor works on that while it waits for the square root.
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

// Asks for the cache line of row[j], once a line: slot counts the vectors. Between two rows the processor's own prefetcher falls
// behind, and at the end of a page it stops: without this, reading was half the time of a row (4 KB pages, 512 floats).
template <bool WRITE, class E>
INLINE void fetch(const E* row, int64_t j, int slot) {
  constexpr int vectors = int(64 / (kWidth<vf> * sizeof(E)));  // of E in a line
  if (vectors <= 1 || slot % vectors == 0) __builtin_prefetch(row + j, WRITE);
}

// Of a row: the mean is mu + lo, and about it the variance.
template <class A>
struct Moments {
  A mu, lo, variance;
};

// cache = the row that h(j, slot, lanes) gives. Inlined, and the row by value: behind a reference its pointers would be read again after
// each store.
template <class X, class Row>
INLINE Moments<typename X::acc> gather_row(bool rms, int64_t n, typename X::acc* cache, const Row h) {
  using acc = typename X::acc;
  using vec = typename X::vec;
  RowSum<vec> sum, first, second;
  columns<X::width>(
      n,
      [&](int64_t j, int slot, auto lanes) {
        const vec at = h(j, slot, lanes);
        store(cache + j, at);
        sum.add(slot, at);
      },
      sum);
  const acc mu = rms ? 0 : sum.total() / acc(n);
  columns<X::width>(
      n,
      [&](int64_t j, int slot, auto lanes) {
        const vec d = in_row(load(cache + j) - set1<vec>(mu), lanes);
        first.add(slot, d);
        second.add_product(slot, d, d);
      },
      first, second);
  const acc lo = rms ? 0 : first.total() / acc(n), variance = second.total() / acc(n) - lo * lo;
  return {mu, lo, variance < 0 ? 0 : variance};  // not max(): it would lose a NaN
}

// A row of the forward pass, in the two steps between which the next row is read.
template <class X, class R, bool ADD, bool DROP, bool STORE, bool STREAM>
struct NormForwardRow {
  using acc = typename X::acc;
  using vec = typename X::vec;
  const NormProblem& p;
  const NormForward& f;
  acc scale;  // of kept elements

  int64_t outer_of(int64_t row) const { return p.outer == 1 ? 0 : row / p.inner; }  // a division takes as long as 20 vectors

  // h = residual + dropout(x), as stored in residual_out, to the cache.
  INLINE Moments<acc> read(int64_t i, const ColumnKeep* keep, acc* cache) const {
    const int64_t o = outer_of(i), q = i - o * p.inner, n = p.columns;
    const auto* x = row_of<X>(f.x, o, q);
    const auto* residual = ADD ? row_of<R>(f.residual, o, q) : nullptr;
    auto* stream = STORE ? row_of<R>(f.residual_out, o, q) : nullptr;
    const auto* out = row_of<X>(f.out, o, q);
    const auto h = [=, scale = scale](int64_t j, int slot, auto lanes) {
      vec h = X::load(x + j, lanes);
      if constexpr (DROP) h = select(keep->at(j), h * set1<vec>(scale), vec{});
      if constexpr (ADD) h = R::load(residual + j, lanes) + h;
      if constexpr (STORE) h = put<R, STREAM>(stream + j, lanes, h);
      if constexpr (!STREAM) fetch<true>(out, j, slot);
      return h;
    };
    return gather_row<X>(p.rms, n, cache, h);
  }

  INLINE void write(int64_t i, const Moments<acc>& m, const acc* cache) const {
    const int64_t o = outer_of(i), q = i - o * p.inner;
    const auto *w = static_cast<const acc*>(p.weight), *b = static_cast<const acc*>(p.bias);
    auto* out = row_of<X>(f.out, o, q);
    const auto* x = row_of<X>(f.x, o, q) + 2 * f.x.inner;  // the row that is read next
    const auto* residual = ADD ? row_of<R>(f.residual, o, q) + 2 * f.residual.inner : nullptr;
    const acc rs = acc(1 / std::sqrt(double(m.variance) + p.eps));  // rounded once: thrice in float took out past its bound
    if (f.mean) static_cast<acc*>(f.mean)[i] = m.mu + m.lo;
    if (f.rstd) static_cast<acc*>(f.rstd)[i] = rs;
    const vec to_unit = set1<vec>(rs), mean = set1<vec>(m.mu), shift = set1<vec>(-m.lo * rs);
    const auto each = [=, n = p.columns](const auto parameters) {
      columns<X::width>(n, [=](int64_t j, int slot, auto lanes) {
        fetch<false>(x, j, slot);
        if constexpr (ADD) fetch<false>(residual, j, slot);
        put<X, STREAM>(out + j, lanes, parameters(fma(vec(load(cache + j) - mean), to_unit, shift), j, lanes));
      });
    };
    using A = Acc<X>;
    if (w && b) each([=](vec y, int64_t j, auto lanes) { return fma(y, A::load(w + j, lanes), A::load(b + j, lanes)); });
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
    if (plan.template streams<X, R>(f.out, f.residual_out)) return layer_norm_forward_rows<X, R, ADD, DROP, STORE, true>(p, f);
  const NormForwardRow<X, R, ADD, DROP, STORE, STREAM> row{p, f, acc(keep_scale(p.drop_threshold))};
  for_each_task(plan.blocks, p.threads, [&](int64_t task) {
    local_arena.reset(plan.scratch.local);
    acc* cache[2] = {local_arena.take<acc>(plan.padded), local_arena.take<acc>(plan.padded)};
    ColumnKeep keep(p.seed, p.drop_threshold, kTagAddNorm, 0, p.columns, local_arena);
    Moments<acc> moments[2];
    const int64_t first = task * plan.per_block, end = min(plan.rows, first + plan.per_block);
    for (int64_t i = first; i < end; i++) {
      if constexpr (DROP) keep.row(i + p.row_start);
      moments[i & 1] = row.read(i, &keep, cache[i & 1]);
      if (i > first) row.write(i - 1, moments[~i & 1], cache[~i & 1]);
    }
    row.write(end - 1, moments[(end - 1) & 1], cache[(end - 1) & 1]);
    if constexpr (STREAM) stream_fence();
  });
}

template <class X, class R>
void layer_norm_forward(const NormProblem& p, const NormForward& f) {
  const bool drop = p.drop_threshold > 0;
  if constexpr (std::is_same_v<X, R>) {
    if (!f.residual_out.data) return layer_norm_forward_rows<X, X, false, false, false>(p, f);
    if (!f.residual.data)
      return drop ? layer_norm_forward_rows<X, X, false, true, true>(p, f) : layer_norm_forward_rows<X, X, false, false, true>(p, f);
  }
  return drop ? layer_norm_forward_rows<X, R, true, true, true>(p, f) : layer_norm_forward_rows<X, R, true, false, true>(p, f);
}

}  // namespace PT_ISA
}  // namespace pt
