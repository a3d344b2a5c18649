// SPDX-License-Identifier: Apache-2.0
// Norms, backward; problem.h has the formulas. A block processes many rows and sums their dweight
// and dbias; a second kernel adds the blocks' sums in order. No atomics, so the result is
// deterministic.
#pragma once

#include "cuda/layer_norm/row.cuh"
#include "cuda/tile/partials.cuh"

namespace pt::cuda {

// The inputs of a team's row.
template <class T, class S, int V>
struct GivenRow {
  Raw<T> d_out[V];
  Raw<S> h[V];
  float mean, rstd;

  template <class Mine>
  PT_DEVICE void load(const LayerNormBackward& f, const TeamRow& from, const Mine& mine) {
    load_row(d_out, from.of<T>(f.d_out), mine, from.here());
    load_row(h, from.of<S>(f.h), mine, from.here());
    mean = from.here() && f.mean ? load_one(f.mean + from.row()) : 0.0f;
    rstd = from.here() ? load_one(f.rstd + from.row()) : 0.0f;
  }
  PT_DEVICE void forget_widened() {
    PT_UNROLL
    for (int v = 0; v < V; ++v) d_out[v].forget_widened(), h[v].forget_widened();
  }
  PT_DEVICE float centered(int v, int i) const { return h[v][i] - mean; }
};

// Add the row to the thread's dweight and dbias sums; return mean(g) and mean(g xhat).
template <class T, class S, int V, class Team>
PT_DEVICE Sum2 sum_row(float (&dweight)[V][kVector], float (&dbias)[V][kVector],
                       const GivenRow<T, S, V>& given, const SharedColumns& weight, Team& team,
                       const MyColumns<Team>& mine, float per_column) {
  Sum2 sums{0.0f, 0.0f};
  PT_UNROLL
  for (int v = 0; v < V; ++v) {
    float w[kVector];
    weight.get(w, mine.column(v));
    Sum2 part{0.0f, 0.0f};
    PT_UNROLL
    for (int i = 0; i < kVector; ++i) {
      const float d = given.d_out[v][i], xhat = given.centered(v, i) * given.rstd, g = d * w[i];
      part = {part.a + g, part.b + g * xhat};
      dweight[v][i] += d * xhat;
      dbias[v][i] += d;
    }
    sums = sums + part;
  }
  sums = team.sum(sums);
  return {sums.a * per_column, sums.b * per_column};
}

// One team per row, held in registers. If registers allow, the team loads its next row before this
// row's reductions. d_out and dx have dtype T; h and the gradients of the residual stream have S.
template <class T, class S, class K>
__global__ void __launch_bounds__(K::backward.at_once)
    layer_norm_bwd_kernel(const __grid_constant__ LayerNormBackward f) {
  constexpr int V = K::backward.vectors;
  constexpr bool kAhead = sizeof(S) == 2;  // rows of float32 leave no registers for the next row
  const LayerNormProblem& p = f.p;
  TeamOf<K> team(p.lanes);
  const MyColumns<TeamOf<K>> mine{team, p.columns};
  const ColumnDropout dropout = dropout_of(p);
  const float per_column = 1.0f / float(p.columns);
  GivenRow<T, S, V> given;
  TeamRow next(p, team);
  if (kAhead) given.load(f, next, mine);
  const SharedColumns weight(ptx::dynamic_smem() + team.smem_bytes(), V * kVector * team.size());
  weight.fill<K::backward.shared_vectors()>(p.weight, p.columns, 1.0f);
  ptx::syncthreads();

  float dweight[V][kVector] = {}, dbias[V][kVector] = {};
  while (next.any_of_block()) {
    const TeamRow at = next;
    next.next();
    if (!kAhead) given.load(f, at, mine);
    GivenRow<T, S, V> later;
    if (kAhead) later.load(f, next, mine);
    Raw<S> d_residual_out[V];
    if (f.d_residual_out.data)
      load_row(d_residual_out, at.of<S>(f.d_residual_out), mine, at.here());

    const Sum2 mean = sum_row(dweight, dbias, given, weight, team, mine, per_column);
    if (kAhead && V > 2) given.forget_widened();
    const float mean_g = p.rms ? 0.0f : mean.a, slope = mean.b * given.rstd;
    const uint32_t kept = p.drop_threshold ? kept_of_row<V>(dropout, at.row(), mine) : 0;
    PT_UNROLL
    for (int v = 0; v < V; ++v) {
      const bool wanted = at.here() && mine.has(v);
      float w[kVector], dh[kVector];
      weight.get(w, mine.column(v));
      PT_UNROLL
      for (int i = 0; i < kVector; ++i)
        dh[i] = (given.d_out[v][i] * w[i] - mean_g - given.centered(v, i) * slope) * given.rstd;
      if (f.d_residual_out.data) {
        PT_UNROLL
        for (int i = 0; i < kVector; ++i) dh[i] += d_residual_out[v][i];
      }
      if (f.dresidual.data) {
        Raw<S> out;
        out.set(dh);
        out.store_where(at.of<S>(f.dresidual) + mine.column(v), wanted);
      }
      if (f.dx.data) {
        if (p.drop_threshold) drop(dh, kept >> kVector * v, dropout.scale());
        Raw<T> out;
        out.set(dh);
        out.store_where(at.of<T>(f.dx) + mine.column(v), wanted);
      }
    }
    if (kAhead) given = later;
  }
  const auto place = [&](int v) { return mine.column(v); };
  if (f.dweight_partials) store_part(team, dweight, place, f.dweight_partials, p.columns);
  if (f.dbias_partials) store_part(team, dbias, place, f.dbias_partials, p.columns);
}

// One block per row, read twice, for any dtype, alignment and width. The block's sums are in
// memory.
template <class K>
__global__ void __launch_bounds__(K::backward.at_once)
    layer_norm_bwd_any_kernel(const __grid_constant__ LayerNormBackward f) {
  const LayerNormProblem& p = f.p;
  BlockTeam team(0);
  const ColumnDropout dropout = dropout_of(p);
  const float n = float(p.columns);
  // uniform across threads
  const int vectors = (p.columns + kVector * team.size() - 1) / (kVector * team.size());
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const RowAt at(p, row);
    const float mean = f.mean ? load_one(f.mean + row) : 0.0f, rstd = load_one(f.rstd + row);
    float d_out[kVector], xhat[kVector], g[kVector];
    const auto load = [&](int column) {
      load_any(d_out, at.begin(f.d_out), f.d_out.dtype, column, p.columns, p.aligned);
      load_any(xhat, at.begin(f.h), f.h.dtype, column, p.columns, p.aligned);
      if (p.weight.data) load_any(g, p.weight.data, p.weight.dtype, column, p.columns, p.aligned);
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) {
        xhat[i] = (xhat[i] - mean) * rstd;
        g[i] = p.weight.data ? d_out[i] * g[i] : d_out[i];
      }
    };

