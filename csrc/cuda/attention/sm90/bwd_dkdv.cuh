// SPDX-License-Identifier: Apache-2.0
// Attention backward on sm_90a, bwd_dkdv: d_key and d_value of a KV tile, summed in order over the
// query heads that share it. Like sm80/bwd_dkdv.cuh with wgmma and TMA.
//
// Consumers have 64 keys each. Scores are k.q, so weights and dS leave the accumulators as operands
// of the next gemms.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/attention/sm90/mask_loader.cuh"
#include "cuda/attention/sm90/pair_bits.cuh"

namespace pt::cuda {

template <class T, class K>
struct Sm90BwdDkdvBlock {
  static constexpr Sm90Tile kTile = K::bwd_dkdv_tile;
  static constexpr int D = K::head_dim, BM = kTile.rows(), BN = kTile.streamed;
  static constexpr int kConsumers = kTile.consumers,
                       kRowStatsBytes =
                           sm90_num_row_stats(K::has_score_mod, K::elementwise_mask) * 4 * BN;
  static constexpr bool kPersists = sm90_backward_persists(D, K::bounds_only);
  using RingOwn = Ring<1, BM, kTile.panels()>;
  using RingStream = Ring<kTile.stages, BN, kTile.panels()>;
  using RingQueries = Ring<kTile.stages + K::more_queries, BN, kTile.panels()>;
  using MaskLoader = std::conditional_t<
      K::pair_bits, PairBitLoader<K>,
      std::conditional_t<K::elementwise_mask, BackwardMaskLoader<K, true>, NoBackwardMaskLoader>>;

  const Sm90Backward& args;
  RingOwn k, v;
  RingQueries q;
  RingStream d_out;
  uint32_t row_stats;
  MaskLoader mask_loader{};
  uint32_t ticket = 0;  // address of the block's number, if it has one

  // A KV tile from the consumers' view.
  struct Work : KeyTile<BM, BN> {
    using Base = KeyTile<BM, BN>;
    using Base::hk, Base::j0, Base::s, Base::range;

    PT_DEVICE Work(const AttentionProblem& p, const TileOrder& order, int n)
        : Work(p, order, place_of(order, n)) {}
    // own_bounds: the query range of the lane's row r, without padding, because results of hidden
    // rows stay in them. rows_to_keep: queries that see some key of the sequence, or that TMA loads
    // as zeros. whole(): queries that see all 64 keys of this consumer.
    PT_DEVICE Range own_bounds(const AttentionProblem& p, int r) const {
      return Base::unhidden_bounds(p, j0 + key_row(r));
    }
    PT_DEVICE Range rows_to_keep(const AttentionProblem& p) const {
      const Range visible{s.queries_of(p, s.first_k).lo, s.queries_of(p, s.num_k - 1).hi};
      return range_to_keep(visible, p.cu_queries ? s.row_q + visible.hi == p.total_queries
                                                 : visible.hi == p.num_queries);
    }
    PT_DEVICE Range whole(const AttentionProblem& p) const {
      const int first = j0 + key_row(0) / 64 * 64;
      return {s.queries_of(p, first + 63).lo, s.queries_of(p, first).hi};
    }
    // Return the first tile per head: the last one, or one of the last K::spread, chosen by the
    // block. Iteration is downwards and wraps from the first tile to the last.
    PT_DEVICE int begin() const {
      return range.last - 1 - j0 / BM % min(max(range.count(), 1), K::spread);
    }
    PT_DEVICE int next(int t) const { return t == range.first ? range.last - 1 : t - 1; }
    // Call f(query head, tile) for each iteration.
    template <class F>
    PT_DEVICE void for_each_stream_iter(const AttentionProblem& p, F f) const {
      int t = begin();
      for (int h = hk * p.group; h < (hk + 1) * p.group; ++h)
        for (int left = range.count(); left > 0; --left, t = next(t)) f(h, t);
    }

    static PT_DEVICE int first_key(const AttentionProblem& p) {
      return K::has_score_mod ? key_origin(p) : 0;
    }

   private:
    PT_DEVICE Work(const AttentionProblem& p, const TileOrder& order, const TilePlace& at)
        : Base(p, at.head / (p.heads / p.group), at.head % (p.heads / p.group),
               first_key(p) + (order.tiles - 1 - at.tile) * BM) {}
  };

