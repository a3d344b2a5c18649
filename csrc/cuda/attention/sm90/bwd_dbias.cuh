// SPDX-License-Identifier: Apache-2.0
// Attention backward on sm_90a, masks and biases: as sm80/bwd_dbias.cuh with wgmma and TMA, if the
// gradient is not summed over queries or keys.
//
// Recomputes scores and dP, two gemms more than the seven of the other kernels. bwd_dq also has dS,
// but to sum it over sequences and heads it would read and write a float32 tile per iteration (64
// KB, next to 32 KB of operands at head size 64), in an order between blocks.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/attention/sm90/mask_loader.cuh"

namespace pt::cuda {

struct Sm90Dbias : Sm90Operands {
  AttentionDbias f;
  TileOrder order;  // order of the gradient's parts
};

template <class T, class K>
struct Sm90BwdDbiasBlock {
  static constexpr Sm90Tile kTile = sm90_bwd_dbias_tile(K::head_dim);
  static constexpr int D = K::head_dim, BM = kTile.rows(), BN = kTile.streamed,
                       kSpan = kSm90DbiasSpan;
  static constexpr int kConsumers = kTile.consumers;
  using RingOwn = Ring<sm90_bwd_dbias_own_stages(D), BM, kTile.panels()>;
  using RingKeys = Ring<kTile.stages, BN, kTile.panels()>;
  using RingValues = Ring<kTile.second_stages(), BN, kTile.panels()>;
  using Found = MaskLoader<64, BN>;  // free registers: no accumulators of head size D here
  using Sums = float[kSpan][BN / 2];

  const Sm90Dbias& args;
  RingOwn q, d_out;
  RingKeys k;
  RingValues v;

  using Work = QueryWork<BM, BN>;

  PT_DEVICE const AttentionProblem& problem() const { return args.f.b.p; }

  PT_DEVICE void begin() const {
    args.prefetch();
    q.init(1, kConsumers, "q_full", "q_empty");
    d_out.init(1, kConsumers, "d_out_full", "d_out_empty");
    k.init(1, kConsumers, "k_full", "k_empty");
    v.init(1, kConsumers, "v_full", "v_empty");
  }

  PT_DEVICE DbiasPart part(int n) const {
    const AttentionProblem& p = problem();
    return DbiasPart(args.f, (p.num_queries + BM - 1) / BM,
                     (p.num_keys - key_origin(p) + kSpan * BN - 1) / (kSpan * BN), n);
  }

  // Call f(w, tiles) for the part's queries in each sequence and head that it sums over, with the
  // part's KV tiles that they see. Not called if there are none.
  template <class F>
  PT_DEVICE void for_each_head(const DbiasPart& part, F f) const {
    const AttentionProblem& p = problem();
    for (int b = part.of[0].lo; b < part.of[0].hi; ++b)
      for (int h = part.of[1].lo; h < part.of[1].hi; ++h) {
        const Work w(p, TilePlace{b * p.heads + h, part.of[2].lo});
        const Range tiles{max(w.range.first, kSpan * part.of[3].lo),
                          min(w.range.last, kSpan * part.of[3].hi)};
        if (!tiles.empty()) f(w, tiles);
      }
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x != 0) return;
    const AttentionProblem& p = problem();
    int stream_iter = 0, tile_iter = 0;
    for_each_tile(args.order, [&](int n) {
      for_each_head(part(n), [&](const Work& w, const Range& tiles) {
        q.load(tile_iter, args.q, w.i0, w.h, w.b);
        for (int t = tiles.lo; t < tiles.hi; ++t, ++stream_iter) {
          k.load(stream_iter, args.k, w.origin + t * BN, w.h / p.group, w.b);
          if (t == tiles.lo) d_out.load(tile_iter++, args.d_out, w.i0, w.h, w.b);
          v.load(stream_iter, args.v, w.origin + t * BN, w.h / p.group, w.b);
        }
      });
    });
  }

