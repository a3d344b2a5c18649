// SPDX-License-Identifier: Apache-2.0
// Norms, forward: out = (h - mean) rstd weight + bias with h = residual + dropout(x).
//
// Two passes in float32: the mean, then the variance about it. The sum of the deviations estimates
// the mean's rounding error, which is removed from the variance and the result.
#pragma once

#include "cuda/layer_norm/row.cuh"

namespace pt::cuda {

// Compute a row's h from the loaded vectors. Store residual_out if requested; h is then rounded to
// its dtype.
template <class T, class S, int V, class Mine>
PT_DEVICE void take_row(float (&h)[V][kVector], const Raw<T> (&x)[V], const Raw<S> (&residual)[V],
                        const LayerNormForward& f, const ColumnDropout& dropout, const TeamRow& at,
                        const Mine& mine) {
  PT_UNROLL
  for (int v = 0; v < V; ++v) {
    PT_UNROLL
    for (int i = 0; i < kVector; ++i) h[v][i] = x[v][i];
  }
  if (!f.residual_out.data) return;
  if (f.p.drop_threshold) {
    const uint32_t kept = kept_of_row<V>(dropout, at.row(), mine);
    PT_UNROLL
    for (int v = 0; v < V; ++v) drop(h[v], kept >> kVector * v, dropout.scale());
  }
  if (f.residual.data) {
    PT_UNROLL
    for (int v = 0; v < V; ++v) {
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) h[v][i] += residual[v][i];
    }
  }
  PT_UNROLL
  for (int v = 0; v < V; ++v) {
    Raw<S> stored;
    stored.set(h[v]);
    stored.store_where(at.of<S>(f.residual_out) + mine.column(v), at.here() && mine.has(v));
    PT_UNROLL
    for (int i = 0; i < kVector; ++i) h[v][i] = stored[i];
  }
}

struct RowMoments {
  float mean, shift, rstd;  // the row's mean is mean + shift
};

// Subtract the mean from the row. Vectors past the thread's columns are and stay zero.
template <int V, class Team>
PT_DEVICE RowMoments center_row(float (&h)[V][kVector], Team& team, const MyColumns<Team>& mine,
                                bool rms, float eps) {
  const float per_column = 1.0f / float(mine.columns);
  float sum = 0.0f;
  PT_UNROLL
  for (int v = 0; v < V; ++v) sum += sum_of(h[v]);
  const float mean = rms ? 0.0f : team.sum(sum) * per_column;
  Sum2 deviation{0.0f, 0.0f};
  PT_UNROLL
  for (int v = 0; v < V; ++v) {
    const float off = mine.has(v) ? mean : 0.0f;
    float squares = 0.0f;
    PT_UNROLL
    for (int i = 0; i < kVector; ++i) h[v][i] -= off, squares += h[v][i] * h[v][i];
    deviation = deviation + Sum2{sum_of(h[v]), squares};
  }
  deviation = team.sum(deviation);
  const float shift = rms ? 0.0f : deviation.a * per_column;
  return {mean, shift, rstd_of(deviation.b * per_column - shift * shift, eps)};
}

// One team per row, held in registers. The team loads its next row before this row's reductions, so
// an SM always has loads in flight. x and out have dtype T; residual and residual_out have S.
template <class T, class S, class K>
__global__ void __launch_bounds__(K::forward.at_once)
    layer_norm_fwd_kernel(const __grid_constant__ LayerNormForward f) {
  constexpr int V = K::forward.vectors;
  constexpr bool kAhead = sizeof(S) == 2;  // rows of float32 leave no registers for the next row
  const LayerNormProblem& p = f.p;
  TeamOf<K> team(p.lanes);
  const MyColumns<TeamOf<K>> mine{team, p.columns};
  const ColumnDropout dropout = dropout_of(p);
  Raw<T> x[V];
  Raw<S> residual[V];
  const auto load = [&](const TeamRow& from) {
    load_row(x, from.of<T>(f.x), mine, from.here());
    if (f.residual.data) load_row(residual, from.of<S>(f.residual), mine, from.here());
  };
  TeamRow next(p, team);
  if (kAhead) load(next);
  const int slots = V * kVector * team.size();
  const SharedColumns weight(ptx::dynamic_smem() + team.smem_bytes(), slots),
      bias(weight.end(), slots);
  weight.fill<K::forward.shared_vectors()>(p.weight, p.columns, 1.0f);
  bias.fill<K::forward.shared_vectors()>(f.bias, p.columns, 0.0f);
  ptx::syncthreads();

  while (next.any_of_block()) {
    const TeamRow at = next;
    next.next();
    if (!kAhead) load(at);
    float h[V][kVector];
    take_row(h, x, residual, f, dropout, at, mine);
    if (kAhead) load(next);
    const RowMoments m = center_row(h, team, mine, p.rms, f.eps);
    PT_UNROLL
    for (int v = 0; v < V; ++v) {
      float w[kVector], b[kVector];
      weight.get(w, mine.column(v));
      bias.get(b, mine.column(v));
      PT_UNROLL
      for (int i = 0; i < kVector; ++i)
        h[v][i] = (h[v][i] * m.rstd - m.shift * m.rstd) * w[i] + b[i];
      Raw<T> out;
      out.set(h[v]);
      out.store_where(at.of<T>(f.out) + mine.column(v), at.here() && mine.has(v));
    }
    if (at.here() && team.rank() == 0) {
      if (f.mean) ptx::st_global_u32(f.mean + at.row(), ptx::float_bits(m.mean + m.shift));
      ptx::st_global_u32(f.rstd + at.row(), ptx::float_bits(m.rstd));
    }
  }
}

// One block per row, read three times, for any dtype, alignment and width.
template <class K>
__global__ void __launch_bounds__(K::forward.at_once)
    layer_norm_fwd_any_kernel(const __grid_constant__ LayerNormForward f) {
  const LayerNormProblem& p = f.p;
  BlockTeam team(0);
  const ColumnDropout dropout = dropout_of(p);
  const float n = float(p.columns);
  // uniform across threads
  const int vectors = (p.columns + kVector * team.size() - 1) / (kVector * team.size());
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const RowAt at(p, row);
    // h; each thread reads back only its writes.
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
      if (p.weight.data)
        load_any(weight, p.weight.data, p.weight.dtype, column, p.columns, p.aligned);
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
