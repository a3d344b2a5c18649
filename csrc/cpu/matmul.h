// Matrix products of whole matrices on the micro-kernel, with an epilogue on each tile of the result.
//
// C = A B, or a sum of such products, or several C over the same rows and columns at once. B is packed once, by all threads, in
// panels of kPanel columns; A is read where it lies if it holds units as the micro-kernel wants them, else packed too. A tile of
// kTileRows x kPanel is accumulated in cache by one task in a fixed order, so results depend on neither threads nor timing.
#pragma once

#include "arena.h"
#include "gemm.h"
#include "pack.h"
#include "parallel.h"

namespace pt {
namespace PT_ISA {

inline thread_local Arena sums_arena;  // of the calling thread: results in acc that are rounded at the end

// One operand. A: element (m, k) at data[m * stride + k], along_k: data[k * stride + m].
//              B: element (k, n) at data[n * stride + k], along_k: data[k * stride + n].
template <class T>
struct Operand {
  const typename T::elem* data;
  int64_t stride;
  bool along_k;  // rows of the matrix run along k
};
template <class T>
struct Product {
  Operand<T> a, b;
};

constexpr int64_t kTileRows = 192, kDepth = 256;    // rows of a tile; units along k that stay in L1 beside it
constexpr int64_t kPackedUnits = int64_t(4) << 20;  // units packed at a time, about: 16 MB of floats or pairs

template <class T, int PRODUCTS, bool SUM>
class Matmul {
  using acc = typename T::acc;
  using unit = typename T::unit;
  static constexpr int kTiles = SUM ? 1 : PRODUCTS;
  static constexpr int64_t kWide = kPanel<T>;

 public:
  // M x K times K x N. SUM: the products are added into one tile; else each has its own.
  Matmul(const Product<T> (&products)[PRODUCTS], int64_t M, int64_t N, int64_t K, int threads) : M_(M), N_(N), K_(K), threads_(threads) {
    for (int i = 0; i < PRODUCTS; i++) p_[i] = products[i];
  }

  // How often the epilogue meets each tile: sums over many rows (A along k) are sliced in k.
  int64_t slices() const { return ceil_div(K_, k_slice()); }

  // epilogue(tiles, ld, m0, rows, n0, cols, first): tiles[t] + r * ld is row m0 + r; first: in the first slice of k.
  template <class Epilogue>
  void run(const Epilogue& epilogue) {
    const int64_t k_step = k_slice(),
                  n_step = round_up(clamp<int64_t>(kPackedUnits * T::pack / most<int64_t>(1, k_step * PRODUCTS), kWide, N_), kWide);
    for (int64_t n = 0; n < N_; n += n_step)
      for (int64_t k = 0; k < K_; k += k_step) slice(n, least(n_step, N_ - n), k, least(k_step, K_ - k), epilogue);
  }

 private:
  int64_t k_slice() const { return p_[0].a.along_k ? least<int64_t>(K_, 2048) : K_; }

  // Whether A's rows can be read where they lie.
  static bool in_place(const Operand<T>& a) {
    return std::is_same_v<typename T::elem, typename T::opnd> && !a.along_k && a.stride % T::pack == 0;
  }

  template <class Epilogue>
  void slice(int64_t n0, int64_t cols, int64_t k0, int64_t depth, const Epilogue& epilogue) {
    const int64_t units = ceil_div(depth, T::pack), panels = ceil_div(cols, kWide), blocks = ceil_div(M_, kTileRows);
    const bool place = in_place(p_[0].a) && depth % T::pack == 0;
    const int64_t a_row = round_up(units, T::width) + 64 / int64_t(sizeof(unit));  // an odd number of cache lines, or nearly
    size_t bytes = PRODUCTS * Arena::bytes_for<unit>(panels * kWide * units);
    if (!place) bytes += PRODUCTS * Arena::bytes_for<unit>(M_ * a_row);
    shared_arena.reset(bytes);
    unit *packed_b[PRODUCTS], *packed_a[PRODUCTS] = {};
    for (int i = 0; i < PRODUCTS; i++) {
      packed_b[i] = shared_arena.take<unit>(panels * kWide * units);
      if (!place) packed_a[i] = shared_arena.take<unit>(M_ * a_row);
    }
    for_each_task(PRODUCTS * panels, threads_, [&](int64_t task) {
      const int i = int(task / panels);
      pack_panel(p_[i].b, n0 + task % panels * kWide, cols - task % panels * kWide, k0, depth, packed_b[i] + task % panels * kWide * units);
    });
    if (!place) pack_a(packed_a, a_row, k0, depth);

    for_each_task(panels * blocks, threads_, [&](int64_t task) {
      const int64_t panel = task / blocks, m0 = task % blocks * kTileRows, rows = least(kTileRows, M_ - m0);
      const int64_t width = least(kWide, cols - panel * kWide);
      local_arena.reset(kTiles * Arena::bytes_for<acc>(kTileRows * kWide) + epilogue.scratch_bytes());
      acc* tiles[kTiles];
      for (int t = 0; t < kTiles; t++) tiles[t] = local_arena.take<acc>(kTileRows * kWide);
      for (int i = 0; i < PRODUCTS; i++) {
        const int64_t w = panel_width(p_[i].b, width);
        const unit* b = packed_b[i] + panel * kWide * units;
        for (int64_t u = 0; u < units; u += kDepth) {
          const Mode mode = u || (SUM && i) ? kAdd : kStore;
          multiply(p_[i].a, packed_a[i], a_row, k0, m0, rows, u, least(kDepth, units - u), b + u * w, w, tiles[SUM ? 0 : i], mode);
        }
      }
      epilogue(tiles, kWide, m0, rows, n0 + panel * kWide, width, k0 == 0, local_arena);
    });
  }

