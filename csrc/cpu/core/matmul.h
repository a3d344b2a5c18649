// SPDX-License-Identifier: Apache-2.0
// Gemm on the micro-kernel, with an epilogue on each tile of the result.
//
// C = A B, a sum of such products, or several C over the same rows and columns at once. B is packed
// in panels of kPanel columns. A is read in place if its rows hold packed elements, else it is
// packed too. A thread packs a group of rows of A that fits its core's cache and multiplies it by
// one panel after another. With only one group, threads pack their own panels, and a packed panel
// never leaves that cache. The summation order depends only on K, so results depend on neither
// threads nor timing.
//
// With few rows of A, packing B would take longer than multiplying. Then C^T = B^T A^T is computed:
// B is read in place, A is packed, and tiles are transposed before the epilogue. A B packed by an
// earlier call (Operand::panels) needs neither.
#pragma once

#include "cpu/core/arena.h"
#include "cpu/core/matmul_sizes.h"
#include "cpu/core/pack.h"
#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"

namespace pt {
namespace PT_ISA {

inline thread_local Arena packed_arena;    // each worker: packed rows of A
inline thread_local Arena sums_arena;      // calling thread: tiles between slices of k
inline thread_local Arena epilogue_arena;  // each worker: scratch of one epilogue call

// Prefetch n columns of some rows of a matrix. The empty asm statement counts as a side effect: GCC
// 12 drops every call of a function that only prefetches. Without the prefetch, reading `pre` took
// a quarter of backward's first gemm.
template <class E>
INLINE void fetch_rows(const E* first, int64_t columns, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < n; j += 64 / int64_t(sizeof(E)))
      __builtin_prefetch(first + r * columns + j, 0, 2);
  asm volatile("");
}

template <class T, int PRODUCTS, bool SUM>
class Matmul {
  using acc = typename T::acc;
  using packed = typename T::packed;
  static constexpr int kTiles = SUM ? 1 : PRODUCTS;
  static constexpr int64_t kWide = kPanel<T>;
  // Columns of B packed together. AMX tiles use two vectors, 32 adjacent columns that remain in L1
  // while rows pass.
  static constexpr int64_t kStrip = kUnitStep<T> > 1 ? 2 * T::width : kWide;
  // The micro-kernel prefetches while it multiplies, and its prefetches cover the next rows of A.
  static constexpr bool kPrefetches = kUnitStep<T> == 1 && kTurn<kMR> > 1,
                        kPrefetchesRows =
                            kPrefetches && kTurn<kMR> * kMR * int(sizeof(packed)) <= 64;

 public:
  // Multiply M x K by K x N. SUM: add all products into one tile; otherwise each product has a
  // tile.
  Matmul(const Product<T> (&products)[PRODUCTS], int64_t M, int64_t N, int64_t K, int threads)
      : M_(M), N_(N), K_(K), threads_(threads) {
    for (int i = 0; i < PRODUCTS; i++) p_[i] = products[i];
    transposed_ = transposing_pays();
    if (!transposed_) return;
    std::swap(M_, N_);
    for (Product<T>& p : p_) std::swap(p.a, p.b);
  }

  // Call epilogue(tiles, ld, m0, rows, n0, cols, arena): tiles[t] + r * ld is row m0 + r from
  // column n0. The arena holds epilogue.scratch_bytes().
  template <class Epilogue>
  void run(const Epilogue& epilogue) {
    const Steps by = steps();
    if (by.sliced) sums_arena.reset(sums_bytes(by));
    acc* sums[kTiles] = {};
    for (int t = 0; by.sliced && t < kTiles; t++)
      sums[t] = sums_arena.take<acc>(sums_size(by.columns));
    for (int64_t n = 0; n < N_; n += by.columns)
      for (int64_t k = 0; k < K_; k += by.depth)
        slice(n, min(by.columns, N_ - n), k, min(by.depth, K_ - k), sums, epilogue);
  }

