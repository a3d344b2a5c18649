// SPDX-License-Identifier: Apache-2.0
// Attention on a GPU: the problem as plain data. No torch and no CUDA header here.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace pt::cuda {

// Positions stay below 2^28, so that sums of four stay in 32 bits.
constexpr int kUnbounded = 1 << 29;

// A tensor of rows, strides in elements; the last dimension is contiguous. Packed tensors have batch 0.
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
  int columns = 0;     // at most those of the rows it is made from, which may have been widened to a multiple of 16 bytes
  bool pairs = false;  // two neighbouring columns lie in one word
};

enum class DenseType : int { f32, bf16, f16, f64, boolean };

// A mask or bias of (B, Hq, Lq, Lk), strides 0 where it is broadcast. A boolean one shows where to attend; others are added, -inf hides.
struct Dense {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, query = 0, key = 0;
  DenseType type = DenseType::f32;
  int vector_width = 1;  // so many neighbouring keys, from any multiple of it on, are one aligned word, of 16 bytes at most
};

// Key padding: a boolean mask that is alike for all queries and heads. Of each sequence: its first visible key and its last + 1 (the number
// of keys and 0 if there is none), which are bounds; how many keys between them are hidden; and words of 32 keys, the first in the lowest
// bit, from where tiles of keys begin (key_origin). Words beyond the last are zeros, as many as a tile of 192 keys may need.
struct KeyPadding {
  const uint32_t* data = nullptr;
  int64_t batch = 0;  // words from one sequence to the next; 0: all have the same

  static constexpr int kHead = 4;  // words before the bits
  static constexpr int words(int num_keys, int before) { return (before + num_keys + 127) / 128 * 4 + 8; }
};

// A bit a pair, for the kernels of sm_90a: which pairs a dense boolean mask shows, or which dropout keeps. Of a query, words of 32 keys,
// the first in the lowest bit, from where tiles of keys begin (key_origin); and of a key, words of 32 queries. Rows are whole pieces of 16
// bytes; bits of what is not there are zeros. Null where no kernel asks.
struct PairBits {
  struct Rows {
    const uint32_t* data = nullptr;
    int64_t batch = 0, head = 0, row = 0;  // words; 0 where a mask is broadcast
  };
  Rows queries, keys;

  static constexpr int kSlack = 4;  // words behind the last row: a tile that is no multiple of 128 columns reads beyond a row
  static constexpr int words(int columns) { return (columns + 127) / 128 * 4; }
};

// Of the blocks of queries of a mask, or of its blocks of keys: which blocks of the other side have a visible pair with each. List n is the
// entries from offsets[n * list] to offsets[n * list + 1], each (block, place of its bits, or -1: every pair is visible), with rising
// blocks. Of a dense mask there is no place: 0.
struct BlockLists {
  const int32_t *offsets = nullptr, *entries = nullptr;
  int64_t batch = 0, head = 0;         // offsets from one sequence, or head, to the next; 0: shared
  int list = 1;                        // and from one list to the next; 2: an end beside each start, since lists have room behind them
  int row_bits = 0, column_bits = 30;  // a block has 2^bits rows and columns; without a mask one block holds all columns
  int columns = 1, num_entries = 0;    // blocks of columns
};

// A block mask: see ops/_problem/blocks.py; or the listed blocks of a dense boolean one. Blocks count from the first row of the tensors.
struct BlockMask {
  BlockLists queries, keys;        // by blocks of queries, whose columns are keys; and its transpose
  const uint32_t* bits = nullptr;  // (places, queries of a block, keys of a block / 32); null: no block mask, and a dense one is asked
  int places = 0;
};

// Keys and values in pages: key j of sequence b is row j % size of page table[b, j / size], whose number lies in [0, count): others are
// taken for the nearest. Entries of pages without a key before the sequence's length are not read.
struct Pages {
  const void* table = nullptr;  // (sequences, width) int32, or int64 if `wide`; null: no pages
  int64_t width = 0, count = 0;
  int size = 1, shift = 0;  // shift: of a size that is a power of two, else -1
  bool wide = false;
};

// Which results must be recomputed: kernels that take no care of what hidden rows hold (a weight of zero times NaN is NaN) set a flag
// where a result is not finite; kernels that do take care then recompute those tiles, and nothing elsewhere. See recompute.cuh.
struct Recompute {
  int32_t* flags = nullptr;  // (sequences, heads, tiles), zeros at first; null: nobody flags, and all is made
  int rows = 0, tiles = 0;   // of a tile; of a head
};

// Of the heads of all sequences, and of a head's tiles.
struct TilePlace {
  int head, tile;
};

