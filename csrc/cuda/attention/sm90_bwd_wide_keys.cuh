// Attention backward on sm_90a, the pass over keys for wide heads: d_key and d_value of 64 keys take all registers of a consumer each.
//
// So the two consumers have the same keys, and one result each. The first makes S and P, of P dO the sums d_value, and leaves P in shared
// memory; the second makes dP, with P dS, and of dS Q the sums d_key. No product is made twice. A thread has the same places of the
// accumulators in both, so P goes from thread to thread as the operand that it is, 16 bytes at a time.
//
// Either one's loop is forward's: scores (dP) of the next visit are issued before the product with this one's weights, and what becomes of
// them is computed under that.
#pragma once

#include "cuda/attention/sm90_bwd_keys.cuh"

namespace pt::cuda {

template <class T, class K>
struct Sm90WideKeysBlock : Sm90KeysBlock<T, K> {
  using Keys = Sm90KeysBlock<T, K>;
  using Keys::args, Keys::k, Keys::v, Keys::q, Keys::d_out, Keys::lookups, Keys::own_numbers, Keys::each_number;
  using Keys::kTile, Keys::D, Keys::BM, Keys::BN, Keys::kConsumers, Keys::kPersists;
  using typename Keys::Work, typename Keys::RingOwn, typename Keys::RingStream;
  static constexpr int kSteps = BN / 16;  // operands of a visit's weights
  // One for each stage of Q, and never awaited empty: who has Q of the visit that takes a buffer again knows that the other has released
  // the one before, after it had read the buffer.
  using Exchange = Buffers<kTile.stages, BM * BN * 2>;
  static_assert(kConsumers == 2 && BM == 64 && !(K::general && K::looks_up) && 8 * kPiece == 16);

  Exchange exchange;

  PT_DEVICE void begin() const {
    Keys::begin();
    exchange.init(4, 1, "weights_full", "weights_empty");  // the warps of a consumer
  }

  PT_DEVICE void consume() const {
    if (consumer() == 0) sum<false>(k, q, d_out);
    else sum<true>(v, d_out, PT_FAULT(d_key_from_the_gradients_of_outputs) ? d_out : q);
  }

  // As release_by_warp.
  template <class R>
  static PT_DEVICE void release(const R& ring, int visit) {
    if (!PT_FAULT(wide_rows_released_too_early)) ptx::syncwarp();
    if (lane_id() == 0) ring.release(visit);
  }

  // Where this thread, or in the other consumer the one like it, has operand i.
  PT_DEVICE uint32_t place(int visit, int i) const {
    const int thread = ptx::again(int(threadIdx.x)) % 128, step = PT_FAULT(weights_of_the_first_sixteen_queries) && consumer() ? 0 : i;
    const int other = PT_FAULT(another_threads_weights) ? consumer() : 0;
    return exchange.buffer(PT_FAULT(weights_in_one_buffer) ? 0 : visit) + uint32_t(step * 128 + (thread ^ other)) * 16;
  }

  PT_DEVICE void store(int visit, int i, const uint32_t (&w)[4]) const {
    ptx::st_shared_v4_f32(place(visit, i), ptx::bits_float(w[0]), ptx::bits_float(w[1]), ptx::bits_float(w[2]), ptx::bits_float(w[3]));
  }
  PT_DEVICE void announce(int visit) const {
    if (!PT_FAULT(weights_announced_too_early)) ptx::syncwarp();
    if (lane_id() == 0) exchange.announce(visit);
  }
  PT_DEVICE void send(int visit, const float (&x)[BN / 2]) const {
    uint32_t weights[kSteps][4];
    if (PT_FAULT(weights_beyond_float16_wide)) pack_weights<T>(weights, x);
    else pack_recomputed<T>(weights, x);
    PT_UNROLL
    for (int i = 0; i < kSteps; ++i) store(visit, i, weights[i]);
    announce(visit);
  }

  // x becomes P x.
  PT_DEVICE void multiply_received(int visit, float (&x)[BN / 2]) const {
    if (!PT_FAULT(weights_not_awaited)) exchange.await_full(PT_FAULT(the_phase_of_weights_flipped) ? visit + kTile.stages : visit);
    PT_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      const ptx::Words4 weights = ptx::ld_shared_v4(place(visit, i));
      PT_UNROLL
      for (int e = 0; e < 8; ++e)
        x[8 * i + e] *= ptx::widen(T{uint16_t(weights.w[e / 2] >> 16 * (PT_FAULT(half_of_the_weights_twice) ? 0 : e % 2))});
    }
  }

