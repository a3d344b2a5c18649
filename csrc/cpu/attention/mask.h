// SPDX-License-Identifier: Apache-2.0
// Visible pairs. Rows are queries and lanes are keys. Indices are local to a sequence; the
// functions add the start offsets.
//
//   Sequence          a query's visible keys as one interval [lo, hi), with a gap between global
//   keys
//                     and a window
//   DenseRow          one query's row of a dense mask or bias, read without copies
//   map_tiles()       the state of a boolean mask by tiles: one pass over the mask at its strides
//   map_blocks()      the same for a block mask
//   TileRow, MaskRow  one query's row of that map; of the mask, from either source of bits
//   Visibility        all of the above for one sequence
//   LiveTiles         tiles of keys that a block of rows sees
//   mark_live_keys()  keys that no query sees: they are packed as zeros
#pragma once

#include "cpu/attention/problem.h"
#include "cpu/core/arena.h"
#include "cpu/core/parallel.h"
#include "cpu/core/traits.h"

namespace pt {
namespace PT_ISA {

struct Range {
  int64_t lo, hi;
  INLINE int64_t size() const { return hi - lo; }
};

// One batch element or packed sequence: its sizes, and the interval of keys that a query sees.
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
    // Use a bound beyond any index for "unbounded", with headroom for the sums below.
    constexpr int64_t far = int64_t(1) << 60;
    left_ = p.left < 0 ? far : min(p.left, far);
    right_ = p.right < 0 ? far : min(p.right, far);
    causal_ = p.align != Align::none;
    prefix_ = p.prefix_lengths ? p.prefix_lengths[b] : 0;
    global_ = max<int64_t>(0, min(p.global_keys, key_end_) - key_start_);
    if (p.query_segments) {
      query_segments_ = p.query_segments + b * p.Lq, key_segments_ = p.key_segments + b * p.Lk;
      sorted_ = true;
      for (int64_t j = 1; j < Lk && sorted_; j++)
        sorted_ = key_segments_[j - 1] <= key_segments_[j];
    }
  }

  // Return the keys visible to query i < rows; empty as {x, x}. Exact unless has_gaps() or
  // unsorted_segments().
  INLINE Range visible(int64_t i) const {
    Range r = reach(i);
    if (query_segments_ && sorted_) {
      const int64_t s = query_segments_[i];
      r.lo = max(r.lo, first_not_below(s));
      r.hi = min(r.hi, s == INT64_MAX ? Lk : first_not_below(s + 1));
    }
    r.hi = max(r.hi, r.lo);
    return r;
  }
  // Return a range with every key that any query, or one of first .. last, sees: both ends of the
  // interval rise with i, and so do the global keys.
  Range keys() const { return rows == 0 ? Range{0, 0} : keys(0, rows - 1); }
  Range keys(int64_t first, int64_t last) const {
    const int64_t end = globals(last);
    const Range r{end ? 0 : interval(first).lo, max(end, interval(last).hi)};
    return {r.lo, max(r.lo, r.hi)};
  }
  // Return the keys of visible(i) hidden from query i, between the global keys and its window. Both
  // ends rise with i.
  bool has_gaps() const { return global_ > 0; }
  INLINE Range gap(int64_t i) const {
    const Range window = interval(i);
    const int64_t end = globals(i);
    return {end, window.lo < window.hi ? max(end, window.lo) : end};
  }
  // Return the keys of keys() that no query sees.
  Range common_gap() const {
    return rows == 0 || !has_gaps() ? Range{0, 0} : Range{gap(rows - 1).lo, gap(0).hi};
  }
  // Trim a range of keys at both ends by the gap of query i; empty as {x, x}.
  INLINE Range outside_gap(int64_t i, Range r) const {
    if (!has_gaps()) return r;
    const Range out = gap(i);
    if (r.lo >= out.lo) r.lo = max(r.lo, out.hi);
    if (r.hi <= out.hi) r.hi = min(r.hi, out.lo);
    r.hi = max(r.hi, r.lo);
    return r;
  }
  // Scores then compares segments pair by pair, and visible() is only a bound.
  bool unsorted_segments() const { return query_segments_ && !sorted_; }
  // Return false if no key and query of these ranges can share a segment. For unsorted segments.
  bool may_meet(Range queries, Range keys) const {
    const auto bounds = [](const int64_t* x, Range r) {
      Range b{INT64_MAX, INT64_MIN};
      for (int64_t i = r.lo; i < r.hi; i++) b = {min(b.lo, x[i]), max(b.hi, x[i])};
      return b;
    };
    const Range q = bounds(query_segments_, queries), k = bounds(key_segments_, keys);
    return k.lo <= q.hi && k.hi >= q.lo;
  }
  // Trim `keys` by panels at both ends that cannot meet the queries; empty if none can.
  Range meeting(Range queries, Range keys, int64_t panel) const {
    const auto meets = [&](int64_t j) { return may_meet(queries, {j, min(j + panel, Lk)}); };
    while (keys.lo < keys.hi && !meets(keys.lo)) keys.lo += panel;
    int64_t last = keys.lo;
    for (int64_t j = keys.lo; j < keys.hi; j += panel)
      if (meets(j)) last = j + panel;
    return {keys.lo, min(last, keys.hi)};
  }
  const int64_t* query_segments() const { return query_segments_; }
  const int64_t* key_segments() const { return key_segments_; }

