// Attention backward on sm_90a, the pass over keys: d_key and d_value of a tile of keys, summed over the query heads that share them, in
// order. As bwd_keys.cuh, with products by warpgroups and copies by TMA.
//
// Consumers have 64 keys each. Scores are k.q, so that weights and dS leave the accumulators as operands of the next products.
#pragma once

#include "cuda/attention/redo.cuh"
#include "cuda/attention/sm90_bwd_lookups.cuh"
#include "cuda/attention/sm90_bwd_tile.cuh"

namespace pt::cuda {

template <class T, class K>
struct Sm90KeysBlock {
  static constexpr Sm90Tile kTile = K::keys_tile;
  static constexpr int D = K::head_dim, BM = kTile.rows(), BN = kTile.streamed;
  static constexpr int kConsumers = kTile.consumers,
                       kNumbers = sm90_key_numbers(K::general, K::looks_up) * 4 * BN;  // bytes of a stage's top, delta, log
  static constexpr bool kPersists = sm90_backward_persists(D, K::plain);
  using RingOwn = Ring<1, BM, kTile.panels()>;
  using RingStream = Ring<kTile.stages, BN, kTile.panels()>;
  using RingQueries = Ring<kTile.stages + K::more_queries, BN, kTile.panels()>;
  using Lookups = std::conditional_t<K::looks_up, BackwardLookups<K, true>, NoBackwardLookups>;

  const Sm90Backward& args;
  RingOwn k, v;
  RingQueries q;
  RingStream d_out;
  uint32_t numbers;
  Lookups lookups{};

  // A tile of keys as consumers see it.
  struct Work : KeyTile<BM, BN> {
    using Base = KeyTile<BM, BN>;
    using Base::hk, Base::j0, Base::s, Base::range;

    PT_DEVICE Work(const AttentionProblem& p, const TileOrder& order, int n) : Work(p, order, place_of(order, n)) {}
    // The queries of the lane's row r, where padding does not hide it: what hidden rows make stays in them. Those that some key of the
    // sequence is seen by, or TMA leaves as zeros; and those that see all 64 keys of this consumer.
    PT_DEVICE Range own_bounds(const AttentionProblem& p, int r) const { return Base::unhidden_bounds(p, j0 + key_row(r)); }
    PT_DEVICE Range kept(const AttentionProblem& p) const {
      const Range seen{s.queries_of(p, s.first_k).lo, s.queries_of(p, s.num_k - 1).hi};
      return kept_rows(seen, p.cu_queries ? s.row_q + seen.hi == p.total_queries : seen.hi == p.num_queries);
    }
    PT_DEVICE Range whole(const AttentionProblem& p) const {
      const int first = j0 + key_row(0) / 64 * 64;
      return {s.queries_of(p, first + 63).lo, s.queries_of(p, first).hi};
    }
    // The first of a head's tiles: the last, or the one of the last K::spread that this block's number says. They are visited downwards,
    // the last after the first.
    PT_DEVICE int begin() const { return range.last - 1 - j0 / BM % least(most(range.count(), 1), K::spread); }
    PT_DEVICE int next(int t) const { return t == range.first ? range.last - 1 : t - 1; }
    // For f(query head, tile).
    template <class F>
    PT_DEVICE void for_each_visit(const AttentionProblem& p, F f) const {
      int t = begin();
      for (int h = hk * p.group; h < (PT_FAULT(a_head_of_a_group_left_out) ? hk * p.group + 1 : (hk + 1) * p.group); ++h)
        for (int left = range.count(); left > 0; --left, t = next(t)) f(h, t);
    }

    static PT_DEVICE int first_key(const AttentionProblem& p) { return K::general ? key_origin(p) : 0; }

   private:
    PT_DEVICE Work(const AttentionProblem& p, const TileOrder& order, const TilePlace& at)
        : Base(p, at.head / (p.heads / p.group), at.head % (p.heads / p.group), first_key(p) + (order.tiles - 1 - at.tile) * BM) {}
  };

