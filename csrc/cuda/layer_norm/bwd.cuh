// SPDX-License-Identifier: Apache-2.0
// Norms, backward: the formulas are in problem.h. A block goes over many rows and sums dweight and dbias of those; a second kernel adds the
// blocks' sums in order. No atomics, so the result is the same at every run.
#pragma once

#include "cuda/layer_norm/row.cuh"
#include "cuda/tile/partials.cuh"

namespace pt::cuda {

// One team for each row, kept in registers. d_out and dx have dtype T, h and the gradients of the residual stream S.
template <class T, class S, class K>
__global__ void __launch_bounds__(K::backward.max_threads, K::backward.min_blocks)
    layer_norm_bwd_kernel(const __grid_constant__ LayerNormBackward f) {
  constexpr int V = K::backward.vectors;
  const LayerNormProblem& p = f.p;
  TeamOf<K> team(p.lanes);
  const ColumnDropout dropout = dropout_of(p);
  const float n = float(p.columns);
  float dweight[V][kVector] = {}, dbias[V][kVector] = {};
  for (int64_t first = int64_t(blockIdx.x) * team.teams(); first < p.rows; first += int64_t(gridDim.x) * team.teams()) {
    const int64_t row = first + team.team();
    const bool here = row < p.rows + PT_FAULT(a_norms_row_past_the_last_backward);  // the others of the warp may have a row
    const RowAt at(p, here ? row : 0);
    const auto inside = [&](int v) { return here && column_of(team, v) < p.columns; };

    Raw<T> d_out[V];
    Raw<S> h[V];
    PT_UNROLL
    for (int v = 0; v < V; ++v) {
      d_out[v].clear();
      h[v].clear();
      if (!inside(v)) continue;
      d_out[v].template load<true>(at.of<T>(f.d_out) + column_of(team, v));
      h[v].template load<true>(at.of<S>(f.h) + column_of(team, v));
    }
    const float mean = here && f.mean ? load_one(f.mean + row) : 0.0f, rstd = here ? load_one(f.rstd + row) : 0.0f;
    const auto xhat = [&](int v, int i) { return (h[v][i] - mean) * rstd; };
    const auto weights = [&](float (&w)[kVector], int v) {
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) w[i] = 1.0f;
      if (p.weight.data && inside(v)) load_any(w, p.weight.data, p.weight.dtype, column_of(team, v), p.columns, true);
    };

    Sum2 sums{0.0f, 0.0f};
    PT_UNROLL
    for (int v = 0; v < V; ++v) {
      if (!inside(v)) continue;
      float w[kVector];
      weights(w, v);
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) {
        const float g = d_out[v][i] * w[i];
        sums = {sums.a + g, sums.b + g * xhat(v, i)};
        dweight[v][i] += d_out[v][i] * xhat(v, i);
        dbias[v][i] += d_out[v][i];
      }
    }
    sums = team.sum(sums);
    const float mean_g = p.rms ? 0.0f : sums.a / n, mean_gx = sums.b / n;

    PT_UNROLL
    for (int v = 0; v < V; ++v) {
      const int column = column_of(team, v);
      if (PT_FAULT(dropout_in_a_divergent_warp) && !inside(v)) continue;
      const uint32_t keep = p.drop_threshold ? dropout.keep(row, column) : 0;  // the whole warp calls it
      if (!inside(v)) continue;
      float w[kVector], dh[kVector];
      weights(w, v);
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) dh[i] = (d_out[v][i] * w[i] - mean_g - xhat(v, i) * mean_gx) * rstd;
      if (f.d_residual_out.data) {
        Raw<S> d;
        d.template load<true>(at.of<S>(f.d_residual_out) + column);
        PT_UNROLL
        for (int i = 0; i < kVector; ++i) dh[i] += PT_FAULT(the_residuals_gradient_forgotten) ? 0.0f : d[i];
      }
      if (f.dresidual.data) {
        Raw<S> out;
        out.set(dh);
        out.store(at.of<S>(f.dresidual) + column);
      }
      if (f.dx.data) {
        if (p.drop_threshold) drop(dh, keep, dropout.scale());
        Raw<T> out;
        out.set(dh);
        out.store(at.of<T>(f.dx) + column);
      }
    }
  }
  const auto place = [&](int v) { return column_of(team, v); };
  if (f.dweight_partials) store_part(team, dweight, place, f.dweight_partials, p.columns);
  if (f.dbias_partials) store_part(team, dbias, place, f.dbias_partials, p.columns);
}

