// SPDX-License-Identifier: Apache-2.0
// Attention backward on sm_90a, bwd_dq: a consumer's part of the gradients of ALiBi's slopes and
// T5's table.
#pragma once

#include "cuda/attention/bwd_tile.cuh"
#include "cuda/attention/sm80/config.h"
#include "cuda/attention/sm90/tile.cuh"
#include "cuda/tile/reduce.cuh"

namespace pt::cuda {

struct NoScoreModGrads {
  PT_DEVICE explicit NoScoreModGrads(uint32_t) {}
};

// Partial sums of 64 queries, the rows of one or two tiles of the portable kernels: their partials
// are the same, or every second one is zero.
//
// Tiles fully outside the range of T5's table add to one value per lane. Other tiles write dS to
// shared memory. Row r + 8 of an n-block is on the diagonals of row r of the previous n-block, so a
// lane adds those two first, which halves the rows. Then one thread adds one diagonal, in order.
template <int HeadDim, bool ElementwiseMask>
class Sm90ScoreModGrads {
  static constexpr Sm90Tile kTile = sm90_bwd_dq_tile(HeadDim, true, ElementwiseMask);
  static constexpr int N = kTile.streamed, kPitch = sm90_sum_pitch(kTile), kRows = kSm90SumRows;
  static constexpr uint32_t kBytes = sm90_sums_bytes(kTile) / kTile.consumers;
  static constexpr int kPartRows = attention_tile(Pass::BwdDq, HeadDim, 2, true).rows(),
                       kPartials = 64 / kPartRows;
  static_assert(kPitch % 32 == 8 && kPartials * kPartRows == 64);

 public:
  PT_DEVICE explicit Sm90ScoreModGrads(uint32_t buffers)
      : buffer_(buffers + uint32_t(consumer()) * kBytes) {}

  // Add dS of a KV tile, with zeros for hidden pairs. `first`: j - i - offset of its first element.
  template <class Work>
  PT_DEVICE void add(const AttentionBackward& g, const float (&ds)[N / 2], const Work& w,
                     int first) {
    if (!here(g, w)) return;
    if (g.slope_partials) {
      const float from = float(first + 2 * (lane_id() % 4) - own_row(0) % 64);
      PT_UNROLL
      for (int i = 0; i < N / 2; ++i) {
        const float d = from + float(i / 4 * 8 + i % 2 - i / 2 % 2 * 8);
        slope_ -= ds[i] * (d < 0 ? -d : d);
      }
    }
    if (g.diagonal_partials)
      add_diagonals(g.p, ds, first,
                    g.diagonal_partials + part(g.p, w) * (g.p.before + g.p.after + 1));
  }

  template <class Work>
  PT_DEVICE void finish(const AttentionBackward& g, const Work& w) {
    if (!here(g, w)) return;
    const Sum2 far = LaneTeam(32).sum({below_, above_}), slope = LaneTeam(32).sum({slope_, 0.0f});
    sync();
    if (lane_id() == 0) ptx::st_shared_v4_f32(buffer_ + warp() * 16, far.a, far.b, slope.a, 0.0f);
    sync();
    if (threadIdx.x % 128 != 0) return;
    float sums[3] = {0.0f, 0.0f, 0.0f};
    for (int n = 0; n < 4; ++n) {
      const ptx::Words4 of_warp = ptx::ld_shared_v4(buffer_ + n * 16);
      PT_UNROLL
      for (int i = 0; i < 3; ++i) sums[i] += ptx::bits_float(of_warp.w[i]);
    }
    const int64_t at = part(g.p, w);
    if (g.slope_partials) {
      store_one(g.slope_partials + at, sums[2]);
      for (int n = 1; n < kPartials && w.i0 + consumer() * 64 + n * kPartRows < g.p.num_queries;
           ++n)
        store_one(g.slope_partials + at + n, 0.0f);
    }
    if (g.diagonal_partials)
      store_far(g.diagonal_partials + at * (g.p.before + g.p.after + 1), g.p, sums[0], sums[1]);
  }

 private:
  static PT_DEVICE int warp() { return int(threadIdx.x) % 128 / 32; }
  // Synchronize this consumer's threads.
  static PT_DEVICE void sync() {
    if (consumer() == 0) ptx::bar_sync(4, 128);
    else ptx::bar_sync(5, 128);
  }
  template <class Work>
  static PT_DEVICE bool here(const AttentionBackward& g, const Work& w) {
    return (g.slope_partials || g.diagonal_partials) && w.i0 + consumer() * 64 < g.p.num_queries;
  }
  template <class Work>
  static PT_DEVICE int64_t part(const AttentionProblem& p, const Work& w) {
    const int partials = (p.num_queries + kPartRows - 1) / kPartRows;
    return (int64_t(w.b) * p.heads + w.h) * partials + (w.i0 / 64 + consumer()) * kPartials;
  }

  PT_DEVICE void add_diagonals(const AttentionProblem& p, const float (&ds)[N / 2], int first,
                               float* sums) {
    const bool below = first + N - 1 <= -p.before;
    if (below || first - 63 >= p.after) {
      float sum = 0.0f;
      PT_UNROLL
      for (int i = 0; i < N / 2; ++i) sum += ds[i];
      if (below) below_ += sum;
      else above_ += sum;
      return;
    }
    sync();  // the previous tile has been read
    const uint32_t own =
        buffer_ + 4 * ((warp() * 8 + lane_id() / 4) * kPitch + 2 * (lane_id() % 4));
    PT_UNROLL
    for (int c = 0; c <= N / 8; ++c) {
      float pair[2];
      PT_UNROLL
      for (int e = 0; e < 2; ++e)
        pair[e] = (c > 0 ? ds[4 * c - 4 + e] : 0.0f) + (c < N / 8 ? ds[4 * c + 2 + e] : 0.0f);
      ptx::st_shared_v2_f32(own + 32 * c, pair[0], pair[1]);
    }
    sync();
    for (int c = int(threadIdx.x) % 128; c < N + 63; c += 128) {
      const int d = first + c - 63;
      const bool low = d <= -p.before, high = d >= p.after;
      float* const cell = sums + p.before + d;
      const float older = low || high ? 0.0f : load_one(cell);
      float sum = 0.0f;
      PT_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const int x = c - 63 + r / 8 * 16 + r % 8 + 8;  // column of the diagonal in row r
        if (x >= 0 && x < kPitch) sum += ptx::ld_shared_f32(buffer_ + 4 * (r * kPitch + x));
      }
      if (low) below_ += sum;
      else if (high) above_ += sum;
      else store_one(cell, older + sum);
    }
  }

  uint32_t buffer_;
  float slope_ = 0.0f, below_ = 0.0f, above_ = 0.0f;
};

}  // namespace pt::cuda
