// SPDX-License-Identifier: Apache-2.0
// Fused backward on sm_90a, five gemms instead of seven: bwd_dkdv that also computes its keys' part
// of d_query from dS and adds it to a float32 copy. After FlashAttention-3 (Shah et al., 2024) and
// its bulk reductions.
//
// One block owns d_key and d_value of a KV tile. Blocks add to a tile of d_query in the order of
// their keys, and the first one stores, so results are deterministic. A block takes its number when
// it starts and waits only for lower numbers. All blocks iterate over tiles downwards, so their
// order stays the same on every tile. With deterministic=False they add in any order, to zeros.
//
// Two consumers have 64 keys each. dS is written to shared memory once, and both consumers read it
// as an operand of dS K: one consumer computes 64 queries, or at head size 128 half of the columns,
// 64 x 64 in either case. One producer warp per consumer adds that part from shared memory to the
// copy, which has the accumulators' order: one contiguous bulk reduction of 16 KB.
#pragma once

#include "cuda/attention/sm90/bwd_dkdv.cuh"
#include "cuda/tile/vectors.cuh"

namespace pt::cuda {

struct Sm90Fused : Sm90Backward {
  // ^ Number of started blocks; then, per consumer's part of a Q tile, the number of blocks that
  // have added to it. Initially zeros; null: any order.
  uint32_t* turns;
};

// Return the index of a Q tile over all heads.
template <int D>
PT_DEVICE int64_t number_of_tile(const AttentionBackward& g, const Sequence& s, int b, int h,
                                 int tile) {
  constexpr int kRows = sm90_fused_tile(D).streamed;
  const int64_t first = g.p.cu_queries ? h * g.dq_accum_tiles + s.row_q / kRows + b
                                       : (int64_t(b) * g.p.heads + h) * g.dq_accum_tiles;
  return first + tile;
}
// Return the address of a tile's sums. A tile has pieces of 64 queries in register order of 128
// threads: the first four elements of each thread, then the next four.
template <int D>
PT_DEVICE float* dq_accum(const AttentionBackward& g, int64_t number) {
  return g.dq_accum + number * sm90_fused_tile(D).streamed * D;
}

template <class T, class K>
struct Sm90FusedBlock : Sm90BwdDkdvBlock<T, K> {
  using Dkdv = Sm90BwdDkdvBlock<T, K>;
  using Dkdv::args, Dkdv::block_number, Dkdv::k, Dkdv::v, Dkdv::q, Dkdv::d_out, Dkdv::mask_loader,
      Dkdv::own_row_stats, Dkdv::each_row_stat;
  using Dkdv::kTile, Dkdv::D, Dkdv::BM, Dkdv::BN, Dkdv::kConsumers;
  using typename Dkdv::Work, typename Dkdv::RingOwn, typename Dkdv::RingStream,
      typename Dkdv::RingQueries;
  static constexpr int kPart = 64 * 64;  // elements of d_query per consumer and tile
  static constexpr int kStored = 4;      // named barrier: dS is stored
  static constexpr uint32_t kNotes = kSm90Notes / (128 * kConsumers);
  using RingGradients = Ring<2, BM, BN / 64>;  // dS, rows of keys; without barriers
  using RingPart = Ring<1, kPart * 4 / kSwizzleRow, 1>;
  static_assert(kPart * kConsumers == BN * D && 2 + kConsumers == 4);

  RingGradients gradients;
  uint32_t partials, part_barriers, notes;
  uint32_t* turns;

  PT_DEVICE RingPart part_of(int consumer) const {
    return {partials + consumer * RingPart::kBufferBytes,
            part_barriers + consumer * RingPart::kBarrierBytes};
  }

  PT_DEVICE void begin() const {
    Dkdv::begin();
    for (int c = 0; c < kConsumers; ++c) part_of(c).init(4, 1, "part_full", "part_empty");
    if constexpr (K::in_order) ptx::st_shared_u32(Dkdv::ticket, ptx::atomic_add_u32(turns, 1));
  }

  PT_DEVICE void produce() const {
    const int warp = int(threadIdx.x) / 32;
    if (warp >= 2) {
      if (lane_id() == 0) add_parts(warp - 2);
    } else {
      Dkdv::produce();
    }
  }

