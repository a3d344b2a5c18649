// SPDX-License-Identifier: Apache-2.0
// Attention forward: online softmax over KV tiles, 16 queries per warp.
//
//   m' = max(m, max_j s);  l = l e^(m - m') + sum_j e^(s - m')
//   o = o e^(m - m') + sum_j drop(e^(s - m')) v_j
//   out = o / l * keep_scale;  lse = m + ln l
//
// Tiling as in Dao, "FlashAttention-2" (2023): scores and sums stay in registers, weights become
// the next gemm's operand there, and the next copy of K or V overlaps the gemm with the other. A
// row without visible keys has l = 0 and gives 0 and -inf.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/attention/sm80/tile.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/tile/reduce.cuh"

namespace pt::cuda {

// Above this, a rounded lse loses digits of log2 of the sum.
constexpr float kLargeLse = 1024.0f;

// Write lse and 0 as row stats if no lse of the block's rows is large. Returns true if the block is
// done.
PT_DEVICE bool statistics_from_lse(const AttentionForward& f, const Sequence& s, int b, int h,
                                   int first, int rows) {
  float large = 0.0f;
  const int i = first + int(threadIdx.x);
  const bool here = int(threadIdx.x) < rows && i < s.num_q;
  const int64_t at = row_stat_at(f.at, b, h, s.row_q + i);
  const float lse = here ? load_one(f.lse + at) : 0.0f;
  if (lse > kLargeLse || (lse < -kLargeLse && lse != minus_infinity())) large = 1.0f;
  BlockTeam team(0);
  large = team.sum({large, 0.0f}).a;
  ptx::syncthreads();  // the tiles reuse its buffers
  if (large != 0.0f) return false;
  if (here) {
    store_one(f.row_max + at, lse <= sink_of(f.p, h) ? infinity() : lse);
    store_one(f.log2_sum + at, 0.0f);
  }
  return true;
}

template <class T, class K>
constexpr AttentionTile kForwardTile =
    attention_tile(K::forward, K::head_dim, sizeof(T), K::has_score_mod, K::eight_bits);
template <class T, class K>
using ForwardWork =
    QueryTile<kForwardTile<T, K>.rows(), kForwardTile<T, K>.columns, K::has_score_mod>;

// A warp's running state of its rows: maxima (of q.k in bounds-only kernels), sums, and
// unnormalized outputs in 8 DB columns from 8 part on.
template <int Pieces>
struct RowSums {
  static constexpr int DB = Pieces;
  int part;
  float m[2] = {minus_infinity(), minus_infinity()}, l[2] = {0.0f, 0.0f}, o[DB][4];

  PT_DEVICE explicit RowSums(int part) : part(part) { clear(o); }
};

// Like RowSums, for a warp's part of a tile; own: its first row in the tile.
template <class T, class K>
struct WarpRows : RowSums<K::head_dim / 8 / kForwardTile<T, K>.splits> {
  using Sums = RowSums<K::head_dim / 8 / kForwardTile<T, K>.splits>;
  using Sums::DB, Sums::l, Sums::m, Sums::o;
  static constexpr int kSplits = kForwardTile<T, K>.splits;
  int own;

  PT_DEVICE WarpRows()
      : Sums(int(threadIdx.x) / 32 % kSplits * DB),
        own(kForwardTile<T, K>.row_warps == 1
                ? 0
                : int(threadIdx.x) / 32 / (kSplits * kForwardTile<T, K>.streams) * 16) {}

  // Return the maximum in natural units.
  PT_DEVICE float maximum(int half, float scale) const {
    return K::has_score_mod ? m[half] : m[half] * scale;
  }

