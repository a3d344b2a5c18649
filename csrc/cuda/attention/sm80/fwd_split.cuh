// SPDX-License-Identifier: Apache-2.0
// Attention forward of few queries: a block has the rows of all heads that share a key head, and of their keys one split. What it leaves,
// each row's maximum, sum and values so far, fwd_merge.cuh puts together.
//
// Splitting by Dao et al., "Flash-Decoding for long-context inference" (2023); the steps are those of fwd.cuh. A block whose split is empty
// leaves a sum of 0, and reads no key: the grid is of the longest sequence that there may be, so that nobody reads lengths on the host.
#pragma once

#include "cuda/attention/sm80/fwd.cuh"

namespace pt::cuda {

// Of all keys: nothing is left to add up, and the row ends here, with the bits that a merge gives.
template <class T, class K, class Work>
PT_DEVICE void write_row(const AttentionForward& f, const Work& w, const WarpRows<T, K>& rows, int row, int half, float sum) {
  const AttentionProblem& p = f.p;
  const int i = row / p.group, h = w.h + row % p.group;
  if (i >= (p.cu_queries ? w.s.num_q : p.num_queries)) return;
  const RowEnd end = end_row(p, h, i < w.s.num_q, rows.m[half], sum);
  int64_t index[2] = {-1, -1};
  index[half] = w.s.row_q + i;
  const float factor[2] = {end.factor, end.factor};
  if (lane_id() % 4 == 0 && rows.part == 0) store_one(f.lse + row_stat_at(f.at, w.b, h, index[half]), end.lse);
  store_rows<T>(f.out, w.b, h, rows.o, factor, index, rows.part);
}

// Blocks of a multiprocessor: as many as their registers let without a spill. At head size 64 sm_120 takes more than the 128 of four
// blocks.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kSmallSplitBlocks = 3;
#else
constexpr int kSmallSplitBlocks = 4;
#endif
template <class T, class K>
constexpr int kSplitBlocks = sizeof(T) == 4 || (K::eight_bits && K::head_dim == 256) ? 2
                             : K::head_dim == 64                                     ? kSmallSplitBlocks
                                                                                     : 3;

template <class T, class K>
__global__ void __launch_bounds__(kForwardTile<T, K>.threads(), kSplitBlocks<T, K>)
    attention_fwd_split_kernel(const __grid_constant__ AttentionForward f, int row_tiles) {
  constexpr AttentionTile kTile = kForwardTile<T, K>;
  const AttentionProblem& p = f.p;
  const SplitPlace place(p, f.split.splits, row_tiles, blockIdx.x);
  const GroupTile<kTile.rows(), kTile.columns> w(p, place, row_tiles);

  WarpRows<T, K> rows;
  const int first_row = w.r0 + rows.own;
  const GroupPlace rows_at(first_row, 0, p.group);
  const Range bounds[2] = {w.bounds(p, rows_at.row), w.bounds(p, rows_at.row + 8)};
  if (w.range.count() > 0) {
    const ScoreMod<false, true, HeadsOfGroup> score_mod(p, w.s, w.b, w.h, first_row);
    attend<T, K>(f, w, rows_at, bounds, score_mod, rows);
  }

  const int of_group = p.group * p.num_queries;
  const int64_t group = int64_t(place.b) * (p.heads / p.group) + place.key_head;
  PT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float sum = sum_of_quad(rows.l[half]);
    const int row = rows_at.row + 8 * half;
    if (row >= of_group) continue;
    if (f.split.splits == 1) {
      write_row(f, w, rows, row, half, sum);
      continue;
    }
    const int64_t at = (group * of_group + row) * f.split.splits + place.split;
    if (lane_id() % 4 == 0 && rows.part == 0) store_pair(f.split.stats + 2 * at, rows.m[half], sum);
    if (sum == 0.0f) continue;
    float* const values = f.split.values + at * p.value_dim;
    PT_UNROLL
    for (int d = 0; d < WarpRows<T, K>::DB; ++d) {
      const int column = 8 * (rows.part + d) + 2 * (lane_id() % 4);
      if (column < p.value_dim) store_pair(values + column, rows.o[d][2 * half], rows.o[d][2 * half + 1]);
    }
  }
}

}  // namespace pt::cuda