  // Write the panels of all of B (K x N) for later calls with any A: panels_size() packed elements.
  static void pack_panels(const Operand<T>& b, int64_t N, int64_t K, int threads, packed* panels) {
    const int64_t count = ceil_div(N, kWide), deep = slice_depth(K);
    for_each_task(ceil_div(K, deep) * count, threads, [&](int64_t task) {
      const int64_t k = task / count * deep, n = task % count * kWide, depth = min(deep, K - k),
                    units = ceil_div(depth, T::pack);
      pack_panel(b, n, min(kWide, N - n), k, depth, panels + panels_at(N, n, k, units), units, 0);
    });
  }
  static int64_t panels_size(int64_t N, int64_t K) {
    return ceil_div(K, T::pack) * round_up(N, kWide);
  }

  // Return the scratch of run().
  template <class Epilogue>
  Scratch scratch(const Epilogue& epilogue) const {
    const Steps by = steps();
    Scratch s;
    s.sums = by.sliced ? sums_bytes(by) : 0, s.epilogue = epilogue.scratch_bytes();
    // the last slice is smaller
    for (int64_t cols : {min(by.columns, N_), (N_ - 1) % by.columns + 1})
      for (int64_t depth : {by.depth, (K_ - 1) % by.depth + 1}) {
        const Groups g = groups(cols, depth);
        s.shared = max(s.shared, shared_bytes(g)),
        s.local = max(s.local, tile_bytes(g, min(kWide, cols)));
        size_t& packed_a = g.of_threads ? s.packed_by_each : s.packed_for_all;
        if (!g.in_place)
          packed_a = max(packed_a, packed_bytes(g.of_threads ? g.rows : M_, g.units));
      }
    return s;
  }

 private:
  // Slices of the gemm: along k, with stored sums between slices, and along columns.
  struct Steps {
    bool sliced;
    int64_t depth, columns;
  };
  Steps steps() const {
    const int64_t depth = slice_depth(K_);
    const bool sliced = depth < K_;
    int64_t columns = kPackedUnits * T::pack / max<int64_t>(1, depth * PRODUCTS);
    if (sliced) columns = min(columns, kSums / (M_ * kTiles));
    return {sliced, depth, round_up(clamp<int64_t>(columns, kWide, N_), kWide)};
  }
  static int64_t slice_depth(int64_t K) { return K > kUncutUnits<T> * T::pack ? kSlice : K; }
  size_t sums_bytes(const Steps& by) const {
    return kTiles * Arena::bytes_for<acc>(sums_size(by.columns));
  }

  // Partition of a slice: groups of rows of A, and panels of B.
  struct Groups {
    int64_t units, panels, rows, count;
    bool in_place;      // A needs no packing
    bool share_panels;  // this call packs B once for all groups
    bool of_threads;    // a thread owns and packs a group
  };
  Groups groups(int64_t cols, int64_t depth) const {
    const int64_t units = ceil_div(depth, T::pack), panels = ceil_div(cols, kWide),
                  rows = group_rows(units, panels);
    const int64_t count = ceil_div(M_, rows);
    return {units,
            panels,
            rows,
            count,
            in_place(p_[0].a) && depth % T::pack == 0,
            count > 1 && !p_[0].b.panels,
            count >= threads_ && count > 1};
  }
  static size_t shared_bytes(const Groups& g) {
    return (g.share_panels ? PRODUCTS * Arena::bytes_for<packed>(g.panels * kWide * g.units) : 0) +
           Arena::bytes_for<int64_t>(g.count + 1);
  }
  size_t tile_bytes(const Groups& g, int64_t cols) const {
    return tile_bytes(g.share_panels || p_[0].b.panels, panel_width(cols), g.units);
  }
  size_t tile_bytes(bool packed_b, int64_t w, int64_t units) const {
    return kTiles * Arena::bytes_for<acc>(kTileRows<T> * kWide) +
           (transposed_ ? kTiles * Arena::bytes_for<acc>(kWide * kWide) : 0) +
           (packed_b ? 0 : PRODUCTS * Arena::bytes_for<packed>(w * units));
  }
  // Pad packed rows of A to a nearly odd number of cache lines.
  static int64_t packed_row(int64_t units) {
    return round_up(units, T::width) + 64 / int64_t(sizeof(packed));
  }
  static size_t packed_bytes(int64_t rows, int64_t units) {
    return PRODUCTS * Arena::bytes_for<packed>(rows * packed_row(units));
  }

