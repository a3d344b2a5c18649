// SPDX-License-Identifier: Apache-2.0
// Dropout on rows of columns (add_norm, feed_forward): keep masks of a row, from KeepBits in
// philox.h.
#pragma once

#include <cstring>

#include "cpu/core/arena.h"
#include "cpu/core/philox.h"

namespace pt {
namespace PT_ISA {

constexpr uint32_t kTagAddNorm = 0x80000001u, kTagFeedForward = 0x80000002u;  // counter word 3

// Scale of an element that dropout keeps.
INLINE double keep_scale(uint32_t threshold) {
  return threshold < 65536 ? 65536.0 / (65536.0 - threshold) : 0.0;
}

// Keep mask of columns [first, first + n), one row at a time.
class ColumnKeep {
 public:
  static size_t bytes(int64_t n) {
    return Arena::bytes_for<uint32_t>(KeepBits::words(n)) +
           Arena::bytes_for<char>(KeepBits::table_bytes(n));
  }
  ColumnKeep(uint64_t seed, uint32_t threshold, uint32_t tag, int64_t first, int64_t n,
             Arena& arena)
      : seed_(seed), threshold_(threshold), tag_(tag), first_(first), n_(n) {
    words_ = arena.take<uint32_t>(KeepBits::words(n));
    table_ = arena.take<char>(KeepBits::table_bytes(n));
    std::memset(words_, 0, KeepBits::words(n) * sizeof(uint32_t));
  }
  void row(uint64_t i) {
    if (threshold_ >= 65536) return;  // everything is dropped: words_ is still zero
    if (!prepared_ || uint32_t(i >> 32) != high_) {
      prepared_ = true, high_ = uint32_t(i >> 32);
      bits_.prepare(seed_, threshold_, high_, tag_, first_, n_, table_);
    }
    bits_.row(uint32_t(i), words_);
  }
  // Return the keep mask of columns first + j, first + j + 1, ... of the current row.
  INLINE mask at(int64_t j) const { return bits_at(words_, bits_.offset() + j); }

 private:
  KeepBits bits_;
  uint64_t seed_;
  uint32_t threshold_, tag_, high_ = 0;
  int64_t first_, n_;
  uint32_t* words_;
  char* table_;
  bool prepared_ = false;
};

}  // namespace PT_ISA
}  // namespace pt
