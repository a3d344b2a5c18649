// SPDX-License-Identifier: Apache-2.0
// Eight neighboring elements of a tensor: 16 bytes of bf16 and f16, 32 of f32, accessed 16 bytes at
// a time.
#pragma once

#include "common/dtype.h"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/memory.cuh"

namespace pt::cuda {

constexpr int kVector = 8;

template <class T>
struct Element;
template <>
struct Element<float> {
  static constexpr DType dtype = DType::f32;
};
template <>
struct Element<ptx::bf16> {
  static constexpr DType dtype = DType::bf16;
  static PT_DEVICE uint32_t pack(float low, float high) { return ptx::pack_bf16(low, high); }
};
template <>
struct Element<ptx::f16> {
  static constexpr DType dtype = DType::f16;
  static PT_DEVICE uint32_t pack(float low, float high) { return ptx::pack_f16(low, high); }
};

// Eight elements in memory format.
template <class T>
struct Raw {
  static constexpr int kPieces = kVector * sizeof(T) / 16;
  ptx::Words4 piece[kPieces];

  // Once: the kernel reads this memory once, and nothing writes it meanwhile.
  template <bool Once>
  PT_DEVICE void load(const T* p) {
    PT_UNROLL
    for (int i = 0; i < kPieces; ++i)
      piece[i] = Once ? ptx::ld_global_once(p + i * (16 / sizeof(T)))
                      : ptx::ld_global_v4(p + i * (16 / sizeof(T)));
  }
  // Load as load<true> if `wanted`, else zeros.
  PT_DEVICE void load_where(const T* p, bool wanted) {
    PT_UNROLL
    for (int i = 0; i < kPieces; ++i)
      piece[i] = ptx::ld_global_once_where(p + i * (16 / sizeof(T)), wanted);
  }
  PT_DEVICE void store(T* p) const {
    PT_UNROLL
    for (int i = 0; i < kPieces; ++i) ptx::st_global_v4(p + i * (16 / sizeof(T)), piece[i]);
  }
  PT_DEVICE void store_where(T* p, bool wanted) const {
    PT_UNROLL
    for (int i = 0; i < kPieces; ++i)
      ptx::st_global_v4_where(p + i * (16 / sizeof(T)), piece[i], wanted);
  }
  // Make the compiler widen the elements again from here on, instead of holding the widened values
  // in twice the registers.
  PT_DEVICE void forget_widened() {
    PT_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      PT_UNROLL
      for (uint32_t& w : piece[i].w) w = uint32_t(ptx::opaque(int(w)));
    }
  }
  PT_DEVICE float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return ptx::bits_float(piece[i / 4].w[i % 4]);
    } else {
      return ptx::widen(T{uint16_t(piece[0].w[i / 2] >> 16 * (i % 2))});
    }
  }
  // Round to T.
  PT_DEVICE void set(const float (&v)[kVector]) {
    PT_UNROLL
    for (int i = 0; i < kVector; i += 2) {
      if constexpr (sizeof(T) == 4) {
        piece[i / 4].w[i % 4] = ptx::float_bits(v[i]);
        piece[i / 4].w[i % 4 + 1] = ptx::float_bits(v[i + 1]);
      } else {
        piece[0].w[i / 2] = Element<T>::pack(v[i], v[i + 1]);
      }
    }
  }
};

// Call f(T{}) for the type of `dtype`, which is uniform across threads.
template <class F>
PT_DEVICE void with_type(DType dtype, F f) {
  if (dtype == DType::f32) {
    f(float{});
  } else if (dtype == DType::bf16) {
    f(ptx::bf16{});
  } else {
    f(ptx::f16{});
  }
}

template <class T>
PT_DEVICE float load_one(const T* p) {
  if constexpr (sizeof(T) == 4) {
    return ptx::bits_float(ptx::ld_global_u32(p));
  } else {
    return ptx::widen(T{ptx::ld_global_u16(p)});
  }
}
template <class T>
PT_DEVICE void store_one(T* p, float v) {
  if constexpr (sizeof(T) == 4) {
    ptx::st_global_u32(p, ptx::float_bits(v));
  } else {
    ptx::st_global_u16(p, uint16_t(Element<T>::pack(v, v)));
  }
}
// Store two neighbors; the address is aligned to the pair.
template <class T>
PT_DEVICE void store_pair(T* p, float low, float high) {
  if constexpr (sizeof(T) == 4) {
    ptx::st_global_u64(p, uint64_t(ptx::float_bits(high)) << 32 | ptx::float_bits(low));
  } else {
    ptx::st_global_u32(p, Element<T>::pack(low, high));
  }
}

// Load elements [column, column + 8) of a row of `columns`; zeros past its end. `aligned`: the row
// starts at a multiple of 16 bytes and `columns` is a multiple of 8; then loads have 16 bytes.
PT_DEVICE void load_any(float (&v)[kVector], const void* row, DType dtype, int column, int columns,
                        bool aligned) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    const T* p = static_cast<const T*>(row) + column;
    if (aligned && column < columns) {
      Raw<T> raw;
      raw.template load<false>(p);
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) v[i] = raw[i];
    } else {
      PT_UNROLL
      for (int i = 0; i < kVector; ++i) v[i] = column + i < columns ? load_one(p + i) : 0.0f;
    }
  });
}
// Round to `dtype` and store; writes nothing past the row's end.
PT_DEVICE void store_any(const float (&v)[kVector], void* row, DType dtype, int column, int columns,
                         bool aligned) {
  with_type(dtype, [&](auto t) {
    using T = decltype(t);
    T* p = static_cast<T*>(row) + column;
    if (aligned && column < columns) {
      Raw<T> raw;
      raw.set(v);
      raw.store(p);
    } else {
      PT_UNROLL
      for (int i = 0; i < kVector; ++i)
        if (column + i < columns) store_one(p + i, v[i]);
    }
  });
}

}  // namespace pt::cuda
