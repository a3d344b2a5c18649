// Attention backward on sm_90a, masks and biases: as bwd_dense.cuh, with products by warpgroups and copies by TMA, where no sum over
// queries or keys is wanted.
//
// Scores and dP are made once more, two products beside the seven of the other passes. The pass over queries has dS too, but to sum it over
// sequences and heads it would read and write a float32 tile at every visit, 64 KB beside 32 KB of operands at head size 64, in an order
// between blocks.
#pragma once

#include "cuda/attention/sm90_bwd_tile.cuh"
#include "cuda/attention/sm90_lookups.cuh"

namespace pt::cuda {

struct Sm90Dense : Sm90Operands {
  AttentionDense f;
  TileOrder order;  // of the gradient's parts, one after the other
};

template <class T, class K>
struct Sm90DenseBlock {
  static constexpr Sm90Tile kTile = sm90_dense_tile(K::head_dim);
  static constexpr int D = K::head_dim, BM = kTile.rows(), BN = kTile.streamed, kSpan = kSm90DenseSpan;
  static constexpr int kConsumers = kTile.consumers;
  using RingOwn = Ring<sm90_dense_own_stages(D), BM, kTile.panels()>;
  using RingKeys = Ring<kTile.stages, BN, kTile.panels()>;
  using RingValues = Ring<kTile.second_stages(), BN, kTile.panels()>;
  using Found = Lookups<64, BN>;  // no sums of head size D take registers here
  using Sums = float[kSpan][BN / 2];

  const Sm90Dense& args;
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

  PT_DEVICE DensePart part(int n) const {
    const AttentionProblem& p = problem();
    return DensePart(args.f, (p.num_queries + BM - 1) / BM, (p.num_keys - key_origin(p) + kSpan * BN - 1) / (kSpan * BN), n);
  }

  // For f(w, tiles): the part's queries in each sequence and head that it is the sum over, and which of the part's tiles of keys they see.
  // None of them: not called.
  template <class F>
  PT_DEVICE void for_each_head(const DensePart& part, F f) const {
    const AttentionProblem& p = problem();
    for (int b = part.of[0].lo; b < part.of[0].hi; ++b)
      for (int h = part.of[1].lo; h < part.of[1].hi; ++h) {
        const Work w(p, TilePlace{b * p.heads + h, part.of[2].lo});
        const Range tiles{most(w.range.first, kSpan * part.of[3].lo), least(w.range.last, kSpan * part.of[3].hi)};
        if (!tiles.empty()) f(w, tiles);
      }
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x != 0) return;
    const AttentionProblem& p = problem();
    int visit = 0, turn = 0;
    for_each_tile(args.order, [&](int n) {
      for_each_head(part(n), [&](const Work& w, const Range& tiles) {
        q.load(turn, args.q, w.i0, w.h, w.b);
        for (int t = tiles.lo; t < tiles.hi; ++t, ++visit) {
          k.load(visit, args.k, w.origin + t * BN, w.h / p.group, w.b);
          if (t == tiles.lo) d_out.load(turn++, args.d_out, w.i0, w.h, w.b);
          v.load(visit, args.v, w.origin + t * BN, w.h / p.group, w.b);
        }
      });
    });
  }

  PT_DEVICE void consume() const {
    int visit = 0, turn = 0;
    for_each_tile(args.order, [&](int n) {
      const DensePart own = part(n);
      Sums sums;
      PT_UNROLL
      for (int i = 0; i < kSpan * BN / 2; ++i) sums[i / (BN / 2)][i % (BN / 2)] = 0.0f;
      for_each_head(own, [&](const Work& w, const Range& tiles) {
        RowNumbers numbers[2];
        PT_UNROLL
        for (int r = 0; r < 2; ++r) {
          const int i = w.i0 + own_row(r);
          numbers[r] = row_numbers(args.f.b, number_at(args.f.b.at, w.b, w.h, i), i < w.s.num_q);
        }
        q.await_full(turn);
        d_out.await_full(turn);
        PT_NO_UNROLL
        for (int t = kSpan * own.of[3].lo; t < kSpan * own.of[3].hi; ++t) {
          if (tiles.has(t)) add(w, numbers, w.origin + t * BN, turn, visit++, sums[0]);
          turn_around(sums);
        }
        release_products(q, turn);
        release_products(d_out, turn++);
      });
      store(n, sums);
    });
  }

