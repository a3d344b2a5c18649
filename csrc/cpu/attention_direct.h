// The two products of attention for one query row, from K and V where they lie: with so few rows, packing would cost more than it saves.
// Reading is the limit. The hardware's prefetch does it best: asking for rows ahead gained nothing with AVX-512 and cost a fifth with AVX2.
#pragma once

#include "attention_scores.h"

namespace pt {
namespace PT_ISA {

constexpr int64_t kMaxHead = 512;

// x[i] = q . K[i] before the sum over lanes, for T::width rows of d columns; q is padded with zeros to whole vectors.
template <class T>
INLINE void direct_dots(const typename T::unit* q, const typename T::elem* const* rows, int64_t d, typename T::vec* x) {
  using uvec = typename T::uvec;
  constexpr int64_t step = T::width * T::pack;
  const int64_t whole = d / step * step;
  UNROLL for (int i = 0; i < T::width; i++) {
    typename T::vec sum{};
    for (int64_t c = 0; c < whole; c += step)
      sum = T::dot(sum, *reinterpret_cast<const uvec*>(q + c / T::pack), T::load_units(rows[i] + c, step));
    if (whole < d) sum = T::dot(sum, *reinterpret_cast<const uvec*>(q + whole / T::pack), T::load_units(rows[i] + whole, d - whole));
    x[i] = sum;
  }
}

// s[j] = q . K[j], j in [0, n); s is aligned and written in whole vectors. Keys with live[j] == 0 (live may be null) count as zeros.
template <class T>
void direct_scores(const typename T::unit* q, const typename T::elem* K, int64_t stride, int64_t n, int64_t d, const uint8_t* live,
                   typename T::acc* s) {
  using vec = typename T::vec;
  alignas(64) typename T::unit padded[kMaxHead] = {};
  for (int64_t u = 0; u < ceil_div(d, T::pack); u++) padded[u] = q[u];
  for (int64_t j = 0; j < n; j += T::width) {
    vec x[T::width];
    const typename T::elem* rows[T::width];
    for (int64_t i = 0; i < T::width; i++) rows[i] = K + least(j + i, n - 1) * stride;
    direct_dots<T>(padded, rows, d, x);
    if (live)
      for (int i = 0; i < T::width; i++)
        if (!live[least(j + i, n - 1)]) x[i] = vec{};
    store(s + j, reduce_rows(x, op_add));
  }
}

// o = alpha o + sum over keys of p[j] V[j], for NC vectors of columns of which `columns` exist.
template <class T, int NC>
INLINE void direct_columns(const typename T::opnd* p, Range keys, const typename T::elem* V, int64_t stride, int64_t columns,
                           const uint8_t* live, typename T::acc alpha, typename T::acc* o) {
  using vec = typename T::vec;
  vec acc[NC];
  UNROLL for (int c = 0; c < NC; c++) acc[c] = alpha != 0 ? vec(load(o + c * T::width) * alpha) : vec{};
  if constexpr (T::pack == 1) {
    const int64_t last = columns - (NC - 1) * T::width;
    for (int64_t j = keys.lo; j < keys.hi; j++) {
      if (live && !live[j]) continue;
      const vec w = set1<vec>(p[j]);
      UNROLL for (int c = 0; c < NC; c++) acc[c] = fma(w, T::load(V + j * stride + c * T::width, c + 1 < NC ? T::width : last), acc[c]);
    }
  } else {  // two keys a step; reach() begins at an even key, and P is zero where it ends
    using uvec = typename T::uvec;
    constexpr int64_t step = T::width * T::pack;
    const auto row = [&](int64_t j, int64_t c) {
      const bool there = j < keys.hi && (!live || live[j]);
      return there ? T::load_units(V + j * stride + c, columns - c) : uvec{};
    };
    for (int64_t j = keys.lo; j < keys.hi; j += 2) {
      const uvec w = T::Pairs::broadcast(reinterpret_cast<const typename T::unit*>(p + j));
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
template <class T, int NC = 8>
void direct_output(const typename T::opnd* p, Range keys, const typename T::elem* V, int64_t stride, int64_t d, const uint8_t* live,
                   typename T::acc alpha, typename T::acc* o) {
  constexpr int64_t columns = NC * T::width;
  int64_t c = 0;
  for (; c + columns <= d || (NC == 1 && c < d); c += columns)
    direct_columns<T, NC>(p, keys, V + c, stride, least(columns, d - c), live, alpha, o + c);
  if constexpr (NC > 1) direct_output<T, NC / 2>(p, keys, V + c, stride, d - c, live, alpha, o + c);
}

}  // namespace PT_ISA
}  // namespace pt
