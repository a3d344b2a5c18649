// SPDX-License-Identifier: Apache-2.0
// A sequence's location and its bounds. Positions are local to the sequence: query i is on the
// diagonal of key i + diagonal_offset.
#pragma once

#include "cuda/attention/problem.h"
#include "cuda/ptx/memory.cuh"

namespace pt::cuda {

PT_DEVICE int min(int a, int b) { return a < b ? a : b; }
PT_DEVICE int max(int a, int b) { return a > b ? a : b; }
PT_DEVICE int64_t clamp64(int64_t x, int64_t lo, int64_t hi) {
  return x < lo ? lo : x > hi ? hi : x;
}
PT_DEVICE int64_t load_i64(const int64_t* p) { return int64_t(ptx::ld_global_u64(p)); }

struct Range {
  int lo, hi;
  PT_DEVICE bool has(int x) const { return x >= lo && x < hi; }
  PT_DEVICE bool empty() const { return lo >= hi; }
};

struct Sequence {
  int64_t row_q = 0, row_k = 0;  // first rows in the tensors
  int num_q, num_k, diagonal_offset, prefix;
  int first_k = 0;  // earlier keys are visible to no query
  // some keys between first_k and num_k are hidden: see KeyPaddingBitmap
  bool padding_gaps = false;

  // Clamps lengths to the tensors.
  PT_DEVICE Sequence(const AttentionProblem& p, int b) {
    int64_t end_q = p.query_start + p.num_queries, end_k = p.key_start + p.num_keys;
    if (p.cu_queries) {
      row_q = clamp64(load_i64(p.cu_queries + b), 0, p.total_queries),
      row_k = clamp64(load_i64(p.cu_keys + b), 0, p.total_keys);
      end_q = clamp64(load_i64(p.cu_queries + b + 1), row_q, p.total_queries) - row_q;
      end_k = clamp64(load_i64(p.cu_keys + b + 1), row_k, p.total_keys) - row_k;
      if (end_q > p.num_queries) end_q = p.num_queries;
      if (end_k > p.num_keys) end_k = p.num_keys;
    }
    if (p.query_lengths) end_q = clamp64(load_i64(p.query_lengths + b), 0, end_q);
    if (p.key_lengths) end_k = clamp64(load_i64(p.key_lengths + b), 0, end_k);
    prefix = p.prefix_lengths
                 ? int(clamp64(load_i64(p.prefix_lengths + b) - p.key_start, 0, p.num_keys))
                 : 0;
    diagonal_offset = int(p.query_start - p.key_start) + (p.bottom_right ? int(end_k - end_q) : 0);
    num_q = int(clamp64(end_q - p.query_start, 0, p.num_queries));
    num_k = int(clamp64(end_k - p.key_start, 0, p.num_keys));
    if (p.key_padding.data) {
      const ptx::Words4 head = ptx::ld_global_v4(p.key_padding.data + b * p.key_padding.batch);
      first_k = int(head.w[0]);
      num_k = min(num_k, int(head.w[1]));
      padding_gaps = head.w[2] != 0;
    }
  }

  // Return the key range of query i. Both ends increase with i. Global: there may be global keys;
  // the range then has a gap from their end to the start of the query's window.
  template <bool Global = false>
  PT_DEVICE Range keys_of(const AttentionProblem& p, int i) const {
    Range r{max(first_k, i + diagonal_offset - p.left),
            min(num_k, i + diagonal_offset + p.right + 1)};
    if (Global && p.global_keys) r = {first_k, max(r.hi, min(num_k, p.global_keys))};
    if (p.causal) r.hi = min(r.hi, max(i + diagonal_offset + 1, prefix));
    return r;
  }
  // Return the query range of key j. Global keys leave no gap here.
  template <bool Global = false>
  PT_DEVICE Range queries_of(const AttentionProblem& p, int j) const {
    Range r{max(0, j - diagonal_offset - p.right), min(num_q, j - diagonal_offset + p.left + 1)};
    if (Global && j < p.global_keys) r = {0, num_q};
    if (p.causal && j >= prefix) r.lo = max(r.lo, j - diagonal_offset);
    return r;
  }
};

// Tiles of `size` columns from `origin` on: tiles [first, last) have a visible pair, and tiles
// [whole, whole_end) are full. Columns outside [start, end) are visible to no row.
struct Tiles {
  int first = 0, whole = 0, whole_end = 0, last = 0, start = 0, end = 0;