  // tile (+)= rows of A x one panel, over `depth` units from u on. Tiles have the row stride kWide whatever the panel's width.
  INLINE void multiply(const Operand<T>& a, const unit* packed, int64_t packed_row, int64_t k0, int64_t m0, int64_t rows, int64_t u,
                       int64_t depth, const unit* b, int64_t w, acc* tile, Mode mode) const {
    const int64_t row = packed ? packed_row : a.stride / T::pack;
    const unit* base = (packed ? packed : reinterpret_cast<const unit*>(a.data + k0)) + m0 * row + u;
    for (int64_t r = 0; r < rows; r += kRows<T>)
      pick<T>(least<int64_t>(kRows<T>, rows - r), w, mode)(depth, base + r * row, row, 1, b, tile + r * kWide, kWide, nullptr);
  }

  static int64_t panel_width(const Operand<T>& b, int64_t cols) { return b.along_k ? least(kWide, round_up(cols, T::width)) : kWide; }

  static void pack_panel(const Operand<T>& b, int64_t n, int64_t cols, int64_t k0, int64_t depth, unit* dst) {
    cols = least(cols, kWide);
    if (b.along_k) pack_rows<T>(b.data + k0 * b.stride + n, b.stride, depth, round_up(depth, T::pack), cols, 0, dst);
    else pack_transposed<T>(b.data + n * b.stride + k0, b.stride, cols, depth, dst);
  }

  // Columns [0, n) of `depth` rows become rows of units: dst[column][row], whole vectors of it.
  static void pack_columns(const typename T::elem* src, int64_t stride, int64_t n, int64_t depth, unit* dst, int64_t row) {
    using uvec = typename T::uvec;
    typedef uvec any __attribute__((aligned(4)));
    const auto load = [&](int64_t k, int64_t c) {
      return k < depth ? T::load_units(src + k * stride + c, least<int64_t>(T::width, n - c)) : uvec{};
    };
    for (int64_t c = 0; c < n; c += T::width)
      for (int64_t u = 0; u * T::pack < depth; u += T::width) {
        typename T::vec r[T::width];
        for (int i = 0; i < T::width; i++) {
          uvec row_unit = load((u + i) * T::pack, c);
          if constexpr (T::pack == 2) {
            uvec unused;
            interleave(row_unit, load((u + i) * T::pack + 1, c), &row_unit, &unused);
          }
          r[i] = (typename T::vec)row_unit;
        }
        transpose(r);
        for (int64_t i = 0; i < least<int64_t>(T::width, n - c); i++) *reinterpret_cast<any*>(dst + (c + i) * row + u) = (uvec)r[i];
      }
  }

  void pack_a(unit* const* packed, int64_t row, int64_t k0, int64_t depth) const {
    constexpr int64_t kStep = 64;
    const int64_t parts = ceil_div(M_, kStep);
    for_each_task(PRODUCTS * parts, threads_, [&](int64_t task) {
      const int i = int(task / parts);
      const int64_t m = task % parts * kStep, rows = least(kStep, M_ - m);
      const Operand<T>& a = p_[i].a;
      if (a.along_k) return pack_columns(a.data + k0 * a.stride + m, a.stride, rows, depth, packed[i] + m * row, row);
      for (int64_t r = m; r < m + rows; r++) copy_rows<T>(a.data + r * a.stride + k0, a.stride, 1, 1, depth, packed[i] + r * row);
    });
  }

  Product<T> p_[PRODUCTS];
  int64_t M_, N_, K_;
  int threads_;
};

}  // namespace PT_ISA
}  // namespace pt
