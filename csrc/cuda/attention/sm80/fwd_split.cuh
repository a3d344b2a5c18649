// SPDX-License-Identifier: Apache-2.0
// Split KV forward: a block has the rows of all heads that share a key head, and one split of their
// keys. It writes partials (maximum m_s, sum l_s and unnormalized output o_s of each row), and the
// last block of a row tile merges them:
//
//   m = max_s m_s;  l = sum_s l_s e^(m_s - m);  out = sum_s o_s e^(m_s - m) / l * keep_scale
//   lse = m + ln l
//
// Splitting as in Dao et al., "Flash-Decoding for long-context inference" (2023); the steps are
// those of fwd.cuh. In 16 bits and head sizes up to 128 each warp streams a part of the split's
// tiles (WarpKeyTiles). The grid is sized for the longest possible sequence, so the host never
// reads lengths. Blocks past a sequence's last split end at once; a single split has no partials.
#pragma once

#include "cuda/attention/sm80/fwd.cuh"
#include "cuda/tile/block_counter.cuh"
#include "cuda/tile/reduce.cuh"

namespace pt::cuda {

PT_DEVICE ptx::Words4 as_words(const float (&x)[4]) {
  return {
      {ptx::float_bits(x[0]), ptx::float_bits(x[1]), ptx::float_bits(x[2]), ptx::float_bits(x[3])}};
}
PT_DEVICE void load_shared(float (&x)[4], uint32_t from) {
  const ptx::Words4 words = ptx::ld_shared_v4(from);
  PT_UNROLL
  for (int i = 0; i < 4; ++i) x[i] = ptx::bits_float(words.w[i]);
}

// Return the index of a row's first partial.
template <class Work>
PT_DEVICE int64_t first_part(const AttentionForward& f, const Work& w, const SplitPlace& at,
                             int row) {
  const int64_t group = int64_t(at.b) * w.grid.key_heads.by + at.key_head;
  return (group * (f.p.group * f.p.num_queries) + row) * f.split.splits;
}

// Destination of a row's values: the split's partials or, if the row is complete, the output. If
// neither is set, nothing is stored.
template <class T>
struct RowTarget {
  const AttentionForward& f;
  float* left = nullptr;
  T* out = nullptr;
  float factor = 0.0f;

  // Write the row's maximum and sum, or its lse, by one of the threads that hold a part of the row.
  template <class Work>
  PT_DEVICE RowTarget(const AttentionForward& f, const Work& w, const SplitPlace& at, int row,
                      float row_max, float sum, bool complete, bool leader)
      : f(f) {
    const AttentionProblem& p = f.p;
    if (row >= p.group * p.num_queries) return;
    if (complete) {
      end(w, at, row, row_max, sum, leader);
      return;
    }
    const int64_t part = first_part(f, w, at, row) + at.split;
    if (leader) store_pair(f.split.stats + 2 * part, row_max, sum);
    if (sum != 0.0f) left = f.split.values + part * p.value_dim;
  }

  PT_DEVICE bool none() const { return !left && !out; }
  template <int N>
  PT_DEVICE void store(int column, const float (&x)[N]) const {
    if (!left) {
      PT_UNROLL
      for (int i = 0; i < N; i += 2)
        store_two(f.out, out, column + i, factor == 0.0f ? 0.0f : x[i] * factor,
                  factor == 0.0f ? 0.0f : x[i + 1] * factor);
    } else if (column < f.p.value_dim) {
      if constexpr (N == 4) ptx::st_global_v4(left + column, as_words(x));
      else store_pair(left + column, x[0], x[1]);
    }
  }

