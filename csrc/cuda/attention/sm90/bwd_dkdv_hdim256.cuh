// SPDX-License-Identifier: Apache-2.0
// Attention backward on sm_90a, bwd_dkdv for head sizes up to 256, where d_key and d_value of 64
// keys each fill a consumer's registers.
//
// The two consumers have the same keys and one result each. The first computes S, P and d_value = P
// dO, and writes P to shared memory. The second computes dP, then dS with P, and d_key = dS Q. No
// gemm is computed twice. A thread has the same accumulator positions in both, so P passes between
// threads as an operand, 16 bytes at a time.
//
// Each loop is forward's: scores (or dP) of the next iteration are issued before the gemm with this
// iteration's weights, which overlaps their softmax.
#pragma once

#include "cuda/attention/sm90/bwd_dkdv.cuh"

namespace pt::cuda {

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

}  // namespace pt::cuda
