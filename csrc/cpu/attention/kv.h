// SPDX-License-Identifier: Apache-2.0
// K and V of the forward.
//
//   KV        addresses of rows: strided, paged, or widened from 8 bits; packing into panels
//   PackedKV  packed panels of a range of keys, for the micro-kernel of gemm.h
//   DirectKV  keys read in place, for few query rows: direct_scores() and direct_output()
#pragma once

#include "cpu/attention/mask.h"
#include "cpu/core/eight_bits.h"
#include "cpu/core/pack.h"

namespace pt {
namespace PT_ISA {

constexpr int64_t kBlockKeys = 512;  // keys of a tile: a multiple of every kPanel
// Row stride of scores: full vectors of weights, and no multiple of 2 KB. With rows 2 KB apart, 48
// of 96 share a set of L1, and AMX stores took twice as long.
template <class T>
INLINE constexpr int64_t row_of_keys(int64_t keys) {
  return keys + T::pack * T::width;
}

// Packed K and V of keys first .. first + ld - 1: k[key panel][unit][key], v[column panel][key /
// pack][column].
template <class T>
struct PackedKV {
  const typename T::packed *k, *v;
  int64_t first, ld;
  const float *k_scale = nullptr, *v_scale = nullptr;  // for 8-bit keys
};

template <class T>
struct KV {
  const AttentionProblem& p;
  // Packed elements of a row of K, padded; columns of V, padded; query heads per KV head.
  int64_t du, dv, group;
  explicit KV(const AttentionProblem& p)
      : p(p), du(round_units<T>(p.D)), dv(round_up(p.Dv, T::width)),
        group(p.Hkv > 0 ? p.Hq / p.Hkv : 1) {}

  const typename T::elem* at(const void* base, const Strides& s, int64_t b, int64_t h,
                             int64_t row) const {
    return static_cast<const typename T::elem*>(base) + b * s.b + h * s.h + row * s.l;
  }
  // Call f(rows of keys j0 .. j0 + n - 1 of head hkv of k or v). Paged rows are a list with room
  // for n. Rows past the length are not read; a list repeats the last row for them, because their
  // pages have no table entry.
  template <class F>
  INLINE void with_keys(const void* base, const Strides& x, const Sequence& s, int64_t hkv,
                        int64_t j0, int64_t n, const typename T::elem** list, const F& f) const {
    using E = typename T::elem;
    if (!p.pages.table) return f(StridedRows<E>{at(base, x, s.b, hkv, s.k_first + j0), x.l});
    const int64_t end = min(j0 + n, s.cols);
    for (int64_t j = j0; j < end;) {
      const E* row = static_cast<const E*>(base) + p.key_row(x, s.b, hkv, j);
      for (const int64_t stop = min(end, (j / p.pages.size + 1) * p.pages.size); j < stop;
           j++, row += x.l)
        list[j - j0] = row;
    }
    for (int64_t j = max(end, j0 + 1); j < j0 + n; j++) list[j - j0] = list[j - 1 - j0];
    f(ListedRows<E>{list});
  }

  // Return the numbers per row in the stage of widened 8-bit rows.
  int64_t stage_row(bool values) const {
    return round_up(values ? p.Dv : p.D, int64_t(2 * T::width));
  }
  // Call f(rows of keys j0 .. j0 + n - 1 as in with_keys()). 8-bit rows are widened into `stage`,
  // which has room for them.
  template <class F>
  INLINE void with_rows(bool values, const Sequence& s, int64_t hkv, int64_t j0, int64_t n,
                        const typename T::elem** list, typename T::elem* stage, const F& f) const {
    using E = typename T::elem;
    const void* base = values ? p.v : p.k;
    const Strides& x = values ? p.vs : p.ks;
    if (p.eight == EightBits::none) return with_keys(base, x, s, hkv, j0, n, list, f);
    if constexpr (sizeof(typename T::acc) == 4) {
      const int64_t width = stage_row(values), d = values ? p.Dv : p.D;
      for (int64_t j = 0; j < min(n, s.cols - j0); j++) {
        const auto* row =
            static_cast<const uint8_t*>(base) + p.key_row(x, s.b, hkv, s.k_first + j0 + j);
        widen_row(p.eight == EightBits::int8, row, d, stage + j * width);
      }
      f(StridedRows<E>{stage, width});
    }
  }
  // Write the scales of keys j0 .. j0 + n - 1 to to[0, n), and 0 up to `end`. Scales of invisible
  // keys and of keys past the length are 0.
  void scales(const RowScales& of, const Sequence& s, int64_t hkv, int64_t j0, int64_t n,
              int64_t end, const uint8_t* live, float* to) const {
    for (int64_t j = 0; j < end; j++)
      to[j] = j < n && j0 + j < s.cols && (!live || live[j])
                  ? of.data[p.key_row(of.strides, s.b, hkv, s.k_first + j0 + j)]
                  : 0.f;
  }

