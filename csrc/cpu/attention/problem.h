// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU: the problem as plain data. No torch header here or below; csrc/cpu/attention/attention.cpp fills it in.
#pragma once

#include <cstdint>

#include "common/strides.h"

namespace pt {

// A dense additive term or boolean mask, broadcastable to (B, Hq, Lq, Lk); d is the stride along keys.
struct Dense {
  const void* data = nullptr;
  Strides stride;
  DType dtype = DType::f32;
  bool boolean = false;  // true: uint8, nonzero = attend; else added to the score, -inf = invisible
};

// Keys and values in pages: key j of sequence b is row j % size of page at(b, j / size). A sequence's pages behind its length are not
// named.
struct Pages {
  const void* table = nullptr;  // (B, pages) int32 or int64, contiguous; null: no pages
  int64_t size = 1, stride = 0;
  bool wide = false;
  int64_t at(int64_t b, int64_t n) const {
    const int64_t i = b * stride + n;
    return wide ? static_cast<const int64_t*>(table)[i] : static_cast<const int32_t*>(table)[i];
  }
};

// Of keys and values in eight bits: row j of a head counts as its scale times its numbers. Strides are 0 where scales are shared.
struct RowScales {
  const float* data = nullptr;
  Strides strides;  // b, h, l, as of the rows
};

// A block mask: for each block of queries the blocks of keys that are visible, as ops/_problem/blocks.py has it.
struct BlockMask {
  const int32_t *offsets = nullptr, *entries = nullptr;  // [B][H][blocks of queries + 1]; [entries][block of keys, place of its bits or -1]
  const uint32_t* bits = nullptr;                        // [partial blocks][queries][keys / 32]
  int64_t B = 1, H = 1;                                  // 1: shared
  int row_bits = 0, key_bits = 0;                        // blocks of 2^row_bits queries x 2^key_bits keys
};

// What a boolean mask says of each tile of 2^row_bits queries x 2^key_bits keys. The strides are of tiles: 0 where they are shared.
struct TileMap {
  static constexpr int32_t kNone = -1, kAll = -2, kSome = 0;  // all pairs hidden, all visible; >= 0: some
  const int32_t* data = nullptr;                              // null: no map
  Strides stride;
  int row_bits = 0, key_bits = 0;
  const uint32_t* bits = nullptr;  // null: pairs stand in the dense mask. Else a tile's state is the place of its bits [queries][keys / 32]
  const int32_t* at(int64_t b, int64_t h, int64_t i) const { return data + b * stride.b + h * stride.h + (i >> row_bits) * stride.l; }
  int32_t state(int64_t b, int64_t h, int64_t i, int64_t j) const { return at(b, h, i)[(j >> key_bits) * stride.d]; }
};

// One gradient of a Dense term, in float (double for f64 problems), contiguous over the term's own broadcast shape:
// stride 0 where the term was broadcast, so the kernel sums there. Zero-filled by the caller.
struct DenseGrad {
  void* data = nullptr;
  Strides stride;
};

enum class Align : int { none = 0, top_left = 1, bottom_right = 2 };  // "causal" of the public op

struct AttentionProblem {
  DType dtype;                        // of q, k, v, out and their gradients
  int64_t B, Hq, Hkv, Lq, Lk, D, Dv;  // packed: B sequences, Lq and Lk the longest of them
  const void *q, *k, *v;              // (B, H, L, D), last stride 1
  Strides qs, ks, vs;  // packed: b = 0, rows start at cu_q[b], cu_k[b]; in pages: b and l of k and v are of pages and their rows
  Pages pages;         // forward alone, as eight bits: strides of k and v are then of bytes
  EightBits eight = EightBits::none;
  RowScales key_scale, value_scale;
  void* out;  // forward: written; backward: read
  Strides os;
  void* lse;      // (B, Hq, Lq) float (double for f64), natural log, before dropout; strides:
  Strides lse_s;  // b, h, l

  Dense mask, bias;              // each may be absent (data == nullptr); both may be additive
  BlockMask blocks;              // the mask in another form
  TileMap tiles;                 // of a boolean mask or of blocks: the kernels make it
  const void* slopes;            // (Hq,) float (double for f64) or null: bias -slope * |j - i - offset|
  const void* table;             // (buckets, Hq) float (double for f64), contiguous, or null: T5 relative bias
  const int64_t* bucket_starts;  // (n,) least distance of each bucket of one direction, non-decreasing, starts[0] = 0
  int64_t buckets;               // rows of table; n = buckets / 2 if bidirectional, else buckets
  bool bidirectional;
  const void* sinks;  // (Hq,) float (double for f64) or null: one more term of each row's sum

  const int64_t *query_lengths, *key_lengths, *prefix_lengths;  // (B,) absolute counts, or null
  const int64_t *query_segments, *key_segments;                 // (B, Lq), (B, Lk) contiguous, or null
  const int64_t *cu_q, *cu_k;                                   // (B + 1,) row offsets of packed sequences, or null

  Align align;
  int64_t left, right;                                      // window, -1 = unbounded
  int64_t global_keys;                                      // the keys before it lie in every window; 0 without a window
  int64_t batch_start, head_start, query_start, key_start;  // absolute indices of the first ones
  double scale, softcap;                                    // softcap 0 = none
  uint64_t seed;                                            // dropout
  uint32_t drop_threshold;                                  // rint(65536 p); 0 = no dropout, 65536 = everything dropped

  int threads;

  // Where a row of k or v is, in elements; packed: row is that of all sequences.
  int64_t key_row(const Strides& s, int64_t b, int64_t h, int64_t row) const {
    const bool paged = pages.table;
    return (paged ? pages.at(b, row / pages.size) : b) * s.b + h * s.h + (paged ? row % pages.size : row) * s.l;
  }
};

struct AttentionGrads {
  const void* d_out;  // (B, Hq, Lq, Dv), last stride 1
  Strides dos;
  const void* d_lse;  // (B, Hq, Lq) float (double for f64) or null
  Strides d_lse_s;
  void *dq, *dk, *dv;  // null where not wanted
  Strides dqs, dks, dvs;
  DenseGrad d_mask, d_bias;  // data null where not wanted
  void* d_slopes;            // (Hq,), float (double for f64), or null
  void* d_table;             // (buckets, Hq), float (double for f64), or null
  void* d_sinks;             // (Hq,), float (double for f64), or null
};

// What each instruction set offers: pt::PT_ISA::attention_kernels.
struct AttentionKernels {
  void (*forward)(const AttentionProblem&);
  void (*backward)(const AttentionProblem&, const AttentionGrads&);
  int64_t (*scratch_bytes)(AttentionProblem, const AttentionGrads*);  // of forward, and of backward if it is wanted
};

}  // namespace pt
