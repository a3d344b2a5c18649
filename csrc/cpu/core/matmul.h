// SPDX-License-Identifier: Apache-2.0
// Matrix products of whole matrices on the micro-kernel, with an epilogue on each tile of the result.
//
// C = A B, or a sum of such products, or several C over the same rows and columns at once. B is packed in panels of kPanel
// columns; A is read where it lies if it holds packed elements as the micro-kernel wants them, else packed too. A thread multiplies a group
// of rows of A that fits its core's cache, which it packs itself, with one panel after the other; where there is one group only, it packs
// its panels itself, and a packed panel never leaves that cache. Every element of C is a sum in an order that depends on K alone, so
// results depend on neither threads nor timing.
//
// Where A has few rows, packing B would take longer than multiplying. Then the product is formed transposed, C^T = B^T A^T: B
// is read where it lies, A is packed, and the tiles are transposed before the epilogue sees them.
#pragma once

#include "cpu/core/arena.h"
#include "cpu/core/matmul_sizes.h"
#include "cpu/core/pack.h"
#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"

namespace pt {
namespace PT_ISA {

inline thread_local Arena packed_arena;    // of each worker: packed rows of A
inline thread_local Arena sums_arena;      // of the calling thread: tiles between slices of k
inline thread_local Arena epilogue_arena;  // of each worker: the scratch of one call of an epilogue

// Asks for the cache lines of n columns of some rows of a matrix. The empty statement counts as an effect: a function that does nothing
// but ask has none for GCC 12, which then drops every call of it. All of this was missing from the library; reading pre as it came
// took a quarter of backward's first product.
template <class E>
INLINE void fetch_rows(const E* first, int64_t columns, int64_t rows, int64_t n) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < n; j += 64 / int64_t(sizeof(E))) __builtin_prefetch(first + r * columns + j, 0, 2);
  asm volatile("");
}

template <class T, int PRODUCTS, bool SUM>
class Matmul {
  using acc = typename T::acc;
  using packed = typename T::packed;
  static constexpr int kTiles = SUM ? 1 : PRODUCTS;
  static constexpr int64_t kWide = kPanel<T>;
  // Columns of B packed together. Tiles take two of them at once: 32 columns lie side by side, which stay in L1 while rows pass.
  static constexpr int64_t kStrip = kUnitStep<T> > 1 ? 2 * T::width : kWide;

 public:
  // M x K times K x N. SUM: the products are added into one tile; else each has its own.
  Matmul(const Product<T> (&products)[PRODUCTS], int64_t M, int64_t N, int64_t K, int threads) : M_(M), N_(N), K_(K), threads_(threads) {
    for (int i = 0; i < PRODUCTS; i++) p_[i] = products[i];
    transposed_ = transposing_pays();
    if (!transposed_) return;
    std::swap(M_, N_);
    for (Product<T>& p : p_) std::swap(p.a, p.b);
  }

  // epilogue(tiles, ld, m0, rows, n0, cols, arena): tiles[t] + r * ld is row m0 + r, from column n0 on. The arena holds
  // epilogue.scratch_bytes().
  template <class Epilogue>
  void run(const Epilogue& epilogue) {
    const Steps by = steps();
    if (by.sliced) sums_arena.reset(sums_bytes(by));
    acc* sums[kTiles] = {};
    for (int t = 0; by.sliced && t < kTiles; t++) sums[t] = sums_arena.take<acc>(sums_size(by.columns));
    for (int64_t n = 0; n < N_; n += by.columns)
      for (int64_t k = 0; k < K_; k += by.depth) slice(n, min(by.columns, N_ - n), k, min(by.depth, K_ - k), sums, epilogue);
  }