  // Compare costs per element in eighths of a cycle: packing costs 1, transposing a tile element 2.
  // Transposing pays if packing B costs more than packing A and transposing tiles.
  bool transposing_pays() const {
    if (p_[0].b.panels) return false;
    // If both are packed, A should be the larger one: each thread packs its groups of A, which
    // remain in its cache.
    bool both_packed = true;
    for (const Product<T>& p : p_) both_packed &= p.a.along_k && p.b.along_k && !p.b.live;
    // AMX multiplies so fast that transposing the result is noticeable.
    if (both_packed) return kUnitStep<T> == 1 && M_ < N_;
    for (const Product<T>& p : p_)
      if (p.a.along_k || !in_place(p.b) || K_ % T::pack) return false;
    return M_ * (2 * N_ + K_) < N_ * K_;
  }
  static constexpr int64_t kSlice = kSliceUnits<T> * T::pack;
  // Pad the rows of sums to full tiles, which transpose_tile reads.
  int64_t sums_size(int64_t columns) const { return round_up(M_, kTileRows<T>) * columns; }

  // Return true if an operand's rows can be read without packing.
  static bool in_place(const Operand<T>& a) {
    return std::is_same_v<typename T::elem, typename T::opnd> && !a.along_k &&
           a.stride % T::pack == 0;
  }
  // Return the offset of the panel of column n in the panels of the slice from k, `units` deep.
  static int64_t panels_at(int64_t N, int64_t n, int64_t k, int64_t units) {
    return k / T::pack * round_up(N, kWide) + n * units;
  }
  static int64_t panel_width(int64_t cols) { return min(kWide, round_up(cols, T::width)); }
  static int64_t strip_width(int64_t cols) { return min(kStrip, round_up(cols, T::width)); }

  // Return the rows of A per task: a group that fits the cache and leaves tasks for all threads.
  int64_t group_rows(int64_t units, int64_t panels) const {
    const int64_t granule = transposed_ ? 64 : kPart<T>;
    const int64_t fit = cached_bytes() / (units * int64_t(sizeof(packed))),
                  share = M_ * panels / (4 * threads_);
    const int64_t rows = min(M_, max(min(fit, share) / granule * granule, granule));
    return rows == M_
               ? M_
               : min(rows, round_up(ceil_div(M_, round_up(ceil_div(M_, rows), int64_t(threads_))),
                                    granule));
  }

  struct Slice {
    int64_t n0, cols, k0, units, depth, a_row;
    int64_t a_first;      // first packed row of A
    int64_t panel_step;   // distance to this thread's probable next panel
    acc* const* sums;     // panels of all rows; null: single slice
    packed* a[PRODUCTS];  // packed A; null: read in place
    packed* b[PRODUCTS];  // packed panels; null: each task packs its panel
  };

  template <class Epilogue>
  void slice(int64_t n0, int64_t cols, int64_t k0, int64_t depth, acc* const* sums,
             const Epilogue& epilogue) {
    const Groups g = groups(cols, depth);
    Slice s{n0, cols, k0, g.units, depth, packed_row(g.units), 0, kWide, sums[0] ? sums : nullptr,
            {}, {}};
    shared_arena.reset(shared_bytes(g));
    if (g.share_panels) pack_b(s, g.panels);
    for (int i = 0; i < PRODUCTS && p_[i].b.panels; i++)
      s.b[i] = const_cast<packed*>(p_[i].b.panels) + panels_at(N_, n0, k0, g.units);
    if (g.of_threads) {
      int64_t* taken = shared_arena.take<int64_t>(g.count + 1);
      for (int64_t i = 0; i <= g.count; i++) taken[i] = 0;
      return for_each_task(threads_, threads_, [&](int64_t) { work(s, g, taken, epilogue); });
    }
    s.panel_step = threads_ * kWide;
    if (!g.in_place)
      pack_a(s, M_, [&](int64_t n, const auto& f) { for_each_task(n, threads_, f); });
    for_each_task(g.panels * g.count, threads_, [&](int64_t task) {
      const FlushSubnormals flush;
      const int64_t panel = task % g.panels, m0 = task / g.panels * g.rows;
      tile_rows(s, panel, m0, min(M_, m0 + g.rows), epilogue);
    });
  }

