// SPDX-License-Identifier: Apache-2.0
// Attention backward, bwd_dq: d_query of a Q tile, and its partial gradients of ALiBi's slopes and
// T5's table.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/attention/sm80/tile.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"
#include "cuda/tile/reduce.cuh"

namespace pt::cuda {

// Adds a tile of dS, rows of `stride` words at `tile`, to this block's sums by diagonal. One thread
// adds one diagonal; diagonals outside the table's range go to the first or last sum, held in the
// thread until the end.
template <int BM, int BN>
struct DiagonalSums {
  static constexpr int kStride = BN + kDiagonalPad;
  uint32_t tile;
  float* sums;  // this block's sums, before + after + 1
  float below = 0.0f, above = 0.0f;

  template <int NB>
  PT_DEVICE void put(const float (&ds)[NB][4], int row) const {
    const Place at(row, 0);
    each<NB>([&](int n, int r, uint32_t) {
      ptx::st_shared_f32(tile + 4 * (at.row_of(r) * kStride + at.column_of(n, r)), ds[n][r]);
    });
  }
  // `first`: j - i - offset of the tile's first element.
  PT_DEVICE void add(int first, const AttentionProblem& p) {
    for (int c = int(threadIdx.x); c < BM + BN - 1; c += int(blockDim.x)) {
      const int d = c - (BM - 1);
      float sum = 0.0f;
      for (int r = max(0, -d); r < min(BM, BN - d); ++r)
        sum += ptx::ld_shared_f32(tile + 4 * (r * kStride + r + d));
      if (first + d <= -p.before) below += sum;
      else if (first + d >= p.after) above += sum;
      else store_one(sums + first + d + p.before, load_one(sums + first + d + p.before) + sum);
    }
  }
  PT_DEVICE void finish(BlockTeam& team, const AttentionProblem& p) {
    const Sum2 far = team.sum({below, above});
    if (threadIdx.x == 0) store_far(sums, p, far.a, far.b);
  }
};

template <class T, class K>
constexpr AttentionTile kBwdDqTile =
    attention_tile(Pass::BwdDq, K::head_dim, sizeof(T), K::has_score_mod);
template <class T, class K>
using BwdDqWork = QueryTile<kBwdDqTile<T, K>.rows(), kBwdDqTile<T, K>.columns, K::has_score_mod>;

template <class T, class K>
PT_DEVICE void attention_bwd_dq_tile(const AttentionBackward& g, const BwdDqWork<T, K>& w) {
  constexpr AttentionTile kTile = kBwdDqTile<T, K>;
  constexpr int kRow = row_bytes(kTile, sizeof(T)), BM = kTile.rows(), BN = kTile.columns,
                NB = BN / 8;
  constexpr int DB = K::head_dim / 8 / kTile.splits, kStage = 2 * BN * kRow;
  using M = Products<T>;
  const AttentionProblem& p = g.p;
  const Sequence& s = w.s;
  const Tiles& range = w.range;

  const SmemTile<kRow> q{ptx::dynamic_smem()}, d_out{q.base + BM * kRow};
  const uint32_t streamed = d_out.base + BM * kRow;
  DiagonalSums<BM, BN> diagonals{streamed + 2 * kTile.stages * BN * kRow, nullptr};
  const int64_t block =
      (int64_t(w.b) * p.heads + w.h) * ((p.num_queries + BM - 1) / BM) + w.i0 / BM;
  if (g.diagonal_partials) diagonals.sums = g.diagonal_partials + block * (p.before + p.after + 1);
  // Even and odd tiles alternate stages: block lists contain pairs of them.
  const auto k_tile = [&](int t) { return SmemTile<kRow>{streamed + t % kTile.stages * kStage}; };
  const auto v_tile = [&](int t) { return SmemTile<kRow>{k_tile(t).base + BN * kRow}; };
  const auto copy_tile = [&](int t) {
    w.template copy_keys<T>(k_tile(t), p.k, p.head_dim, t, p.group);
    w.template copy_keys<T>(v_tile(t), p.v, p.value_dim, t, p.group);
    ptx::cp_async_commit();
  };

  const int warp = int(threadIdx.x) / 32, own = 16 * (warp / kTile.splits),
            part = warp % kTile.splits * DB;
  const Place rows_at(w.i0 + own, 0);
  Range bounds[2];
  RowStats row_stats[2];
  PT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = rows_at.row_of(2 * half);
    row_stats[half] = read_row_stats(g, row_stat_at(g.at, w.b, w.h, s.row_q + i), i < s.num_q);
    bounds[half] =
        row_stats[half].row_max < infinity() || row_stats[half].row_max != row_stats[half].row_max
            ? w.keys_of(p, i)
            : Range{0, 0};
  }
  const ScoreMod<false> score_mod(p, s, w.b, w.h);
  float dq[DB][4], slope_sum = 0.0f;
  clear(dq);

