// SPDX-License-Identifier: Apache-2.0
// Problems of rotary positions on a GPU, as plain data without torch and CUDA headers.
#pragma once

#include <cstdint>

#include "common/heads.h"
#include "cuda/layer_norm/problem.h"

namespace pt::cuda {

using pt::Heads;
using pt::HeadsOut;

// cos or sin, (batch, length, turned) with contiguous columns. b is 0 for a table shared by all
// sequences.
struct AngleTable {
  const void* data = nullptr;
  DType dtype = DType::f32;
  int64_t b = 0, l = 0;
};

// With r(y) = (-y2, y1) for each pair (y1, y2) of the layout:
//   y = x, or with a weight x rstd (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) + eps)
//   out = y cos + r(y) sin over the first `turned` columns, out = y over the rest
struct RotaryProblem {
  int batch, length, dim, turned;  // turned is even; 0: no rotation
  DType dtype;
  bool interleaved;  // pairs are (2i, 2i + 1); else (i, i + turned / 2)
  float eps, weight_offset;
  AngleTable cos, sin;
  int lanes, pair_chunks, chunks;  // per row: see plan.h
};

struct RotaryForward {
  Heads x;
  HeadsOut out;
  Columns weight;  // data null: no norm
  float* rstd;     // (batch, heads, length); may be null
};

// With g = dy (weight + weight_offset), xhat = x rstd:
//   dx = rstd (g - xhat mean(g xhat)), dweight = sum over the rows of dy xhat
struct RotaryBackward {
  Heads d_out, x;
  HeadsOut dx;  // data null: not computed
  Columns weight;
  const float* rstd;
  // (blocks, or warps with AnyRows; dim): partial sums over rows; may be null
  float* dweight_partials;
};

// Destinations of a sequence's keys and values: position t of sequence b is row t of its caches or,
// with a page table, row t % page_size of page table[b, t / page_size]. Negative positions and
// positions outside are not written.
struct AppendKV {
  // key.out is the cache; strides.b is the step between sequences or pages
  RotaryForward query, key;
  Heads value;
  HeadsOut value_cache;
  int value_dim, value_lanes;
  // dtype of both caches; their rows then have float32 scales, (first, head, row)
  EightBits eight_bits;
  HeadsOut key_scales, value_scales;
  const int64_t* positions;  // (batch, length)
  const void* table;         // (batch, pages) int64 or int32, or null
  bool table_is_int64;
  int pages, page_size;  // pages per sequence; without a table one page, of the caches' length
  int64_t num_pages;     // pages in the pool
  // the first blocks rotate queries, the next keys; the rest copy values
  unsigned query_blocks, key_blocks;
};

}  // namespace pt::cuda