// See pytransformer/ops/attention.py, ARGUMENTS.
struct AttentionProblem {
  DType dtype;  // of query, key, value, out and their gradients; of keys and values but in eight bits
  int sequences, heads, group, num_queries, num_keys, head_dim, value_dim;
  int64_t total_queries, total_keys;  // rows of packed tensors
  int64_t query_start, key_start;
  uint32_t batch_start, head_start;  // counter words of dropout
  bool causal, bottom_right;
  int left, right;  // of the window; kUnbounded
  int global_keys;  // the tensors' first so many keys lie in every window; 0 without one
  const int64_t *query_lengths, *key_lengths, *prefix_lengths, *cu_queries, *cu_keys, *query_segments, *key_segments;
  Dense mask, bias;
  KeyPadding key_padding;  // then there is no mask
  PairBits mask_bits, keep_bits;
  BlockMask blocks;        // then neither, or they are the mask's
  const float* slopes;     // (Hq,)
  const float* sinks;      // (Hq,), or null: one more term of each row's sum
  const float* diagonals;  // (Hq, before + after + 1): T5's bias by j - i - offset, held between -before and after
  int before, after;
  const uint64_t* seed;
  uint32_t drop_threshold;  // rint(65536 p); 0 = no dropout
  float scale, softcap, keep_scale;
  In q, k, v;                 // rows begin at multiples of 16 bytes; in pages, the strides of k and v from one to the next stand in `batch`
  Pages pages;                // forward alone
  EightBits eight_bits;       // forward alone
  In key_scale, value_scale;  // with them: strides of one number to a row, in pages as of k and v

  constexpr bool in_eight_bits() const { return eight_bits != EightBits::none; }
  // Pairs are hidden one by one, wherever they lie, the mask apart; and with it.
  constexpr bool hides_pairs() const { return bias.data || query_segments; }
  constexpr bool elementwise_mask() const { return mask.data || hides_pairs() || blocks.bits; }
  // Masks and biases may be so large that lse loses the log2 of the sum.
  constexpr bool split_lse() const { return (mask.data && mask.type != DenseType::boolean) || bias.data; }
  // Scores are not just scale q.k; nor, with dropout, are weights those of scores, some of them hidden.
  constexpr bool modifies_scores() const { return split_lse() || slopes || diagonals || softcap != 0 || !(scale > 0); }
  constexpr bool has_score_mod() const { return modifies_scores() || drop_threshold; }
  // Whether dropout is drawn once, as bits that passes read: where all of them take at most 256 MB. Of packed sequences the longest may be
  // far longer than the others.
  constexpr bool draws_once() const {
    const int64_t of_head =
        int64_t(num_queries) * PairBits::words(num_keys + int(key_start % 32)) + int64_t(num_keys) * PairBits::words(num_queries);
    return drop_threshold && !cu_queries && int64_t(sequences) * heads * of_head * 4 <= int64_t(256) << 20;
  }
  // Nothing but bounds, one range of keys for each query, and keys hidden between them.
  constexpr bool bounds_only() const { return !elementwise_mask() && !has_score_mod() && !global_keys; }
};

enum class Pass { Forward, ForwardSplit, BwdDq, BwdDkdv, BwdDbias };

// Indices of row stats: lse and its kin.
struct PerQuery {
  int64_t batch, head, row;
};

// Of few queries the keys are split over blocks of threads, each of which leaves what it has of a row: its maximum and sum, (rows, splits,
// 2), and the values so far, not yet divided, (rows, splits, value_dim); rows as GroupTile has them, of one key head after another. A sum
// of 0: the row saw nothing there, and has no values.
struct SplitKeys {
  int splits = 0;  // of the longest sequence; 0: keys are not split; 1: nothing is left, results are written
  float *stats = nullptr, *values = nullptr;
};

struct AttentionForward {
  AttentionProblem p;
  Out out;  // data null: only statistics
  float* lse;
  PerQuery at;
  // Statistics: each row's maximum in natural units and log2 of the sum; where no lse of a tile is large, lse itself and 0.
  float *row_max, *log2_sum;
  Recompute recompute;
  SplitKeys split;
};
constexpr int kMergeThreads = 128;

struct AttentionBackward {
  AttentionProblem p;
  In d_out;
  PerQuery at;
  const float *delta, *row_max, *log2_sum;  // row_max +inf for a row that sees nothing; log2_sum null where it is 0
  Out dq, dk, dv;                           // data null where not wanted
  // Sums of d_query across blocks in the fused backward: zeros, or null.
  float* dq_accum;
  // Tiles per head; packed, a sequence's tiles follow those of the previous sequence.
  int64_t dq_accum_tiles;
  float* slope_partials;  // (B, Hq, Q tiles), or null
  float* diagonal_partials;  // (B, Hq, tiles of queries, before + after + 1), zeros, or null
  Recompute recompute;       // of d_query by query heads and tiles of queries, or of d_key and d_value by key heads and tiles of keys
};

