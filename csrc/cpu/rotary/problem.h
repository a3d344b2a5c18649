// SPDX-License-Identifier: Apache-2.0
// Rotary positions on the CPU: problems as plain data. No torch header here or below.
#pragma once

#include <cstdint>

#include "common/heads.h"

namespace pt {

// r rotates a pair (x1, x2) of neighbors in the layout to (-x2, x1):
//   y = x, or with a weight x rstd (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) + eps)
//   out = y cos + r(y) sin over the first `turned` columns, out = y over the rest
// acc is float, or double for f64.
struct RotaryProblem {
  int64_t batch, length, dim, turned;  // turned is even; 0: no rotation
  DType dtype;
  bool interleaved;  // pairs are (2i, 2i + 1); else (i, i + turned / 2)
  double eps, weight_offset;
  const void *cos, *sin;  // (batch, length, turned) acc
  int64_t table_batch;    // elements between the tables of two sequences; 0: shared
  int threads;
};

struct RotaryForward {
  Heads x;
  HeadsOut out;
  const void* weight;  // (dim,) acc, or null: y = x
  void* rstd;          // (batch, heads, length) acc, or null
};

struct RotaryBackward {
  Heads d_out, x;
  const void *weight, *rstd;
  HeadsOut dx;    // null data: not requested
  void* dweight;  // (dim,) acc, or null
};

// Cache slots: position t of sequence b is row t of its caches, or with a page table row t %
// page_size of page table[b, t / page_size]. A negative or out-of-range position is not written.
struct AppendKV {
  RotaryForward query, key;
  Heads value;
  int64_t value_dim;
  const int64_t* positions;             // (batch, length)
  HeadsOut key_cache, value_cache;      // strides.b: between sequences or pages
  const int64_t* table;                 // (batch, pages), or null
  int64_t pages, num_pages, page_size;  // page_size without a table: length of the caches
};

struct RotaryKernels {
  void (*forward)(const RotaryProblem&, const RotaryForward&);
  void (*backward)(const RotaryProblem&, const RotaryBackward&);
  void (*append)(const RotaryProblem&, const AppendKV&);
};

}  // namespace pt