  // Return j - i - offset in absolute indices: the distance for ALiBi and T5.
  INLINE int64_t distance(int64_t i, int64_t j) const {
    return j + key_start_ - i - query_start_ - offset;
  }

  int64_t b = 0;
  int64_t Lq = 0, Lk = 0;            // local sizes
  int64_t q_first = 0, k_first = 0;  // first row of this sequence in packed tensors
  int64_t rows = 0;                  // queries [rows, Lq) are padding
  int64_t cols = 0;                  // keys [cols, Lk) are padding
  int64_t offset = 0;                // diagonal offset

 private:
  INLINE Range interval(int64_t i) const {
    const int64_t diagonal = i + query_start_ + offset;
    int64_t lo = diagonal - left_, hi = min(key_end_, diagonal + right_ + 1);
    if (causal_) hi = min(hi, max(diagonal + 1, prefix_));
    return {clamp<int64_t>(lo - key_start_, 0, Lk), clamp<int64_t>(hi - key_start_, 0, Lk)};
  }
  // Return the end of the global keys that query i sees.
  INLINE int64_t globals(int64_t i) const {
    if (!causal_) return global_;
    return clamp<int64_t>(max(i + query_start_ + offset + 1, prefix_) - key_start_, 0, global_);
  }
  INLINE Range reach(int64_t i) const {
    const Range window = interval(i);
    if (!has_gaps()) return window;
    const int64_t end = globals(i);
    return end ? Range{0, window.lo < window.hi ? max(end, window.hi) : end} : window;
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
  int64_t query_start_ = 0, key_start_ = 0, key_end_ = 0, left_ = 0, right_ = 0, prefix_ = 0,
          global_ = 0;
  const int64_t *query_segments_ = nullptr, *key_segments_ = nullptr;
  bool causal_ = false, sorted_ = false;
};

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

// The boolean mask by tiles. A tile hides all of its pairs, none, or some. Kernels skip the first
// kind, do not read the mask for the second, and read it only for the third.
inline thread_local Arena tiles_arena;  // calling thread: the map

// 16 queries per tile: a pass costs 3 instructions per 64 pairs beside reading the mask, and the
// tiles follow a band of keys within 16.
constexpr int kMapRowBits = 4, kMapKeyBits = 6;
typedef uint8_t vbytes __attribute__((vector_size(kVecBytes), may_alias, aligned(1)));

// Return the state of `rows` rows of n <= 64 contiguous bytes. A partial tile usually ends after
// its first row, so 1/16 of such a mask is read.
INLINE int32_t tile_state(const uint8_t* p, int64_t row, int64_t rows, int64_t n) {
  bool any = false, all = true;
  if (n == 64) {
    constexpr int vectors = 64 / kVecBytes;
    constexpr uint64_t ones = 0x0101010101010101;
    vbytes some[vectors] = {}, least[vectors];
    UNROLL for (int v = 0; v < vectors; v++) least[v] = ~vbytes{};
    for (int64_t i = 0, end = 1; i < rows && (all || !any); end = rows) {
      for (; i < min(end, rows); i++) UNROLL for (int v = 0; v < vectors; v++) {
          const vbytes x = *reinterpret_cast<const vbytes*>(p + i * row + v * kVecBytes);
          some[v] |= x, least[v] = x < least[v] ? x : least[v];
        }
      uint64_t words[2][8];
      __builtin_memcpy(words[0], some, 64), __builtin_memcpy(words[1], least, 64);
      // The second test is true if no byte is zero.
      for (int w = 0; w < 8; w++)
        any |= words[0][w] != 0, all &= ((words[1][w] - ones) & ~words[1][w] & (ones << 7)) == 0;
    }
  } else {
    for (int64_t i = 0; i < rows && (all || !any); i++)
      for (int64_t j = 0; j < n; j++) any |= p[i * row + j] != 0, all &= p[i * row + j] != 0;
  }
  return all ? TileMap::kAll : any ? TileMap::kSome : TileMap::kNone;
}
INLINE int32_t strided_state(const uint8_t* p, int64_t row, int64_t key, int64_t rows, int64_t n) {
  bool any = false, all = true;
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < n; j++)
      any |= p[i * row + j * key] != 0, all &= p[i * row + j * key] != 0;
  return all ? TileMap::kAll : any ? TileMap::kSome : TileMap::kNone;
}