  Tiles() = default;
  // For `rows` rows with the bounds of the first and the last row; both ends increase from row to
  // row.
  PT_DEVICE Tiles(int rows, Range of_first, Range of_last, int origin, int size) {
    start = of_first.lo, end = of_last.hi;
    if (rows <= 0 || start >= end) {
      start = end = 0;
      return;
    }
    first = (start - origin) / size, last = (end - origin + size - 1) / size;
    whole = min((of_last.lo - origin + size - 1) / size, last);
    whole_end =
        of_first.hi <= origin ? whole : min(max((of_first.hi - origin) / size, whole), last);
  }
  PT_DEVICE int count() const { return last - first; }
  PT_DEVICE bool cut(int tile) const { return tile < whole || tile >= whole_end; }
};

// Return the start of the first KV tile: at or before key 0, at an absolute multiple of 32, the
// size of dropout's groups.
PT_DEVICE int key_origin(const AttentionProblem& p) { return -int(p.key_start % 32); }

// Bitmap of the visible keys of sequence b.
struct KeyPaddingBitmap {
  const uint32_t* words;
  int origin;

  PT_DEVICE KeyPaddingBitmap(const AttentionProblem& p, int b)
      : words(p.key_padding.data + b * p.key_padding.batch + KeyPadding::kHead),
        origin(key_origin(p)) {}

  // Return the bits from `key` to the end of its word of 32 keys; bit i is `key` + i.
  PT_DEVICE uint32_t from(int key) const {
    const auto at = uint32_t(key - origin);
    const uint32_t word = ptx::ld_global_u32(words + at / 32);
    return word >> at % 32;
  }
  // Return the bits of 32 keys from `key` on.
  PT_DEVICE uint32_t across(int key) const {
    const int ahead = int(uint32_t(key - origin) % 32);
    return from(key) | (ahead ? from(key - ahead + 32) << (32 - ahead) : 0);
  }
  PT_DEVICE bool visible(int key) const { return from(key) & 1; }
};

template <class T>
PT_DEVICE const T* head_of(const In& t, int b, int h, int64_t row) {
  return static_cast<const T*>(t.data) + b * t.stride.batch + h * t.stride.head +
         row * t.stride.row;
}
// Return row j of a key head of sequence b in a paged pool; `pool` is the head's address in the
// first page. Uses 64-bit offsets, because pools have any size.
template <class T>
PT_DEVICE const T* row_in_pages(const Pages& pages, const T* pool, const HeadRows& stride, int b,
                                int j) {
  const auto before = [&](int k) {
    return int(pages.shift >= 0 ? uint32_t(k) >> pages.shift : uint32_t(k) / uint32_t(pages.size));
  };
  const int row = j - before(j) * pages.size;
  const int64_t entry = b * pages.width + before(j);
  const int64_t page =
      pages.wide
          ? load_i64(static_cast<const int64_t*>(pages.table) + entry)
          : int64_t(int32_t(ptx::ld_global_u32(static_cast<const int32_t*>(pages.table) + entry)));
  return pool + clamp64(page, 0, pages.count - 1) * stride.batch + row * stride.row;
}
PT_DEVICE int64_t row_stat_at(const PerQuery& at, int b, int h, int64_t row) {
  return b * at.batch + h * at.head + row * at.row;
}

}  // namespace pt::cuda
