// What stands between q.k and the softmax: which pairs are visible, and what is added to their scores.
//
//   Sequence   one batch element (or packed sequence): its sizes, and the visible keys of a query as one interval [lo, hi)
//   Scores     everything an interval cannot say: dense masks and biases, unsorted segments, ALiBi, T5, softcap
//
// Rows are queries and lanes are keys, forward and backward. All indices here are local; starts enter inside.
#pragma once

#include "cpu/attention/problem.h"
#include "cpu/core/vec.h"

namespace pt {
namespace PT_ISA {

struct Range {
  int64_t lo, hi;
  INLINE int64_t size() const { return hi - lo; }
};

// ---- geometry
class Sequence {
 public:
  Sequence() = default;
  Sequence(const AttentionProblem& p, int64_t b) : b(b) {
    const auto take = [&](const int64_t* cu, int64_t padded, int64_t& first) {
      first = cu ? cu[b] : 0;
      return cu ? cu[b + 1] - cu[b] : padded;
    };
    Lq = take(p.cu_q, p.Lq, q_first), Lk = take(p.cu_k, p.Lk, k_first);
    query_start_ = p.query_start, key_start_ = p.key_start;
    const int64_t q_end = p.query_lengths ? p.query_lengths[b] : query_start_ + Lq;
    key_end_ = p.key_lengths ? p.key_lengths[b] : key_start_ + Lk;
    rows = clamp<int64_t>(q_end - query_start_, 0, Lq);
    cols = clamp<int64_t>(key_end_ - key_start_, 0, Lk);
    offset = p.align == Align::bottom_right ? key_end_ - q_end : 0;
    // bounds beyond any index stand for "unbounded", with room left for the sums below
    constexpr int64_t far = int64_t(1) << 60;
    left_ = p.left < 0 ? far : least(p.left, far);
    right_ = p.right < 0 ? far : least(p.right, far);
    causal_ = p.align != Align::none;
    prefix_ = p.prefix_lengths ? p.prefix_lengths[b] : 0;
    if (p.query_segments) {
      query_segments_ = p.query_segments + b * p.Lq, key_segments_ = p.key_segments + b * p.Lk;
      sorted_ = true;
      for (int64_t j = 1; j < Lk && sorted_; j++) sorted_ = key_segments_[j - 1] <= key_segments_[j];
    }
  }

  // The keys query i < rows may see; empty as {x, x}. Exact unless unsorted_segments().
  INLINE Range visible(int64_t i) const {
    Range r = interval(i);
    if (query_segments_ && sorted_) {
      const int64_t s = query_segments_[i];
      r.lo = most(r.lo, first_not_below(s));
      r.hi = least(r.hi, s == INT64_MAX ? Lk : first_not_below(s + 1));
    }
    r.hi = most(r.hi, r.lo);
    return r;
  }
  // Contains every key that any query sees: both ends of the interval rise with i.
  Range keys() const {
    if (rows == 0) return {0, 0};
    const Range r{interval(0).lo, interval(rows - 1).hi};
    return {r.lo, most(r.lo, r.hi)};
  }
  // Then segments are compared pair by pair (Scores), and visible() only bounds them.
  bool unsorted_segments() const { return query_segments_ && !sorted_; }
  // With unsorted segments: false where no key of the one range can be of the segment of a query of the other.
  bool may_meet(Range queries, Range keys) const {
    const auto bounds = [](const int64_t* x, Range r) {
      Range b{INT64_MAX, INT64_MIN};
      for (int64_t i = r.lo; i < r.hi; i++) b = {least(b.lo, x[i]), most(b.hi, x[i])};
      return b;
    };
    const Range q = bounds(query_segments_, queries), k = bounds(key_segments_, keys);
    return k.lo <= q.hi && k.hi >= q.lo;
  }
  const int64_t* query_segments() const { return query_segments_; }
  const int64_t* key_segments() const { return key_segments_; }

