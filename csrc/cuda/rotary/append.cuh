// SPDX-License-Identifier: Apache-2.0
// append_kv in one launch: the first blocks rotate queries, the next rotate keys and write them to
// the cache, the last copy values.
#pragma once

#include "cuda/rotary/fwd.cuh"
#include "cuda/tile/eight_bits.cuh"

namespace pt::cuda {

// Position of a key: row `row` of sequence or page `first`. Positions outside the cache are not
// written.
struct Slot {
  int64_t first;
  int row;
  bool there;

  PT_DEVICE Slot(const RotaryProblem& p, const AppendKV& f, const HeadAt& at, bool here)
      : first(at.b), row(0), there(false) {
    if (!here) return;
    const int64_t position =
        int64_t(ptx::ld_global_u64(f.positions + int64_t(at.b) * p.length + at.l));
    there = position < int64_t(f.pages) * f.page_size && position >= 0;
    if (!there) return;
    row = position < 0 ? 0 : int(position);
    if (!f.table) return;
    const int64_t entry = int64_t(at.b) * f.pages + row / f.page_size;
    first =
        f.table_is_int64
            ? int64_t(ptx::ld_global_u64(static_cast<const uint64_t*>(f.table) + entry))
            : int64_t(int32_t(ptx::ld_global_u32(static_cast<const uint32_t*>(f.table) + entry)));
    there = first >= 0 && first < f.num_pages;
    row %= f.page_size;
  }

  template <class K>
  PT_DEVICE void* in(const HeadsOut& cache, DType dtype, const HeadAt& at) const {
    return there ? K::at(cache.data, dtype, offset(cache.strides, at)) : nullptr;
  }
  PT_DEVICE int64_t offset(const Strides& s, const HeadAt& at) const {
    return first * s.b + at.h * s.h + row * s.l;
  }
};

// A row of an eight-bit cache. Every lane of its team first passes its values, rounded to the
// problem's dtype, to find the row's scale, then stores them.
template <class K>
class EightBitRow {
 public:
  PT_DEVICE EightBitRow(const RotaryProblem& p, const AppendKV& f) : p_(p), dtype_(f.eight_bits) {}

  PT_DEVICE void show(float (&v)[kVector]) {
    with_type(p_.dtype, [&](auto t) {
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) {
        if (sizeof t == 2) v[i] = rounded(v[i], t);
        // as integers, sizes are ordered, then Inf, then NaN
        const uint32_t size = ptx::float_bits(v[i]) & 0x7fffffffu;
        largest_ = size > largest_ ? size : largest_;
      }
    });
  }
  // Every lane of the warp calls this once.
  PT_DEVICE void end_of_row(LaneTeam& team, const Slot& slot, const HeadsOut& scales,
                            const HeadAt& at) {
    scale_ = scale_of_row(team.max(largest_), dtype_);
    if (slot.there && team.rank() == 0)
      store_one(static_cast<float*>(scales.data) + slot.offset(scales.strides, at), scale_);
  }
  PT_DEVICE void store(const float (&v)[kVector], uint8_t* row, int column, int end) const {
    uint32_t bytes[2] = {};
    PT_UNROLL
    for (int i = 0; i < kVector; ++i) {
      const float x = ptx::div_rn(v[i], scale_);
      bytes[i / 4] |= (scale_ != scale_            ? 0
                       : dtype_ == EightBits::e4m3 ? to_e4m3(x)
                                                   : to_int8(x))
                      << 8 * (i % 4);
    }
    if constexpr (K::whole) {
      ptx::st_global_u64(row + column, uint64_t(bytes[1]) << 32 | bytes[0]);
    } else {
      for (int i = 0; i < kVector && column + i < end; ++i)
        ptx::st_global_u8(row + column + i, uint8_t(bytes[i / 4] >> 8 * (i % 4)));
    }
  }

 private:
  static PT_DEVICE float rounded(float x, float) { return x; }
  static PT_DEVICE float rounded(float x, ptx::bf16) {
    return ptx::widen(ptx::bf16{uint16_t(ptx::pack_bf16(x, x))});
  }
  static PT_DEVICE float rounded(float x, ptx::f16) {
    return ptx::widen(ptx::f16{uint16_t(ptx::pack_f16(x, x))});
  }

