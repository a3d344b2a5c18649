// SPDX-License-Identifier: Apache-2.0
// Attention forward on sm_90a: as sm80/fwd.cuh with wgmma and TMA.
//
// After Shah et al., "FlashAttention-3" (2024). A block has a producer warpgroup, one thread of
// which loads Q and rings of K and V, and consumer warpgroups of 64 queries each. A consumer
// computes the next tile's scores while it multiplies this tile's weights by V; P stays in
// registers. KV tiles are visited from last to first, so partial tiles come first.
#pragma once

#include <type_traits>

#include "cuda/attention/kernels.h"
#include "cuda/attention/sm90/mask_loader.cuh"

namespace pt::cuda {

struct Sm90Forward {
  ptx::TensorMap q, k, v;  // (D, rows, heads, sequences)
  ptx::TensorMap bits;     // with an elementwise mask: see map_bits
  ptx::TensorMap dense;    // see map_dense
  AttentionForward f;
  TileOrder order;
  int dense_tiles;  // see Sm90Plan
};

struct NoMaskLoader {
  static constexpr int kPiece = 8;
  PT_DEVICE NoMaskLoader(const AttentionProblem&, int) {}
};

template <class T, class K>
struct Sm90ForwardBlock {
  static constexpr Sm90Tile kTile = K::forward_tile;
  static constexpr int D = K::head_dim, BM = kTile.rows(), BN = kTile.streamed;
  static constexpr int kConsumers = kTile.consumers;
  static constexpr bool kMayPair = kConsumers == 2;  // three consumers: in snake order
  using Masks = std::conditional_t<K::elementwise_mask, MaskLoader<D, BN>, NoMaskLoader>;
  static constexpr int kPiece = Masks::kPiece;  // n-blocks per call of score_mod
  using RingQ = Ring<1, BM, kTile.panels()>;
  using RingKv = Ring<kTile.stages, BN, kTile.panels()>;

  const Sm90Forward& args;
  RingQ q;
  RingKv k, v;
  using Notes = TileNotes<kTile.stages, BM, BN>;
  Notes notes;  // with an elementwise mask
  // tiles of a floating-point mask or bias
  static constexpr bool kDense = K::has_score_mod && K::elementwise_mask;
  using RingDense = Ring<kTile.stages, BM, BN / 64>;
  RingDense dense;

  using Work = QueryWork<BM, BN>;

  PT_DEVICE void begin() const {
    ptx::prefetch_tensor_map(args.q);
    ptx::prefetch_tensor_map(args.k);
    ptx::prefetch_tensor_map(args.v);
    q.init(1, kConsumers, "q_full", "q_empty");
    k.init(1, kConsumers, "k_full", "k_empty");
    v.init(1, kConsumers, "v_full", "v_empty");
    if (has_dense()) {
      ptx::prefetch_tensor_map(args.dense);
      dense.init(1, 4 * kConsumers, "dense_full", "dense_empty");
    }
    if (K::elementwise_mask) {
      if (has_bits(args.f.p)) ptx::prefetch_tensor_map(args.bits);
      notes.init(1, 4 * kConsumers, "notes_full", "notes_empty");
    }
  }

  PT_DEVICE void produce() const {
    if (threadIdx.x != 0) return;
    const AttentionProblem& p = args.f.p;
    int stream_iter = 0, tile_iter = 0;
    for_each_uneven_tile<kMayPair>(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const int batch = p.cu_queries ? 0 : w.b, row = int(w.s.row_k) + w.origin;
      const auto load = [&](int t, bool first) {
        k.load(stream_iter, args.k, row + t * BN, w.h / p.group, batch);
        if (first) q.load(tile_iter++, args.q, int(w.s.row_q) + w.i0, w.h, batch);
        if (has_dense()) load_dense(stream_iter, w, w.origin + t * BN);
        v.load(stream_iter, args.v, row + t * BN, w.h / p.group, batch);
        ++stream_iter;
      };
      if constexpr (K::elementwise_mask) {
        List tiles = tiles_of(w);
        bool first = true;
        for (int t = tiles.last(w.range), next; t >= w.range.first; t = next, first = false) {
          const int place = tiles.place(p);
          next = tiles.back(t);
          notes.put(stream_iter, p, args.bits, w, t, place, next >= w.range.first);
          load(t, first);
        }
      } else {
        for (int t = w.range.last - 1; t >= w.range.first; --t) load(t, t == w.range.last - 1);
      }
    });
  }

