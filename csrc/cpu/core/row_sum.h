// SPDX-License-Identifier: Apache-2.0
// Loops over a row's columns, one vector at a time, and sums over them.
#pragma once

#include "cpu/core/traits.h"

namespace pt {
namespace PT_ISA {

// Sum over a row: four independent parts, gathered every kSumSteps steps, so that no float
// accumulates many small numbers.
constexpr int kSumSteps = 16;
template <class V>
struct RowSum {
  V part[4] = {}, whole = {};
  INLINE void add(int slot, V v) { part[slot] = part[slot] + v; }
  INLINE void add_product(int slot, V a, V b) { part[slot] = fma(a, b, part[slot]); }
  INLINE void gather() {
    whole = whole + ((part[0] + part[1]) + (part[2] + part[3]));
    UNROLL for (int s = 0; s < 4; s++) part[s] = V{};
  }
  INLINE scalar_of<V> total() const { return reduce(whole, op_add); }
};

// Store results of E in batches of four vectors. On AVX2, rounding is a chain of ten steps, and Zen
// 2's window holds two or three such chains; four interleaved chains wait less (bf16 norms: 0.8 to
// 0.9 of the time).
template <class E>
constexpr bool kLateStores = kVecBytes == 32 && std::is_same_v<E, bf16>;

// Call f(column, slot, lanes) for each vector of columns. lanes is a constant except in the tail
// (masked stores everywhere were 2x slower). Sums that f adds to are gathered every kSumSteps steps
// and at the end. A callable that f returns runs after each batch of four vectors (kLateStores).
template <int WIDTH, class F, class... Sums>
INLINE void columns(int64_t n, const F& f, Sums&... sums) {
  constexpr std::integral_constant<int64_t, WIDTH> all{};
  constexpr bool later = !std::is_void_v<decltype(f(n, 0, all))>;
  int64_t j = 0;
  while (j + 4 * WIDTH <= n) {
    for (const int64_t stop = j + kSumSteps * 4 * WIDTH; j + 4 * WIDTH <= n && j < stop;
         j += 4 * WIDTH) {
      if constexpr (later) {
        const auto a = f(j, 0, all), b = f(j + WIDTH, 1, all), c = f(j + 2 * WIDTH, 2, all),
                   d = f(j + 3 * WIDTH, 3, all);
        a(), b(), c(), d();
      } else {
        UNROLL for (int s = 0; s < 4; s++) f(j + s * WIDTH, s, all);
      }
    }
    (sums.gather(), ...);
  }
  const auto single = [&](int64_t j, auto lanes) {
    if constexpr (later) f(j, 0, lanes)();
    else f(j, 0, lanes);
  };
  for (; j + WIDTH <= n; j += WIDTH) single(j, all);
  if (j < n) single(j, n - j);
  (sums.gather(), ...);
}

// Zero the lanes past the row's end; a full vector is unchanged.
template <class V, int64_t N>
INLINE V in_row(V v, std::integral_constant<int64_t, N>) {
  return v;
}
template <class V>
INLINE V in_row(V v, int64_t lanes) {
  return select(mask_n<V>(lanes), v, V{});
}

// Traits of rows of acc.
template <class T>
using Acc = std::conditional_t<std::is_same_v<typename T::acc, double>, Double, Float<float>>;

}  // namespace PT_ISA
}  // namespace pt