 private:
  template <class Work>
  PT_DEVICE void end(const Work& w, const SplitPlace& at, int row, float row_max, float sum,
                     bool leader) {
    const AttentionProblem& p = f.p;
    const int i = w.grid.group.quotient(row), h = at.key_head * p.group + row - i * p.group;
    if (i >= (p.cu_queries ? w.s.num_q : p.num_queries)) return;
    const RowEnd end = end_row(p, h, i < w.s.num_q, row_max, sum);
    const int64_t index = w.s.row_q + i;
    factor = end.factor;
    if (leader) store_one(f.lse + row_stat_at(f.at, at.b, h, index), end.lse);
    out = static_cast<T*>(f.out.data) + at.b * f.out.stride.batch + h * f.out.stride.head +
          index * f.out.stride.row;
  }
};

// Store the rows of warps that share the rows' columns.
template <class T, class K, class Work>
PT_DEVICE void write_rows(const AttentionForward& f, const Work& w, const WarpRows<T, K>& rows,
                          const SplitPlace& at) {
  // held across the loop, its parts spilled
  const auto thread = uint32_t(ptx::opaque(int(threadIdx.x))), lane = thread % 32;
  const int part = int(thread / 32 % rows.kSplits) * rows.DB;
  PT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const bool leader = lane % 4 == 0 && part == 0;
    const int row = at.tile * kForwardTile<T, K>.rows() + rows.own + int(lane / 4) + 8 * half;
    const RowTarget<T> target(f, w, at, row, rows.maximum(half, f.p.scale),
                              sum_of_quad(rows.l[half]), w.splits() == 1, leader);
    if (target.none()) continue;
    PT_UNROLL
    for (int d = 0; d < rows.DB; ++d)
      target.store(8 * (part + d) + 2 * int(lane % 4),
                   {rows.o[d][2 * half], rows.o[d][2 * half + 1]});
  }
}

// Merges a block's rows after streams of tiles, each over a part of the keys. Warps store their
// partials where their tiles were; then one warp merges one row, in the order of warps, because few
// rows are the rule. A row's maximum and sum follow its values; rows start eight banks apart.
template <class T, class K>
struct LeftRow {
  static constexpr AttentionTile kTile = kForwardTile<T, K>;
  static constexpr int kStreams = kTile.streams, kRow = row_bytes(kTile, sizeof(T)),
                       kTiles = 2 * kTile.columns * kRow;
  static constexpr int kPitch = (K::head_dim + 8) * 4;
  static_assert(kTile.rows() * kPitch <= kTiles && K::head_dim <= 128);

  int row;
  float row_max = minus_infinity(), sum = 0.0f, weight[kStreams] = {};

  // Store up to rows() rows of partials.
  template <class F>
  static PT_DEVICE void leave(const WarpRows<T, K>& mine, F rows, float scale) {
    const float sums[2] = {sum_of_quad(mine.l[0]), sum_of_quad(mine.l[1])};
    // held across the loop, its parts spilled
    const uint32_t thread = uint32_t(ptx::opaque(int(threadIdx.x)));
    const int warp = int(thread / 32), quad = int(thread % 32 / 4), lane = int(thread % 4);
    ptx::syncwarp();  // all reads of its tiles are done
    PT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = quad + 8 * half;
      if (row >= rows()) continue;
      if (lane == 0)
        ptx::st_shared_v2_f32(place(warp, row, K::head_dim), mine.maximum(half, scale), sums[half]);
      PT_UNROLL
      for (int d = 0; d < mine.DB; ++d)
        ptx::st_shared_v2_f32(place(warp, row, 8 * d + 2 * lane), mine.o[d][2 * half],
                              mine.o[d][2 * half + 1]);
    }
    ptx::syncthreads();
  }

  PT_DEVICE explicit LeftRow(int row) : row(row) {}
  PT_DEVICE void read_stats() {
    float stats[kStreams][2];
    PT_UNROLL
    for (int w = 0; w < kStreams; ++w) {
      ptx::ld_shared_v2_f32(place(w, row, K::head_dim), stats[w][0], stats[w][1]);
      row_max = fmaxf(row_max, stats[w][0]);
    }
    PT_UNROLL
    for (int w = 0; w < kStreams; ++w) {
      weight[w] = weight_of_part(stats[w][0], stats[w][1], row_max);
      sum = ptx::fma_rn(stats[w][1], weight[w], sum);
    }
  }
  // Store four columns.
  PT_DEVICE void write(const RowTarget<T>& target, int column) const {
    float x[4] = {};
    PT_UNROLL
    for (int w = 0; w < kStreams; ++w) {
      if (sum == 0.0f) continue;  // no partials either
      float more[4];
      load_shared(more, place(w, row, column));
      PT_UNROLL
      for (int i = 0; i < 4; ++i) x[i] = ptx::fma_rn(more[i], weight[w], x[i]);
    }
    target.store(column, x);
  }

 private:
  static PT_DEVICE uint32_t place(int warp, int row, int column) {
    return ptx::dynamic_smem() + kTile.rows() * kRow + warp * kTiles + row * kPitch + 4 * column;
  }
};

