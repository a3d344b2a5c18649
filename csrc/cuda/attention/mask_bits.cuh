// SPDX-License-Identifier: Apache-2.0
// A dense boolean mask as bits, by queries and by keys: see MaskBits in problem.h. The mask is read once, a broadcast dimension of sequences
// or heads too.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/fragments.cuh"

namespace pt::cuda {

// A bit for each byte, which is 0 or 1.
PT_DEVICE uint32_t bits_of_bytes(const ptx::Words4& bytes) {
  uint32_t bits = 0;
  PT_UNROLL
  for (int w = 3; w >= 0; --w) bits = bits << 4 | bytes.w[PT_FAULT(bytes_of_a_mask_turned_round) ? 3 - w : w] * 0x10204080u >> 28;
  return bits;
}

// Lane i has row i of 32 x 32 bits; afterwards column i. Each step exchanges quarters of squares (Warren, "Hacker's Delight", 7-3).
PT_DEVICE uint32_t transpose_bits(uint32_t row) {
  constexpr uint32_t kLow[] = {0x55555555u, 0x33333333u, 0x0f0f0f0fu, 0x00ff00ffu, 0x0000ffffu};
  PT_UNROLL
  for (int step = PT_FAULT(bits_of_a_mask_half_transposed) ? 3 : 4; step >= 0; --step) {
    const int d = 1 << step;
    const uint32_t other = ptx::shfl_xor_u32(row, d), low = kLow[step];
    row = lane_id() & d ? (row & ~low) | (other >> d & low) : (row & low) | (other & low) << d;
  }
  return row;
}

// Of one query: which of the 32 keys from `key` on are visible. Keys that are not there are not.
PT_DEVICE uint32_t visible_keys(const AttentionMaskBits& f, const uint8_t* query, int key) {
  const auto there = [&](int j) { return uint32_t(j) < uint32_t(f.num_keys + PT_FAULT(keys_of_a_mask_past_the_last)); };
  if (PT_FAULT(sixteen_keys_where_fewer_are_aligned) || f.mask.vector_width == 16) {
    ptx::Words4 bytes[2];
    PT_UNROLL
    for (int c = 0; c < 2; ++c) bytes[c] = there(key + 16 * c) ? ptx::ld_global_v4(query + key + 16 * c) : ptx::Words4{};
    return bits_of_bytes(bytes[0]) | bits_of_bytes(bytes[1]) << 16;
  }
  uint32_t visible = 0, bytes[32];
  PT_UNROLL
  for (int c = 0; c < 32; ++c) bytes[c] = there(key + c) ? ptx::ld_global_u8(query + (key + c) * f.mask.key) : 0;  // all in flight at once
  PT_UNROLL
  for (int c = 0; c < 32; ++c) visible |= uint32_t(bytes[c] != 0) << c;
  return visible;
}

// A warp's 32 queries and 128 keys: a lane has a query, then a key of each 32.
PT_DEVICE void make_mask_bits(const AttentionMaskBits& f) {
  const int64_t n = int64_t(blockIdx.x) * (kMaskThreads / 32) + int(threadIdx.x) / 32;
  const int of_mask = f.down() * f.across(), tile = int(n % of_mask), lane = lane_id();
  const int64_t m = n / of_mask, sequence = m / f.heads, head = PT_FAULT(bits_of_the_first_heads_mask) ? 0 : m % f.heads;
  if (m >= f.masks) return;
  const int i0 = tile / f.across() * 32, word = tile % f.across() * 4, i = i0 + lane;
  const bool here = i < f.num_queries + PT_FAULT(queries_of_a_mask_past_the_last);
  const uint8_t* const query = static_cast<const uint8_t*>(f.mask.data) + sequence * f.mask.batch + head * f.mask.head + i * f.mask.query;
  ptx::Words4 bits;
  PT_UNROLL
  for (int c = 0; c < 4; ++c) bits.w[c] = here ? visible_keys(f, query, 32 * (word + c) - f.before) : 0;
  if (f.queries && i < f.rows(false)) ptx::st_global_v4(f.queries + (m * f.rows(false) + i) * f.words(false) + word, bits);
  if (!f.keys) return;
  PT_UNROLL
  for (int c = 0; c < 4; ++c) {
    const uint32_t column = transpose_bits(bits.w[c]);
    const int j = 32 * (word + c) - f.before + lane;
    if (j >= 0 && j < f.rows(true)) ptx::st_global_u32(f.keys + (m * f.rows(true) + j) * f.words(true) + i0 / 32, column);
  }
}

// The words of a row of sequence b and head h: of query or key i, from the first on.
PT_DEVICE const uint32_t* mask_words(const MaskBits::Rows& rows, int b, int h, int i) {
  return rows.data + (PT_FAULT(a_mask_of_another_sequence) ? 0 : b) * rows.batch + (PT_FAULT(a_mask_of_another_head) ? 0 : h) * rows.head +
         i * rows.row;
}

}  // namespace pt::cuda
