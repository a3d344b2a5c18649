// SPDX-License-Identifier: Apache-2.0
// Shared by the rotary kernels: addresses of rows, a lane's columns, loads, and the rotation of
// pairs.
#pragma once

#include "cuda/rotary/problem.h"
#include "cuda/tile/reduce.cuh"
#include "cuda/tile/vectors.cuh"

namespace pt::cuda {

// Row r of (batch, length, heads): neighboring rows share a row of the tables.
struct HeadAt {
  int b, h, l;

  PT_DEVICE HeadAt(const RotaryProblem& p, int64_t heads, uint32_t row) {
    const uint32_t position = row / uint32_t(heads);
    h = int(row - position * uint32_t(heads)), b = int(position / uint32_t(p.length)),
    l = int(position - uint32_t(b) * uint32_t(p.length));
  }
  PT_DEVICE int64_t in(const Strides& s) const { return b * s.b + h * s.h + l * s.l; }
  PT_DEVICE int64_t in(const AngleTable& t) const { return b * t.b + l * t.l; }
  PT_DEVICE int64_t flat(const RotaryProblem& p, int64_t heads) const {
    return (b * heads + h) * p.length + l;
  }
};

// The 16 columns of a chunk, as two vectors of eight. Values i of both are a pair or, interleaved,
// 2i and 2i + 1 of each.
using Numbers = float[2][kVector];

template <class F>
PT_DEVICE void each_number(F f) {
  PT_UNROLL
  for (int s = 0; s < 2; ++s) {
    PT_UNROLL
    for (int i = 0; i < kVector; ++i) f(s, i);
  }
}

struct Chunk {
  int column[2], end[2];  // a vector has the columns before its end
  bool turned;

  PT_DEVICE Chunk(const RotaryProblem& p, int n) : turned(n < p.pair_chunks) {
    const int half = p.turned / 2;
    const bool apart = turned && !p.interleaved;
    const int first = apart ? 8 * n : turned ? 16 * n : p.turned + 16 * (n - p.pair_chunks);
    column[0] = first, column[1] = apart ? half + first : first + 8;
    end[0] = apart ? half : turned ? p.turned : p.dim, end[1] = turned ? p.turned : p.dim;
  }
  PT_DEVICE bool has(int v) const { return column[v] < end[v]; }
};

// Aligned rows of dtype T: a lane loads one chunk, 16 bytes at a time, and holds it in registers.
template <class T>
struct WholeRows {
  static constexpr bool whole = true;
  static PT_DEVICE const void* at(const void* data, DType, int64_t offset) {
    return static_cast<const T*>(data) + offset;
  }
  static PT_DEVICE void* at(void* data, DType, int64_t offset) {
    return static_cast<T*>(data) + offset;
  }
  static PT_DEVICE void load(float (&v)[kVector], const void* row, DType, int column, int) {
    Raw<T> raw;
    raw.template load<true>(static_cast<const T*>(row) + column);
    PT_UNROLL
    for (int i = 0; i < kVector; ++i) v[i] = raw[i];
  }
  static PT_DEVICE void store(const float (&v)[kVector], void* row, DType, int column, int) {
    Raw<T> raw;
    raw.set(v);
    raw.store(static_cast<T*>(row) + column);
  }
  // Copy bit for bit.
  static PT_DEVICE void copy(const void* from, void* to, DType, int column, int) {
    Raw<T> raw;
    raw.template load<true>(static_cast<const T*>(from) + column);
    raw.store(static_cast<T*>(to) + column);
  }
};

// Any dtype, alignment and width: one element at a time.
struct AnyRows {
  static constexpr bool whole = false;
  static PT_DEVICE const void* at(const void* data, DType dtype, int64_t offset) {
    return static_cast<const uint8_t*>(data) + offset * size_of(dtype);
  }
  static PT_DEVICE void* at(void* data, DType dtype, int64_t offset) {
    return static_cast<uint8_t*>(data) + offset * size_of(dtype);
  }
  static PT_DEVICE void load(float (&v)[kVector], const void* row, DType dtype, int column,
                             int end) {
    load_any(v, row, dtype, column, end, false);
  }
  static PT_DEVICE void store(const float (&v)[kVector], void* row, DType dtype, int column,
                              int end) {
    store_any(v, row, dtype, column, end, false);
  }
  static PT_DEVICE void copy(const void* from, void* to, DType dtype, int column, int end) {
    for (int i = column; i < end && i < column + kVector; ++i) {
      if (size_of(dtype) == 4)
        ptx::st_global_u32(static_cast<uint32_t*>(to) + i,
                           ptx::ld_global_u32(static_cast<const uint32_t*>(from) + i));
      else
        ptx::st_global_u16(static_cast<uint16_t*>(to) + i,
                           ptx::ld_global_u16(static_cast<const uint16_t*>(from) + i));
    }
  }
};

// Call f(chunk) for the lane's chunks of a row.
template <class K, class F>
PT_DEVICE void each_chunk(const RotaryProblem& p, const LaneTeam& team, F f) {
  if constexpr (K::whole) {
    f(Chunk(p, team.rank()));
  } else {
    for (int n = team.rank(); n < p.chunks; n += team.size()) f(Chunk(p, n));
  }
}

// Load a chunk; zeros without a row and past its end.
template <class K>
PT_DEVICE void load_chunk(Numbers& v, const void* row, DType dtype, const Chunk& c, bool here) {
  each_number([&](int s, int i) { v[s][i] = 0.0f; });
  PT_UNROLL
  for (int s = 0; s < 2; ++s)
    if (here && c.has(s)) K::load(v[s], row, dtype, c.column[s], c.end[s]);
}
template <class K>
PT_DEVICE void store_chunk(const Numbers& v, void* row, DType dtype, const Chunk& c) {
  PT_UNROLL
  for (int s = 0; s < 2; ++s)
    if (c.has(s)) K::store(v[s], row, dtype, c.column[s], c.end[s]);
}

// Load a chunk of a table or a weight of any dtype, which many rows share.
template <class K>
PT_DEVICE void load_shared_chunk(Numbers& v, const void* data, DType dtype, int64_t offset,
                                 const Chunk& c) {
  const void* row = AnyRows::at(data, dtype, offset);
  each_number([&](int s, int i) { v[s][i] = 0.0f; });
  PT_UNROLL
  for (int s = 0; s < 2; ++s)
    if (c.has(s)) load_any(v[s], row, dtype, c.column[s], c.end[s], K::whole);
}

struct Angles {
  Numbers cos, sin;

