// SPDX-License-Identifier: Apache-2.0
// Split KV forward: a block has the rows of all heads that share a key head, and one split of their
// keys. fwd_merge of combine.cuh merges the partials (maximum, sum and unnormalized output of each
// row).
//
// Splitting as in Dao et al., "Flash-Decoding for long-context inference" (2023); the steps are
// those of fwd.cuh. In 16 bits and head sizes up to 128 each warp streams a part of the split's
// tiles (WarpKeyTiles). A block with an empty split writes a sum of 0 and reads no key: the grid is
// sized for the longest possible sequence, so the host never reads lengths.
#pragma once

#include "cuda/attention/sm80/fwd.cuh"

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

// Destination of a row's values: the split's partials or, with a single split, the output, with the
// same bits as a merge. If neither is set, nothing is stored.
template <class T>
struct RowTarget {
  const AttentionForward& f;
  float* left = nullptr;
  T* out = nullptr;
  float factor = 0.0f;

  // Write the row's maximum and sum, or its lse, by one of the threads that hold a part of the row.
  template <class Work>
  PT_DEVICE RowTarget(const AttentionForward& f, const Work& w, const SplitPlace& at, int row,
                      float row_max, float sum, bool leader)
      : f(f) {
    const AttentionProblem& p = f.p;
    const int of_group = p.group * p.num_queries;
    if (row >= of_group) return;
    if (f.split.splits == 1) {
      end(w, at, row, row_max, sum, leader);
      return;
    }
    const int64_t group = int64_t(at.b) * w.grid.key_heads.by + at.key_head;
    const int64_t part = (group * of_group + row) * f.split.splits + at.split;
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
                              sum_of_quad(rows.l[half]), leader);
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
    const RowTarget<T> target(f, w, at, at.tile * kRows + row, all.row_max, all.sum, lane == 0);
    if (!target.none() && 4 * lane < f.p.value_dim) all.write(target, 4 * lane);
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
