// SPDX-License-Identifier: Apache-2.0
// Vectors of one register and the operand traits of the CPU kernels. All code is generic in the
// vector width: T::width lanes of T::acc. GCC vector extensions do the arithmetic; intrinsics fill
// the gaps.
//
// A traits type T describes how a gemm reads its operands:
//   elem    element of a tensor
//   opnd    element of a packed operand
//   acc     accumulators, scores, statistics
//   packed  unit of the micro-kernel's broadcast: `pack` neighbors of opnd along k (a bf16 pair is
//           one packed element of 32 bits)
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// Vector types as template arguments lose may_alias and alignment, which do not affect values.
#pragma GCC diagnostic ignored "-Wignored-attributes"
// GCC 12 warns about deliberately undefined values inside its own intrinsics (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#define UNROLL _Pragma("GCC unroll 32")
#define INLINE inline __attribute__((always_inline))

namespace pt {

// 16-bit storage types. GCC 12 has no _Float16 in C++; the kernels do no arithmetic on them.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

namespace PT_ISA {

// Bytes of a vector register, and the micro-kernel's tile: kMR rows x kNV vectors of accumulators.
#if defined(__AVX512F__)
// 24 accumulators + 4 of B + 1 of A of 32 registers
constexpr int kVecBytes = 64, kMR = 6, kNV = 4;
#elif defined(__AVX__)
constexpr int kVecBytes = 32, kMR = 6, kNV = 2;  // 12 + 2 + 1 of 16
#elif defined(__aarch64__)
constexpr int kVecBytes = 16, kMR = 6, kNV = 4;
#else
constexpr int kVecBytes = 16, kMR = 4, kNV = 2;  // 8 + 2 + 1, and 1 for the product: no FMA in SSE2
#endif

constexpr double kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;

INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
INLINE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
template <class A>
INLINE constexpr A min(A a, A b) {
  return b < a ? b : a;
}
template <class A>
INLINE constexpr A max(A a, A b) {
  return a < b ? b : a;
}
template <class A>
INLINE constexpr A clamp(A x, A lo, A hi) {
  return x < lo ? lo : hi < x ? hi : x;
}

#define PT_VEC(SCALAR) SCALAR __attribute__((vector_size(kVecBytes), may_alias))
typedef PT_VEC(float) vf;
typedef PT_VEC(double) vd;
typedef PT_VEC(int32_t) vi32;
typedef PT_VEC(int64_t) vi64;
#undef PT_VEC
// one per float lane, unaligned
typedef uint16_t vu16_half __attribute__((vector_size(kVecBytes / 2), may_alias, aligned(2)));
typedef float vf_any __attribute__((vector_size(kVecBytes), may_alias, aligned(4)));
typedef double vd_any __attribute__((vector_size(kVecBytes), may_alias, aligned(8)));

template <class A>
struct Lanes;
template <>
struct Lanes<float> {
  using vec = vf;
  using any = vf_any;  // unaligned
  using ivec = vi32;
  using word = int32_t;
  static constexpr int mantissa = 23;
};
template <>
struct Lanes<double> {
  using vec = vd;
  using any = vd_any;
  using ivec = vi64;
  using word = int64_t;
  static constexpr int mantissa = 52;
};
template <class V>
using scalar_of = std::remove_cv_t<std::remove_reference_t<decltype(std::declval<V>()[0])>>;
template <class V>
using ivec_of = typename Lanes<scalar_of<V>>::ivec;
template <class V>
constexpr int kWidth = kVecBytes / int(sizeof(scalar_of<V>));
template <class A>
constexpr A kInfinity = A(__builtin_inf());
template <class A>
// finite
constexpr A highest = sizeof(A) == 4 ? A(3.4028234663852886e38) : A(1.7976931348623157e308);

template <class V>
INLINE V set1(scalar_of<V> x) {
  return x - V{};
}
template <class V>
INLINE V zero() {
  return V{};
}
template <class A>
INLINE typename Lanes<A>::vec load(const A* p) {
  return *reinterpret_cast<const typename Lanes<A>::vec*>(p);
}
template <class A>
INLINE typename Lanes<A>::vec loadu(const A* p) {
  return *reinterpret_cast<const typename Lanes<A>::any*>(p);
}
template <class A>
INLINE void store(A* p, typename Lanes<A>::vec v) {
  *reinterpret_cast<typename Lanes<A>::vec*>(p) = v;
}
template <class A>
INLINE void storeu(A* p, typename Lanes<A>::vec v) {
  *reinterpret_cast<typename Lanes<A>::any*>(p) = v;
}

template <class V, int... I>
INLINE ivec_of<V> iota_(std::integer_sequence<int, I...>) {
  return ivec_of<V>{I...};
}
template <class V>
INLINE ivec_of<V> iota() {
  return iota_<V>(std::make_integer_sequence<int, kWidth<V>>());
}

// Return the second operand if either is NaN: pass the data second to preserve its NaN.
template <class V>
INLINE V vmax(V a, V b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<scalar_of<V>, float>) return (V)_mm512_max_ps((__m512)a, (__m512)b);
  else return (V)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<scalar_of<V>, float>) return (V)_mm256_max_ps((__m256)a, (__m256)b);
  else return (V)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
  return a > b ? a : b;
#endif
}
template <class V>
INLINE V vmin(V a, V b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<scalar_of<V>, float>) return (V)_mm512_min_ps((__m512)a, (__m512)b);
  else return (V)_mm512_min_pd((__m512d)a, (__m512d)b);
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<scalar_of<V>, float>) return (V)_mm256_min_ps((__m256)a, (__m256)b);
  else return (V)_mm256_min_pd((__m256d)a, (__m256d)b);
