// SPDX-License-Identifier: Apache-2.0
// Column sums over a block's rows, which a second kernel adds in order. No atomics, so results are
// deterministic.
#pragma once

#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vectors.cuh"

namespace pt::cuda {

// Add the teams' sums of each column in order and write the block's sum. A thread's vector v starts
// at column place(v), which is past the row's end if it has none. Every thread calls this.
template <int V, class Place>
PT_DEVICE void store_part(const LaneTeam& team, const float (&mine)[V][kVector], Place place,
                          float* partials, int columns) {
  const uint32_t shared = ptx::dynamic_smem();
  ptx::syncthreads();  // earlier uses of the memory are over
  PT_UNROLL
  for (int v = 0; v < V; ++v) {
    const int column = place(v);
    if (column >= columns) continue;
    const uint32_t at = shared + 4 * (team.team() * columns + column);
    ptx::st_shared_v4_f32(at, mine[v][0], mine[v][1], mine[v][2], mine[v][3]);
    ptx::st_shared_v4_f32(at + 16, mine[v][4], mine[v][5], mine[v][6], mine[v][7]);
  }
  ptx::syncthreads();
  for (int column = threadIdx.x; column < columns; column += blockDim.x) {
    float sum = 0.0f;
    for (int t = 0; t < team.teams(); ++t)
      sum += ptx::ld_shared_f32(shared + 4 * (t * columns + column));
    ptx::st_global_u32(partials + int64_t(blockIdx.x) * columns + column, ptx::float_bits(sum));
  }
}

// The block's only team.
template <int V, class Place>
PT_DEVICE void store_part(const BlockTeam& team, const float (&mine)[V][kVector], Place place,
                          float* partials, int columns) {
  PT_UNROLL
  for (int v = 0; v < V; ++v) {
    const int column = place(v);
    if (column >= columns) continue;
    Raw<float> raw;
    raw.set(mine[v]);
    raw.store(partials + int64_t(blockIdx.x) * columns + column);
  }
}

// partials[column + i] += v[i], or = v[i] at the block's first row. Only this thread accesses them.
PT_DEVICE void add_to_part(float* partials, const float (&v)[kVector], int column, int columns,
                           bool first) {
  PT_UNROLL
  for (int i = 0; i < kVector; ++i)
    if (column + i < columns)
      store_one(partials + column + i, first ? v[i] : load_one(partials + column + i) + v[i]);
}

}  // namespace pt::cuda
