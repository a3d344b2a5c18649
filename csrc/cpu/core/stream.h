// SPDX-License-Identifier: Apache-2.0
// Streaming stores, for results larger than the caches: a plain store first reads the line that it
// overwrites.
#pragma once

#include <cstring>

#include "common/strides.h"
#include "cpu/core/traits.h"

namespace pt {
namespace PT_ISA {

// larger results leave the caches before they are read
constexpr int64_t kStreamBytes = int64_t(4) << 20;

// Stream one vector to an address aligned to kVecBytes. The store may become visible late:
// for_each_task fences once per thread, after its tasks. (A fence after each tile took 1 % of a
// gemm.)
INLINE void stream(void* p, vi32 v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
#elif defined(__AVX__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
#else
  *reinterpret_cast<vi32*>(p) = v;
#endif
}
INLINE void stream_fence() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// Stream half a vector.
INLINE void stream_half(void* p, const void* half) {
#if defined(__AVX512F__)
  _mm256_stream_si256(static_cast<__m256i*>(p),
                      _mm256_loadu_si256(static_cast<const __m256i*>(half)));
#elif defined(__AVX__)
  _mm_stream_si128(static_cast<__m128i*>(p), _mm_loadu_si128(static_cast<const __m128i*>(half)));
#else
  std::memcpy(p, half, kVecBytes / 2);
#endif
}

// Return true if rows of t can be streamed: columns fill full vectors, and every row is aligned.
template <class T>
INLINE bool streamable(const RowsOut& t, int64_t columns) {
  constexpr int64_t bytes = T::width * int64_t(sizeof(typename T::elem));
  const auto whole = [&](int64_t elements) {
    return elements * int64_t(sizeof(typename T::elem)) % bytes == 0;
  };
  return reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && whole(t.outer) && whole(t.inner) &&
         whole(columns);
}

// Store a vector, streaming if STREAM, and return it as T::load would read it back.
template <class T, bool STREAM, class Lanes>
INLINE typename T::vec put(typename T::elem* p, Lanes lanes, typename T::vec v) {
  constexpr bool rounds = sizeof(typename T::elem) < sizeof(typename T::acc);
  if constexpr (!STREAM) {
    if constexpr (std::is_same_v<typename T::elem, bf16> && !std::is_integral_v<Lanes>)
      return from_float_and_back(p, v);
    T::store(p, lanes, v);
    if constexpr (rounds) return T::load(p, lanes);
  } else if constexpr (rounds) {
    alignas(kVecBytes) typename T::elem half[T::width];
    T::store(half, T::width, v);
    stream_half(p, half);
    return T::load(half);
  } else {
    stream(p, (vi32)v);
  }
  return v;
}

// Stream a full vector to `far`, store it to the aligned `near`, and return it as T::load would
// read it.
template <class T>
INLINE typename T::vec put_twice(typename T::elem* far, typename T::elem* near, typename T::vec v) {
  v = put<T, false>(near, std::integral_constant<int64_t, T::width>(), v);
  if constexpr (sizeof(typename T::elem) < sizeof(typename T::acc)) stream_half(far, near);
  else stream(far, (vi32)v);
  return v;
}

// Convert row[0, n), aligned and padded to full vectors, to out. streaming: out is aligned to
// kVecBytes.
template <class T>
INLINE void write_row(typename T::elem* out, const typename T::acc* row, int64_t n,
                      bool streaming = false) {
  int64_t j = 0;
  if (streaming) {
    constexpr int64_t step = kVecBytes / int64_t(sizeof(typename T::elem));
    [[maybe_unused]] alignas(kVecBytes) typename T::elem line[step];
    for (; j + step <= n; j += step) {
      if constexpr (T::pack == 2) {
        stream(out + j, T::pair(load(row + j), load(row + j + T::width)));
      } else {
        UNROLL for (int64_t i = 0; i < step; i += T::width)
            T::store(line + i, T::width, load(row + j + i));
        stream(out + j, *reinterpret_cast<const vi32*>(line));
      }
    }
  }
  for (; j < n; j += T::width) T::store(out + j, n - j, load(row + j));
}

}  // namespace PT_ISA
}  // namespace pt