  // What bounds leave of the tile's elements, and what dropout does.
  struct Bits {
    Pairs<BN / 2> seen, kept;
  };
  // The lane's first element of the tile of queries from i0 on.
  static PT_DEVICE Place at(const Work& w, int i0) {
    return place_again(PT_FAULT(wide_terms_of_the_other_consumers_keys) ? w.j0 : w.j0 - consumer() * 64, i0);
  }
  template <class F>
  PT_DEVICE Bits decide(const Work& w, int h, int i0, bool cut, F once_more) const {
    const AttentionProblem& p = args.g.p;
    const Place first = at(w, i0);
    Bits bits;
    if (cut) {
      const Work again = once_more();
      const Range bounds[2] = {again.unhidden_bounds(p, first.row_of(0)), again.unhidden_bounds(p, first.row_of(2))};
      bits.seen = Pairs<BN / 2>::template of<kPiece>(first, [&](const Place& place) { return within<kPiece>(place, bounds); });
    }
    if (p.drop_threshold) {
      const Terms<true, false> terms(p, w.s, w.b, h);
      bits.kept = Pairs<BN / 2>::template of<kPiece>(first, [&](const Place& place) { return terms.template kept<kPiece>(place); });
    }
    return bits;
  }

  // With terms: x, scores, becomes P as dropout leaves it; the other consumer gets P times softcap's slope, of which dS is made.
  PT_DEVICE void weigh_terms(const Work& w, int h, int i0, int visit, float (&x)[BN / 2], const Bits& bits, bool cut) const {
    const AttentionProblem& p = args.g.p;
    const Terms<true, false> terms(p, w.s, w.b, h);
    in_pieces<kPiece>(x, at(w, i0), [&](float (&s)[kPiece][4], const Place& place, int c) {
      float slope[kPiece][4];
      uint32_t words[4];
      terms.apply(s, slope, place, kAllColumns);
      PT_UNROLL
      for (int n = 0; n < kPiece; ++n) {
        float top[2];
        ptx::ld_shared_v2_f32(own_numbers(visit) + 32 * (c + n), top[0], top[1]);
        PT_UNROLL
        for (int r = 0; r < 4; ++r) s[n][r] = weight_of<T>(s[n][r], top[r % 2]);
      }
      if (cut)
        each<kPiece>([&](int n, int r, uint32_t) {
          s[n][r] = PT_FAULT(wide_terms_of_hidden_pairs) || bits.seen.has(4 * (c + n) + r) ? s[n][r] : 0.0f;
        });
      each<kPiece>([&](int n, int r, uint32_t) {
        slope[n][r] = !PT_FAULT(wide_slopes_forgotten) && p.softcap != 0.0f ? slope[n][r] * s[n][r] : s[n][r];
      });
      pack_piece<T>(words, slope);
      store(visit, c / kPiece, words);
      if (p.drop_threshold)
        each<kPiece>([&](int n, int r, uint32_t) {
          s[n][r] = PT_FAULT(wide_dropped_weights_kept) || bits.kept.has(4 * (c + n) + r) ? s[n][r] : 0.0f;
        });
    });
  }

  // And x, dP, becomes dS.
  PT_DEVICE void differentiate_terms(int visit, float (&x)[BN / 2], const Bits& bits, bool cut) const {
    const AttentionProblem& p = args.g.p;
    if (p.drop_threshold) {
      PT_UNROLL
      for (int i = 0; i < BN / 2; ++i) x[i] = PT_FAULT(wide_dp_of_dropped_weights) || bits.kept.has(i) ? x[i] * p.keep_scale : 0.0f;
    }
    each_number(x, own_numbers(visit) + 4 * BN, [](float& e, float delta) { e = less_delta<T>(e, -delta); });
    if (cut) keep_seen(x, bits.seen);
    multiply_received(visit, x);
  }

