// SPDX-License-Identifier: Apache-2.0
// Support check of the sm_90a kernels and the order of their tiles. Pure functions of the problem.
#pragma once

#include <initializer_list>

#include "cuda/attention/problem.h"
#include "cuda/attention/sm90/config.h"
#include "cuda/tile/order.h"

namespace pt::cuda {

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
};

// Return the head size class of query and value, 0 for none. TMA writes zeros to panels of 64
// columns that a tensor does not have, without reading memory.
inline int sm90_class(const AttentionProblem& p) {
  const int widest = p.head_dim > p.value_dim ? p.head_dim : p.value_dim;
  return widest <= 64 ? 64 : widest <= 128 ? 128 : widest <= 256 ? 256 : 0;
}

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
  constexpr int64_t kMaxRows = (int64_t(1) << 31) - 1024;  // TMA has 32-bit coordinates
  if (packed && (p.total_queries > kMaxRows || p.total_keys > kMaxRows))
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

// Return the number of heads per section: as many as the L2 cache holds keys and values for.
// Sections have equal sizes: a small one at the end would start its longest tiles when other SMs
// are idle.
inline int section_of(const AttentionProblem& p, int64_t heads, int sharing) {
  constexpr int64_t kSectionBytes = 32 << 20;
  const int64_t fit =
      kSectionBytes * sharing / (int64_t(p.num_keys) * (p.head_dim + p.value_dim) * 2);
  const int64_t most = fit < 1       ? 1
                       : fit < heads ? fit
                                     : heads,
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

// Tiles of equal duration go to persistent blocks, which load the next tile's operands during this
// tile's epilogue; so do pairs of equal total duration, if their number is near a multiple of the
// blocks. Other tiles have one block each, which start in order as blocks end.
inline void order_tiles(Sm90Plan& plan, const AttentionProblem& p, int64_t tiles, int64_t heads,
                        int sharing, int multiprocessors, bool may_pair = false) {
  const bool unmasked = !p.blocks.queries.offsets && p.left == kUnbounded &&
                        p.right == kUnbounded && !p.key_lengths && !p.query_lengths && !p.cu_keys &&
                        !p.key_padding.data;
  const bool even = unmasked && !p.causal;
  const int64_t pairs = tiles / 2 * heads, rounds = (pairs + multiprocessors - 1) / multiprocessors;
  const bool paired = may_pair && unmasked && rises_evenly(p) && tiles % 2 == 0 &&
                      pairs > multiprocessors && 10 * pairs >= 9 * rounds * multiprocessors;
  // Limit, so the number of a block's next tile has 31 bits, even past the end.
  if (tiles * heads >= int64_t(1) << 30) plan.why_not = "more than 2^30 tiles";
  plan.order = {int(tiles), int(heads), even || paired ? 1 : section_of(p, heads, sharing), paired};
  plan.blocks =
      (even || paired) && tiles * heads > multiprocessors ? multiprocessors : tiles * heads;
}

// Return true if three consumers finish sooner than two with unpaired tiles: a row takes 5/6 of the
// time, but rows past the last query and idle SMs are wasted. For packed sequences, uses the mean
// length.
inline bool three_consumers_are_faster(const AttentionProblem& p, int multiprocessors) {
  const int64_t queries =
      p.cu_queries && p.sequences ? p.total_queries / p.sequences : p.num_queries;
  const auto time = [&](const Sm90Tile& tile, int of_a_row) {
    const int64_t tiles = (queries + tile.rows() - 1) / tile.rows() * p.sequences * p.heads;
    return (tiles + multiprocessors - 1) / multiprocessors * tile.rows() * of_a_row;
  };
  return time(sm90_three_consumers(), 5) <= time(sm90_forward_tile(64), 6);
}

// Return true if kernels with an elementwise mask read dropout as bits, like the mask. On an H100,
// backward of 2 x 16 heads of 64 columns and 2,048 keys then takes 0.57 ms including the bits, and
// 0.85 with score_mod. Forward, which draws each pair once, takes 0.26 and 0.22.
inline bool dropout_as_mask(const AttentionProblem& p) {
  return p.draws_once() && !p.modifies_scores() && sm90_class(p) <= 128;
}

constexpr bool draws_once_for(int heads, int length) {
  AttentionProblem p{};
  p.drop_threshold = 1, p.sequences = 1, p.heads = heads, p.num_queries = p.num_keys = length;
  return p.draws_once();
}
static_assert(draws_once_for(16, 8192) && !draws_once_for(16, 8193) && !draws_once_for(17, 8192));

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
  plan.tile = sm90_forward_tile(plan.head_class);
  if (p.blocks.queries.offsets && (1 << p.blocks.queries.row_bits < plan.tile.rows() ||
                                   1 << p.blocks.queries.column_bits < plan.tile.streamed))
    plan.why_not = "a tile of theirs does not lie within one block of the mask";
  if (!f.out.data) plan.why_not = "statistics alone are wanted";
  if (plan.why_not) return plan;
  const auto order = [&](const Sm90Tile& tile, bool may_pair) {
    const int64_t tiles = (p.num_queries + tile.rows() - 1) / tile.rows();
    plan.tile = tile, plan.smem_bytes = sm90_forward_smem(tile);
    order_tiles(plan, p, tiles, int64_t(p.sequences) * p.heads, p.group, multiprocessors, may_pair);
  };
  order(plan.tile, true);
  const bool has_three = plan.head_class == 64 && !plan.has_score_mod && !plan.elementwise_mask;
  if (has_three && !plan.order.paired && three_consumers_are_faster(p, multiprocessors))
    order(sm90_three_consumers(), false);
  return plan;
}

