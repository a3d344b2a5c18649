// SPDX-License-Identifier: Apache-2.0
// Shared state of the forward's row blocks: sizes, row addresses, and the packing of K and V.
#pragma once

#include "cpu/attention/live_keys.h"
#include "cpu/core/eight_bits.h"
#include "cpu/core/pack.h"

namespace pt {
namespace PT_ISA {

constexpr int64_t kBlockKeys = 512;  // keys of a tile: a multiple of every kPanel
// Row stride of scores: full vectors of weights, and no multiple of 2 KB. With rows 2 KB apart, 48
// of 96 share a set of L1, and AMX stores took twice as long.
template <class T>
INLINE constexpr int64_t row_of_keys(int64_t keys) {
  return keys + T::pack * T::width;
}

// Packed K and V of keys first .. first + ld - 1: k[key panel][unit][key], v[column panel][key /
// pack][column].
template <class T>
struct PackedKeys {
  const typename T::packed *k, *v;
  int64_t first, ld;
  const float *k_scale = nullptr, *v_scale = nullptr;  // for 8-bit keys
};

template <class T>
struct ForwardShape {
  const AttentionProblem& p;
  // Packed elements of a row of K, padded; columns of V, padded; query heads per KV head.
  int64_t du, dv, group;
  explicit ForwardShape(const AttentionProblem& p)
      : p(p), du(round_units<T>(p.D)), dv(round_up(p.Dv, T::width)),
        group(p.Hkv > 0 ? p.Hq / p.Hkv : 1) {}

  const typename T::elem* at(const void* base, const Strides& s, int64_t b, int64_t h,
                             int64_t row) const {
    return static_cast<const typename T::elem*>(base) + b * s.b + h * s.h + row * s.l;
  }
  // Return the numbers per row in the stage of widened 8-bit rows.
  int64_t stage_row(bool values) const {
    return round_up(values ? p.Dv : p.D, int64_t(2 * T::width));
  }
  // Call f(rows of keys j0 .. j0 + n - 1 as in with_keys()). 8-bit rows are widened into `stage`,
  // which has room for them.
  template <class F>
  INLINE void with_rows(bool values, const Sequence& s, int64_t hkv, int64_t j0, int64_t n,
                        const typename T::elem** list, typename T::elem* stage, const F& f) const {
    using E = typename T::elem;
    const void* base = values ? p.v : p.k;
    const Strides& x = values ? p.vs : p.ks;
    if (p.eight == EightBits::none) return with_keys(base, x, s, hkv, j0, n, list, f);
    if constexpr (sizeof(typename T::acc) == 4) {
      const int64_t width = stage_row(values), d = values ? p.Dv : p.D;
      for (int64_t j = 0; j < min(n, s.cols - j0); j++) {
        const auto* row =
            static_cast<const uint8_t*>(base) + p.key_row(x, s.b, hkv, s.k_first + j0 + j);
        widen_row(p.eight == EightBits::int8, row, d, stage + j * width);
      }
      f(StridedRows<E>{stage, width});
    }
  }
  // Write the scales of keys j0 .. j0 + n - 1 to to[0, n), and 0 up to `end`. Scales of invisible
  // keys and of keys past the length are 0.
  void scales(const RowScales& of, const Sequence& s, int64_t hkv, int64_t j0, int64_t n,
              int64_t end, const uint8_t* live, float* to) const {
    for (int64_t j = 0; j < end; j++)
      to[j] = j < n && j0 + j < s.cols && (!live || live[j])
                  ? of.data[p.key_row(of.strides, s.b, hkv, s.k_first + j0 + j)]
                  : 0.f;
  }

  // Call f(rows of keys j0 .. j0 + n - 1 of head hkv of k or v). Paged rows are a list with room
  // for n. Rows past the length are not read; a list repeats the last row for them, because their
  // pages have no table entry.
  template <class F>
  INLINE void with_keys(const void* base, const Strides& x, const Sequence& s, int64_t hkv,
                        int64_t j0, int64_t n, const typename T::elem** list, const F& f) const {
    using E = typename T::elem;
    if (!p.pages.table) return f(StridedRows<E>{at(base, x, s.b, hkv, s.k_first + j0), x.l});
    const int64_t end = min(j0 + n, s.cols);
    for (int64_t j = j0; j < end;) {
      const E* row = static_cast<const E*>(base) + p.key_row(x, s.b, hkv, j);
      for (const int64_t stop = min(end, (j / p.pages.size + 1) * p.pages.size); j < stop;
           j++, row += x.l)
        list[j - j0] = row;
    }
    for (int64_t j = max(end, j0 + 1); j < j0 + n; j++) list[j - j0] = list[j - 1 - j0];
    f(ListedRows<E>{list});
  }

  int64_t k_units(int64_t ld) const { return ld * du; }
  int64_t v_units(int64_t ld) const { return ld / T::pack * dv; }

  // Scale floats for ld keys: K's, then V's.
  int64_t scale_floats(int64_t ld) const { return p.eight == EightBits::none ? 0 : 2 * ld; }

  // Pack keys [k0, k0 + n), both bounds on panels, into a buffer for keys first .. first + ld - 1,
  // and their scales into to_scales.
  void pack(const Sequence& s, int64_t hkv, int64_t k0, int64_t n, int64_t first, int64_t ld,
            typename T::packed* k, typename T::packed* v, float* to_scales) const {
    constexpr int64_t panel = kPanel<T>;
    uint8_t live[panel];
    alignas(64) typename T::elem stage[panel * kMaxHead];
    for (int64_t j = k0; j < k0 + n; j += panel) {
      const int64_t rows = clamp<int64_t>(s.Lk - j, 0, panel), to = j - first;
      const uint8_t* keep = mark_live_keys<T>(p, s, hkv, j, rows, live) ? live : nullptr;
      const typename T::elem* list[panel];
      if (p.eight != EightBits::none) {
        scales(p.key_scale, s, hkv, j, rows, panel, keep, to_scales + to);
        scales(p.value_scale, s, hkv, j, rows, panel, keep, to_scales + ld + to);
      }
      with_rows(false, s, hkv, j, rows, list, stage, [&](const auto& K) {
        pack_transposed<T>(K, rows, p.D, k + to * du, keep, panel, du);
      });
      with_rows(true, s, hkv, j, rows, list, stage, [&](const auto& V) {
        for (int64_t col = 0; col < dv; col += panel) {
          const int64_t w = min(panel, dv - col);
          pack_rows<T>(V.from_column(col), rows, panel, min(w, p.Dv - col), 0,
                       v + (col * ld + to * w) / T::pack, keep);
        }
      });
    }
  }
};

}  // namespace PT_ISA
}  // namespace pt