// Number of tiles of a dense boolean mask. Broadcast dimensions have one.
struct TileCounts {
  int64_t rows, keys, down, across, heads, batch;  // rows, keys: distinct ones in the mask
  explicit TileCounts(const AttentionProblem& p)
      : rows(p.mask.stride.l ? p.Lq : 1), keys(p.mask.stride.d ? p.Lk : 1),
        down(ceil_div(rows, int64_t(1) << kMapRowBits)),
        across(ceil_div(keys, int64_t(1) << kMapKeyBits)), heads(p.mask.stride.h ? p.Hq : 1),
        batch(p.mask.stride.b ? p.B : 1) {}
  explicit TileCounts(const AttentionProblem& p, const BlockMask& m)
      : rows(p.Lq), keys(p.Lk), down(ceil_div(rows, int64_t(1) << m.row_bits)),
        across(ceil_div(keys, int64_t(1) << m.key_bits)), heads(m.H), batch(m.B) {}
  int64_t all() const { return batch * heads * down * across; }
  size_t bytes() const { return Arena::bytes_for<int32_t>(all()); }
};

// Return the map's bytes, or 0 without a mask to map.
inline size_t map_bytes(const AttentionProblem& p) {
  if (p.blocks.offsets) return TileCounts(p, p.blocks).bytes();
  return p.mask.data && p.mask.boolean ? TileCounts(p).bytes() : 0;
}

