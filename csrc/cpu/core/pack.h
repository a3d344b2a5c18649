// SPDX-License-Identifier: Apache-2.0
// Packed operands of the micro-kernel.
#pragma once

#include "cpu/core/gemm.h"

namespace pt {
namespace PT_ISA {

// Rows of a matrix at a fixed stride.
template <class E>
struct StridedRows {
  const E* first;
  int64_t stride;
  INLINE const E* operator()(int64_t row) const { return first + row * stride; }
  INLINE StridedRows from_column(int64_t c) const { return {first + c, stride}; }
};
template <class E>
struct ListedRows {
  const E* const* list;
  int64_t column = 0;
  INLINE const E* operator()(int64_t row) const { return list[row] + column; }
  INLINE ListedRows from_column(int64_t c) const { return {list, column + c}; }
};

// All packing functions set rows at or past n, and rows with live[row] == 0, to zero in dst without
// reading them. live may be null.

// Pack and transpose one panel of `panel` rows, a multiple of T::width: dst[u][row], u over packed
// elements, by default ceil(d / pack).
template <class T, class Rows>
void pack_transposed(const Rows& src, int64_t n, int64_t d, typename T::packed* dst,
                     const uint8_t* live = nullptr, int64_t panel = kPanel<T>, int64_t units = 0) {
  using uvec = typename T::uvec;
  const int64_t du = units ? units : ceil_div(d, T::pack);
  for (int64_t row = 0; row < panel; row += T::width)
    for (int64_t u = 0; u < du; u += T::width) {
      typename T::vec r[T::width];
      UNROLL for (int i = 0; i < T::width; i++) r[i] =
          row + i < n && (!live || live[row + i])
              ? (typename T::vec)T::load_units(src(row + i) + u * T::pack, d - u * T::pack)
              : typename T::vec{};
      transpose(r);
      UNROLL for (int i = 0; i < T::width; i++) if (u + i < du) *
          reinterpret_cast<uvec*>(dst + (u + i) * panel + row) = (uvec)r[i];
    }
}

template <class T>
void pack_transposed(const typename T::elem* src, int64_t stride, int64_t n, int64_t d,
                     typename T::packed* dst, const uint8_t* live = nullptr,
                     int64_t panel = kPanel<T>, int64_t units = 0) {
  pack_transposed<T>(StridedRows<typename T::elem>{src, stride}, n, d, dst, live, panel, units);
}

// Pack rows [0, n_pad) of a d-column matrix: neighbors along rows form a packed element, in panels
// of up to kPanel<T> columns: dst[panel][row / pack][panel width], each panel ld_rows / pack long.
template <class T, class Rows>
void pack_rows(const Rows& src, int64_t n, int64_t n_pad, int64_t d, int64_t ld_rows,
               typename T::packed* dst, const uint8_t* live = nullptr) {
  using uvec = typename T::uvec;
  const int64_t dw = round_up(d, T::width);
  const auto put = [](typename T::packed* p, uvec v) { *reinterpret_cast<uvec*>(p) = v; };
  for (int64_t col = 0; col < dw; col += kPanel<T>) {
    const int64_t w = min<int64_t>(kPanel<T>, dw - col);
    auto* out = dst + col * (ld_rows / T::pack);
    for (int64_t i = 0; i < n_pad; i += T::pack, out += w)
      for (int64_t c = 0; c < w; c += T::width * T::pack) {
        const auto row = [&](int64_t r) {
          return r < n && (!live || live[r]) ? T::load_units(src(r) + col + c, d - col - c)
                                             : uvec{};
        };
        if constexpr (T::pack == 1) {
          put(out + c, row(i));
        } else {
          uvec lo, hi;
          interleave(row(i), row(i + 1), &lo, &hi);
          put(out + c, lo);
          if (c + T::width < w) put(out + c + T::width, hi);
        }
      }
  }
}

template <class T>
void pack_rows(const typename T::elem* src, int64_t stride, int64_t n, int64_t n_pad, int64_t d,
               int64_t ld_rows, typename T::packed* dst, const uint8_t* live = nullptr) {
  pack_rows<T>(StridedRows<typename T::elem>{src, stride}, n, n_pad, d, ld_rows, dst, live);
}

// Copy rows: dst[n_pad][packed elements], by default ceil(d / pack).
template <class T>
void copy_rows(const typename T::elem* src, int64_t stride, int64_t n, int64_t n_pad, int64_t d,
               typename T::packed* dst, const uint8_t* live = nullptr, int64_t units = 0) {
  const int64_t du = units ? units : ceil_div(d, T::pack);
  typedef typename T::uvec any __attribute__((aligned(4)));
  for (int64_t i = 0; i < n_pad; i++, dst += du) {
    int64_t u = 0;
    const auto row = [&] {
      return i < n && (!live || live[i])
                 ? T::load_units(src + i * stride + u * T::pack, d - u * T::pack)
                 : typename T::uvec{};
    };
    for (; u + T::width <= du; u += T::width) *reinterpret_cast<any*>(dst + u) = row();
    if (u < du) {
      const typename T::uvec tail = row();
      for (int64_t k = 0; u + k < du; k++) dst[u + k] = tail[k];
    }
  }
}

}  // namespace PT_ISA
}  // namespace pt