    Sum2 sums{0.0f, 0.0f};
    for (int v = 0; v < vectors; ++v) {
      load(column_of(team, v));
      PT_UNROLL
      for (int i = 0; i < kVector; ++i)
        if (column_of(team, v) + i < p.columns) sums = {sums.a + g[i], sums.b + g[i] * xhat[i]};
    }
    sums = team.sum(sums);
    const float mean_g = p.rms ? 0.0f : sums.a / n, mean_gx = sums.b / n;

    for (int v = 0; v < vectors; ++v) {
      const int column = column_of(team, v);
      load(column);
      const int64_t part = int64_t(blockIdx.x) * p.columns;
      const bool begins = row == blockIdx.x;
      if (f.dbias_partials) add_to_part(f.dbias_partials + part, d_out, column, p.columns, begins);
      float dh[kVector];
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) {
        dh[i] = (g[i] - mean_g - xhat[i] * mean_gx) * rstd;
        g[i] = d_out[i] * xhat[i];
      }
      if (f.dweight_partials) add_to_part(f.dweight_partials + part, g, column, p.columns, begins);
      if (f.d_residual_out.data) {
        load_any(d_out, at.begin(f.d_residual_out), f.d_residual_out.dtype, column, p.columns,
                 p.aligned);
        PT_UNROLL
        for (int i = 0; i < kVector; ++i) dh[i] += d_out[i];
      }
      if (f.dresidual.data)
        store_any(dh, at.begin(f.dresidual), f.dresidual.dtype, column, p.columns, p.aligned);
      if (p.drop_threshold) drop(dh, dropout.keep(row, column), dropout.scale());
      if (f.dx.data) store_any(dh, at.begin(f.dx), f.dx.dtype, column, p.columns, p.aligned);
    }
  }
}

constexpr int kReduceWarps = 16;

// 32 columns per block: warp w adds the blocks w, w + 16, ..., then the first warp adds the warps.
__global__ void __launch_bounds__(32 * kReduceWarps)
    layer_norm_reduce_kernel(const __grid_constant__ LayerNormReduce r) {
  if (!r.sums[blockIdx.y]) return;
  const int warp = threadIdx.x / 32, column = blockIdx.x * 32 + threadIdx.x % 32;
  const uint32_t shared = ptx::dynamic_smem();
  float sum = 0.0f;
  if (column < r.columns)
    for (int b = warp; b < r.blocks; b += kReduceWarps)
      sum += load_one(r.partials[blockIdx.y] + int64_t(b) * r.columns + column);
  ptx::st_shared_f32(shared + 4 * threadIdx.x, sum);
  ptx::syncthreads();
  if (warp != 0 || column >= r.columns) return;
  sum = 0.0f;
  for (int w = 0; w < kReduceWarps; ++w)
    sum += ptx::ld_shared_f32(shared + 4 * (32 * w + threadIdx.x));
  with_type(r.dtype[blockIdx.y], [&](auto t) {
    store_one(static_cast<decltype(t)*>(r.sums[blockIdx.y]) + column, sum);
  });
}

}  // namespace pt::cuda