// Fill in p.tiles for a dense boolean mask, in tiles_arena. The mask is
// not read in tiles without a pair that intervals (causality, window, lengths) leave visible. Drop
// a mask that hides nothing more.
inline void map_tiles(AttentionProblem& p) {
  if (!p.mask.data || !p.mask.boolean) return;
  const Strides& m = p.mask.stride;
  const TileCounts counts(p);
  const int64_t rows = counts.rows, keys = counts.keys, down = counts.down, across = counts.across,
                heads = counts.heads;
  tiles_arena.reset(counts.bytes());
  int32_t* const tiles = tiles_arena.take<int32_t>(counts.all());
  p.tiles.data = tiles, p.tiles.row_bits = kMapRowBits, p.tiles.key_bits = kMapKeyBits;
  p.tiles.stride = {m.b ? heads * down * across : 0, m.h ? down * across : 0, m.l ? across : 0,
                    m.d ? 1 : 0};

  bool hides = false;
  AttentionProblem bare = p;  // intervals only
  bare.query_segments = bare.key_segments = nullptr;
  const auto one_row = [&](int64_t t) {
    const int64_t r = t % down, h = t / down % heads, b = t / down / heads;
    const int64_t first = r << kMapRowBits, n = min(rows - first, int64_t(1) << kMapRowBits);
    Range seen{p.Lk, 0};
    // Visit every sequence that reads this row of the map.
    for (int64_t e = m.b ? b : 0; e < (m.b ? b + 1 : p.B); e++) {
      const Sequence s(bare, e);
      const int64_t last = min(m.l ? first + n : s.rows, s.rows) - 1;
      if (last < first) continue;
      const Range keys = s.keys(first, last);
      seen = {min(seen.lo, keys.lo), max(seen.hi, keys.hi)};
    }
    const auto* at = static_cast<const uint8_t*>(p.mask.data) + b * m.b + h * m.h + first * m.l;
    int32_t* out = tiles + t * across;
    for (int64_t c = 0; c < across; c++) {
      const int64_t j = c << kMapKeyBits, some = min(keys - j, int64_t(1) << kMapKeyBits);
      if (seen.size() <= 0 || (m.d && (j >= seen.hi || j + some <= seen.lo)))
        out[c] = TileMap::kNone;
      else if ((out[c] = m.d == 1
                             ? tile_state(at + j, m.l, n, some)
                             : strided_state(at + j * m.d, m.l, m.d, n, some)) != TileMap::kAll)
        __atomic_store_n(&hides, true, __ATOMIC_RELAXED);
    }
  };
  const int64_t all = counts.batch * heads * down,
                together =
                    max<int64_t>(1, (int64_t(256) << 10) / (across << (kMapRowBits + kMapKeyBits)));
  for_each_task(ceil_div(all, together), p.threads, [&](int64_t task) {
    for (int64_t t = task * together; t < min(all, (task + 1) * together); t++) one_row(t);
  });
  if (!hides) p.mask = {}, p.tiles = {};
}

// Fill in p.tiles for a block mask, whose tiles are its blocks.
inline void map_blocks(AttentionProblem& p) {
  const BlockMask& m = p.blocks;
  const TileCounts counts(p, m);
  const int64_t down = counts.down, across = counts.across;
  tiles_arena.reset(counts.bytes());
  int32_t* const tiles = tiles_arena.take<int32_t>(counts.all());
  p.tiles = {tiles,
             {m.B > 1 ? m.H * down * across : 0, m.H > 1 ? down * across : 0, across, 1},
             m.row_bits,
             m.key_bits,
             m.bits};
  constexpr int64_t together = 64;
  for_each_task(ceil_div(m.B * m.H * down, together), p.threads, [&](int64_t task) {
    for (int64_t t = task * together; t < min(m.B * m.H * down, (task + 1) * together); t++) {
      int32_t* row = tiles + t * across;
      for (int64_t c = 0; c < across; c++) row[c] = TileMap::kNone;
      const int32_t* list = m.offsets + t + t / down;  // one more offset than rows
      for (int64_t e = list[0]; e < list[1]; e++)
        row[m.entries[2 * e]] = m.entries[2 * e + 1] < 0 ? TileMap::kAll : m.entries[2 * e + 1];
    }
  });
}

