// SPDX-License-Identifier: Apache-2.0
// Bits per pair in lane order (PairBits in params.h) for the fused backward. The producer copies a
// tile's words with the tile of Q, and each thread reads its words. The fence after the stores of
// dS orders these reads before the next copy.
#pragma once

#include "cuda/attention/sm90/tile.cuh"

namespace pt::cuda {

template <class K>
class PairBitLoader {
  static constexpr Sm90Tile kTile = K::bwd_dkdv_tile;
  static constexpr uint32_t kTileBytes = sm90_pair_bits_bytes(kTile);
  static_assert(kTile.rows() == PairBits::kUnitKeys &&
                kTile.streamed % PairBits::kUnitQueries == 0);

 public:
  static constexpr uint32_t kBytes = 2 * kTile.stages * kTileBytes;
  static constexpr int kWriters = 0;
  static constexpr int kWords = kTile.streamed / PairBits::kUnitQueries;  // per thread

  PT_DEVICE explicit PairBitLoader(uint32_t base) : base_(base) {}

  // Return the bytes of an iteration's copies.
  static PT_DEVICE uint32_t bytes(const AttentionProblem& p) {
    return (p.mask_bits.lanes.data ? kTileBytes : 0) + (p.keep_bits.lanes.data ? kTileBytes : 0);
  }
  // Copy the words of a KV tile and a Q tile, with one thread.
  template <class R>
  PT_DEVICE void load(const R& ring, const AttentionProblem& p, int b, int h, int kv_tile,
                      int q_tile, int stream_iter) const {
    const auto load = [&](const PairBits::Rows& rows, uint32_t to) {
      if (!rows.data) return;
      const uint32_t* const from = rows.data + b * rows.batch + h * rows.head + kv_tile * rows.row +
                                   int64_t(q_tile) * (kTileBytes / 4);
      ptx::bulk_load(to, from, kTileBytes, ring.full(stream_iter));
    };
    load(p.mask_bits.lanes, tile(stream_iter));
    load(p.keep_bits.lanes, tile(stream_iter) + kTileBytes);
  }

  // Read the thread's words of the visible mask, or of dropout's keep mask.
  PT_DEVICE void read_visible(uint32_t (&words)[kWords], int stream_iter) const {
    read(words, tile(stream_iter));
  }
  PT_DEVICE void read_kept(uint32_t (&words)[kWords], int stream_iter) const {
    read(words, tile(stream_iter) + kTileBytes);
  }

 private:
  PT_DEVICE uint32_t tile(int stream_iter) const {
    return base_ + uint32_t(stream_iter % kTile.stages) * (2 * kTileBytes);
  }
  static PT_DEVICE void read(uint32_t (&words)[kWords], uint32_t from) {
    const int thread = ptx::opaque(int(threadIdx.x)) - 128;
    PT_UNROLL
    for (int w = 0; w < kWords; ++w)
      words[w] = ptx::ld_shared_u32(from + uint32_t(w * PairBits::kUnitWords + thread) * 4);
  }

  uint32_t base_;
};

// Clear the elements of an operand without a bit: word i has elements 2 i and 2 i + 1, whose bits
// are in neighboring bytes.
template <int S, int W>
PT_DEVICE void clear_packed(uint32_t (&x)[S][4], const uint32_t (&bits)[W]) {
  static_assert(S == 4 * W);
  PT_UNROLL
  for (int n = 0; n < 2 * S; ++n) {
    const uint32_t highest = bits[n / 8] << (7 - n % 8);
    x[n / 2][n % 2 * 2] &= ptx::prmt<0x9988>(highest);
    x[n / 2][n % 2 * 2 + 1] &= ptx::prmt<0xbbaa>(highest);
  }
}
// Likewise for accumulators.
template <int R, int W>
PT_DEVICE void clear_elements(float (&x)[R], const uint32_t (&bits)[W]) {
  static_assert(R == 32 * W);
  const auto clear = [](float& e, uint32_t mask) {
    e = ptx::bits_float(ptx::float_bits(e) & mask);
  };
  PT_UNROLL
  for (int n = 0; n < R / 4; ++n) {
    const uint32_t highest = bits[n / 8] << (7 - n % 8);
    clear(x[4 * n], ptx::prmt<0x8888>(highest)), clear(x[4 * n + 1], ptx::prmt<0x9999>(highest));
    clear(x[4 * n + 2], ptx::prmt<0xaaaa>(highest)),
        clear(x[4 * n + 3], ptx::prmt<0xbbbb>(highest));
  }
}

}  // namespace pt::cuda