#else
  return a < b ? a : b;
#endif
}
template <class V>
INLINE V vabs(V x) {
  using word = typename Lanes<scalar_of<V>>::word;
  return (V)((ivec_of<V>)x & (word)(~(uint64_t(1) << 63) >> (64 - 8 * sizeof(word))));
}
// a * b + c, in one rounding if the instruction set supports it.
template <class V>
INLINE V fma(V a, V b, V c) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<scalar_of<V>, float>)
    return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  else return (V)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#else
  return a * b + c;  // contracted by GCC's default, -ffp-contract=fast
#endif
}

// Masks: bit i belongs to lane i, on every instruction set.
using mask = uint16_t;

// Set lanes [0, n).
template <class V>
INLINE mask mask_n(int64_t n) {
  constexpr int w = kWidth<V>;
  return n >= w ? mask((1u << w) - 1) : n <= 0 ? mask(0) : mask((1u << n) - 1);
}
// Set lanes [lo, hi).
template <class V>
INLINE mask mask_range(int64_t lo, int64_t hi) {
  return mask_n<V>(hi) & mask(~mask_n<V>(lo));
}

// Select a if the bit is set, else b.
template <class V>
INLINE V select(mask m, V a, V b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<scalar_of<V>, float>)
    return (V)_mm512_mask_blend_ps(m, (__m512)b, (__m512)a);
  else return (V)_mm512_mask_blend_pd(__mmask8(m), (__m512d)b, (__m512d)a);
#else
  using I = ivec_of<V>;
  using word = typename Lanes<scalar_of<V>>::word;
  I bit{};
  UNROLL for (int i = 0; i < kWidth<V>; i++) bit[i] = word(1) << i;
  return ((I{} + word(m)) & bit) != 0 ? a : b;
#endif
}
// Convert a comparison c (all ones or zero per lane) to bits.
template <class I>
INLINE mask to_mask(I c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(scalar_of<I>) == 4) return _mm512_movepi32_mask((__m512i)c);
  else return _mm512_movepi64_mask((__m512i)c);
#elif defined(__AVX2__)
  if constexpr (sizeof(scalar_of<I>) == 4) return mask(_mm256_movemask_ps((__m256)c));
  else return mask(_mm256_movemask_pd((__m256d)c));
#else
  mask m = 0;
  UNROLL for (int i = 0; i < kVecBytes / int(sizeof(c[0])); i++) m |= mask(c[i] & 1) << i;
  return m;
#endif
}