  // Return the lane's row r of the tile; with split, consumers share the 64 rows.
  static PT_DEVICE int key_row(int r) { return kTile.split ? own_row(r) % 64 : own_row(r); }

  PT_DEVICE void begin() const {
    args.prefetch();
    k.init(1, kConsumers, "k_full", "k_empty");
    v.init(1, kConsumers, "v_full", "v_empty");
    // Writers: TMA, row stats, mask loader.
    q.init(2 + MaskLoader::kWriters, 4 * kConsumers, "q_full", "q_empty");
    d_out.init(1, 4 * kConsumers, "d_out_full", "d_out_empty");
  }

  PT_DEVICE int block_number() const {
    return K::in_order ? int(ptx::ld_shared_u32(ticket)) : int(blockIdx.x);
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x == 0) load_tiles();
    if (threadIdx.x / 32 == 1) load_row_stats();
    if constexpr (K::elementwise_mask)
      if (MaskLoader::has_warp(int(threadIdx.x) / 32)) load_mask();
  }

  PT_DEVICE void load_mask() const {
    const AttentionProblem& p = args.g.p;
    int stream_iter = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, ptx::opaque(n));
      const auto bounds = [&](int j) { return w.unhidden_bounds(p, j); };
      w.for_each_stream_iter(p, [&](int h, int t) {
        mask_loader.produce(q, p, w.b, h, w.j0, t * BN, stream_iter++, bounds);
      });
    });
  }

  PT_DEVICE void load_tiles() const {
    const AttentionProblem& p = args.g.p;
    int stream_iter = 0, tile_iter = 0;
    for_each_tile<kPersists>(args.order, block_number(), [&](int n) {
      const Work w(p, args.order, n);
      const int batch = p.cu_queries ? 0 : w.b;
      bool first = true;
      w.for_each_stream_iter(p, [&](int h, int t) {
        if (first) k.load(tile_iter, args.k, int(w.s.row_k) + w.j0, w.hk, batch);
        uint32_t bits = 0;
        if constexpr (K::pair_bits) bits = mask_loader.bytes(p);
        q.load(stream_iter, args.q, int(w.s.row_q) + t * BN, h, batch, bits);
        if constexpr (K::pair_bits) mask_loader.load(q, p, w.b, h, w.j0 / BM, t, stream_iter);
        if (first) v.load(tile_iter++, args.v, int(w.s.row_k) + w.j0, w.hk, batch);
        d_out.load(stream_iter++, args.d_out, int(w.s.row_q) + t * BN, h, batch);
        first = false;
      });
    });
  }

  // Load row stats with one warp: each query's maximum (in base 2 without score_mod; +inf if
  // absent) and -delta.
  PT_DEVICE void load_row_stats() const {
    const AttentionBackward& g = args.g;
    const AttentionProblem& p = g.p;
    int stream_iter = 0;
    for_each_tile<kPersists>(args.order, block_number(), [&](int n) {
      const Work w(p, args.order, n);
      w.for_each_stream_iter(p, [&](int h, int t) {
        q.producer_acquire(stream_iter);
        PT_UNROLL
        for (int c = lane_id(); c < BN; c += 32) {
          const int i = t * BN + c;
          const RowStats row = read_row_stats(g, row_stat_at(g.at, w.b, h, w.s.row_q + i),
                                              i >= w.range.start && i < w.range.end);
          ptx::st_shared_f32(row_stats_of(stream_iter) + 4 * c,
                             K::has_score_mod ? row.row_max : in_base_2<T>(row.row_max));
          const float delta = -row.delta;
          ptx::st_shared_f32(row_stats_of(stream_iter) + 4 * (BN + c),
                             K::has_score_mod ? delta * kWeightUnit<T> : delta);
          if constexpr (K::has_score_mod && K::elementwise_mask)
            ptx::st_shared_f32(row_stats_of(stream_iter) + 4 * (2 * BN + c),
                               row.log2_sum - float(kWeightBits<T>));
        }
        ptx::syncwarp();
        if (lane_id() == 0) q.producer_commit(stream_iter);
        ++stream_iter;
      });
    });
  }
  PT_DEVICE uint32_t row_stats_of(int stream_iter) const {
    return row_stats + uint32_t(stream_iter % (kTile.stages + K::more_queries) * kRowStatsBytes);
  }

  PT_DEVICE uint32_t own_row_stats(int stream_iter) const {
    return row_stats_of(stream_iter) + 4 * 2 * (lane_id() % 4);
  }

  // Call f(x[i], stat) with the stat of each element's query, from `at` on; a lane has two queries
  // per n-block.
  template <int R, class F>
  PT_DEVICE void each_row_stat(float (&x)[R], uint32_t at, F f) const {
    PT_UNROLL
    for (int j = 0; j < R / 4; ++j) {
      float number[2];
      ptx::ld_shared_v2_f32(at + 32 * j, number[0], number[1]);
      PT_UNROLL
      for (int r = 0; r < 4; ++r) f(x[4 * j + r], number[r % 2]);
    }
  }

  PT_DEVICE void consume() const {
    const AttentionProblem& p = args.g.p;
    const float scale_log2 = p.scale * kLog2e;
    int stream_iter = 0, tile_iter = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      // Registers are scarce: values that only partial tiles need are recomputed there.
      const Work w(p, args.order, n);
      const auto once_more = [&] { return Work(p, args.order, ptx::opaque(n)); };
      const Range whole = w.whole(p);
      const int first = w.range.first, last = w.range.last;
      const bool clear = w.rows_to_keep(p).lo > first * BN || w.rows_to_keep(p).hi < last * BN;
      float dk[D / 2], dv[D / 2];
      PT_UNROLL
      for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0.0f;

      int t = last;
      [[maybe_unused]] int h = w.hk * p.group;
      for (int stream_iters = w.range.count() * p.group; stream_iters > 0;
           --stream_iters, ++stream_iter) {
        if (K::has_score_mod && t == first) ++h;
        t = t == first ? last - 1 : t - 1;
        if (clear) {
          const Range keep = once_more().rows_to_keep(p);
          clear_rows<kConsumers>(q, stream_iter, t * BN, keep);
          clear_rows<kConsumers>(d_out, stream_iter, t * BN, keep);
        }
        const bool cut = t * BN < whole.lo || (t + 1) * BN > whole.hi;
        // Any tile may hide pairs with an elementwise mask.
        const bool hides = K::elementwise_mask || cut;
        const auto hide = [&](float (&x)[BN / 2]) {
          if (!cut) return;
          const Work fresh = once_more();
          const Range bounds[2] = {fresh.own_bounds(p, 0), fresh.own_bounds(p, 1)};
          each_element(x, t * BN,
                       [&](float& e, int r, int column) { e = bounds[r].has(column) ? e : 0.0f; });
        };
        // Recompute descriptors of the stationary operands per iteration: held, they would use 32
        // registers.
        const auto own = [&](const RingOwn& ring) {
          return K::elementwise_mask ? RingOwn(uint32_t(ptx::opaque(int(ring.buffer(0)))), 0)
                                     : ring;
        };
        float s[BN / 2], dp[BN / 2];
        uint32_t weights[BN / 16][4], ds[BN / 16][4];
        k.consumer_wait(tile_iter);
        q.consumer_wait(stream_iter);
        // Initialize before S: written while S is in flight, these accumulators would make ptxas
        // wait for S first (C7517).
        if constexpr (!K::has_score_mod)
          each_row_stat(dp, own_row_stats(stream_iter) + 4 * BN, [&](float& x, float delta) {
            x = delta;
            ptx::fence_operand(x);
          });
        multiply_rows<T, D>(s, own(k), tile_iter, q, stream_iter, false);
        v.consumer_wait(tile_iter);
        d_out.consumer_wait(stream_iter);
        multiply_rows<T, D>(dp, own(v), tile_iter, d_out, stream_iter, !K::has_score_mod);
        if constexpr (K::has_score_mod) {
          const ScoreMod<true, false> score_mod(p, w.s, w.b, h);
          const Place at = place_again(w.j0, t * BN);
          const uint32_t row_stats_at =
              row_stats_of(stream_iter) + 4 * uint32_t(at.column - t * BN);
          std::conditional_t<K::elementwise_mask, VisiblePairs<BN>, Pairs<BN / 2>> visible;
          Pairs<BN / 2> keep_mask;
          if constexpr (K::elementwise_mask) {
            visible = mask_loader.visible(stream_iter);
          } else if (cut) {
            const Work fresh = once_more();
            const Range bounds[2] = {fresh.unhidden_bounds(p, at.row_of(0)),
                                     fresh.unhidden_bounds(p, at.row_of(2))};
            visible = Pairs<BN / 2>::template of<kPiece>(
                at, [&](const Place& place) { return within<kPiece>(place, bounds); });
          }
          if (p.drop_threshold) keep_mask = kept_pairs<BN / 2, kPiece>(score_mod, at);
          ptx::wgmma_wait<1>();
          in_pieces<kPiece>(s, at, [&](float (&x)[kPiece][4], const Place& place, int c) {
            float slope[kPiece][4];
            score_mod.apply(x, slope, place, kAllColumns);
            if constexpr (K::elementwise_mask) mask_loader.add(p, x, stream_iter, c, visible);
            PT_UNROLL
            for (int n = 0; n < kPiece; ++n) {
              float row_max[2];
              ptx::ld_shared_v2_f32(row_stats_at + 32 * (c + n), row_max[0], row_max[1]);
              if constexpr (K::elementwise_mask) {
                float log2_sum[2];
                ptx::ld_shared_v2_f32(row_stats_at + 8 * BN + 32 * (c + n), log2_sum[0],
                                      log2_sum[1]);
                PT_UNROLL
                for (int r = 0; r < 4; ++r)
                  x[n][r] = weight_of(x[n][r], row_max[r % 2], log2_sum[r % 2]);
              } else {
                PT_UNROLL
                for (int r = 0; r < 4; ++r) x[n][r] = weight_of<T>(x[n][r], row_max[r % 2]);
              }
            }
            if (hides) {
              const auto bits = visible.opaque();
              each<kPiece>([&](int n, int r, uint32_t) {
                x[n][r] = bits.has(4 * (c + n) + r) ? x[n][r] : 0.0f;
              });
            }
            // Pack P times softcap's derivative, the factor of dS, and P after dropout.
            if (p.softcap != 0.0f)
              each<kPiece>([&](int n, int r, uint32_t) { slope[n][r] *= x[n][r]; });
            else each<kPiece>([&](int n, int r, uint32_t) { slope[n][r] = x[n][r]; });
            pack_piece<T>(ds[c / kPiece], slope);
            if (p.drop_threshold)
              each<kPiece>([&](int n, int r, uint32_t) {
                x[n][r] = keep_mask.has(4 * (c + n) + r) ? x[n][r] : 0.0f;
              });
            pack_piece<T>(weights[c / kPiece], x);
          });
          ptx::wgmma_wait<0>();
          if (p.drop_threshold) drop(dp, keep_mask, p.keep_scale);
          each_row_stat(dp, row_stats_at + 4 * BN,
                        [](float& x, float delta) { x = less_delta<T>(x, -delta); });
          if (hides) keep_visible(dp, visible.opaque());
          pack_gradients<T>(ds, ds, dp);
        } else {
          ptx::wgmma_wait<1>();
          each_row_stat(s, own_row_stats(stream_iter), [&](float& x, float row_max) {
            x = ptx::exp2(ptx::fma_rn(x, scale_log2, -row_max));
          });
          hide(s);
          pack_recomputed<T>(weights, s);
          ptx::wgmma_wait<0>();
          hide(dp);
          if constexpr (kWeightBits<T> != 0)
            each_element(dp, 0, [](float& x, int, int) { x *= kWeightUnit<T>; });
          pack_gradients<T>(ds, weights, dp);
        }
        multiply_weights<T>(dv, weights, d_out, stream_iter);
        multiply_weights<T>(dk, ds, q, stream_iter);
        ptx::wgmma_wait<0>();
        // A lane releases for its warp's reads of row stats too.
        ptx::syncwarp();
        if (lane_id() == 0) q.consumer_release(stream_iter), d_out.consumer_release(stream_iter);
      }
      if (t != last) {
        consumer_release_warpgroup(k, tile_iter);
        consumer_release_warpgroup(v, tile_iter++);
      }
      finish(n, dk, dv);
    });
  }

  // Recompute the sequence's properties: held across the loop, they would use registers.
  PT_DEVICE void finish(int n, const float (&dk)[D / 2], const float (&dv)[D / 2], bool keys = true,
                        bool values = true) const {
    const AttentionBackward& g = args.g;
    const AttentionProblem& p = g.p;
    const Work w(p, args.order, ptx::opaque(n));
    const int written = p.cu_keys ? w.s.num_k : p.num_keys;
    float dk_factor[2], dv_factor[2];
    int64_t index[2];
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int j = w.j0 + key_row(r);
      const bool nobody = w.bounds(p, j).empty();
      dk_factor[r] = nobody ? 0.0f : p.scale;
      dv_factor[r] = nobody ? 0.0f : p.keep_scale * kWeightUnit<T>;
      index[r] = (!K::has_score_mod || j >= 0) && j < written ? w.s.row_k + j : -1;
    }
    if constexpr (K::elementwise_mask || K::pair_bits) {
      if ((keys && g.dk.data && not_finite(dk, dk_factor)) ||
          (values && g.dv.data && not_finite(dv, dv_factor)))
        flag_nonfinite(g.recompute, int64_t(w.b) * (p.heads / p.group) + w.hk,
                       w.j0 - Work::first_key(p));
    }
    if (keys && g.dk.data) store_wide<T>(g.dk, w.b, w.hk, dk, dk_factor, index);
    if (values && g.dv.data) store_wide<T>(g.dv, w.b, w.hk, dv, dv_factor, index);
  }

  static constexpr uint32_t kOwn = RingOwn::kBufferBytes, kStream = RingStream::kBufferBytes,
                            kRowStatsAt = 2 * kOwn + 2 * kStream;
  static constexpr uint32_t kBarriers = kRowStatsAt + kTile.stages * kRowStatsBytes;
  static constexpr uint32_t kEnd =
      kBarriers + 2 * (RingOwn::kBarrierBytes + RingStream::kBarrierBytes);

  static PT_DEVICE Sm90BwdDkdvBlock at(const Sm90Backward& args, uint32_t base) {
    const uint32_t own_bars = base + kBarriers, stream_bars = own_bars + 2 * RingOwn::kBarrierBytes;
    return {args,
            RingOwn(base, own_bars),
            RingOwn(base + kOwn, own_bars + RingOwn::kBarrierBytes),
            RingQueries(base + 2 * kOwn, stream_bars),
            RingStream(base + 2 * kOwn + kStream, stream_bars + RingStream::kBarrierBytes),
            base + kRowStatsAt,
            MaskLoader(base + kEnd)};
  }

  static PT_DEVICE void run(const Sm90Backward& args) {
    static_assert(kSm90Slack + kEnd + MaskLoader::kBytes ==
                  sm90_bwd_dkdv_smem(kTile, K::has_score_mod, K::elementwise_mask));
    run_block(at(args, align_to_atom(ptx::dynamic_smem())));
  }
};

