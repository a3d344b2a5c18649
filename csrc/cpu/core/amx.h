// SPDX-License-Identifier: Apache-2.0
// The micro-kernel on AMX tiles: 16 rows x 64 columns of float in four tile registers, 16 packed elements (32 bf16) of k a step.
// A packed panel of bf16 pairs already is what a tile of B must look like.
#pragma once

#include "cpu/core/traits.h"

#if defined(PT_TILES_IN_SOFTWARE)
#include "cpu/core/tiles_in_software.h"
#endif

namespace pt {
namespace PT_ISA {

constexpr int kTile = 16;  // rows of a tile, and its 32-bit columns

struct TileDot {
  using acc = float;
  using packed = uint32_t;
};
// As Bf16Pair, multiplied by tdpbf16ps: sixteen times the work per instruction slot of vdpbf16ps.
struct Bf16Tile : Bf16Pair {
  using Dot = TileDot;
};
using Bf16 = Bf16Tile;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// Tiles 0-3 accumulate, 4 is A, 6 and 7 are B; fewer rows of A and C than 16 are a configuration of their own.
template <int ROWS>
INLINE void configure_tiles() {
  static const TileConfig config = [] {
    TileConfig c;
    for (int i = 0; i < 5; i++) c.rows[i] = ROWS;
    return c;
  }();
  _tile_loadconfig(&config);
}

// While one lives, this thread's tiles are configured for 16 rows, as the kernels expect. for_each_task() keeps one on every thread.
class WorkerState {
 public:
  WorkerState() { configure_tiles<kTile>(); }
  ~WorkerState() { _tile_release(); }
};

INLINE void tile_step(int nv, const uint32_t* a, int64_t a_row, const uint32_t* b) {
  const int64_t ldb = nv * 64;
  _tile_loadd(4, a, a_row * 4);
  _tile_loadd(6, b, ldb);
  _tile_dpbf16ps(0, 4, 6);
  if (nv > 1) {
    _tile_loadd(7, b + 16, ldb);
    _tile_dpbf16ps(1, 4, 7);
  }
  if (nv > 2) {
    _tile_loadd(6, b + 32, ldb);
    _tile_dpbf16ps(2, 4, 6);
  }
  if (nv > 3) {
    _tile_loadd(7, b + 48, ldb);
    _tile_dpbf16ps(3, 4, 7);
  }
}

// As kernel() in gemm.h with a_k = 1, MR rows up to 16.
template <int MR, int NV, bool STORE>
INLINE void tile_kernel(int64_t k, const uint32_t* a, int64_t a_row, const uint32_t* b, float* c, int64_t ldc) {
  if constexpr (MR < kTile) configure_tiles<MR>();
  asm volatile("" ::: "memory");  // the tile intrinsics of GCC 12 do not say that they touch memory
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
  for (; k >= kTile; k -= kTile, a += kTile, b += kTile * NV * 16) tile_step(NV, a, a_row, b);
  if (k > 0) {  // the rest of k, padded with zeros
    alignas(64) uint32_t pa[kTile * kTile], pb[kTile * NV * 16];
    for (int r = 0; r < MR; r++) _mm512_store_si512(pa + r * kTile, _mm512_maskz_loadu_epi32(mask_n<vf>(k), a + r * a_row));
    for (int u = 0; u < kTile; u++)
      for (int j = 0; j < NV * 16; j += 16)
        _mm512_store_si512(pb + u * NV * 16 + j, u < k ? _mm512_load_si512(b + u * NV * 16 + j) : _mm512_setzero_si512());
    asm volatile("" : : "r"(pa), "r"(pb) : "memory");
    tile_step(NV, pa, kTile, pb);
  }
  _tile_stored(0, c, ldc * 4);
  if (NV > 1) _tile_stored(1, c + 16, ldc * 4);
  if (NV > 2) _tile_stored(2, c + 32, ldc * 4);
  if (NV > 3) _tile_stored(3, c + 48, ldc * 4);
  asm volatile("" ::: "memory");
  if constexpr (MR < kTile) configure_tiles<kTile>();
}

}  // namespace PT_ISA
}  // namespace pt
