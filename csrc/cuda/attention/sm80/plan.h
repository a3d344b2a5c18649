// SPDX-License-Identifier: Apache-2.0
// Choice of the portable kernel for a pass. Pure functions of the problem, also
// pytransformer._C.cuda_sm80_attention_plan.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/attention/sm80/config.h"
#include "cuda/attention/splits.h"

namespace pt::cuda {

// Return the smallest class with room for both head sizes. f32 has two classes, but one in split KV
// and with eight bits; bwd_dbias has one. With eight bits a class of 64 would add a kernel for each
// of four: small heads use class 128.
inline int sm80_class(Pass pass, DType dtype, int head_dim, int value_dim,
                      bool eight_bits = false) {
  const int widest = head_dim > value_dim ? head_dim : value_dim;
  if (pass == Pass::BwdDbias || (dtype == DType::f32 && (pass == Pass::ForwardSplit || eight_bits)))
    return 256;
  if (eight_bits) return widest <= 128 ? 128 : 256;
  if (dtype == DType::f32) return widest <= 64 ? 64 : 256;
  return widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
}

struct Sm80Plan {
  int head_class;
  bool has_score_mod;
  AttentionTile tile;
  int smem_bytes;
};

inline Sm80Plan plan_sm80(Pass pass, DType dtype, int head_dim, int value_dim, bool bounds_only,
                          bool diagonals, bool eight_bits = false) {
  Sm80Plan plan{};
  plan.head_class = sm80_class(pass, dtype, head_dim, value_dim, eight_bits);
  // Bounds-only kernels: in forward for 16 bits; in backward for bf16, where they save registers.
  const bool forward = pass == Pass::Forward || pass == Pass::ForwardSplit;
  const int widest_bounds_only = pass == Pass::Forward            ? 256
                                 : forward || pass == Pass::BwdDq ? 128
                                 : pass == Pass::BwdDkdv          ? 64
                                                                  : 0;
  const bool has_bounds_only = plan.head_class <= widest_bounds_only &&
                               (forward ? dtype != DType::f32 : dtype == DType::bf16);
  plan.has_score_mod = !bounds_only || !has_bounds_only || eight_bits;
  plan.tile = attention_tile(pass, plan.head_class, size_of(dtype), plan.has_score_mod, eight_bits);
  plan.smem_bytes = attention_smem(pass, plan.tile, size_of(dtype), diagonals, eight_bits);
  return plan;
}
inline Sm80Plan plan_sm80(Pass pass, const AttentionProblem& p, bool diagonals) {
  return plan_sm80(pass, p.dtype, p.head_dim, p.value_dim, p.bounds_only() && !p.key_padding.data,
                   diagonals, p.in_eight_bits());
}

// Return true if keys are split over blocks: if the queries of the heads that share a key head fill
// at most two row tiles. Depends only on shapes other than the number of keys, so a sequence gives
// the same bits in any batch. Block masks have one list per head and block of queries, while a row
// tile may need several.
inline bool splits_keys(const AttentionProblem& p) {
  return int64_t(p.group) * p.num_queries <= kMostSplitRows && !p.blocks.queries.offsets;
}
struct SplitPlan {
  int splits = 0, row_tiles = 0;  // 0: not split
  Sm80Plan kernel{};
  // Rows over all sequences and heads: the number of stats and values per split.
  int64_t rows = 0;

  bool merges() const { return splits > 1; }
  // size of the workspace
  int64_t floats(int value_dim) const { return merges() ? rows * splits * (value_dim + 2) : 0; }
};
inline SplitPlan plan_split(const AttentionProblem& p) {
  SplitPlan plan;
  if (!splits_keys(p)) return plan;
  plan.kernel = plan_sm80(Pass::ForwardSplit, p, false);
  const AttentionTile& tile = plan.kernel.tile;
  const int before = int(p.key_start % 32);
  plan.row_tiles = (p.group * p.num_queries + tile.rows() - 1) / tile.rows();
  plan.splits = most_splits((before + p.num_keys + tile.columns - 1) / tile.columns, tile.columns,
                            plan.row_tiles);
  plan.rows = int64_t(p.sequences) * p.heads * p.num_queries;
  return plan;
}

inline SplitGrid split_grid(const AttentionProblem& p, const SplitPlan& plan) {
  return {plan.row_tiles, Divisor(plan.splits), Divisor(p.heads / p.group), Divisor(p.group)};
}

// Minimum block of a block mask, both powers of two, so that a tile of any pass lies within one
// block. With two stages, even and odd tiles alternate, so a block covers two tiles.
struct LeastBlock {
  int queries, keys;
};
inline LeastBlock least_block(DType dtype, int head_dim, int value_dim) {
  LeastBlock least{32, 32};
  for (Pass pass : {Pass::Forward, Pass::BwdDq, Pass::BwdDkdv, Pass::BwdDbias}) {
    const AttentionTile t = plan_sm80(pass, dtype, head_dim, value_dim, false, false).tile;
    const bool by_keys = pass == Pass::BwdDkdv;
    int &of_rows = by_keys ? least.keys : least.queries,
        &of_columns = by_keys ? least.queries : least.keys;
    if (of_rows < t.rows()) of_rows = t.rows();
    if (of_columns < t.columns * t.stages) of_columns = t.columns * t.stages;
  }
  return least;
}

// Return the number of blocks in one flat dimension, which may exceed 65,535.
inline unsigned attention_blocks(int64_t sequences, int64_t heads, int64_t tiles) {
  const int64_t blocks = sequences * heads * tiles;
  if (blocks >= int64_t(1) << 31)
    throw std::runtime_error("attention: " + std::to_string(blocks) +
                             " blocks, at most 2^31 - 1 are possible");
  return unsigned(blocks);
}

// Return the grid for recomputation: at most two blocks per SM, because few blocks have work.
inline unsigned recompute_blocks(const Recompute& recompute, unsigned all, int multiprocessors) {
  const unsigned few = 2 * unsigned(multiprocessors);
  return recompute.flags && all > few ? few : all;
}

inline int64_t tiles_of(int64_t rows, const AttentionTile& t) {
  return (rows + t.rows() - 1) / t.rows();
}

}  // namespace pt::cuda