  int64_t k_units(int64_t ld) const { return ld * du; }
  int64_t v_units(int64_t ld) const { return ld / T::pack * dv; }

  // Scale floats for ld keys: K's, then V's.
  int64_t scale_floats(int64_t ld) const { return p.eight == EightBits::none ? 0 : 2 * ld; }

  PackedKV<T> packed(const typename T::packed* k, const typename T::packed* v, int64_t first,
                     int64_t ld, const float* scales) const {
    const bool eight = scale_floats(ld) > 0;
    return {k, v, first, ld, eight ? scales : nullptr, eight ? scales + ld : nullptr};
  }

  // Pack keys [k0, k0 + n), both bounds on panels, into a buffer for keys first .. first + ld - 1,
  // and their scales into to_scales.
  void pack(const Sequence& s, int64_t hkv, int64_t k0, int64_t n, int64_t first, int64_t ld,
            typename T::packed* k, typename T::packed* v, float* to_scales) const {
    constexpr int64_t panel = kPanel<T>;
    uint8_t live[panel];
    alignas(64) typename T::elem stage[panel * kMaxHead];
    for (int64_t j = k0; j < k0 + n; j += panel) {
      const int64_t rows = clamp<int64_t>(s.Lk - j, 0, panel), to = j - first;
      const uint8_t* keep = mark_live_keys<T>(p, s, hkv, j, rows, live) ? live : nullptr;
      const typename T::elem* list[panel];
      if (p.eight != EightBits::none) {
        scales(p.key_scale, s, hkv, j, rows, panel, keep, to_scales + to);
        scales(p.value_scale, s, hkv, j, rows, panel, keep, to_scales + ld + to);
      }
      with_rows(false, s, hkv, j, rows, list, stage, [&](const auto& K) {
        pack_transposed<T>(K, rows, p.D, k + to * du, keep, panel, du);
      });
      with_rows(true, s, hkv, j, rows, list, stage, [&](const auto& V) {
        for (int64_t col = 0; col < dv; col += panel) {
          const int64_t w = min(panel, dv - col);
          pack_rows<T>(V.from_column(col), rows, panel, min(w, p.Dv - col), 0,
                       v + (col * ld + to * w) / T::pack, keep);
        }
      });
    }
  }
};

// Multiply the scores in each row's `reach` by their key's scale, for 8-bit keys. Scales begin
// `first` before the tile and are padded to full vectors; null: none. Return the scales of the
// values, which multiply the weights.
template <class T>
const float* scale_rows(typename T::acc* s, int64_t ld, int64_t rows, const Range* reach,
                        const float* k_scale, const float* v_scale, int64_t first) {
  if (!k_scale) return nullptr;
  if constexpr (sizeof(typename T::acc) == 4)
    for (int64_t r = 0; r < rows; r++)
      for (int64_t j = reach[r].lo; j < reach[r].hi; j += T::width)
        store(s + r * ld + j, typename T::vec(load(s + r * ld + j) * load(k_scale + first + j)));
  return v_scale + first;
}

// The two gemms of attention for few query rows, from unpacked K and V: with so few rows, packing
// costs more than it saves. Reading is the limit. A loop that only reads reaches the memory's rate
// by hardware prefetch; with arithmetic it needs explicit prefetches (one core of Zen 5, K of 128
// bfloat16: 38 % of that rate without, 80 % with).
constexpr int64_t kAheadBytes = 8192, kAheadRows = 64;  // prefetch distance, and its max in rows
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSums = 16;  // vectors of sums at once, of 32 registers
#else
constexpr int kSums = 8;  // of 16 registers
#endif
constexpr int kTogether = kSums / 4;            // query rows per read of a key
constexpr int64_t kDirectRows = 4 * kTogether;  // max query rows without packing of K and V
constexpr int64_t kStageKeys = 32;              // 8-bit rows widened at once: they remain in L1

// Keys of head hkv, read in place, with buffers for a tile of them.
template <class T>
struct DirectKV {
  using E = typename T::elem;
  explicit DirectKV(int64_t hkv) : hkv(hkv) {}
  const int64_t hkv;
  const uint8_t* live = nullptr;  // marks, or null if all keys of the tile are live
  uint8_t marks[kBlockKeys];
  const E* list[kBlockKeys + kAheadRows];
  alignas(64) typename T::packed queries[kDirectRows * kMaxHead];
  alignas(64) E stage[kStageKeys * kMaxHead];
  alignas(64) float k_scale[kBlockKeys + 2 * T::width], v_scale[kBlockKeys + 2 * T::width];
};

// Copy rows of d numbers, `ld` packed elements apart, zero-padded to full vectors. Return the row
// stride in `to`.
template <class T>
int64_t direct_queries(const typename T::packed* rows, int64_t ld, int64_t n, int64_t d,
                       typename T::packed* to) {
  const int64_t given = ceil_div(d, T::pack), units = round_up(given, T::width);
  for (int64_t r = 0; r < n; r++)
    for (int64_t u = 0; u < units; u++)
      to[r * units + u] = u < given ? rows[r * ld + u] : typename T::packed(0);
  return units;
}

// Rows with a prefetch distance: reading row j prefetches row j + distance. A list has kAheadRows
// more rows than are read.
template <class Rows>
struct Ahead {
  Rows rows;
  int64_t distance;
  Ahead(const Rows& rows, int64_t bytes)
      : rows(rows), distance(clamp<int64_t>(kAheadBytes / bytes, 1, kAheadRows)) {}
  // Prefetch the cache lines of n bytes from column c.
  INLINE void ask(int64_t j, int64_t c, int64_t n) const {
    const char* at = reinterpret_cast<const char*>(rows(j + distance) + c);
    UNROLL for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(at + i, 0, 3);
  }
};

// Keys and queries of direct_scores().
template <class T, class Rows>
struct DirectRows {
  Ahead<Rows> K;
  int64_t n, d;
  const uint8_t* live;  // keys with live[j] == 0 count as zeros; may be null
  // queries, `units` packed elements apart, zero-padded to full vectors
  const typename T::packed* q;
  int64_t units, rows;
};

// s[r][j + i] = q[r] . K[j + i] for R queries from r0 and a vector of keys. STEPS: full vectors of
// a row if known, to avoid a loop within a row, else 0.
template <class T, int STEPS, int R, class Rows>
void direct_dots(const DirectRows<T, Rows>& x, int64_t j, int64_t r0, typename T::acc* s,
                 int64_t ld) {
  using vec = typename T::vec;
  using uvec = typename T::uvec;
  constexpr int64_t step = T::width * T::pack;
  constexpr int group = T::width < 4 ? T::width : 4;
  const typename T::packed* q = x.q + r0 * x.units;
  const auto at = [&](int r, int64_t c) {
    return *reinterpret_cast<const uvec*>(q + r * x.units + c / T::pack);
  };
  vec parts[R][T::width / group];
  for (int g = 0; g < T::width / group; g++) {
    vec sums[R][group];
    UNROLL for (int i = 0; i < group; i++) {
      const int64_t key = j + g * group + i;
      const typename T::elem* row = x.K.rows(min(key, x.n - 1));
      UNROLL for (int r = 0; r < R; r++) sums[r][i] = vec{};
      const auto add = [&](int64_t c, int64_t n) __attribute__((always_inline)) {
        x.K.ask(key, c, step * int64_t(sizeof(typename T::elem)));
        const uvec k = T::load_units(row + c, n);
        UNROLL for (int r = 0; r < R; r++) sums[r][i] = T::dot(sums[r][i], at(r, c), k);
      };
      if constexpr (STEPS > 0) {
        UNROLL for (int c = 0; c < STEPS; c++) add(c * step, step);
      } else {
        int64_t c = 0;
        for (; c + step <= x.d; c += step) add(c, step);
        if (c < x.d) add(c, x.d - c);
      }
    }
    UNROLL for (int r = 0; r < R; r++) parts[r][g] = reduce_neighbours<group>(sums[r], op_add);
  }
  UNROLL for (int r = 0; r < R; r++)
      store(s + (r0 + r) * ld + j,
            reverse_lane_bits(reduce_neighbours<T::width / group>(parts[r], op_add)));
}

template <class T, int R, class Rows>
auto pick_dots(int64_t d) {
  constexpr int64_t step = T::width * T::pack;
  return d % step        ? direct_dots<T, 0, R, Rows>
         : d == step     ? direct_dots<T, 1, R, Rows>
         : d == 2 * step ? direct_dots<T, 2, R, Rows>
         : d == 4 * step ? direct_dots<T, 4, R, Rows>
         : d == 8 * step ? direct_dots<T, 8, R, Rows>
                         : direct_dots<T, 0, R, Rows>;
}

// Call f(first row, integral_constant n) for n rows at once, n a power of two up to kTogether.
template <int N = kTogether, class F>
INLINE void together(int64_t rows, const F& f, int64_t r = 0) {
  for (; r + N <= rows; r += N) f(r, std::integral_constant<int, N>());
  if constexpr (N > 1) together<N / 2>(rows, f, r);
}

// s[r][j] = q[r] . K[j], j in [0, n). The rows of s are aligned and written in full vectors.
template <class T, class Rows>
void direct_scores(const DirectRows<T, Rows>& x, typename T::acc* s, int64_t ld) {
  using Dots = void (*)(const DirectRows<T, Rows>&, int64_t, int64_t, typename T::acc*, int64_t);
  struct Pass {
    Dots dots;
    int64_t first;
  } passes[8];  // at least kTogether rows each except the last
  int count = 0;
  together(x.rows, [&](int64_t r, auto n) {
    passes[count++] = {pick_dots<T, decltype(n)::value, Rows>(x.d), r};
  });
  for (int64_t j = 0; j < x.n; j += T::width) {
    for (int i = 0; i < count; i++) passes[i].dots(x, j, passes[i].first, s, ld);
    for (int64_t i = j; x.live && i < min(j + T::width, x.n); i++)
      for (int64_t r = 0; r < x.rows && !x.live[i]; r++) s[r * ld + i] = 0;
  }
}

// Values and weights of direct_output().
template <class T, class Rows>
struct DirectValues {
  Ahead<Rows> V;
  const typename T::opnd* p;  // per query, ld apart
  int64_t ld;
  const uint8_t* live;  // values with live[j] == 0 are skipped; may be null
  int64_t d;
  bool first = true;  // first group of queries that reads these values
};

// o[r] = alpha[r] o[r] + sum over keys of p[r][j] V[j], for R queries from r0 and NC vectors of
// columns from col, of which `columns` exist. alpha = 0: o is not read.
template <class T, int NC, int R, class Rows>
void direct_columns(const DirectValues<T, Rows>& x, Range keys, int64_t col, int64_t columns,
                    int64_t r0, const typename T::acc* alpha, typename T::acc* o, int64_t ldo) {
  using vec = typename T::vec;
  vec acc[R][NC];
  const typename T::opnd* p = x.p + r0 * x.ld;
  o += r0 * ldo + col;
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < NC; c++) acc[r][c] =
      alpha[r0 + r] != 0 ? vec(load(o + r * ldo + c * T::width) * alpha[r0 + r]) : vec{};
  const Rows V = x.V.rows.from_column(col);
  // Prefetch only if several queries share the reads: the gemm of one query hides behind plain
  // reading (f32: full memory rate; 70 % of it with prefetch). Prefetch strided rows in full, once,
  // because in order they arrive faster (4 queries, bf16: 30 GB/s of 40; 27 by columns). Prefetch
  // paged rows by columns.
  using E = typename T::elem;
  constexpr bool strided = std::is_same_v<Rows, StridedRows<E>>;
  const bool asks = x.first && (strided ? R > 1 && col == 0 : true);
  const int64_t asked = (strided ? x.d : NC * T::width) * int64_t(sizeof(E));
  if constexpr (T::pack == 1) {
    const int64_t last = columns - (NC - 1) * T::width;
    for (int64_t j = keys.lo; j < keys.hi; j++) {
      if (x.live && !x.live[j]) continue;
      if (asks) x.V.ask(j, col, asked);
      const typename T::elem* row = V(j);
      vec w[R];
      UNROLL for (int r = 0; r < R; r++) w[r] = set1<vec>(p[r * x.ld + j]);
      UNROLL for (int c = 0; c < NC; c++) {
        const vec v = T::load(row + c * T::width, c + 1 < NC ? T::width : last);
        UNROLL for (int r = 0; r < R; r++) acc[r][c] = fma(w[r], v, acc[r][c]);
      }
    }
    // Two keys per step. reach() starts at an even key, and P is zero past its end.
  } else {
    using uvec = typename T::uvec;
    constexpr int64_t step = T::width * T::pack;
    const auto row = [&](int64_t j, int64_t c) {
      const bool there = j < keys.hi && (!x.live || x.live[j]);
      return there ? T::load_units(V(j) + c, columns - c) : uvec{};
    };
    const auto add = [&](int64_t j, int c, uvec a, uvec b) __attribute__((always_inline)) {
      uvec lo, hi;
      interleave(a, b, &lo, &hi);
      UNROLL for (int r = 0; r < R; r++) {
        const uvec w =
            T::Pairs::broadcast(reinterpret_cast<const typename T::packed*>(p + r * x.ld + j));
        acc[r][c] = T::dot(acc[r][c], w, lo);
        if (c + 1 < NC) acc[r][c + 1] = T::dot(acc[r][c + 1], w, hi);
      }
    };
    int64_t j = keys.lo;
    if (!x.live && columns == NC * T::width && NC > 1)  // no masked keys or columns
      for (; j + 2 <= keys.hi; j += 2) {
        if (asks) x.V.ask(j, col, asked), x.V.ask(j + 1, col, asked);
        const typename T::elem *a = V(j), *b = V(j + 1);
        UNROLL for (int c = 0; c + 1 < NC; c += 2)
            add(j, c, T::load_units(a + c / 2 * step, step), T::load_units(b + c / 2 * step, step));
      }
    for (; j < keys.hi; j += 2)
      UNROLL for (int c = 0; c < NC; c += 2)
          add(j, c, row(j, c / 2 * step), row(j + 1, c / 2 * step));
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int c = 0; c < NC; c++)
      store(o + r * ldo + c * T::width, acc[r][c]);
}

// Compute all columns.
template <class T, int R, int NC = (kSums / R < 8 ? kSums / R : 8), class Rows>
void direct_output(const DirectValues<T, Rows>& x, Range keys, int64_t r0,
                   const typename T::acc* alpha, typename T::acc* o, int64_t ldo, int64_t col = 0) {
  constexpr int64_t columns = NC * T::width;
  for (; col + columns <= x.d || (NC == 1 && col < x.d); col += columns)
    direct_columns<T, NC, R>(x, keys, col, min(columns, x.d - col), r0, alpha, o, ldo);
  if constexpr (NC > 1) direct_output<T, R, NC / 2>(x, keys, r0, alpha, o, ldo, col);
}

}  // namespace PT_ISA
}  // namespace pt
