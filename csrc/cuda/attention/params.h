// SPDX-License-Identifier: Apache-2.0
// The attention problem on a GPU, as plain data without torch and CUDA headers.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pt::cuda {

// Positions stay below 2^28, so sums of four fit in 32 bits.
constexpr int kUnbounded = 1 << 29;

// Strides of a tensor of rows, in elements; the last dimension is contiguous. Packed tensors have
// batch 0.
struct HeadRows {
  int64_t batch = 0, head = 0, row = 0;
};
struct In {
  const void* data = nullptr;
  HeadRows stride;
};
struct Out {
  void* data = nullptr;
  HeadRows stride;
  int columns = 0;     // at most the input rows' columns, which may include padding to 16 bytes
  bool pairs = false;  // two neighboring columns share a word
};

enum class DenseType : int { f32, bf16, f16, f64, boolean };

// A mask or bias (B, Hq, Lq, Lk), with stride 0 in broadcast dimensions. A boolean one is true for
// visible pairs; others are added to scores, and -inf hides.
struct Dense {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, query = 0, key = 0;
  DenseType type = DenseType::f32;
  // Number of neighboring keys, from any multiple of it on, in one aligned word of at most 16
  // bytes.
  int vector_width = 1;
};

// Key padding: a boolean mask that is equal for all queries and heads. Per sequence: the first
// visible key and the last + 1 (the number of keys and 0 if there is none), which are bounds; the
// number of hidden keys between them; and words of 32 keys, the first key in the lowest bit, from
// the start of KV tiles (key_origin) on. After the last word follow as many zero words as a tile of
// 192 keys may read.
struct KeyPadding {
  const uint32_t* data = nullptr;
  int64_t batch = 0;  // words between sequences; 0: one bitmap for all

  static constexpr int kHead = 4;  // words before the bits
  static constexpr int words(int num_keys, int before) {
    return (before + num_keys + 127) / 128 * 4 + 8;
  }
};

// One bit per pair for the sm_90a kernels: visible in a dense boolean mask, or kept by dropout. Per
// query, words of 32 keys, the first key in the lowest bit, from the start of KV tiles (key_origin)
// on; per key, words of 32 queries. Rows are multiples of 16 bytes, padded with zero bits. Null if
// no kernel reads them.
//
// In lane order, for the fused backward: per tile of 128 keys, units of 64 queries; per unit, one
// word for each thread of two consumers, with the pairs of its accumulators. Byte e + 2 r has the
// pairs of the thread's key r with queries 8 n + 2 (lane % 4) + e, in bits n from 0 to 7.
struct PairBits {
  struct Rows {
    const uint32_t* data = nullptr;
    int64_t batch = 0, head = 0, row = 0;  // in words; 0 for a broadcast mask
  };
  Rows queries, keys, lanes;  // a row of `lanes` is a KV tile
  static constexpr int kUnitQueries = 64, kUnitKeys = 128, kUnitWords = 256;

  // Words after the last row: a tile that is not a multiple of 128 columns reads past a row.
  static constexpr int kSlack = 4;
  static constexpr int words(int columns) { return (columns + 127) / 128 * 4; }
  // Units per KV tile: an even number, because a Q tile has one or two.
  static constexpr int units(int num_queries) { return (num_queries + 127) / 128 * 2; }
  // Words per head in lane order.
  static constexpr int64_t lane_words(int num_queries, int num_keys) {
    return int64_t((num_keys + kUnitKeys - 1) / kUnitKeys) * units(num_queries) * kUnitWords;
  }
  static constexpr int64_t kMaxBytes = int64_t(256) << 20;
};

// Lists, per block of queries (or keys), of the blocks of keys (or queries) with a visible pair.
// List n has the entries from offsets[n * list] to offsets[n * list + 1], in ascending order of
// blocks. An entry is (block, index of its bits, or -1 if every pair is visible). For a dense mask
// the index is 0.
struct BlockLists {
  const int32_t *offsets = nullptr, *entries = nullptr;
  int64_t batch = 0, head = 0;  // offsets between sequences and heads; 0: shared
  int list = 1;                 // 2: start and end, because lists have padding
  // a block has 2^bits rows and columns; without a mask one block holds all columns
  int row_bits = 0, column_bits = 30;
  int columns = 1, num_entries = 0;  // blocks of columns
};