// One block for each row, read twice: any dtypes, any alignment, any width. The block's sums lie in memory.
template <class K>
__global__ void __launch_bounds__(K::backward.max_threads, K::backward.min_blocks)
    layer_norm_bwd_any_kernel(const __grid_constant__ LayerNormBackward f) {
  const LayerNormProblem& p = f.p;
  BlockTeam team(0);
  const ColumnDropout dropout = dropout_of(p);
  const float n = float(p.columns);
  const int vectors = (p.columns + kVector * team.size() - 1) / (kVector * team.size());  // the same for every thread
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
      const int64_t part = PT_FAULT(partials_of_the_wrong_block) ? 0 : int64_t(blockIdx.x) * p.columns;
      const bool begins = row == blockIdx.x && !PT_FAULT(a_partial_never_begun);
      if (f.dbias_partials) add_to_part(f.dbias_partials + part, d_out, column, p.columns, begins);
      float dh[kVector];
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) {
        dh[i] = (g[i] - mean_g - xhat[i] * mean_gx) * rstd;
        g[i] = d_out[i] * xhat[i];
      }
      if (f.dweight_partials) add_to_part(f.dweight_partials + part, g, column, p.columns, begins);
      if (f.d_residual_out.data) {
        load_any(d_out, at.begin(f.d_residual_out), f.d_residual_out.dtype, column, p.columns, p.aligned);
        PT_UNROLL
        for (int i = 0; i < kVector; ++i) dh[i] += d_out[i];
      }
      if (f.dresidual.data) store_any(dh, at.begin(f.dresidual), f.dresidual.dtype, column, p.columns, p.aligned);
      if (p.drop_threshold) drop(dh, dropout.keep(row, column), dropout.scale());
      if (f.dx.data) store_any(dh, at.begin(f.dx), f.dx.dtype, column, p.columns, p.aligned);
    }
  }
}

constexpr int kReduceWarps = 16;

// 32 columns a block: warp w adds the blocks w, w + 16, ..., then the first warp adds the warps.
__global__ void __launch_bounds__(32 * kReduceWarps) layer_norm_reduce_kernel(const __grid_constant__ LayerNormReduce r) {
  if (!r.sums[blockIdx.y]) return;
  const int warp = threadIdx.x / 32, column = blockIdx.x * 32 + threadIdx.x % 32;
  const uint32_t shared = ptx::dynamic_smem();
  float sum = 0.0f;
  if (column < r.columns)
    for (int b = warp; b < r.blocks - PT_FAULT(a_blocks_partials_left_out); b += kReduceWarps)
      sum += load_one(r.partials[blockIdx.y] + int64_t(b) * r.columns + column);
  ptx::st_shared_f32(shared + 4 * threadIdx.x, sum);
  if (!PT_FAULT(no_barrier_in_the_norms_second_stage)) ptx::syncthreads();
  if (warp != 0 || column >= r.columns) return;
  sum = 0.0f;
  for (int w = 0; w < kReduceWarps; ++w) sum += ptx::ld_shared_f32(shared + 4 * (32 * w + threadIdx.x));
  with_type(r.dtype[blockIdx.y], [&](auto t) { store_one(static_cast<decltype(t)*>(r.sums[blockIdx.y]) + column, sum); });
}

}  // namespace pt::cuda