  // One thread's part of a slice: claim groups of rows of A, pack them if needed, and multiply one
  // panel after another. With no group left, help with the panels of other groups. taken: claimed
  // panels per group, then claimed groups.
  template <class Epilogue>
  void work(Slice s, const Groups& groups, int64_t* taken, const Epilogue& epilogue) const {
    // Flush the many subnormals in gelu's tail: each costs a 100-cycle assist, in later gemms too.
    const FlushSubnormals flush;
    const auto next = [](int64_t* counter) {
      return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
    };
    const auto multiply_group = [&](int64_t g) {
      if (__atomic_load_n(taken + g, __ATOMIC_RELAXED) >= groups.panels) return;
      s.a_first = g * groups.rows;
      const int64_t end = min(M_, s.a_first + groups.rows);
      if (!groups.in_place)
        pack_a(s, end - s.a_first, [](int64_t n, const auto& f) {
          for (int64_t i = 0; i < n; i++) f(i);
        });
      for (int64_t panel; (panel = next(taken + g)) < groups.panels;)
        tile_rows(s, panel, s.a_first, end, epilogue);
    };
    for (int64_t g; (g = next(taken + groups.count)) < groups.count;) multiply_group(g);
    for (int64_t g = 0; g < groups.count; g++) multiply_group(g);
  }

  // Multiply rows [begin, end) of A by one panel and pass each tile to the epilogue.
  template <class Epilogue>
  void tile_rows(const Slice& s, int64_t panel, int64_t begin, int64_t end,
                 const Epilogue& epilogue) const {
    const int64_t n = panel * kWide, cols = min(kWide, s.cols - n), w = panel_width(cols);
    local_arena.reset(tile_bytes(s.b[0], w, s.units));
    acc *own[kTiles], *turned[kTiles];
    for (int t = 0; t < kTiles; t++) {
      own[t] = local_arena.take<acc>(kTileRows<T> * kWide);
      turned[t] = transposed_ ? local_arena.take<acc>(kWide * kWide) : nullptr;
    }
    const packed* b[PRODUCTS];
    for (int i = 0; i < PRODUCTS; i++) {
      packed* ready = s.b[i] ? s.b[i] + n * s.units : local_arena.take<packed>(w * s.units);
      if (!s.b[i]) pack_panel(p_[i].b, s.n0 + n, cols, s.k0, s.depth, ready, s.units, 0);
      b[i] = ready;
    }
    const bool last_slice = s.k0 + s.depth == K_;
    for (int64_t m0 = begin; m0 < end; m0 += kTileRows<T>) {
      const int64_t rows = min(kTileRows<T>, end - m0);
      acc* tiles[kTiles];
      for (int t = 0; t < kTiles; t++)
        tiles[t] = s.sums ? s.sums[t] + n * round_up(M_, kTileRows<T>) + m0 * kWide : own[t];
      const int64_t step = by_rows(s, panel) ? kMR : rows;
      for (int64_t r = 0; r < rows; r += step)
        tile_pass(s, b, tiles, panel, m0, r, min(rows, r + step), rows, m0 == begin, epilogue);
      if (transposed_ && last_slice)
        for (int64_t r = 0; r < rows; r += kWide) {
          for (int t = 0; t < kTiles; t++) transpose_tile(tiles[t] + r * kWide, w, turned[t]);
          finish(turned, 0, s.n0 + n, cols, m0 + r, min(kWide, rows - r), epilogue);
        }
    }
  }

  // Transposed, A holds the weights, which the first panel reads from memory. Then a group of rows
  // takes all of k before the next one, so that the lines to prefetch are contiguous.
  bool by_rows(const Slice& s, int64_t panel) const {
    return kPrefetchesRows && transposed_ && panel == 0 && !s.a[0] && p_[0].a.stride == s.depth;
  }

