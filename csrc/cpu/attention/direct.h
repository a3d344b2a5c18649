// SPDX-License-Identifier: Apache-2.0
// The two products of attention for a few query rows, from K and V where they lie: with so few rows, packing would cost more than it saves.
// Reading is the limit. The hardware's prefetch does it best: asking for rows ahead gained nothing with AVX-512 and cost a fifth with AVX2.
#pragma once

#include "cpu/attention/scores.h"
#include "cpu/core/pack.h"

namespace pt {
namespace PT_ISA {

constexpr int64_t kMaxHead = 512;

// x[i] = q . K[i] before the sum over lanes, for T::width rows of d columns; q is padded with zeros to whole vectors. STEPS: whole vectors
// of a row if known, so that there is no loop within a row, else 0.
template <class T, int STEPS>
INLINE void direct_dots(const typename T::packed* q, const typename T::elem* const* rows, int64_t d, typename T::vec* x) {
  using uvec = typename T::uvec;
  constexpr int64_t step = T::width * T::pack;
  const int64_t whole = STEPS ? STEPS * step : d / step * step;
  const auto at = [&](int64_t c) { return *reinterpret_cast<const uvec*>(q + c / T::pack); };
  UNROLL for (int i = 0; i < T::width; i++) {
    typename T::vec sum{};
    if constexpr (STEPS > 0) {
      UNROLL for (int c = 0; c < STEPS; c++) sum = T::dot(sum, at(c * step), T::load_units(rows[i] + c * step, step));
    } else {
      for (int64_t c = 0; c < whole; c += step) sum = T::dot(sum, at(c), T::load_units(rows[i] + c, step));
      if (whole < d) sum = T::dot(sum, at(whole), T::load_units(rows[i] + whole, d - whole));
    }
    x[i] = sum;
  }
}

// Keys and queries of direct_scores().
template <class T, class Rows>
struct DirectRows {
  Rows K;
  int64_t n, d;
  const uint8_t* live;          // keys with live[j] == 0 count as zeros; may be null
  const typename T::packed* q;  // queries, `packed elements` apart, each padded with zeros to whole vectors
  int64_t units, rows;
};

template <class T, int STEPS, class Rows>
void direct_scores(const DirectRows<T, Rows>& x, typename T::acc* s, int64_t ld) {
  for (int64_t j = 0; j < x.n; j += T::width) {
    const typename T::elem* rows[T::width];
    for (int64_t i = 0; i < T::width; i++) rows[i] = x.K(min(j + i, x.n - 1));
    for (int64_t r = 0; r < x.rows; r++) {
      typename T::vec dots[T::width];
      direct_dots<T, STEPS>(x.q + r * x.units, rows, x.d, dots);
      if (x.live)
        for (int i = 0; i < T::width; i++)
          if (!x.live[min(j + i, x.n - 1)]) dots[i] = typename T::vec{};
      store(s + r * ld + j, reduce_rows(dots, op_add));
    }
  }
}

// s[r][j] = q[r] . K[j], j in [0, n); the rows of s are aligned and written in whole vectors.
template <class T, class Rows>
void direct_scores(const DirectRows<T, Rows>& x, typename T::acc* s, int64_t ld) {
  constexpr int64_t step = T::width * T::pack;
  const auto f = x.d % step        ? direct_scores<T, 0, Rows>
                 : x.d == step     ? direct_scores<T, 1, Rows>
                 : x.d == 2 * step ? direct_scores<T, 2, Rows>
                 : x.d == 4 * step ? direct_scores<T, 4, Rows>
                 : x.d == 8 * step ? direct_scores<T, 8, Rows>
                                   : direct_scores<T, 0, Rows>;
  f(x, s, ld);
}

// o = alpha o + sum over keys of p[j] V[j], for NC vectors of columns of which `columns` exist.
template <class T, int NC, class Rows>
INLINE void direct_columns(const typename T::opnd* p, Range keys, const Rows& V, int64_t columns, const uint8_t* live,
                           typename T::acc alpha, typename T::acc* o) {
  using vec = typename T::vec;
  vec acc[NC];
  UNROLL for (int c = 0; c < NC; c++) acc[c] = alpha != 0 ? vec(load(o + c * T::width) * alpha) : vec{};
  if constexpr (T::pack == 1) {
    const int64_t last = columns - (NC - 1) * T::width;
    for (int64_t j = keys.lo; j < keys.hi; j++) {
      if (live && !live[j]) continue;
      const vec w = set1<vec>(p[j]);
      UNROLL for (int c = 0; c < NC; c++) acc[c] = fma(w, T::load(V(j) + c * T::width, c + 1 < NC ? T::width : last), acc[c]);
    }
  } else {  // two keys a step; reach() begins at an even key, and P is zero where it ends
    using uvec = typename T::uvec;
    constexpr int64_t step = T::width * T::pack;
    const auto row = [&](int64_t j, int64_t c) {
      const bool there = j < keys.hi && (!live || live[j]);
      return there ? T::load_units(V(j) + c, columns - c) : uvec{};
    };
    int64_t j = keys.lo;
    if (!live && columns == NC * T::width && NC > 1)  // nothing to look at
      for (; j + 2 <= keys.hi; j += 2) {
        const uvec w = T::Pairs::broadcast(reinterpret_cast<const typename T::packed*>(p + j));
        UNROLL for (int c = 0; c + 1 < NC; c += 2) {
          uvec lo, hi;
          interleave(T::load_units(V(j) + c / 2 * step, step), T::load_units(V(j + 1) + c / 2 * step, step), &lo, &hi);
          acc[c] = T::dot(acc[c], w, lo), acc[c + 1] = T::dot(acc[c + 1], w, hi);
        }
      }
    for (; j < keys.hi; j += 2) {
      const uvec w = T::Pairs::broadcast(reinterpret_cast<const typename T::packed*>(p + j));
      UNROLL for (int c = 0; c < NC; c += 2) {
        uvec lo, hi;
        interleave(row(j, c / 2 * step), row(j + 1, c / 2 * step), &lo, &hi);
        acc[c] = T::dot(acc[c], w, lo);
        if (c + 1 < NC) acc[c + 1] = T::dot(acc[c + 1], w, hi);
      }
    }
  }
  UNROLL for (int c = 0; c < NC; c++) store(o + c * T::width, acc[c]);
}

// o = alpha o + sum over keys of p[j] V[j]; alpha = 0: o is not read.
template <class T, int NC = 8, class Rows>
void direct_output(const typename T::opnd* p, Range keys, const Rows& V, int64_t d, const uint8_t* live, typename T::acc alpha,
                   typename T::acc* o) {
  constexpr int64_t columns = NC * T::width;
  int64_t c = 0;
  for (; c + columns <= d || (NC == 1 && c < d); c += columns)
    direct_columns<T, NC>(p, keys, V.from_column(c), min(columns, d - c), live, alpha, o + c);
  if constexpr (NC > 1) direct_output<T, NC / 2>(p, keys, V.from_column(c), d - c, live, alpha, o + c);
}

}  // namespace PT_ISA
}  // namespace pt