// Makes KeyPadding of a mask. A block of threads for each sequence that has a mask of its own.
struct AttentionKeyPadding {
  Dense mask;
  int masks, num_keys, before;  // before: places of the first word that are before the first key
  uint32_t* bits;
};

// Makes BlockLists of a dense boolean mask: the states of its blocks, by a block of threads for each; then, by a thread for each, the
// lists by blocks of queries, or `by_keys`.
constexpr int kListedBlockBits = 7;
constexpr int kListedBlock = 1 << kListedBlockBits;  // queries and keys: a multiple of every tile
enum BlockState : uint32_t { kNonePairs, kSomePairs, kAllPairs };
struct AttentionMaskLists {
  Dense mask;
  int masks, heads, num_queries, num_keys;  // masks: of all sequences and heads that have one of their own; heads: of a sequence
  uint32_t* states;                         // (masks, down, across)
  int32_t *offsets, *entries;               // (masks, lists, 2), (masks, lists, room of a list, 2); null: states are made
  bool by_keys;

  constexpr int down() const { return (num_queries + kListedBlock - 1) >> kListedBlockBits; }
  constexpr int across() const { return (num_keys + kListedBlock - 1) >> kListedBlockBits; }
  constexpr int lists() const { return by_keys ? across() : down(); }
  constexpr int room() const { return by_keys ? down() : across(); }
  constexpr int64_t blocks() const { return int64_t(masks) * down() * across(); }
};

// Makes PairBits of a dense boolean mask, or of dropout if that has a threshold, a warp those of 32 queries and 128 keys.
struct AttentionPairBits {
  Dense mask;
  struct Dropout {
    const uint64_t* seed = nullptr;
    uint32_t threshold = 0, batch_start = 0, head_start = 0, query_start = 0;
    uint32_t first_group = 0;  // of 32 keys, absolute: that of the first word
  } dropout;
  int sequences, heads, num_queries, num_keys;  // sequences and heads that have pairs of their own
  int before;                                   // places of the first word that are before the first key
  uint32_t *queries, *keys;                     // (sequences, heads, queries or 1, words), the same of keys; null: not wanted

  constexpr int rows(bool of_keys) const {
    const bool broadcast = !dropout.threshold && !(of_keys ? mask.key : mask.query);
    return broadcast ? 1 : of_keys ? num_keys : num_queries;
  }
  constexpr int words(bool of_keys) const { return PairBits::words(of_keys ? num_queries : num_keys + before); }
  constexpr int down() const { return words(true); }  // of a head: tiles of 32 queries, and of 128 keys
  constexpr int across() const { return words(false) / 4; }
  constexpr int64_t tiles() const { return int64_t(sequences) * heads * down() * across(); }
  constexpr int64_t size(bool of_keys) const { return int64_t(sequences) * heads * rows(of_keys) * words(of_keys) + PairBits::kSlack; }
};

// What one kernel makes of a mask before the passes: KeyPadding, where `padding` has a mask, PairBits, where `bits` has
// sequences, or BlockLists.
struct AttentionMask {
  AttentionKeyPadding padding;
  AttentionMaskLists lists;
  AttentionPairBits bits;
};
constexpr int kMaskThreads = 256;

// sums[h] = -sum over queries of P * delta, P = exp(sink - row_max) / 2^log2_sum being the sink's weight: 1 where it is all that a query
// has, whose delta is -d_lse.
struct AttentionDsinks {
  AttentionProblem p;
  PerQuery at;
  const float *lse, *d_lse, *delta, *row_max, *log2_sum;  // d_lse may be null, and log2_sum where it is 0
  float* sums;
};

// sums[u, h] = the sum of parts[:, h, :, lo:hi] with lo, hi = ranges[u]; (0, 1) if null. Or, where its sums are not null, what `sinks`
// says.
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

// A mask's or bias's gradient, in its own shape: each element is the sum over what shares it.
struct AttentionDbias {
  AttentionBackward b;
  void* data;
  DType dtype;
  int64_t batch, head, query, key;  // strides
  int sizes[4];                     // of the gradient: each 1 or the full size
  bool pairs;                       // two neighbouring keys, of which the first's absolute index is even, lie in one aligned word or pair
};

}  // namespace pt::cuda