// A block mask (see ops/_problem/blocks.py), or the listed blocks of a dense boolean mask. Blocks
// count from the tensors' first row.
struct BlockMask {
  BlockLists queries, keys;  // by blocks of queries, whose columns are keys; and the transpose
  // (places, queries of a block, keys of a block / 32). Null: no block mask, and kernels read the
  // dense one.
  const uint32_t* bits = nullptr;
  int places = 0;
};

// Paged keys and values: key j of sequence b is row j % size of page table[b, j / size], which is
// clamped to [0, count). Entries of pages without a key before the sequence's length are not read.
struct Pages {
  const void* table = nullptr;  // (sequences, width) int32, or int64 if `wide`; null: not paged
  int64_t width = 0, count = 0;
  int size = 1, shift = 0;  // shift: log2 of a size that is a power of two, else -1
  bool wide = false;
};

// Results to recompute. Kernels that do not mask the values of hidden rows (a weight of zero times
// NaN is NaN) flag tiles with a result that is not finite; kernels that do mask them recompute only
// those tiles. See recompute_tiles in scheduler.cuh.
struct Recompute {
  // (sequences, heads, tiles), initially zeros; null: no flags, compute all tiles
  int32_t* flags = nullptr;
  int rows = 0, tiles = 0;  // rows per tile; tiles per head
};

// Indices: `head` over all sequences, `tile` within the head.
struct TilePlace {
  int head, tile;
};

// The arguments of pytransformer/ops/attention.py, ARGUMENTS.
struct AttentionProblem {
  DType dtype;  // of query, out and gradients; of key and value unless eight_bits
  int sequences, heads, group, num_queries, num_keys, head_dim, value_dim;
  int64_t total_queries, total_keys;  // rows of packed tensors
  int64_t query_start, key_start;
  uint32_t batch_start, head_start;  // Philox counter words of dropout
  bool causal, bottom_right;
  int left, right;  // window; may be kUnbounded
  int global_keys;  // number of leading keys that every window includes; 0: none
  const int64_t *query_lengths, *key_lengths, *prefix_lengths, *cu_queries, *cu_keys,
      *query_segments, *key_segments;
  Dense mask, bias;
  KeyPadding key_padding;  // if set, there is no mask
  PairBits mask_bits, keep_bits;
  BlockMask blocks;     // if set, neither of both, or they belong to the mask
  const float* slopes;  // (Hq,)
  const float* sinks;   // (Hq,) or null: an additional term of each row's sum
  // (Hq, before + after + 1): T5's bias by j - i - offset, clamped to [-before, after]
  const float* diagonals;
  int before, after;
  const uint64_t* seed;
  uint32_t drop_threshold;  // rint(65536 p); 0: no dropout
  float scale, softcap, keep_scale;
  // rows start at multiples of 16 bytes; with pages, stride.batch of k and v is the page stride
  In q, k, v;
  Pages pages;                // forward only
  EightBits eight_bits;       // forward only
  In key_scale, value_scale;  // scales of eight_bits; strides per row, with pages as k and v