  // Update the online softmax with one tile's scores, and turn them into weights.
  template <int NB>
  PT_DEVICE void add(float (&x)[NB][4], float scale_log2, [[maybe_unused]] uint32_t drops) {
    PT_UNROLL
    for (int half = 0; half < 2; ++half) {
      float row_max = m[half];
      PT_UNROLL
      for (int n = 0; n < NB; ++n)
        row_max = fmaxf(row_max, fmaxf(x[n][2 * half], x[n][2 * half + 1]));
      row_max = max_of_quad(row_max);
      const float safe = row_max == minus_infinity() ? 0.0f : row_max;
      const float alpha = ptx::exp2((m[half] - safe) * scale_log2);
      m[half] = row_max;
      l[half] *= alpha;
      PT_UNROLL
      for (int n = 0; n < NB; ++n) {
        PT_UNROLL
        for (int e = 0; e < 2; ++e) {
          float& weight = x[n][2 * half + e];
          // Folding the scale saves one instruction; with biases as large as finfo.max, subtract
          // first.
          weight =
              ptx::exp2(K::has_score_mod ? (weight - safe) * scale_log2
                                         : ptx::fma_rn(weight, scale_log2, -safe * scale_log2));
          l[half] += weight;
        }
      }
      PT_UNROLL
      for (int d = 0; d < DB; ++d) o[d][2 * half] *= alpha, o[d][2 * half + 1] *= alpha;
    }
  }
};

// Iterate over a range's tiles: score(x, is first) once a tile's keys are in shared memory,
// take_in(x, t) once its values are.
template <int NB, class Keys, class List, class Q, class F, class G>
PT_DEVICE void go_over_tiles(Keys& keys, List& tiles, const Tiles& range, Q copy_queries, F score,
                             G take_in) {
  const int first = tiles.first(range);
  if (first >= range.last) return;
  copy_queries();
  keys.begin(first);
  for (int t = first; t < range.last; t = tiles.leave(t)) {
    const auto after = [&] { return tiles.after(t); };
    float x[NB][4];
    keys.await_keys(t, after);
    score(x, t == first);
    keys.await_values(after);
    take_in(x, t);
  }
}

// Like go_over_tiles, for a warp's stream with WarpKeyTiles; it may have no tile. One loop with one
// copy of each step's code: with few keys, most of a call's time is instruction fetch.
template <int NB, class Keys, class List, class Q, class F, class G>
PT_DEVICE void go_over_stream(const Keys& keys, List& tiles, const Tiles& range, Q copy_queries,
                              F score, G take_in) {
  float x[NB][4];
  PT_NO_UNROLL
  for (int n = 0, t = tiles.first(range);; ++n) {
    const bool values = n % 2;
    keys.copy(values, values || n == 0 ? t : tiles.after(t));
    if (n == 0) copy_queries();
    ptx::cp_async_commit();
    if (n == 0) continue;
    keys.await(n == 1);
    if (values) {
      if (t >= range.last) return;
      score(x, n == 1);
    } else {
      take_in(x, t);
      t = tiles.leave(t);
      if (t >= range.last) return;
    }
    ptx::syncwarp();
  }
}

// Process the KV tiles of w.range. rows_at: the positions of the warp's rows; bounds: their key
// ranges.
template <class T, class K, class Work, class P, class S>
PT_DEVICE void attend(const AttentionForward& f, const Work& w, const P& rows_at,
                      const Range (&bounds)[2], const S& score_mod, WarpRows<T, K>& rows) {
  constexpr AttentionTile kTile = kForwardTile<T, K>;
  constexpr int kRow = row_bytes(kTile, sizeof(T)), BM = kTile.rows(), BN = kTile.columns,
                NB = BN / 8;
  constexpr bool kStreams = kTile.streams > 1;
  // Hold the fragments of Q in registers.
  constexpr bool kKeepQ =
      sizeof(T) == 2 && !kStreams && K::head_dim <= (K::has_score_mod ? 64 : 128);
  using M = Products<T>;
  const AttentionProblem& p = f.p;
  const Sequence& s = w.s;
  const Tiles& range = w.range;

  const SmemTile<kRow> q{ptx::dynamic_smem()};
  using OneStream =
      std::conditional_t<K::eight_bits, EightBitKeyTiles<T, K, Work, BN>, KeyTiles<T, K, Work, BN>>;
  std::conditional_t<kStreams, WarpKeyTiles<T, K, Work, BN>, OneStream> keys(f, w,
                                                                             q.base + BM * kRow);
  uint32_t fragments[kKeepQ ? K::head_dim / 16 : 1][4];
  // multiplies scores for exp2
  const float scale_log2 = K::has_score_mod ? kLog2e : p.scale * kLog2e;

  const BlockLists none;
  TileList<K::has_score_mod, BN> tiles(K::has_blocks ? p.blocks.queries : none, w.b, w.h, w.i0,
                                       w.template gap<1>(p));
  const auto score = [&](float (&x)[NB][4], [[maybe_unused]] bool first) {
    if constexpr (kKeepQ) {
      clear(x);
      PT_UNROLL
      for (int step = 0; step < K::head_dim / 16; ++step) {
        if (step >= M::steps(p.head_dim)) continue;
        if (first) M::load_a(fragments[step], q, rows.own, step);
        M::step(x, fragments[step], keys.k, step);
      }
    } else if constexpr (kStreams) {
      clear(x);
      PT_UNROLL_BY_TWO  // for 16 bits; unrolled by eight, this loop had 4 KB of code
          for (int step = 0; step < M::steps(p.head_dim); ++step) {
        M::load_a(fragments[0], q, rows.own, step);
        M::step(x, fragments[0], keys.k, step);
      }
    } else {
      M::scores(x, q, rows.own, keys.k, p.head_dim);
    }
    keys.scale_scores(x);
  };
  const auto take_in = [&](float (&x)[NB][4], int t) {
    const P at = rows_at.after(w.origin + t * BN);
    uint32_t columns = kAllColumns, visible = kAllColumns;
    if constexpr (K::has_score_mod) {
      float unused[NB][4];
      const int place = tiles.place(p);
      const bool elementwise =
          p.hides_pairs() || s.padding_gaps || place >= 0 || w.may_have_gaps(p, t);
      visible =
          visible_in_tile<K, false, NB>(p, s, w.b, at, bounds, elementwise || range.cut(t), place);
      visible = score_mod.apply(x, unused, at, visible, [&] { return place >= 0; });
      if (elementwise) columns = columns_visible_to_warp<NB>(visible);
    } else if (range.cut(t)) {
      visible = within<NB>(at, bounds);
      each<NB>([&](int n, int r, uint32_t bit) {
        x[n][r] = visible & bit ? x[n][r] : minus_infinity();
      });
    }

    rows.add(x, scale_log2, p.drop_threshold);
    if constexpr (K::has_score_mod) {
      if (p.drop_threshold) {
        const uint32_t keep_mask = score_mod.template keep_mask<NB>(at);
        each<NB>([&](int n, int r, uint32_t bit) { x[n][r] = keep_mask & bit ? x[n][r] : 0.0f; });
      }
    }
    keys.scale_weights(x, visible);
    if (!K::has_score_mod || f.out.data) keys.add_values(rows.o, x, rows.part, columns);
  };

  const auto copy_queries = [&] { w.template copy_queries<T>(q, p.q, p.head_dim); };
  if constexpr (kStreams) go_over_stream<NB>(keys, tiles, range, copy_queries, score, take_in);
  else go_over_tiles<NB>(keys, tiles, range, copy_queries, score, take_in);
}

template <class T, class K>
PT_DEVICE void attention_fwd_tile(const AttentionForward& f, const ForwardWork<T, K>& w) {
  const AttentionProblem& p = f.p;
  const Sequence& s = w.s;
  if (K::has_score_mod && !f.out.data &&
      statistics_from_lse(f, s, w.b, w.h, w.i0, kForwardTile<T, K>.rows()))
    return;

  WarpRows<T, K> rows;
  const Place rows_at(w.i0 + rows.own, 0);
  const Range bounds[2] = {w.bounds(p, rows_at.row_of(0)), w.bounds(p, rows_at.row_of(2))};
  attend<T, K>(f, w, rows_at, bounds, ScoreMod<false>(p, s, w.b, w.h), rows);

  const int written = p.cu_queries ? s.num_q : p.num_queries;
  float factor[2];
  int64_t index[2];
  PT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = rows_at.row_of(2 * half);
    const RowEnd end =
        end_row(p, w.h, i < s.num_q, rows.maximum(half, p.scale), sum_of_quad(rows.l[half]));
    factor[half] = end.factor;
    index[half] = i < written ? s.row_q + i : -1;
    if (lane_id() % 4 != 0 || rows.part != 0 || index[half] < 0) continue;
    const int64_t stat = row_stat_at(f.at, w.b, w.h, index[half]);
    if (K::has_score_mod && !f.out.data) {
      store_one(f.row_max + stat, end.row_max);
      store_one(f.log2_sum + stat, end.log2_sum);
    } else {
      store_one(f.lse + stat, end.lse);
    }
  }
  if (!K::has_score_mod || f.out.data)
    store_rows<T>(f.out, w.b, w.h, rows.o, factor, index, rows.part);
}

