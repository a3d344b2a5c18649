// SPDX-License-Identifier: Apache-2.0
// Plan of an attention call: per pass the sm_90a or the portable kernels, which results are
// recomputed, and scratch sizes. Pure functions of the problem and the GPU, computed once per call:
// the binding allocates by the plan, the launchers follow it, and explain shows it (raw op
// attention_plan).
//
// In order: split KV, the portable kernels (pytransformer._C.cuda_sm80_attention_plan), the sm_90a
// kernels with the order of their tiles, and the plans of a forward and of a backward call.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "cuda/attention/params.h"
#include "cuda/attention/sm80/config.h"
#include "cuda/attention/sm90/config.h"
#include "cuda/tile/order.h"

namespace pt::cuda {

// kSplitKeys is a split's minimum number of keys per tile of 16 rows: in bf16, with equal head
// sizes, its partials are then 1/16 of the keys and values that it reads. The rest are upper
// limits.
constexpr int kSplitKeys = 256, kMostSplits = 64, kMostSplitRows = 32;

// Divides numbers below 2^31 in three instructions; a division takes some 20. Granlund and
// Montgomery, "Division by invariant integers using multiplication" (1994).
struct Divisor {
  uint32_t by, factor, shift = 0;

  constexpr explicit Divisor(int of) : by(of > 1 ? uint32_t(of) : 1), factor(0) {
    while ((uint64_t(1) << shift) < by) ++shift;
    factor = uint32_t((((uint64_t(1) << shift) - by) << 32) / by + 1);
  }
  constexpr int quotient(int n) const {
    return int((uint32_t(uint64_t(uint32_t(n)) * factor >> 32) + uint32_t(n)) >> shift);
  }
};
static_assert(Divisor(1).quotient(0x7fffffff) == 0x7fffffff &&
              Divisor(7).quotient(0x7fffffff) == 0x7fffffff / 7 && Divisor(7).quotient(48) == 6 &&
              Divisor(64).quotient(127) == 1);

// Numbering of a launch's blocks; row_tiles is 1 or 2.
struct SplitGrid {
  int row_tiles;
  Divisor splits, key_heads, group;
};

// Return log2 of the number of KV tiles per split, which doubles until there are at most
// kMostSplits. Depends only on the sequence's visible tiles, not on the rest of the batch.
constexpr int log2_tiles_of_split(int tiles, int columns, int row_tiles) {
  int log2 = row_tiles - 1;
  for (int n = kSplitKeys / columns; n > 1; n /= 2) ++log2;
  while (tiles > kMostSplits << log2) ++log2;
  return log2;
}
// Return the maximum number of splits of a sequence with up to `tiles` visible tiles; a sequence
// with all of them may have fewer.
constexpr int most_splits(int tiles, int columns, int row_tiles) {
  const int of_split = kSplitKeys / columns * row_tiles, most = (tiles + of_split - 1) / of_split;
  return most < kMostSplits ? most : kMostSplits;
}
static_assert(log2_tiles_of_split(512, 32, 1) == 3 && log2_tiles_of_split(513, 32, 1) == 4 &&
              log2_tiles_of_split(512, 32, 2) == 4 && most_splits(513, 32, 1) == 64);

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
  int64_t counters = 0;  // row tiles over all sequences and key heads