// attended() returns the warp's rows of its stream; place() returns the block's position.
template <class T, class K, class Work, class F, class G>
PT_DEVICE void put_streams_together(const AttentionForward& f, const Work& w, F attended, G place) {
  constexpr int kRows = kForwardTile<T, K>.rows();
  const auto rows = [&] { return min(kRows, f.p.group * f.p.num_queries - place().tile * kRows); };
  if (!w.empty) LeftRow<T, K>::leave(attended(), rows, f.p.scale);
  const SplitPlace at = place();
  const int lane = int(threadIdx.x % 32), end = rows();
  PT_NO_UNROLL
  for (int row = int(threadIdx.x / 32); row < end; row += kForwardTile<T, K>.streams) {
    LeftRow<T, K> all(row);
    if (!w.empty) all.read_stats();
    const RowTarget<T> target(f, w, at, at.tile * kRows + row, all.row_max, all.sum,
                              w.splits() == 1, lane == 0);
    if (!target.none() && 4 * lane < f.p.value_dim) all.write(target, 4 * lane);
  }
}

// The weights of a row's splits, and its maximum and sum. A lane holds splits lane and lane + 32.
struct SplitWeights {
  static constexpr int kPerLane = kMostSplits / 32;
  static constexpr float kNone = -1.0f;  // split without values; a weight of 0 may belong to a NaN
  float weight[kPerLane], row_max = minus_infinity(), sum = 0.0f;

  PT_DEVICE SplitWeights(const float* stats, int splits) {
    float maximum[kPerLane], sums[kPerLane];
    PT_UNROLL
    for (int n = 0; n < kPerLane; ++n) {
      const int split = 32 * n + lane_id();
      const uint64_t both = split < splits ? ptx::ld_global_u64(stats + 2 * split) : 0;
      maximum[n] = ptx::bits_float(uint32_t(both)), sums[n] = ptx::bits_float(uint32_t(both >> 32));
      if (sums[n] != 0.0f) row_max = fmaxf(row_max, maximum[n]);
    }
    PT_UNROLL
    for (int d = 1; d < 32; d *= 2) row_max = fmaxf(row_max, ptx::shfl_xor(row_max, d));
    PT_UNROLL
    for (int n = 0; n < kPerLane; ++n) {
      weight[n] = sums[n] == 0.0f ? kNone : weight_of_part(maximum[n], sums[n], row_max);
      sum = ptx::fma_rn(sums[n], weight[n], sum);
    }
    sum = LaneTeam(32).sum({sum, 0.0f}).a;
  }
  // Return a split's weight; every lane calls this.
  PT_DEVICE float of(int split) const {
    float x = weight[0];
    PT_UNROLL
    for (int n = 1; n < kPerLane; ++n) x = split < 32 * n ? x : weight[n];
    return ptx::shfl(x, split % 32);
  }
};

