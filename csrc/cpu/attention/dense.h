// SPDX-License-Identifier: Apache-2.0
// Dense masks and biases, read one row at a time without copies.
#pragma once

#include "cpu/attention/sequence.h"

namespace pt {
namespace PT_ISA {

INLINE float to_scalar(bf16 x) {
  const uint32_t u = uint32_t(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
INLINE float to_scalar(f16 x) {
  f16 t[kVecBytes / 4] = {x};
  return to_float(t)[0];
}
INLINE float to_scalar(float x) { return x; }
INLINE double to_scalar(double x) { return x; }
// Saturate to finite numbers: a float64 mask's finfo.min is a number for float32 scores too.
template <class A>
INLINE A saturate(double x) {
  const double most_finite = highest<A>;
  return A(__builtin_isinf(x) ? x : clamp(x, -most_finite, most_finite));
}

// Load lanes j, j + stride, ... of a term, n of them, as vectors of A.
template <class A, class E>
INLINE typename Lanes<A>::vec load_strided(const E* p, int64_t stride, int64_t n) {
  using vec = typename Lanes<A>::vec;
  if (stride == 0) return set1<vec>(saturate<A>(to_scalar(*p)));
  if (stride == 1) {
    if constexpr (std::is_same_v<A, double> && std::is_same_v<E, double>) return Double::load(p, n);
    if constexpr (std::is_same_v<A, float> && !std::is_same_v<E, double>)
      return Float<E>::load(p, n);
  }
  vec v{};
  for (int i = 0; i < kWidth<vec> && i < n; i++) v[i] = saturate<A>(to_scalar(p[i * stride]));
  return v;
}

// One query row of a dense mask or bias.
template <class A>
class DenseRow {
 public:
  using vec = typename Lanes<A>::vec;
  DenseRow() = default;
  DenseRow(const Dense& d, int64_t b, int64_t h, int64_t i)
      : dtype_(d.dtype), boolean_(d.boolean), stride_(d.stride.d) {
    bytes_ = d.boolean ? 1 : size_of(d.dtype);
    row_ = d.data ? static_cast<const char*>(d.data) +
                        bytes_ * (b * d.stride.b + h * d.stride.h + i * d.stride.l)
                  : nullptr;
  }
  // Prefetch the values of keys j .. j + n - 1 into L2.
  INLINE void fetch(int64_t j, int64_t n) const {
    if (row_ && stride_ == 1)
      for (int64_t i = 0; i < n * bytes_; i += 64) __builtin_prefetch(row_ + j * bytes_ + i, 0, 2);
  }
  bool present() const { return row_; }
  bool boolean() const { return boolean_; }
  bool additive() const { return row_ && !boolean_; }
  // Return a boolean mask's visible lanes of keys j .. j + n - 1.
  INLINE mask bits(int64_t j, int64_t n) const {
    const auto* p = reinterpret_cast<const uint8_t*>(row_) + j * stride_;
    if (stride_ == 0) return *p ? mask(~0) : mask(0);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    if (stride_ == 1) {
      const __m128i x = n >= 16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))
                                : _mm_maskz_loadu_epi8(mask_n<vf>(n), p);
      return _mm_test_epi8_mask(x, x);
    }
#endif
    mask m = 0;
    for (int i = 0; i < kWidth<vec> && i < n; i++) m |= mask(p[i * stride_] != 0) << i;
    return m;
  }
  // Call f(j - k0, values of keys j ..) for j = k0, k0 + T::width, ... Dtype and stride are
  // dispatched once per row.
  template <class F>
  INLINE void each(int64_t k0, int64_t n, F f) const {
    switch (dtype_) {
      case DType::f32: return walk<float>(k0, n, f);
      case DType::bf16: return walk<bf16>(k0, n, f);
      case DType::f16: return walk<f16>(k0, n, f);
      default: return walk<double>(k0, n, f);
    }
  }
  // Unrolled by kFour vectors of contiguous keys, until f returns false. Return the number of keys
  // for which it was true.
  static constexpr int kFour = 4;
  template <class F>
  INLINE int64_t fours(int64_t k0, int64_t n, F f) const {
    if (stride_ != 1) return 0;
    switch (dtype_) {
      case DType::f32: return walk_fours<float>(k0, n, f);
      case DType::bf16: return walk_fours<bf16>(k0, n, f);
      default: return 0;
    }
  }
  bool visible(int64_t j) const {
    if (!row_) return true;
    if (boolean_) return bits(j, 1) & 1;
    bool finite_or_nan = true;
    each(j, 1, [&](int64_t, vec t) { finite_or_nan = t[0] != -kInfinity<A>; });
    return finite_or_nan;
  }

 private:
  template <class E, class F>
  INLINE void walk(int64_t k0, int64_t n, F f) const {
    const E* p = reinterpret_cast<const E*>(row_) + k0 * stride_;
    constexpr int width = kWidth<vec>;
    int64_t j = 0;
    if (stride_ == 1)
      for (; j + width <= n; j += width) f(j, load_strided<A>(p + j, 1, width));
    for (; j < n; j += width) f(j, load_strided<A>(p + j * stride_, stride_, n - j));
  }
  template <class E, class F>
  INLINE int64_t walk_fours(int64_t k0, int64_t n, F f) const {
    constexpr int width = kWidth<vec>;
    const E* p = reinterpret_cast<const E*>(row_) + k0;
    int64_t j = 0;
    for (; j + kFour * width <= n; j += kFour * width) {
      vec x[kFour];
      UNROLL for (int i = 0; i < kFour; i++) x[i] = load_strided<A>(p + j + i * width, 1, width);
      if (!f(j, x)) break;
    }
    return j;
  }
  const char* row_ = nullptr;
  DType dtype_ = DType::f32;
  bool boolean_ = false;
  int64_t stride_ = 0, bytes_ = 0;
};

}  // namespace PT_ISA
}  // namespace pt