  bool merges() const { return splits > 1; }
  // size of the workspace: statistics and counters, and values
  int64_t stats_floats() const { return merges() ? 2 * (rows * splits + counters) : 0; }
  int64_t values_floats(int value_dim) const { return merges() ? rows * splits * value_dim : 0; }
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
  plan.counters = int64_t(p.sequences) * (p.heads / p.group) * plan.row_tiles;
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

// Tiles in sections of heads whose keys and values fit in the L2 cache. A section runs from the
// last tile, which sees the most keys with causality, to the first.
struct TileOrder {
  int tiles, heads, section;  // heads over all sequences
  // Persistent blocks take pairs: a head's first and last tile, then the second and second last,
  // and so on. `tiles` is even.
  bool paired = false;
};
// Return item n: sections of heads; within a section, tiles from last to first, and for each tile
// its heads.
constexpr TilePlace place_of(const TileOrder& order, int n) {
  // the section's first head
  const int first = n / (order.section * order.tiles) * order.section, left = order.heads - first;
  const int heads = left < order.section ? left : order.section, rest = n - first * order.tiles;
  return {first + rest % heads, order.tiles - 1 - rest / heads};
}
constexpr bool covers_each_tile_once(const TileOrder& order) {
  return each_once(order.heads * order.tiles, [&](int n) {
    return place_of(order, n).head * order.tiles + place_of(order, n).tile;
  });
}
// Return the number of the i-th item of paired tiles.
constexpr int number_in_pairs(const TileOrder& order, int i) {
  const int pairs = order.tiles / 2, head = i / 2 / pairs, pair = i / 2 % pairs;
  return head * order.tiles + (i % 2 ? order.tiles - 1 - pair : pair);
}
static_assert(each_once(3 * 6, [](int i) { return number_in_pairs({6, 3, 1, true}, i); }));
// Return the number of the i-th item in snake order: sections alternate in direction, and the last
// one runs from the last tile to the first. Durations then change without a jump between sections.
constexpr int number_in_snake(const TileOrder& order, int i) {
  const int of_section = order.section * order.tiles, all = order.heads * order.tiles,
            section = i / of_section, first = section * of_section,
            end = first + of_section < all ? first + of_section : all;
  return ((order.heads - 1) / order.section - section) % 2 ? first + end - 1 - i : i;
}
// Return the item after item i of a block in snake order: rounds of one item per block alternate in
// direction, so a block with a long tile gets a short one.
constexpr int next_in_snake(int i, int blocks) { return i + 2 * (blocks - i % blocks) - 1; }
// Return the i-th item over all blocks, each with all its items; -1 past the last.
constexpr int item_of_snake(const TileOrder& order, int blocks, int i) {
  for (int block = 0; block < blocks; ++block)
    for (int n = block; n < order.heads * order.tiles; n = next_in_snake(n, blocks))
      if (i-- == 0) return number_in_snake(order, n);
  return -1;
}
constexpr bool snake_covers(const TileOrder& order, int blocks) {
  const int all = order.heads * order.tiles;
  return each_once(all, [&](int i) { return item_of_snake(order, blocks, i); }) &&
         item_of_snake(order, blocks, all) < 0;
}
static_assert(snake_covers({3, 7, 3}, 4) && snake_covers({3, 4, 2}, 4) &&
              snake_covers({5, 2, 1}, 3));
static_assert(snake_covers({4, 3, 3}, 12) && snake_covers({4, 3, 1}, 1));
// Return the time of a block's tiles if tile t takes t + 1. Blocks take equally long.
constexpr int snake_length(const TileOrder& order, int blocks, int block) {
  int sum = 0;
  for (int n = block; n < order.heads * order.tiles; n = next_in_snake(n, blocks))
    sum += place_of(order, number_in_snake(order, n)).tile + 1;
  return sum;
}
static_assert(snake_length({8, 6, 3}, 6, 0) == 36 && snake_length({8, 6, 3}, 6, 2) == 36 &&
              snake_length({8, 6, 3}, 6, 5) == 36);
static_assert(covers_each_tile_once({3, 7, 1}) && covers_each_tile_once({3, 7, 3}) &&
              covers_each_tile_once({2, 5, 5}));

struct Sm90Plan {
  const char* why_not;  // null: supported
  int head_class;
  bool has_score_mod, elementwise_mask;  // see Hopper in config.h
  Sm90Tile tile;
  uint32_t smem_bytes;
  TileOrder order;
  int64_t blocks;
  int dense_tiles = 0;  // forward: loaded by TMA: 1 the mask, 2 the bias, 0 none

