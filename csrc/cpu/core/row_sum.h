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

// f(column, slot, lanes) for one vector of columns after the other; lanes is a constant but in the tail (masked stores
// everywhere were 2x slower). The sums that f adds to are gathered on the way and at the end.
template <int WIDTH, class F, class... Sums>
INLINE void columns(int64_t n, const F& f, Sums&... sums) {
  constexpr std::integral_constant<int64_t, WIDTH> all{};
  int64_t j = 0;
  while (j + 4 * WIDTH <= n) {
    for (const int64_t stop = j + kSumSteps * 4 * WIDTH; j + 4 * WIDTH <= n && j < stop; j += 4 * WIDTH)
      UNROLL for (int s = 0; s < 4; s++) f(j + s * WIDTH, s, all);
    (sums.gather(), ...);
  }
  for (; j + WIDTH <= n; j += WIDTH) f(j, 0, all);
  if (j < n) f(j, 0, n - j);
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