// Transposition, and reductions in a fixed order.
template <class V, int... I>
INLINE V unpack_lo_(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(a, b, ivec_of<V>{(I / 2 + I % 2 * kWidth<V>)...});
}
template <class V, int... I>
INLINE V unpack_hi_(V a, V b, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(a, b, ivec_of<V>{(I / 2 + kWidth<V> / 2 + I % 2 * kWidth<V>)...});
}
// Transpose kWidth x kWidth values in place.
template <class V>
INLINE void transpose(V* v) {
  constexpr int n = kWidth<V>;
  constexpr auto lanes = std::make_integer_sequence<int, n>();
  V t[n] = {};
  UNROLL for (int step = 1; step < n; step *= 2) {
    UNROLL for (int i = 0; i < n / 2; i++) t[2 * i] = unpack_lo_(v[i], v[i + n / 2], lanes),
                                                 t[2 * i + 1] =
                                                     unpack_hi_(v[i], v[i + n / 2], lanes);
    UNROLL for (int i = 0; i < n; i++) v[i] = t[i];
  }
}
// Lane i of the result = reduction of v[i]. v holds kWidth vectors and is overwritten.
template <class V, class Op>
INLINE V reduce_rows(V* v, Op op) {
  constexpr auto lanes = std::make_integer_sequence<int, kWidth<V>>();
  UNROLL for (int n = kWidth<V> / 2; n > 0; n /= 2) UNROLL for (int i = 0; i < n; i++) v[i] =
      op(unpack_lo_(v[i], v[i + n], lanes), unpack_hi_(v[i], v[i + n], lanes));
  return v[0];
}
// Reduce N neighbors (a power of two), in log2(N) registers if v is computed in order. Combining
// such groups with the same function gives lane i = reduction of v[bit-reversed i].
template <int N, class V, class Op>
INLINE V reduce_neighbours(V* v, Op op) {
  constexpr auto lanes = std::make_integer_sequence<int, kWidth<V>>();
  UNROLL for (int n = N / 2; n > 0; n /= 2) UNROLL for (int i = 0; i < n; i++) v[i] =
      op(unpack_lo_(v[2 * i], v[2 * i + 1], lanes), unpack_hi_(v[2 * i], v[2 * i + 1], lanes));
  return v[0];
}
constexpr int reverse_bits(int i, int n) {
  int r = 0;
  for (int bit = 1; bit < n; bit *= 2) r = 2 * r + (i / bit & 1);
  return r;
}
template <class V, int... I>
INLINE V reverse_lane_bits_(V a, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(a, ivec_of<V>{reverse_bits(I, kWidth<V>)...});
}
template <class V>
INLINE V reverse_lane_bits(V a) {
  return reverse_lane_bits_(a, std::make_integer_sequence<int, kWidth<V>>());
}
template <class V, int... I>
INLINE V swap_(V a, int w, std::integer_sequence<int, I...>) {
  return __builtin_shuffle(a, ivec_of<V>{(I ^ w)...});
}
template <class V, class Op>
INLINE scalar_of<V> reduce(V v, Op op) {
  UNROLL for (int w = kWidth<V> / 2; w > 0; w /= 2) v =
      op(v, swap_(v, w, std::make_integer_sequence<int, kWidth<V>>()));
  return v[0];
}
constexpr auto op_add = [](auto a, auto b) { return a + b; };
constexpr auto op_max = [](auto a, auto b) { return vmax(a, b); };