  bool bounds_only() const { return !has_score_mod && !elementwise_mask; }
};

// Return the head size class of query and value, 0 for none. TMA writes zeros to panels of 64
// columns that a tensor does not have, without reading memory.
inline int sm90_class(const AttentionProblem& p) {
  const int widest = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  return widest <= 64 ? 64 : widest <= 128 ? 128 : widest <= 256 ? 256 : 0;
}

constexpr int64_t kMaxMapRows = (int64_t(1) << 31) - 1024;  // TMA has 32-bit coordinates

inline const char* sm90_why_not(const AttentionProblem& p, std::initializer_list<const In*> inputs,
                                std::initializer_list<const Out*> outputs) {
  if (p.dtype == DType::f32) return "float32 has no products by warpgroups in true float32";
  if (!sm90_class(p)) return "head sizes to 256";
  if (p.in_eight_bits()) return "keys and values in eight bits are widened by the portable kernels";
  if (p.pages.table)
    return "keys in pages, whose rows TMA would have to fetch page by page, are read by the "
           "portable kernels";
  if (p.global_keys)
    return "with global_keys there are two runs of tiles of keys, which the portable kernels walk";
  const auto aligned = [](const void* data, const HeadRows& s) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && s.batch % 8 == 0 && s.head % 8 == 0 &&
           s.row % 8 == 0;
  };
  // TMA requires nonzero strides in dimensions longer than one.
  const auto moves = [](const HeadRows& s, int64_t sequences, int64_t heads, int64_t rows) {
    return (sequences == 1 || s.batch) && (heads == 1 || s.head) && (rows == 1 || s.row);
  };
  const bool packed = p.cu_queries;
  if (packed && (p.total_queries > kMaxMapRows || p.total_keys > kMaxMapRows))
    return "more than 2^31 packed rows";
  for (const In* t : inputs) {
    const bool keys = t == &p.k || t == &p.v;
    const int64_t rows = packed ? (keys ? p.total_keys : p.total_queries)
                         : keys ? p.num_keys
                                : p.num_queries;
    if (!aligned(t->data, t->stride)) return "an input is not aligned to 16 bytes";
    if (!moves(t->stride, packed ? 1 : p.sequences, keys ? p.heads / p.group : p.heads, rows))
      return "an input is expanded";
  }
  for (const Out* t : outputs)
    if (t->data && (t->columns % 8 || !aligned(t->data, t->stride)))
      return "a result is not aligned to 16 bytes";
  return nullptr;
}

// Return the number of heads per section: as many as the L2 cache holds keys and values for, but at
// least `least`. Sections have equal sizes: a small one at the end would start its longest tiles
// when other SMs are idle.
inline int section_of(const AttentionProblem& p, int64_t heads, int sharing, int64_t least = 1) {
  constexpr int64_t kSectionBytes = 32 << 20;
  const int64_t fit =
      kSectionBytes * sharing / (int64_t(p.num_keys) * (p.head_dim + p.value_dim) * 2);
  const int64_t wanted = fit < least ? least : fit, most = wanted < heads ? wanted : heads,
                sections = (heads + most - 1) / most;
  return int((heads + sections - 1) / sections);
}

// Return true if causality alone bounds the keys of each tile and no diagonal ends at the last key:
// each tile then sees equally many more keys.
inline bool rises_evenly(const AttentionProblem& p) {
  const int64_t first = p.query_start - p.key_start,
                bottom_right = int64_t(p.num_keys) - p.num_queries;
  // keys before the first query's diagonal
  const int64_t seen = p.bottom_right ? bottom_right : first;
  return p.causal && !p.prefix_lengths && seen >= 0 && seen <= bottom_right;
}

// How blocks take tiles of unequal duration: one each, started in order as blocks end; or
// persistent blocks take pairs of equal duration, or tiles in snake order.
enum class Uneven { apart, in_pairs, in_snake };

// Snake order is static, so it needs tiles whose keys the sizes give. Simulated with 132
// multiprocessors and up to 8,192 keys, it takes at least 3 % less time than blocks of one tile,
// whose start and end take 2.5 us, if sections have 48 heads. Sections of that size read about 1
// TB/s beyond the L2 cache (counted).
constexpr int64_t kSnakeKeys = 8192, kSnakeHeads = 48;