// For head sizes up to 256, where d_key and d_value of 64 keys each fill a consumer's registers.
//
// The two consumers have the same keys and one result each. The first computes S, P and d_value = P
// dO, and writes P to shared memory. The second computes dP, then dS with P, and d_key = dS Q. No
// gemm is computed twice. A thread has the same accumulator positions in both, so P passes between
// threads as an operand, 16 bytes at a time.
//
// Each loop is forward's: scores (or dP) of the next iteration are issued before the gemm with this
// iteration's weights, which overlaps their softmax.
template <class T, class K>
struct Sm90BwdDkdvHdim256Block : Sm90BwdDkdvBlock<T, K> {
  using Dkdv = Sm90BwdDkdvBlock<T, K>;
  using Dkdv::args, Dkdv::k, Dkdv::v, Dkdv::q, Dkdv::d_out, Dkdv::mask_loader, Dkdv::own_row_stats,
      Dkdv::each_row_stat;
  using Dkdv::kTile, Dkdv::D, Dkdv::BM, Dkdv::BN, Dkdv::kConsumers, Dkdv::kPersists;
  using typename Dkdv::Work, typename Dkdv::RingOwn, typename Dkdv::RingStream;
  static constexpr int kSteps = BN / 16;  // operands of an iteration's weights
  // One buffer per stage of Q, without a wait on "empty": if a consumer has Q of the iteration that
  // reuses a buffer, the other has released the previous Q, which it does after it reads the
  // buffer.
  using Exchange = Buffers<kTile.stages, BM * BN * 2>;
  static_assert(kConsumers == 2 && BM == 64 && !(K::has_score_mod && K::elementwise_mask) &&
                8 * kPiece == 16);