  // Add a consumer's parts from shared memory to the copy, with one thread.
  PT_DEVICE void add_parts(int consumer) const {
    const AttentionProblem& p = args.g.p;
    const RingPart part = part_of(consumer);
    const Work w(p, args.order, block_number());
    int stream_iter = 0;
    w.for_each_stream_iter(p, [&](int h, int t) {
      const int64_t tile = number_of_tile<D>(args.g, w.s, w.b, h, t);
      float* const sums = dq_accum<D>(args.g, tile) + consumer * kPart;
      uint32_t* const turn = turns + 1 + tile * kConsumers + consumer;
      // The KV tiles that these queries see are consecutive: `before` of them precede this one.
      const int before = w.j0 / BM - w.s.keys_of(p, t * BN).lo / BM;
      if (K::in_order) ptx::acquire_equal_u32(turn, uint32_t(before));
      part.consumer_wait(stream_iter);
      if (K::in_order && before == 0) ptx::bulk_store(sums, part.buffer(stream_iter), kPart * 4);
      else ptx::bulk_reduce_add_f32(sums, part.buffer(stream_iter), kPart * 4);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
      part.consumer_release(stream_iter++);
      if constexpr (K::in_order) {
        ptx::bulk_wait<0>();
        ptx::release_add_u32(turn, 1);
      }
    });
  }

  // Per-thread notes in shared memory, because registers are scarce: the query ranges of the lane's
  // two keys, the rows to keep, the queries that see all keys of the consumer, the range of tiles,
  // the number of iterations, and a zero.
  PT_DEVICE uint32_t notes_of_thread() const {
    return notes + uint32_t(ptx::opaque(int(threadIdx.x)) - 128) * kNotes;
  }
  PT_DEVICE void note_bounds(const Work& w) const {
    const AttentionProblem& p = args.g.p;
    const Place at = place_again(w.j0, 0);
    const Range own[2] = {w.bounds(p, at.row_of(0)), w.bounds(p, at.row_of(2))},
                keep = w.rows_to_keep(p);
    const auto note = [](int x) { return ptx::bits_float(uint32_t(x)); };
    ptx::st_shared_v4_f32(notes_of_thread(), note(own[0].lo), note(own[0].hi), note(own[1].lo),
                          note(own[1].hi));
    // Absent or hidden keys would have weights too, and dS K adds them up.
    const int first = w.j0 + consumer() * 64;
    const bool there = first >= w.s.first_k && first + 64 <= w.s.num_k;
    const Range whole = there && !w.s.padding_gaps ? w.whole(p) : Range{0, 0};
    ptx::st_shared_v4_f32(notes_of_thread() + 16, note(keep.lo), note(keep.hi), note(whole.lo),
                          note(whole.hi));
    ptx::st_shared_v4_f32(notes_of_thread() + 32, note(w.range.first), note(w.range.last),
                          note(w.range.count() * p.group), 0.0f);
  }
  PT_DEVICE Range noted(int i) const {
    return {int(ptx::ld_shared_u32(notes_of_thread() + 8 * i)),
            int(ptx::ld_shared_u32(notes_of_thread() + 8 * i + 4))};
  }

  // Store this consumer's rows of dS. The swizzle is an exclusive or, so moving by two chunks is an
  // xor with 32 bytes.
  PT_DEVICE void store_gradients(int stream_iter, const uint32_t (&ds)[BN / 16][4]) const {
    const int thread = ptx::opaque(int(threadIdx.x)) - 128;
    const int row = thread / 32 * 16 + thread % 16, chunk = thread % 32 / 16;
    const uint32_t at = gradients.buffer(stream_iter) + swizzle128(row, chunk);
    PT_UNROLL
    for (int i = 0; i < BN / 16; ++i)
      ptx::stmatrix_x4((at ^ i % 4 * 32) + i / 4 * RingGradients::kPanelBytes, ds[i]);
    ptx::fence_proxy_async();
  }

