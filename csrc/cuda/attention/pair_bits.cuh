// SPDX-License-Identifier: Apache-2.0
// Bits per pair of a dense boolean mask or of dropout's keep mask, by queries and by keys: see
// PairBits in problem.h.
//
// Without them the sm_90a kernels read each pair's byte per head and draw each pair's random number
// per pass. On an H100 (2 x 16 heads of 64 columns, 2,048 keys) backward then took 270 + 545 us
// with a mask and 372 + 465 us with dropout; with bits it takes 166 + 216 and 198 + 269.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/philox.cuh"

namespace pt::cuda {

// Return one bit per byte, each 0 or 1.
PT_DEVICE uint32_t bits_of_bytes(const ptx::Words4& bytes) {
  uint32_t bits = 0;
  PT_UNROLL
  for (int w = 3; w >= 0; --w) bits = bits << 4 | bytes.w[w] * 0x10204080u >> 28;
  return bits;
}

// Transpose 32 x 32 bits: lane i passes row i and receives column i. Each step exchanges quarters
// of squares (Warren, "Hacker's Delight", 7-3).
PT_DEVICE uint32_t transpose_bits(uint32_t row) {
  constexpr uint32_t kLow[] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
  PT_UNROLL
  for (int step = 4; step >= 0; --step) {
    const int d = 1 << step;
    const uint32_t other = ptx::shfl_xor_u32(row, d), low = kLow[step];
    row = lane_id() & d ? (row & ~low) | (other >> d & low) : (row & low) | (other & low) << d;
  }
  return row;
}

// Return the visible mask of one query and the 32 keys from `key` on. Keys outside are not visible.
PT_DEVICE uint32_t visible_keys(const AttentionPairBits& f, const uint8_t* query, int key) {
  const auto there = [&](int j) { return uint32_t(j) < uint32_t(f.num_keys); };
  if (f.mask.vector_width == 16) {
    ptx::Words4 bytes[2];
    PT_UNROLL
    for (int c = 0; c < 2; ++c)
      bytes[c] = there(key + 16 * c) ? ptx::ld_global_v4(query + key + 16 * c) : ptx::Words4{};
    return bits_of_bytes(bytes[0]) | bits_of_bytes(bytes[1]) << 16;
  }
  uint32_t visible = 0, bytes[32];
  PT_UNROLL
  // all loads in flight at once
  for (int c = 0; c < 32; ++c)
    bytes[c] = there(key + c) ? ptx::ld_global_u8(query + (key + c) * f.mask.key) : 0;
  PT_UNROLL
  for (int c = 0; c < 32; ++c) visible |= uint32_t(bytes[c] != 0) << c;
  return visible;
}

// Return the keep mask of query i of head h for a group of 32 keys. One Philox call decides two of
// each eight (score_mod.cuh). 16-bit draws are compared in place, as the upper halves of words.
PT_DEVICE uint32_t kept_keys(const AttentionPairBits::Dropout& f, int b, int h, int i,
                             uint32_t group, uint64_t seed) {
  const uint32_t threshold = f.threshold << 16, head = f.head_start + uint32_t(h);
  const uint32_t sequence = f.batch_start + uint32_t(b);
  uint32_t kept = 0;
  PT_UNROLL
  for (uint32_t c = 0; c < 4; ++c) {
    const Draws d = philox(4 * group + c, f.query_start + uint32_t(i), head, sequence, seed);
    PT_UNROLL
    for (int m = 0; m < 4; ++m) {
      if (d.w[m] << 16 >= threshold) kept |= 1u << (8 * m + 2 * c);
      if (d.w[m] >= threshold) kept |= 2u << (8 * m + 2 * c);
    }
  }
  return f.threshold < 65536 ? kept : 0;
}

// Pack a warp's 32 queries and 128 keys: a lane packs a query, then one key of each 32.
PT_DEVICE void make_pair_bits(const AttentionPairBits& f) {
  const int64_t n = int64_t(blockIdx.x) * (kMaskThreads / 32) + int(threadIdx.x) / 32;
  if (n >= f.tiles()) return;
  const int of_head = f.down() * f.across(), tile = int(n % of_head), lane = lane_id();
  const int64_t m = n / of_head;
  const int b = int(m / f.heads), h = int(m % f.heads);
  const int i0 = tile / f.across() * 32, word = tile % f.across() * 4, i = i0 + lane;
  const bool here = i < f.num_queries;
  ptx::Words4 bits{};
  if (here && f.dropout.threshold) {
    const uint64_t seed = ptx::ld_global_u64(f.dropout.seed);
    PT_UNROLL
    for (int c = 0; c < 4; ++c)
      bits.w[c] = kept_keys(f.dropout, b, h, i, f.dropout.first_group + uint32_t(word + c), seed);
  } else if (here) {
    const uint8_t* const query = static_cast<const uint8_t*>(f.mask.data) + b * f.mask.batch +
                                 h * f.mask.head + i * f.mask.query;
    PT_UNROLL
    for (int c = 0; c < 4; ++c) bits.w[c] = visible_keys(f, query, 32 * (word + c) - f.before);
  }
  if (f.queries && i < f.rows(false))
    ptx::st_global_v4(f.queries + (m * f.rows(false) + i) * f.words(false) + word, bits);
  if (!f.keys) return;
  PT_UNROLL
  for (int c = 0; c < 4; ++c) {
    const uint32_t column = transpose_bits(bits.w[c]);
    const int j = 32 * (word + c) - f.before + lane;
    if (j >= 0 && j < f.rows(true))
      ptx::st_global_u32(f.keys + (m * f.rows(true) + j) * f.words(true) + i0 / 32, column);
  }
}

// Return the words of query or key i of sequence b and head h, from the first on.
PT_DEVICE const uint32_t* words_of(const PairBits::Rows& rows, int b, int h, int i) {
  return rows.data + b * rows.batch + h * rows.head + i * rows.row;
}

// Return the 32 bits of a row from column `at` on. Whole: `at` is a multiple of 32.
template <bool Whole>
PT_DEVICE uint32_t word_from(const uint32_t* row, int at) {
  const uint32_t word = ptx::ld_global_u32(row + at / 32);
  if constexpr (Whole) {
    return word;
  } else {
    const int ahead = at % 32;
    if (!ahead) return word;
    return word >> ahead | ptx::ld_global_u32(row + at / 32 + 1) << (32 - ahead);
  }
}

// Select a lane's bits of 32 columns in accumulator layout (fragments.cuh): bit 8 m + 2 (lane % 4)
// + e becomes 4 m + e.
PT_DEVICE uint32_t lanes_bits(uint32_t word) {
  word = word >> lane_id() % 4 * 2 & 0x03030303u;
  word = (word | word >> 4) & 0x00ff00ffu;
  return (word | word >> 8) & 0xffff;
}

}  // namespace pt::cuda