  Exchange exchange;

  PT_DEVICE void begin() const {
    Dkdv::begin();
    exchange.init(4, 1, "weights_full", "weights_empty");  // the warps of a consumer
  }

  PT_DEVICE void consume() const {
    if (consumer() == 0) sum<false>(k, q, d_out);
    else sum<true>(v, d_out, q);
  }

  // Like consumer_release_warp.
  template <class R>
  static PT_DEVICE void consumer_release(const R& ring, int stream_iter) {
    ptx::syncwarp();
    if (lane_id() == 0) ring.consumer_release(stream_iter);
  }

  // Return the address of operand i of this thread, or of its counterpart in the other consumer.
  PT_DEVICE uint32_t place(int stream_iter, int i) const {
    return exchange.buffer(stream_iter) +
           uint32_t(i * 128 + ptx::opaque(int(threadIdx.x)) % 128) * 16;
  }

  PT_DEVICE void store(int stream_iter, int i, const uint32_t (&w)[4]) const {
    ptx::st_shared_v4_f32(place(stream_iter, i), ptx::bits_float(w[0]), ptx::bits_float(w[1]),
                          ptx::bits_float(w[2]), ptx::bits_float(w[3]));
  }
  PT_DEVICE void producer_commit(int stream_iter) const {
    ptx::syncwarp();
    if (lane_id() == 0) exchange.producer_commit(stream_iter);
  }
  PT_DEVICE void send(int stream_iter, const float (&x)[BN / 2]) const {
    uint32_t weights[kSteps][4];
    pack_recomputed<T>(weights, x);
    PT_UNROLL
    for (int i = 0; i < kSteps; ++i) store(stream_iter, i, weights[i]);
    producer_commit(stream_iter);
  }