// One query's row of the map.
class TileRow {
 public:
  TileRow(const TileMap& m, int64_t b, int64_t h, int64_t i)
      : tiles_(m.at(b, h, i)), step_(m.stride.d), key_bits_(m.key_bits) {}
  const int32_t* tiles() const { return tiles_; }
  int32_t tile(int64_t j) const { return tiles_[(j >> key_bits_) * step_]; }
  int64_t tile_start(int64_t j) const { return (j >> key_bits_) << key_bits_; }
  int64_t tile_end(int64_t j) const {
    return step_ ? ((j >> key_bits_) + 1) << key_bits_ : INT64_MAX;
  }
  // Trim a range by fully hidden tiles at its ends; empty as {x, x}.
  INLINE Range trim(Range r) const {
    while (r.lo < r.hi && tile(r.lo) == TileMap::kNone) r.lo = min(r.hi, tile_end(r.lo));
    while (r.lo < r.hi && tile(r.hi - 1) == TileMap::kNone) r.hi = max(r.lo, tile_start(r.hi - 1));
    return r;
  }
  // State of the tiles of keys j .. j + n - 1: all are full, or all are partial.
  struct Alike {
    bool all, some;
  };
  INLINE Alike alike(int64_t j, int64_t n) const {
    Alike found{true, true};
    const int64_t last = ((j + n - 1) >> key_bits_) * step_;
    for (int64_t t = (j >> key_bits_) * step_; t <= last; t++)
      found.all &= tiles_[t] == TileMap::kAll, found.some &= tiles_[t] >= 0;
    return found;
  }

 protected:
  const int32_t* tiles_;
  int64_t step_;
  int key_bits_;
};

// TileRow::trim for successive queries. Queries of one block share a row of tiles, whose empty ends
// are walked once: at 65,536 keys there are a thousand tiles, and a walk per query took two thirds
// of a forward.
class TileTrim {
 public:
  TileTrim(const AttentionProblem& p, int64_t b) : p_(p), b_(b) {}
  INLINE Range operator()(int64_t h, int64_t i, Range r) {
    if (!p_.tiles.data || r.size() <= 0) return r;
    const TileRow row(p_.tiles, b_, h, i);
    if (row.tiles() != tiles_) tiles_ = row.tiles(), ends_ = row.trim({0, p_.Lk});
    const Range within{max(r.lo, ends_.lo), min(r.hi, ends_.hi)};
    return within.size() > 0 ? row.trim(within) : Range{r.lo, r.lo};
  }

 private:
  const AttentionProblem& p_;
  int64_t b_;
  const int32_t* tiles_ = nullptr;
  Range ends_{};
};

// One query's row of the boolean mask, from either source of bits. p.tiles.data is not null.
template <class A>
class MaskRow : public TileRow {
 public:
  MaskRow(const AttentionProblem& p, int64_t b, int64_t h, int64_t i)
      : TileRow(p.tiles, b, h, i), dense_(p.tiles.bits ? Dense{} : p.mask, b, h, i) {
    if (p.tiles.bits)
      bits_ = p.tiles.bits + (i & ((int64_t(1) << p.tiles.row_bits) - 1)) * words(),
      tile_words_ = words() << p.tiles.row_bits;
  }
  // Return keys j .. j + n - 1 of a partial tile. With bits, j is a multiple of the vector width.
  INLINE mask bits(int64_t j, int64_t n) const {
    return bits_ ? mask(word(tile(j), j) >> (j & 31)) : dense_.bits(j, n);
  }
  // Trim a range by hidden keys at its ends: by pairs with bits, else by tiles.
  INLINE Range trim(Range r) const {
    if (!bits_) return TileRow::trim(r);
    while (r.lo < r.hi) {
      const int32_t t = tile(r.lo);
      if (t == TileMap::kAll) break;
      const uint32_t ahead = t == TileMap::kNone ? 0 : word(t, r.lo) >> (r.lo & 31);
      r.lo = min(r.hi, ahead                 ? r.lo + __builtin_ctz(ahead)
                       : t == TileMap::kNone ? tile_end(r.lo)
                                             : (r.lo | 31) + 1);
      if (ahead) break;
    }
    while (r.lo < r.hi) {
      const int64_t last = r.hi - 1;
      const int32_t t = tile(last);
      if (t == TileMap::kAll) break;
      const uint32_t behind = t == TileMap::kNone ? 0 : word(t, last) << (31 - (last & 31));
      r.hi = max(r.lo, behind                ? r.hi - __builtin_clz(behind)
                       : t == TileMap::kNone ? tile_start(last)
                                             : last & ~int64_t(31));
      if (behind) break;
    }
    return r;
  }
  bool visible(int64_t j) const {
    const int32_t t = tile(j);
    return t == TileMap::kAll || (t != TileMap::kNone && (bits(j, 1) & 1));
  }