// Merge four columns of a row's values: every fourth split from 0, 1, 2 and 3 on adds to a sum of
// its own. The order does not depend on the block that merges. `AtOnce`: loads in flight.
template <int AtOnce>
PT_DEVICE void merge_values(float (&x)[4], const float* values, const SplitWeights& weights,
                            int splits, int columns) {
  constexpr int kSums = 4;
  static_assert(kMostSplits % AtOnce == 0);
  float sums[kSums][4] = {};
  PT_NO_UNROLL
  for (int first = 0; first < splits; first += AtOnce) {
    float weight[AtOnce];
    ptx::Words4 more[AtOnce];
    PT_UNROLL
    for (int i = 0; i < AtOnce; ++i) {
      const int split = first + i;
      weight[i] = weights.of(split);
      // A select, because a branch would wait for the weight.
      more[i] = ptx::ld_global_v4(values + (weight[i] < 0.0f ? 0 : split * columns));
    }
    PT_UNROLL
    for (int i = 0; i < AtOnce; ++i) {
      float (&sum)[4] = sums[i % kSums];
      PT_UNROLL
      for (int k = 0; k < 4; ++k)
        sum[k] = weight[i] < 0.0f ? sum[k]
                                  : ptx::fma_rn(ptx::bits_float(more[i].w[k]), weight[i], sum[k]);
    }
  }
  PT_UNROLL
  for (int k = 0; k < 4; ++k) {
    x[k] = 0.0f;
    PT_UNROLL
    for (int i = 0; i < kSums; ++i) x[k] += sums[i][k];
  }
}

// Merge the row tile, one warp per row, if this block is the last of the tile's splits. Others
// write nothing more.
template <class T, class K, class Work>
PT_DEVICE void merge_splits(const AttentionForward& f, const Work& w, const SplitPlace& at) {
  const int splits = w.splits();
  if (splits == 1) return;
  const AttentionProblem& p = f.p;
  constexpr int kRows = kForwardTile<T, K>.rows(), kAtOnce = K::head_dim == 64 ? 8 : 16;
  const int64_t group = int64_t(at.b) * w.grid.key_heads.by + at.key_head;
  const BlockCounter<kMostSplits> counter{f.split.counters + group * w.grid.row_tiles + at.tile,
                                          f.split.ticket};
  if (threadIdx.x == 0) counter.begin(splits);
  ptx::syncthreads();
  if (threadIdx.x == 0) ptx::st_shared_u32(ptx::dynamic_smem(), counter.arrive());
  ptx::syncthreads();
  if (!ptx::ld_shared_u32(ptx::dynamic_smem())) return;

  const int end = min((at.tile + 1) * kRows, p.group * p.num_queries), columns = p.value_dim;
  PT_NO_UNROLL
  for (int row = at.tile * kRows + int(threadIdx.x / 32); row < end; row += 4) {
    const int64_t part = first_part(f, w, at, row);
    const SplitWeights weights(f.split.stats + 2 * part, splits);
    const RowTarget<T> target(f, w, at, row, weights.row_max, weights.sum, true, lane_id() == 0);
    if (target.none()) continue;
    PT_NO_UNROLL
    for (int first = 0; first < columns; first += 128) {
      const int column = first + 4 * lane_id();
      float x[4];
      merge_values<kAtOnce>(x, f.split.values + part * columns + (column < columns ? column : 0),
                            weights, splits, columns);
      if (column < columns) target.store(column, x);
    }
  }
}

// Blocks per SM: as many as registers allow without spills; for streams of head size 128, which use
// 68 KB, as many as shared memory allows. Three of them have 96 to 192 KB in flight; an H100 needs
// some 20.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int kWideStreamsBlocks = 3;
#else
constexpr int kWideStreamsBlocks = 2;
#endif
template <class T, class K>
constexpr int kSplitBlocks = sizeof(T) == 4 || K::eight_bits ? 2
                             : K::head_dim == 128            ? kWideStreamsBlocks
                             : !K::has_score_mod             ? 4
                                                             : 3;

