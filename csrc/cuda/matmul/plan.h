// Which products the kernels for sm_90a take, and in what order their blocks go through the tiles: pure functions of the problem.
#pragma once

#include <initializer_list>

#include "cuda/matmul/config.h"
#include "cuda/matmul/problem.h"
#include "cuda/tile/order.h"

namespace pt::cuda {

// Tiles in groups of some rows of tiles, a group column by column: blocks that run at once share rows of A and columns of B, which the L2
// cache then holds.
struct TileGrid {
  int down, across, group;

  constexpr int tiles() const { return down * across; }
};
struct TileAt {
  int row, column;
};
constexpr TileAt tile_at(const TileGrid& grid, int n) {
  const int first = n / (grid.group * grid.across) * grid.group, left = grid.down - first;  // the group's first row
  const int height = left < grid.group ? left : grid.group, rest = n - first * grid.across;
  return {first + rest % height, rest / height};
}
constexpr bool makes_each_tile_once(const TileGrid& grid) {
  return each_once(grid.tiles(), [&](int n) { return tile_at(grid, n).row * grid.across + tile_at(grid, n).column; });
}
static_assert(makes_each_tile_once({5, 3, 2}) && makes_each_tile_once({4, 3, 16}) && makes_each_tile_once({1, 7, 1}));

struct MatmulPlan {
  const char* why_not;  // null: the kernels take the problem
  TileGrid grid;
  int64_t blocks;
};

// 16 rows of tiles by the 8 columns that are then on 132 multiprocessors: 2048 x 2048, of which least must be read.
constexpr int kGroupedRows = 16;

inline const char* matmul_why_not(const Product& p) {
  if (p.dtype == DType::f32) return "float32 has no products by warpgroups in true float32";
  if (p.rows < 1 || p.columns < 1 || p.a[0].width() < 1) return "nothing to multiply";
  constexpr int64_t kMost = (int64_t(1) << 31) - 1024;  // TMA's coordinates have 32 bits
  for (int i = 0; i < 2; ++i) {
    const Matrix &a = p.a[p.gated ? 0 : i], &b = p.b[i];
    if (!a.data != !b.data) return "an operand is missing";
    if (!a.data) continue;
    if (a.height() != p.rows || b.width() != p.columns || a.width() != b.height()) return "the operands do not go together";
    if (a.transposed != p.a[0].transposed || b.transposed != p.b[0].transposed) return "the operands of the two products lie differently";
    for (const Matrix* m : {&a, &b}) {
      if (m->rows > kMost || m->columns > kMost) return "a side of 2^31 or more";
      if (reinterpret_cast<uintptr_t>(m->data) % 16 || m->stride % 8 || (m->rows > 1 && m->stride < 1))
        return "rows of an operand do not begin at multiples of 16 bytes";
    }
  }
  if (p.a[0].transposed && p.b[0].transposed) return "both operands have their sums' index in memory last";
  if (p.gated && (p.a[0].transposed || !p.b[0].transposed || !p.b[1].data)) return "a gated product is of rows with rows";
  return nullptr;
}

inline MatmulPlan plan_matmul(const Product& p, int multiprocessors) {
  MatmulPlan plan{matmul_why_not(p), {}, 0};
  if (plan.why_not) return plan;
  const int columns = kMatmulTile.columns / (p.gated ? 2 : 1), rows = kMatmulTile.rows();
  const int64_t down = (p.rows + rows - 1) / rows, across = (p.columns + columns - 1) / columns;
  if (down * across >= int64_t(1) << 31) {
    plan.why_not = "more than 2^31 tiles";
    return plan;
  }
  plan.grid = {int(down), int(across), int(down < kGroupedRows ? down : kGroupedRows)};
  plan.blocks = down * across < multiprocessors ? down * across : multiprocessors;
  return plan;
}

// Whether a product with nothing behind it is left to the library. Until a run on a GPU shows these kernels ahead of it: always, but where
// `ours` are asked for (PYTRANSFORMER_CUDA_PATH=sm90, which tests and comparisons set).
constexpr bool kPlainProductsAreOurs = false;
inline bool plain_by_library(int64_t rows, int64_t columns, int64_t depth, bool ours) {
  const bool fills = rows >= kMatmulTile.rows() && columns >= kMatmulTile.columns && depth >= kMatmulTile.step;
  return !ours && !(kPlainProductsAreOurs && fills);
}

}  // namespace pt::cuda