  // What run() takes.
  template <class Epilogue>
  Scratch scratch(const Epilogue& epilogue) const {
    const Steps by = steps();
    Scratch s;
    s.sums = by.sliced ? sums_bytes(by) : 0, s.epilogue = epilogue.scratch_bytes();
    for (int64_t cols : {min(by.columns, N_), (N_ - 1) % by.columns + 1})  // the last ones are smaller
      for (int64_t depth : {by.depth, (K_ - 1) % by.depth + 1}) {
        const Groups g = groups(cols, depth);
        s.shared = max(s.shared, shared_bytes(g)), s.local = max(s.local, tile_bytes(g, min(kWide, cols)));
        size_t& packed_a = g.of_threads ? s.packed_by_each : s.packed_for_all;
        if (!g.in_place) packed_a = max(packed_a, packed_bytes(g.of_threads ? g.rows : M_, g.units));
      }
    return s;
  }

 private:
  // How the product is cut into slices: along k, where the sums between them are kept, and along the columns.
  struct Steps {
    bool sliced;
    int64_t depth, columns;
  };
  Steps steps() const {
    const bool sliced = K_ > kUncutUnits<T> * T::pack;
    const int64_t depth = sliced ? kSlice : K_;
    int64_t columns = kPackedUnits * T::pack / max<int64_t>(1, depth * PRODUCTS);
    if (sliced) columns = min(columns, kSums / (M_ * kTiles));
    return {sliced, depth, round_up(clamp<int64_t>(columns, kWide, N_), kWide)};
  }
  size_t sums_bytes(const Steps& by) const { return kTiles * Arena::bytes_for<acc>(sums_size(by.columns)); }

  // How a slice is shared out: groups of rows of A, and panels of B.
  struct Groups {
    int64_t units, panels, rows, count;
    bool in_place;      // A is read where it lies
    bool share_panels;  // B is packed once for all groups
    bool of_threads;    // a thread owns a group, and packs it
  };
  Groups groups(int64_t cols, int64_t depth) const {
    const int64_t units = ceil_div(depth, T::pack), panels = ceil_div(cols, kWide), rows = group_rows(units, panels);
    const int64_t count = ceil_div(M_, rows);
    return {units, panels, rows, count, in_place(p_[0].a) && depth % T::pack == 0, count > 1, count >= threads_ && count > 1};
  }
  static size_t shared_bytes(const Groups& g) {
    return (g.share_panels ? PRODUCTS * Arena::bytes_for<packed>(g.panels * kWide * g.units) : 0) + Arena::bytes_for<int64_t>(g.count + 1);
  }
  size_t tile_bytes(const Groups& g, int64_t cols) const { return tile_bytes(g.share_panels, panel_width(cols), g.units); }
  size_t tile_bytes(bool packed_b, int64_t w, int64_t units) const {
    return kTiles * Arena::bytes_for<acc>(kTileRows<T> * kWide) + (transposed_ ? kTiles * Arena::bytes_for<acc>(kWide * kWide) : 0) +
           (packed_b ? 0 : PRODUCTS * Arena::bytes_for<packed>(w * units));
  }
  // Rows of packed A are an odd number of cache lines long, or nearly.
  static int64_t packed_row(int64_t units) { return round_up(units, T::width) + 64 / int64_t(sizeof(packed)); }
  static size_t packed_bytes(int64_t rows, int64_t units) { return PRODUCTS * Arena::bytes_for<packed>(rows * packed_row(units)); }

  // In units of an eighth of a cycle, per element: packing costs 1, and transposing an element of a tile 2. A pays for the latter
  // and for its own packing what it saves of B's.
  bool transposing_pays() const {
    bool both_packed = true;  // then A is better the larger one: each thread packs its own groups of it, and they stay in its cache
    for (const Product<T>& p : p_) both_packed &= p.a.along_k && p.b.along_k && !p.b.live;
    if (both_packed) return kUnitStep<T> == 1 && M_ < N_;  // tiles multiply so fast that turning the result counts
    for (const Product<T>& p : p_)
      if (p.a.along_k || !in_place(p.b) || K_ % T::pack) return false;
    return M_ * (2 * N_ + K_) < N_ * K_;
  }
  static constexpr int64_t kSlice = kSliceUnits<T> * T::pack;
  // Rows of sums are padded to whole tiles, which transpose_tile reads.
  int64_t sums_size(int64_t columns) const { return round_up(M_, kTileRows<T>) * columns; }