  // KV tiles of a Q tile, which lies within one block of a block mask.
  using List = TileListBack<BN>;
  PT_DEVICE List tiles_of(const Work& w) const {
    return List(args.f.p.blocks.queries, w.b, w.h, w.i0);
  }
  PT_DEVICE bool sees_keys(const Work& w) const {
    if constexpr (K::elementwise_mask)
      return w.range.count() > 0 && tiles_of(w).last(w.range) >= w.range.first;
    else return w.range.count() > 0;
  }

  // With ping_pong: wait for this consumer's turn to start gemms.
  static PT_DEVICE void scheduler_barrier_sync() {
    if constexpr (!kTile.ping_pong) return;
    if (consumer() == 0) ptx::bar_sync(1, 256);
    else ptx::bar_sync(2, 256);
  }
  static PT_DEVICE void scheduler_barrier_arrive() {
    if constexpr (!kTile.ping_pong) return;
    if (consumer() == 0) ptx::bar_arrive(2, 256);
    else ptx::bar_arrive(1, 256);
  }

  struct Rows {  // row stats of the lane's two rows
    float max[2] = {minus_infinity(), minus_infinity()};
    float sum[2] = {0.0f, 0.0f};  // this lane's share
    float alpha[2];               // rescale of older sums and outputs
  };