// 2^x: relative error 3.0e-6 (degree 4), 1.8e-7 (degree 5, rounding included), 2e-16 (double).
// Exact at 0, 0 at -inf, NaN at NaN. double ignores the degree and uses Taylor's polynomial of
// degree 13 on [-1/2, 1/2], with a remainder below 5e-18. Float polynomials minimize the relative
// error among those that are 1 at 0: on [-1/2, 1/2], or on [0, 1] with AVX-512, whose scaling
// instruction rounds exponents down.
template <class A, int DEGREE>
struct Exp2Polynomial;
#if defined(__AVX512F__)
template <>
struct Exp2Polynomial<float, 4> {
  static constexpr float c[] = {0.013426683843135834f, 0.052242476493120193f, 0.241280198097229f,
                                0.6930448412895203f, 1.0f};
};
template <>
struct Exp2Polynomial<float, 5> {
  static constexpr float c[] = {0.0018671301659196615f, 0.009017029777169228f, 0.05579991266131401f,
                                0.24016444385051727f,   0.6931512951850891f,   1.0f};
};
#else
template <>
struct Exp2Polynomial<float, 4> {
  static constexpr float c[] = {0.009582852944731712f, 0.055906426161527634f, 0.24024099111557007f,
                                0.6931241750717163f, 1.0f};
};
template <>
struct Exp2Polynomial<float, 5> {
  static constexpr float c[] = {0.001326472731307149f, 0.009671512991189957f, 0.05550733581185341f,
                                0.24022242426872253f,  0.6931470036506653f,   1.0f};
};
#endif
template <int DEGREE>
struct Exp2Polynomial<double, DEGREE> {
  static constexpr double c[] = {1.3691488853904128e-12, 2.5678435993488206e-11,
                                 4.4455382718708116e-10, 7.0549116208011233e-09,
                                 1.0178086009239699e-07, 1.3215486790144309e-06,
                                 1.5252733804059840e-05, 1.5403530393381609e-04,
                                 1.3333558146428443e-03, 9.6181291076284771e-03,
                                 5.5504108664821580e-02, 2.4022650695910071e-01,
                                 6.9314718055994531e-01, 1.0};
};
template <int DEGREE, int N, class V>
INLINE void exp2_polynomial(const V (&f)[N], V (&p)[N]) {
  constexpr auto& c = Exp2Polynomial<scalar_of<V>, DEGREE>::c;
  UNROLL for (int i = 0; i < N; i++) p[i] = set1<V>(c[0]);
  UNROLL for (int k = 1; k < int(sizeof(c) / sizeof(*c)); k++) UNROLL for (int i = 0; i < N; i++)
      p[i] = fma(p[i], f[i], set1<V>(c[k]));
}

// x = 2^x for N interleaved vectors: one vector is a chain of 50 cycles, and a core's window holds
// two or three chains. NEGATIVE: no x is above 1, or its result is unused.
template <int DEGREE, bool NEGATIVE, int N, class V>
INLINE void exp2_each(V (&x)[N]) {
  using A = scalar_of<V>;
  using L = Lanes<A>;
  V f[N], p[N];
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<A, float>) {
    // f = x - floor(x)
    UNROLL for (int i = 0; i < N; i++) f[i] =
        (V)_mm512_reduce_ps((__m512)x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    exp2_polynomial<DEGREE>(f, p);
    // p 2^floor(x)
    UNROLL for (int i = 0; i < N; i++) x[i] = (V)_mm512_scalef_ps((__m512)p[i], (__m512)x[i]);
    return;
  }
#endif
  using I = ivec_of<V>;
  // exponents of 0 and of infinity
  constexpr A lowest = sizeof(A) == 4 ? -127 : -1023, top = 1 - lowest;
  // Adding it rounds to an integer in the low bits and biases it as an exponent.
  const V magic = set1<V>(A(3) * A(uint64_t(1) << (L::mantissa - 1)) - lowest);
  V t[N];
  UNROLL for (int i = 0; i < N; i++) x[i] = vmax(set1<V>(lowest), x[i]);
  if constexpr (!NEGATIVE) UNROLL for (int i = 0; i < N; i++) x[i] = vmin(set1<V>(top), x[i]);
  UNROLL for (int i = 0; i < N; i++) t[i] = x[i] + magic;
  UNROLL for (int i = 0; i < N; i++) f[i] = x[i] - (t[i] - magic);
  exp2_polynomial<DEGREE>(f, p);
  UNROLL for (int i = 0; i < N; i++) x[i] = p[i] * (V)((I)t[i] << L::mantissa);
}
template <int DEGREE, class V>
INLINE V exp2v(V x) {
  V one[1] = {x};
  exp2_each<DEGREE, false>(one);
  return one[0];
}

}  // namespace PT_ISA
}  // namespace pt