  // x *= P.
  PT_DEVICE void multiply_received(int stream_iter, float (&x)[BN / 2]) const {
    exchange.consumer_wait(stream_iter);
    PT_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      const ptx::Words4 weights = ptx::ld_shared_v4(place(stream_iter, i));
      PT_UNROLL
      for (int e = 0; e < 8; ++e)
        x[8 * i + e] *= ptx::widen(T{uint16_t(weights.w[e / 2] >> 16 * (e % 2))});
    }
  }

  // Visible mask by bounds, and dropout's keep mask.
  struct Bits {
    Pairs<BN / 2> visible, keep_mask;
  };
  // Return the position of the lane's first element in the Q tile from i0 on.
  static PT_DEVICE Place at(const Work& w, int i0) {
    return place_again(w.j0 - consumer() * 64, i0);
  }
  template <class F>
  PT_DEVICE Bits decide(const Work& w, int h, int i0, bool cut, F once_more) const {
    const AttentionProblem& p = args.g.p;
    const Place first = at(w, i0);
    Bits bits;
    if (cut) {
      const Work fresh = once_more();
      const Range bounds[2] = {fresh.unhidden_bounds(p, first.row_of(0)),
                               fresh.unhidden_bounds(p, first.row_of(2))};
      bits.visible = Pairs<BN / 2>::template of<kPiece>(
          first, [&](const Place& place) { return within<kPiece>(place, bounds); });
    }
    if (p.drop_threshold) {
      const ScoreMod<true, false> score_mod(p, w.s, w.b, h);
      bits.keep_mask = kept_pairs<BN / 2, kPiece>(score_mod, first);
    }
    return bits;
  }

  // Turn x (scores) into P after dropout. Send P times softcap's derivative, the factor of dS, to
  // the other consumer.
  PT_DEVICE void weigh_score_mod(const Work& w, int h, int i0, int stream_iter, float (&x)[BN / 2],
                                 const Bits& bits, bool cut) const {
    const AttentionProblem& p = args.g.p;
    const ScoreMod<true, false> score_mod(p, w.s, w.b, h);
    in_pieces<kPiece>(x, at(w, i0), [&](float (&s)[kPiece][4], const Place& place, int c) {
      float slope[kPiece][4];
      uint32_t words[4];
      score_mod.apply(s, slope, place, kAllColumns);
      PT_UNROLL
      for (int n = 0; n < kPiece; ++n) {
        float row_max[2];
        ptx::ld_shared_v2_f32(own_row_stats(stream_iter) + 32 * (c + n), row_max[0], row_max[1]);
        PT_UNROLL
        for (int r = 0; r < 4; ++r) s[n][r] = weight_of<T>(s[n][r], row_max[r % 2]);
      }
      if (cut)
        each<kPiece>([&](int n, int r, uint32_t) {
          s[n][r] = bits.visible.has(4 * (c + n) + r) ? s[n][r] : 0.0f;
        });
      each<kPiece>([&](int n, int r, uint32_t) {
        slope[n][r] = p.softcap != 0.0f ? slope[n][r] * s[n][r] : s[n][r];
      });
      pack_piece<T>(words, slope);
      store(stream_iter, c / kPiece, words);
      if (p.drop_threshold)
        each<kPiece>([&](int n, int r, uint32_t) {
          s[n][r] = bits.keep_mask.has(4 * (c + n) + r) ? s[n][r] : 0.0f;
        });
    });
  }

  // Turn x (dP) into dS.
  PT_DEVICE void differentiate_score_mod(int stream_iter, float (&x)[BN / 2], const Bits& bits,
                                         bool cut) const {
    const AttentionProblem& p = args.g.p;
    if (p.drop_threshold) {
      PT_UNROLL
      for (int i = 0; i < BN / 2; ++i) x[i] = bits.keep_mask.has(i) ? x[i] * p.keep_scale : 0.0f;
    }
    each_row_stat(x, own_row_stats(stream_iter) + 4 * BN,
                  [](float& e, float delta) { e = less_delta<T>(e, -delta); });
    if (cut) keep_visible(x, bits.visible);
    multiply_received(stream_iter, x);
  }

  // Compute d_value from S = K Q^T and dO, or d_key from dP = V dO^T and Q: accumulate W `right`,
  // where W comes from x = `own` `left`^T.
  template <bool OfKeys, class Left, class Right>
  PT_DEVICE void sum(const RingOwn& own, const Left& left, const Right& right) const {
    const AttentionProblem& p = args.g.p;
    const float scale_log2 = p.scale * kLog2e;
    int stream_iter = 0, tile_iter = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const auto once_more = [&] { return Work(p, args.order, ptx::opaque(n)); };
      const Range whole = w.whole(p);
      const int first = w.range.first, last = w.range.last;
      const bool clear = w.rows_to_keep(p).lo > first * BN || w.rows_to_keep(p).hi < last * BN;
      float sums[D / 2], x[BN / 2];
      uint32_t weights[kSteps][4];
      PT_UNROLL
      for (int i = 0; i < D / 2; ++i) sums[i] = 0.0f;

      int t = last;
      [[maybe_unused]] int h = w.hk * p.group - 1;
      const auto start = [&] {
        if (K::has_score_mod && (t == first || t == last)) ++h;
        t = t == first ? last - 1 : t - 1;
        if (clear) {
          const Range keep = once_more().rows_to_keep(p);
          clear_rows<kConsumers>(q, stream_iter, t * BN, keep);
          clear_rows<kConsumers>(d_out, stream_iter, t * BN, keep);
        }
        left.consumer_wait(stream_iter);
        // Recompute descriptors: held across iterations, those of all steps would use too many
        // registers.
        multiply_rows<T, D>(x, RingOwn(uint32_t(ptx::opaque(int(own.buffer(0)))), 0), 0, left,
                            stream_iter, false);
      };
      // Compute P, or dS with P from the other consumer.
      const auto weigh = [&] {
        if constexpr (K::has_score_mod) {
          const bool cut = t * BN < whole.lo || (t + 1) * BN > whole.hi;
          if constexpr (OfKeys) {
            consumer_release(left, stream_iter);
            right.consumer_wait(stream_iter);
            differentiate_score_mod(stream_iter, x, decide(w, h, t * BN, cut, once_more), cut);
          } else {
            weigh_score_mod(w, h, t * BN, stream_iter, x, decide(w, h, t * BN, cut, once_more),
                            cut);
            consumer_release(left, stream_iter);
            producer_commit(stream_iter);
          }
          return;
        }
        if constexpr (OfKeys) {
          consumer_release(left, stream_iter);
          right.consumer_wait(stream_iter);
          each_row_stat(x, own_row_stats(stream_iter) + 4 * BN,
                        [](float& e, float delta) { e = (e + delta) * kWeightUnit<T>; });
          multiply_received(stream_iter, x);
        } else {
          each_row_stat(x, own_row_stats(stream_iter), [&](float& e, float row_max) {
            e = ptx::exp2(ptx::fma_rn(e, scale_log2, -row_max));
          });
        }
        if constexpr (K::elementwise_mask) {
          keep_visible(x, mask_loader.visible(stream_iter).opaque());  // bits include bounds
        } else if (t * BN < whole.lo || (t + 1) * BN > whole.hi) {
          const Work fresh = once_more();
          const Range bounds[2] = {fresh.own_bounds(p, 0), fresh.own_bounds(p, 1)};
          each_element(x, t * BN,
                       [&](float& e, int r, int column) { e = bounds[r].has(column) ? e : 0.0f; });
        }
        if constexpr (!OfKeys) {
          consumer_release(left, stream_iter);
          send(stream_iter, x);
        }
      };

      // The packed words are computed while the previous gemm may read its operands. They pass
      // through `opaque`, or ptxas takes them for those operands (C7513).
      const auto take = [&] {
        if constexpr (OfKeys || K::has_score_mod) {
          pack_weights<T>(weights, x);
        } else {
          PT_UNROLL
          for (int i = 0; i < kSteps; ++i) {
            const ptx::Words4 sent = ptx::ld_shared_v4(place(stream_iter, i));
            PT_UNROLL
            for (int e = 0; e < 4; ++e) weights[i][e] = sent.w[e];
          }
        }
      };

      if (w.range.count() > 0) {
        own.consumer_wait(tile_iter);
        start();
        ptx::wgmma_wait<0>();
        weigh();
        take();
        for (const int end = stream_iter + w.range.count() * p.group - 1; stream_iter < end;) {
          ++stream_iter;
          start();
          right.consumer_wait(stream_iter - 1);
          multiply_weights<T>(sums, weights, right, stream_iter - 1);
          ptx::wgmma_wait<1>();
          weigh();
          ptx::wgmma_wait<0>();
          consumer_release(right, stream_iter - 1);
          take();
        }
        right.consumer_wait(stream_iter);
        multiply_weights<T>(sums, weights, right, stream_iter);
        ptx::wgmma_wait<0>();
        consumer_release(right, stream_iter++);
        consumer_release_warpgroup(k, tile_iter);
        consumer_release_warpgroup(v, tile_iter++);
      }
      Dkdv::finish(n, sums, sums, OfKeys, !OfKeys);
    });
  }

  static PT_DEVICE void run(const Sm90Backward& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem());
    constexpr uint32_t kExchangeAt = Dkdv::kEnd + Dkdv::MaskLoader::kBytes,
                       kBarriers = kExchangeAt + Exchange::kBufferBytes;
    static_assert(kSm90Slack + kBarriers + Exchange::kBarrierBytes ==
                  sm90_bwd_dkdv_smem(kTile, K::has_score_mod, K::elementwise_mask));
    run_block(Sm90BwdDkdvHdim256Block{Dkdv::at(args, base),
                                      Exchange(base + kExchangeAt, base + kBarriers)});
  }
};

template <class T, class K>
__global__ void __launch_bounds__(
    sm90_bwd_dkdv_tile(K::head_dim, K::has_score_mod, K::elementwise_mask).threads(), 1)
    sm90_attention_bwd_dkdv_kernel([[maybe_unused]] const __grid_constant__ Sm90Backward args) {
#if PT_SM90A
  std::conditional_t<sm90_bwd_dkdv_tile(K::head_dim, K::has_score_mod, K::elementwise_mask).split,
                     Sm90BwdDkdvHdim256Block<T, K>, Sm90BwdDkdvBlock<T, K>>::run(args);
#endif
}

template <class T>
void sm90_attention_bwd_dkdv_as(const AttentionBackward& g, const Sm90Plan& plan, void* stream) {
  const Sm90Backward args = {map_operands(g, plan.tile.streamed, plan.tile.rows()), g, plan.order};
  with_backward_kind(plan, [&](auto kind) {
    launch(sm90_attention_bwd_dkdv_kernel<T, decltype(kind)>, dim3(unsigned(plan.blocks)),
           plan.tile.threads(), plan.smem_bytes, stream, args);
  });
}

}  // namespace pt::cuda