  // Whether an operand's rows can be read where they lie.
  static bool in_place(const Operand<T>& a) {
    return std::is_same_v<typename T::elem, typename T::opnd> && !a.along_k && a.stride % T::pack == 0;
  }
  static int64_t panel_width(int64_t cols) { return min(kWide, round_up(cols, T::width)); }
  static int64_t strip_width(int64_t cols) { return min(kStrip, round_up(cols, T::width)); }

  // Rows of A that a task takes: what fits the cache, and so few that there are tasks for all threads.
  int64_t group_rows(int64_t units, int64_t panels) const {
    const int64_t granule = transposed_ ? 64 : kPart<T>;
    const int64_t fit = kCachedBytes / (units * int64_t(sizeof(packed))), share = M_ * panels / (4 * threads_);
    const int64_t rows = min(M_, max(min(fit, share) / granule * granule, granule));
    return rows == M_ ? M_ : min(rows, round_up(ceil_div(M_, round_up(ceil_div(M_, rows), int64_t(threads_))), granule));
  }

  struct Slice {
    int64_t n0, cols, k0, units, depth, a_row;
    int64_t a_first;      // row of A that packed ones begin with
    int64_t panel_step;   // from a panel to the one that the same thread probably takes next
    acc* const* sums;     // of panels of all rows; null: there is one slice only
    packed* a[PRODUCTS];  // packed; null: where it lies
    packed* b[PRODUCTS];  // packed panels; null: every task packs its own
  };

  template <class Epilogue>
  void slice(int64_t n0, int64_t cols, int64_t k0, int64_t depth, acc* const* sums, const Epilogue& epilogue) {
    const Groups g = groups(cols, depth);
    Slice s{n0, cols, k0, g.units, depth, packed_row(g.units), 0, kWide, sums[0] ? sums : nullptr, {}, {}};
    shared_arena.reset(shared_bytes(g));
    if (g.share_panels) pack_b(s, g.panels);
    if (g.of_threads) {
      int64_t* taken = shared_arena.take<int64_t>(g.count + 1);
      for (int64_t i = 0; i <= g.count; i++) taken[i] = 0;
      return for_each_task(threads_, threads_, [&](int64_t) { work(s, g, taken, epilogue); });
    }
    s.panel_step = threads_ * kWide;
    if (!g.in_place) pack_a(s, M_, [&](int64_t n, const auto& f) { for_each_task(n, threads_, f); });
    for_each_task(g.panels * g.count, threads_, [&](int64_t task) {
      const FlushSubnormals flush;
      const int64_t panel = task % g.panels, m0 = task / g.panels * g.rows;
      tile_rows(s, panel, m0, min(M_, m0 + g.rows), epilogue);
    });
  }

