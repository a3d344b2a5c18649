// SPDX-License-Identifier: Apache-2.0
// Attention backward on sm_90a, bwd_dq: d_query of a Q tile, and a consumer's part of the gradients
// of ALiBi's slopes and T5's table. Like sm80/bwd_dq.cuh with wgmma and TMA.
//
// Two-pass backward: scores and dP are computed twice (seven gemms instead of five), but nothing is
// summed across blocks, so results are deterministic without an order between blocks. Both gemms
// with the next keys start after dQ += dS K of this tile.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/attention/sm90/mask_loader.cuh"
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

template <class T, class K>
struct Sm90BwdDqBlock {
  static constexpr Sm90Tile kTile =
      sm90_bwd_dq_tile(K::head_dim, K::has_score_mod, K::elementwise_mask);
  static constexpr int D = K::head_dim, BM = kTile.rows(), BN = kTile.streamed;
  static constexpr int kConsumers = kTile.consumers;
  static constexpr bool kPersists = sm90_backward_persists(D, K::bounds_only);
  using RingOwn = Ring<1, BM, kTile.panels()>;
  using RingKeys = Ring<kTile.stages, BN, kTile.panels()>;
  using RingValues = Ring<kTile.second_stages(), BN, kTile.panels()>;
  using MaskLoader =
      std::conditional_t<K::elementwise_mask, BackwardMaskLoader<K, false>, NoBackwardMaskLoader>;
  // The mask loader's buffers follow the V tiles, or the K tiles if V has one stage.
  static constexpr bool kWithKeys = K::elementwise_mask && kTile.fewer > 0,
                        kWithValues = K::elementwise_mask && !kWithKeys;

  const Sm90Backward& args;
  RingOwn q, d_out;
  RingKeys k;
  RingValues v;
  uint32_t sums;
  MaskLoader mask_loader;

  using Work = QueryWork<BM, BN>;

