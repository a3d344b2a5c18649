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
  using Keys::args, Keys::k, Keys::v, Keys::q, Keys::d_out, Keys::own_numbers, Keys::each_number;
  using Keys::kTile, Keys::D, Keys::BM, Keys::BN, Keys::kConsumers;
  using typename Keys::Work, typename Keys::RingOwn, typename Keys::RingStream;
  static constexpr int kSteps = BN / 16;  // operands of a visit's weights
  // One for each stage of Q, and never awaited empty: who has Q of the visit that takes a buffer again knows that the other has released
  // the one before, after it had read the buffer.
  using Exchange = Buffers<kTile.stages, BM * BN * 2>;
  static_assert(kConsumers == 2 && BM == 64 && K::plain);

  Exchange exchange;

  PT_DEVICE void begin() const {
    Keys::begin();
    exchange.init(4, 1, "weights_full", "weights_empty");  // the warps of a consumer
  }

  PT_DEVICE void consume() const {
    if (consumer() == 0) sum<false>(k, q, d_out);
    else sum<true>(v, d_out, q);
  }

  // Where this thread, or in the other consumer the one like it, has operand i.
  PT_DEVICE uint32_t place(int visit, int i) const {
    return exchange.buffer(visit) + uint32_t(i * 128 + ptx::again(int(threadIdx.x)) % 128) * 16;
  }

  PT_DEVICE void send(int visit, const float (&x)[BN / 2]) const {
    uint32_t weights[kSteps][4];
    pack_recomputed<T>(weights, x);
    PT_UNROLL
    for (int i = 0; i < kSteps; ++i)
      ptx::st_shared_v4_f32(place(visit, i), ptx::bits_float(weights[i][0]), ptx::bits_float(weights[i][1]), ptx::bits_float(weights[i][2]),
                            ptx::bits_float(weights[i][3]));
    ptx::syncwarp();
    if (lane_id() == 0) exchange.announce(visit);
  }

  // x becomes P x.
  PT_DEVICE void multiply_received(int visit, float (&x)[BN / 2]) const {
    exchange.await_full(visit);
    PT_UNROLL
    for (int i = 0; i < kSteps; ++i) {
      const ptx::Words4 weights = ptx::ld_shared_v4(place(visit, i));
      PT_UNROLL
      for (int e = 0; e < 8; ++e) x[8 * i + e] *= ptx::widen(T{uint16_t(weights.w[e / 2] >> 16 * (e % 2))});
    }
  }

  // d_value's sums from S = K Q^T and dO, or d_key's from dP = V dO^T and Q: sums of W `right`, with W made from x = `own` `left`^T.
  template <bool OfKeys, class Left, class Right>
  PT_DEVICE void sum(const RingOwn& own, const Left& left, const Right& right) const {
    const AttentionProblem& p = args.g.p;
    const float unit = p.scale * kLog2e;
    int visit = 0, turn = 0;
    for_each_tile(args.order, [&](int n) {
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
      const auto start = [&] {
        t = t == first ? last - 1 : t - 1;
        if (clear) {
          const Range keep = once_more().kept(p);
          clear_rows<kConsumers>(q, visit, t * BN, keep);
          clear_rows<kConsumers>(d_out, visit, t * BN, keep);
        }
        left.await_full(visit);
        // Kept in registers from visit to visit, descriptors of all steps would not leave enough.
        multiply_rows<T, D>(x, RingOwn(uint32_t(ptx::again(int(own.buffer(0)))), 0), 0, left, visit, false);
      };
      // P or dS, of which P is the other consumer's.
      const auto weigh = [&] {
        if constexpr (OfKeys) {
          release_by_warp(left, visit);
          right.await_full(visit);
          each_number(x, own_numbers(visit) + 4 * BN, [](float& e, float delta) { e = (e + delta) * kWeightUnit<T>; });
          multiply_received(visit, x);
        } else {
          each_number(x, own_numbers(visit), [&](float& e, float top) { e = ptx::exp2(ptx::fma_rn(e, unit, -top)); });
        }
        if (t * BN < whole.lo || (t + 1) * BN > whole.hi) {
          const Work again = once_more();
          const Range bounds[2] = {again.own_bounds(p, 0), again.own_bounds(p, 1)};
          each_element(x, t * BN, [&](float& e, int r, int column) { e = bounds[r].has(column) ? e : 0.0f; });
        }
        if constexpr (!OfKeys) {
          release_by_warp(left, visit);
          send(visit, x);
        }
      };

      // Sent words are made while the product before may read its own: as operands they come back, or ptxas takes them for those (C7513).
      const auto take = [&] {
        if constexpr (OfKeys) {
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
          ptx::wgmma_wait<1>();
          weigh();
          ptx::wgmma_wait<0>();
          release_by_warp(right, visit - 1);
          take();
        }
        right.await_full(visit);
        multiply_weights<T>(sums, weights, right, visit);
        ptx::wgmma_wait<0>();
        release_by_warp(right, visit++);
        release_products(k, turn);
        release_products(v, turn++);
      }
      Keys::finish(n, sums, sums, OfKeys, !OfKeys);
    });
  }

  static PT_DEVICE void run(const Sm90Backward& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem());
    constexpr uint32_t kExchangeAt = Keys::kEnd, kBarriers = kExchangeAt + Exchange::kBufferBytes;
    static_assert(kSm90Slack + kBarriers + Exchange::kBarrierBytes == sm90_keys_smem(kTile));
    run_block(Sm90WideKeysBlock{Keys::at(args, base), Exchange(base + kExchangeAt, base + kBarriers)});
  }
};

template <class T, class K>
__global__ void __launch_bounds__(sm90_keys_tile(K::head_dim, K::general, K::looks_up).threads(), 1)
    sm90_attention_bwd_keys_kernel([[maybe_unused]] const __grid_constant__ Sm90Backward args) {
#if PT_SM90A
  std::conditional_t<sm90_keys_tile(K::head_dim, K::general).split, Sm90WideKeysBlock<T, K>, Sm90KeysBlock<T, K>>::run(args);
#endif
}

}  // namespace pt::cuda
