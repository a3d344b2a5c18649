// SPDX-License-Identifier: Apache-2.0
// Keys that no query sees: they are packed as zeros, so that their contents cannot reach a result.
#pragma once

#include "cpu/attention/tiles.h"

namespace pt {
namespace PT_ISA {

constexpr int64_t kMaxHead = 512;  // upper bound of stack arrays with one head row

// Return false if a number in a row of d elements is infinite or NaN.
template <class T>
bool finite_row(const typename T::elem* row, int64_t d) {
  using vec = typename T::vec;
  vec zeros{};
  for (int64_t c = 0; c < d; c += T::width) zeros = fma(T::load(row + c, d - c), vec{}, zeros);
  return to_mask(zeros == vec{}) == mask_n<vec>(T::width);
}

// Do the same for an 8-bit row.
inline bool finite_eight(EightBits kind, const uint8_t* row, int64_t d) {
  bool finite = true;
  if (kind == EightBits::e4m3)
    for (int64_t c = 0; c < d; c++) finite &= (row[c] & 0x7f) != 0x7f;
  return finite;
}

// Set live[0, n) for keys k0 .. of KV head hkv: 0 if no query sees the key. Packing reads such rows
// as zero, so that their contents cannot reach a result. Intervals and terms that do not depend on
// the query decide directly. With query-dependent terms or segments, pairs are checked only for
// keys with a non-finite K or V, because a zero weight hides finite ones. Return false, without
// writing live, if all are live.
template <class T>
bool mark_live_keys(const AttentionProblem& p, const Sequence& s, int64_t hkv, int64_t k0,
                    int64_t n, uint8_t* live) {
  using A = typename T::acc;
  const Range seen = s.keys(), gap = s.common_gap();
  const auto by_key = [](const Dense& d) { return d.data && d.stride.l == 0; };
  const auto by_pair = [](const Dense& d) { return d.data && d.stride.l != 0; };
  const bool pairs = by_pair(p.mask) || by_pair(p.bias) || p.tiles.bits || s.query_segments();
  if (!by_key(p.mask) && !by_key(p.bias) && !pairs && seen.lo <= k0 && seen.hi >= k0 + n &&
      (gap.lo >= k0 + n || gap.hi <= k0))
    return false;
  for (int64_t j = 0; j < n; j++) live[j] = 0;
  if (s.rows == 0) return true;
  const int64_t group = p.Hq / p.Hkv,
                differing = p.mask.stride.h || p.bias.stride.h || p.tiles.stride.h ? group : 1;
  const Range keys{max<int64_t>(0, seen.lo - k0), min(n, seen.hi - k0)};
  for (int64_t h = hkv * group; h < hkv * group + differing; h++) {
    const DenseRow<A> mask_row(by_key(p.mask) ? p.mask : Dense{}, s.b, h, 0),
        bias_row(by_key(p.bias) ? p.bias : Dense{}, s.b, h, 0);
    for (int64_t j = keys.lo; j < keys.hi; j++)
      live[j] |= mask_row.visible(k0 + j) && bias_row.visible(k0 + j);
  }
  for (int64_t j = max(keys.lo, gap.lo - k0); j < min(keys.hi, gap.hi - k0); j++) live[j] = 0;
  const auto finite = [&](const void* base, const Strides& x, const RowScales& scale, int64_t j,
                          int64_t d) {
    const int64_t row = p.key_row(x, s.b, hkv, s.k_first + j);
    if (p.eight == EightBits::none)
      return finite_row<T>(static_cast<const typename T::elem*>(base) + row, d);
    return __builtin_isfinite(scale.data[p.key_row(scale.strides, s.b, hkv, s.k_first + j)]) &&
           finite_eight(p.eight, static_cast<const uint8_t*>(base) + row, d);
  };
  const auto sees = [&](int64_t h, int64_t i, int64_t j) {
    const Range r = s.visible(i), out = s.gap(i);
    return j >= r.lo && j < r.hi && !(j >= out.lo && j < out.hi) &&
           (!s.unsorted_segments() || s.query_segments()[i] == s.key_segments()[j]) &&
           (p.tiles.data ? MaskRow<A>(p, s.b, h, i).visible(j)
                         : DenseRow<A>(p.mask, s.b, h, i).visible(j)) &&
           DenseRow<A>(p.bias, s.b, h, i).visible(j);
  };
  for (int64_t j = keys.lo; pairs && j < keys.hi; j++) {
    if (!live[j] || (finite(p.k, p.ks, p.key_scale, k0 + j, p.D) &&
                     finite(p.v, p.vs, p.value_scale, k0 + j, p.Dv)))
      continue;
    live[j] = 0;
    for (int64_t x = 0; !live[j] && x < differing * s.rows; x++)
      live[j] = sees(hkv * group + x / s.rows, x % s.rows, k0 + j);
  }
  return true;
}

}  // namespace PT_ISA
}  // namespace pt