  PT_DEVICE void begin() const {
    args.prefetch();
    q.init(1, kConsumers, "q_full", "q_empty");
    d_out.init(1, kConsumers, "d_out_full", "d_out_empty");
    k.init(kWithKeys ? 1 + MaskLoader::kWriters : 1, kWithKeys ? 4 * kConsumers : kConsumers,
           "k_full", "k_empty");
    v.init(kWithValues ? 1 + MaskLoader::kWriters : 1, kWithValues ? 4 * kConsumers : kConsumers,
           "v_full", "v_empty");
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x == 0) load_tiles();
    if constexpr (K::elementwise_mask)
      if (MaskLoader::has_warp(int(threadIdx.x) / 32)) load_mask();
  }

  PT_DEVICE void load_mask() const {
    const AttentionProblem& p = args.g.p;
    int stream_iter = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, ptx::opaque(n));
      const int end = w.origin + w.range.first * BN;
      const auto bounds = [&](int i) { return w.bounds(p, i); };
      for (int first = w.origin + (w.range.last - 1) * BN; first >= end; first -= BN) {
        if constexpr (kWithKeys)
          mask_loader.produce(k, p, w.b, w.h, w.i0, first, stream_iter++, bounds);
        else mask_loader.produce(v, p, w.b, w.h, w.i0, first, stream_iter++, bounds);
      }
    });
  }

  PT_DEVICE void load_tiles() const {
    const AttentionProblem& p = args.g.p;
    int stream_iter = 0, tile_iter = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const int batch = p.cu_queries ? 0 : w.b, row_k = int(w.s.row_k) + w.origin,
                row_q = int(w.s.row_q) + w.i0;
      for (int t = w.range.last - 1; t >= w.range.first; --t, ++stream_iter) {
        if (t == w.range.last - 1) q.load(tile_iter, args.q, row_q, w.h, batch);
        k.load(stream_iter, args.k, row_k + t * BN, w.h / p.group, batch);
        if (t == w.range.last - 1) d_out.load(tile_iter++, args.d_out, row_q, w.h, batch);
        v.load(stream_iter, args.v, row_k + t * BN, w.h / p.group, batch);
      }
    });
  }

  // Recompute descriptors with wide heads or an elementwise mask: held across iterations, those of
  // all steps would use too many registers.
  static PT_DEVICE RingOwn own(const RingOwn& ring) {
    return D > 128 || K::elementwise_mask ? RingOwn(uint32_t(ptx::opaque(int(ring.buffer(0)))), 0)
                                          : ring;
  }

  // With an elementwise mask, a lane releases for its warp's loads too.
  PT_DEVICE void release_keys(int stream_iter) const {
    if constexpr (kWithKeys) {
      ptx::syncwarp();
      if (lane_id() == 0) k.consumer_release(stream_iter);
    } else {
      consumer_release_warpgroup(k, stream_iter);
    }
  }
  PT_DEVICE void release_values(int stream_iter) const {
    if constexpr (kWithValues) {
      ptx::syncwarp();
      if (lane_id() == 0) v.consumer_release(stream_iter);
    } else {
      consumer_release_warpgroup(v, stream_iter);
    }
  }

  PT_DEVICE void consume() const {
    const AttentionBackward& g = args.g;
    const AttentionProblem& p = g.p;
    const float scale_log2 = p.scale * kLog2e;
    int stream_iter = 0, tile_iter = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const Range keep = w.rows_to_keep(p);
      Range whole = w.whole(p);
      // Sums of dS must not include rows past the last query.
      if (K::has_score_mod && w.i0 + consumer() * 64 + 64 > w.s.num_q) whole.hi = 0;
      // Padding gaps as in forward, but no registers are left to clear their rows: tiles that
      // contain NaN are recomputed.
      const bool padding_gaps = !K::elementwise_mask && whole.lo == kUnbounded;
      const auto key_padding_bitmap = [&] {
        return KeyPaddingBitmap(p, place_of(args.order, ptx::opaque(n)).head / p.heads);
      };
      float row_max[2], delta[2];
      [[maybe_unused]] float log2_sum[2];
      PT_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int i = w.i0 + own_row(r);
        const RowStats row_stats =
            read_row_stats(g, row_stat_at(g.at, w.b, w.h, w.s.row_q + i), i < w.s.num_q);
        row_max[r] = K::has_score_mod ? row_stats.row_max : in_base_2<T>(row_stats.row_max),
        delta[r] = row_stats.delta * kWeightUnit<T>;
        if constexpr (K::has_score_mod && K::elementwise_mask)
          log2_sum[r] = row_stats.log2_sum - float(kWeightBits<T>);
      }
      float s[BN / 2], dp[BN / 2], dq[D / 2];
      uint32_t weights[BN / 16][4];  // P, then dS
      [[maybe_unused]] std::conditional_t<K::elementwise_mask, VisiblePairs<BN>, Pairs<BN / 2>>
          visible;
      [[maybe_unused]] Pairs<BN / 2> keep_mask;
      [[maybe_unused]] std::conditional_t<K::has_score_mod,
                                          Sm90ScoreModGrads<D, K::elementwise_mask>,
                                          NoScoreModGrads> gradients(sums);
      PT_UNROLL
      for (int i = 0; i < D / 2; ++i) dq[i] = 0.0f;

      const auto start = [&](int first) {
        clear_rows<kConsumers>(k, stream_iter, first, keep);
        k.consumer_wait(stream_iter);
        multiply_rows<T, D>(s, own(q), tile_iter, k, stream_iter, false);
        v.consumer_wait(stream_iter);
        multiply_rows<T, D>(dp, own(d_out), tile_iter, v, stream_iter, false);
      };
      const auto cut = [&](int first) { return first < whole.lo || first + BN > whole.hi; };
      const auto hide = [&](float (&x)[BN / 2], int first) {
        if (!cut(first)) return;
        const Range bounds[2] = {w.own_bounds(p, 0), w.own_bounds(p, 1)};
        each_element(x, first,
                     [&](float& e, int r, int column) { e = bounds[r].has(column) ? e : 0.0f; });
        if constexpr (!K::elementwise_mask) {
          if (padding_gaps) hide_keys(x, first, key_padding_bitmap(), 0.0f);
        }
      };
      // With an elementwise mask any tile may hide pairs.
      const auto hides = [&](int first) { return K::elementwise_mask || cut(first); };
      const auto decide = [&](int first) {
        if constexpr (K::elementwise_mask) visible = mask_loader.visible(stream_iter);
        if constexpr (K::has_score_mod) {
          const Place at = place_again(w.i0, first);
          if constexpr (!K::elementwise_mask)
            if (cut(first)) {
              const Range bounds[2] = {w.bounds(p, at.row_of(0)), w.bounds(p, at.row_of(2))};
              visible = Pairs<BN / 2>::template of<4>(at, [&](const Place& place) {
                return within<4>(place, bounds) &
                       (padding_gaps ? visible_columns<4>(place, key_padding_bitmap())
                                     : kAllColumns);
              });
            }
          if (p.drop_threshold) {
            const ScoreMod<false, false> score_mod(p, w.s, w.b, w.h);
            keep_mask = kept_pairs<BN / 2, 4>(score_mod, at);
          }
        }
      };
      // Weights; s becomes softcap's derivative.
      const auto weigh = [&](int first) {
        if constexpr (K::has_score_mod) {
          const ScoreMod<false, false> score_mod(p, w.s, w.b, w.h);
          in_pieces<kPiece>(s, place_again(w.i0, first),
                            [&](float (&x)[kPiece][4], const Place& place, int c) {
                              float slope[kPiece][4];
                              score_mod.apply(x, slope, place, kAllColumns);
                              if constexpr (K::elementwise_mask) {
                                mask_loader.add(p, x, stream_iter, c, visible);
                                each<kPiece>([&](int n, int r, uint32_t) {
                                  x[n][r] = weight_of(x[n][r], row_max[r / 2], log2_sum[r / 2]);
                                });
                              } else {
                                each<kPiece>([&](int n, int r, uint32_t) {
                                  x[n][r] = weight_of<T>(x[n][r], row_max[r / 2]);
                                });
                              }
                              if (hides(first)) {
                                const auto bits = visible.opaque();
                                each<kPiece>([&](int n, int r, uint32_t) {
                                  x[n][r] = bits.has(4 * (c + n) + r) ? x[n][r] : 0.0f;
                                });
                              }
                              pack_piece<T>(weights[c / kPiece], x);
                              each<kPiece>([&](int n, int r, uint32_t) { x[n][r] = slope[n][r]; });
                            });
        } else {
          each_element(s, 0, [&](float& x, int r, int) {
            x = ptx::exp2(ptx::fma_rn(x, scale_log2, -row_max[r]));
          });
          if constexpr (!K::elementwise_mask) hide(s, first);
          else keep_visible(s, visible.opaque());
          pack_recomputed<T>(weights, s);
        }
      };
      const auto differentiate = [&](int first) {
        if constexpr (K::has_score_mod) {
          if (p.drop_threshold) drop(dp, keep_mask, p.keep_scale);
          each_element(dp, 0, [&](float& x, int r, int) { x = less_delta<T>(x, delta[r]); });
          if (hides(first)) keep_visible(dp, visible.opaque());
          PT_UNROLL
          for (int i = 0; i < BN / 2; ++i)
            dp[i] *= ptx::widen(T{uint16_t(weights[i / 8][i / 2 % 4] >> 16 * (i % 2))});
          gradients.add(g, dp, w, first - w.i0 - consumer() * 64 - w.s.diagonal_offset);
          if (p.softcap != 0.0f) {
            PT_UNROLL
            for (int i = 0; i < BN / 2; ++i) dp[i] *= s[i];
          }
          pack_weights<T>(weights, dp);
        } else {
          each_element(dp, 0, [&](float& x, int r, int) { x = less_delta<T>(x, delta[r]); });
          // Without this mask, dP of hidden pairs meets weights of zero; if not finite, it would
          // set a flag.
          if constexpr (K::elementwise_mask) {
            if (cut(first)) keep_visible(dp, visible.opaque());
          } else {
            hide(dp, first);
          }
          pack_gradients<T>(weights, weights, dp);
        }
      };

      if (w.range.count() > 0) {
        int first = w.origin + (w.range.last - 1) * BN;
        q.consumer_wait(tile_iter);
        d_out.consumer_wait(tile_iter);
        start(first);
        decide(first);
        ptx::wgmma_wait<1>();
        weigh(first);
        ptx::wgmma_wait<0>();
        release_values(stream_iter);
        differentiate(first);
        for (int t = w.range.last - 2; t >= w.range.first; --t) {
          multiply_weights<T>(dq, weights, k, stream_iter++);
          first -= BN;
          start(first);
          decide(first);
          ptx::wgmma_wait<1>();
          release_keys(stream_iter - 1);
          weigh(first);
          ptx::wgmma_wait<0>();
          release_values(stream_iter);
          differentiate(first);
        }
        consumer_release_warpgroup(q, tile_iter);
        consumer_release_warpgroup(d_out, tile_iter++);
        multiply_weights<T>(dq, weights, k, stream_iter);
        ptx::wgmma_wait<0>();
        release_keys(stream_iter);
        ++stream_iter;
      }
      if constexpr (K::has_score_mod) gradients.finish(g, w);
      finish(n, dq);
    });
  }

  // Recompute the sequence's properties: held across the loop, they would use registers.
  PT_DEVICE void finish(int n, const float (&dq)[D / 2]) const {
    const AttentionProblem& p = args.g.p;
    const Work w(p, args.order, ptx::opaque(n));
    const int written = p.cu_queries ? w.s.num_q : p.num_queries;
    float factor[2];
    int64_t index[2];
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int i = w.i0 + own_row(r);
      factor[r] = w.own_bounds(p, r).empty() ? 0.0f : p.scale;
      index[r] = i < written ? w.s.row_q + i : -1;
    }
    if (args.g.recompute.flags && not_finite(dq, factor))
      flag_nonfinite(args.g.recompute, int64_t(w.b) * p.heads + w.h, w.i0);
    store_wide<T>(args.g.dq, w.b, w.h, dq, factor, index);
  }

  static PT_DEVICE void run(const Sm90Backward& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem());
    constexpr uint32_t kOwn = RingOwn::kBufferBytes, kValuesAt = 2 * kOwn + RingKeys::kBufferBytes;
    constexpr uint32_t kBarriers = kValuesAt + RingValues::kBufferBytes;
    constexpr uint32_t kEnd = kBarriers + 2 * RingOwn::kBarrierBytes + RingKeys::kBarrierBytes +
                              RingValues::kBarrierBytes;
    constexpr uint32_t kMaskLoaderAt = kEnd + (K::has_score_mod ? sm90_sums_bytes(kTile) : 0);
    static_assert(kSm90Slack + kMaskLoaderAt + MaskLoader::kBytes ==
                  sm90_bwd_dq_smem(kTile, K::has_score_mod, K::elementwise_mask));
    const uint32_t own_bars = base + kBarriers, stream_bars = own_bars + 2 * RingOwn::kBarrierBytes;
    const Sm90BwdDqBlock block{args,
                               RingOwn(base, own_bars),
                               RingOwn(base + kOwn, own_bars + RingOwn::kBarrierBytes),
                               RingKeys(base + 2 * kOwn, stream_bars),
                               RingValues(base + kValuesAt, stream_bars + RingKeys::kBarrierBytes),
                               base + kEnd,
                               MaskLoader(base + kMaskLoaderAt)};
    run_block(block);
  }
};

template <class T, class K>
__global__ void __launch_bounds__(
    sm90_bwd_dq_tile(K::head_dim, K::has_score_mod, K::elementwise_mask).threads(), 1)
    sm90_attention_bwd_dq_kernel([[maybe_unused]] const __grid_constant__ Sm90Backward args) {
#if PT_SM90A
  Sm90BwdDqBlock<T, K>::run(args);
#endif
}

template <class T>
void sm90_attention_bwd_dq_as(const AttentionBackward& g, const Sm90Plan& plan, void* stream) {
  const Sm90Backward args = {map_operands(g, plan.tile.rows(), plan.tile.streamed), g, plan.order};
  with_backward_kind(plan, [&](auto kind) {
    launch(sm90_attention_bwd_dq_kernel<T, decltype(kind)>, dim3(unsigned(plan.blocks)),
           plan.tile.threads(), plan.smem_bytes, stream, args);
  });
}

}  // namespace pt::cuda
