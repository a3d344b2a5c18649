// SPDX-License-Identifier: Apache-2.0
// Walks over the columns of a row, vector by vector, and sums over them.
#pragma once

#include "cpu/core/traits.h"

namespace pt {
namespace PT_ISA {

// A sum over a row: four independent parts, gathered every kSumSteps steps, so that no float takes in many small numbers.
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

// Whether results of E are stored when four vectors of them are there. Rounding is a chain of ten steps on AVX2, and Zen 2 has room for the
// steps of two or three vectors: it waits less where those of four are side by side (bf16 norms: 0.8 to 0.9 of the time).
template <class E>
constexpr bool kLateStores = kVecBytes == 32 && std::is_same_v<E, bf16>;

// f(column, slot, lanes) for one vector of columns after the other; lanes is a constant but in the tail (masked stores
// everywhere were 2x slower). The sums that f adds to are gathered on the way and at the end. What f returns, if anything, is called when
// four vectors have come so far (kLateStores).
template <int WIDTH, class F, class... Sums>
INLINE void columns(int64_t n, const F& f, Sums&... sums) {
  constexpr std::integral_constant<int64_t, WIDTH> all{};
  constexpr bool later = !std::is_void_v<decltype(f(n, 0, all))>;
  int64_t j = 0;
  while (j + 4 * WIDTH <= n) {
    for (const int64_t stop = j + kSumSteps * 4 * WIDTH; j + 4 * WIDTH <= n && j < stop; j += 4 * WIDTH) {
      if constexpr (later) {
        const auto a = f(j, 0, all), b = f(j + WIDTH, 1, all), c = f(j + 2 * WIDTH, 2, all), d = f(j + 3 * WIDTH, 3, all);
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

// Lanes past the row's end as zeros; nothing to do in a full vector.
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
