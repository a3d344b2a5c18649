// Attention forward on sm_90a: as fwd.cuh, with products by warpgroups (wgmma) and copies by TMA.
//
// After Shah et al., "FlashAttention-3" (2024). A block has a producer warpgroup, one thread of which loads Q and rings of K and V, and
// consumer warpgroups of 64 queries each. A consumer's scores of the next tile are computed while its weights are multiplied by this
// tile's values; P stays in registers. Keys are visited from last to first, so that what bounds cut comes first.
#pragma once

#include <type_traits>

#include "cuda/attention/redo.cuh"
#include "cuda/attention/sm90_lookups.cuh"

namespace pt::cuda {

struct Sm90Forward {
  ptx::TensorMap q, k, v;  // (D, rows, heads, sequences)
  AttentionForward f;
  TileOrder order;
};

struct NoLookups {
  PT_DEVICE explicit NoLookups(const AttentionProblem&) {}
};

template <class T, class K>
struct Sm90ForwardBlock {
  static constexpr Sm90Tile kTile = sm90_forward_tile(K::head_dim, !K::plain);
  static constexpr int D = K::head_dim, BM = kTile.rows(), BN = kTile.streamed;
  static constexpr int kConsumers = kTile.consumers;
  static constexpr int kPiece = K::looks_up ? Lookups<D, BN>::kPiece : 8;  // eights of columns that terms are applied to at a time
  using RingQ = Ring<1, BM, kTile.panels()>;
  using RingKv = Ring<kTile.stages, BN, kTile.panels()>;

  const Sm90Forward& args;
  RingQ q;
  RingKv k, v;

  using Work = QueryWork<BM, BN>;

