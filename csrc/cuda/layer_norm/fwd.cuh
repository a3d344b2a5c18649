// SPDX-License-Identifier: Apache-2.0
// Norms, forward: out = (h - mean) rstd weight + bias with h = residual + dropout(x).
//
// The mean is taken first and the variance about it, in float32; the sum of the deviations then says by how much the mean was rounded,
// which takes that rounding out of the variance and of the result.
#pragma once

#include "cuda/layer_norm/row.cuh"

namespace pt::cuda {

// One team for each row, kept in registers. x and out have dtype T, residual and residual_out S.
template <class T, class S, class K>
__global__ void __launch_bounds__(K::forward.max_threads, K::forward.min_blocks)
    layer_norm_fwd_kernel(const __grid_constant__ LayerNormForward f) {
  constexpr int V = K::forward.vectors;
  const LayerNormProblem& p = f.p;
  TeamOf<K> team(p.lanes);
  const ColumnDropout dropout = dropout_of(p);
  const float n = float(p.columns);
  for (int64_t first = int64_t(blockIdx.x) * team.teams(); first < p.rows; first += int64_t(gridDim.x) * team.teams()) {
    const int64_t row = first + team.team();
    const bool here = row < p.rows + PT_FAULT(a_norms_row_past_the_last);  // the others of the warp may have a row
    const RowAt at(p, here ? row : 0);
    const auto inside = [&](int v) { return here && column_of(team, v) < p.columns + PT_FAULT(a_column_past_the_rows_end); };

    Raw<T> x[V];
    Raw<S> residual[V];
    PT_UNROLL
    for (int v = 0; v < V; ++v) {
      x[v].clear();
      if (inside(v)) x[v].template load<true>(at.of<T>(f.x) + column_of(team, v));
    }
    if (f.residual.data) {
      PT_UNROLL
      for (int v = 0; v < V; ++v) {
        residual[v].clear();
        if (inside(v)) residual[v].template load<true>(at.of<S>(f.residual) + column_of(team, v));
      }
    }

    float h[V][kVector], sum = 0.0f;
    PT_UNROLL
    for (int v = 0; v < V; ++v) {
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) h[v][i] = x[v][i];
      if (p.drop_threshold) drop(h[v], dropout.keep(row, column_of(team, v)), dropout.scale());
      if (f.residual.data) {
        PT_UNROLL
        for (int i = 0; i < kVector; ++i) h[v][i] += residual[v][i];
      }
      if (f.residual_out.data) {
        Raw<S> stored;
        stored.set(h[v]);
        if (inside(v)) stored.store(at.of<S>(f.residual_out) + column_of(team, v));
        PT_UNROLL
        for (int i = 0; i < kVector; ++i) h[v][i] = stored[i];
      }
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) sum += h[v][i];
    }

    const float mean = p.rms ? 0.0f : team.sum({sum, 0.0f}).a / n;
    Sum2 deviation{0.0f, 0.0f};
    PT_UNROLL
    for (int v = 0; v < V; ++v) {
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) {
        h[v][i] = inside(v) ? h[v][i] - mean : 0.0f;
        deviation = {deviation.a + h[v][i], deviation.b + h[v][i] * h[v][i]};
      }
    }
    deviation = team.sum(deviation);
    const float shift = p.rms && !PT_FAULT(the_mean_taken_off_in_an_rms_norm) ? 0.0f : deviation.a / n;
    const float rstd = rstd_of(deviation.b / n - shift * shift, f.eps);

    PT_UNROLL
    for (int v = 0; v < V; ++v) {
      if (!inside(v)) continue;
      const int column = column_of(team, v);
      float y[kVector], weight[kVector], bias[kVector];
      if (p.weight.data) load_any(weight, p.weight.data, p.weight.dtype, column, p.columns, true);
      if (f.bias.data) load_any(bias, f.bias.data, f.bias.dtype, column, p.columns, true);
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) {
        y[i] = (h[v][i] - shift) * rstd;
        if (p.weight.data) y[i] *= weight[i];
        if (f.bias.data) y[i] += bias[i];
      }
      Raw<T> out;
      out.set(y);
      out.store(at.of<T>(f.out) + column);
    }
    if (here && team.rank() == 0) {
      if (f.mean) ptx::st_global_u32(f.mean + row, ptx::float_bits(mean + shift));
      ptx::st_global_u32(f.rstd + row, ptx::float_bits(rstd));
    }
  }
}