  constexpr bool in_eight_bits() const { return eight_bits != EightBits::none; }
  // Pairs hidden individually, at any place: without the mask, and with it.
  constexpr bool hides_pairs() const { return bias.data || query_segments; }
  constexpr bool elementwise_mask() const { return mask.data || hides_pairs() || blocks.bits; }
  // Masks and biases may be so large that lse loses log2 of the sum.
  constexpr bool split_lse() const {
    return (mask.data && mask.type != DenseType::boolean) || bias.data;
  }
  // Scores differ from scale * q.k; then, with dropout too, weights differ from exp(scores).
  constexpr bool modifies_scores() const {
    return split_lse() || slopes || diagonals || softcap != 0 || !(scale > 0);
  }
  constexpr bool has_score_mod() const { return modifies_scores() || drop_threshold; }
  // Return true if dropout bits are drawn once and stored for all passes: if they take at most 256
  // MB. Packed sequences are excluded, because the longest may be far longer than the rest.
  constexpr bool draws_once() const {
    const int64_t of_head = int64_t(num_queries) * PairBits::words(num_keys + int(key_start % 32)) +
                            int64_t(num_keys) * PairBits::words(num_queries);
    return drop_threshold && !cu_queries &&
           int64_t(sequences) * heads * of_head * 4 <= PairBits::kMaxBytes;
  }
  // Only bounds (one key range per query) and padding gaps.
  constexpr bool bounds_only() const {
    return !elementwise_mask() && !has_score_mod() && !global_keys;
  }
};

enum class Pass { Forward, ForwardSplit, BwdDq, BwdDkdv, BwdDbias };

// Strides of row stats such as lse.
struct PerQuery {
  int64_t batch, head, row;
};

// Split KV: with few queries, thread blocks share the keys. Each block writes the row's partial
// maximum and sum, (rows, splits, 2), and its unnormalized output, (rows, splits, value_dim). The
// last block of a row tile merges them. Rows are in the order of GroupTile, by key head. A partial
// sum of 0 means no visible key and no values.
struct SplitKeys {
  int splits = 0;  // of the longest sequence; 0: no split kernel; 1: writes results directly
  float *stats = nullptr, *values = nullptr;
  uint64_t* counters = nullptr;  // (sequences, key heads, row tiles), see BlockCounter
  uint64_t ticket = 0;
};

struct AttentionForward {
  AttentionProblem p;
  Out out;  // data null: only row stats
  float* lse;
  PerQuery at;
  // Row stats: the maximum in natural units and log2 of the sum; or lse and 0 if no lse of a tile
  // is large.
  float *row_max, *log2_sum;
  Recompute recompute;
  SplitKeys split;
};

struct AttentionBackward {
  AttentionProblem p;
  In d_out;
  PerQuery at;
  // row_max +inf without visible keys; log2_sum null if it is 0
  const float *delta, *row_max, *log2_sum;
  Out dq, dk, dv;  // data null: not requested
  // Sums of d_query across blocks in the fused backward: zeros, or null.
  float* dq_accum;
  // Tiles per head; packed, a sequence's tiles follow those of the previous sequence.
  int64_t dq_accum_tiles;
  float* slope_partials;     // (B, Hq, Q tiles), or null
  float* diagonal_partials;  // (B, Hq, Q tiles, before + after + 1), zeros, or null
  // For d_query by query heads and Q tiles, for d_key and d_value by key heads and KV tiles.
  // Fused backward: for d_key and d_value; dq_recompute is for d_query.
  Recompute recompute, dq_recompute;
};

// Packs KeyPadding of a mask, one thread block per distinct mask.
struct AttentionKeyPadding {
  Dense mask;
  int masks, num_keys, before;  // before: bits of the first word before the first key
  uint32_t* bits;
};

// Builds BlockLists of a dense boolean mask: first the block states, one thread block each, then
// the lists, one thread each, by blocks of queries or `by_keys`.
constexpr int kListedBlockBits = 7;
constexpr int kListedBlock = 1 << kListedBlockBits;  // queries and keys: a multiple of every tile
enum BlockState : uint32_t { kNonePairs, kSomePairs, kAllPairs };
struct AttentionMaskLists {
  Dense mask;
  // masks: distinct ones over sequences and heads; heads: per sequence
  int masks, heads, num_queries, num_keys;
  uint32_t* states;  // (masks, down, across)
  // (masks, lists, 2), (masks, lists, entries, 2); null: compute states
  int32_t *offsets, *entries;
  bool by_keys;