  const RotaryProblem& p_;
  EightBits dtype_;
  uint32_t largest_ = 0;
  float scale_ = 0.0f;
};

template <class K>
PT_DEVICE void append_keys(const RotaryProblem& p, const AppendKV& f, uint32_t block) {
  LaneTeam team(p.lanes);
  const uint32_t row = block * team.teams() + team.team(),
                 rows = uint32_t(p.batch) * uint32_t(f.key.x.heads) * uint32_t(p.length);
  const HeadAt at(p, f.key.x.heads, row < rows ? row : 0);
  const Slot slot(p, f, at, row < rows);
  const RotaryForward& keys = f.key;
  if (f.eight_bits == EightBits::none)
    return forward_row<K>(p, keys, team, at, slot.in<K>(f.key.out, p.dtype, at), slot.there);
  TurnedRow<K> turned(p, keys, team, at, slot.there);
  EightBitRow<K> out(p, f);
  turned.each([&](const Chunk&, Numbers& x) { out.show(x[0]), out.show(x[1]); });
  out.end_of_row(team, slot, f.key_scales, at);
  if (!slot.there) return;
  uint8_t* const to = static_cast<uint8_t*>(f.key.out.data) + slot.offset(f.key.out.strides, at);
  const auto store = [&](const Chunk& c, const Numbers& x) {
    PT_UNROLL
    for (int s = 0; s < 2; ++s)
      if (c.has(s)) out.store(x[s], to, c.column[s], c.end[s]);
  };
  if constexpr (K::whole) turned.again(store);
  else
    turned.each([&](const Chunk& c, Numbers& x) { out.show(x[0]), out.show(x[1]), store(c, x); });
}

template <class K>
PT_DEVICE void append_values_in_eight_bits(const RotaryProblem& p, const AppendKV& f,
                                           LaneTeam& team, const HeadAt& at, const Slot& slot) {
  const void* const from = K::at(f.value.data, p.dtype, at.in(f.value.strides));
  EightBitRow<K> out(p, f);
  const auto each = [&](auto apply) {
    for (int column = kVector * team.rank(); slot.there && column < f.value_dim;
         column += kVector * team.size()) {
      float v[kVector];
      K::load(v, from, p.dtype, column, f.value_dim);
      apply(v, column);
    }
  };
  each([&](float (&v)[kVector], int) { out.show(v); });
  out.end_of_row(team, slot, f.value_scales, at);
  uint8_t* const to =
      static_cast<uint8_t*>(f.value_cache.data) + slot.offset(f.value_cache.strides, at);
  each([&](float (&v)[kVector], int column) { out.store(v, to, column, f.value_dim); });
}

template <class K>
PT_DEVICE void append_values(const RotaryProblem& p, const AppendKV& f, uint32_t block) {
  LaneTeam team(f.value_lanes);
  const uint32_t row = block * team.teams() + team.team(),
                 rows = uint32_t(p.batch) * uint32_t(f.value.heads) * uint32_t(p.length);
  const HeadAt at(p, f.value.heads, row < rows ? row : 0);
  const Slot slot(p, f, at, row < rows);
  if (f.eight_bits != EightBits::none) return append_values_in_eight_bits<K>(p, f, team, at, slot);
  if (!slot.there) return;
  const void* from = K::at(f.value.data, p.dtype, at.in(f.value.strides));
  void* to = slot.in<K>(f.value_cache, p.dtype, at);
  for (int column = kVector * team.rank(); column < f.value_dim; column += kVector * team.size())
    K::copy(from, to, p.dtype, column, f.value_dim);
}

template <class K>
__global__ void __launch_bounds__(kRotaryThreads, 4)
    rotary_append_kernel(const __grid_constant__ RotaryProblem p,
                         const __grid_constant__ AppendKV f) {
  const uint32_t block = blockIdx.x;
  if (block < f.query_blocks) return forward_rows<K>(p, f.query, block);
  if (block < f.query_blocks + f.key_blocks) return append_keys<K>(p, f, block - f.query_blocks);
  append_values<K>(p, f, block - f.query_blocks - f.key_blocks);
}

}  // namespace pt::cuda