  // Multiply rows [first, end) of a tile of `rows` rows from m0 by a panel. reads_b: this is the
  // task's first tile, which prefetches B.
  template <class Epilogue>
  INLINE void tile_pass(const Slice& s, const packed* const* b, acc* const* tiles, int64_t panel,
                        int64_t m0, int64_t first, int64_t end, int64_t rows, bool reads_b,
                        const Epilogue& epilogue) const {
    const int64_t n = panel * kWide, cols = min(kWide, s.cols - n), w = panel_width(cols);
    const bool prefetches_a = by_rows(s, panel);
    const bool last_slice = s.k0 + s.depth == K_;
    for (int i = 0; i < PRODUCTS; i++)
      for (int64_t u = 0; u < s.units; u += kDepth<T>) {
        const bool last = last_slice && i + 1 == PRODUCTS && u + kDepth<T> >= s.units,
                   done = last && !transposed_;
        const Mode mode = s.k0 || u || (SUM && i) ? kAdd : kStore;
        for (int64_t r = first; r < end; r += kPart<T>) {
          const int64_t part = min(kPart<T>, end - r);
          const auto ahead = [&](int64_t row, int64_t count) -> const char* {
            const char* lines = nullptr;
            if (prefetches_a)
              lines = reinterpret_cast<const char*>(
                  p_[i].a.data + (m0 + r + row + kMR) * p_[i].a.stride + u * kMR);
            else if (kUnitStep<T> == 1 && reads_b)
              lines = fetch_ahead(s, i, n, u, r + row, count, rows);
            if (done) epilogue.fetch(m0 + r + row, count, s.n0 + n, cols);
            else if (last)
              epilogue.fetch(s.n0 + n + row * cols / part,
                             (row + count) * cols / part - row * cols / part, m0 + r, part);
            return lines;
          };
          multiply(p_[i].a, s, i, m0 + r, part, u, b[i], w, tiles[SUM ? 0 : i] + r * kWide, mode,
                   ahead);
          if (done) finish(tiles, r, m0 + r, part, s.n0 + n, cols, epilogue);
        }
      }
  }

  template <class Epilogue>
  static void finish(acc* const* tiles, int64_t row, int64_t m0, int64_t rows, int64_t n0,
                     int64_t cols, const Epilogue& epilogue) {
    acc* at[kTiles];
    for (int t = 0; t < kTiles; t++) at[t] = tiles[t] + row * kWide;
    epilogue_arena.reset(epilogue.scratch_bytes());
    epilogue(at, kWide, m0, rows, n0, cols, epilogue_arena);
  }

  // Prefetch this thread's next part of B, a share before each row group of a task's first tile. B
  // comes from the last-level cache or from memory, and waiting took a tenth of the time. (On AMX
  // tiles, prefetching itself costs a tenth, so they skip it.)
  // Packed B: prefetch the panel's next piece, and at its end the start of the thread's probable
  // next panel. Unpacked B: prefetch that next panel, which will be packed. Return lines for the
  // micro-kernel to prefetch, one per loop iteration, if that covers them: 0.98 of the time of
  // prefetching all lines first.
  INLINE const char* fetch_ahead(const Slice& s, int product, int64_t n, int64_t u, int64_t row,
                                 int64_t count, int64_t rows) const {
    const int64_t next = n + s.panel_step, depth = min(kDepth<T>, s.units - u);
    if (s.b[0]) {
      const bool last = u + kDepth<T> >= s.units;
      if (last && next >= s.cols) return nullptr;
      const packed* piece =
          s.b[product] +
          (last ? next * s.units : n * s.units + (u + depth) * panel_width(s.cols - n));
      constexpr int64_t all = kDepth<T> * kWide, line = 64 / int64_t(sizeof(packed));
      const int64_t by_call = depth / kTurn<kMR> * line, done = row / kMR * by_call;
      if (kPrefetches && rows / kMR * by_call + (rows % kMR ? depth * line : 0) >= all)
        return done < all ? reinterpret_cast<const char*>(piece + done) : nullptr;
      const int64_t from = row * all / rows, to = (row + count) * all / rows;
      fetch_rows(piece + from, 0, 1, to - from);
    } else if (next < s.cols) {
      const Operand<T>& b = p_[product].b;
      const int64_t k = s.k0 + u * T::pack, runs = b.along_k
                                                       ? min(depth * T::pack, s.depth - u * T::pack)
                                                       : min(kWide, s.cols - next);
      const int64_t from = row * runs / rows, to = (row + count) * runs / rows;
      if (b.along_k)
        fetch_rows(b.data + (k + from) * b.stride + s.n0 + next, b.stride, to - from, kWide);
      else
        fetch_rows(b.data + (s.n0 + next + from) * b.stride + k, b.stride, to - from,
                   depth * T::pack);
    }
    return nullptr;
  }

