// SPDX-License-Identifier: Apache-2.0
// Attention forward of few queries: a block has the rows of all heads that share a key head, and of their keys one split. What it leaves,
// each row's maximum, sum and values so far, fwd_merge.cuh puts together.
//
// Splitting by Dao et al., "Flash-Decoding for long-context inference" (2023); the steps are those of fwd.cuh. In 16 bits and head sizes up
// to 128 each warp streams a part of the split's tiles (WarpKeyTiles). A block whose split is empty leaves a sum of 0, and reads no key:
// the grid is of the longest sequence that there may be, so that nobody reads lengths on the host.
#pragma once

#include "cuda/attention/sm80/fwd.cuh"

namespace pt::cuda {

PT_DEVICE void load_shared(float (&x)[4], uint32_t from) {
  const ptx::Words4 words = ptx::ld_shared_v4(from);
  PT_UNROLL
  for (int i = 0; i < 4; ++i) x[i] = ptx::bits_float(words.w[i]);
}

// Of all keys: nothing is left to add up, and the row ends here, with the bits that a merge gives.
template <class T, class Rows, class Work>
PT_DEVICE void write_row(const AttentionForward& f, const Work& w, const Rows& rows, int row, int half, float sum) {
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

// Nothing, in the columns that the warp has in the end.
template <class T, class K>
PT_DEVICE auto part_of_block(const WarpRows<T, K>& mine) {
  constexpr int kStreams = kForwardTile<T, K>.streams, DB = WarpRows<T, K>::DB / kStreams;
  return RowSums<DB>(kStreams == 1 ? mine.part : int(threadIdx.x) / 32 * DB);
}

// What a block has of its rows. After streams of tiles each warp has all columns of a part of the keys: these are put together in the order
// of warps, and then each warp has its part of the columns. A warp leaves what it has where its tiles were, a lane 16 bytes for each eight
// columns: it has the same rows and columns in all of them.
template <class T, class K>
PT_DEVICE auto sums_of_block(const WarpRows<T, K>& mine) {
  using Mine = WarpRows<T, K>;
  constexpr AttentionTile kTile = kForwardTile<T, K>;
  constexpr int kStreams = kTile.streams, kRow = row_bytes(kTile, sizeof(T)), kTiles = 2 * kTile.columns * kRow, kStats = Mine::DB;
  static_assert(kStreams == 1 || ((kStats + 1) * 512 <= kTiles && kTile.row_warps == 1));
  const float sums[2] = {sum_of_quad(mine.l[0]), sum_of_quad(mine.l[1])};
  auto all = part_of_block<T, K>(mine);
  if constexpr (kStreams == 1) {
    all = mine;
    all.l[0] = sums[0], all.l[1] = sums[1];
  } else {
    const auto place = [&](int warp, int n) {
      return ptx::dynamic_smem() + kTile.rows() * kRow + warp * kTiles + n * 512 + lane_id() * 16;
    };
    const auto leave = [&](int n, const float (&x)[4]) { ptx::st_shared_v4_f32(place(int(threadIdx.x) / 32, n), x[0], x[1], x[2], x[3]); };
    ptx::syncwarp();  // nobody reads its tiles any more
    leave(kStats, {mine.m[0], mine.m[1], sums[0], sums[1]});
    PT_UNROLL
    for (int d = 0; d < Mine::DB; ++d) leave(d, mine.o[d]);
    if (!PT_FAULT(no_barrier_before_streams_are_put_together)) ptx::syncthreads();

    float stats[kStreams][4];
    PT_UNROLL
    for (int w = 0; w < kStreams; ++w) {
      load_shared(stats[w], place(w, kStats));
      PT_UNROLL
      for (int half = 0; half < 2; ++half) all.m[half] = fmaxf(all.m[half], stats[w][half]);
    }
    PT_UNROLL
    for (int w = 0; w < kStreams; ++w) {
      float weight[2];
      PT_UNROLL
      for (int half = 0; half < 2; ++half) {
        weight[half] = weight_of_part(stats[w][half], stats[w][2 + half], all.m[half]);
        all.l[half] = ptx::fma_rn(stats[w][2 + half], weight[half], all.l[half]);
      }
      PT_UNROLL
      for (int d = 0; d < all.DB; ++d) {
        float o[4];
        load_shared(o, place(w, all.part + d));
        PT_UNROLL
        for (int i = 0; i < 4; ++i) all.o[d][i] = ptx::fma_rn(o[i], weight[i / 2], all.o[d][i]);
      }
    }
  }
  return all;
}

// Blocks of a multiprocessor: as many as their registers let without a spill; of streams of head size 128, which take 68 KB, as shared
// memory lets. Three of them have 96 to 192 KB on their way, where an H100 needs some 20.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int kWideStreamsBlocks = 3;
#else
constexpr int kWideStreamsBlocks = 2;
#endif
template <class T, class K>
constexpr int kSplitBlocks = sizeof(T) == 4 || (K::eight_bits && K::head_dim == 256) ? 2
                             : !K::eight_bits && K::head_dim == 128                  ? kWideStreamsBlocks
                                                                                     : 3;

template <class T, class K>
__global__ void __launch_bounds__(kForwardTile<T, K>.threads(), kSplitBlocks<T, K>)
    attention_fwd_split_kernel(const __grid_constant__ AttentionForward f, int row_tiles) {
  constexpr AttentionTile kTile = kForwardTile<T, K>;
  static_assert(kSplitKeys / kTile.columns % kTile.streams == 0);
  const AttentionProblem& p = f.p;
  // Computed again for what is left: kept over the loop its numbers spilled.
  const auto place_of_block = [&] { return SplitPlace(p, f.split.splits, row_tiles, uint32_t(ptx::opaque(int(blockIdx.x)))); };
  const GroupTile<kTile.rows(), kTile.columns> w(p, place_of_block(), row_tiles, int(threadIdx.x) / 32 % kTile.streams, kTile.streams);

  WarpRows<T, K> streamed;
  const int first_row = w.r0 + streamed.own;
  const GroupPlace rows_at(first_row, 0, p.group);
  const Range bounds[2] = {w.bounds(p, rows_at.row), w.bounds(p, rows_at.row + 8)};
  auto rows = part_of_block<T, K>(streamed);
  if (!w.empty) {
    const ScoreMod<false, true, HeadsOfGroup> score_mod(p, w.s, w.b, w.h, first_row);
    attend<T, K>(f, w, rows_at, bounds, score_mod, streamed);
    rows = sums_of_block<T, K>(streamed);
  }

  const SplitPlace place = place_of_block();
  const int of_group = p.group * p.num_queries;
  const int64_t group = int64_t(place.b) * (p.heads / p.group) + place.key_head;
  PT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const float sum = rows.l[half];
    const int row = rows_at.row + 8 * half;
    if (row >= of_group) continue;
    if (f.split.splits == 1) {
      write_row<T>(f, w, rows, row, half, sum);
      continue;
    }
    const int64_t at = (group * of_group + row) * f.split.splits + place.split;
    if (lane_id() % 4 == 0 && rows.part == 0) store_pair(f.split.stats + 2 * at, rows.m[half], sum);
    if (sum == 0.0f) continue;
    float* const values = f.split.values + at * p.value_dim;
    PT_UNROLL
    for (int d = 0; d < rows.DB; ++d) {
      const int column = 8 * (rows.part + d) + 2 * (lane_id() % 4);
      if (column < p.value_dim) store_pair(values + column, rows.o[d][2 * half], rows.o[d][2 * half + 1]);
    }
  }
}

}  // namespace pt::cuda