// Tiles of equal duration go to persistent blocks, which load the next tile's operands during this
// tile's epilogue. Pairs do if their number is near a multiple of the blocks.
inline void order_tiles(Sm90Plan& plan, const AttentionProblem& p, int64_t tiles, int64_t heads,
                        int sharing, int multiprocessors, Uneven uneven = Uneven::apart) {
  const bool sized = !p.blocks.queries.offsets && !p.key_lengths && !p.query_lengths &&
                     !p.cu_keys && !p.key_padding.data;
  const bool unmasked = sized && p.left == kUnbounded && p.right == kUnbounded;
  const bool even = unmasked && !p.causal;
  const int64_t pairs = tiles / 2 * heads, rounds = (pairs + multiprocessors - 1) / multiprocessors;
  const bool paired = uneven == Uneven::in_pairs && unmasked && rises_evenly(p) && tiles % 2 == 0 &&
                      pairs > multiprocessors && 10 * pairs >= 9 * rounds * multiprocessors;
  const int64_t window = int64_t(p.left) + (p.causal ? 0 : p.right);
  const bool snake = uneven == Uneven::in_snake && !even && sized && !p.prefix_lengths &&
                     (p.num_keys <= kSnakeKeys || window <= kSnakeKeys);
  // Limit, so the number of a block's next tile has 31 bits, even past the end.
  if (tiles * heads >= int64_t(1) << 30) plan.why_not = "more than 2^30 tiles";
  plan.order = {int(tiles), int(heads),
                even || paired ? 1 : section_of(p, heads, sharing, snake ? kSnakeHeads : 1),
                paired};
  plan.blocks = (even || paired || snake) && tiles * heads > multiprocessors ? multiprocessors
                                                                             : tiles * heads;
}

// Return true if three consumers finish sooner than two: a row takes 5/6 of the time, but rows past
// the last query and idle SMs are wasted. For packed sequences, uses the mean length. Paired: two
// consumers would take pairs, whose rounds are full, and diagonals waste less with fewer rows. The
// limits are counted from times with 4,096 keys (H100).
inline bool three_consumers_are_faster(const AttentionProblem& p, int multiprocessors,
                                       bool paired) {
  const int64_t queries =
      p.cu_queries && p.sequences ? p.total_queries / p.sequences : p.num_queries;
  const auto tiles = [&](const Sm90Tile& tile) {
    return (queries + tile.rows() - 1) / tile.rows() * p.sequences * p.heads;
  };
  const auto time = [&](const Sm90Tile& tile, int of_a_row) {
    return (tiles(tile) + multiprocessors - 1) / multiprocessors * tile.rows() * of_a_row;
  };
  const Sm90Tile three = sm90_three_consumers();
  if (paired && (p.num_keys < 3072 || tiles(three) < 3 * multiprocessors)) return false;
  return time(three, 5) <= time(sm90_forward_tile(64), 6);
}

// Return true if forward's kernels with an elementwise mask read dropout as bits, like the mask.
// Without a mask it draws each pair once: 0.22 ms in place of 0.26 including the bits (H100, 2 x 16
// heads of 64 columns, 2,048 keys).
inline bool dropout_as_mask(const AttentionProblem& p) {
  return p.draws_once() && !p.modifies_scores() && sm90_class(p) <= 128;
}

constexpr bool draws_once_for(int heads, int length) {
  AttentionProblem p{};
  p.drop_threshold = 1, p.sequences = 1, p.heads = heads, p.num_queries = p.num_keys = length;
  return p.draws_once();
}
static_assert(draws_once_for(16, 8192) && !draws_once_for(16, 8193) && !draws_once_for(17, 8192));

// Return true if TMA can load a floating-point mask or bias. A row for all queries stays in L1.
inline bool tiled(const Dense& d) {
  return d.data && (d.type == DenseType::bf16 || d.type == DenseType::f16) && d.key == 1 &&
         d.query && reinterpret_cast<uintptr_t>(d.data) % 16 == 0 && d.query % 8 == 0 &&
         d.head % 8 == 0 && d.batch % 8 == 0;
}