 private:
  int64_t words() const { return (int64_t(1) << key_bits_) / 32; }
  // Return 32 bits around key j, from a multiple of 32, in the tile with state t.
  INLINE uint32_t word(int32_t t, int64_t j) const {
    return bits_[t * tile_words_ + ((j & ((int64_t(1) << key_bits_) - 1)) >> 5)];
  }
  const DenseRow<A> dense_;
  const uint32_t* bits_ = nullptr;
  int64_t tile_words_ = 0;
};

// All that hides pairs of a sequence, except terms of -inf: a query's interval and its gap,
// segments and the boolean mask.
template <class A>
class Visibility {
 public:
  using vec = typename Lanes<A>::vec;
  static constexpr int kLanes = kWidth<vec>;
  Visibility(const AttentionProblem& p, const Sequence& s) : p_(p), s_(s) {}

  // Trim `range` of query i to its first and last visible key, by its interval, the block mask, or
  // a dense mask's tiles.
  bool trims() const { return p_.tiles.data || s_.has_gaps(); }
  INLINE Range trim(int64_t h, int64_t i, Range range) const {
    range = s_.outside_gap(i, range);
    return p_.tiles.data ? MaskRow<A>(p_, s_.b, h, i).trim(range) : range;
  }

  // Set visible[] to the keys k0 .. k0 + n - 1 that query i of head h sees, a bit mask per vector.
  // seen: the query's interval. Return true if it sees all of them.
  INLINE bool pairs(int64_t h, int64_t i, int64_t k0, int64_t n, Range seen, mask* visible) const {
    for (int64_t j = 0; j < n; j += kLanes)
      visible[j / kLanes] = mask_range<vec>(seen.lo - k0 - j, min(seen.hi - k0, n) - j);
    if (s_.unsorted_segments())
      for (int64_t j = 0; j < n; j += kLanes)
        visible[j / kLanes] &=
            same_segment(s_.query_segments()[i], s_.key_segments() + k0 + j, n - j);
    bool hides = p_.tiles.data && hide(h, i, k0, n, visible);
    if (const Range gap = s_.has_gaps() ? s_.gap(i) : Range{0, 0}; gap.lo < k0 + n && gap.hi > k0) {
      hides = true;
      for (int64_t j = 0; j < n; j += kLanes)
        visible[j / kLanes] &= ~mask_range<vec>(gap.lo - k0 - j, gap.hi - k0 - j);
    }
    return seen.lo <= k0 && seen.hi >= k0 + n && !s_.unsorted_segments() && !hides;
  }

 private:
  // Clear the keys k0 .. k0 + n - 1 that the boolean mask hides in visible[]. Return false if none
  // is hidden.
  bool hide(int64_t h, int64_t i, int64_t k0, int64_t n, mask* visible) const {
    const auto [all, some] = TileRow(p_.tiles, s_.b, h, i).alike(k0, n);
    if (all) return false;
    // One loop for partial tiles: a check per tile cost 6 % of a call whose mask has no empty tile.
    if (some && !p_.tiles.bits) {
      const DenseRow<A> row(p_.mask, s_.b, h, i);
      for (int64_t j = 0; j < n; j += kLanes) visible[j / kLanes] &= row.bits(k0 + j, n - j);
      return true;
    }
    const MaskRow<A> row(p_, s_.b, h, i);
    bool hides = false;
    for (int64_t j = 0; j < n;) {
      const int64_t end = min(n, row.tile_end(k0 + j) - k0);
      const int32_t tile = row.tile(k0 + j);
      hides |= tile != TileMap::kAll;
      if (tile >= 0)
        for (; j < end; j += kLanes) visible[j / kLanes] &= row.bits(k0 + j, n - j);
      else if (tile == TileMap::kNone)
        for (; j < end; j += kLanes) visible[j / kLanes] = 0;
      j = end;
    }
    return hides;
  }