  // Compute this consumer's part of dS K after both have stored dS. With two buffers of dS one
  // barrier suffices: a consumer that stores again has passed the barrier that the other reaches
  // after the previous gemm. Rows of both operands are keys, so both are read transposed.
  PT_DEVICE void multiply_part(float (&x)[kPart / 128], int stream_iter, const RingOwn& k) const {
    static_assert(conforms(product_of_tiles(64, true, true)));
    ptx::bar_sync(kStored, 128 * kConsumers);
    const uint64_t a = swizzled(ptx::uniform(
        gradients.buffer(stream_iter) + (D == 64 ? consumer() * RingGradients::kPanelBytes : 0)));
    const uint64_t b =
        swizzled(ptx::uniform(k.buffer(0) + (D == 64 ? 0 : consumer() * RingOwn::kPanelBytes)));
    ptx::wgmma_fence();
    PT_UNROLL
    for (int i = 0; i < BM / 16; ++i)
      ptx::wgmma_ss<T, 64, true, true>(x, further(a, i * 2 * kSwizzleAtom),
                                       further(b, i * 2 * kSwizzleAtom), i > 0);
    ptx::wgmma_commit();
  }

  // Write the part to its buffer for the thread that adds it.
  PT_DEVICE void hand_over(int stream_iter, const float (&x)[kPart / 128]) const {
    const int thread = ptx::opaque(int(threadIdx.x)) - 128;
    const RingPart part = part_of(thread / 128);
    part.producer_acquire(stream_iter);
    PT_UNROLL
    for (int j = 0; j < kPart / 512; ++j)
      ptx::st_shared_v4_f32(part.buffer(stream_iter) + (j * 128 + thread % 128) * 16, x[4 * j],
                            x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
    ptx::fence_proxy_async();
    ptx::syncwarp();
    if (lane_id() == 0) part.producer_commit(stream_iter);
  }

  // Recompute descriptors: held across iterations, those of all steps of K and V would use too many
  // registers.
  static PT_DEVICE RingOwn own(const RingOwn& ring) {
    return RingOwn(uint32_t(ptx::opaque(int(ring.buffer(0)))), 0);
  }
  // Full tiles have no hidden rows, for either consumer.
  PT_DEVICE bool is_partial(int t) const {
    const Range full = noted(3);
    return t * BN < full.lo || (t + 1) * BN > full.hi;
  }
  PT_DEVICE int next_tile(int t) const {
    const Range range = noted(4);
    return t == range.lo ? range.hi - 1 : t - 1;
  }
  PT_DEVICE void clear_hidden_queries(int stream_iter, int t) const {
    clear_rows<kConsumers>(q, stream_iter, t * BN, noted(2));
    clear_rows<kConsumers>(d_out, stream_iter, t * BN, noted(2));
  }

  // Compute P from the scores, and a copy for dS: no code may use P while it is an operand.
  PT_DEVICE void weigh(uint32_t (&weights)[BN / 16][4], float (&s)[BN / 2], int stream_iter, int t,
                       bool partial) const {
    const float scale_log2 = args.g.p.scale * kLog2e;
    each_row_stat(s, own_row_stats(stream_iter), [&](float& x, float row_max) {
      x = ptx::exp2(ptx::fma_rn(x, scale_log2, -row_max));
    });
    if (partial) {
      PT_UNROLL
      for (int row = 0; row < 2; ++row) {
        const Range bounds = noted(row);
        each_element(s, t * BN, [&](float& e, int r, int column) {
          e = r != row || bounds.has(column) ? e : 0.0f;
        });
      }
    }
    pack_recomputed<T>(weights, s);
    if constexpr (K::pair_bits)
      if (args.g.p.mask_bits.lanes.data) {
        uint32_t visible[Dkdv::MaskLoader::kWords];
        mask_loader.read_visible(visible, stream_iter);
        clear_packed(weights, visible);
      }
  }
  // Apply dropout to P after its copy for dS.
  PT_DEVICE void drop_weights(uint32_t (&weights)[BN / 16][4], int stream_iter) const {
    if constexpr (K::pair_bits)
      if (args.g.p.keep_bits.lanes.data) {
        uint32_t kept[Dkdv::MaskLoader::kWords];
        mask_loader.read_kept(kept, stream_iter);
        clear_packed(weights, kept);
      }
  }
  static PT_DEVICE void copy(uint32_t (&ds)[BN / 16][4], const uint32_t (&weights)[BN / 16][4]) {
    PT_UNROLL
    for (int i = 0; i < BN / 4; ++i) {
      ds[i / 4][i % 4] = weights[i / 4][i % 4];
      ptx::fence_operand(ds[i / 4][i % 4]);
    }
  }

  // Turn the copy of P into dS, start dS Q and store dS under it.
  PT_DEVICE void differentiate(float (&dk)[D / 2], uint32_t (&ds)[BN / 16][4], float (&dp)[BN / 2],
                               int stream_iter) const {
    const uint32_t deltas = own_row_stats(stream_iter) + 4 * BN;
    if (K::pair_bits && args.g.p.keep_bits.lanes.data) {
      if constexpr (K::pair_bits) {
        uint32_t kept[Dkdv::MaskLoader::kWords];
        mask_loader.read_kept(kept, stream_iter);
        clear_elements(dp, kept);
      }
      const float keep_scale = args.g.p.keep_scale;
      each_row_stat(dp, deltas, [&](float& x, float delta) {
        x = ptx::fma_rn(x, keep_scale, delta) * kWeightUnit<T>;
      });
    } else {
      each_row_stat(dp, deltas, [](float& x, float delta) { x = (x + delta) * kWeightUnit<T>; });
    }
    // A zero unknown to the compiler, which would otherwise widen P to float32 early and use
    // registers.
    const int zero = noted(5).hi;
    PT_UNROLL
    for (int i = 0; i < BN / 4; ++i) ds[i / 4][i % 4] ^= uint32_t(zero);
    pack_gradients<T>(ds, ds, dp);
    multiply_weights<T>(dk, ds, q, stream_iter);
    store_gradients(stream_iter, ds);
  }

  PT_DEVICE void release_queries(int stream_iter) const {
    // A lane releases for its warp's reads of row stats too.
    ptx::syncwarp();
    if (lane_id() == 0) q.consumer_release(stream_iter), d_out.consumer_release(stream_iter);
  }

  // Process a Q tile. The gemms in order of issue, and the work that overlaps each:
  //
  //   D 64    S       | dS K of the previous tile | dP                  | P dO | dS Q
  //           barrier | exp2                      | dS K is handed over | dS   | dS is stored
  //
  //   D 128   S                      | dP   | P dO | dS Q                  | dS K
  //           then the previous dS K | exp2 | dS   | dS is stored, barrier | the next tile starts
  //           is handed over
  //
  // Work that overlaps a gemm ends in operands of the next one: ptxas moves other arithmetic behind
  // the wait. At head size 128 registers hold either dS K or the copy of P beside dP; at 64, both.
  template <bool Partial, bool First>
  PT_DEVICE void add_tile_64(float (&dk)[D / 2], float (&dv)[D / 2], float (&part)[kPart / 128],
                             int stream_iter, int t) const {
    float s[BN / 2], dp[BN / 2];
    uint32_t weights[BN / 16][4], ds[BN / 16][4];
    if (Partial) clear_hidden_queries(stream_iter, t);
    q.consumer_wait(stream_iter);
    multiply_rows<T, D>(s, own(k), 0, q, stream_iter, false);
    if (!First) multiply_part(part, stream_iter - 1, own(k));
    ptx::wgmma_wait<First ? 0 : 1>();
    weigh(weights, s, stream_iter, t, Partial);
    d_out.consumer_wait(stream_iter);
    multiply_rows<T, D>(dp, own(v), 0, d_out, stream_iter, false);
    if (!First) {
      ptx::wgmma_wait<1>();
      hand_over(stream_iter - 1, part);
    }
    copy(ds, weights);
    drop_weights(weights, stream_iter);
    multiply_weights<T>(dv, weights, d_out, stream_iter);
    ptx::wgmma_wait<1>();
    differentiate(dk, ds, dp, stream_iter);
    ptx::wgmma_wait<0>();
    release_queries(stream_iter);
  }

  // dS K is in flight at the end, also across the loop's back edge. ptxas accepts that because only
  // wgmmas access it before the wait for all.
  template <bool First>
  PT_DEVICE void add_tile_128(float (&dk)[D / 2], float (&dv)[D / 2], float (&part)[kPart / 128],
                              int stream_iter, int t) const {
    float s[BN / 2], dp[BN / 2];
    uint32_t weights[BN / 16][4], ds[BN / 16][4];
    const bool partial = is_partial(t);
    if (partial) clear_hidden_queries(stream_iter, t);
    q.consumer_wait(stream_iter);
    multiply_rows<T, D>(s, own(k), 0, q, stream_iter, false);
    ptx::wgmma_wait<0>();
    if (!First) hand_over(stream_iter - 1, part);
    d_out.consumer_wait(stream_iter);
    multiply_rows<T, D>(dp, own(v), 0, d_out, stream_iter, false);
    weigh(weights, s, stream_iter, t, partial);
    copy(ds, weights);
    drop_weights(weights, stream_iter);
    multiply_weights<T>(dv, weights, d_out, stream_iter);
    ptx::wgmma_wait<1>();
    differentiate(dk, ds, dp, stream_iter);
    multiply_part(part, stream_iter, own(k));
    ptx::wgmma_wait<1>();
    release_queries(stream_iter);
  }

  PT_DEVICE void add_tiles(float (&dk)[D / 2], float (&dv)[D / 2], int t) const {
    float part[kPart / 128];
    int stream_iter = 0;
    if constexpr (D == 64) {
      add_tile_64<true, true>(dk, dv, part, stream_iter, t);
      while (++stream_iter < noted(5).lo) {
        t = next_tile(t);
        if (is_partial(t)) add_tile_64<true, false>(dk, dv, part, stream_iter, t);
        else add_tile_64<false, false>(dk, dv, part, stream_iter, t);
      }
      multiply_part(part, --stream_iter, own(k));
      ptx::wgmma_wait<0>();
      hand_over(stream_iter, part);
    } else {
      add_tile_128<true>(dk, dv, part, stream_iter, t);
      while (++stream_iter < noted(5).lo) {
        t = next_tile(t);
        add_tile_128<false>(dk, dv, part, stream_iter, t);
      }
      ptx::wgmma_wait<0>();
      hand_over(stream_iter - 1, part);
    }
  }

  PT_DEVICE void consume() const {
    const AttentionProblem& p = args.g.p;
    const Work w(p, args.order, block_number());
    note_bounds(w);
    float dk[D / 2], dv[D / 2];
    PT_UNROLL
    for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0.0f;
    if (w.range.count() > 0) {
      const Range keep = keys_to_keep(p, w.s);
      k.consumer_wait(0);
      v.consumer_wait(0);
      if (w.s.padding_gaps) {
        clear_hidden_rows<kConsumers>(k, 0, w.j0, keep, KeyPaddingBitmap(p, w.b));
        clear_hidden_rows<kConsumers>(v, 0, w.j0, keep, KeyPaddingBitmap(p, w.b));
      } else {
        clear_rows<kConsumers>(k, 0, w.j0, keep);
        clear_rows<kConsumers>(v, 0, w.j0, keep);
      }
      add_tiles(dk, dv, w.begin());
      consumer_release_warpgroup(k, 0);
      consumer_release_warpgroup(v, 0);
    }
    Dkdv::finish(block_number(), dk, dv);
  }

  static PT_DEVICE void run(const Sm90Fused& args) {
    constexpr uint32_t kOwn = RingOwn::kBufferBytes, kOutAt = 2 * kOwn + RingQueries::kBufferBytes;
    constexpr uint32_t kGradientsAt = kOutAt + RingStream::kBufferBytes,
                       kPartsAt = kGradientsAt + RingGradients::kBufferBytes;
    constexpr uint32_t kNotesAt = kPartsAt + kConsumers * RingPart::kBufferBytes,
                       kRowStatsAt = kNotesAt + kSm90Notes;
    constexpr uint32_t kBitsAt =
                           kRowStatsAt + (kTile.stages + K::more_queries) * Dkdv::kRowStatsBytes,
                       kBarriersAt = kBitsAt + Dkdv::MaskLoader::kBytes,
                       kOwnBars = RingOwn::kBarrierBytes;
    constexpr uint32_t kPartBars =
        2 * kOwnBars + RingQueries::kBarrierBytes + RingStream::kBarrierBytes;
    constexpr uint32_t kTicketAt = kBarriersAt + kPartBars + kConsumers * RingPart::kBarrierBytes;
    static_assert(kSm90Slack + kTicketAt + kSm90TicketBytes ==
                  sm90_fused_smem(kTile, K::pair_bits));
    const uint32_t base = align_to_atom(ptx::dynamic_smem()), bars = base + kBarriersAt;
    const Dkdv dkdv{args,
                    RingOwn(base, bars),
                    RingOwn(base + kOwn, bars + kOwnBars),
                    RingQueries(base + 2 * kOwn, bars + 2 * kOwnBars),
                    RingStream(base + kOutAt, bars + kPartBars - RingStream::kBarrierBytes),
                    base + kRowStatsAt,
                    typename Dkdv::MaskLoader(base + kBitsAt),
                    base + kTicketAt};
    run_block(Sm90FusedBlock{dkdv, RingGradients(base + kGradientsAt, 0), base + kPartsAt,
                             bars + kPartBars, base + kNotesAt, args.turns});
  }
};

template <class T, class K>
__global__ void __launch_bounds__(sm90_fused_tile(K::head_dim).threads(), 1)
    sm90_attention_bwd_fused_kernel([[maybe_unused]] const __grid_constant__ Sm90Fused args) {
#if PT_SM90A
  Sm90FusedBlock<T, K>::run(args);
#endif
}

// Convert the sums to d_query: rounded, scaled, zero for queries without visible keys. 64 queries
// per block.
template <class T, int D>
__global__ void __launch_bounds__(128)
    sm90_convert_dq_kernel(const __grid_constant__ AttentionBackward g) {
  constexpr int kRows = 64, kTile = sm90_fused_tile(D).streamed;
  const AttentionProblem& p = g.p;
  const int blocks = (p.num_queries + kRows - 1) / kRows, i0 = int(blockIdx.x) % blocks * kRows,
            bh = int(blockIdx.x) / blocks;
  const int b = bh / p.heads, h = bh % p.heads;
  const Sequence s(p, b);
  const int written = p.cu_queries ? s.num_q : p.num_queries;
  if (i0 >= written) return;
  float x[D / 2], factor[2];
  int64_t index[2];
  const float* sums = dq_accum<D>(g, number_of_tile<D>(g, s, b, h, i0 / kTile)) + i0 % kTile * D;
  PT_UNROLL
  for (int j = 0; j < D / 8; ++j) {
    const ptx::Words4 words = ptx::ld_global_once(sums + (j * 128 + threadIdx.x) * 4);
    PT_UNROLL
    for (int r = 0; r < 4; ++r) x[4 * j + r] = ptx::bits_float(words.w[r]);
  }
  PT_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int i = i0 + int(threadIdx.x) / 32 * 16 + lane_id() / 4 + 8 * r;
    factor[r] = i >= s.num_q || s.keys_of(p, i).empty() ? 0.0f : p.scale;
    index[r] = i < written ? s.row_q + i : -1;
  }
  if (g.dq_recompute.flags && not_finite(x, factor))
    flag_nonfinite(g.dq_recompute, int64_t(b) * p.heads + h, i0);
  store_wide<T>(g.dq, b, h, x, factor, index);
}

template <class T>
void sm90_attention_bwd_fused_as(const AttentionBackward& g, const Sm90Plan& plan, uint32_t* turns,
                                 void* stream) {
  const AttentionProblem& p = g.p;
  const Sm90Fused args = {{map_operands(g, plan.tile.streamed, plan.tile.rows()), g, plan.order},
                          turns};
  const auto run = [&](auto kind) {
    using K = decltype(kind);
    launch(sm90_attention_bwd_fused_kernel<T, K>, dim3(unsigned(plan.blocks)), plan.tile.threads(),
           plan.smem_bytes, stream, args);
    if (!g.dq.data) return;
    launch(sm90_convert_dq_kernel<T, K::head_dim>,
           dim3(attention_blocks(p.sequences, p.heads, (p.num_queries + 63) / 64)), 128, 0, stream,
           g);
  };
  if (plan.elementwise_mask) plan.head_class == 64 ? run(FusedBits<64>{}) : run(FusedBits<128>{});
  else if (plan.head_class == 64) turns ? run(Fused<64, true>{}) : run(Fused<64, false>{});
  else turns ? run(Fused<128, true>{}) : run(Fused<128, false>{});
}

}  // namespace pt::cuda