template <class T, class K>
__global__ void __launch_bounds__(kForwardTile<T, K>.threads(), kSplitBlocks<T, K>)
    attention_fwd_split_kernel(const __grid_constant__ AttentionForward f,
                               const __grid_constant__ SplitGrid grid) {
  constexpr AttentionTile kTile = kForwardTile<T, K>;
  static_assert(kSplitKeys / kTile.columns % kTile.streams == 0 && kTile.threads() == 128);
  const AttentionProblem& p = f.p;
  // Recomputed for the partials: held across the loop with score_mod, its values spilled.
  const auto place_of_block = [&] {
    return SplitPlace(grid, K::has_score_mod ? ptx::opaque(int(blockIdx.x)) : int(blockIdx.x));
  };
  const GroupTile<kTile.rows(), kTile.columns, K::has_score_mod> w(
      p, grid, place_of_block(), int(threadIdx.x) / 32 % kTile.streams, kTile.streams);
  if (w.empty && place_of_block().split > 0) return;
  const auto attended = [&] {
    WarpRows<T, K> rows;
    if (w.empty) return rows;
    const int first_row = w.r0 + rows.own;
    const GroupPlace rows_at(first_row, 0, grid.group);
    const Range bounds[2] = {w.bounds(p, rows_at.row), w.bounds(p, rows_at.row + 8)};
    using Terms =
        std::conditional_t<K::has_score_mod, ScoreMod<false, true, HeadsOfGroup>, NoScoreMod>;
    attend<T, K>(f, w, rows_at, bounds, Terms(p, w.s, w.b, w.h, first_row), rows);
    return rows;
  };
  if constexpr (kTile.streams == 1) write_rows<T, K>(f, w, attended(), place_of_block());
  else put_streams_together<T, K>(f, w, attended, place_of_block);
  merge_splits<T, K>(f, w, place_of_block());
}

template <class T>
void sm80_attention_split_as(const AttentionForward& f, const SplitPlan& plan, void* stream) {
  const dim3 grid(attention_blocks(f.p.sequences, f.p.heads / f.p.group,
                                   int64_t(plan.row_tiles) * plan.splits));
  const Sm80Plan& kernel = plan.kernel;
  const auto run = [&](auto k) {
    launch(k, grid, kernel.tile.threads(), kernel.smem_bytes, stream, f, split_grid(f.p, plan));
  };
  if constexpr (sizeof(T) == 4) {
    run(attention_fwd_split_kernel<T, SplitKind<256, true>>);
  } else if (!kernel.has_score_mod) {
    run(kernel.head_class == 64 ? attention_fwd_split_kernel<T, SplitKind<64, false>>
                                : attention_fwd_split_kernel<T, SplitKind<128, false>>);
  } else {
    run(kernel.head_class == 64    ? attention_fwd_split_kernel<T, SplitKind<64, true>>
        : kernel.head_class == 128 ? attention_fwd_split_kernel<T, SplitKind<128, true>>
                                   : attention_fwd_split_kernel<T, SplitKind<256, true>>);
  }
}

template <class T>
void sm80_attention_split_eight_bits_as(const AttentionForward& f, const SplitPlan& plan,
                                        void* stream) {
  const dim3 grid(attention_blocks(f.p.sequences, f.p.heads / f.p.group,
                                   int64_t(plan.row_tiles) * plan.splits));
  const Sm80Plan& kernel = plan.kernel;
  const auto run = [&](auto k) {
    launch(k, grid, kernel.tile.threads(), kernel.smem_bytes, stream, f, split_grid(f.p, plan));
  };
  if constexpr (sizeof(T) == 4) run(attention_fwd_split_kernel<T, EightBitSplitKind<256>>);
  else
    run(kernel.head_class == 128 ? attention_fwd_split_kernel<T, EightBitSplitKind<128>>
                                 : attention_fwd_split_kernel<T, EightBitSplitKind<256>>);
}

}  // namespace pt::cuda