inline Sm90Plan plan_sm90_forward(const AttentionForward& f, int multiprocessors) {
  const AttentionProblem& p = f.p;
  Sm90Plan plan{sm90_why_not(p, {&p.q, &p.k, &p.v}, {&f.out}),
                sm90_class(p),
                p.has_score_mod(),
                p.elementwise_mask(),
                {},
                0,
                {},
                0};
  if (plan.elementwise_mask && dropout_as_mask(p)) plan.has_score_mod = false;
  plan.tile = sm90_forward_tile(plan.head_class, plan.bounds_only());
  if (p.blocks.queries.offsets && (1 << p.blocks.queries.row_bits < plan.tile.rows() ||
                                   1 << p.blocks.queries.column_bits < plan.tile.streamed))
    plan.why_not = "a tile of theirs does not lie within one block of the mask";
  if (p.blocks.bits && (reinterpret_cast<uintptr_t>(p.blocks.bits) % 16 ||
                        1 << p.blocks.queries.column_bits < PairBits::kUnitKeys ||
                        int64_t(p.blocks.places) << p.blocks.queries.row_bits > kMaxMapRows))
    plan.why_not =
        "rows of the block mask's bits are no multiples of 16 bytes (blocks of 64 keys), or are "
        "2^31";
  if (!f.out.data) plan.why_not = "statistics alone are wanted";
  if (plan.why_not) return plan;
  const bool has_bits = p.blocks.bits || (p.mask.data && p.mask.type == DenseType::boolean),
             holds_both = sm90_holds_bits_and_dense(plan.tile);
  if (!has_bits || holds_both) plan.dense_tiles = tiled(p.mask) ? 1 : tiled(p.bias) ? 2 : 0;
  const auto order = [&](const Sm90Tile& tile, Uneven uneven) {
    const int64_t tiles = (p.num_queries + tile.rows() - 1) / tile.rows();
    plan.tile = tile;
    plan.smem_bytes = sm90_forward_smem(
        tile, plan.elementwise_mask && (holds_both || !plan.dense_tiles), plan.dense_tiles);
    order_tiles(plan, p, tiles, int64_t(p.sequences) * p.heads, p.group, multiprocessors, uneven);
  };
  order(plan.tile, Uneven::in_pairs);
  if (plan.head_class == 64 && plan.bounds_only() &&
      three_consumers_are_faster(p, multiprocessors, plan.order.paired))
    order(sm90_three_consumers(), Uneven::in_snake);
  return plan;
}

constexpr const char* kListsInBackward =
    "block masks are lists that forward and the portable kernels walk";

// Return true if backward's producers can copy rows of a floating-point mask or bias, which start
// anywhere, in aligned 16-byte pieces.
inline bool copied(const Dense& d) {
  return d.type != DenseType::f64 && d.key == 1 && reinterpret_cast<uintptr_t>(d.data) % 16 == 0;
}

// Return true if boolean masks, segments and dropout, if any, can be bits in lane order. Broadcast
// masks and segments take more memory as bits than as they are.
inline bool fits_lane_bits(const AttentionProblem& p) {
  const int64_t of_head = PairBits::lane_words(p.num_queries, p.num_keys) * 4,
                heads = int64_t(p.query_segments || p.mask.batch ? p.sequences : 1) *
                        (p.mask.head ? p.heads : 1);
  return !p.modifies_scores() && sm90_class(p) <= 128 &&
         (!(p.mask.data || p.query_segments) || heads * of_head <= PairBits::kMaxBytes) &&
         (!p.drop_threshold || (p.draws_once() && p.key_start % 32 == 0));
}

