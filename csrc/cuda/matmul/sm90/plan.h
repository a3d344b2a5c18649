// SPDX-License-Identifier: Apache-2.0
// Support check of the sm_90a gemms and the order of their tiles. Pure functions of the problem.
#pragma once

#include <initializer_list>

#include "cuda/matmul/problem.h"
#include "cuda/matmul/sm90/config.h"
#include "cuda/tile/order.h"

namespace pt::cuda {

// Orders tiles in groups of some tile rows, a group column by column. Concurrent blocks then share
// rows of A and columns of B, which the L2 cache holds.
struct TileGrid {
  int down, across, group;

  constexpr int tiles() const { return down * across; }
};
struct TileAt {
  int row, column;
};
constexpr TileAt tile_at(const TileGrid& grid, int n) {
  // the group's first row
  const int first = n / (grid.group * grid.across) * grid.group, left = grid.down - first;
  const int height = left < grid.group ? left : grid.group, rest = n - first * grid.across;
  return {first + rest % height, rest / height};
}
constexpr bool makes_each_tile_once(const TileGrid& grid) {
  return each_once(grid.tiles(), [&](int n) {
    return tile_at(grid, n).row * grid.across + tile_at(grid, n).column;
  });
}
static_assert(makes_each_tile_once({5, 3, 2}) && makes_each_tile_once({4, 3, 16}) &&
              makes_each_tile_once({1, 7, 1}));

struct MatmulPlan {
  const char* why_not;  // null: supported
  TileGrid grid;
  int halves;  // halves per tile, each of kHalfColumns; gated, half as many of each product
  int64_t blocks;
};

// 16 rows of wide tiles by the 8 columns that 132 SMs then process: 2048 x 2048, which minimizes
// reads.
constexpr int kGroupedRows = 2048;

// Return true if narrow tiles (one half) should finish sooner than wide tiles: when wide tiles
// leave SMs idle in the last of one or two waves. A narrow tile takes 5/8 of a wide one's time,
// because it has half the gemm and reads a quarter more per column.
constexpr bool narrow_is_faster(int64_t wide, int64_t narrow, int multiprocessors) {
  const auto rounds = [&](int64_t tiles) {
    return (tiles + multiprocessors - 1) / multiprocessors;
  };
  return 5 * rounds(narrow) < 8 * rounds(wide);
}
static_assert(narrow_is_faster(66, 132, 132) && !narrow_is_faster(67, 134, 132) &&
              !narrow_is_faster(132, 264, 132));
static_assert(narrow_is_faster(133, 266, 132) && narrow_is_faster(198, 396, 132) &&
              !narrow_is_faster(199, 398, 132));
static_assert(narrow_is_faster(500, 500, 132) && !narrow_is_faster(300, 600, 132));

// of a matrix: TMA has 32-bit coordinates
constexpr int64_t kLargestSide = (int64_t(1) << 31) - 1024;

inline const char* matmul_why_not(const Product& p) {
  if (p.dtype == DType::f32) return "float32 has no products by warpgroups in true float32";
  if (p.rows < 1 || p.columns < 1 || p.a[0].width() < 1) return "nothing to multiply";
  for (int i = 0; i < 2; ++i) {
    const Matrix &a = p.a[p.gated ? 0 : i], &b = p.b[i];
    if (!a.data != !b.data) return "an operand is missing";
    if (!a.data) continue;
    if (a.height() != p.rows || b.width() != p.columns || a.width() != b.height())
      return "the operands do not go together";
    if (a.transposed != p.a[0].transposed || b.transposed != p.b[0].transposed)
      return "the operands of the two products lie differently";
    for (const Matrix* m : {&a, &b}) {
      if (m->rows > kLargestSide || m->columns > kLargestSide) return "a side of 2^31 or more";
      if (reinterpret_cast<uintptr_t>(m->data) % 16 || m->stride % 8 ||
          (m->rows > 1 && m->stride < 1))
        return "rows of an operand do not begin at multiples of 16 bytes";
    }
  }
  if (p.a[0].transposed && p.b[0].transposed)
    return "both operands have their sums' index in memory last";
  if (p.gated && (p.a[0].transposed || !p.b[0].transposed || !p.b[1].data))
    return "a gated product is of rows with rows";
  return nullptr;
}

inline MatmulPlan plan_matmul(const Product& p, int multiprocessors) {
  MatmulPlan plan{matmul_why_not(p), {}, 0, 0};
  if (plan.why_not) return plan;
  constexpr int kRows = kMatmulTile.rows(), kGroup = kGroupedRows / kRows;
  const int half = kHalfColumns / (p.gated ? 2 : 1);
  const int64_t down = (p.rows + kRows - 1) / kRows, halves = (p.columns + half - 1) / half,
                wide = (halves + 1) / 2;
  if (down * wide >= int64_t(1) << 31) {
    plan.why_not = "more than 2^31 tiles";
    return plan;
  }
  plan.halves = narrow_is_faster(down * wide, down * halves, multiprocessors) ? 1 : 2;
  const int64_t across = plan.halves == 1 ? halves : wide;
  plan.grid = {int(down), int(across), int(down < kGroup ? down : kGroup)};
  plan.blocks = down * across < multiprocessors ? down * across : multiprocessors;
  return plan;
}

// Return true if cuBLAS computes a gemm without a fused op: always, until a GPU run shows that
// these kernels are faster. `ours` (PYTRANSFORMER_CUDA_PATH=sm90, set by tests and comparisons)
// overrides it.
constexpr bool kPlainGemmsAreOurs = false;
inline bool use_cublas(int64_t rows, int64_t columns, int64_t depth, bool ours) {
  const bool fills =
      rows >= kMatmulTile.rows() && columns >= kMatmulTile.columns && depth >= kMatmulTile.step;
  return !ours && !(kPlainGemmsAreOurs && fills);
}

}  // namespace pt::cuda
