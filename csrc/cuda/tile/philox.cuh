// SPDX-License-Identifier: Apache-2.0
// Dropout of rows of columns: Philox-4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1,
// 2, 3"). pytransformer/reference/philox.py defines the layout.
#pragma once

#include "cuda/tile/quad.cuh"

namespace pt::cuda {

constexpr uint32_t kTagAddNorm = 0x80000001u, kTagFeedForward = 0x80000002u;

struct Draws {
  uint32_t w[4];
};

PT_DEVICE Draws philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t seed) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  PT_UNROLL
  for (int round = 0; round < 7; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0, c2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b), c3 = uint32_t(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Computes the keep mask of eight neighboring columns of a row.
class ColumnDropout {
 public:
  // threshold = rint(65536 p), 1 to 65536. The starts are offsets of every row and column;
  // column_start is a multiple of 32.
  PT_DEVICE ColumnDropout(uint64_t seed, uint32_t threshold, uint32_t tag, int64_t row_start,
                          uint32_t column_start = 0)
      : seed_(seed), row_start_(row_start), threshold_(threshold), tag_(tag),
        column_start_(column_start) {}

  // Return a mask with bit i set if column + i is kept. Every lane of the warp calls it. The four
  // lanes of a quad (numbers equal but for the last two bits) hold the four eights of 32 columns of
  // one row, in order. One Philox call decides the same pair of columns of all four eights, so each
  // lane makes one call and the quad transposes 4 x 4 words.
  PT_DEVICE uint32_t keep(int64_t row, int column) const {
    if (threshold_ >= 65536) return 0;
    Draws d = draws(row, uint32_t(column), threadIdx.x % 4);
    transpose_quad(d.w);
    return kept(d);
  }
  // Like keep, for a lane's eight of the 32 columns from `column` on in accumulator layout
  // (fragments.cuh): bit i is column + 8 (i / 2) + 2 (lane % 4) + i % 2. Needs no other lane.
  PT_DEVICE uint32_t keep_fragment(int64_t row, uint32_t column) const {
    if (threshold_ >= 65536) return 0;
    return kept(draws(row, column, threadIdx.x % 4));
  }
  // Return the factor of kept values.
  PT_DEVICE float scale() const {
    return threshold_ < 65536 ? 65536.0f / (65536.0f - float(threshold_)) : 0.0f;
  }

 private:
  PT_DEVICE Draws draws(int64_t row, uint32_t column, uint32_t lane) const {
    const uint64_t r = uint64_t(row + row_start_);
    const uint32_t c = column + column_start_;
    return philox(c / 32 * 4 + lane, uint32_t(r), uint32_t(r >> 32), tag_, seed_);
  }
  PT_DEVICE uint32_t kept(const Draws& d) const {
    uint32_t bits = 0;
    PT_UNROLL
    for (int m = 0; m < 4; ++m)
      bits |= uint32_t((d.w[m] & 0xffff) >= threshold_) << 2 * m |
              uint32_t(d.w[m] >> 16 >= threshold_) << (2 * m + 1);
    return bits;
  }

  uint64_t seed_;
  int64_t row_start_;
  uint32_t threshold_, tag_, column_start_;
};

}  // namespace pt::cuda