// pair_bits: for the fused backward, which applies masks and dropout as bits.
inline Sm90Plan plan_sm90_backward(const AttentionBackward& g, Pass pass, int multiprocessors,
                                   bool pair_bits = false) {
  const AttentionProblem& p = g.p;
  const bool keys = pass == Pass::BwdDkdv;
  const auto inputs = {&p.q, &p.k, &p.v, &g.d_out};
  // Padding is bounds, and padding gaps are one bit per key. With a left window a query may see
  // only padding gaps, and its values would reach d_key and d_value: kernels with an elementwise
  // mask recompute that.
  Sm90Plan plan{keys ? sm90_why_not(p, inputs, {&g.dk, &g.dv}) : sm90_why_not(p, inputs, {&g.dq}),
                sm90_class(p),
                p.has_score_mod(),
                p.elementwise_mask() || (keys && p.key_padding.data && p.left < kUnbounded),
                {},
                0,
                {},
                0};
  if (pair_bits) plan.has_score_mod = plan.elementwise_mask = false;
  // To head size 128 the fused kernel has masks alone; what it does not support is rare.
  else if (plan.elementwise_mask && plan.head_class <= 128) plan.has_score_mod = true;
  const bool mask_adds = p.mask.data && p.mask.type != DenseType::boolean;
  if ((mask_adds && !copied(p.mask)) || (p.bias.data && !copied(p.bias)))
    plan.why_not =
        "the backward kernels copy floating masks and biases of 16 or 32 bits whose rows are "
        "contiguous and whose data is aligned";
  if (mask_adds && p.bias.data) plan.why_not = "the backward kernels add one floating mask or bias";
  if (p.blocks.bits) plan.why_not = kListsInBackward;
  if (plan.head_class == 256 && plan.elementwise_mask && plan.has_score_mod)
    plan.why_not =
        "floating masks and biases, and elementwise masks beside score_mod, are in the backward "
        "kernels to head size 128";
  if (plan.why_not) return plan;
  plan.tile = keys ? sm90_bwd_dkdv_tile(plan.head_class, plan.has_score_mod, plan.elementwise_mask)
                   : sm90_bwd_dq_tile(plan.head_class, plan.has_score_mod, plan.elementwise_mask);
  plan.smem_bytes = keys ? sm90_bwd_dkdv_smem(plan.tile, plan.has_score_mod, plan.elementwise_mask)
                         : sm90_bwd_dq_smem(plan.tile, plan.has_score_mod, plan.elementwise_mask);
  // Dropout's groups of keys may start before the first key.
  const int64_t length =
      keys ? p.num_keys + (plan.has_score_mod ? p.key_start % 32 : 0) : p.num_queries;
  const int64_t heads = int64_t(p.sequences) * (keys ? p.heads / p.group : p.heads);
  order_tiles(plan, p, (length + plan.tile.rows() - 1) / plan.tile.rows(), heads,
              keys ? 1 : p.group, multiprocessors);
  if (!sm90_backward_persists(plan.head_class, plan.bounds_only()))
    plan.blocks = int64_t(plan.order.tiles) * plan.order.heads;
  return plan;
}

// Fused backward. In order, a block waits for earlier blocks of its head, so concurrent blocks
// belong to many heads. With fewer keys, reading and rounding the sums of d_query takes longer than
// two gemms. With bits (elementwise_mask), it runs for any gradients and numbers of keys: to head
// size 128 the two passes have no kernels for masks without score_mod.
constexpr int kSm90OrderedKeys = 1024;
inline Sm90Plan plan_sm90_fused(const AttentionBackward& g, bool in_order, int multiprocessors) {
  const AttentionProblem& p = g.p;
  const bool pair_bits = fits_lane_bits(p) && (p.elementwise_mask() || p.drop_threshold ||
                                               (p.key_padding.data && p.left < kUnbounded));
  Sm90Plan plan = plan_sm90_backward(g, Pass::BwdDkdv, multiprocessors, pair_bits);
  if (!plan.why_not) plan.why_not = sm90_why_not(p, {&p.q}, {&g.dq});
  if (plan.has_score_mod || plan.elementwise_mask)
    plan.why_not =
        "floating masks and biases, softcap, and more than 256 MB of bits are only in the two "
        "passes";
  plan.elementwise_mask = pair_bits;
  if (plan.head_class == 256) plan.why_not = "of wide heads the kernel has no room for the sums";
  if (in_order && !pair_bits && p.num_keys < kSm90OrderedKeys)
    plan.why_not = "of few keys the two passes take less";
  if ((in_order || pair_bits) && !plan.why_not)
    plan.order.section = section_of(p, plan.order.heads, 1);
  // persistent blocks have no registers for state across tiles
  plan.blocks = int64_t(plan.order.tiles) * plan.order.heads;
  plan.tile = sm90_fused_tile(plan.head_class);
  plan.smem_bytes = sm90_fused_smem(plan.tile, pair_bits);
  const bool keys = g.dk.data || g.dv.data;
  if (pair_bits ? !g.dq.data && !keys : !g.dq.data || !keys)
    plan.why_not = "a pass for d_query alone, or for d_key and d_value, has fewer products";
  return plan;
}

