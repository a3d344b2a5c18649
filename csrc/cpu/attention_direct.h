// The two products of attention for one query row, from K and V where they lie: with so few rows, packing would cost more than it saves.
#pragma once

#include "attention_scores.h"

namespace pt {
namespace PT_ISA {

constexpr int64_t kMaxHead = 512;

// s[j] = q . K[j], j in [0, n); s is aligned and written in whole vectors. Keys with live[j] == 0 (live may be null) count as zeros.
template <class T>
void direct_scores(const typename T::unit* q, const typename T::elem* K, int64_t stride, int64_t n, int64_t d, const uint8_t* live,
                   typename T::acc* s) {
  using vec = typename T::vec;
  using uvec = typename T::uvec;
  constexpr int64_t step = T::width * T::pack;
  alignas(64) typename T::unit padded[kMaxHead] = {};
  for (int64_t u = 0; u < ceil_div(d, T::pack); u++) padded[u] = q[u];
  for (int64_t j = 0; j < n; j += T::width) {
    vec x[T::width] = {};
    for (int64_t c = 0; c < d; c += step) {
      const uvec qc = *reinterpret_cast<const uvec*>(padded + c / T::pack);
      UNROLL for (int i = 0; i < T::width; i++) x[i] = T::dot(x[i], qc, T::load_units(K + least(j + i, n - 1) * stride + c, d - c));
    }
    if (live)
      for (int i = 0; i < T::width; i++)
        if (!live[least(j + i, n - 1)]) x[i] = vec{};
    store(s + j, reduce_rows(x, op_add));
  }
}

template <class T, int NC>
INLINE void direct_columns(const typename T::opnd* p, Range keys, const typename T::elem* V, int64_t stride, int64_t columns,
                           const uint8_t* live, typename T::acc alpha, typename T::acc* o) {
  using vec = typename T::vec;
  vec acc[NC];
  UNROLL for (int c = 0; c < NC; c++) acc[c] = alpha != 0 ? vec(load(o + c * T::width) * alpha) : vec{};
  const int64_t last = columns - (NC - 1) * T::width;
  for (int64_t j = keys.lo; j < keys.hi; j++) {
    if (live && !live[j]) continue;
    const vec w = set1<vec>(to_scalar(p[j]));
    UNROLL for (int c = 0; c < NC; c++) acc[c] = fma(w, T::load(V + j * stride + c * T::width, c + 1 < NC ? T::width : last), acc[c]);
  }
  UNROLL for (int c = 0; c < NC; c++) store(o + c * T::width, acc[c]);
}

// o = alpha o + sum over keys of p[j] V[j]; alpha = 0: o is not read.
template <class T>
void direct_output(const typename T::opnd* p, Range keys, const typename T::elem* V, int64_t stride, int64_t d, const uint8_t* live,
                   typename T::acc alpha, typename T::acc* o) {
  constexpr int most_columns = 8 * T::width;
  int64_t c = 0;
  for (; c + most_columns <= d; c += most_columns) direct_columns<T, 8>(p, keys, V + c, stride, most_columns, live, alpha, o + c);
  for (; c + 2 * T::width <= d; c += 2 * T::width) direct_columns<T, 2>(p, keys, V + c, stride, 2 * T::width, live, alpha, o + c);
  for (; c < d; c += T::width) direct_columns<T, 1>(p, keys, V + c, stride, least<int64_t>(T::width, d - c), live, alpha, o + c);
}

}  // namespace PT_ISA
}  // namespace pt
