// Attention backward on sm_90a, the pass over queries: d_query of a tile of queries. As bwd_queries.cuh, with products by warpgroups and
// copies by TMA; for problems of nothing but bounds.
//
// Scores and dP are computed a second time, seven products instead of five, but nothing is added up across blocks: the result is
// reproducible without any order between them. The two products with the next keys start behind dQ += dS K of these.
#pragma once

#include "cuda/attention/sm90_bwd_tile.cuh"

namespace pt::cuda {

template <class T, class K>
struct Sm90QueriesBlock {
  static constexpr Sm90Tile kTile = sm90_queries_tile(K::head_dim);
  static constexpr int D = K::head_dim, BM = kTile.rows(), BN = kTile.streamed;
  static constexpr int kConsumers = kTile.consumers;
  using RingOwn = Ring<1, BM, kTile.panels()>;
  using RingStream = Ring<kTile.stages, BN, kTile.panels()>;

  const Sm90Backward& args;
  RingOwn q, d_out;
  RingStream k, v;

  using Work = QueryWork<BM, BN>;  // nothing is dropped: its tiles may begin anywhere

  PT_DEVICE void begin() const {
    for (const ptx::TensorMap* map : {&args.q, &args.k, &args.v, &args.d_out}) ptx::prefetch_tensor_map(*map);
    q.init(1, kConsumers, "q_full", "q_empty");
    d_out.init(1, kConsumers, "d_out_full", "d_out_empty");
    k.init(1, kConsumers, "k_full", "k_empty");
    v.init(1, kConsumers, "v_full", "v_empty");
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x != 0) return;
    const AttentionProblem& p = args.g.p;
    int visit = 0, turn = 0;
    for_each_tile(args.order, [&](int n) {
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

  PT_DEVICE void consume() const {
    const AttentionBackward& g = args.g;
    const AttentionProblem& p = g.p;
    const float unit = p.scale * kLog2e;
    int visit = 0, turn = 0;
    for_each_tile(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const Range whole = w.whole(p), keep = w.kept(p);
      float top[2], delta[2];
      PT_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int i = w.i0 + own_row(r);
        const RowNumbers numbers = row_numbers(g, number_at(g.at, w.b, w.h, w.s.row_q + i), i < w.s.num_q);
        top[r] = numbers.top * kLog2e, delta[r] = numbers.delta;
      }
      float s[BN / 2], dp[BN / 2], dq[D / 2];
      uint32_t weights[BN / 16][4];  // P, then dS
      PT_UNROLL
      for (int i = 0; i < D / 2; ++i) dq[i] = 0.0f;

      const auto start = [&](int first) {
        clear_rows<kConsumers>(k, visit, first, keep);
        k.await_full(visit);
        multiply_rows<T, D>(s, q, turn, k, visit, false);
        v.await_full(visit);
        multiply_rows<T, D>(dp, d_out, turn, v, visit, false);
      };
      const auto hide = [&](float (&x)[BN / 2], int first) {
        if (first >= whole.lo && first + BN <= whole.hi) return;
        const Range bounds[2] = {w.own_bounds(p, 0), w.own_bounds(p, 1)};
        each_element(x, first, [&](float& e, int r, int column) { e = bounds[r].has(column) ? e : 0.0f; });
      };
      const auto weigh = [&](int first) {
        each_element(s, 0, [&](float& x, int r, int) { x = ptx::exp2(ptx::fma_rn(x, unit, -top[r])); });
        hide(s, first);
        pack_weights<T>(weights, s);
      };
      const auto differentiate = [&](int first) {
        each_element(dp, 0, [&](float& x, int r, int) { x -= delta[r]; });
        hide(dp, first);
        pack_gradients<T>(weights, weights, dp);
      };

      if (w.range.count() > 0) {
        int first = w.origin + (w.range.last - 1) * BN;
        q.await_full(turn);
        d_out.await_full(turn);
        start(first);
        ptx::wgmma_wait<1>();
        weigh(first);
        ptx::wgmma_wait<0>();
        release_products(v, visit);
        differentiate(first);
        for (int t = w.range.last - 2; t >= w.range.first; --t) {
          multiply_weights<T>(dq, weights, k, visit++);
          first -= BN;
          start(first);
          ptx::wgmma_wait<1>();
          release_products(k, visit - 1);
          weigh(first);
          ptx::wgmma_wait<0>();
          release_products(v, visit);
          differentiate(first);
        }
        release_products(q, turn);
        release_products(d_out, turn++);
        multiply_weights<T>(dq, weights, k, visit);
        ptx::wgmma_wait<0>();
        release_products(k, visit++);
      }
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
      factor[r] = w.own_bounds(p, r).empty() ? 0.0f : p.scale;
      index[r] = i < written ? w.s.row_q + i : -1;
    }
    store_wide<T>(args.g.dq, w.b, w.h, dq, factor, index);
  }

  static PT_DEVICE void run(const Sm90Backward& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem());
    constexpr uint32_t kOwn = RingOwn::kBufferBytes, kStream = RingStream::kBufferBytes, kBarriers = 2 * kOwn + 2 * kStream;
    static_assert(kSm90Slack + kBarriers + 2 * (RingOwn::kBarrierBytes + RingStream::kBarrierBytes) == sm90_queries_smem(kTile));
    const uint32_t own_bars = base + kBarriers, stream_bars = own_bars + 2 * RingOwn::kBarrierBytes;
    const Sm90QueriesBlock block{args, RingOwn(base, own_bars), RingOwn(base + kOwn, own_bars + RingOwn::kBarrierBytes),
                                 RingStream(base + 2 * kOwn, stream_bars),
                                 RingStream(base + 2 * kOwn + kStream, stream_bars + RingStream::kBarrierBytes)};
    run_block(block);
  }
};

template <class T, class K>
__global__ void __launch_bounds__(sm90_queries_tile(K::head_dim).threads(), 1)
    sm90_attention_bwd_queries_kernel([[maybe_unused]] const __grid_constant__ Sm90Backward args) {
#if PT_SM90A
  Sm90QueriesBlock<T, K>::run(args);
#endif
}

}  // namespace pt::cuda