// Gradient of a mask or bias. Persistent blocks process parts in order; concurrent ones belong to
// one head, whose operands are in L2.
inline Sm90Plan plan_sm90_dbias(const AttentionDbias& f, int multiprocessors) {
  const AttentionProblem& p = f.b.p;
  Sm90Plan plan{
      sm90_why_not(p, {&p.q, &p.k, &p.v, &f.b.d_out}, {}), sm90_class(p), true, true, {}, 0, {}, 0};
  if (f.sizes[2] != p.num_queries || f.sizes[3] != p.num_keys)
    plan.why_not = "the gradient is a sum over queries or keys";
  if (f.key != 1 && p.num_keys > 1) plan.why_not = "the gradient's rows are not contiguous";
  if (p.blocks.bits) plan.why_not = kListsInBackward;
  if (plan.why_not) return plan;
  const Sm90Tile tile = sm90_bwd_dbias_tile(plan.head_class);
  plan.tile = tile, plan.smem_bytes = sm90_bwd_dbias_smem(tile);
  const int columns = kSm90DbiasSpan * tile.streamed;
  const int64_t tiles = int64_t(p.num_queries + tile.rows() - 1) / tile.rows() *
                        ((p.num_keys + p.key_start % 32 + columns - 1) / columns);
  const int64_t heads = int64_t(f.sizes[0]) * f.sizes[1];
  if (tiles * heads >= int64_t(1) << 30) plan.why_not = "more than 2^30 tiles";
  plan.order = {int(tiles), int(heads), 1};
  plan.blocks = tiles * heads < multiprocessors ? tiles * heads : multiprocessors;
  return plan;
}

// Return the tiles per head and the size of dq_accum. Packed sequences start at a tile, so each has
// one tile more than its share of rows.
inline int64_t sm90_dq_accum_tiles(const AttentionProblem& p, int head_class) {
  const int rows = sm90_fused_tile(head_class).streamed;
  return p.cu_queries ? p.total_queries / rows + p.sequences : (p.num_queries + rows - 1) / rows;
}
inline int64_t sm90_dq_accum_size(const AttentionProblem& p, int head_class) {
  const int64_t heads = int64_t(p.cu_queries ? 1 : p.sequences) * p.heads;
  return heads * sm90_dq_accum_tiles(p, head_class) * sm90_fused_tile(head_class).streamed *
         head_class;
}

// Placeholder for a tensor that a planned call would create: aligned memory that nothing accesses.
inline void* const kPlanned = reinterpret_cast<void*>(16);
constexpr HeadRows kPlannedStrides{8, 8, 8};
inline Out planned_out(int columns) { return {kPlanned, kPlannedStrides, columns, true}; }

struct Gpu {
  bool sm90a;  // supports the sm_90a kernels
  int multiprocessors;
};

struct PassPlan {
  Sm90Plan sm90;         // why_not null: the sm_90a kernels run
  Sm80Plan sm80;         // runs otherwise, and recomputes flagged tiles
  Recompute recompute;   // without flags; tiles 0: nothing is flagged
  SplitPlan split = {};  // if it has splits, only its kernels run

  bool on_sm90() const { return !sm90.why_not; }
};

// The gradients that backward computes. `g` and `dbias` have no scratch; null data: not requested.
struct BackwardRequest {
  AttentionBackward g;
  AttentionDbias dbias[2];                       // of the mask, of the bias
  bool diagonals = false, deterministic = true;  // diagonals: T5's table has a gradient
};

struct BackwardPlan {
  Sm90Plan fused;                            // why_not null: fused backward
  int64_t dq_accum = 0, dq_accum_tiles = 0;  // float32 values in dq_accum; tiles per head
  int64_t turns = 0;                         // words that order the additions; 0: any order
  Recompute fused_dq, fused_dkdv;            // without flags; tiles 0: nothing is flagged
  PassPlan dq, dkdv, dbias[2];
  int partial_tiles = 0;  // Q tiles, each with partial sums for slopes and diagonals

  bool is_fused() const { return !fused.why_not; }
  // Return true if portable kernels (or the row stats) iterate over KV tiles.
  bool walks_keys(const BackwardRequest& r) const {
    const AttentionBackward& g = r.g;
    const bool dq_wanted = !is_fused() && (g.dq.data || r.diagonals || g.p.slopes);
    return g.p.split_lse() || (dq_wanted && !dq.on_sm90()) ||
           (r.dbias[0].data && !dbias[0].on_sm90()) || (r.dbias[1].data && !dbias[1].on_sm90());
  }
  // Return true if sm_90a kernels read a dense mask by queries; the next function, by keys.
  bool asks_queries(const BackwardRequest& r) const {
    const AttentionBackward& g = r.g;
    const bool dq_wanted = !is_fused() && (g.dq.data || r.diagonals || g.p.slopes);
    return (dq_wanted && dq.on_sm90()) || (r.dbias[0].data && dbias[0].on_sm90()) ||
           (r.dbias[1].data && dbias[1].on_sm90());
  }
  bool asks_keys(const BackwardRequest& r) const {
    return !is_fused() && (r.g.dk.data || r.g.dv.data) && dkdv.on_sm90();
  }
  bool walks_queries(const BackwardRequest& r) const {
    return !is_fused() && (r.g.dk.data || r.g.dv.data) && !dkdv.on_sm90();
  }
};

