// SPDX-License-Identifier: Apache-2.0
// AMX micro-kernel: 32 rows x 32 columns of float in four tile registers, or 16 x 64 with fewer
// rows, and 16 packed elements (32 bf16) of k per step. A packed panel of bf16 pairs already has
// the layout of a B tile.
#pragma once

#include "cpu/core/traits.h"

#if defined(PT_TILES_IN_SOFTWARE)
#include "cpu/core/tiles_in_software.h"
#endif

namespace pt {
namespace PT_ISA {

constexpr int kTile = 16;  // rows of a tile = its 32-bit columns

struct TileDot {
  using acc = float;
  using packed = uint32_t;
};
// Bf16Pair multiplied by tdpbf16ps: sixteen times the work per instruction slot of vdpbf16ps.
struct Bf16Tile : Bf16Pair {
  using Dot = TileDot;
};
using Bf16 = Bf16Tile;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// Configure tiles 0-3 as accumulators, 4 and 5 as A, 6 and 7 as B. Fewer than 16 rows of A and C
// need a separate configuration.
template <int ROWS>
INLINE void configure_tiles() {
  static const TileConfig config = [] {
    TileConfig c;
    for (int i = 0; i < 5; i++) c.rows[i] = ROWS;
    return c;
  }();
  _tile_loadconfig(&config);
}

// Scope in which this thread's tiles have 16 rows, as the kernels expect. for_each_task() opens one
// on every thread.
class WorkerState {
 public:
  WorkerState() { configure_tiles<kTile>(); }
  ~WorkerState() { _tile_release(); }
};

// Remainder of k, zero-padded to a step: `rows` rows of A, and NV vectors of each row of B.
template <int ROWS, int NV>
struct PaddedStep {
  alignas(64) uint32_t a[ROWS * kTile], b[kTile * NV * 16];
  PaddedStep(int64_t k, const uint32_t* from_a, int64_t a_row, const uint32_t* from_b) {
    for (int r = 0; r < ROWS; r++)
      _mm512_store_si512(a + r * kTile,
                         _mm512_maskz_loadu_epi32(mask_n<vf>(k), from_a + r * a_row));
    for (int u = 0; u < kTile; u++)
      for (int j = 0; j < NV * 16; j += 16)
        _mm512_store_si512(b + u * NV * 16 + j, u < k ? _mm512_load_si512(from_b + u * NV * 16 + j)
                                                      : _mm512_setzero_si512());
    asm volatile("" : : "r"(a), "r"(b) : "memory");
  }
};

template <int NV>
INLINE void tile_step(const uint32_t* a, int64_t a_row, const uint32_t* b) {
  constexpr int64_t ldb = NV * 64;
  _tile_loadd(4, a, a_row * 4);
  _tile_loadd(6, b, ldb);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (NV > 1) {
    _tile_loadd(7, b + 16, ldb);
    _tile_dpbf16ps(1, 4, 7);
  }
  if constexpr (NV > 2) {
    _tile_loadd(6, b + 32, ldb);
    _tile_dpbf16ps(2, 4, 6);
  }
  if constexpr (NV > 3) {
    _tile_loadd(7, b + 48, ldb);
    _tile_dpbf16ps(3, 4, 7);
  }
}

// Like kernel() in gemm.h with a_k = 1 and at most 16 rows. The empty asm statements are memory
// barriers: GCC 12's tile intrinsics do not declare that they touch memory.
template <int MR, int NV, bool STORE>
INLINE void tile_kernel(int64_t k, const uint32_t* a, int64_t a_row, const uint32_t* b, float* c,
                        int64_t ldc) {
  if constexpr (MR < kTile) configure_tiles<MR>();
  asm volatile("" ::: "memory");
  if constexpr (STORE) {
    _tile_zero(0);
    if (NV > 1) _tile_zero(1);
    if (NV > 2) _tile_zero(2);
    if (NV > 3) _tile_zero(3);
  } else {
    _tile_loadd(0, c, ldc * 4);
    if (NV > 1) _tile_loadd(1, c + 16, ldc * 4);
    if (NV > 2) _tile_loadd(2, c + 32, ldc * 4);
    if (NV > 3) _tile_loadd(3, c + 48, ldc * 4);
  }
  for (; k >= kTile; k -= kTile, a += kTile, b += kTile * NV * 16) tile_step<NV>(a, a_row, b);
  if (k > 0) {
    const PaddedStep<MR, NV> rest(k, a, a_row, b);
    tile_step<NV>(rest.a, kTile, rest.b);
  }
  _tile_stored(0, c, ldc * 4);
  if (NV > 1) _tile_stored(1, c + 16, ldc * 4);
  if (NV > 2) _tile_stored(2, c + 32, ldc * 4);
  if (NV > 3) _tile_stored(3, c + 48, ldc * 4);
  asm volatile("" ::: "memory");
  if constexpr (MR < kTile) configure_tiles<kTile>();
}

// Multiply 32 rows by one or two vectors of columns. Two A tiles and two B tiles need four loads
// for four products; one A tile and four B tiles need five. B, often in L2, is loaded half as
// often.
// A bypasses L1 so that B remains there: 0.89 to 1.0 of the time of a gemm, which reads A once per
// strip; 0.96 to 1.02 in attention.
template <int COLUMNS>
INLINE void tile_pair_step(const uint32_t* a, int64_t a_row, const uint32_t* b, int64_t ldb) {
  _tile_stream_loadd(4, a, a_row * 4);
  _tile_loadd(6, b, ldb * 4);
  _tile_dpbf16ps(0, 4, 6);
  _tile_stream_loadd(5, a + kTile * a_row, a_row * 4);
  _tile_dpbf16ps(1, 5, 6);
  if constexpr (COLUMNS == 2) {
    _tile_loadd(7, b + 16, ldb * 4);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}
template <int NV, bool STORE>
INLINE void tile_pair_kernel(int64_t k, const uint32_t* a, int64_t a_row, const uint32_t* b,
                             float* c, int64_t ldc) {
  constexpr int64_t ldb = NV * 16;
  const int64_t rest = k % kTile, whole = k - rest;
  const auto columns = [&](int64_t j, auto count, const uint32_t* rest_a, const uint32_t* rest_b) {
    constexpr int two = decltype(count)::value;
    float *upper = c + j, *lower = upper + kTile * ldc;
    asm volatile("" ::: "memory");
    if constexpr (STORE) {
      _tile_zero(0);
      _tile_zero(1);
      if (two == 2) _tile_zero(2);
      if (two == 2) _tile_zero(3);
    } else {
      _tile_loadd(0, upper, ldc * 4);
      _tile_loadd(1, lower, ldc * 4);
      if (two == 2) _tile_loadd(2, upper + 16, ldc * 4);
      if (two == 2) _tile_loadd(3, lower + 16, ldc * 4);
    }
    for (int64_t u = 0; u < whole; u += kTile)
      tile_pair_step<two>(a + u, a_row, b + u * ldb + j, ldb);
    if (rest) tile_pair_step<two>(rest_a, kTile, rest_b + j, ldb);
    _tile_stored(0, upper, ldc * 4);
    if (two == 2) _tile_stored(2, upper + 16, ldc * 4);
    _tile_stored(1, lower, ldc * 4);
    if (two == 2) _tile_stored(3, lower + 16, ldc * 4);
    asm volatile("" ::: "memory");
  };
  const auto all = [&](const uint32_t* rest_a, const uint32_t* rest_b) {
    UNROLL for (int j = 0; j + 2 <= NV; j += 2)
        columns(16 * j, std::integral_constant<int, 2>(), rest_a, rest_b);
    if constexpr (NV % 2) columns(16 * (NV - 1), std::integral_constant<int, 1>(), rest_a, rest_b);
  };
  if (!rest) return all(nullptr, nullptr);
  const PaddedStep<2 * kTile, NV> padded(rest, a + whole, a_row, b + whole * ldb);
  all(padded.a, padded.b);
}

}  // namespace PT_ISA
}  // namespace pt