constexpr const char* kListsInBackward =
    "block masks are lists that forward and the portable kernels walk";

// Return true if backward's producers can copy rows of a floating-point mask or bias, which start
// anywhere, in aligned 16-byte pieces.
inline bool copied(const Dense& d) {
  return d.type != DenseType::f64 && d.key == 1 && reinterpret_cast<uintptr_t>(d.data) % 16 == 0;
}

inline Sm90Plan plan_sm90_backward(const AttentionBackward& g, Pass pass, int multiprocessors) {
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
  if (dropout_as_mask(p)) plan.has_score_mod = false, plan.elementwise_mask = true;
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
  if (!sm90_backward_persists(plan.head_class, !plan.has_score_mod && !plan.elementwise_mask))
    plan.blocks = int64_t(plan.order.tiles) * plan.order.heads;
  return plan;
}

// Fused backward, if all three gradients are requested. In order, a block waits for earlier blocks
// of its head, so concurrent blocks belong to many heads. With fewer keys, reading and rounding the
// sums of d_query takes longer than two gemms.
constexpr int kSm90OrderedKeys = 1024;
inline Sm90Plan plan_sm90_fused(const AttentionBackward& g, bool in_order, int multiprocessors) {
  const AttentionProblem& p = g.p;
  Sm90Plan plan = plan_sm90_backward(g, Pass::BwdDkdv, multiprocessors);
  if (!plan.why_not) plan.why_not = sm90_why_not(p, {&p.q}, {&g.dq});
  if (plan.has_score_mod || plan.elementwise_mask)
    plan.why_not =
        "masks, biases, softcap, dropout and padding with a left window are only in the two passes";
  if (plan.head_class == 256) plan.why_not = "of wide heads the kernel has no room for the sums";
  if (in_order && p.num_keys < kSm90OrderedKeys)
    plan.why_not = "of few keys the two passes take less";
  if (in_order && !plan.why_not) plan.order.section = section_of(p, plan.order.heads, 1);
  // persistent blocks have no registers for state across tiles
  plan.blocks = int64_t(plan.order.tiles) * plan.order.heads;
  plan.tile = sm90_fused_tile(plan.head_class), plan.smem_bytes = sm90_fused_smem(plan.tile);
  if (!g.dq.data || !(g.dk.data || g.dv.data))
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

}  // namespace pt::cuda
