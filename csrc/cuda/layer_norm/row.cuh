// SPDX-License-Identifier: Apache-2.0
// Shared by the norm kernels: addresses of rows, a thread's columns, weight and bias, and dropout.
#pragma once

#include <type_traits>

#include "cuda/layer_norm/config.h"
#include "cuda/layer_norm/problem.h"
#include "cuda/tile/philox.cuh"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vectors.cuh"

namespace pt::cuda {

template <class K>
using TeamOf = std::conditional_t<K::kernel == LayerNormKernel::Lanes, LaneTeam, BlockTeam>;

// A row's offset in each tensor.
struct RowAt {
  int64_t outer, inner;

  PT_DEVICE RowAt(const LayerNormProblem& p, int64_t row)
      : outer(row / p.inner), inner(row - outer * p.inner) {}
  template <class T>
  PT_DEVICE const T* of(const Rows& t) const {
    return static_cast<const T*>(t.data) + outer * t.outer + inner * t.inner;
  }
  template <class T>
  PT_DEVICE T* of(const RowsOut& t) const {
    return static_cast<T*>(t.data) + outer * t.outer + inner * t.inner;
  }
  // Return the row's address if the dtype is known only at run time.
  PT_DEVICE const void* begin(const Rows& t) const {
    return static_cast<const uint8_t*>(t.data) +
           (outer * t.outer + inner * t.inner) * size_of(t.dtype);
  }
  PT_DEVICE void* begin(const RowsOut& t) const {
    return static_cast<uint8_t*>(t.data) + (outer * t.outer + inner * t.inner) * size_of(t.dtype);
  }
};

// A team's row. next() moves by one grid of rows. The constructor divides once for the row and once
// for the step, because a 64-bit division is some 70 instructions; a warp needs 525 for a row of
// 1024 columns.
class TeamRow : public RowAt {
 public:
  template <class Team>
  PT_DEVICE TeamRow(const LayerNormProblem& p, const Team& team)
      : RowAt(p, int64_t(blockIdx.x) * team.teams() + team.team()), p_(p),
        first_(int64_t(blockIdx.x) * team.teams()), step_(int64_t(gridDim.x) * team.teams()),
        by_(p, step_), team_(team.team()) {}

  PT_DEVICE int64_t row() const { return first_ + team_; }
  PT_DEVICE bool here() const { return row() < p_.rows; }  // false for a team past the last row
  PT_DEVICE bool any_of_block() const { return first_ < p_.rows; }
  PT_DEVICE void next() {
    first_ += step_;
    outer += by_.outer, inner += by_.inner;
    if (inner >= p_.inner) inner -= p_.inner, ++outer;
  }

 private:
  const LayerNormProblem& p_;
  int64_t first_, step_;  // per block: uniform across its threads
  RowAt by_;
  int team_;
};

// Return the first of the eight columns of a thread's vector v.
template <class Team>
PT_DEVICE int column_of(const Team& team, int v) {
  return kVector * (v * team.size() + team.rank());
}

// A thread's columns, equal in every row.
template <class Team>
struct MyColumns {
  const Team& team;
  int columns;

  PT_DEVICE int column(int v) const { return column_of(team, v); }
  PT_DEVICE bool has(int v) const { return column(v) < columns; }
};

// Load a row; zeros for vectors without columns and teams without a row.
template <class T, int V, class Mine>
PT_DEVICE void load_row(Raw<T> (&raw)[V], const T* row, const Mine& mine, bool here) {
  PT_UNROLL
  for (int v = 0; v < V; ++v) raw[v].load_where(row + mine.column(v), here && mine.has(v));
}

// Weight or bias as float32 in shared memory, loaded once per block, because their dtype is known
// only at run time. The first four of each eight columns are in one half and the rest in the other,
// so lanes read neighboring 16 bytes. It contains every column of a team's vectors, including those
// past the row's end, so reads need no check.
class SharedColumns {
 public:
  PT_DEVICE SharedColumns(uint32_t begin, int slots) : begin_(begin), half_(2 * slots) {}
  PT_DEVICE uint32_t end() const { return begin_ + 2 * half_; }

  // Fill with the full block, at most V vectors per thread; a barrier separates this from get().
  // All loads are issued first, so the block waits for memory once.
  template <int V>
  PT_DEVICE void fill(const Columns& from, int columns, float without) const {
    const auto column = [](int v) { return kVector * int(v * blockDim.x + threadIdx.x); };
    with_type(from.dtype, [&](auto t) {
      using T = decltype(t);
      Raw<T> raw[V];
      PT_UNROLL
      for (int v = 0; v < V; ++v)
        raw[v].load_where(static_cast<const T*>(from.data) + column(v),
                          from.data && column(v) < columns);
      PT_UNROLL
      for (int v = 0; v < V; ++v) {
        if (2 * column(v) >= int(half_)) continue;
        float x[kVector];
        PT_UNROLL
        for (int i = 0; i < kVector; ++i) x[i] = from.data ? raw[v][i] : without;
        ptx::st_shared_v4_f32(begin_ + 2 * column(v), x[0], x[1], x[2], x[3]);
        ptx::st_shared_v4_f32(begin_ + half_ + 2 * column(v), x[4], x[5], x[6], x[7]);
      }
    });
  }
  PT_DEVICE void get(float (&v)[kVector], int column) const {
    const ptx::Words4 low = ptx::ld_shared_v4(begin_ + 2 * column),
                      high = ptx::ld_shared_v4(begin_ + half_ + 2 * column);
    PT_UNROLL
    for (int i = 0; i < 4; ++i)
      v[i] = ptx::bits_float(low.w[i]), v[4 + i] = ptx::bits_float(high.w[i]);
  }

 private:
  uint32_t begin_, half_;
};

PT_DEVICE ColumnDropout dropout_of(const LayerNormProblem& p) {
  return {p.drop_threshold > 0 && p.drop_threshold < 65536 ? ptx::ld_global_u64(p.seed) : 0,
          p.drop_threshold, kTagAddNorm, p.row_start};
}

// Return a mask with bit 8 v + i set if dropout keeps element i of the thread's vector v. The full
// warp calls it. A loop keeps one copy of the generator's code.
template <int V, class Mine>
PT_DEVICE uint32_t kept_of_row(const ColumnDropout& dropout, int64_t row, const Mine& mine) {
  static_assert(V * kVector <= 32);
  uint32_t kept = 0;
  PT_NO_UNROLL
  for (int v = 0; v < V; ++v) { kept |= dropout.keep(row, mine.column(v)) << kVector * v; }
  return kept;
}

PT_DEVICE void drop(float (&v)[kVector], uint32_t keep, float scale) {
  PT_UNROLL
  // a select, so a dropped NaN becomes 0
  for (int i = 0; i < kVector; ++i) v[i] = keep >> i & 1 ? v[i] * scale : 0.0f;
}

// Sum in pairs, which are independent of each other, unlike a chain of eight.
PT_DEVICE float sum_of(const float (&v)[kVector]) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// Return 1 / sqrt(variance + eps); a negative variance is a rounded zero.
PT_DEVICE float rstd_of(float variance, float eps) {
  return ptx::div_rn(1.0f, ptx::sqrt_rn((variance < 0.0f ? 0.0f : variance) + eps));
}

}  // namespace pt::cuda
