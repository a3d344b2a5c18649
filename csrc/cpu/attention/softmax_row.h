// SPDX-License-Identifier: Apache-2.0
// Rows of scores in the online softmax.
#pragma once

#include "cpu/attention/sequence.h"
#include "cpu/core/philox.h"

namespace pt {
namespace PT_ISA {

// Return the lanes of keys from j that are in v.
template <class T>
INLINE mask lanes_in(Range v, int64_t j) {
  return mask_range<typename T::vec>(v.lo - j, v.hi - j);
}

// Return lane-wise maxima of s[v.lo, v.hi).
template <class T>
INLINE typename T::vec row_maximum(const typename T::acc* s, Range v) {
  using vec = typename T::vec;
  vec x0 = set1<vec>(-kInfinity<typename T::acc>), x1 = x0;
  int64_t j = v.lo / T::width * T::width;
  const auto masked = [&] {
    x0 = select(lanes_in<T>(v, j), vmax(x0, load(s + j)), x0), j += T::width;
  };
  if (j < v.lo) masked();
  for (; j + 2 * T::width <= v.hi; j += 2 * T::width)
    x0 = vmax(x0, load(s + j)), x1 = vmax(x1, load(s + j + T::width));
  while (j < v.hi) masked();
  return vmax(x0, x1);
}

// One row of a tile's scores and the destination of its weights.
template <class T>
struct WeightRow {
  using A = typename T::acc;
  using vec = typename T::vec;

  const A* s;
  typename T::opnd* p;
  // reach: keys to write, from a full step on. valid: visible keys; hidden ones become 0.
  Range reach, valid;
  A c;  // weights are 2^((s - m) c)
  // Dropout's keep bits, with the tile's first at first_bit; null: no dropout.
  const uint32_t* keep;
  int64_t first_bit;
  // Scales of 8-bit values, applied to the weights after their sum; or null.
  const float* v_scale;

  // Return the lane-wise sum, with exponentials of degree 5: lse is exact to float32 for any dtype.
  // *top: the largest scores, for pairs only.
  INLINE vec weights(A m, vec* top) const {
    return keep ? pass<true>(m, top) : pass<false>(m, top);
  }

 private:
  template <bool DROP>
  INLINE vec pass(A m, vec* top) const {
    constexpr bool tops = T::pack > 1;
    const vec vm = set1<vec>(m), vc = set1<vec>(c), none = set1<vec>(-kInfinity<A>);
    vec sums[2] = {}, largest[2] = {none, none};
    constexpr int pair = 2 * T::width, side = 4;  // vectors, a multiple of two
    const auto some = [&](int64_t j, auto count, auto masked) {
      constexpr int n = decltype(count)::value;
      vec x[n];
      mask lanes[n];
      UNROLL for (int i = 0; i < n; i++) x[i] = load(s + j + i * T::width);
      if constexpr (masked)
        UNROLL for (int i = 0; i < n; i++) lanes[i] = lanes_in<T>(valid, j + i * T::width);
      if constexpr (tops)
        UNROLL for (int i = 0; i < n; i++) largest[i % 2] =
            vmax(largest[i % 2], masked ? select(lanes[i], x[i], none) : x[i]);
      UNROLL for (int i = 0; i < n; i++) x[i] = (x[i] - vm) * vc;
      exp2_each<5, !tops>(x);
      if constexpr (masked) UNROLL for (int i = 0; i < n; i++) x[i] = select(lanes[i], x[i], vec{});
      UNROLL for (int i = 0; i < n; i++) sums[i % 2] = sums[i % 2] + x[i];
      if constexpr (DROP)
        UNROLL for (int i = 0; i < n; i++) x[i] =
            select(bits_at(keep, first_bit + j + i * T::width), x[i], vec{});
      if constexpr (sizeof(A) == 4)
        if (v_scale)
          UNROLL for (int i = 0; i < n; i++) x[i] = x[i] * load(v_scale + j + i * T::width);
      UNROLL for (int i = 0; i < n; i += 2) T::store_pair(p + j + i * T::width, x[i], x[i + 1]);
    };
    constexpr std::integral_constant<int, 2> two;
    int64_t j = reach.lo;
    for (; j < valid.lo && j < reach.hi; j += pair) some(j, two, std::true_type());
    for (; j + side * T::width <= valid.hi; j += side * T::width)
      some(j, std::integral_constant<int, side>(), std::false_type());
    for (; j + pair <= valid.hi; j += pair) some(j, two, std::false_type());
    for (; j < reach.hi; j += pair) some(j, two, std::true_type());
    *top = vmax(largest[0], largest[1]);
    return sums[0] + sums[1];
  }
};

// Multiply the scores in each row's `reach` by their key's scale, for 8-bit keys. Scales begin
// `first` before the tile and are padded to full vectors; null: none. Return the scales of the
// values, which multiply the weights.
template <class T>
const float* scale_rows(typename T::acc* s, int64_t ld, int64_t rows, const Range* reach,
                        const float* k_scale, const float* v_scale, int64_t first) {
  if (!k_scale) return nullptr;
  if constexpr (sizeof(typename T::acc) == 4)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t j = reach[r].lo; j < reach[r].hi; j += T::width)
        store(s + r * ld + j, typename T::vec(load(s + r * ld + j) * load(k_scale + first + j)));
  return v_scale + first;
}

}  // namespace PT_ISA
}  // namespace pt
