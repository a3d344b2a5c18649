// Attention backward on sm_90a, the pass over queries: d_query of a tile of queries. As bwd_queries.cuh, with products by warpgroups and
// copies by TMA.
//
// Scores and dP are computed a second time, seven products instead of five, but nothing is added up across blocks: the result is
// reproducible without any order between them. The two products with the next keys start behind dQ += dS K of these.
#pragma once

#include "cuda/attention/redo.cuh"
#include "cuda/attention/sm90_bwd_lookups.cuh"
#include "cuda/attention/sm90_bwd_sums.cuh"
#include "cuda/attention/sm90_bwd_tile.cuh"

namespace pt::cuda {

template <class T, class K>
struct Sm90QueriesBlock {
  static constexpr Sm90Tile kTile = sm90_queries_tile(K::head_dim, K::general, K::looks_up);
  static constexpr int D = K::head_dim, BM = kTile.rows(), BN = kTile.streamed;
  static constexpr int kConsumers = kTile.consumers;
  static constexpr bool kPersists = sm90_backward_persists(D, K::plain);
  using RingOwn = Ring<1, BM, kTile.panels()>;
  using RingKeys = Ring<kTile.stages, BN, kTile.panels()>;
  using RingValues = Ring<kTile.second_stages(), BN, kTile.panels()>;
  using Lookups = std::conditional_t<K::looks_up, BackwardLookups<K, false>, NoBackwardLookups>;
  // What is looked up comes and goes with tiles of values; of keys where values have one stage.
  static constexpr bool kWithKeys = K::looks_up && kTile.fewer > 0, kWithValues = K::looks_up && !kWithKeys;

  const Sm90Backward& args;
  RingOwn q, d_out;
  RingKeys k;
  RingValues v;
  uint32_t sums;
  Lookups lookups;

  using Work = QueryWork<BM, BN>;

  PT_DEVICE void begin() const {
    args.prefetch();
    q.init(1, kConsumers, "q_full", "q_empty");
    d_out.init(1, kConsumers, "d_out_full", "d_out_empty");
    k.init(kWithKeys ? 1 + Lookups::kWriters : 1, kWithKeys ? 4 * kConsumers : kConsumers, "k_full", "k_empty");
    v.init(kWithValues ? 1 + Lookups::kWriters : 1, kWithValues ? 4 * kConsumers : kConsumers, "v_full", "v_empty");
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x == 0) load_tiles();
    if constexpr (K::looks_up)
      if (Lookups::has_warp(int(threadIdx.x) / 32)) look_up();
  }

