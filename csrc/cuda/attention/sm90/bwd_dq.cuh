// SPDX-License-Identifier: Apache-2.0
// Attention backward on sm_90a, bwd_dq: d_query of a Q tile. Like sm80/bwd_dq.cuh with wgmma and
// TMA.
//
// Two-pass backward: scores and dP are computed twice (seven gemms instead of five), but nothing is
// summed across blocks, so results are deterministic without an order between blocks. Both gemms
// with the next keys start after dQ += dS K of this tile.
#pragma once

#include "cuda/attention/recompute.cuh"
#include "cuda/attention/sm90/bwd_mask_loader.cuh"
#include "cuda/attention/sm90/bwd_score_mod_grads.cuh"
#include "cuda/attention/sm90/bwd_tile.cuh"

namespace pt::cuda {

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
          if (K::drops_by_bits && p.keep_bits.queries.data)  // here the scores' registers are free
            keep_mask = read_kept_pairs<BN / 2>(ScoreMod<false, false>(p, w.s, w.b, w.h),
                                                place_again(w.i0, first));
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
          const bool drops = K::drops_by_bits && p.keep_bits.queries.data;
          if (drops) drop(dp, keep_mask, p.keep_scale);
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

}  // namespace pt::cuda