  // d_value's sums from S = K Q^T and dO, or d_key's from dP = V dO^T and Q: sums of W `right`, with W made from x = `own` `left`^T.
  template <bool OfKeys, class Left, class Right>
  PT_DEVICE void sum(const RingOwn& own, const Left& left, const Right& right) const {
    const AttentionProblem& p = args.g.p;
    const float unit = p.scale * kLog2e;
    int visit = 0, turn = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const auto once_more = [&] { return Work(p, args.order, ptx::again(n)); };
      const Range whole = w.whole(p);
      const int first = w.range.first, last = w.range.last;
      const bool clear = w.kept(p).lo > first * BN || w.kept(p).hi < last * BN;
      float sums[D / 2], x[BN / 2];
      uint32_t weights[kSteps][4];
      PT_UNROLL
      for (int i = 0; i < D / 2; ++i) sums[i] = 0.0f;

      int t = last;
      [[maybe_unused]] int h = w.hk * p.group - 1;
      const auto start = [&] {
        if (K::general && ((!PT_FAULT(another_heads_slope_wide) && t == first) || t == last)) ++h;
        t = t == first ? last - 1 : t - 1;
        if (clear) {
          const Range keep = once_more().kept(p);
          if (!PT_FAULT(wide_queries_that_see_nothing_kept)) clear_rows<kConsumers>(q, visit, t * BN, keep);
          clear_rows<kConsumers>(d_out, visit, t * BN, keep);
        }
        left.await_full(visit);
        // Kept in registers from visit to visit, descriptors of all steps would not leave enough.
        multiply_rows<T, D>(x, RingOwn(uint32_t(ptx::again(int(own.buffer(0)))), 0), 0, left, visit, false);
      };
      // P or dS, of which P is the other consumer's.
      const auto weigh = [&] {
        if constexpr (K::general) {
          const bool cut = t * BN < whole.lo || (t + 1) * BN > whole.hi;
          if constexpr (OfKeys) {
            release(left, visit);
            right.await_full(visit);
            differentiate_terms(visit, x, decide(w, h, t * BN, cut, once_more), cut);
          } else {
            weigh_terms(w, h, t * BN, visit, x, decide(w, h, t * BN, cut, once_more), cut);
            release(left, visit);
            announce(visit);
          }
          return;
        }
        if constexpr (OfKeys) {
          release(left, visit);
          right.await_full(visit);
          each_number(x, own_numbers(visit) + 4 * BN,
                      [](float& e, float delta) { e = (e + (PT_FAULT(delta_of_wide_heads_forgotten) ? 0.0f : delta)) * kWeightUnit<T>; });
          multiply_received(visit, x);
        } else {
          each_number(x, own_numbers(visit), [&](float& e, float top) { e = ptx::exp2(ptx::fma_rn(e, unit, -top)); });
        }
        if constexpr (K::looks_up) {
          if (!PT_FAULT(wide_scores_not_hidden_by_bits)) keep_seen(x, lookups.seen(visit).again());  // bounds are among the bits
        } else if (t * BN < whole.lo || (t + 1) * BN > whole.hi) {
          const Work again = once_more();
          const Range bounds[2] = {again.own_bounds(p, 0), again.own_bounds(p, 1)};
          each_element(x, t * BN,
                       [&](float& e, int r, int column) { e = PT_FAULT(wide_scores_not_hidden) || bounds[r].has(column) ? e : 0.0f; });
        }
        if constexpr (!OfKeys) {
          release(left, visit);
          send(visit, x);
        }
      };

      // Sent words are made while the product before may read its own: as operands they come back, or ptxas takes them for those (C7513).
      const auto take = [&] {
        if constexpr (OfKeys || K::general) {
          pack_weights<T>(weights, x);
        } else {
          PT_UNROLL
          for (int i = 0; i < kSteps; ++i) {
            const ptx::Words4 sent = ptx::ld_shared_v4(place(visit, i));
            PT_UNROLL
            for (int e = 0; e < 4; ++e) weights[i][e] = sent.w[e];
          }
        }
      };

      if (w.range.count() > 0) {
        own.await_full(turn);
        start();
        ptx::wgmma_wait<0>();
        weigh();
        take();
        for (const int end = visit + w.range.count() * p.group - 1; visit < end;) {
          ++visit;
          start();
          right.await_full(visit - 1);
          multiply_weights<T>(sums, weights, right, visit - 1);
          if (!PT_FAULT(scores_of_wide_heads_not_awaited)) ptx::wgmma_wait<1>();
          weigh();
          if (PT_FAULT(wide_rows_released_under_their_product)) release(right, visit - 1);
          ptx::wgmma_wait<0>();
          if (!PT_FAULT(wide_rows_released_under_their_product)) release(right, visit - 1);
          take();
        }
        right.await_full(visit);
        multiply_weights<T>(sums, weights, right, visit);
        ptx::wgmma_wait<0>();
        release(right, visit++);
        release_products(k, turn);
        release_products(v, turn++);
      }
      Keys::finish(n, sums, sums, OfKeys != PT_FAULT(results_exchanged), OfKeys == PT_FAULT(results_exchanged));
    });
  }

  static PT_DEVICE void run(const Sm90Backward& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem());
    constexpr uint32_t kExchangeAt = Keys::kEnd + Keys::Lookups::kBytes, kBarriers = kExchangeAt + Exchange::kBufferBytes;
    static_assert(kSm90Slack + kBarriers + Exchange::kBarrierBytes == sm90_keys_smem(kTile, K::general, K::looks_up));
    run_block(Sm90WideKeysBlock{Keys::at(args, base), Exchange(base + kExchangeAt, base + kBarriers)});
  }
};

template <class T, class K>
__global__ void __launch_bounds__(sm90_keys_tile(K::head_dim, K::general, K::looks_up).threads(), 1)
    sm90_attention_bwd_keys_kernel([[maybe_unused]] const __grid_constant__ Sm90Backward args) {
#if PT_SM90A
  std::conditional_t<sm90_keys_tile(K::head_dim, K::general, K::looks_up).split, Sm90WideKeysBlock<T, K>, Sm90KeysBlock<T, K>>::run(args);
#endif
}

}  // namespace pt::cuda