  PT_DEVICE void look_up() const {
    const AttentionProblem& p = args.g.p;
    int visit = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, ptx::again(n));
      const int end = w.origin + w.range.first * BN;
      const auto bounds = [&](int i) { return w.bounds(p, i); };
      for (int first = w.origin + (w.range.last - 1) * BN; first >= end; first -= BN) {
        if constexpr (kWithKeys) lookups.produce(k, p, w.b, w.h, w.i0, first, visit++, bounds);
        else lookups.produce(v, p, w.b, w.h, w.i0, first, visit++, bounds);
      }
    });
  }

  PT_DEVICE void load_tiles() const {
    const AttentionProblem& p = args.g.p;
    int visit = 0, turn = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const int batch = p.cu_queries ? 0 : w.b, row_k = int(w.s.row_k) + w.origin, row_q = int(w.s.row_q) + w.i0;
      for (int t = w.range.last - 1; t >= w.range.first; --t, ++visit) {
        if (t == w.range.last - 1) q.load(turn, args.q, row_q, w.h, batch);
        k.load(visit, args.k, row_k + t * BN, w.h / p.group, batch);
        if (t == w.range.last - 1) d_out.load(turn++, args.d_out, row_q, w.h, batch);
        v.load(visit, args.v, row_k + t * BN, w.h / p.group, batch);
      }
    });
  }

  // Kept in registers from visit to visit, descriptors of all steps of wide heads would not leave enough, nor with lookups.
  static PT_DEVICE RingOwn own(const RingOwn& ring) {
    return D > 128 || K::looks_up
               ? RingOwn(uint32_t(ptx::again(int(ring.buffer(0) + (PT_FAULT(the_other_panel_of_wide_queries) ? RingOwn::kPanelBytes : 0)))),
                         0)
               : ring;
  }

  // With lookups a lane speaks for its warp's loads too.
  PT_DEVICE void release_keys(int visit) const {
    if constexpr (kWithKeys) {
      if (!PT_FAULT(keys_released_before_bits_are_read)) ptx::syncwarp();
      if (lane_id() == 0) k.release(visit);
    } else {
      release_products(k, visit);
    }
  }
  PT_DEVICE void release_values(int visit) const {
    if constexpr (kWithValues) {
      if (!PT_FAULT(values_released_before_bits_are_read)) ptx::syncwarp();
      if (lane_id() == 0) v.release(visit);
    } else {
      release_products(v, visit);
    }
  }

  PT_DEVICE void consume() const {
    const AttentionBackward& g = args.g;
    const AttentionProblem& p = g.p;
    const float unit = p.scale * kLog2e;
    int visit = 0, turn = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const Range keep = w.kept(p);
      Range whole = w.whole(p);
      // Sums of dS must not take in rows behind the last query.
      if (!PT_FAULT(sums_of_rows_behind_the_last_query) && K::general && w.i0 + consumer() * 64 + 64 > w.s.num_q) whole.hi = 0;
      // Keys between the bounds that padding hides, as in forward; but there are no registers to clear their rows: what met NaN is made
      // again.
      const bool holes = !K::looks_up && whole.lo == kUnbounded;
      const auto key_words = [&] { return KeyWords(p, place_of(args.order, ptx::again(n)).head / p.heads); };
      float top[2], delta[2];
      [[maybe_unused]] float log[2];
      PT_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int i = w.i0 + own_row(r);
        const RowNumbers numbers = row_numbers(g, number_at(g.at, w.b, w.h, w.s.row_q + i), i < w.s.num_q);
        top[r] = K::general ? numbers.top : in_base_2<T>(numbers.top), delta[r] = numbers.delta * kWeightUnit<T>;
        if constexpr (K::general && K::looks_up) log[r] = numbers.log - float(kWeightBits<T>);
      }
      float s[BN / 2], dp[BN / 2], dq[D / 2];
      uint32_t weights[BN / 16][4];  // P, then dS
      [[maybe_unused]] std::conditional_t<K::looks_up, SeenPairs<BN>, Pairs<BN / 2>> seen;
      [[maybe_unused]] Pairs<BN / 2> kept;
      [[maybe_unused]] std::conditional_t<K::general, Sm90TermSums<D, K::looks_up>, NoTermSums> gradients(sums);
      PT_UNROLL
      for (int i = 0; i < D / 2; ++i) dq[i] = 0.0f;

      const auto start = [&](int first) {
        if (!PT_FAULT(keys_that_nobody_sees_kept)) clear_rows<kConsumers>(k, visit, first, keep);
        k.await_full(visit);
        multiply_rows<T, D>(s, own(q), turn, k, visit, false);
        v.await_full(visit);
        multiply_rows<T, D>(dp, own(d_out), turn, v, visit, false);
      };
      const auto cut = [&](int first) { return first < whole.lo || first + BN > whole.hi; };
      const auto hide = [&](float (&x)[BN / 2], int first) {
        if (!cut(first)) return;
        const Range bounds[2] = {w.own_bounds(p, 0), w.own_bounds(p, 1)};
        each_element(x, first, [&](float& e, int r, int column) { e = bounds[r].has(column) ? e : 0.0f; });
        if constexpr (!K::looks_up) {
          if (!PT_FAULT(holes_seen_over_queries) && holes) hide_keys(x, first, key_words(), 0.0f);
        }
      };
      // Where something is looked up, any tile may be.
      const auto hides = [&](int first) { return K::looks_up || cut(first); };
      const auto decide = [&](int first) {
        if constexpr (K::looks_up) seen = lookups.seen(visit);
        if constexpr (K::general) {
          const Place at = place_again(w.i0, first);
          if constexpr (!K::looks_up)
            if (cut(first)) {
              const Range bounds[2] = {w.bounds(p, at.row_of(0)), w.bounds(p, at.row_of(2))};
              seen = Pairs<BN / 2>::template of<4>(at, [&](const Place& place) {
                return within<4>(place, bounds) &
                       (!PT_FAULT(holes_seen_with_terms_over_queries) && holes ? visible_columns<4>(place, key_words()) : kAllColumns);
              });
            }
          if (p.drop_threshold) {
            const Terms<false, false> terms(p, w.s, w.b, w.h);
            kept = Pairs<BN / 2>::template of<4>(at, [&](const Place& place) { return terms.template kept<4>(place); });
          }
        }
      };
      // s becomes softcap's slopes.
      const auto weigh = [&](int first) {
        if constexpr (K::general) {
          const Terms<false, false> terms(p, w.s, w.b, w.h);
          in_pieces<kPiece>(s, place_again(w.i0, first), [&](float (&x)[kPiece][4], const Place& place, int c) {
            float slope[kPiece][4];
            terms.apply(x, slope, place, kAllColumns);
            if constexpr (K::looks_up) {
              lookups.add(p, x, visit, c, seen);
              each<kPiece>([&](int n, int r, uint32_t) {
                x[n][r] = weight_of(x[n][r], top[r / 2], PT_FAULT(the_log_of_the_sum_forgotten_over_queries) ? 0.0f : log[r / 2]);
              });
            } else {
              each<kPiece>([&](int n, int r, uint32_t) { x[n][r] = weight_of<T>(x[n][r], top[r / 2]); });
            }
            if (hides(first)) {
              const auto bits = seen.again();
              each<kPiece>([&](int n, int r, uint32_t) { x[n][r] = bits.has(4 * (c + n) + r) ? x[n][r] : 0.0f; });
            }
            pack_piece<T>(weights[c / kPiece], x);
            each<kPiece>([&](int n, int r, uint32_t) { x[n][r] = slope[n][r]; });
          });
        } else {
          each_element(s, 0, [&](float& x, int r, int) { x = ptx::exp2(ptx::fma_rn(x, unit, -top[r])); });
          if constexpr (!K::looks_up) hide(s, first);
          else if (!PT_FAULT(scores_not_hidden_by_bits_over_queries)) keep_seen(s, seen.again());
          pack_recomputed<T>(weights, s);
        }
      };
      const auto differentiate = [&](int first) {
        if constexpr (K::general) {
          if (p.drop_threshold) {
            PT_UNROLL
            for (int i = 0; i < BN / 2; ++i)
              dp[i] = PT_FAULT(dp_of_dropped_weights_over_queries) || kept.has(i) ? dp[i] * p.keep_scale : 0.0f;
          }
          each_element(dp, 0,
                       [&](float& x, int r, int) { x = less_delta<T>(x, PT_FAULT(delta_forgotten_over_queries) ? 0.0f : delta[r]); });
          if (!PT_FAULT(hidden_dp_kept_over_queries) && hides(first)) keep_seen(dp, seen.again());
          PT_UNROLL
          for (int i = 0; i < BN / 2; ++i) dp[i] *= ptx::widen(T{uint16_t(weights[i / 8][i / 2 % 4] >> 16 * (i % 2))});
          const auto slope = [&] {
            PT_UNROLL
            for (int i = 0; i < BN / 2; ++i) dp[i] *= PT_FAULT(softcap_slope_forgotten_over_queries) ? 1.0f : s[i];
          };
          if (PT_FAULT(sums_of_ds_after_softcap_slope) && p.softcap != 0.0f) slope();
          gradients.add(g, dp, w, first - w.i0 - consumer() * 64 - w.s.shift);
          if (p.softcap != 0.0f) slope();
          pack_weights<T>(weights, dp);
        } else {
          each_element(dp, 0,
                       [&](float& x, int r, int) { x = less_delta<T>(x, PT_FAULT(delta_forgotten_over_queries) ? 0.0f : delta[r]); });
          // Elsewhere dP of hidden pairs meets weights of zero; not finite, it would raise a flag.
          if constexpr (K::looks_up) {
            if (cut(first)) keep_seen(dp, seen.again());
          } else {
            if (!PT_FAULT(dp_not_hidden)) hide(dp, first);
          }
          pack_gradients<T>(weights, weights, dp);
        }
      };

      if (w.range.count() > 0) {
        int first = w.origin + (w.range.last - 1) * BN;
        q.await_full(turn);
        if (!PT_FAULT(gradients_of_outputs_not_awaited)) d_out.await_full(turn);
        start(first);
        decide(first);
        if (!PT_FAULT(scores_not_awaited_over_queries)) ptx::wgmma_wait<1>();
        weigh(first);
        ptx::wgmma_wait<0>();
        release_values(visit);
        differentiate(first);
        for (int t = w.range.last - 2; t >= w.range.first; --t) {
          multiply_weights<T>(dq, weights, k, visit++);
          first -= BN;
          start(first);
          decide(first);
          if (PT_FAULT(keys_released_too_early)) release_keys(visit - 1);
          ptx::wgmma_wait<1>();
          if (!PT_FAULT(keys_released_too_early)) release_keys(visit - 1);
          weigh(first);
          ptx::wgmma_wait<0>();
          release_values(visit);
          differentiate(first);
        }
        release_products(q, turn);
        release_products(d_out, turn++);
        multiply_weights<T>(dq, weights, k, visit);
        if (PT_FAULT(keys_released_too_early_at_the_end)) release_keys(visit);
        ptx::wgmma_wait<0>();
        if (!PT_FAULT(keys_released_too_early_at_the_end)) release_keys(visit);
        ++visit;
      }
      if constexpr (K::general) gradients.finish(g, w);
      finish(n, dq);
    });
  }

  // Reads what it needs of the sequence once more: kept through the loop, it would cost registers there.
  PT_DEVICE void finish(int n, const float (&dq)[D / 2]) const {
    const AttentionProblem& p = args.g.p;
    const Work w(p, args.order, ptx::again(n));
    const int written = p.cu_queries ? w.s.num_q : p.num_queries;
    float factor[2];
    int64_t index[2];
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int i = w.i0 + own_row(r);
      factor[r] = w.own_bounds(p, r).empty() ? 0.0f : PT_FAULT(the_scale_of_d_query) ? 1.0f : p.scale;
      index[r] = i < written ? w.s.row_q + i : -1;
    }
    const bool unflagged = PT_FAULT(no_flag_raised_over_queries) || (PT_FAULT(no_flag_raised_for_holes) && !K::looks_up);
    if (args.g.redo.flags && !unflagged && not_finite(dq, factor))
      raise(args.g.redo, int64_t(w.b) * p.heads + (PT_FAULT(the_flag_of_another_head_over_queries) ? 0 : w.h), w.i0);
    store_wide<T>(args.g.dq, w.b, w.h, dq, factor, index);
  }

  static PT_DEVICE void run(const Sm90Backward& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem());
    constexpr uint32_t kOwn = RingOwn::kBufferBytes, kValuesAt = 2 * kOwn + RingKeys::kBufferBytes;
    constexpr uint32_t kBarriers = kValuesAt + RingValues::kBufferBytes;
    constexpr uint32_t kEnd = kBarriers + 2 * RingOwn::kBarrierBytes + RingKeys::kBarrierBytes + RingValues::kBarrierBytes;
    constexpr uint32_t kLookupsAt = kEnd + (K::general ? sm90_sums_bytes(kTile) : 0);
    static_assert(kSm90Slack + kLookupsAt + Lookups::kBytes == sm90_queries_smem(kTile, K::general, K::looks_up));
    const uint32_t own_bars = base + kBarriers, stream_bars = own_bars + 2 * RingOwn::kBarrierBytes;
    const Sm90QueriesBlock block{args,
                                 RingOwn(base, own_bars),
                                 RingOwn(base + kOwn, own_bars + RingOwn::kBarrierBytes),
                                 RingKeys(base + 2 * kOwn, stream_bars),
                                 RingValues(base + kValuesAt, stream_bars + RingKeys::kBarrierBytes),
                                 base + kEnd,
                                 Lookups(base + kLookupsAt)};
    run_block(block);
  }
};

template <class T, class K>
__global__ void __launch_bounds__(sm90_queries_tile(K::head_dim, K::general, K::looks_up).threads(), 1)
    sm90_attention_bwd_queries_kernel([[maybe_unused]] const __grid_constant__ Sm90Backward args) {
#if PT_SM90A
  Sm90QueriesBlock<T, K>::run(args);
#endif
}

}  // namespace pt::cuda