// One block for each row, read three times: any dtypes, any alignment, any width.
template <class K>
__global__ void __launch_bounds__(K::forward.max_threads, K::forward.min_blocks)
    layer_norm_fwd_any_kernel(const __grid_constant__ LayerNormForward f) {
  const LayerNormProblem& p = f.p;
  BlockTeam team(0);
  const ColumnDropout dropout = dropout_of(p);
  const float n = float(p.columns);
  const int vectors = (p.columns + kVector * team.size() - 1) / (kVector * team.size());  // the same for every thread
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const RowAt at(p, row);
    // h, which a thread writes and reads again itself.
    const void* stored = f.residual_out.data ? at.begin(f.residual_out) : at.begin(f.x);
    const DType stored_dtype = f.residual_out.data ? f.residual_out.dtype : f.x.dtype;
    float h[kVector], sum = 0.0f;
    for (int v = 0; v < vectors; ++v) {
      const int column = column_of(team, v);
      load_any(h, at.begin(f.x), f.x.dtype, column, p.columns, p.aligned);
      if (p.drop_threshold) drop(h, dropout.keep(row, column), dropout.scale());
      if (f.residual.data) {
        float residual[kVector];
        load_any(residual, at.begin(f.residual), f.residual.dtype, column, p.columns, p.aligned);
        PT_UNROLL
        for (int i = 0; i < kVector; ++i) h[i] += residual[i];
      }
      if (f.residual_out.data) {
        store_any(h, at.begin(f.residual_out), f.residual_out.dtype, column, p.columns, p.aligned);
        load_any(h, stored, stored_dtype, column, p.columns, p.aligned);
      }
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) sum += h[i];
    }

    const float mean = p.rms ? 0.0f : team.sum({sum, 0.0f}).a / n;
    Sum2 deviation{0.0f, 0.0f};
    for (int v = 0; v < vectors; ++v) {
      const int column = column_of(team, v);
      load_any(h, stored, stored_dtype, column, p.columns, p.aligned);
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) {
        const float d = column + i < p.columns ? h[i] - mean : 0.0f;
        deviation = {deviation.a + d, deviation.b + d * d};
      }
    }
    deviation = team.sum(deviation);
    const float shift = p.rms ? 0.0f : deviation.a / n;
    const float rstd = rstd_of(deviation.b / n - shift * shift, f.eps);

    for (int v = 0; v < vectors; ++v) {
      const int column = column_of(team, v);
      float weight[kVector], bias[kVector];
      load_any(h, stored, stored_dtype, column, p.columns, p.aligned);
      if (p.weight.data) load_any(weight, p.weight.data, p.weight.dtype, column, p.columns, p.aligned);
      if (f.bias.data) load_any(bias, f.bias.data, f.bias.dtype, column, p.columns, p.aligned);
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) {
        h[i] = (h[i] - mean - shift) * rstd;
        if (p.weight.data) h[i] *= weight[i];
        if (f.bias.data) h[i] += bias[i];
      }
      store_any(h, at.begin(f.out), f.out.dtype, column, p.columns, p.aligned);
    }
    if (team.rank() == 0) {
      if (f.mean) ptx::st_global_u32(f.mean + row, ptx::float_bits(mean + shift));
      ptx::st_global_u32(f.rstd + row, ptx::float_bits(rstd));
    }
  }
}

}  // namespace pt::cuda