  static INLINE mask same_segment(int64_t q, const int64_t* keys, int64_t n) {
    mask m = 0;
    if (n >= kLanes) {
      UNROLL for (int i = 0; i < kLanes; i++) m |= mask(keys[i] == q) << i;
    } else {
      for (int64_t i = 0; i < n; i++) m |= mask(keys[i] == q) << i;
    }
    return m;
  }
  const AttentionProblem& p_;
  const Sequence& s_;
};

// Rows of a block: queries [q0, q0 + nq) of consecutive heads from h0, head by head.
struct BlockRows {
  int64_t h0, q0, nq, size;
  INLINE int64_t head(int64_t r) const { return h0 + r / nq; }
  INLINE int64_t query(int64_t r) const { return q0 + r % nq; }
};

// Marks of keys by 64: 0 if no row of a block sees one of them, by the boolean mask or the gap
// after the global keys.
struct LiveTiles {
  static constexpr int64_t kKeys = 64;
  // Return false if intervals alone bound the keys of a block.
  static bool needed(const AttentionProblem& p) { return p.tiles.data || p.global_keys; }
  static int64_t bytes(int64_t keys) { return ceil_div(keys, kKeys) + 1; }

  uint8_t* live = nullptr;  // null: not needed

  // visible: interval of each row.
  void mark(const AttentionProblem& p, const Sequence& s, const BlockRows& rows,
            const Range* visible) const {
    for (int64_t c = 0; c < bytes(s.Lk); c++) live[c] = !p.tiles.data;
    if (p.tiles.data) mark_mask(p, s, rows, visible);
    Range gap{0, s.Lk};  // common to all rows
    for (int64_t r = 0; r < rows.size; r++) {
      if (visible[r].size() <= 0) continue;
      const Range hidden = s.gap(rows.query(r));
      gap = {max(gap.lo, hidden.lo), min(gap.hi, hidden.hi)};
    }
    for (int64_t c = ceil_div(gap.lo, kKeys); (c + 1) * kKeys <= gap.hi; c++) live[c] = 0;
  }

  // Return the next live range of keys of up to `keys` keys in [from, end); empty if there is none.
  INLINE Range next(int64_t from, int64_t end, int64_t keys) const {
    if (live)
      while (from < end && !live[from / kKeys]) from = (from / kKeys + 1) * kKeys;
    int64_t stop = min(end, from + keys);
    if (live) {
      int64_t tile = from / kKeys + 1;
      while (tile * kKeys < stop && live[tile]) tile++;
      stop = min(stop, tile * kKeys);
    }
    return {from, stop};
  }

 private:
  void mark_mask(const AttentionProblem& p, const Sequence& s, const BlockRows& rows,
                 const Range* visible) const {
    for (int64_t r = 0; r < rows.size;) {  // rows with the same tiles at once
      const TileRow row(p.tiles, s.b, rows.head(r), rows.query(r));
      Range seen{s.Lk, 0};
      for (const int32_t* tiles = row.tiles();
           r < rows.size && p.tiles.at(s.b, rows.head(r), rows.query(r)) == tiles; r++)
        if (visible[r].size() > 0)
          seen = {min(seen.lo, visible[r].lo), max(seen.hi, visible[r].hi)};
      for (int64_t j = seen.lo; j < seen.hi; j = row.tile_end(j)) {
        if (row.tile(j) == TileMap::kNone) continue;
        for (int64_t c = j / kKeys; c * kKeys < min(seen.hi, row.tile_end(j)); c++) live[c] = 1;
      }
    }
  }
};

// Return false if a number in a row of d elements is infinite or NaN.
template <class T>
bool finite_row(const typename T::elem* row, int64_t d) {
  using vec = typename T::vec;
  vec zeros{};
  for (int64_t c = 0; c < d; c += T::width) zeros = fma(T::load(row + c, d - c), vec{}, zeros);
  return to_mask(zeros == vec{}) == mask_n<vec>(T::width);
}