  // j - i - offset of the first pair, in absolute indices: the distance ALiBi and T5 see
  INLINE int64_t distance(int64_t i, int64_t j) const { return j + key_start_ - i - query_start_ - offset; }

  int64_t b = 0;
  int64_t Lq = 0, Lk = 0;            // local sizes
  int64_t q_first = 0, k_first = 0;  // row of the packed tensors where this sequence starts
  int64_t rows = 0;                  // queries [rows, Lq) are padding
  int64_t cols = 0;                  // keys [cols, Lk) are padding
  int64_t offset = 0;                // of the alignment
  int64_t task = 0;                  // for the caller: tasks of the sequences before this one

 private:
  INLINE Range interval(int64_t i) const {
    const int64_t diagonal = i + query_start_ + offset;
    int64_t lo = diagonal - left_, hi = least(key_end_, diagonal + right_ + 1);
    if (causal_) hi = least(hi, most(diagonal + 1, prefix_));
    return {clamp<int64_t>(lo - key_start_, 0, Lk), clamp<int64_t>(hi - key_start_, 0, Lk)};
  }
  int64_t first_not_below(int64_t s) const {
    int64_t lo = 0, hi = Lk;
    while (lo < hi) {
      const int64_t mid = lo + (hi - lo) / 2;
      if (key_segments_[mid] < s) lo = mid + 1;
      else hi = mid;
    }
    return lo;
  }
  int64_t query_start_ = 0, key_start_ = 0, key_end_ = 0, left_ = 0, right_ = 0, prefix_ = 0;
  const int64_t *query_segments_ = nullptr, *key_segments_ = nullptr;
  bool causal_ = false, sorted_ = false;
};

// ---- dense terms
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
// A finite number stays finite: a float64 mask's finfo.min is data for float32 scores too.
template <class A>
INLINE A saturate(double x) {
  const double most_finite = highest<A>;
  return A(__builtin_isinf(x) ? x : clamp(x, -most_finite, most_finite));
}

// Lanes j, j + stride, ... of a term, n of them, as vectors of A.
template <class A, class E>
INLINE typename Lanes<A>::vec load_strided(const E* p, int64_t stride, int64_t n) {
  using vec = typename Lanes<A>::vec;
  if (stride == 0) return set1<vec>(saturate<A>(to_scalar(*p)));
  if (stride == 1) {
    if constexpr (std::is_same_v<A, double> && std::is_same_v<E, double>) return Double::load(p, n);
    if constexpr (std::is_same_v<A, float> && !std::is_same_v<E, double>) return Float<E>::load(p, n);
  }
  vec v{};
  for (int i = 0; i < kWidth<vec> && i < n; i++) v[i] = saturate<A>(to_scalar(p[i * stride]));
  return v;
}

// One dense mask or bias, seen from one row.
template <class A>
class DenseRow {
 public:
  using vec = typename Lanes<A>::vec;
  DenseRow() = default;
  DenseRow(const Dense& d, int64_t b, int64_t h, int64_t i) : dtype_(d.dtype), boolean_(d.boolean), stride_(d.stride.d) {
    bytes_ = d.boolean ? 1 : size_of(d.dtype);
    row_ = d.data ? static_cast<const char*>(d.data) + bytes_ * (b * d.stride.b + h * d.stride.h + i * d.stride.l) : nullptr;
  }
  // Asks for the values of keys j .. j + n - 1 in the second cache.
  INLINE void fetch(int64_t j, int64_t n) const {
    if (row_ && stride_ == 1)
      for (int64_t i = 0; i < n * bytes_; i += 64) __builtin_prefetch(row_ + j * bytes_ + i, 0, 2);
  }
  bool present() const { return row_; }
  bool boolean() const { return boolean_; }
  bool additive() const { return row_ && !boolean_; }
  INLINE mask bits(int64_t j, int64_t n) const {  // boolean: lanes to attend to, of keys j .. j + n - 1
    const auto* p = reinterpret_cast<const uint8_t*>(row_) + j * stride_;
    if (stride_ == 0) return *p ? mask(~0) : mask(0);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    if (stride_ == 1) {
      const __m128i x = n >= 16 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)) : _mm_maskz_loadu_epi8(mask_n<vf>(n), p);
      return _mm_test_epi8_mask(x, x);
    }
#endif
    mask m = 0;
    for (int i = 0; i < kWidth<vec> && i < n; i++) m |= mask(p[i * stride_] != 0) << i;
    return m;
  }
  // f(j - k0, values of keys j ..) for j = k0, k0 + T::width, ...: the dtype and the stride are looked at once for the row
  template <class F>
  INLINE void each(int64_t k0, int64_t n, F f) const {
    switch (dtype_) {
      case DType::f32: return walk<float>(k0, n, f);
      case DType::bf16: return walk<bf16>(k0, n, f);
      case DType::f16: return walk<f16>(k0, n, f);
      default: return walk<double>(k0, n, f);
    }
  }
  // The same for kFour vectors at a time, if their keys are neighbours, until f is false; returns for how many keys it was true.
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

// False if some lane of a row of d elements is infinite or NaN.
template <class T>
bool finite_row(const typename T::elem* row, int64_t d) {
  using vec = typename T::vec;
  vec zeros{};
  for (int64_t c = 0; c < d; c += T::width) zeros = fma(T::load(row + c, d - c), vec{}, zeros);
  return to_mask(zeros == vec{}) == mask_n<vec>(T::width);
}

// Fills live[0, n) for keys k0 .. of key/value head hkv: 0 where no query may see the key. Packing reads such rows as zero, so that what
// they hold reaches nothing. The intervals and terms that do not depend on the query tell it at once; where terms or segments do depend
// on it, pairs are looked at only for keys whose K or V is not finite, since for the others zero weights do as well. False: all live,
// live not written.
template <class T>
bool mark_live_keys(const AttentionProblem& p, const Sequence& s, int64_t hkv, int64_t k0, int64_t n, uint8_t* live) {
  using A = typename T::acc;
  const Range seen = s.keys();
  const auto by_key = [](const Dense& d) { return d.data && d.stride.l == 0; };
  const auto by_pair = [](const Dense& d) { return d.data && d.stride.l != 0; };
  const bool pairs = by_pair(p.mask) || by_pair(p.bias) || s.query_segments();
  if (!by_key(p.mask) && !by_key(p.bias) && !pairs && seen.lo <= k0 && seen.hi >= k0 + n) return false;
  for (int64_t j = 0; j < n; j++) live[j] = 0;
  if (s.rows == 0) return true;
  const int64_t group = p.Hq / p.Hkv, differing = p.mask.stride.h != 0 || p.bias.stride.h != 0 ? group : 1;
  const Range keys{most<int64_t>(0, seen.lo - k0), least(n, seen.hi - k0)};
  for (int64_t h = hkv * group; h < hkv * group + differing; h++) {
    const DenseRow<A> mask_row(by_key(p.mask) ? p.mask : Dense{}, s.b, h, 0), bias_row(by_key(p.bias) ? p.bias : Dense{}, s.b, h, 0);
    for (int64_t j = keys.lo; j < keys.hi; j++) live[j] |= mask_row.visible(k0 + j) && bias_row.visible(k0 + j);
  }
  const auto at = [&](const void* base, const Strides& x, int64_t j) {
    return static_cast<const typename T::elem*>(base) + s.b * x.b + hkv * x.h + (s.k_first + j) * x.l;
  };
  const auto sees = [&](int64_t h, int64_t i, int64_t j) {
    const Range r = s.visible(i);
    return j >= r.lo && j < r.hi && (!s.unsorted_segments() || s.query_segments()[i] == s.key_segments()[j]) &&
           DenseRow<A>(p.mask, s.b, h, i).visible(j) && DenseRow<A>(p.bias, s.b, h, i).visible(j);
  };
  for (int64_t j = keys.lo; pairs && j < keys.hi; j++) {
    if (!live[j] || (finite_row<T>(at(p.k, p.ks, k0 + j), p.D) && finite_row<T>(at(p.v, p.vs, k0 + j), p.Dv))) continue;
    live[j] = 0;
    for (int64_t x = 0; !live[j] && x < differing * s.rows; x++) live[j] = sees(hkv * group + x / s.rows, x % s.rows, k0 + j);
  }
  return true;
}

// ---- tanh, for the softcap: t = tanh(y) and slope = 1 - t^2, each to a few roundings
INLINE void tanh_and_slope(vf y, vf* t, vf* slope) {
  const vf a = vabs(y), e = exp2v<5>(vf(vmin(set1<vf>(20.f), a) * float(2 * kLog2e)));
  const vf u = 2.f / (e + 1.f), z = y * y;                                   // 1 - tanh(a) = u
  vf p = fma(set1<vf>(-5.70498872745e-3f), z, set1<vf>(2.06390887954e-2f));  // odd polynomial near 0 (Cephes tanhf)
  p = fma(p, z, set1<vf>(-5.37397155531e-2f)), p = fma(p, z, set1<vf>(1.33314422036e-1f)), p = fma(p, z, set1<vf>(-3.33332819422e-1f));
  const vf small = fma(vf(p * z), y, y), large = (vf)((vi32)(1.f - u) | ((vi32)y & INT32_MIN));
  const vi32 near = a < 0.625f;
  *t = a != a ? a : near ? small : large;
  *slope = a != a ? a : near ? 1.f - small * small : u * (2.f - u);
}
INLINE void tanh_and_slope(vd y, vd* t, vd* slope) {
  for (int i = 0; i < kWidth<vd>; i++) {
    const double a = __builtin_fabs(y[i]), e = __builtin_expm1(2 * least(a, 300.)), u = 2 / (e + 2);
    (*t)[i] = __builtin_copysign(e / (e + 2), y[i]), (*slope)[i] = u * (2 - u);
    if (a != a) (*t)[i] = (*slope)[i] = a;
  }
}

// ---- scores
template <class T>
class Scores {
 public:
  using A = typename T::acc;
  using vec = typename T::vec;