  // A thread's part of a slice: it takes groups of rows of A, packs them where they must be, and multiplies one panel after the other
  // with them. When no group is left, it helps with the panels of others'. taken: panels of each group, then groups.
  template <class Epilogue>
  void work(Slice s, const Groups& groups, int64_t* taken, const Epilogue& epilogue) const {
    const FlushSubnormals flush;  // the tail of gelu is full of them, and each costs an assist of 100 cycles, in later products too
    const auto next = [](int64_t* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); };
    const auto multiply_group = [&](int64_t g) {
      if (__atomic_load_n(taken + g, __ATOMIC_RELAXED) >= groups.panels) return;
      s.a_first = g * groups.rows;
      const int64_t end = min(M_, s.a_first + groups.rows);
      if (!groups.in_place)
        pack_a(s, end - s.a_first, [](int64_t n, const auto& f) {
          for (int64_t i = 0; i < n; i++) f(i);
        });
      for (int64_t panel; (panel = next(taken + g)) < groups.panels;) tile_rows(s, panel, s.a_first, end, epilogue);
    };
    for (int64_t g; (g = next(taken + groups.count)) < groups.count;) multiply_group(g);
    for (int64_t g = 0; g < groups.count; g++) multiply_group(g);
  }

  // Rows [begin, end) of A times one panel, each tile of them handed to the epilogue.
  template <class Epilogue>
  void tile_rows(const Slice& s, int64_t panel, int64_t begin, int64_t end, const Epilogue& epilogue) const {
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
      for (int t = 0; t < kTiles; t++) tiles[t] = s.sums ? s.sums[t] + n * round_up(M_, kTileRows<T>) + m0 * kWide : own[t];
      for (int i = 0; i < PRODUCTS; i++)
        for (int64_t u = 0; u < s.units; u += kDepth<T>) {
          const bool last = last_slice && i + 1 == PRODUCTS && u + kDepth<T> >= s.units, done = last && !transposed_;
          const Mode mode = s.k0 || u || (SUM && i) ? kAdd : kStore;
          const bool first = m0 == begin;
          for (int64_t r = 0; r < rows; r += kPart<T>) {
            const int64_t part = min(kPart<T>, rows - r);
            const auto ahead = [&](int64_t row, int64_t count) {
              const char* lines = kUnitStep<T> == 1 && first ? fetch_ahead(s, i, n, u, r + row, count, rows) : nullptr;
              if (done) epilogue.fetch(m0 + r + row, count, s.n0 + n, cols);
              else if (last) epilogue.fetch(s.n0 + n + row * cols / part, (row + count) * cols / part - row * cols / part, m0 + r, part);
              return lines;
            };
            multiply(p_[i].a, s, i, m0 + r, part, u, b[i], w, tiles[SUM ? 0 : i] + r * kWide, mode, ahead);
            if (done) finish(tiles, r, m0 + r, part, s.n0 + n, cols, epilogue);
          }
        }
      if (transposed_ && last_slice)
        for (int64_t r = 0; r < rows; r += kWide) {
          for (int t = 0; t < kTiles; t++) transpose_tile(tiles[t] + r * kWide, w, turned[t]);
          finish(turned, 0, s.n0 + n, cols, m0 + r, min(kWide, rows - r), epilogue);
        }
    }
  }

  template <class Epilogue>
  static void finish(acc* const* tiles, int64_t row, int64_t m0, int64_t rows, int64_t n0, int64_t cols, const Epilogue& epilogue) {
    acc* at[kTiles];
    for (int t = 0; t < kTiles; t++) at[t] = tiles[t] + row * kWide;
    epilogue_arena.reset(epilogue.scratch_bytes());
    epilogue(at, kWide, m0, rows, n0, cols, epilogue_arena);
  }

  // Asks for what a thread will read of B next, a share of it before each group of rows of a task's first tile. It comes from the
  // last-level cache or from memory: waiting for it was a tenth of the time. (On tiles asking took a tenth instead: they do not.)
  // Where B is packed, that is the panel's next piece, and at its end the start of the panel that this thread probably takes next; else
  // that panel, to be packed. Returns lines for the micro-kernel to ask for, one with each of its turns, where they are enough: a product
  // then takes 0.98 of the time that it does with all of them before it.
  INLINE const char* fetch_ahead(const Slice& s, int product, int64_t n, int64_t u, int64_t row, int64_t count, int64_t rows) const {
    const int64_t next = n + s.panel_step, depth = min(kDepth<T>, s.units - u);
    if (s.b[0]) {
      const bool last = u + kDepth<T> >= s.units;
      if (last && next >= s.cols) return nullptr;
      const packed* piece = s.b[product] + (last ? next * s.units : n * s.units + (u + depth) * panel_width(s.cols - n));
      constexpr int64_t all = kDepth<T> * kWide;
      const int64_t by_call = depth / kTurn<kMR> * (64 / int64_t(sizeof(packed)));
      if (kTurn<kMR> > 1 && rows / kMR * by_call >= all)
        return row / kMR * by_call < all ? reinterpret_cast<const char*>(piece + row / kMR * by_call) : nullptr;
      const int64_t from = row * all / rows, to = (row + count) * all / rows;
      fetch_rows(piece + from, 0, 1, to - from);
    } else if (next < s.cols) {
      const Operand<T>& b = p_[product].b;
      const int64_t k = s.k0 + u * T::pack, runs = b.along_k ? min(depth * T::pack, s.depth - u * T::pack) : min(kWide, s.cols - next);
      const int64_t from = row * runs / rows, to = (row + count) * runs / rows;
      if (b.along_k) fetch_rows(b.data + (k + from) * b.stride + s.n0 + next, b.stride, to - from, kWide);
      else fetch_rows(b.data + (s.n0 + next + from) * b.stride + k, b.stride, to - from, depth * T::pack);
    }
    return nullptr;
  }

  // tile (+)= rows of A x one panel, over up to kDepth packed elements from u on. Tiles have the row stride kWide whatever the panel's
  // width. ahead(row, count) comes before the products of each group of rows, counted from m0, and may return lines to be asked for.
  template <class Ahead>
  INLINE void multiply(const Operand<T>& a, const Slice& s, int product, int64_t m0, int64_t rows, int64_t u, const packed* b, int64_t w,
                       acc* tile, Mode mode, const Ahead& ahead) const {
    const packed* ready = s.a[product];
    const int64_t row = ready ? s.a_row : a.stride / T::pack, depth = min(kDepth<T>, s.units - u);
    const packed* base = (ready ? ready - s.a_first * row : reinterpret_cast<const packed*>(a.data + s.k0)) + m0 * row + u;
    for (int64_t j = 0; j < w; j += kStrip) {
      const int64_t width = min(kStrip, w - j);
      const packed* strip = b + j * s.units + u * width;
      for (int64_t r = 0; r < rows; r += kRows<T>) {
        const int64_t count = min<int64_t>(kRows<T>, rows - r);
        const char* lines = j ? nullptr : ahead(r, count);
        if constexpr (kUnitStep<T> == 1 && kTurn<kMR> > 1)
          if (lines && count == kMR && width == kWide) {
            const auto asking = mode == kStore ? kernel_asking<T, kStore> : kernel_asking<T, kAdd>;
            asking(depth, base + r * row, row, strip, tile + r * kWide + j, kWide, lines);
            continue;
          }
        pick<T>(count, width, mode)(depth, base + r * row, row, 1, strip, tile + r * kWide + j, kWide, nullptr);
      }
    }
  }

  // kWide rows of `cols` columns, whole vectors of them, become `cols` rows of kWide.
  static void transpose_tile(const acc* tile, int64_t cols, acc* out) {
    for (int64_t c = 0; c < cols; c += T::width)
      for (int64_t r = 0; r < kWide; r += T::width) {
        typename T::vec v[T::width];
        UNROLL for (int i = 0; i < T::width; i++) v[i] = load(tile + (r + i) * kWide + c);
        transpose(v);
        UNROLL for (int i = 0; i < T::width; i++) store(out + (c + i) * kWide + r, v[i]);
      }
  }

  // `depth` of k from k0 on, of columns [n, n + cols), to a panel whose strips are `units` long, from unit u of each on.
  static void pack_panel(const Operand<T>& b, int64_t n, int64_t cols, int64_t k0, int64_t depth, packed* panel, int64_t units, int64_t u) {
    const uint8_t* live = b.live ? b.live + k0 : nullptr;
    for (int64_t j = 0; j < cols; j += kStrip, n += kStrip) {
      const int64_t count = min(kStrip, cols - j);
      packed* dst = panel + j * units + u * strip_width(count);
      if (b.along_k) pack_rows<T>(b.data + k0 * b.stride + n, b.stride, depth, round_up(depth, T::pack), count, 0, dst, live);
      else pack_transposed<T>(b.data + n * b.stride + k0, b.stride, count, depth, dst, nullptr, strip_width(count));
    }
  }

  // A task packs a long piece of one panel where k runs along the rows of memory, else a short one of several panels: either way it reads
  // long runs.
  void pack_b(Slice& s, int64_t panels) const {
    for (int i = 0; i < PRODUCTS; i++) s.b[i] = shared_arena.take<packed>(panels * kWide * s.units);
    const int64_t deep = p_[0].b.along_k ? 32 : kPackedDepth, wide = p_[0].b.along_k ? 16 : 1;
    const int64_t parts = ceil_div(s.units, deep), groups = ceil_div(panels, wide);
    for_each_task(PRODUCTS * groups * parts, threads_, [&](int64_t task) {
      const int i = int(task / (groups * parts));
      const int64_t u = task % parts * deep, k = u * T::pack, depth = min(deep * T::pack, s.depth - k);
      const int64_t first = task / parts % groups * wide;
      for (int64_t panel = first; panel < min(panels, first + wide); panel++) {
        const int64_t n = panel * kWide, cols = min(kWide, s.cols - n);
        pack_panel(p_[i].b, s.n0 + n, cols, s.k0 + k, depth, s.b[i] + n * s.units, s.units, u);
      }
    });
  }

  // Columns [0, n) of `depth` rows become rows of packed elements: dst[column][row], whole vectors of it.
  static void pack_columns(const typename T::elem* src, int64_t stride, int64_t n, int64_t depth, packed* dst, int64_t row) {
    using uvec = typename T::uvec;
    typedef uvec any __attribute__((aligned(4)));
    const auto load = [&](int64_t k, int64_t c) {
      return k < depth ? T::load_units(src + k * stride + c, min<int64_t>(T::width, n - c)) : uvec{};
    };
    for (int64_t u = 0; u * T::pack < depth; u += T::width)
      for (int64_t c = 0; c < n; c += T::width) {
        typename T::vec r[T::width];
        for (int i = 0; i < T::width * T::pack; i++) __builtin_prefetch(src + ((u + T::width) * T::pack + i) * stride + c);
        for (int i = 0; i < T::width; i++) {
          uvec row_unit = load((u + i) * T::pack, c);
          if constexpr (T::pack == 2) {
            uvec unused;
            interleave(row_unit, load((u + i) * T::pack + 1, c), &row_unit, &unused);
          }
          r[i] = (typename T::vec)row_unit;
        }
        transpose(r);
        for (int64_t i = 0; i < min<int64_t>(T::width, n - c); i++) *reinterpret_cast<any*>(dst + (c + i) * row + u) = (uvec)r[i];
      }
  }

  // Packs rows [a_first, a_first + rows). for_each(n, f) calls f(0) ... f(n - 1).
  template <class ForEach>
  void pack_a(Slice& s, int64_t rows, const ForEach& for_each) const {
    constexpr int64_t kStep = 192;  // where k runs along columns, so many neighbours are read of each: 64 were 1 % slower
    packed_arena.reset(packed_bytes(rows, s.units));
    for (int i = 0; i < PRODUCTS; i++) s.a[i] = packed_arena.take<packed>(rows * s.a_row);
    const int64_t parts = ceil_div(rows, kStep);
    for_each(PRODUCTS * parts, [&](int64_t task) {
      const int i = int(task / parts);
      const int64_t r = task % parts * kStep, m = s.a_first + r, count = min(kStep, rows - r);
      const Operand<T>& a = p_[i].a;
      packed* dst = s.a[i] + r * s.a_row;
      if (a.along_k) return pack_columns(a.data + s.k0 * a.stride + m, a.stride, count, s.depth, dst, s.a_row);
      for (int64_t j = 0; j < count; j++) copy_rows<T>(a.data + (m + j) * a.stride + s.k0, a.stride, 1, 1, s.depth, dst + j * s.a_row);
    });
  }

  Product<T> p_[PRODUCTS];
  int64_t M_, N_, K_;
  int threads_;
  bool transposed_ = false;
};

}  // namespace PT_ISA
}  // namespace pt