// Return plan() if the GPU supports the sm_90a kernels.
template <class F>
Sm90Plan on_sm90(const Gpu& gpu, F plan) {
  if (gpu.sm90a) return plan(gpu.multiprocessors);
  Sm90Plan none{};
  none.why_not =
      "they need a GPU of compute capability 9.0, and PYTRANSFORMER_CUDA_PATH not portable";
  return none;
}

inline PassPlan plan_attention_forward(const AttentionForward& f, const Gpu& gpu) {
  PassPlan plan{on_sm90(gpu, [&](int n) { return plan_sm90_forward(f, n); }),
                plan_sm80(Pass::Forward, f.p, false),
                {}};
  if (f.out.data) plan.split = plan_split(f.p);
  if (plan.split.splits) plan.sm90.why_not = "of so few queries the keys are split over blocks";
  if (plan.on_sm90() && f.p.elementwise_mask())
    plan.recompute = {nullptr, plan.sm90.tile.rows(), plan.sm90.order.tiles};
  return plan;
}

inline PassPlan plan_backward_pass(const AttentionBackward& g, Pass pass, bool diagonals,
                                   const Gpu& gpu) {
  PassPlan plan{on_sm90(gpu, [&](int n) { return plan_sm90_backward(g, pass, n); }), {}, {}};
  // Values of hidden rows do not reach sums of dS: tiles are recomputed without sums by diagonals.
  plan.sm80 = plan_sm80(pass, g.p, diagonals && !plan.on_sm90());
  const bool padding_gaps = g.p.key_padding.data && pass == Pass::BwdDq;
  if (plan.on_sm90() && (plan.sm90.elementwise_mask || padding_gaps))
    plan.recompute = {nullptr, plan.sm90.tile.rows(), plan.sm90.order.tiles};
  return plan;
}

inline PassPlan plan_attention_dbias(const AttentionDbias& f, const Gpu& gpu) {
  return {on_sm90(gpu, [&](int n) { return plan_sm90_dbias(f, n); }),
          plan_sm80(Pass::BwdDbias, f.b.p, false),
          {}};
}

inline BackwardPlan plan_attention_backward(const BackwardRequest& request, const Gpu& gpu) {
  const AttentionBackward& g = request.g;
  BackwardPlan plan{};
  plan.fused = on_sm90(gpu, [&](int n) { return plan_sm90_fused(g, request.deterministic, n); });
  if (plan.is_fused()) {
    plan.dq_accum = sm90_dq_accum_size(g.p, plan.fused.head_class);
    plan.dq_accum_tiles = sm90_dq_accum_tiles(g.p, plan.fused.head_class);
    const bool pair_bits = plan.fused.elementwise_mask;
    if (request.deterministic || pair_bits) plan.turns = 1 + plan.dq_accum / (64 * 64);
    if (pair_bits) {
      plan.fused_dq = {nullptr, 64, (g.p.num_queries + 63) / 64};
      plan.fused_dkdv = {nullptr, plan.fused.tile.rows(), plan.fused.order.tiles};
    }
  }
  plan.dq = plan_backward_pass(g, Pass::BwdDq, request.diagonals, gpu);
  plan.dkdv = plan_backward_pass(g, Pass::BwdDkdv, false, gpu);
  for (int i = 0; i < 2; ++i)
    if (request.dbias[i].data) plan.dbias[i] = plan_attention_dbias(request.dbias[i], gpu);
  plan.partial_tiles = int(tiles_of(g.p.num_queries, plan.dq.sm80.tile));
  return plan;
}

}  // namespace pt::cuda