  // tile (+)= rows of A x one panel, over up to kDepth packed elements from u. The row stride of
  // tiles is kWide for every panel width. ahead(row, count), with rows relative to m0, runs before
  // each group of rows and may return lines to prefetch.
  template <class Ahead>
  INLINE void multiply(const Operand<T>& a, const Slice& s, int product, int64_t m0, int64_t rows,
                       int64_t u, const packed* b, int64_t w, acc* tile, Mode mode,
                       const Ahead& ahead) const {
    const packed* ready = s.a[product];
    const int64_t row = ready ? s.a_row : a.stride / T::pack, depth = min(kDepth<T>, s.units - u);
    const packed* base =
        (ready ? ready - s.a_first * row : reinterpret_cast<const packed*>(a.data + s.k0)) +
        m0 * row + u;
    for (int64_t j = 0; j < w; j += kStrip) {
      const int64_t width = min(kStrip, w - j);
      const packed* strip = b + j * s.units + u * width;
      for (int64_t r = 0; r < rows; r += kRows<T>) {
        const int64_t count = min<int64_t>(kRows<T>, rows - r);
        const char* lines = j ? nullptr : ahead(r, count);
        if constexpr (kPrefetches)
          if (lines && width == kWide) {
            constexpr auto all = std::make_integer_sequence<int, kMR>();
            const auto run = mode == kStore ? pick_prefetching<T, kStore>(count, all)
                                            : pick_prefetching<T, kAdd>(count, all);
            run(depth, base + r * row, row, strip, tile + r * kWide + j, kWide, lines);
            continue;
          }
        pick<T>(count, width, mode)(depth, base + r * row, row, 1, strip, tile + r * kWide + j,
                                    kWide, nullptr);
      }
    }
  }

  // Transpose kWide rows of `cols` columns, padded to full vectors, into `cols` rows of kWide.
  static void transpose_tile(const acc* tile, int64_t cols, acc* out) {
    for (int64_t c = 0; c < cols; c += T::width)
      for (int64_t r = 0; r < kWide; r += T::width) {
        typename T::vec v[T::width];
        UNROLL for (int i = 0; i < T::width; i++) v[i] = load(tile + (r + i) * kWide + c);
        transpose(v);
        UNROLL for (int i = 0; i < T::width; i++) store(out + (c + i) * kWide + r, v[i]);
      }
  }

  // Pack `depth` elements of k from k0, columns [n, n + cols), into a panel whose strips have
  // `units` packed elements, starting at u of each strip.
  static void pack_panel(const Operand<T>& b, int64_t n, int64_t cols, int64_t k0, int64_t depth,
                         packed* panel, int64_t units, int64_t u) {
    const uint8_t* live = b.live ? b.live + k0 : nullptr;
    for (int64_t j = 0; j < cols; j += kStrip, n += kStrip) {
      const int64_t count = min(kStrip, cols - j);
      packed* dst = panel + j * units + u * strip_width(count);
      if (b.along_k)
        pack_rows<T>(b.data + k0 * b.stride + n, b.stride, depth, round_up(depth, T::pack), count,
                     0, dst, live);
      else
        pack_transposed<T>(b.data + n * b.stride + k0, b.stride, count, depth, dst, nullptr,
                           strip_width(count));
    }
  }