  PT_DEVICE void consume() const {
    int stream_iter = 0, tile_iter = 0;
    for_each_tile(args.order, [&](int n) {
      const DbiasPart own = part(n);
      Sums sums;
      PT_UNROLL
      for (int i = 0; i < kSpan * BN / 2; ++i) sums[i / (BN / 2)][i % (BN / 2)] = 0.0f;
      for_each_head(own, [&](const Work& w, const Range& tiles) {
        RowStats row_stats[2];
        PT_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int i = w.i0 + own_row(r);
          row_stats[r] =
              read_row_stats(args.f.b, row_stat_at(args.f.b.at, w.b, w.h, i), i < w.s.num_q);
        }
        q.consumer_wait(tile_iter);
        d_out.consumer_wait(tile_iter);
        PT_NO_UNROLL
        for (int t = kSpan * own.of[3].lo; t < kSpan * own.of[3].hi; ++t) {
          if (tiles.has(t)) add(w, row_stats, w.origin + t * BN, tile_iter, stream_iter++, sums[0]);
          turn_around(sums);
        }
        consumer_release_warpgroup(q, tile_iter);
        consumer_release_warpgroup(d_out, tile_iter++);
      });
      store(n, sums);
    });
  }

  // Move the next tile's sums to index 0: a variable index would put them into local memory.
  static PT_DEVICE void turn_around(Sums& sums) {
    PT_UNROLL
    for (int i = 0; i < BN / 2; ++i) {
      const float first = sums[0][i];
      PT_UNROLL
      for (int t = 1; t < kSpan; ++t) sums[t - 1][i] = sums[t][i];
      sums[kSpan - 1][i] = first;
    }
  }

  // Recompute descriptors: held across iterations, those of all steps would use too many registers.
  static PT_DEVICE RingOwn own(const RingOwn& ring) {
    return RingOwn(uint32_t(ptx::opaque(int(ring.buffer(0)))), 0);
  }

  // sum += dS of the keys from `first` on.
  PT_DEVICE void add(const Work& w, const RowStats (&row_stats)[2], int first, int tile_iter,
                     int stream_iter, float (&sum)[BN / 2]) const {
    const AttentionProblem& p = problem();
    float s[BN / 2], dp[BN / 2];
    k.consumer_wait(stream_iter);
    multiply_rows<T, D>(s, own(q), tile_iter, k, stream_iter, false);
    v.consumer_wait(stream_iter);
    multiply_rows<T, D>(dp, own(d_out), tile_iter, v, stream_iter, false);
    const Place at = place_again(w.i0, first);
    const ScoreMod<false, false> score_mod(p, w.s, w.b, w.h);
    Found found(p);
    found.start(w, {kUnbounded, 0}, first);
    if (p.mask_bits.queries.data) found.hide_bits([&](int r) { return found.words(w, first, r); });
    found.load(w, first, true);
    Pairs<BN / 2> keep_mask;
    if (p.drop_threshold) keep_mask = kept_pairs<BN / 2, 4>(score_mod, at);
    ptx::wgmma_wait<1>();
    consumer_release_warpgroup(k, stream_iter);
    in_pieces<Found::kPiece>(s, at, [&](float (&x)[Found::kPiece][4], const Place& place, int c) {
      float unused[Found::kPiece][4];
      score_mod.apply(x, unused, place, kAllColumns);
      found.add(w, x, first, c);
    });
    found.hide(s);
    // Weights, and -1 for hidden pairs.
    each_element(s, 0, [&](float& x, int r, int) {
      x = x == minus_infinity() ? -1.0f : weight_of(x, row_stats[r].row_max, row_stats[r].log2_sum);
    });
    ptx::wgmma_wait<0>();
    consumer_release_warpgroup(v, stream_iter);
    if (p.drop_threshold) {
      PT_UNROLL
      for (int i = 0; i < BN / 2; ++i) dp[i] = keep_mask.has(i) ? dp[i] * p.keep_scale : 0.0f;
    }
    PT_UNROLL
    for (int i = 0; i < BN / 2; ++i)
      sum[i] += s[i] < 0.0f ? 0.0f : s[i] * (dp[i] - row_stats[i / 2 % 2].delta);
  }

  PT_DEVICE void store(int n, const Sums& sums) const {
    const AttentionDbias& f = args.f;
    const AttentionProblem& p = problem();
    const DbiasPart own = part(ptx::opaque(n));
    const int key = key_origin(p) + own.of[3].lo * kSpan * BN + 2 * (lane_id() % 4);
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int i = own.of[2].lo * BM + own_row(r);
      if (i >= p.num_queries) continue;
      with_type(f.dtype, [&](auto t) {
        auto* const row = static_cast<decltype(t)*>(f.data) + own.at(f, i, 0);
        PT_UNROLL
        for (int c = 0; c < kSpan * BN; c += 8) {
          const float (&x)[BN / 2] = sums[c / BN];
          const int j = key + c, at = c % BN / 2 + 2 * r;
          if (f.pairs) {
            if (uint32_t(j) < uint32_t(p.num_keys)) store_pair(row + j, x[at], x[at + 1]);
          } else {
            PT_UNROLL
            for (int e = 0; e < 2; ++e)
              if (uint32_t(j + e) < uint32_t(p.num_keys)) store_one(row + j + e, x[at + e]);
          }
        }
      });
    }
  }

  static PT_DEVICE void run(const Sm90Dbias& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem());
    constexpr uint32_t kKeysAt = 2 * RingOwn::kBufferBytes,
                       kValuesAt = kKeysAt + RingKeys::kBufferBytes;
    constexpr uint32_t kBarriers = kValuesAt + RingValues::kBufferBytes,
                       kStreamBarriers = kBarriers + 2 * RingOwn::kBarrierBytes;
    static_assert(kSm90Slack + kStreamBarriers + RingKeys::kBarrierBytes +
                      RingValues::kBarrierBytes ==
                  sm90_bwd_dbias_smem(kTile));
    const Sm90BwdDbiasBlock block{
        args, RingOwn(base, base + kBarriers),
        RingOwn(base + RingOwn::kBufferBytes, base + kBarriers + RingOwn::kBarrierBytes),
        RingKeys(base + kKeysAt, base + kStreamBarriers),
        RingValues(base + kValuesAt, base + kStreamBarriers + RingKeys::kBarrierBytes)};
    run_block(block);
  }
};

template <class T, class K>
__global__ void __launch_bounds__(sm90_bwd_dbias_tile(K::head_dim).threads(), 1)
    sm90_attention_bwd_dbias_kernel([[maybe_unused]] const __grid_constant__ Sm90Dbias args) {
#if PT_SM90A
  Sm90BwdDbiasBlock<T, K>::run(args);
#endif
}

template <class T>
void sm90_attention_bwd_dbias_as(const AttentionDbias& f, const Sm90Plan& plan, void* stream) {
  const Sm90Dbias args = {map_operands(f.b, plan.tile.rows(), plan.tile.streamed), f, plan.order};
  const auto run = [&](auto kind) {
    launch(sm90_attention_bwd_dbias_kernel<T, decltype(kind)>, dim3(unsigned(plan.blocks)),
           plan.tile.threads(), plan.smem_bytes, stream, args);
  };
  if (plan.head_class == 64) run(Hopper<64, true, true>{});
  else if (plan.head_class == 128) run(Hopper<128, true, true>{});
  else run(Hopper<256, true, true>{});
}

}  // namespace pt::cuda
