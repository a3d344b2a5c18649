// SPDX-License-Identifier: Apache-2.0
// Rows of scores in the online softmax.
#pragma once

#include "cpu/attention/sequence.h"

namespace pt {
namespace PT_ISA {

// Those of the lanes for keys from j on that are in v.
template <class T>
INLINE mask lanes_in(Range v, int64_t j) {
  return mask_range<typename T::vec>(v.lo - j, v.hi - j);
}

// Lanes whose maximum is that of s[v.lo, v.hi).
template <class T>
INLINE typename T::vec row_maximum(const typename T::acc* s, Range v) {
  using vec = typename T::vec;
  vec x0 = set1<vec>(-kInfinity<typename T::acc>), x1 = x0;
  int64_t j = v.lo / T::width * T::width;
  const auto masked = [&] { x0 = select(lanes_in<T>(v, j), vmax(x0, load(s + j)), x0), j += T::width; };
  if (j < v.lo) masked();
  for (; j + 2 * T::width <= v.hi; j += 2 * T::width) x0 = vmax(x0, load(s + j)), x1 = vmax(x1, load(s + j + T::width));
  while (j < v.hi) masked();
  return vmax(x0, x1);
}

// Keys in eight bits: each row's scores in `reach` times the scale of their key. Scales begin `first` before the tile, and go to whole
// vectors; null: none. Returns those of the values, by which weights are to be multiplied.
template <class T>
const float* scale_rows(typename T::acc* s, int64_t ld, int64_t rows, const Range* reach, const float* k_scale, const float* v_scale,
                        int64_t first) {
  if (!k_scale) return nullptr;
  if constexpr (sizeof(typename T::acc) == 4)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t j = reach[r].lo; j < reach[r].hi; j += T::width)
        store(s + r * ld + j, typename T::vec(load(s + r * ld + j) * load(k_scale + first + j)));
  return v_scale + first;
}

}  // namespace PT_ISA
}  // namespace pt
