// The one micro-kernel: C[rows x cols] (+)= A[rows x k] * B[k x cols], rows <= kMR, cols <= kPanel<T>, k counted in units.
// A is read unit by unit with any row and k stride, so operands that were just computed are used where they lie;
// B is packed (pack.h): panel[k][cols], aligned. C is aligned, its row stride a multiple of T::width.
#pragma once

#include "vec.h"

namespace pt {
namespace PT_ISA {

template <class T>
constexpr int kPanel = kNV * T::width;  // columns of a packed panel

enum Mode { kStore, kAdd, kScaleAdd };  // C = AB, C += AB, C = alpha[row] * C + AB

template <class Dot, int MR, int NV, int MODE>
void kernel(int64_t k, const typename Dot::unit* a, int64_t a_row, int64_t a_k, const typename Dot::unit* b, typename Dot::acc* c, int64_t ldc,
            const typename Dot::acc* alpha) {
  using vec = typename Dot::vec;
  using uvec = typename Dot::uvec;
  constexpr int width = kWidth<vec>;
  vec acc[MR][NV];
  UNROLL for (int r = 0; r < MR; r++) UNROLL for (int j = 0; j < NV; j++) acc[r][j] = vec{};
  const auto step = [&](const typename Dot::unit* at) {
    uvec bv[NV];
    UNROLL for (int j = 0; j < NV; j++) bv[j] = *reinterpret_cast<const uvec*>(b + width * j);
    UNROLL for (int r = 0; r < MR; r++) {
      const uvec av = Dot::broadcast(at + r * a_row);
      UNROLL for (int j = 0; j < NV; j++) acc[r][j] = Dot::dot(acc[r][j], av, bv[j]);
    }
    b += width * NV;
  };
  if (a_k == 1) for (const auto* e = a + k; a != e; a++) step(a);
  else for (; k > 0; k--, a += a_k) step(a);
  UNROLL for (int r = 0; r < MR; r++) {
    UNROLL for (int j = 0; j < NV; j++) {
      typename Dot::acc* p = c + r * ldc + width * j;
      if constexpr (MODE == kAdd) acc[r][j] = acc[r][j] + load(p);
      if constexpr (MODE == kScaleAdd) acc[r][j] = fma(set1<vec>(alpha[r]), load(p), acc[r][j]);
      store(p, acc[r][j]);
    }
  }
}

template <class T>
using KernelFn = void (*)(int64_t, const typename T::unit*, int64_t, int64_t, const typename T::unit*, typename T::acc*, int64_t, const typename T::acc*);

template <class T, int NV, int MODE, int... R>
INLINE KernelFn<T> pick_rows(int rows, std::integer_sequence<int, R...>) {
  static constexpr KernelFn<T> table[] = {kernel<typename T::Dot, R + 1, NV, MODE>...};
  return table[rows - 1];
}
template <class T, int NV>
INLINE KernelFn<T> pick_mode(int rows, Mode mode) {
  constexpr auto all = std::make_integer_sequence<int, kMR>();
  return mode == kStore ? pick_rows<T, NV, kStore>(rows, all) : mode == kAdd ? pick_rows<T, NV, kAdd>(rows, all) : pick_rows<T, NV, kScaleAdd>(rows, all);
}
// The kernel for 1 <= rows <= kMR and cols, a multiple of T::width up to kPanel<T>.
template <class T, int NV = kNV>
INLINE KernelFn<T> pick(int64_t rows, int64_t cols, Mode mode) {
  if constexpr (NV > 1) {
    if (cols < NV * T::width) return pick<T, NV - 1>(rows, cols, mode);
  }
  return pick_mode<T, NV>(int(rows), mode);
}

}  // namespace PT_ISA
}  // namespace pt