  Scores(const AttentionProblem& p, const Sequence& s) : p_(p), s_(s) {}

  // Scores are scale * q.k with scale > 0, and visible() is exact: then the raw products serve, and row() is not needed.
  bool plain() const {
    return !p_.mask.data && !p_.bias.data && !p_.slopes && !p_.table && p_.softcap == 0 && p_.scale > 0 && !s_.unsorted_segments();
  }

  // Called between products: a tile reads a short piece of each row of a dense term, in which the hardware sees no stream.
  INLINE void fetch(int64_t h, int64_t i, int64_t k0, int64_t n) const {
    if (p_.mask.stride.l) DenseRow<A>(p_.mask, s_.b, h, i).fetch(k0, n);
    if (p_.bias.stride.l) DenseRow<A>(p_.bias, s_.b, h, i).fetch(k0, n);
  }

  // T5: table values along the diagonals of the tile (queries [i0, i0 + nq) x keys [k0, k0 + nk)) for head h, in the caller's buffer of
  // nq + nk values; to be passed to row() with the same i0 + nq and k0. The bucket moves with the distance, so this is one walk.
  void diagonals(int64_t h, int64_t i0, int64_t nq, int64_t k0, int64_t nk, A* out) const {
    const int64_t half = p_.bidirectional ? p_.buckets / 2 : p_.buckets, first = s_.distance(i0 + nq - 1, k0);
    const A* table = static_cast<const A*>(p_.table) + h;
    int64_t at = 0;
    for (int64_t x = 0; x < nq + nk - 1; x++) {
      const int64_t rel = first + x, d = p_.bidirectional ? (rel < 0 ? -rel : rel) : most<int64_t>(-rel, 0);
      while (at + 1 < half && p_.bucket_starts[at + 1] <= d) at++;
      while (at > 0 && p_.bucket_starts[at] > d) at--;
      out[x] = table[(p_.bidirectional && rel > 0 ? half + at : at) * p_.Hq];
    }
  }