  // Pack B in tasks with long reads: a long piece of one panel if k is contiguous, else a short
  // piece of several panels.
  void pack_b(Slice& s, int64_t panels) const {
    for (int i = 0; i < PRODUCTS; i++) s.b[i] = shared_arena.take<packed>(panels * kWide * s.units);
    const int64_t deep = p_[0].b.along_k ? 32 : kPackedDepth, wide = p_[0].b.along_k ? 16 : 1;
    const int64_t parts = ceil_div(s.units, deep), groups = ceil_div(panels, wide);
    for_each_task(PRODUCTS * groups * parts, threads_, [&](int64_t task) {
      const int i = int(task / (groups * parts));
      const int64_t u = task % parts * deep, k = u * T::pack,
                    depth = min(deep * T::pack, s.depth - k);
      const int64_t first = task / parts % groups * wide;
      for (int64_t panel = first; panel < min(panels, first + wide); panel++) {
        const int64_t n = panel * kWide, cols = min(kWide, s.cols - n);
        pack_panel(p_[i].b, s.n0 + n, cols, s.k0 + k, depth, s.b[i] + n * s.units, s.units, u);
      }
    });
  }

  // Pack columns [0, n) of `depth` rows as rows of packed elements: dst[column][row], in full
  // vectors.
  static void pack_columns(const typename T::elem* src, int64_t stride, int64_t n, int64_t depth,
                           packed* dst, int64_t row) {
    using uvec = typename T::uvec;
    typedef uvec any __attribute__((aligned(4)));
    const auto load = [&](int64_t k, int64_t c) {
      return k < depth ? T::load_units(src + k * stride + c, min<int64_t>(T::width, n - c))
                       : uvec{};
    };
    for (int64_t u = 0; u * T::pack < depth; u += T::width)
      for (int64_t c = 0; c < n; c += T::width) {
        typename T::vec r[T::width];
        for (int i = 0; i < T::width * T::pack; i++)
          __builtin_prefetch(src + ((u + T::width) * T::pack + i) * stride + c);
        for (int i = 0; i < T::width; i++) {
          uvec row_unit = load((u + i) * T::pack, c);
          if constexpr (T::pack == 2) {
            uvec unused;
            interleave(row_unit, load((u + i) * T::pack + 1, c), &row_unit, &unused);
          }
          r[i] = (typename T::vec)row_unit;
        }
        transpose(r);
        for (int64_t i = 0; i < min<int64_t>(T::width, n - c); i++)
          *reinterpret_cast<any*>(dst + (c + i) * row + u) = (uvec)r[i];
      }
  }

  // Pack rows [a_first, a_first + rows). for_each(n, f) calls f(0) ... f(n - 1).
  template <class ForEach>
  void pack_a(Slice& s, int64_t rows, const ForEach& for_each) const {
    constexpr int64_t kStep = 192;  // neighbors read per column if k is strided: 64 were 1 % slower
    packed_arena.reset(packed_bytes(rows, s.units));
    for (int i = 0; i < PRODUCTS; i++) s.a[i] = packed_arena.take<packed>(rows * s.a_row);
    const int64_t parts = ceil_div(rows, kStep);
    for_each(PRODUCTS * parts, [&](int64_t task) {
      const int i = int(task / parts);
      const int64_t r = task % parts * kStep, m = s.a_first + r, count = min(kStep, rows - r);
      const Operand<T>& a = p_[i].a;
      packed* dst = s.a[i] + r * s.a_row;
      if (a.along_k)
        return pack_columns(a.data + s.k0 * a.stride + m, a.stride, count, s.depth, dst, s.a_row);
      for (int64_t j = 0; j < count; j++)
        copy_rows<T>(a.data + (m + j) * a.stride + s.k0, a.stride, 1, 1, s.depth,
                     dst + j * s.a_row);
    });
  }

  Product<T> p_[PRODUCTS];
  int64_t M_, N_, K_;
  int threads_;
  bool transposed_ = false;
};

}  // namespace PT_ISA
}  // namespace pt