  template <class K>
  PT_DEVICE void load(const RotaryProblem& p, const HeadAt& at, const Chunk& c) {
    if (!c.turned) return;
    load_shared_chunk<K>(cos, p.cos.data, p.cos.dtype, at.in(p.cos), c);
    load_shared_chunk<K>(sin, p.sin.data, p.sin.dtype, at.in(p.sin), c);
  }

  // Each product but the last is rounded, so that contraction does not change bits and they equal
  // those of the CPU kernels.
  template <bool Back>
  PT_DEVICE void turn(const RotaryProblem& p, const Chunk& c, Numbers& y) const {
    if (!c.turned) return;
    if (p.interleaved) {
      each_number([&](int s, int i) {
        if (i % 2 == 0)
          turn_pair<Back>(y[s][i], y[s][i + 1], cos[s][i], cos[s][i + 1], sin[s][i], sin[s][i + 1]);
      });
    } else {
      PT_UNROLL
      for (int i = 0; i < kVector; ++i)
        turn_pair<Back>(y[0][i], y[1][i], cos[0][i], cos[1][i], sin[0][i], sin[1][i]);
    }
  }

 private:
  template <bool Back>
  static PT_DEVICE void turn_pair(float& y1, float& y2, float c1, float c2, float s1, float s2) {
    const float first = Back ? y2 * s2 : -(y2 * s1);
    const float second = Back ? -(y1 * s1) : y1 * s2;
    y1 = ptx::fma_rn(y1, c1, first), y2 = ptx::fma_rn(y2, c2, second);
  }
};

// Load weight + weight_offset of the chunk's columns.
template <class K>
PT_DEVICE void load_weight(Numbers& w, const RotaryProblem& p, const Columns& weight,
                           const Chunk& c) {
  load_shared_chunk<K>(w, weight.data, weight.dtype, 0, c);
  each_number([&](int s, int i) { w[s][i] += p.weight_offset; });
}

}  // namespace pt::cuda