  constexpr int down() const { return (num_queries + kListedBlock - 1) >> kListedBlockBits; }
  constexpr int across() const { return (num_keys + kListedBlock - 1) >> kListedBlockBits; }
  constexpr int lists() const { return by_keys ? across() : down(); }
  constexpr int room() const { return by_keys ? down() : across(); }
  constexpr int64_t blocks() const { return int64_t(masks) * down() * across(); }
};

// Packs PairBits of a dense boolean mask, or of dropout if it has a threshold; one warp packs 32
// queries and 128 keys. In lane order, of a mask and segments, one warp packs a unit.
struct AttentionPairBits {
  Dense mask;
  struct Dropout {
    const uint64_t* seed = nullptr;
    uint32_t threshold = 0, batch_start = 0, head_start = 0, query_start = 0;
    uint32_t first_group = 0;  // first word's group of 32 keys, absolute
  } dropout;
  int sequences, heads, num_queries, num_keys;  // sequences and heads with distinct pairs
  int before;                                   // bits of the first word before the first key
  // (sequences, heads, queries or 1, words), and likewise keys; null: not requested
  uint32_t *queries, *keys;
  uint32_t* lanes = nullptr;  // if set, the only result, and `before` is 0
  const int64_t *query_segments = nullptr, *key_segments = nullptr;

  constexpr int rows(bool of_keys) const {
    const bool broadcast = !dropout.threshold && !(of_keys ? mask.key : mask.query);
    return broadcast ? 1 : of_keys ? num_keys : num_queries;
  }
  constexpr int words(bool of_keys) const {
    return PairBits::words(of_keys ? num_queries : num_keys + before);
  }
  // per head: tiles of 32 queries, or units of 64; and tiles of 128 keys
  constexpr int down() const { return lanes ? PairBits::units(num_queries) : words(true); }
  constexpr int across() const { return words(false) / 4; }
  constexpr int64_t tiles() const { return int64_t(sequences) * heads * down() * across(); }
  constexpr int64_t size(bool of_keys) const {
    return int64_t(sequences) * heads * rows(of_keys) * words(of_keys) + PairBits::kSlack;
  }
};

// Input of the mask kernel: it packs KeyPadding if `padding` has a mask, PairBits if `bits` has
// sequences, else it builds BlockLists.
struct AttentionMask {
  AttentionKeyPadding padding;
  AttentionMaskLists lists;
  AttentionPairBits bits;
};
constexpr int kMaskThreads = 256;

// sums[h] = -sum over queries of P * delta, where P = exp(sink - row_max) / 2^log2_sum is the
// sink's weight: 1 for a query without visible keys, whose delta is -d_lse.
struct AttentionDsinks {
  AttentionProblem p;
  PerQuery at;
  // d_lse may be null; log2_sum null if it is 0
  const float *lse, *d_lse, *delta, *row_max, *log2_sum;
  float* sums;
};

// sums[u, h] = sum of partials[:, h, :, lo:hi] with lo, hi = ranges[u], or (0, 1) if null. If
// sinks.sums is set, the kernel computes `sinks` instead.
struct AttentionReducePartials {
  const float* partials;  // (sequences, heads, tiles, width)
  const int32_t* ranges;
  float* sums;
  int sequences, heads, tiles, width, outputs;
  AttentionDsinks sinks;
};
constexpr int kReduceThreads = 128;

// delta = rows of (out * d_out) - d_lse, and row_max = lse.
struct AttentionPreprocess {
  AttentionProblem p;
  In out, d_out;
  int columns;               // of out
  const float *lse, *d_lse;  // d_lse may be null
  PerQuery at;
  float *delta, *row_max;
};

// The gradient of a mask or bias, in its shape: each element sums over the broadcast dimensions.
struct AttentionDbias {
  AttentionBackward b;
  void* data;
  DType dtype;
  int64_t batch, head, query, key;  // strides
  int sizes[4];                     // of the gradient: each 1 or the full size
  // Two neighboring keys, the first with an even absolute index, share one aligned word or pair.
  bool pairs;
};

}  // namespace pt::cuda
