// SPDX-License-Identifier: Apache-2.0
// Attention backward, masks and biases: a block computes one tile of the gradient in the tensor's
// shape, looping in order over the sequences, heads, queries and keys that share it.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/attention/sm80/tile.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace pt::cuda {

template <class T, class K>
__global__ void __launch_bounds__(
    attention_tile(Pass::BwdDbias, K::head_dim, sizeof(T), K::has_score_mod).threads(), 1)
    attention_bwd_dbias_kernel(const __grid_constant__ AttentionDbias f) {
  constexpr AttentionTile kTile =
      attention_tile(Pass::BwdDbias, K::head_dim, sizeof(T), K::has_score_mod);
  constexpr int kRow = row_bytes(kTile, sizeof(T)), BM = kTile.rows(), BN = kTile.columns,
                NB = BN / 8, kStride = BN + kDiagonalPad;
  using M = Products<T>;
  const AttentionBackward& g = f.b;
  const AttentionProblem& p = g.p;

  const int origin = key_origin(p), key_tiles = (p.num_keys - origin + BN - 1) / BN,
            query_tiles = (p.num_queries + BM - 1) / BM;
  const DbiasPart part(f, query_tiles, key_tiles, int(blockIdx.x));
  const auto& mine = part.of;

  const SmemTile<kRow> q{ptx::dynamic_smem()}, d_out{q.base + BM * kRow}, k{d_out.base + BM * kRow},
      v{k.base + BN * kRow};
  const int own = 16 * (int(threadIdx.x) / 32);
  float sum[NB][4];
  clear(sum);
  for (int b = mine[0].lo; b < mine[0].hi; ++b) {
    const Sequence s(p, b);
    for (int h = mine[1].lo; h < mine[1].hi; ++h) {
      const ScoreMod<false> score_mod(p, s, b, h);
      for (int i_tile = mine[2].lo; i_tile < mine[2].hi; ++i_tile) {
        const QueryTile<BM, BN, true> w(p, s, b, h, i_tile);
        Tiles range = w.range;
        range.first = max(range.first, mine[3].lo), range.last = min(range.last, mine[3].hi);
        TileList<true, BN> tiles(p.blocks.queries, b, h, w.i0, w.template gap<1>(p));
        const int first = tiles.first(range), last = range.last;
        if (first >= last) continue;
        const Place rows_at(w.i0 + own, 0);
        Range bounds[2];
        RowStats row_stats[2];
        PT_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int i = rows_at.row_of(2 * half);
          row_stats[half] = read_row_stats(g, row_stat_at(g.at, b, h, s.row_q + i), i < s.num_q);
          bounds[half] = w.bounds(p, i);
        }
        ptx::syncthreads();  // all reads of the previous tiles are done
        w.template copy_queries<T>(q, p.q, p.head_dim);
        w.template copy_queries<T>(d_out, g.d_out, p.value_dim);
        for (int t = first; t < last; t = tiles.leave(t)) {
          if (t > first) ptx::syncthreads();
          w.template copy_keys<T>(k, p.k, p.head_dim, t, p.group);
          w.template copy_keys<T>(v, p.v, p.value_dim, t, p.group);
          ptx::cp_async_commit();
          ptx::cp_async_wait<0>();
          ptx::syncthreads();
          float x[NB][4], dp[NB][4], weights[NB][4];
          M::scores(x, q, own, k, p.head_dim);
          M::scores(dp, d_out, own, v, p.value_dim);
          const Place at(w.i0 + own, origin + t * BN);
          uint32_t visible = outside_gaps<NB>(p, s, at, within<NB>(at, bounds));
          if (s.padding_gaps) visible &= visible_columns<NB>(at, KeyPaddingBitmap(p, b));
          const int place = tiles.place(p);
          if (p.blocks.bits && place >= 0)
            visible &= visible_in_block<false, NB>(p.blocks, place, at);
          gradients<K, false>(
              p, score_mod, x, dp, weights, at, visible, true, [&] { return place >= 0; },
              [&](int, int r) { return row_stats[r / 2]; });
          each<NB>([&](int n, int r, uint32_t) { sum[n][r] += dp[n][r]; });
        }
      }
    }
  }

  // Sum over the tile's broadcast dimensions, then write the tile, a row, a column or one number.
  const uint32_t tile = ptx::dynamic_smem();
  ptx::syncthreads();
  const Place at(own, 0);
  each<NB>([&](int n, int r, uint32_t) {
    ptx::st_shared_f32(tile + 4 * (at.row_of(r) * kStride + at.column_of(n, r)), sum[n][r]);
  });
  ptx::syncthreads();
  const bool one_row = f.sizes[2] == 1, one_column = f.sizes[3] == 1;
  const int rows = one_row ? 1 : BM, columns = one_column ? 1 : BN;
  for (int x = int(threadIdx.x); x < rows * columns; x += int(blockDim.x)) {
    const int r = x / columns, c = x % columns, i = mine[2].lo * BM + r,
              j = one_column ? 0 : origin + mine[3].lo * BN + c;
    if (i >= p.num_queries || j < 0 || j >= p.num_keys) continue;
    float total = 0.0f;
    for (int y = r; y < (one_row ? BM : r + 1); ++y)
      for (int z = c; z < (one_column ? BN : c + 1); ++z)
        total += ptx::ld_shared_f32(tile + 4 * (y * kStride + z));
    with_type(f.dtype, [&](auto t) {
      store_one(static_cast<decltype(t)*>(f.data) + part.at(f, i, j), total);
    });
  }
}

template <class T>
void sm80_attention_bwd_dbias_as(const AttentionDbias& f, const Sm80Plan& plan, void* stream) {
  const AttentionProblem& p = f.b.p;
  const int64_t query_tiles = tiles_of(p.num_queries, plan.tile);
  const int64_t key_tiles =
      (p.num_keys + p.key_start % 32 + plan.tile.columns - 1) / plan.tile.columns;
  const auto of = [&](int d, int64_t n) { return f.sizes[d] == 1 ? 1 : n; };
  const dim3 grid(
      attention_blocks(of(0, p.sequences), of(1, p.heads), of(2, query_tiles) * of(3, key_tiles)));
  launch(attention_bwd_dbias_kernel<T, Kind<256, true>>, grid, plan.tile.threads(), plan.smem_bytes,
         stream, f);
}

}  // namespace pt::cuda