template <class T, class K>
__global__ void __launch_bounds__(kForwardTile<T, K>.threads(), 1)
    attention_fwd_kernel(const __grid_constant__ AttentionForward f) {
  recompute_tiles<ForwardWork<T, K>, K>(f.p, f.recompute,
                                        [&](const auto& w) { attention_fwd_tile<T, K>(f, w); });
}

template <class T>
void sm80_attention_forward_as(const AttentionForward& f, const Sm80Plan& plan, void* stream) {
  const unsigned all =
      attention_blocks(f.p.sequences, f.p.heads, tiles_of(f.p.num_queries, plan.tile));
  const dim3 grid(recompute_blocks(f.recompute, all, multiprocessors()));
  const auto run = [&](auto kernel) {
    launch(kernel, grid, plan.tile.threads(), plan.smem_bytes, stream, f);
  };
  if constexpr (sizeof(T) == 4) {
    run(plan.head_class == 64 ? attention_fwd_kernel<T, Kind<64, true>>
                              : attention_fwd_kernel<T, Kind<256, true>>);
  } else if (plan.has_score_mod) {
    run(plan.head_class == 64    ? attention_fwd_kernel<T, Kind<64, true>>
        : plan.head_class == 128 ? attention_fwd_kernel<T, Kind<128, true>>
                                 : attention_fwd_kernel<T, Kind<256, true>>);
  } else {
    run(plan.head_class == 64    ? attention_fwd_kernel<T, Kind<64, false>>
        : plan.head_class == 128 ? attention_fwd_kernel<T, Kind<128, false>>
                                 : attention_fwd_kernel<T, Kind<256, false>>);
  }
}

template <class T>
void sm80_attention_forward_eight_bits_as(const AttentionForward& f, const Sm80Plan& plan,
                                          void* stream) {
  const dim3 grid(attention_blocks(f.p.sequences, f.p.heads, tiles_of(f.p.num_queries, plan.tile)));
  const auto run = [&](auto kernel) {
    launch(kernel, grid, plan.tile.threads(), plan.smem_bytes, stream, f);
  };
  if constexpr (sizeof(T) == 4) run(attention_fwd_kernel<T, EightBitKind<256>>);
  else
    run(plan.head_class == 128 ? attention_fwd_kernel<T, EightBitKind<128>>
                               : attention_fwd_kernel<T, EightBitKind<256>>);
}

}  // namespace pt::cuda