  // Turn s into weights relative to the rows' maxima.
  static PT_DEVICE void softmax(float (&s)[BN / 2], Rows& rows, float scale_log2) {
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      float row_max = rows.max[r];
      PT_UNROLL
      for (int j = 0; j < BN / 8; ++j)
        row_max = fmaxf(row_max, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
      row_max = max_of_quad(row_max);
      const float safe = row_max == minus_infinity() ? 0.0f : row_max;
      rows.alpha[r] = ptx::exp2((rows.max[r] - safe) * scale_log2);
      rows.max[r] = row_max;
      float sum = rows.sum[r] * rows.alpha[r];
      PT_UNROLL
      for (int j = 0; j < BN / 8; ++j) {
        PT_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& x = s[4 * j + 2 * r + e];
          // Folding the scale saves one instruction; with biases as large as finfo.max, subtract
          // first.
          x = ptx::exp2(K::has_score_mod ? (x - safe) * scale_log2
                                         : ptx::fma_rn(x, scale_log2, -safe * scale_log2));
          sum += x;
        }
      }
      rows.sum[r] = sum;
    }
  }

  // Apply dropout, drawn here, to weights. Without score_mod tiles may have a part of a piece.
  template <class S>
  static PT_DEVICE void drop_drawn(float (&s)[BN / 2], const S& score_mod, int row, int first) {
    if constexpr (K::has_score_mod)
      in_pieces<8>(s, row, first, [&](float (&x)[8][4], const Place& place, int) {
        const uint32_t keep_mask = score_mod.template keep_mask<8>(place);
        each<8>([&](int n, int r, uint32_t bit) { x[n][r] = keep_mask & bit ? x[n][r] : 0.0f; });
      });
  }

  // Recompute the sequence's properties: held across the loop, they would use registers.
  PT_DEVICE void finish(int n, const float (&o)[D / 2], const Rows& rows) const {
    const AttentionForward& f = args.f;
    const AttentionProblem& p = f.p;
    const Work w(p, args.order, ptx::opaque(n));
    const int written = p.cu_queries ? w.s.num_q : p.num_queries;
    float factor[2];
    int64_t index[2];
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      const int i = w.i0 + own_row(r);
      const float row_max = K::has_score_mod ? rows.max[r] : rows.max[r] * p.scale;
      const RowEnd end = end_row(p, w.h, i < w.s.num_q, row_max, sum_of_quad(rows.sum[r]));
      factor[r] = end.factor;
      index[r] = i < written ? w.s.row_q + i : -1;
      if (lane_id() % 4 == 0 && index[r] >= 0)
        store_one(f.lse + row_stat_at(f.at, w.b, w.h, index[r]), end.lse);
    }
    if (K::elementwise_mask && not_finite(o, factor))
      flag_nonfinite(f.recompute, int64_t(w.b) * p.heads + w.h, w.i0);
    store_wide<T>(f.out, w.b, w.h, o, factor, index);
  }

  // Recompute descriptors with wide heads: held across iterations, those of all steps would use too
  // many registers.
  static PT_DEVICE RingQ own(const RingQ& ring) {
    return D > 128 ? RingQ(uint32_t(ptx::opaque(int(ring.buffer(0)))), 0) : ring;
  }

  // Advance a consumer to the tile of stream_iter n, by its note.
  PT_DEVICE void go_to(int n, const Work& w, int& first, bool& masked, bool& more) const {
    if constexpr (K::elementwise_mask) {
      const TileNote note = notes.take(n);
      first = w.origin + note.tile * BN, masked = note.masked, more = note.more;
    }
  }

  // Load what hides or changes pairs of the tile of stream_iter n, and release its note.
  template <class M>
  PT_DEVICE void load_hidden(M& mask_loader, const Work& w, const Range& whole, int n, int first,
                             bool masked) const {
    mask_loader.start(w, whole, first);
    if (masked) {
      mask_loader.hide_bits([&](int r) { return notes.words(n, args.f.p, own_row(r)); });
      ptx::fence_proxy_async();  // TMA overwrites them; the fence waits for earlier loads
    }
    consumer_release_warp(notes, n);
    mask_loader.load(w, first, K::has_score_mod);
  }

  PT_DEVICE bool has_dense() const { return kDense && args.dense_tiles; }
  PT_DEVICE void load_dense(int n, const Work& w, int first) const {
    const Dense& d = args.dense_tiles == 1 ? args.f.p.mask : args.f.p.bias;
    dense.producer_acquire(n);
    dense.producer_commit(n, RingDense::kBytes);
    PT_UNROLL
    for (int c = 0; c < BN / 64; ++c)
      ptx::tma_load_4d(dense.buffer(n) + c * RingDense::kPanelBytes, args.dense, dense.full(n),
                       first + 64 * c, w.i0, d.head ? w.h : 0, d.batch ? w.b : 0);
  }
  PT_DEVICE void await_dense(int n) const {
    if (has_dense()) dense.consumer_wait(n);
  }
  PT_DEVICE void release_dense(int n) const {
    if (!has_dense()) return;
    ptx::fence_proxy_async();  // TMA overwrites the tile
    consumer_release_warp(dense, n);
  }

  // Wait for K of the next tile before the wait for the gemms that overlap the softmax: without a
  // branch in between, ptxas moves the softmax behind that wait.
  PT_DEVICE void await_keys(int n, bool more) const {
    if (more) k.consumer_wait(n);
  }

  PT_DEVICE void consume() const {
    static_assert(!kTile.ping_pong || kConsumers == 2);
    const AttentionProblem& p = args.f.p;
    // multiplies scores for exp2
    const float scale_log2 = K::has_score_mod ? kLog2e : p.scale * kLog2e;
    int stream_iter = 0, tile_iter = 0;
    if (consumer() == 1) scheduler_barrier_arrive();
    for_each_uneven_tile<kMayPair>(args.order, [&](int n) {
      const Work w(p, args.order, n);
      const auto row = [&] { return ptx::opaque(w.i0) + warp_row(); };  // saves a register
      const ScoreMod<false, false> score_mod(p, w.s, w.b, w.h);
      const Range whole = w.whole(p), keep = w.rows_to_keep(p);
      float s[BN / 2], o[D / 2];
      uint32_t weights[BN / 16][4];
      Rows rows;
      [[maybe_unused]] Masks mask_loader(p, kDense ? args.dense_tiles : 0);
      PT_UNROLL
      for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
      // Padding gaps: their keys are looked up where needed. The mask loader has them as bits.
      const bool padding_gaps = !K::elementwise_mask && whole.lo == kUnbounded;
      const auto key_padding_bitmap = [&] {
        return KeyPaddingBitmap(p, place_of(args.order, ptx::opaque(n)).head / p.heads);
      };
      const auto clear = [&](int first) {
        if (padding_gaps)
          clear_hidden_rows<kConsumers>(v, stream_iter, first, keep, key_padding_bitmap());
        else clear_rows<kConsumers>(v, stream_iter, first, keep);
      };
      [[maybe_unused]] Pairs<BN / 2> kept;
      const auto load_mask = [&](int n, int first, bool masked) {
        if constexpr (K::elementwise_mask) load_hidden(mask_loader, w, whole, n, first, masked);
        if (K::drops_by_bits && score_mod.has_keep_bits())
          kept = read_kept_pairs<BN / 2>(score_mod, Place(row(), first));
      };
      // Turn scores of a tile into weights; `first` is its first key.
      const auto weigh = [&](int use, int first) {
        await_dense(use);
        if constexpr (K::has_score_mod)
          in_pieces<kPiece>(s, row(), first, [&](float (&x)[kPiece][4], const Place& place, int c) {
            float unused[kPiece][4];
            score_mod.apply(x, unused, place, kAllColumns);
            if constexpr (K::elementwise_mask) mask_loader.add(w, x, first, c, dense.buffer(use));
          });
        release_dense(use);
        if constexpr (K::elementwise_mask) {
          mask_loader.hide(s);
        } else if (first < whole.lo || first + BN > whole.hi) {
          const auto hide_invisible = [&](const Work& of) {
            const Range bounds[2] = {of.own_bounds(p, 0), of.own_bounds(p, 1)};
            each_element(s, first, [&](float& x, int r, int column) {
              x = bounds[r].has(column) ? x : minus_infinity();
            });
          };
          // Registers are scarce: with score_mod the bounds are recomputed.
          if constexpr (K::has_score_mod) hide_invisible(Work(p, args.order, ptx::opaque(n)));
          else hide_invisible(w);
          if (padding_gaps) hide_keys(s, first, key_padding_bitmap(), minus_infinity());
        }
        softmax(s, rows, scale_log2);
      };
      const auto pack = [&](int first) {
        if (K::drops_by_bits && score_mod.has_keep_bits())
          keep_visible(s, kept.packed_until_here());
        if (K::has_score_mod && p.drop_threshold) drop_drawn(s, score_mod, row(), first);
        pack_weights<T>(weights, s);
      };
      if (sees_keys(w)) {
        int t = w.range.last - 1, first = w.origin + t * BN;
        bool masked = false, more = t > w.range.first;
        q.consumer_wait(tile_iter);
        k.consumer_wait(stream_iter);
        scheduler_barrier_sync();
        multiply_rows<T, D>(s, own(q), tile_iter, k, stream_iter, false);
        scheduler_barrier_arrive();
        go_to(stream_iter, w, first, masked, more);
        load_mask(stream_iter, first, masked);
        ptx::wgmma_wait<0>();
        consumer_release_warpgroup(k, stream_iter);
        if (!more) consumer_release_warpgroup(q, tile_iter);
        weigh(stream_iter, first);
        await_keys(stream_iter + 1, more);
        pack(first);
        for (; more; ++stream_iter) {
          clear(first);
          first -= BN, --t, more = t > w.range.first;
          scheduler_barrier_sync();
          multiply_rows<T, D>(s, own(q), tile_iter, k, stream_iter + 1, false);
          v.consumer_wait(stream_iter);
          multiply_weights<T>(o, weights, v, stream_iter);
          scheduler_barrier_arrive();
          go_to(stream_iter + 1, w, first, masked, more);
          load_mask(stream_iter + 1, first, masked);
          ptx::wgmma_wait<1>();
          consumer_release_warpgroup(k, stream_iter + 1);
          if (!more) consumer_release_warpgroup(q, tile_iter);
          weigh(stream_iter + 1, first);
          await_keys(stream_iter + 2, more);
          ptx::wgmma_wait<0>();
          consumer_release_warpgroup(v, stream_iter);
          PT_UNROLL
          for (int i = 0; i < D / 2; ++i) o[i] *= rows.alpha[i / 2 % 2];
          pack(first);
        }
        clear(first);
        v.consumer_wait(stream_iter);
        multiply_weights<T>(o, weights, v, stream_iter);
        ptx::wgmma_wait<0>();
        consumer_release_warpgroup(v, stream_iter);
        ++stream_iter, ++tile_iter;
      }
      finish(n, o, rows);
    });
  }

  static PT_DEVICE void run(const Sm90Forward& args) {
    const uint32_t base = align_to_atom(ptx::dynamic_smem());
    if constexpr (kDense)
      static_assert(BM == Masks::kTiledRows && RingDense::kBufferBytes == sm90_dense_bytes(kTile));
    constexpr uint32_t kKeys = RingQ::kBufferBytes, kValues = kKeys + RingKv::kBufferBytes,
                       kBarriers = kValues + RingKv::kBufferBytes,
                       kKeyBarriers = kBarriers + RingQ::kBarrierBytes,
                       kValueBarriers = kKeyBarriers + RingKv::kBarrierBytes,
                       kDenseBarriers = kValueBarriers + RingKv::kBarrierBytes,
                       kNotes = kDenseBarriers + RingDense::kBarrierBytes,
                       kNoteBarriers = kNotes + Notes::kBufferBytes,
                       kBits = kBarriers + kSm90ForwardBarriers,
                       kTiles =
                           kBits + (sm90_holds_bits_and_dense(kTile) ? sm90_bits_bytes(kTile) : 0);
    static_assert(kNoteBarriers + Notes::kBarrierBytes <= kBits &&
                  kSm90Slack + kBits == sm90_forward_smem(kTile));
    const Sm90ForwardBlock block{args,
                                 RingQ(base, base + kBarriers),
                                 RingKv(base + kKeys, base + kKeyBarriers),
                                 RingKv(base + kValues, base + kValueBarriers),
                                 Notes(base + kNotes, base + kNoteBarriers, base + kBits),
                                 RingDense(base + kTiles, base + kDenseBarriers)};
    run_block(block);
  }
};