// Do the same for an 8-bit row.
inline bool finite_eight(EightBits kind, const uint8_t* row, int64_t d) {
  bool finite = true;
  if (kind == EightBits::e4m3)
    for (int64_t c = 0; c < d; c++) finite &= (row[c] & 0x7f) != 0x7f;
  return finite;
}

// Set live[0, n) for keys k0 .. of KV head hkv: 0 if no query sees the key. Packing reads such rows
// as zero, so that their contents cannot reach a result. Intervals and terms that do not depend on
// the query decide directly. With query-dependent terms or segments, pairs are checked only for
// keys with a non-finite K or V, because a zero weight hides finite ones. Return false, without
// writing live, if all are live.
template <class T>
bool mark_live_keys(const AttentionProblem& p, const Sequence& s, int64_t hkv, int64_t k0,
                    int64_t n, uint8_t* live) {
  using A = typename T::acc;
  const Range seen = s.keys(), gap = s.common_gap();
  const auto by_key = [](const Dense& d) { return d.data && d.stride.l == 0; };
  const auto by_pair = [](const Dense& d) { return d.data && d.stride.l != 0; };
  const bool pairs = by_pair(p.mask) || by_pair(p.bias) || p.tiles.bits || s.query_segments();
  if (!by_key(p.mask) && !by_key(p.bias) && !pairs && seen.lo <= k0 && seen.hi >= k0 + n &&
      (gap.lo >= k0 + n || gap.hi <= k0))
    return false;
  for (int64_t j = 0; j < n; j++) live[j] = 0;
  if (s.rows == 0) return true;
  const int64_t group = p.Hq / p.Hkv,
                differing = p.mask.stride.h || p.bias.stride.h || p.tiles.stride.h ? group : 1;
  const Range keys{max<int64_t>(0, seen.lo - k0), min(n, seen.hi - k0)};
  for (int64_t h = hkv * group; h < hkv * group + differing; h++) {
    const DenseRow<A> mask_row(by_key(p.mask) ? p.mask : Dense{}, s.b, h, 0),
        bias_row(by_key(p.bias) ? p.bias : Dense{}, s.b, h, 0);
    for (int64_t j = keys.lo; j < keys.hi; j++)
      live[j] |= mask_row.visible(k0 + j) && bias_row.visible(k0 + j);
  }
  for (int64_t j = max(keys.lo, gap.lo - k0); j < min(keys.hi, gap.hi - k0); j++) live[j] = 0;
  const auto finite = [&](const void* base, const Strides& x, const RowScales& scale, int64_t j,
                          int64_t d) {
    const int64_t row = p.key_row(x, s.b, hkv, s.k_first + j);
    if (p.eight == EightBits::none)
      return finite_row<T>(static_cast<const typename T::elem*>(base) + row, d);
    return __builtin_isfinite(scale.data[p.key_row(scale.strides, s.b, hkv, s.k_first + j)]) &&
           finite_eight(p.eight, static_cast<const uint8_t*>(base) + row, d);
  };
  const auto sees = [&](int64_t h, int64_t i, int64_t j) {
    const Range r = s.visible(i), out = s.gap(i);
    return j >= r.lo && j < r.hi && !(j >= out.lo && j < out.hi) &&
           (!s.unsorted_segments() || s.query_segments()[i] == s.key_segments()[j]) &&
           (p.tiles.data ? MaskRow<A>(p, s.b, h, i).visible(j)
                         : DenseRow<A>(p.mask, s.b, h, i).visible(j)) &&
           DenseRow<A>(p.bias, s.b, h, i).visible(j);
  };
  for (int64_t j = keys.lo; pairs && j < keys.hi; j++) {
    if (!live[j] || (finite(p.k, p.ks, p.key_scale, k0 + j, p.D) &&
                     finite(p.v, p.vs, p.value_scale, k0 + j, p.Dv)))
      continue;
    live[j] = 0;
    for (int64_t x = 0; !live[j] && x < differing * s.rows; x++)
      live[j] = sees(hkv * group + x / s.rows, x % s.rows, k0 + j);
  }
  return true;
}

}  // namespace PT_ISA
}  // namespace pt