  // The lane's row r of the tile: consumers may share its 64.
  static PT_DEVICE int key_row(int r) { return !PT_FAULT(the_second_consumers_keys) && kTile.split ? own_row(r) % 64 : own_row(r); }

  PT_DEVICE void begin() const {
    args.prefetch();
    k.init(1, kConsumers, "k_full", "k_empty");
    v.init(1, kConsumers, "v_full", "v_empty");
    q.init(2 + Lookups::kWriters, 4 * kConsumers, "q_full", "q_empty");  // loads by TMA, numbers, what is looked up
    d_out.init(1, 4 * kConsumers, "d_out_full", "d_out_empty");
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x == 0) load_tiles();
    if (threadIdx.x / 32 == 1) load_numbers();
    if constexpr (K::looks_up)
      if (Lookups::has_warp(int(threadIdx.x) / 32)) look_up();
  }

  PT_DEVICE void look_up() const {
    const AttentionProblem& p = args.g.p;
    int visit = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, ptx::again(n));
      const auto bounds = [&](int j) { return w.unhidden_bounds(p, j); };
      w.for_each_visit(p, [&](int h, int t) { lookups.produce(q, p, w.b, h, w.j0, t * BN, visit++, bounds); });
    });
  }

  PT_DEVICE void load_tiles() const {
    const AttentionProblem& p = args.g.p;
    int visit = 0, turn = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const int batch = p.cu_queries ? 0 : w.b;
      bool first = true;
      w.for_each_visit(p, [&](int h, int t) {
        if (first) k.load(turn, args.k, int(w.s.row_k) + w.j0, w.hk, batch);
        q.load(visit, args.q, int(w.s.row_q) + t * BN, h, batch);
        if (first) v.load(turn++, args.v, int(w.s.row_k) + w.j0, w.hk, batch);
        d_out.load(visit++, args.d_out, int(w.s.row_q) + t * BN, h, batch);
        first = false;
      });
    });
  }

  // A warp: each query's maximum, in base 2 if there are no terms, +inf for one that is not there, and -D.
  PT_DEVICE void load_numbers() const {
    const AttentionBackward& g = args.g;
    const AttentionProblem& p = g.p;
    int visit = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      const Work w(p, args.order, n);
      w.for_each_visit(p, [&](int h, int t) {
        if (!PT_FAULT(numbers_written_while_they_are_read)) q.await_empty(visit);
        PT_UNROLL
        for (int c = lane_id(); c < BN; c += 32) {
          const int i = t * BN + c;
          const RowNumbers row = row_numbers(g, number_at(g.at, w.b, h, w.s.row_q + i), i >= w.range.start && i < w.range.end);
          ptx::st_shared_f32(numbers_of(visit) + 4 * c, K::general ? row.top : in_base_2<T>(row.top));
          const float delta = PT_FAULT(the_sign_of_delta) ? row.delta : -row.delta;
          ptx::st_shared_f32(numbers_of(visit) + 4 * (BN + c), K::general ? delta * kWeightUnit<T> : delta);
          if constexpr (K::general && K::looks_up)
            ptx::st_shared_f32(numbers_of(visit) + 4 * (2 * BN + c), row.log - float(kWeightBits<T>));
        }
        if (!PT_FAULT(numbers_announced_too_early)) ptx::syncwarp();
        if (!PT_FAULT(numbers_not_announced) && lane_id() == 0) q.announce(visit);
        ++visit;
      });
    });
  }
  PT_DEVICE uint32_t numbers_of(int visit) const {
    return numbers + uint32_t(PT_FAULT(the_numbers_of_another_stage) ? 0 : visit % (kTile.stages + K::more_queries) * kNumbers);
  }

  PT_DEVICE uint32_t own_numbers(int visit) const { return numbers_of(visit) + 4 * 2 * (lane_id() % 4); }

  // Calls f(x[i], number) with each element's query's number, of which a lane has two in eight columns, from `at` on.
  template <int R, class F>
  PT_DEVICE void each_number(float (&x)[R], uint32_t at, F f) const {
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
    const float unit = p.scale * kLog2e;
    int visit = 0, turn = 0;
    for_each_tile<kPersists>(args.order, [&](int n) {
      // Registers are scarce: what only cut tiles need is worked out there again.
      const Work w(p, args.order, n);
      const auto once_more = [&] { return Work(p, args.order, ptx::again(n)); };
      const Range whole = w.whole(p);
      const int first = w.range.first, last = w.range.last;
      const bool clear = w.kept(p).lo > first * BN || w.kept(p).hi < last * BN;
      float dk[D / 2], dv[D / 2];
      PT_UNROLL
      for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0.0f;

      int t = last;
      [[maybe_unused]] int h = w.hk * p.group;
      for (int visits = w.range.count() * p.group; visits > 0; --visits, ++visit) {
        if (!PT_FAULT(another_heads_slope) && K::general && t == first) ++h;
        t = t == first ? last - 1 : PT_FAULT(tiles_from_the_first_on) ? first : t - 1;
        if (clear) {
          const Range keep = once_more().kept(p);
          if (!PT_FAULT(queries_that_see_nothing_kept)) clear_rows<kConsumers>(q, visit, t * BN, keep);
          if (!PT_FAULT(gradients_that_see_nothing_kept)) clear_rows<kConsumers>(d_out, visit, t * BN, keep);
        }
        const bool cut = t * BN < whole.lo || (t + 1) * BN > whole.hi;
        const bool hides = K::looks_up || cut;  // where something is looked up, any tile may
        const auto hide = [&](float (&x)[BN / 2]) {
          if (!cut) return;
          const Work again = once_more();
          const Range bounds[2] = {again.own_bounds(p, 0), again.own_bounds(p, 1)};
          each_element(x, t * BN, [&](float& e, int r, int column) { e = bounds[r].has(column) ? e : 0.0f; });
        };
        // Descriptors of what stays are made again at every visit: kept, they would take 32 registers.
        const auto own = [&](const RingOwn& ring) { return K::looks_up ? RingOwn(uint32_t(ptx::again(int(ring.buffer(0)))), 0) : ring; };
        float s[BN / 2], dp[BN / 2];
        uint32_t weights[BN / 16][4], ds[BN / 16][4];
        k.await_full(turn);
        q.await_full(visit);
        // Written while S is in flight, these accumulators would make ptxas wait for S first (C7517).
        if constexpr (!K::general)
          each_number(dp, own_numbers(visit) + 4 * BN, [](float& x, float delta) {
            x = delta;
            ptx::pin(x);
          });
        multiply_rows<T, D>(s, own(k), turn, q, visit, false);
        v.await_full(turn);
        d_out.await_full(visit);
        multiply_rows<T, D>(dp, own(v), turn, d_out, visit, !K::general);
        if constexpr (K::general) {
          const Terms<true, false> terms(p, w.s, w.b, h);
          const Place at = place_again(w.j0, t * BN);
          const uint32_t numbers_at = numbers_of(visit) + 4 * uint32_t(at.column - t * BN);
          std::conditional_t<K::looks_up, SeenPairs<BN>, Pairs<BN / 2>> seen;
          Pairs<BN / 2> kept;
          if constexpr (K::looks_up) {
            seen = lookups.seen(visit);
          } else if (cut) {
            const Work again = once_more();
            const Range bounds[2] = {again.unhidden_bounds(p, at.row_of(0)), again.unhidden_bounds(p, at.row_of(2))};
            seen = Pairs<BN / 2>::template of<kPiece>(at, [&](const Place& place) { return within<kPiece>(place, bounds); });
          }
          if (p.drop_threshold)
            kept = Pairs<BN / 2>::template of<kPiece>(at, [&](const Place& place) { return terms.template kept<kPiece>(place); });
          if (!PT_FAULT(scores_not_awaited_over_keys)) ptx::wgmma_wait<1>();
          in_pieces<kPiece>(s, at, [&](float (&x)[kPiece][4], const Place& place, int c) {
            float slope[kPiece][4];
            terms.apply(x, slope, place, kAllColumns);
            if constexpr (K::looks_up) lookups.add(p, x, visit, c, seen);
            PT_UNROLL
            for (int n = 0; n < kPiece; ++n) {
              float top[2];
              ptx::ld_shared_v2_f32(numbers_at + 32 * (PT_FAULT(maxima_of_the_first_columns) ? n : c + n), top[0], top[1]);
              if constexpr (K::looks_up) {
                float log[2];
                ptx::ld_shared_v2_f32(numbers_at + 8 * BN + 32 * (c + n), log[0], log[1]);
                PT_UNROLL
                for (int r = 0; r < 4; ++r)
                  x[n][r] = weight_of(x[n][r], top[r % 2], PT_FAULT(the_log_of_the_sum_forgotten_over_keys) ? 0.0f : log[r % 2]);
              } else {
                PT_UNROLL
                for (int r = 0; r < 4; ++r) x[n][r] = weight_of<T>(x[n][r], top[r % 2]);
              }
            }
            if (hides) {
              const auto bits = seen.again();
              each<kPiece>([&](int n, int r, uint32_t) { x[n][r] = bits.has(4 * (c + n) + r) ? x[n][r] : 0.0f; });
            }
            // P times softcap's slope, which dS is made from, and P as dropout leaves it.
            if (p.softcap != 0.0f)
              each<kPiece>([&](int n, int r, uint32_t) {
                slope[n][r] = (PT_FAULT(softcap_slope_forgotten_over_keys) ? 1.0f : slope[n][r]) * x[n][r];
              });
            else each<kPiece>([&](int n, int r, uint32_t) { slope[n][r] = x[n][r]; });
            pack_piece<T>(ds[c / kPiece], slope);
            if (p.drop_threshold)
              each<kPiece>([&](int n, int r, uint32_t) {
                x[n][r] = PT_FAULT(dropped_weights_kept_over_keys) || kept.has(4 * (c + n) + r) ? x[n][r] : 0.0f;
              });
            pack_piece<T>(weights[c / kPiece], x);
          });
          ptx::wgmma_wait<0>();
          if (p.drop_threshold) {
            PT_UNROLL
            for (int i = 0; i < BN / 2; ++i) dp[i] = PT_FAULT(dp_of_dropped_weights_over_keys) || kept.has(i) ? dp[i] * p.keep_scale : 0.0f;
          }
          each_number(dp, numbers_at + 4 * BN, [](float& x, float delta) { x = less_delta<T>(x, -delta); });
          if (hides) keep_seen(dp, seen.again());
          pack_gradients<T>(ds, ds, dp);
        } else {
          [[maybe_unused]] SeenPairs<BN> seen;
          if constexpr (K::looks_up) seen = lookups.seen(visit);
          if (!PT_FAULT(scores_not_awaited_over_keys)) ptx::wgmma_wait<1>();
          each_number(s, own_numbers(visit), [&](float& x, float top) { x = ptx::exp2(ptx::fma_rn(x, unit, -top)); });
          if constexpr (!K::looks_up) {
            if (!PT_FAULT(scores_not_hidden)) hide(s);
          } else if (!PT_FAULT(scores_not_hidden_by_bits_over_keys)) {
            keep_seen(s, seen.again());
          }
          pack_recomputed<T>(weights, s);
          ptx::wgmma_wait<0>();
          // Elsewhere dP of hidden pairs meets weights of zero; not finite, it would raise a flag.
          if constexpr (K::looks_up) {
            if (cut) keep_seen(dp, seen.again());
          } else {
            hide(dp);
          }
          if constexpr (kWeightBits<T> != 0) each_element(dp, 0, [](float& x, int, int) { x *= kWeightUnit<T>; });
          pack_gradients<T>(ds, weights, dp);
        }
        multiply_weights<T>(dv, weights, d_out, visit);
        multiply_weights<T>(dk, ds, q, visit);
        if (!PT_FAULT(products_not_awaited)) ptx::wgmma_wait<0>();
        // A lane speaks for its warp's loads of numbers too.
        if (!PT_FAULT(numbers_released_too_early)) ptx::syncwarp();
        if (lane_id() == 0) q.release(visit), d_out.release(visit);
      }
      if (t != last) {
        if (!PT_FAULT(keys_kept_for_the_next_tile)) release_products(k, turn);
        release_products(v, turn++);
      }
      finish(n, dk, dv);
    });
  }

  // Reads what it needs of the sequence once more: kept through the loop, it would cost registers there.
  PT_DEVICE void finish(int n, const float (&dk)[D / 2], const float (&dv)[D / 2], bool keys = true, bool values = true) const {
    const AttentionBackward& g = args.g;
    const AttentionProblem& p = g.p;
    const Work w(p, args.order, ptx::again(n));
    const int written = p.cu_keys ? w.s.num_k : p.num_keys;
    float dk_factor[2], dv_factor[2];
    int64_t index[2];
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int j = w.j0 + key_row(r);
      const bool nobody = (PT_FAULT(results_of_hidden_keys) ? w.own_bounds(p, r) : w.bounds(p, j)).empty();
      dk_factor[r] = nobody ? 0.0f : PT_FAULT(the_scale_of_d_key) ? 1.0f : p.scale;
      const float unit = PT_FAULT(the_unit_of_d_value_weights) ? 1.0f : kWeightUnit<T>;
      dv_factor[r] = nobody ? 0.0f : !PT_FAULT(kept_values_of_d_value_not_scaled) && K::general ? p.keep_scale * unit : unit;
      index[r] = (!K::general || j >= 0) && j < written ? w.s.row_k + j : -1;
    }
    if constexpr (K::looks_up) {
      const bool unflagged = PT_FAULT(no_flag_raised_over_keys) || (PT_FAULT(no_flag_raised_of_wide_keys) && D == 256);
      const int head = PT_FAULT(the_flag_of_another_head_over_keys) ? 0 : w.hk;
      const int first = PT_FAULT(the_flag_of_the_first_keys) ? 0 : w.j0 - Work::first_key(p);
      if (!unflagged && ((keys && g.dk.data && not_finite(dk, dk_factor)) || (values && g.dv.data && not_finite(dv, dv_factor))))
        raise(g.redo, int64_t(w.b) * (p.heads / p.group) + head, first);
    }
    if (keys && g.dk.data) store_wide<T>(g.dk, w.b, w.hk, dk, dk_factor, index);
    if (values && g.dv.data) store_wide<T>(g.dv, w.b, w.hk, dv, dv_factor, index);
  }

  static constexpr uint32_t kOwn = RingOwn::kBufferBytes, kStream = RingStream::kBufferBytes, kNumbersAt = 2 * kOwn + 2 * kStream;
  static constexpr uint32_t kBarriers = kNumbersAt + kTile.stages * kNumbers;
  static constexpr uint32_t kEnd = kBarriers + 2 * (RingOwn::kBarrierBytes + RingStream::kBarrierBytes);

  static PT_DEVICE Sm90KeysBlock at(const Sm90Backward& args, uint32_t base) {
    const uint32_t own_bars = base + kBarriers, stream_bars = own_bars + 2 * RingOwn::kBarrierBytes;
    return {args,
            RingOwn(base, own_bars),
            RingOwn(base + kOwn, own_bars + RingOwn::kBarrierBytes),
            RingQueries(base + 2 * kOwn, stream_bars),
            RingStream(base + 2 * kOwn + kStream, stream_bars + RingStream::kBarrierBytes),
            base + kNumbersAt,
            Lookups(base + kEnd)};
  }

  static PT_DEVICE void run(const Sm90Backward& args) {
    static_assert(kSm90Slack + kEnd + Lookups::kBytes == sm90_keys_smem(kTile, K::general, K::looks_up));
    run_block(at(args, align_to_atom(ptx::dynamic_smem())));
  }
};

}  // namespace pt::cuda
