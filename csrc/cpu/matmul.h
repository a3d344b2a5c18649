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

constexpr int64_t kTileRows = 192, kDepth = 256;           // rows of a tile; units along k that stay in L1 beside it
constexpr int64_t kPackedUnits = int64_t(4) << 20;         // units packed at a time, about: 16 MB of floats or pairs

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
    const int64_t k_step = k_slice(), n_step = round_up(clamp<int64_t>(kPackedUnits * T::pack / most<int64_t>(1, k_step * PRODUCTS), kWide, N_), kWide);
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
    const int64_t a_panels = ceil_div(M_, kWide), a_units = p_[0].a.along_k ? a_panels * kWide * units : M_ * units;
    size_t bytes = PRODUCTS * Arena::bytes_for<unit>(panels * kWide * units);
    if (!place) bytes += PRODUCTS * Arena::bytes_for<unit>(a_units);
    shared_arena.reset(bytes);
    unit *packed_b[PRODUCTS], *packed_a[PRODUCTS] = {};
    for (int i = 0; i < PRODUCTS; i++) {
      packed_b[i] = shared_arena.take<unit>(panels * kWide * units);
      if (!place) packed_a[i] = shared_arena.take<unit>(a_units);
    }
    for_each_task(PRODUCTS * panels, threads_, [&](int64_t task) {
      const int i = int(task / panels);
      pack_panel(p_[i].b, n0 + task % panels * kWide, cols - task % panels * kWide, k0, depth, packed_b[i] + task % panels * kWide * units);
    });
    if (!place) pack_a(packed_a, k0, depth, units);

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
          multiply(p_[i].a, packed_a[i], place, k0, m0, rows, units, u, least(kDepth, units - u), b + u * w, w, tiles[SUM ? 0 : i], mode);
        }
      }
      epilogue(tiles, kWide, m0, rows, n0 + panel * kWide, width, k0 == 0, local_arena);
    });
  }

  // tile rows = A rows x one panel over `depth` units from u on. Tiles have the row stride kWide whatever the panel's width.
  INLINE void multiply(const Operand<T>& a, const unit* packed, bool place, int64_t k0, int64_t m0, int64_t rows, int64_t units, int64_t u,
                       int64_t depth, const unit* b, int64_t w, acc* tile, Mode mode) const {
    if (a.along_k) {  // panels of kWide rows of A, units along k outside
      for (int64_t r0 = 0; r0 < rows; r0 += kWide)
        for (int64_t r = r0; r < least(rows, r0 + kWide); r += kMR) {
          const int64_t n = least<int64_t>(kMR, least(rows, r0 + kWide) - r), aw = panel_width_along_k(M_ - (m0 + r0));
          pick<T>(n, w, mode)(depth, packed + (m0 + r0) * units + u * aw + (r - r0), 1, aw, b, tile + r * kWide, kWide, nullptr);
        }
      return;
    }
    const int64_t row = place ? a.stride / T::pack : units;
    const unit* base = place ? reinterpret_cast<const unit*>(a.data + k0) : packed;
    for (int64_t r = 0; r < rows; r += kMR)
      pick<T>(least<int64_t>(kMR, rows - r), w, mode)(depth, base + (m0 + r) * row + u, row, 1, b, tile + r * kWide, kWide, nullptr);
  }

  static int64_t panel_width_along_k(int64_t cols) { return least(kWide, round_up(cols, T::width)); }
  static int64_t panel_width(const Operand<T>& b, int64_t cols) { return b.along_k ? panel_width_along_k(cols) : kWide; }

  static void pack_panel(const Operand<T>& b, int64_t n, int64_t cols, int64_t k0, int64_t depth, unit* dst) {
    cols = least(cols, kWide);
    if (b.along_k) pack_rows<T>(b.data + k0 * b.stride + n, b.stride, depth, round_up(depth, T::pack), cols, 0, dst);
    else pack_transposed<T>(b.data + n * b.stride + k0, b.stride, cols, depth, dst);
  }

  void pack_a(unit* const* packed, int64_t k0, int64_t depth, int64_t units) const {
    const bool along_k = p_[0].a.along_k;
    const int64_t step = along_k ? kWide : kTileRows, parts = ceil_div(M_, step);
    for_each_task(PRODUCTS * parts, threads_, [&](int64_t task) {
      const int i = int(task / parts);
      const int64_t m = task % parts * step, rows = least(step, M_ - m);
      if (along_k) pack_panel(p_[i].a, m, rows, k0, depth, packed[i] + m * units);
      else copy_rows<T>(p_[i].a.data + m * p_[i].a.stride + k0, p_[i].a.stride, rows, rows, depth, packed[i] + m * units);
    });
  }

  Product<T> p_[PRODUCTS];
  int64_t M_, N_, K_;
  int threads_;
};

}  // namespace PT_ISA
}  // namespace pt
