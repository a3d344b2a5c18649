// SPDX-License-Identifier: Apache-2.0
// Layer norm forward. A row is read once, kept in cache as acc, and written once.
//
// Its statistics take three looks at the cached row: the mean mu; then the sums of d = h - mu and of d^2, which give the
// variance about the true mean and lo, the rounding error of mu; then the result, from (d - lo) rstd. So a row of mean 100
// and standard deviation 0.1 comes out as well as its input allows.
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

// cache = h = residual + dropout(x), as stored in residual_out; returns its sum. X: traits of x, R: of the residual.
template <class X, class R, bool ADD, bool DROP, bool STORE>
typename X::acc gather_row(const typename X::elem* x, const typename R::elem* residual, typename R::elem* residual_out,
                           typename X::acc* cache, const ColumnKeep& keep, typename X::acc scale, int64_t n) {
  using vec = typename X::vec;
  constexpr bool rounds = !std::is_same_v<typename R::elem, typename R::acc>;
  RowSum<vec> sum;
  columns<X::width>(
      n,
      [&](int64_t j, int slot, auto lanes) {
        vec h = X::load(x + j, lanes);
        if constexpr (DROP) h = select(keep.at(j), h * set1<vec>(scale), vec{});
        if constexpr (ADD) h = R::load(residual + j, lanes) + h;
        if constexpr (STORE) {
          R::store(residual_out + j, lanes, h);
          if constexpr (rounds) h = R::load(residual_out + j, lanes);
        }
        store(cache + j, h);
        sum.add(slot, h);
      },
      sum);
  return sum.total();
}

// Asks for the cache line of row[j], once a line: slot counts the vectors. Between two rows the processor's own prefetcher falls
// behind, and at the end of a page it stops: without this, reading was half the time of a row (4 KB pages, 512 floats).
template <bool WRITE, class E>
INLINE void fetch(const E* row, int64_t j, int slot) {
  constexpr int vectors = int(64 / (kWidth<vf> * sizeof(E)));  // of E in a line
  if (vectors <= 1 || slot % vectors == 0) __builtin_prefetch(row + j, WRITE);
}

// The cached row, whose sum is known, to out; leaves mean and rstd. ahead(j, slot) is called on the way, to fetch what comes next.
template <class X, class Ahead>
void normalize_row(const NormProblem& p, const typename X::acc* cache, typename X::acc sum, typename X::elem* out, typename X::acc* mean,
                   typename X::acc* rstd, const Ahead& ahead) {
  using acc = typename X::acc;
  using vec = typename X::vec;
  const int64_t n = p.columns;
  const auto *w = static_cast<const acc*>(p.weight), *b = static_cast<const acc*>(p.bias);
  const acc mu = p.rms ? 0 : sum / acc(n);
  RowSum<vec> first, second;
  columns<X::width>(
      n,
      [&](int64_t j, int slot, auto lanes) {
        const vec d = in_row(load(cache + j) - set1<vec>(mu), lanes);
        ahead(j, slot);
        fetch<true>(out, j, slot);
        first.add(slot, d);
        second.add_product(slot, d, d);
      },
      first, second);
  const acc lo = p.rms ? 0 : first.total() / acc(n);
  const acc variance = second.total() / acc(n) - lo * lo;
  const acc rs = 1 / std::sqrt((variance < 0 ? 0 : variance) + acc(p.eps));  // not max(): it would lose a NaN
  if (mean) *mean = mu + lo;
  if (rstd) *rstd = rs;
  const vec scale = set1<vec>(rs), shift = set1<vec>(-lo * rs);
  columns<X::width>(n, [&](int64_t j, int, auto lanes) {
    vec y = fma(load(cache + j) - set1<vec>(mu), scale, shift);
    if (w) y = y * Acc<X>::load(w + j, lanes);
    if (b) y = y + Acc<X>::load(b + j, lanes);
    X::store(out + j, lanes, y);
  });
}

template <class X, class R, bool ADD, bool DROP, bool STORE>
void layer_norm_forward_rows(const NormProblem& p, const NormForward& f) {
  using acc = typename X::acc;
  const NormPlan<X, false> plan(p);
  const int64_t n = p.columns;
  for_each_task(plan.blocks, p.threads, [&](int64_t task) {
    local_arena.reset(plan.scratch.local);
    acc* cache = local_arena.take<acc>(plan.padded);
    ColumnKeep keep(p.seed, p.drop_threshold, kTagAddNorm, 0, n, local_arena);
    for (int64_t i = task * plan.per_block, end = min(plan.rows, i + plan.per_block); i < end; i++) {
      const int64_t o = i / p.inner, q = i - o * p.inner;
      if constexpr (DROP) keep.row(i + p.row_start);
      const auto* x = row_of<X>(f.x, o, q);
      const auto* residual = ADD ? row_of<R>(f.residual, o, q) : nullptr;
      const acc sum = gather_row<X, R, ADD, DROP, STORE>(x, residual, STORE ? row_of<R>(f.residual_out, o, q) : nullptr, cache, keep,
                                                         acc(keep_scale(p.drop_threshold)), n);
      normalize_row<X>(p, cache, sum, row_of<X>(f.out, o, q), f.mean ? static_cast<acc*>(f.mean) + i : nullptr,
                       f.rstd ? static_cast<acc*>(f.rstd) + i : nullptr, [&](int64_t j, int slot) {
                         fetch<false>(x + f.x.inner, j, slot);
                         if constexpr (ADD) fetch<false>(residual + f.residual.inner, j, slot);
                       });
    }
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