template <class T, class K>
__global__ void __launch_bounds__(K::forward_tile.threads(), 1)
    sm90_attention_fwd_kernel([[maybe_unused]] const __grid_constant__ Sm90Forward args) {
#if PT_SM90A
  Sm90ForwardBlock<T, K>::run(args);
#endif
}

template <class T, class K>
void forward_kind(const AttentionForward& f, const Sm90Plan& plan, void* stream) {
  constexpr Sm90Tile kTile = K::forward_tile;
  const AttentionProblem& p = f.p;
  const int rows = kTile.rows();
  const Sm90Forward args{map_rows(p, p.q, false, p.head_dim, rows),
                         map_rows(p, p.k, true, p.head_dim, kTile.streamed),
                         map_rows(p, p.v, true, p.value_dim, kTile.streamed),
                         K::elementwise_mask ? map_bits(p, rows) : ptx::TensorMap{},
                         map_dense(p, plan.dense_tiles, rows),
                         f,
                         plan.order,
                         plan.dense_tiles};
  launch(sm90_attention_fwd_kernel<T, K>, dim3(unsigned(plan.blocks)), kTile.threads(),
         plan.smem_bytes, stream, args);
}

// Call run(kind) for the plan's kernel.
template <class F>
void with_forward_kind(const Sm90Plan& plan, F run) {
  const auto of_class = [&](auto head_dim) {
    constexpr int D = decltype(head_dim)::value;
    if (plan.has_score_mod)
      plan.elementwise_mask ? run(Hopper<D, true, true>{}) : run(Hopper<D, true>{});
    else plan.elementwise_mask ? run(Hopper<D, false, true>{}) : run(Hopper<D, false>{});
  };
  if (plan.tile.consumers == 3) run(ThreeConsumers{});
  else if (plan.head_class == 64) of_class(std::integral_constant<int, 64>{});
  else if (plan.head_class == 128) of_class(std::integral_constant<int, 128>{});
  else of_class(std::integral_constant<int, 256>{});
}

template <class T>
void sm90_attention_forward_as(const AttentionForward& f, const Sm90Plan& plan, void* stream) {
  with_forward_kind(plan, [&](auto kind) { forward_kind<T, decltype(kind)>(f, plan, stream); });
}

}  // namespace pt::cuda