  // Turns raw q.k of query i with keys k0 .. k0 + n - 1 into scores, in place, natural units: scale, softcap, mask, bias, ALiBi, T5; -inf
  // where invisible, by selection, and in the lanes from n up to the next multiple of T::width. Sums saturate at the largest finite
  // numbers, so a visible score is never -inf; a term that is not finite (-inf apart) makes it NaN. Returns the maximum lane by lane (-inf:
  // nothing seen); softmax is then exp(s - max). seen: visible(i). diagonal: where diagonals() put the value of pair (i, k0), or null
  // without a table: diagonal_of(). slope: n values 1 - tanh^2, the softcap's derivative, or null.
  vec row(int64_t h, int64_t i, int64_t k0, int64_t n, Range seen, const A* diagonal, A* s, A* slope = nullptr) const {
    vec top = set1<vec>(-kInfinity<A>);
    for (int64_t j = 0; j < n; j += kChunk) {
      const vec t = chunk(h, i, k0 + j, least(kChunk, n - j), seen, diagonal ? diagonal + j : nullptr, s + j, slope ? slope + j : nullptr);
      top = vmax(top, t);
    }
    return top;
  }
  // in what diagonals(h, i0, nq, k0, ...) wrote to `out`
  static const A* diagonal_of(const A* out, int64_t i, int64_t i0, int64_t nq) { return out + (i0 + nq - 1 - i); }
  // Values diagonals() needs room for: row() reads whole vectors.
  static int64_t diagonal_size(int64_t nq, int64_t nk) { return nq + nk + T::width; }

