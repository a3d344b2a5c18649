// SPDX-License-Identifier: Apache-2.0
// The micro-kernel: C[rows x cols] (+)= A[rows x k] * B[k x cols], rows <= kRows<T>, cols <=
// kPanel<T>, k in packed elements. A is read one packed element at a time with any row and k
// stride, so operands just computed need no packing. B is packed (pack.h): panel[k][cols], aligned.
// C is aligned, and its row stride is a multiple of T::width.
#pragma once

#include "cpu/core/traits.h"

#if defined(__AMX_BF16__)
#include "cpu/core/amx.h"
#endif

namespace pt {
namespace PT_ISA {

template <class T>
constexpr int kPanel = kNV * T::width;  // columns of a packed panel
template <class T>
constexpr int kRows = kMR;  // rows per call
#if defined(__AMX_BF16__)
template <>
constexpr int kRows<Bf16Tile> = 2 * kTile;
#endif

// Packed elements of k per step of the micro-kernel. Pad a tile's operands with zeros to full steps
// (round_units): each call copies a partial last step.
template <class T>
constexpr int kUnitStep = 1;
#if defined(__AMX_BF16__)
template <>
constexpr int kUnitStep<Bf16Tile> = kTile;
#endif
// Packed elements of d numbers, padded to full steps.
template <class T>
INLINE constexpr int64_t round_units(int64_t d) {
  return round_up(ceil_div(d, T::pack), kUnitStep<T>);
}

enum Mode { kStore, kAdd, kScaleAdd };  // C = AB, C += AB, C = alpha[row] * C + AB

// Unroll factor of the k loop of full groups of rows. 512-bit vectors: the loop's index additions
// compete with the products for ports. 256-bit: one prefetch per two steps reads the next operand
// while this one is multiplied. Prefetching it all before the loop overlaps with nothing, because a
// core has few outstanding misses: 12 rows with weights from memory took 1.5 times as long (Zen 3).
template <int MR>
constexpr int kTurn = MR != kMR         ? 1
                      : kVecBytes == 64 ? 4
                      : kVecBytes == 32 ? 2
                                        : 1;

// AHEAD: prefetch one cache line per iteration, starting at `lines`.
template <class Dot, int MR, int NV, int MODE, bool AHEAD>
INLINE void kernel_steps(int64_t k, const typename Dot::packed* a, int64_t a_row, int64_t a_k,
                         const typename Dot::packed* b, typename Dot::acc* c, int64_t ldc,
                         const typename Dot::acc* alpha, const char* lines) {
  using vec = typename Dot::vec;
  using uvec = typename Dot::uvec;
  constexpr int width = kWidth<vec>;
  vec acc[MR][NV];
  UNROLL for (int r = 0; r < MR; r++) UNROLL for (int j = 0; j < NV; j++) acc[r][j] = vec{};
  const auto step = [&](const typename Dot::packed* at, int64_t u) {
    uvec bv[NV];
    UNROLL for (int j = 0; j < NV; j++) bv[j] =
        *reinterpret_cast<const uvec*>(b + width * (NV * u + j));
    UNROLL for (int r = 0; r < MR; r++) {
      const uvec av = Dot::broadcast(at + r * a_row);
      UNROLL for (int j = 0; j < NV; j++) acc[r][j] = Dot::dot(acc[r][j], av, bv[j]);
    }
  };
  constexpr int turn = kTurn<MR>;
  const auto steps = [&](auto along_k) {
    for (; k >= turn; k -= turn, a += turn * along_k, b += turn * width * NV) {
      if constexpr (AHEAD) __builtin_prefetch(lines, 0, 2), lines += 64;
      UNROLL for (int u = 0; u < turn; u++) step(a + u * along_k, u);
    }
    for (; k > 0; k--, a += along_k, b += width * NV) step(a, 0);
  };
  if (a_k == 1) steps(std::integral_constant<int64_t, 1>());
  else steps(a_k);
  UNROLL for (int r = 0; r < MR; r++) {
    UNROLL for (int j = 0; j < NV; j++) {
      typename Dot::acc* p = c + r * ldc + width * j;
      if constexpr (MODE == kAdd) acc[r][j] = acc[r][j] + load(p);
      if constexpr (MODE == kScaleAdd) acc[r][j] = fma(set1<vec>(alpha[r]), load(p), acc[r][j]);
      store(p, acc[r][j]);
    }
  }
}
template <class Dot, int MR, int NV, int MODE>
void kernel(int64_t k, const typename Dot::packed* a, int64_t a_row, int64_t a_k,
            const typename Dot::packed* b, typename Dot::acc* c, int64_t ldc,
            const typename Dot::acc* alpha) {
  kernel_steps<Dot, MR, NV, MODE, false>(k, a, a_row, a_k, b, c, ldc, alpha, nullptr);
}
// Multiply rows of a full panel and prefetch k / kTurn<MR> lines. a_k is 1.
template <class T, int MR, int MODE>
void kernel_prefetching(int64_t k, const typename T::packed* a, int64_t a_row,
                        const typename T::packed* b, typename T::acc* c, int64_t ldc,
                        const char* lines) {
  kernel_steps<typename T::Dot, MR, kNV, MODE, true>(k, a, a_row, 1, b, c, ldc, nullptr, lines);
}

template <class T>
using PrefetchingKernelFn = void (*)(int64_t, const typename T::packed*, int64_t,
                                     const typename T::packed*, typename T::acc*, int64_t,
                                     const char*);
template <class T, int MODE, int... R>
INLINE PrefetchingKernelFn<T> pick_prefetching(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr PrefetchingKernelFn<T> table[] = {kernel_prefetching<T, R + 1, MODE>...};
  return table[rows - 1];
}

template <class T>
using KernelFn = void (*)(int64_t, const typename T::packed*, int64_t, int64_t,
                          const typename T::packed*, typename T::acc*, int64_t,
                          const typename T::acc*);

#if defined(__AMX_BF16__)
template <int MR, int NV, int MODE>
__attribute__((noinline)) void kernel_on_tiles(int64_t k, const uint32_t* a, int64_t a_row,
                                               int64_t a_k, const uint32_t* b, float* c,
                                               int64_t ldc, const float* alpha) {
  if constexpr (MR > kTile && MR < 2 * kTile) {
    kernel_on_tiles<kTile, NV, MODE>(k, a, a_row, a_k, b, c, ldc, alpha);
    return kernel_on_tiles<MR - kTile, NV, MODE>(k, a + kTile * a_row, a_row, a_k, b,
                                                 c + kTile * ldc, ldc, alpha + kTile);
  }
  if (a_k == 1) {
    if constexpr (MODE == kScaleAdd)
      for (int r = 0; r < MR; r++)
        for (int j = 0; j < 16 * NV && alpha[r] != 1; j += 16)
          store(c + r * ldc + j, load(c + r * ldc + j) * alpha[r]);
    if constexpr (MR == 2 * kTile) tile_pair_kernel<NV, MODE == kStore>(k, a, a_row, b, c, ldc);
    else tile_kernel<MR, NV, MODE == kStore>(k, a, a_row, b, c, ldc);
    return;
  }
  // Fall back to vectors: an AMX tile of A needs neighbors along k.
  constexpr int whole = MR / kMR * kMR;
  for (int r = 0; r < whole; r += kMR)
    kernel<Bf16Dot, kMR, NV, MODE>(k, a + r * a_row, a_row, a_k, b, c + r * ldc, ldc, alpha + r);
  if constexpr (MR > whole)
    kernel<Bf16Dot, MR - whole, NV, MODE>(k, a + whole * a_row, a_row, a_k, b, c + whole * ldc, ldc,
                                          alpha + whole);
}
#endif

template <class T, int MR, int NV, int MODE>
constexpr KernelFn<T> kernel_for() {
#if defined(__AMX_BF16__)
  if constexpr (std::is_same_v<typename T::Dot, TileDot>) return kernel_on_tiles<MR, NV, MODE>;
  else
#endif
    return kernel<typename T::Dot, MR, NV, MODE>;
}
template <class T, int NV, int MODE, int... R>
INLINE KernelFn<T> pick_rows(int rows, std::integer_sequence<int, R...>) {
  static constexpr KernelFn<T> table[] = {kernel_for<T, R + 1, NV, MODE>()...};
  return table[rows - 1];
}
template <class T, int NV>
INLINE KernelFn<T> pick_mode(int rows, Mode mode) {
  constexpr auto all = std::make_integer_sequence<int, kRows<T>>();
  return mode == kStore ? pick_rows<T, NV, kStore>(rows, all)
         : mode == kAdd ? pick_rows<T, NV, kAdd>(rows, all)
                        : pick_rows<T, NV, kScaleAdd>(rows, all);
}
// Return the kernel for 1 <= rows <= kRows<T> and cols, a multiple of T::width up to kPanel<T>.
// Call it from a task (for_each_task).
template <class T, int NV = kNV>
INLINE KernelFn<T> pick(int64_t rows, int64_t cols, Mode mode) {
  if constexpr (NV > 1) {
    if (cols < NV * T::width) return pick<T, NV - 1>(rows, cols, mode);
  }
  return pick_mode<T, NV>(int(rows), mode);
}

}  // namespace PT_ISA
}  // namespace pt
