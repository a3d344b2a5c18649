// SPDX-License-Identifier: Apache-2.0
// Rotary positions on a GPU: the problems as plain data. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "common/heads.h"
#include "cuda/layer_norm/problem.h"

namespace pt::cuda {

using pt::Heads;
using pt::HeadsOut;

// cos or sin, (batch, length, turned) with contiguous columns. b is 0 where one table is for all sequences.
struct AngleTable {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t b = 0, l = 0;
};

// With r the turning of neighbours by the layout, (-x2, x1) of a pair:
//   y = x, or with a weight x rstd (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) + eps);   out = y cos + r(y) sin
// over the first `turned` columns, out = y over the rest.
struct RotaryProblem {
  int batch, length, dim, turned;  // turned is even, 0: nothing turns
  DType dtype;
  bool interleaved;  // pairs are (2i, 2i + 1); else (i, i + turned / 2)
  float eps, weight_offset;
  AngleTable cos, sin;
  int lanes, pair_chunks, chunks;  // of a row: see plan.h
};

struct RotaryForward {
  Heads x;
  HeadsOut out;
  Columns weight;  // data null: no norm
  float* rstd;     // (batch, heads, length), null where not wanted
};

// With g = dy (weight + weight_offset), xhat = x rstd: dx = rstd (g - xhat mean(g xhat)), dweight = sum over the rows of dy xhat.
struct RotaryBackward {
  Heads d_out, x;
  HeadsOut dx;  // data null where not wanted
  Columns weight;
  const float* rstd;
  float* dweight_partials;  // (blocks, or of rows of any kind warps; dim): each one's sum over its rows; null where not wanted
};

// Where the keys and values of a sequence go: position t of sequence b is row t of its caches, or with a table of pages row
// t % page_size of page table[b, t / page_size]. A negative position, or one outside, is written nowhere.
struct AppendKV {
  RotaryForward query, key;  // out of keys: the cache, strides.b from one sequence, or page, to the next
  Heads value;
  HeadsOut value_cache;
  int value_dim, value_lanes;
  EightBits eight_bits;  // of both caches; their rows then have scales, float32, with strides as those of rows
  HeadsOut key_scales, value_scales;
  const int64_t* positions;  // (batch, length)
  const void* table;         // (batch, pages) int64 or int32, or null
  bool table_is_int64;
  int pages, page_size;               // of a sequence; without a table one page, of the caches' length
  int64_t num_pages;                  // of the pool
  unsigned query_blocks, key_blocks;  // the first blocks turn queries, the next keys, the rest copy values
};

}  // namespace pt::cuda