  // So that the next tile's sums are the first: an index that is no constant would put them into memory.
  static PT_DEVICE void turn_around(Sums& sums) {
    PT_UNROLL
    for (int i = 0; i < BN / 2; ++i) {
      const float first = sums[0][i];
      PT_UNROLL
      for (int t = 1; t < kSpan; ++t) sums[t - 1][i] = sums[t][i];
      sums[kSpan - 1][i] = first;
    }
  }

  // Kept in registers from visit to visit, descriptors of all steps would not leave enough.
  static PT_DEVICE RingOwn own(const RingOwn& ring) { return RingOwn(uint32_t(ptx::again(int(ring.buffer(0)))), 0); }

  // sum += dS of the keys from `first` on.
  PT_DEVICE void add(const Work& w, const RowNumbers (&numbers)[2], int first, int turn, int visit, float (&sum)[BN / 2]) const {
    const AttentionProblem& p = problem();
    float s[BN / 2], dp[BN / 2];
    k.await_full(visit);
    multiply_rows<T, D>(s, own(q), turn, k, visit, false);
    v.await_full(visit);
    multiply_rows<T, D>(dp, own(d_out), turn, v, visit, false);
    const Place at = place_again(w.i0, first);
    const Terms<false, false> terms(p, w.s, w.b, w.h);
    Found found(p);
    found.load(w, first, true);
    Pairs<BN / 2> kept;
    if (p.drop_threshold) kept = Pairs<BN / 2>::template of<4>(at, [&](const Place& place) { return terms.template kept<4>(place); });
    ptx::wgmma_wait<1>();
    release_products(k, visit);
    in_pieces<Found::kPiece>(s, at, [&](float (&x)[Found::kPiece][4], const Place& place, int c) {
      float unused[Found::kPiece][4];
      terms.apply(x, unused, place, kAllColumns);
      found.add(w, x, first, c);
    });
    found.hide(s);
    // Weights, and -1 where a pair is hidden.
    each_element(s, 0, [&](float& x, int r, int) { x = x == minus_infinity() ? -1.0f : weight_of(x, numbers[r].top, numbers[r].log); });
    ptx::wgmma_wait<0>();
    release_products(v, visit);
    if (p.drop_threshold) {
      PT_UNROLL
      for (int i = 0; i < BN / 2; ++i) dp[i] = kept.has(i) ? dp[i] * p.keep_scale : 0.0f;
    }
    PT_UNROLL
    for (int i = 0; i < BN / 2; ++i) sum[i] += s[i] < 0.0f ? 0.0f : s[i] * (dp[i] - numbers[i / 2 % 2].delta);
  }

  PT_DEVICE void store(int n, const Sums& sums) const {
    const AttentionDense& f = args.f;
    const AttentionProblem& p = problem();
    const DensePart own = part(ptx::again(n));
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

  static PT_DEVICE void run(const Sm90Dense& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem());
    constexpr uint32_t kKeysAt = 2 * RingOwn::kBufferBytes, kValuesAt = kKeysAt + RingKeys::kBufferBytes;
    constexpr uint32_t kBarriers = kValuesAt + RingValues::kBufferBytes, kStreamBarriers = kBarriers + 2 * RingOwn::kBarrierBytes;
    static_assert(kSm90Slack + kStreamBarriers + RingKeys::kBarrierBytes + RingValues::kBarrierBytes == sm90_dense_smem(kTile));
    const Sm90DenseBlock block{
        args, RingOwn(base, base + kBarriers), RingOwn(base + RingOwn::kBufferBytes, base + kBarriers + RingOwn::kBarrierBytes),
        RingKeys(base + kKeysAt, base + kStreamBarriers), RingValues(base + kValuesAt, base + kStreamBarriers + RingKeys::kBarrierBytes)};
    run_block(block);
  }
};

template <class T, class K>
__global__ void __launch_bounds__(sm90_dense_tile(K::head_dim).threads(), 1)
    sm90_attention_bwd_dense_kernel([[maybe_unused]] const __grid_constant__ Sm90Dense args) {
#if PT_SM90A
  Sm90DenseBlock<T, K>::run(args);
#endif
}

}  // namespace pt::cuda
