// SPDX-License-Identifier: Apache-2.0
// append_kv: normalize and rotate query and key, and write key and value to their cache slots, one
// position at a time.
#pragma once

#include <cstring>

#include "cpu/rotary/fwd.h"

namespace pt {
namespace PT_ISA {

// Return a position's cache row, in elements from the caches' first head, or -1.
INLINE int64_t cache_row(const AppendKV& f, const Strides& s, int64_t b, int64_t position) {
  if (position < 0 || position >= (f.table ? f.pages * f.page_size : f.page_size)) return -1;
  if (!f.table) return b * s.b + position * s.l;
  const int64_t page = f.table[b * f.pages + position / f.page_size];
  return page < 0 || page >= f.num_pages ? -1 : page * s.b + position % f.page_size * s.l;
}

template <class X, bool NORM>
void append_key(const RotaryProblem& p, const AppendKV& f, int64_t b, int64_t l, int64_t row) {
  using elem = typename X::elem;
  const auto* weight = static_cast<const typename X::acc*>(f.key.weight);
  for (int64_t h = 0; h < f.key.x.heads; h++)
    rotary_row<X, NORM>(p, weight, Angles<X>(p, b, l), row_of<X>(f.key.x, b, h, l),
                        static_cast<elem*>(f.key_cache.data) + row + h * f.key_cache.strides.h,
                        nullptr);
}

template <class X>
void append_kv(const RotaryProblem& p, const AppendKV& f) {
  using elem = typename X::elem;
  const PositionBlocks blocks(p);
  const auto turn_query = f.query.weight ? rotary_block<X, true> : rotary_block<X, false>;
  const auto keep_key = f.key.weight ? append_key<X, true> : append_key<X, false>;
  for_each_task(blocks.tasks, p.threads, [&](int64_t task) {
    const int64_t b = blocks.sequence(task);
    turn_query(p, f.query, b, blocks.first(task), blocks.last(task));
    for (int64_t l = blocks.first(task); l < blocks.last(task); l++) {
      const int64_t position = f.positions[b * p.length + l];
      const int64_t key_row = cache_row(f, f.key_cache.strides, b, position);
      if (key_row < 0) continue;
      keep_key(p, f, b, l, key_row);
      const int64_t value_row = cache_row(f, f.value_cache.strides, b, position);
      for (int64_t h = 0; h < f.value.heads; h++)
        std::memcpy(
            static_cast<elem*>(f.value_cache.data) + value_row + h * f.value_cache.strides.h,
            row_of<X>(f.value, b, h, l), f.value_dim * sizeof(elem));
    }
  });
}

}  // namespace PT_ISA
}  // namespace pt