 private:
  static constexpr int kSteps = 64;
  static constexpr int64_t kChunk = kSteps * T::width;  // keys at a time: they stay in L1 over the passes

  // One pass a term: a loop that only adds is several times faster than one that asks at each step which terms there are.
  vec chunk(int64_t h, int64_t i, int64_t k0, int64_t n, Range seen, const A* diagonal, A* s, A* slope) const {
    const DenseRow<A> terms[] = {DenseRow<A>(p_.mask, s_.b, h, i), DenseRow<A>(p_.bias, s_.b, h, i)};
    const vec minus_inf = set1<vec>(-kInfinity<A>), lowest = set1<vec>(-highest<A>);
    mask visible[kSteps];
    for (int64_t j = 0; j < n; j += T::width) visible[j / T::width] = mask_range<vec>(seen.lo - k0 - j, least(seen.hi - k0, n) - j);
    if (s_.unsorted_segments())
      for (int64_t j = 0; j < n; j += T::width)
        visible[j / T::width] &= same_segment(s_.query_segments()[i], s_.key_segments() + k0 + j, n - j);

    vec scale = set1<vec>(A(p_.scale));  // not yet applied to s
    if (p_.softcap != 0) {
      const vec cap = set1<vec>(A(p_.softcap)), to_cap = set1<vec>(A(p_.scale / p_.softcap));
      for (int64_t j = 0; j < n; j += T::width) {
        vec t, d;
        tanh_and_slope(vec(load(s + j) * to_cap), &t, &d);
        store(s + j, t * cap);
        if (slope) store(slope + j, d);
      }
      scale = set1<vec>(1);
    }
    // The last dense term, if nothing else is added behind it, is added in the pass that makes the result.
    const int last = p_.slopes || diagonal ? -1 : terms[1].additive() ? 1 : terms[0].additive() ? 0 : -1;
    for (int t = 0; t < 2; t++) {
      const DenseRow<A>& term = terms[t];
      if (term.present() && term.boolean()) {
        for (int64_t j = 0; j < n; j += T::width) visible[j / T::width] &= term.bits(k0 + j, n - j);
      } else if (term.present() && t != last) {
        term.each(k0, n, [&](int64_t j, vec x) {
          visible[j / T::width] &= to_mask(x != minus_inf);
          store(s + j, sum(load(s + j), scale, x));
        });
        scale = set1<vec>(1);
      }
    }
    if (p_.slopes) {
      const vec lanes = __builtin_convertvector(iota<vec>(), vec), alibi = set1<vec>(static_cast<const A*>(p_.slopes)[h]);
      for (int64_t j = 0; j < n; j += T::width) {
        const vec distance = vabs(vec(lanes + A(s_.distance(i, k0 + j))));
        store(s + j, load(s + j) * scale - alibi * distance);
      }
      scale = set1<vec>(1);
    }
    if (diagonal) {
      for (int64_t j = 0; j < n; j += T::width) store(s + j, fma(load(s + j), scale, loadu(diagonal + j)));
      scale = set1<vec>(1);
    }
    vec top = minus_inf;
    const auto finish = [&](int64_t j, mask on, vec x) {
      x = select(on, x, minus_inf);
      store(s + j, x);
      top = vmax(top, x);
    };
    if (last >= 0) {
      const auto one = [&](int64_t j, vec x) { finish(j, visible[j / T::width] & to_mask(x != minus_inf), sum(load(s + j), scale, x)); };
      int64_t done = 0;
      if (seen.lo <= k0 && seen.hi >= k0 + n && !s_.unsorted_segments() && !(terms[0].present() && terms[0].boolean())) {
        // All of it visible, as far as the term's values are finite: while they are, a few vectors at a time need one look.
        vec tops[DenseRow<A>::kFour] = {minus_inf, minus_inf, minus_inf, minus_inf};
        done = terms[last].fours(k0, n, [&](int64_t j, const vec* x) {
          vec y[DenseRow<A>::kFour];
          ivec_of<vec> finite = ~ivec_of<vec>{};
          UNROLL for (int u = 0; u < DenseRow<A>::kFour; u++) {
            y[u] = fma(load(s + j + u * T::width), scale, x[u]);
            finite = finite & (vabs(y[u]) <= set1<vec>(highest<A>));
          }
          if (to_mask(finite) != mask_n<vec>(T::width)) return false;
          UNROLL for (int u = 0; u < DenseRow<A>::kFour; u++) store(s + j + u * T::width, y[u]), tops[u] = vmax(tops[u], y[u]);
          return true;
        });
        top = vmax(top, vmax(vmax(tops[0], tops[1]), vmax(tops[2], tops[3])));
      }
      terms[last].each(k0 + done, n - done, [&](int64_t j, vec x) { one(done + j, x); });
    } else {
      for (int64_t j = 0; j < n; j += T::width) finish(j, visible[j / T::width], vmax(lowest, vec(load(s + j) * scale)));
    }
    return top;
  }

  // s * scale + t, saturated at the largest finite numbers, but NaN where s or t is not finite.
  static INLINE vec sum(vec s, vec scale, vec t) {
    const vec limit = set1<vec>(highest<A>), y = fma(s, scale, t);
    if (__builtin_expect(to_mask(vabs(y) <= limit) == mask_n<vec>(T::width), 1)) return y;
    const vec x = s * scale;
    return vmin(limit, vmax(vec(-limit), vec(x + t))) + ((t - t) + (x - x));  // x - x: 0, or NaN
  }

  static INLINE mask same_segment(int64_t q, const int64_t* keys, int64_t n) {
    mask m = 0;
    if (n >= T::width) {
      UNROLL for (int i = 0; i < T::width; i++) m |= mask(keys[i] == q) << i;
    } else {
      for (int64_t i = 0; i < n; i++) m |= mask(keys[i] == q) << i;
    }
    return m;
  }
  const AttentionProblem& p_;
  const Sequence& s_;
};

}  // namespace PT_ISA
}  // namespace pt