  PT_DEVICE void begin() const {
    ptx::prefetch_tensor_map(args.q);
    ptx::prefetch_tensor_map(args.k);
    ptx::prefetch_tensor_map(args.v);
    q.init(1, kConsumers, "q_full", "q_empty");
    k.init(1, kConsumers, "k_full", "k_empty");
    v.init(1, kConsumers, "v_full", "v_empty");
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x != 0) return;
    const AttentionProblem& p = args.f.p;
    int visit = 0, turn = 0;
    for_each_tile(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const int batch = p.cu_queries ? 0 : w.b, row = int(w.s.row_k) + w.origin;
      for (int t = w.range.last - 1; t >= w.range.first; --t, ++visit) {
        k.load(visit, args.k, row + t * BN, w.h / p.group, batch);
        if (t == w.range.last - 1) q.load(turn++, args.q, int(w.s.row_q) + w.i0, w.h, batch);
        v.load(visit, args.v, row + t * BN, PT_FAULT(values_of_another_head) ? 0 : w.h / p.group, batch);
      }
    });
  }

  // With ping_pong: whose turn it is to start products.
  static PT_DEVICE void await_turn() {
    if constexpr (!kTile.ping_pong) return;
    if (consumer() == 0) ptx::bar_sync(1, 256);
    else ptx::bar_sync(2, 256);
  }
  static PT_DEVICE void pass_turn() {
    if constexpr (!kTile.ping_pong) return;
    if (consumer() == 0) ptx::bar_arrive(2, 256);
    else ptx::bar_arrive(1, 256);
  }

  struct Rows {  // the lane's two
    float max[2] = {minus_infinity(), minus_infinity()};
    float sum[2] = {0.0f, 0.0f};  // this lane's share
    float decay[2];               // what older sums and outputs must be multiplied by
  };

  // s becomes the weights, relative to the rows' maxima.
  static PT_DEVICE void softmax(float (&s)[BN / 2], Rows& rows, float unit) {
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      float top = rows.max[r];
      PT_UNROLL
      for (int j = 0; j < BN / 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      top = row_max(top);
      const float safe = top == minus_infinity() ? 0.0f : top;
      rows.decay[r] = ptx::exp2((rows.max[r] - safe) * unit);
      rows.max[r] = top;
      float sum = PT_FAULT(no_decay_of_the_sums) ? rows.sum[r] : rows.sum[r] * rows.decay[r];
      PT_UNROLL
      for (int j = 0; j < BN / 8; ++j) {
        PT_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          // Folding the scale is one instruction less; where terms may be as large as finfo.max the difference comes first.
          x = ptx::exp2(K::general ? (x - safe) * unit : ptx::fma_rn(x, unit, -safe * unit));
          sum += x;
        }
      }
      rows.sum[r] = sum;
    }
  }

  // Reads what it needs of the sequence once more: kept through the loop, it would cost registers there.
  PT_DEVICE void finish(int n, const float (&o)[D / 2], const Rows& rows) const {
    const AttentionForward& f = args.f;
    const AttentionProblem& p = f.p;
    const Work w(p, args.order, ptx::again(n));
    const int written = p.cu_queries ? w.s.num_q : p.num_queries;
    float factor[2];
    int64_t index[2];
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int i = w.i0 + own_row(r);
      const float total = row_sum(rows.sum[r]), sum = i < w.s.num_q ? total : 0.0f;
      const bool dead = sum == 0.0f;
      factor[r] = dead ? 0.0f : ptx::div_rn(p.keep_scale, sum);
      index[r] = i < written ? w.s.row_q + i : -1;
      if (lane_id() % 4 != 0 || index[r] < 0) continue;
      const float top = PT_FAULT(lse_without_its_maximums_scale) || K::general ? rows.max[r] : rows.max[r] * p.scale;
      store_one(f.lse + number_at(f.at, w.b, w.h, index[r]), dead ? minus_infinity() : ptx::fma_rn(ptx::log2(sum), kLn2, top));
    }
    if (!PT_FAULT(no_flag_raised) && K::looks_up && (PT_FAULT(a_flag_raised_for_nothing) || not_finite(o, factor)))
      raise(f.redo, int64_t(w.b) * p.heads + (PT_FAULT(the_flag_of_another_head_forward) ? 0 : w.h), w.i0);
    store_wide<T>(f.out, w.b, w.h, o, factor, index);
  }

  // Kept in registers from visit to visit, descriptors of all steps of wide heads would not leave enough.
  static PT_DEVICE RingQ own(const RingQ& ring) { return D > 128 ? RingQ(uint32_t(ptx::again(int(ring.buffer(0)))), 0) : ring; }

  PT_DEVICE void consume() const {
    static_assert(!kTile.ping_pong || kConsumers == 2);
    const AttentionProblem& p = args.f.p;
    const float unit = K::general ? kLog2e : p.scale * kLog2e;  // of scores, in base 2
    int visit = 0, turn = 0;
    if (!PT_FAULT(the_first_turn_not_passed) && consumer() == 1) pass_turn();
    for_each_tile(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const auto row = [&] { return ptx::again(w.i0) + warp_row(); };  // not kept: a register
      const Terms<false, false> terms(p, w.s, w.b, w.h);
      const Range whole = w.whole(p), keep = w.kept(p);
      float s[BN / 2], o[D / 2];
      uint32_t weights[BN / 16][4];
      Rows rows;
      [[maybe_unused]] std::conditional_t<K::looks_up, Lookups<D, BN>, NoLookups> lookups(p);
      PT_UNROLL
      for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;

      // Keys between the bounds that padding hides: found again where they are needed. Lookups have them as pairs.
      const bool holes = !K::looks_up && whole.lo == kUnbounded;
      const auto key_words = [&] {
        return KeyWords(p, PT_FAULT(hidden_keys_of_the_first_sequence) ? 0 : place_of(args.order, ptx::again(n)).head / p.heads);
      };
      const auto clear = [&](int first) {
        if (!PT_FAULT(values_in_holes_kept) && holes) clear_hidden_rows<kConsumers>(v, visit, first, keep, key_words());
        else clear_rows<kConsumers>(v, visit, first, keep);
      };
      const auto look_up = [&](int first) {
        if constexpr (K::looks_up) { lookups.load(w, first, K::general); }
      };
      // Scores to weights; `first` is the tile's first key.
      const auto weigh = [&](int first) {
        if constexpr (K::general)
          in_pieces<kPiece>(s, row(), first, [&](float (&x)[kPiece][4], const Place& place, int c) {
            float unused[kPiece][4];
            terms.apply(x, unused, place, kAllColumns);
            if constexpr (K::looks_up) lookups.add(w, x, first, c);
          });
        if constexpr (K::looks_up) {
          lookups.hide(s);
        } else if (first < whole.lo || first + BN > whole.hi) {
          const auto hide_unseen = [&](const Work& of) {
            const Range bounds[2] = {of.own_bounds(p, 0), of.own_bounds(p, 1)};
            each_element(s, first, [&](float& x, int r, int column) { x = bounds[r].has(column) ? x : minus_infinity(); });
          };
          // Registers are scarce: with terms what bounds need is worked out again.
          if constexpr (K::general) hide_unseen(Work(p, args.order, ptx::again(n)));
          else hide_unseen(w);
          if (!PT_FAULT(holes_seen) && holes) hide_keys(s, first, key_words(), minus_infinity());
        }
        softmax(s, rows, unit);
      };
      const auto pack = [&](int first) {
        if constexpr (K::general)
          if (p.drop_threshold)
            in_pieces<8>(s, row(), first, [&](float (&x)[8][4], const Place& place, int) {
              const uint32_t kept = terms.template kept<8>(place);
              each<8>([&](int n, int r, uint32_t bit) { x[n][r] = PT_FAULT(what_dropout_drops_kept) || kept & bit ? x[n][r] : 0.0f; });
            });
        pack_weights<T>(weights, s);
      };

      if (w.range.count() > 0) {
        int first = w.origin + (w.range.last - 1) * BN;
        if (!PT_FAULT(queries_not_awaited)) q.await_full(turn);
        k.await_full(visit);
        await_turn();
        multiply_rows<T, D>(s, own(q), turn, k, visit, false);
        pass_turn();
        if (!PT_FAULT(scores_not_hidden_in_the_first_tile)) look_up(first);
        ptx::wgmma_wait<0>();
        release_products(k, visit);
        if (w.range.count() == 1) release_products(q, turn);
        weigh(first);
        pack(first);

        for (int t = w.range.last - 2; t >= w.range.first; --t, ++visit) {
          clear(first);
          first -= BN;
          if (!PT_FAULT(keys_not_awaited)) k.await_full(visit + 1);
          await_turn();
          multiply_rows<T, D>(s, own(q), turn, k, visit + 1, false);
          if (!PT_FAULT(values_not_awaited)) v.await_full(visit);
          multiply_weights<T>(o, weights, v, visit);
          if (!PT_FAULT(a_turn_not_passed)) pass_turn();
          if (!PT_FAULT(bits_of_the_tile_before) || t % 2) look_up(first);
          if (!PT_FAULT(scores_not_awaited)) ptx::wgmma_wait<1>();
          release_products(k, visit + 1);
          if (PT_FAULT(queries_released_at_every_visit) || t == w.range.first) release_products(q, turn);
          weigh(first);
          if (PT_FAULT(weights_written_under_their_product)) pack(first);
          if (PT_FAULT(values_released_too_early)) release_products(v, visit);
          ptx::wgmma_wait<0>();
          if (!PT_FAULT(values_released_too_early)) release_products(v, visit);
          PT_UNROLL
          for (int i = 0; i < D / 2; ++i) o[i] *= PT_FAULT(no_decay_of_the_outputs) ? 1.0f : rows.decay[i / 2 % 2];
          pack(first);
        }

        clear(first);
        v.await_full(visit);
        multiply_weights<T>(o, weights, v, visit);
        ptx::wgmma_wait<0>();
        release_products(v, visit);
        ++visit, ++turn;
      }
      finish(n, o, rows);
    });
  }

  static PT_DEVICE void run(const Sm90Forward& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem());
    constexpr uint32_t kKeys = RingQ::kBufferBytes, kValues = kKeys + RingKv::kBufferBytes, kBarriers = kValues + RingKv::kBufferBytes;
    static_assert(kSm90Slack + kBarriers + RingQ::kBarrierBytes + 2 * RingKv::kBarrierBytes == sm90_forward_smem(kTile));
    const uint32_t bars = base + kBarriers;
    const Sm90ForwardBlock block{args, RingQ(base, bars), RingKv(base + kKeys, bars + RingQ::kBarrierBytes),
                                 RingKv(base + kValues, bars + RingQ::kBarrierBytes + RingKv::kBarrierBytes)};
    run_block(block);
  }
};

template <class T, class K>
__global__ void __launch_bounds__(sm90_forward_tile(K::head_dim, !K::plain).threads(), 1)
    sm90_attention_fwd_kernel([[maybe_unused]] const __grid_constant__ Sm90Forward args) {
#if PT_SM90A
  Sm90ForwardBlock<T, K>::run(args);
#endif
}

}  // namespace pt::cuda
