// SPDX-License-Identifier: Apache-2.0
// AMX tile instructions in plain C++, for tests on CPUs without AMX. amx.h compiles unchanged, and
// these macros replace its intrinsics. Only a build with PYTRANSFORMER_SOFTWARE_TILES=1 contains
// them.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG,
// TILELOADD, TILESTORED, TILEZERO, TDPBF16PS. An architectural fault ends the process with its
// reason.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/core/vec.h"

namespace pt {
namespace PT_ISA {

class SoftwareTiles {
 public:
  static constexpr int kTiles = 8, kMaxRows = 16, kMaxBytes = 64;

  void load_config(const void* from) {
    uint8_t config[64];
    memcpy(config, from, sizeof config);
    release();
    if (config[0] == 0) return;  // palette 0: the initial state
    check(config[0] == 1, "the palette is neither 0 nor 1");
    for (int i = 1; i < 16; i++)
      check(config[i] == 0, "a start row or a reserved byte of the configuration is not 0");
    for (int t = 0; t < 16; t++) {
      const int bytes = config[16 + 2 * t] + 256 * config[17 + 2 * t], rows = config[48 + t];
      check(rows <= kMaxRows && bytes <= kMaxBytes && (rows == 0) == (bytes == 0),
            "a tile is larger than 16 rows of 64 bytes, or half empty");
      if (t < kTiles) tile_[t].rows = rows, tile_[t].bytes = bytes;
      else check(rows == 0, "there are eight tiles");
    }
    configured_ = true;
  }
  void release() { *this = SoftwareTiles(); }

  // Load the configured rows and bytes. All others are zero since the configuration and remain
  // zero.
  void load(int t, const void* from, int64_t stride) {
    Tile& x = at(t);
    for (int r = 0; r < x.rows; r++)
      memcpy(x.row[r], static_cast<const char*>(from) + r * stride, x.bytes);
  }
  void store(int t, void* to, int64_t stride) {
    const Tile& x = at(t);
    for (int r = 0; r < x.rows; r++) memcpy(static_cast<char*>(to) + r * stride, x.row[r], x.bytes);
  }
  void zero(int t) { memset(at(t).row, 0, sizeof(Tile::row)); }

  // c += a b: per element, one sum over the lower halves of all pairs and one over the upper
  // halves, each from zero in the order of k; their sum is added to c. Every operation rounds to
  // nearest even and treats subnormals as zero, for any MXCSR.
  void dot_bf16(int c, int a, int b) {
    Tile &to = at(c), &left = at(a), &right = at(b);
    check(c != a && a != b && b != c, "tdpbf16ps wants three tiles");
    check(to.bytes % 4 == 0 && left.bytes % 4 == 0 && right.bytes % 4 == 0,
          "tdpbf16ps wants rows of whole pairs");
    check(to.rows == left.rows && left.bytes / 4 == right.rows && right.bytes == to.bytes,
          "the tiles of tdpbf16ps do not fit each other");
    const unsigned saved = __builtin_ia32_stmxcsr();
    // MXCSR: flush results, subnormal operands are zero, no exceptions, round to nearest even.
    __builtin_ia32_ldmxcsr(0x9fc0);
    multiply(to, left, right);
    __builtin_ia32_ldmxcsr(saved);
  }

 private:
  struct Tile {
    alignas(64) uint8_t row[kMaxRows][kMaxBytes] = {};
    int rows = 0, bytes = 0;
  };

  static void check(bool holds, const char* otherwise) {
    if (holds) return;
    fprintf(stderr, "tiles in software: %s\n", otherwise);
    abort();
  }
  Tile& at(int t) {
    check(configured_ && t >= 0 && t < kTiles && tile_[t].rows > 0,
          "a tile is used that no configuration has");
    return tile_[t];
  }

  // Not inlined, so that no operation moves across the change of MXCSR.
  static __attribute__((noinline)) void multiply(Tile& c, const Tile& a, const Tile& b) {
    static_assert(kWidth<vf> * 4 == kMaxBytes, "a row is a vector");
    vf lower[kMaxRows], upper[kMaxRows];
    for (int k = 0; k < b.rows; k++) {
      const vi32 pairs = *reinterpret_cast<const vi32*>(b.row[k]);
      lower[k] = (vf)(pairs << 16), upper[k] = (vf)(pairs & int32_t(0xffff0000));
    }
    for (int m = 0; m < c.rows; m++) {
      vf even{}, odd{};
      for (int k = 0; k < b.rows; k++) {
        int32_t pair;
        memcpy(&pair, a.row[m] + 4 * k, 4);
        even = fma((vf)(vi32{} + int32_t(uint32_t(pair) << 16)), lower[k], even);
        odd = fma((vf)(vi32{} + (pair & int32_t(0xffff0000))), upper[k], odd);
      }
      vf& row = *reinterpret_cast<vf*>(c.row[m]);
      row = select(mask_n<vf>(c.bytes / 4), vf(row + vf(even + odd)), vf{});
    }
  }

  bool configured_ = false;
  Tile tile_[kTiles];
};
inline thread_local SoftwareTiles software_tiles;

}  // namespace PT_ISA
}  // namespace pt

// Replace the macros of immintrin.h: the instruction encodes the tile number.
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) software_tiles.load_config(from)
#define _tile_release() software_tiles.release()
#define _tile_loadd(tile, from, stride) software_tiles.load(tile, from, stride)
#define _tile_stream_loadd(tile, from, stride) software_tiles.load(tile, from, stride)
#define _tile_stored(tile, to, stride) software_tiles.store(tile, to, stride)
#define _tile_zero(tile) software_tiles.zero(tile)
#define _tile_dpbf16ps(to, a, b) software_tiles.dot_bf16(to, a, b)
