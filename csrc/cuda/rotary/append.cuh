// SPDX-License-Identifier: Apache-2.0
// append_kv in one launch: the first blocks turn queries, the next keys, which go to their places in the cache, the last copy values.
#pragma once

#include "cuda/rotary/fwd.cuh"

namespace pt::cuda {

// A key's place: row `row` of sequence or page `first`. What is outside of the cache is written by nobody.
struct Slot {
  int64_t first;
  int row;
  bool there;

  PT_DEVICE Slot(const RotaryProblem& p, const AppendKV& f, const HeadAt& at, bool here) : first(at.b), row(0), there(false) {
    if (!here) return;
    const int64_t position = int64_t(ptx::ld_global_u64(f.positions + int64_t(at.b) * p.length + at.l)) + PT_FAULT(keys_one_slot_late);
    there = position < int64_t(f.pages) * f.page_size && (position >= 0 || PT_FAULT(padding_written));
    if (!there) return;
    row = position < 0 ? 0 : int(position);
    if (!f.table) return;
    const int64_t entry = int64_t(PT_FAULT(pages_of_the_first_sequence) ? 0 : at.b) * f.pages + row / f.page_size;
    first = f.table_is_int64 ? int64_t(ptx::ld_global_u64(static_cast<const uint64_t*>(f.table) + entry))
                             : int64_t(int32_t(ptx::ld_global_u32(static_cast<const uint32_t*>(f.table) + entry)));
    there = first >= 0 && first < f.num_pages;
    row = PT_FAULT(the_row_of_a_page_lost) ? 0 : row % f.page_size;
  }

  template <class K>
  PT_DEVICE void* in(const HeadsOut& cache, DType dtype, const HeadAt& at) const {
    return there ? K::at(cache.data, dtype, first * cache.strides.b + at.h * cache.strides.h + row * cache.strides.l) : nullptr;
  }
};

template <class K>
PT_DEVICE void append_keys(const RotaryProblem& p, const AppendKV& f, uint32_t block) {
  LaneTeam team(p.lanes);
  const uint32_t row = block * team.teams() + team.team(), rows = uint32_t(p.batch) * uint32_t(f.key.x.heads) * uint32_t(p.length);
  const HeadAt at(p, f.key.x.heads, row < rows ? row : 0);
  const Slot slot(p, f, at, row < rows);
  forward_row<K>(p, PT_FAULT(norm_of_queries_for_keys) ? f.query : f.key, team, at, slot.in<K>(f.key.out, p.dtype, at), slot.there);
}

template <class K>
PT_DEVICE void append_values(const RotaryProblem& p, const AppendKV& f, uint32_t block) {
  const LaneTeam team(f.value_lanes);
  const uint32_t row = block * team.teams() + team.team(), rows = uint32_t(p.batch) * uint32_t(f.value.heads) * uint32_t(p.length);
  if (row >= rows) return;
  const HeadAt at(p, f.value.heads, row);
  const Slot slot(p, f, at, true);
  if (!slot.there) return;
  const void* from = K::at(f.value.data, p.dtype, at.in(f.value.strides));
  void* to = slot.in<K>(f.value_cache, p.dtype, at);
  for (int column = kVector * team.rank(); column < f.value_dim; column += kVector * team.size())
    K::copy(from, to, p.dtype, column, f.value_dim);
}

template <class K>
__global__ void __launch_bounds__(kRotaryThreads, 4)
    rotary_append_kernel(const __grid_constant__ RotaryProblem p, const __grid_constant__ AppendKV f) {
  const uint32_t block = blockIdx.x;
  if (block < f.query_blocks) return forward_rows<K>(p, f.query, block);
  if (block < f.query_blocks + f.key_blocks) return append_keys<K>(p, f, block - f.query_blocks);
  append_values<K>(p, f, block - f.query_blocks - f.key_blocks);
}

}  // namespace pt::cuda