  TileList<K::has_score_mod, BN> tiles(p.blocks.queries, w.b, w.h, w.i0,
                                       w.template gap<kTile.stages>(p));
  int t = tiles.first(range);
  if (t < range.last) {
    w.template copy_queries<T>(q, p.q, p.head_dim);
    w.template copy_queries<T>(d_out, g.d_out, p.value_dim);
    copy_tile(t);
  }
  for (; t < range.last; t = tiles.leave(t)) {
    ptx::cp_async_wait<0>();
    ptx::syncthreads();  // this tile is complete, and all reads of the previous one are done
    const int next = tiles.after(t);
    if (kTile.stages == 2 && next < range.last) copy_tile(next);

    float x[NB][4], dp[NB][4], weights[NB][4];
    M::scores(x, q, own, k_tile(t), p.head_dim);
    M::scores(dp, d_out, own, v_tile(t), p.value_dim);
    const Place at(w.i0 + own, w.origin + t * BN);
    // Rows past the last query also add to sums of dS, so full tiles may have hidden pairs too.
    const int place = tiles.place(p);
    const bool elementwise = K::has_score_mod && (p.hides_pairs() || s.padding_gaps || place >= 0 ||
                                                  w.may_have_gaps(p, t));
    const bool cut = elementwise ||
                     (K::has_score_mod && (g.slope_partials || g.diagonal_partials)) ||
                     range.cut(t);
    uint32_t visible = visible_in_tile<K, false, NB>(p, s, w.b, at, bounds, cut, place);
    visible = gradients<K, false>(
        p, score_mod, x, dp, weights, at, visible, cut, [&] { return place >= 0; },
        [&](int, int r) { return row_stats[r / 2]; });
    const uint32_t columns = elementwise ? columns_visible_to_warp<NB>(visible) : kAllColumns;
    M::product(dq, x, k_tile(t), part, p.head_dim, columns);

    if (K::has_score_mod && g.slope_partials && part == 0)
      each<NB>(
          [&](int n, int r, uint32_t) { slope_sum -= dp[n][r] * score_mod.distance(at, n, r); });
    if (K::has_score_mod && g.diagonal_partials) {
      if (part == 0) diagonals.put(dp, own);
      ptx::syncthreads();
      diagonals.add(w.origin + t * BN - w.i0 - s.diagonal_offset, p);
    }
    if (kTile.stages == 1) {
      ptx::syncthreads();
      if (next < range.last) copy_tile(next);
    }
  }

  if (K::has_score_mod && (g.slope_partials || g.diagonal_partials)) {
    ptx::syncthreads();  // the sums reuse the tiles' memory
    BlockTeam team(0);
    if (g.slope_partials) {
      const float sum = team.sum({slope_sum, 0.0f}).a;
      if (threadIdx.x == 0) store_one(g.slope_partials + block, sum);
    }
    if (g.diagonal_partials) diagonals.finish(team, p);
  }
  if (!g.dq.data) return;
  const int written = p.cu_queries ? s.num_q : p.num_queries;
  float factor[2];
  int64_t index[2];
  PT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = rows_at.row_of(2 * half);
    factor[half] = bounds[half].empty() ? 0.0f : p.scale;
    index[half] = i < written ? s.row_q + i : -1;
  }
  store_rows<T>(g.dq, w.b, w.h, dq, factor, index, part);
}

template <class T, class K>
__global__ void __launch_bounds__(kBwdDqTile<T, K>.threads(), 1)
    attention_bwd_dq_kernel(const __grid_constant__ AttentionBackward g) {
  recompute_tiles<BwdDqWork<T, K>, K>(g.p, g.recompute,
                                      [&](const auto& w) { attention_bwd_dq_tile<T, K>(g, w); });
}

template <class T>
void sm80_attention_bwd_dq_as(const AttentionBackward& g, const Sm80Plan& plan, void* stream) {
  const unsigned all =
      attention_blocks(g.p.sequences, g.p.heads, tiles_of(g.p.num_queries, plan.tile));
  const dim3 grid(recompute_blocks(g.recompute, all, multiprocessors()));
  with_kind<T, Pass::BwdDq>(plan, [&](auto kind) {
    launch(attention_bwd_dq_kernel<T, decltype(kind)>, grid, plan.tile.threads(), plan.smem_bytes,
           stream, g);
  });
}

}  // namespace pt::cuda
