// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU: the problem as plain data. No torch header here or below;
// csrc/cpu/attention/attention.cpp fills it in.
#pragma once

#include <cstdint>

#include "common/strides.h"

namespace pt {

constexpr int64_t kMaxHead = 512;  // max head size: some stack arrays hold a row of a head

// Dense additive term or boolean mask, broadcastable to (B, Hq, Lq, Lk). d is the stride along
// keys.
struct Dense {
  const void* data = nullptr;
  Strides stride;
  DType dtype = DType::f32;
  bool boolean = false;  // uint8, nonzero = attend; else added to the score, -inf = invisible
};

// Paged keys and values: key j of sequence b is row j % size of page at(b, j / size). Table entries
// past a sequence's length are undefined.
struct Pages {
  const void* table = nullptr;  // (B, pages) int32 or int64, contiguous; null: no pages
  int64_t size = 1, stride = 0;
  bool wide = false;
  int64_t at(int64_t b, int64_t n) const {
    const int64_t i = b * stride + n;
    return wide ? static_cast<const int64_t*>(table)[i] : static_cast<const int32_t*>(table)[i];
  }
};

// Scales of 8-bit keys and values, one per row of a head. Strides are 0 for shared scales.
struct RowScales {
  const float* data = nullptr;
  Strides strides;  // b, h, l, as in the rows
};

// Block mask: the visible key blocks of each query block, as in ops/_problem/blocks.py.
struct BlockMask {
  // [B][H][query blocks + 1]; [entries][key block, index of its bits or -1].
  const int32_t *offsets = nullptr, *entries = nullptr;
  const uint32_t* bits = nullptr;  // [partial blocks][queries][keys / 32]
  int64_t B = 1, H = 1;            // 1: shared
  int row_bits = 0, key_bits = 0;  // blocks of 2^row_bits queries x 2^key_bits keys
};

// State of a boolean mask per tile of 2^row_bits queries x 2^key_bits keys. Strides are in tiles, 0
// for shared ones.
struct TileMap {
  // all pairs hidden, all visible; >= 0: some
  static constexpr int32_t kNone = -1, kAll = -2, kSome = 0;
  const int32_t* data = nullptr;  // null: no map
  Strides stride;
  int row_bits = 0, key_bits = 0;
  // Null: pairs are in the dense mask. Else a tile's state is the index of its bits [queries][keys
  // / 32].
  const uint32_t* bits = nullptr;
  const int32_t* at(int64_t b, int64_t h, int64_t i) const {
    return data + b * stride.b + h * stride.h + (i >> row_bits) * stride.l;
  }
  int32_t state(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return at(b, h, i)[(j >> key_bits) * stride.d];
  }
};

// Gradient of a Dense term, in float (double for f64 problems), contiguous over the term's
// broadcast shape. The kernel sums over dimensions with stride 0. The caller fills it with zeros.
struct DenseGrad {
  void* data = nullptr;
  Strides stride;
};

enum class Align : int { none = 0, top_left = 1, bottom_right = 2 };  // "causal" of the public op

struct AttentionProblem {
  DType dtype;                        // q, k, v, out and their gradients
  int64_t B, Hq, Hkv, Lq, Lk, D, Dv;  // packed: B sequences, Lq and Lk their max
  const void *q, *k, *v;              // (B, H, L, D), last stride 1
  // Packed: b = 0, rows start at cu_q[b], cu_k[b]. Paged: b and l of k and v are strides of pages
  // and their rows.
  Strides qs, ks, vs;
  // Pages and 8-bit keys are forward only. Strides of 8-bit k and v are in bytes.
  Pages pages;
  EightBits eight = EightBits::none;
  RowScales key_scale, value_scale;
  void* out;  // forward: written; backward: read
  Strides os;
  void* lse;      // (B, Hq, Lq) float (double for f64), natural log, before dropout
  Strides lse_s;  // b, h, l

  Dense mask, bias;  // null data: absent; both may be additive
  BlockMask blocks;  // alternative form of the mask
  TileMap tiles;     // built by the kernels from a boolean mask or blocks
  // (Hq,) float (double for f64) or null: bias -slope * |j - i - offset|.
  const void* slopes;
  // (buckets, Hq) float (double for f64), contiguous, or null: T5 relative bias.
  const void* table;
  // (n,) min distance of each bucket of one direction, non-decreasing, starts[0] = 0.
  const int64_t* bucket_starts;
  // Rows of table; n = buckets / 2 if bidirectional, else buckets.
  int64_t buckets;
  bool bidirectional;
  // (Hq,) float (double for f64) or null: one more term of each row's sum.
  const void* sinks;

  const int64_t *query_lengths, *key_lengths, *prefix_lengths;  // (B,) absolute counts, or null
  // Segments: (B, Lq), (B, Lk) contiguous, or null.
  const int64_t *query_segments, *key_segments;
  // (B + 1,) row offsets of packed sequences, or null. With pages only cu_q.
  const int64_t *cu_q, *cu_k;

  Align align;
  int64_t left, right;  // window, -1 = unbounded
  // Keys before it are in every window; 0 without a window.
  int64_t global_keys;
  int64_t batch_start, head_start, query_start, key_start;  // absolute start indices
  double scale, softcap;                                    // softcap 0 = none
  uint64_t seed;                                            // dropout
  // rint(65536 p); 0: no dropout, 65536: all dropped.
  uint32_t drop_threshold;

  int threads;

  // Return the element offset of a row of k or v. Packed: row counts over all sequences.
  int64_t key_row(const Strides& s, int64_t b, int64_t h, int64_t row) const {
    const bool paged = pages.table;
    return (paged ? pages.at(b, row / pages.size) : b) * s.b + h * s.h +
           (paged ? row % pages.size : row) * s.l;
  }
};

struct AttentionGrads {
  const void* d_out;  // (B, Hq, Lq, Dv), last stride 1
  Strides dos;
  const void* d_lse;  // (B, Hq, Lq) float (double for f64) or null
  Strides d_lse_s;
  void *dq, *dk, *dv;  // null: not requested
  Strides dqs, dks, dvs;
  DenseGrad d_mask, d_bias;  // null data: not requested
  void* d_slopes;            // (Hq,), float (double for f64), or null
  void* d_table;             // (buckets, Hq), float (double for f64), or null
  void* d_sinks;             // (Hq,), float (double for f64), or null
};

// Kernel table of an instruction set: pt::PT_ISA::attention_kernels.
struct AttentionKernels {
  void (*forward)(const AttentionProblem&);
  void (*backward)(const AttentionProblem&, const AttentionGrads&);
  // Scratch of forward, and of backward unless the gradients are null.
  int64_t (*scratch_bytes)(AttentionProblem, const AttentionGrads*);
};

}  // namespace pt
