// SPDX-License-Identifier: Apache-2.0
// Compile-time choices of the sm_90a attention kernels.
#pragma once

#include <cstdint>

namespace pt::cuda {

// A block has a producer warpgroup, one thread of which loads by TMA, and consumer warpgroups of 64
// rows each: queries, or keys in bwd_dkdv. Tiles of `streamed` rows of the other operand come in
// stages.
struct Sm90Tile {
  int head_dim;  // the class: D and Dv padded to panels of 64 columns
  int streamed, stages;
  bool ping_pong = false;  // one consumer's gemms overlap the other's softmax
  int consumers = 2;
  int producer_registers = 24, consumer_registers = 240;
  int fewer = 0;       // stages that the second streamed operand has less
  bool split = false;  // consumers share 64 rows and compute one result each

  constexpr int rows() const { return split ? 64 : 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  constexpr int panels() const { return head_dim / 64; }
  constexpr int second_stages() const { return stages - fewer; }
  constexpr uint32_t own_bytes() const { return uint32_t(rows() * head_dim * 2); }
  // of both
  constexpr uint32_t streamed_bytes() const {
    return uint32_t((stages + second_stages()) * streamed * head_dim * 2);
  }
};

// docs/design/cuda.md lists other tiles that were tried.
constexpr Sm90Tile sm90_forward_tile(int head_dim, bool bounds_only = false) {
  return head_dim == 64    ? Sm90Tile{64, 128, 2, true}
         : head_dim == 128 ? Sm90Tile{128, 128, 2}
                           : Sm90Tile{256, bounds_only ? 80 : 64, 2};
}
// For head size 64 and bounds only: more rows per load of keys.
constexpr Sm90Tile sm90_three_consumers() { return {64, 128, 2, false, 3, 32, 160}; }
// More rows would exceed the registers. score_mod uses some, so its tiles are smaller. Producers
// that do more than TMA loads need more registers.
constexpr Sm90Tile sm90_bwd_dq_tile(int head_dim, bool has_score_mod,
                                    bool elementwise_mask = false) {
  if (head_dim == 256 && elementwise_mask) return {256, 48, 2, false, 2, 40, 232, 1};
  if (head_dim == 256)
    return has_score_mod ? Sm90Tile{256, 32, 2} : Sm90Tile{256, 64, 2, false, 2, 24, 240, 1};
  const Sm90Tile t = head_dim == 64
                         ? Sm90Tile{64, has_score_mod ? (elementwise_mask ? 64 : 96) : 128, 2}
                         : Sm90Tile{128, has_score_mod ? 64 : 96, 2};
  return elementwise_mask ? Sm90Tile{t.head_dim, t.streamed, t.stages, false, 2, 40, 232} : t;
}
// At head size 256 one consumer has no registers for both d_key and d_value.
constexpr Sm90Tile sm90_bwd_dkdv_tile(int head_dim, bool has_score_mod,
                                      bool elementwise_mask = false) {
  if (head_dim == 256)
    return has_score_mod ? Sm90Tile{256, 48, 2, false, 2, 40, 232, 0, true}
                         : Sm90Tile{256, 64, 2, false, 2, 56, 224, 0, true};
  if (elementwise_mask) return {head_dim, head_dim == 64 ? 96 : 48, 2, false, 2, 56, 224};
  return head_dim == 64 ? Sm90Tile{64, has_score_mod ? 96 : 128, 2, false, 2, 40, 232}
                        : Sm90Tile{128, has_score_mod ? 48 : 64, 2, false, 2, 40, 232};
}

// Return true if backward's blocks are persistent. At head size 256 with score_mod or an
// elementwise mask, no registers are left for state across tiles.
constexpr bool sm90_backward_persists(int head_dim, bool bounds_only) {
  return head_dim < 256 || bounds_only;
}

constexpr uint32_t kSm90Slack = 1024;       // padding for a start at a multiple of 1024
constexpr uint32_t kSm90BarrierBytes = 16;  // per buffer
constexpr int kSm90SumRows = 32;            // rows of dS per consumer, for sums by diagonal
// words: rows start eight banks apart
constexpr int sm90_sum_pitch(const Sm90Tile& t) { return t.streamed + 8; }
constexpr uint32_t sm90_sums_bytes(const Sm90Tile& t) {
  return uint32_t(t.consumers * kSm90SumRows * sm90_sum_pitch(t) * 4);
}
// Backward's mask loader buffers per stage: pairs of bit words per row; with score_mod also the
// tile of a floating-point mask or bias, with at most 4 bytes per key and 16 bytes of padding per
// row. The padding avoids bank conflicts and allows shifted rows; eight words after the tile hold
// the shifts.
constexpr int sm90_bit_words(const Sm90Tile& t) { return (t.streamed + 63) / 64 * 2; }
constexpr int sm90_bias_pitch(const Sm90Tile& t, bool keys) {
  return 4 * (keys ? t.rows() : t.streamed) + 16;
}
constexpr uint32_t sm90_mask_loader_bytes(const Sm90Tile& t, bool keys, bool has_score_mod) {
  return uint32_t(
      t.rows() * sm90_bit_words(t) * 4 +
      (has_score_mod ? (keys ? t.streamed : t.rows()) * sm90_bias_pitch(t, keys) + 8 * 4 : 0));
}
constexpr uint32_t sm90_mask_loader_smem(const Sm90Tile& t, bool keys, bool has_score_mod) {
  return uint32_t(t.stages) * sm90_mask_loader_bytes(t, keys, has_score_mod);
}
constexpr int sm90_num_row_stats(bool has_score_mod, bool elementwise_mask) {
  return has_score_mod && elementwise_mask ? 3 : 2;
}
constexpr uint32_t kSm90MaxSmem = 232448;  // per block
// The forward's bits of a tile, in boxes of 128 keys (16 bytes) even if a tile has fewer.
constexpr int kSm90BitColumns = 8;  // of 16 bits
constexpr uint32_t sm90_bit_box_bytes(int rows) { return uint32_t(rows * kSm90BitColumns * 2); }
constexpr uint32_t sm90_bits_bytes(const Sm90Tile& t) {
  return t.stages * sm90_bit_box_bytes(t.rows());
}
// The forward's tiles of a mask or bias.
constexpr uint32_t sm90_dense_bytes(const Sm90Tile& t) {
  return uint32_t(t.stages * t.rows() * t.streamed * 2);
}
// Forward: Q; K, V; barriers and notes; with an elementwise mask bits; dense tiles, in place of the
// bits if there is no room for both.
constexpr uint32_t kSm90ForwardBarriers = 1024;  // swizzled tiles follow
constexpr uint32_t sm90_forward_smem(const Sm90Tile& t, bool bits = false, bool dense = false) {
  return kSm90Slack + t.own_bytes() + t.streamed_bytes() + kSm90ForwardBarriers +
         (bits ? sm90_bits_bytes(t) : 0) + (dense ? sm90_dense_bytes(t) : 0);
}
constexpr bool sm90_holds_bits_and_dense(const Sm90Tile& t) {
  return sm90_forward_smem(t, true, true) <= kSm90MaxSmem;
}
// bwd_dq: Q, dO; K, V; sums with score_mod; mask loader buffers. bwd_dkdv: K, V; Q, dO, row stats;
// mask loader buffers.
constexpr uint32_t sm90_bwd_dq_smem(const Sm90Tile& t, bool has_score_mod,
                                    bool elementwise_mask = false) {
  return kSm90Slack + 2 * t.own_bytes() + t.streamed_bytes() +
         kSm90BarrierBytes * uint32_t(2 + t.stages + t.second_stages()) +
         (has_score_mod ? sm90_sums_bytes(t) : 0) +
         (elementwise_mask ? sm90_mask_loader_smem(t, false, has_score_mod) : 0);
}
// Bytes of the weights that one consumer writes for the other.
constexpr uint32_t sm90_exchange_bytes(const Sm90Tile& t) {
  return t.split ? t.stages * (uint32_t(t.rows() * t.streamed * 2) + kSm90BarrierBytes) : 0;
}
constexpr uint32_t sm90_bwd_dkdv_smem(const Sm90Tile& t, bool has_score_mod = false,
                                      bool elementwise_mask = false) {
  return sm90_bwd_dq_smem(t, false) +
         uint32_t(t.stages * t.streamed * sm90_num_row_stats(has_score_mod, elementwise_mask) * 4) +
         sm90_exchange_bytes(t) +
         (elementwise_mask ? sm90_mask_loader_smem(t, true, has_score_mod) : 0);
}

// sums: accumulators and fragments of a lane that are live at once.
constexpr bool sm90_fits(const Sm90Tile& t, uint32_t smem, int sums) {
  constexpr int kSpare = 8;  // for addresses, bounds and row stats
  // setmaxnreg redistributes the registers of the launch.
  const int launched = 65536 / t.threads() / 8 * 8 * (t.consumers + 1);
  return smem <= kSm90MaxSmem && sums + kSpare <= t.consumer_registers && t.streamed % 16 == 0 &&
         t.producer_registers + t.consumers * t.consumer_registers <= launched;
}
// Live: S, P, O.
constexpr bool sm90_forward_fits(const Sm90Tile& t, bool bits) {
  return sm90_fits(t, sm90_forward_smem(t, bits), t.streamed / 2 + t.streamed / 4 + t.head_dim / 2);
}
static_assert(sm90_forward_fits(sm90_forward_tile(64), true) &&
              sm90_forward_fits(sm90_forward_tile(128), true) &&
              sm90_forward_fits(sm90_forward_tile(256), true));
static_assert(sm90_forward_fits(sm90_forward_tile(256, true), false) &&
              sm90_forward_fits(sm90_three_consumers(), false));
// Registers for a piece's derivatives and for the bits of visible and kept pairs.
constexpr int kSm90ScoreModRegisters = 16;
// Live: S, or softcap's derivative; dP, P or dS, dQ.
constexpr bool sm90_bwd_dq_fits(int head_dim, bool has_score_mod, bool elementwise_mask = false) {
  const Sm90Tile t = sm90_bwd_dq_tile(head_dim, has_score_mod, elementwise_mask);
  return sm90_fits(t, sm90_bwd_dq_smem(t, has_score_mod, elementwise_mask),
                   t.streamed + t.streamed / 4 + t.head_dim / 2 +
                       (has_score_mod ? kSm90ScoreModRegisters : 0)) &&
         (!has_score_mod || t.streamed % 32 == 0);  // dropout's groups
}
static_assert(sm90_bwd_dq_fits(64, false) && sm90_bwd_dq_fits(64, true) &&
              sm90_bwd_dq_fits(128, false) && sm90_bwd_dq_fits(128, true));
static_assert(sm90_bwd_dq_fits(256, false) && sm90_bwd_dq_fits(256, true));
static_assert(sm90_bwd_dq_fits(64, true, true) && sm90_bwd_dq_fits(128, true, true) &&
              sm90_bwd_dq_fits(256, false, true));
// Live: S, dP, P, dK, dV. With score_mod, S becomes two operands of its size. Split: S or dP, its
// operand, dK or dV.
constexpr bool sm90_bwd_dkdv_fits(int head_dim, bool has_score_mod, bool elementwise_mask = false) {
  const Sm90Tile t = sm90_bwd_dkdv_tile(head_dim, has_score_mod, elementwise_mask);
  const uint32_t smem = sm90_bwd_dkdv_smem(t, has_score_mod, elementwise_mask);
  if (t.split)
    return sm90_fits(t, smem,
                     t.streamed / 2 + t.streamed / 4 + t.head_dim / 2 +
                         (has_score_mod ? kSm90ScoreModRegisters : 0));
  return sm90_fits(t, smem,
                   has_score_mod ? t.streamed + t.head_dim + kSm90ScoreModRegisters
                                 : t.streamed + t.streamed / 4 + t.head_dim);
}
static_assert(sm90_bwd_dkdv_fits(64, false) && sm90_bwd_dkdv_fits(64, true) &&
              sm90_bwd_dkdv_fits(128, false) && sm90_bwd_dkdv_fits(128, true));
static_assert(sm90_bwd_dkdv_fits(256, false) && sm90_bwd_dkdv_fits(256, true));
static_assert(sm90_bwd_dkdv_fits(64, true, true) && sm90_bwd_dkdv_fits(128, true, true) &&
              sm90_bwd_dkdv_fits(256, false, true));

// Gradient of a mask or bias: a block accumulates its queries and `kSm90DbiasSpan` KV tiles; Q and
// dO also come in stages.
constexpr int kSm90DbiasSpan = 2;
constexpr Sm90Tile sm90_bwd_dbias_tile(int head_dim) {
  if (head_dim == 256) return {256, 64, 2, false, 2, 24, 240, 1};
  return {head_dim, 64, head_dim == 64 ? 4 : 3, false, 2, 40, 232};
}
constexpr int sm90_bwd_dbias_own_stages(int head_dim) { return head_dim == 256 ? 1 : 2; }
constexpr uint32_t sm90_bwd_dbias_smem(const Sm90Tile& t) {
  const int own = sm90_bwd_dbias_own_stages(t.head_dim);
  return kSm90Slack + uint32_t(2 * own) * t.own_bytes() + t.streamed_bytes() +
         kSm90BarrierBytes * uint32_t(2 * own + t.stages + t.second_stages());
}
// Live: S, dP, their sums; a tile of biases.
constexpr bool sm90_bwd_dbias_fits(int head_dim) {
  const Sm90Tile t = sm90_bwd_dbias_tile(head_dim);
  return sm90_fits(t, sm90_bwd_dbias_smem(t),
                   t.streamed + kSm90DbiasSpan * t.streamed / 2 + 32 + kSm90ScoreModRegisters) &&
         t.streamed % 32 == 0;
}
static_assert(sm90_bwd_dbias_fits(64) && sm90_bwd_dbias_fits(128) && sm90_bwd_dbias_fits(256));

// Template argument of a kernel, which its name shows. HasScoreMod: softcap, ALiBi, T5 and dropout.
// ElementwiseMask: boolean masks and segments; in backward to head size 128 the fused kernel has
// them. Both: floating-point masks and biases too. Neither: bounds only.
template <int HeadDim, bool HasScoreMod, bool ElementwiseMask = false>
struct Hopper {
  static constexpr int head_dim = HeadDim;
  static constexpr bool has_score_mod = HasScoreMod, elementwise_mask = ElementwiseMask,
                        bounds_only = !HasScoreMod && !ElementwiseMask;
  // in forward; see dropout_as_mask in plan.h
  static constexpr bool drops_by_bits = ElementwiseMask && !HasScoreMod && HeadDim <= 128;
  static constexpr Sm90Tile forward_tile = sm90_forward_tile(HeadDim, bounds_only);
  static constexpr Sm90Tile bwd_dkdv_tile =
      sm90_bwd_dkdv_tile(HeadDim, HasScoreMod, ElementwiseMask);
  // For bwd_dkdv: buffers of Q beyond the tile's stages, and the number of different first Q tiles
  // of blocks.
  static constexpr int more_queries = 0, spread = 1;
  static constexpr bool in_order = false;   // blocks take numbers when they start
  static constexpr bool pair_bits = false;  // the fused backward reads bits in lane order
};

struct ThreeConsumers : Hopper<64, false> {
  static constexpr Sm90Tile forward_tile = sm90_three_consumers();
};

// Fused backward: five gemms, with d_query added across blocks.
constexpr Sm90Tile sm90_fused_tile(int head_dim) {
  Sm90Tile t = sm90_bwd_dkdv_tile(head_dim, false);
  t.stages = 2;  // dS uses the space of a third
  return t;
}
// InOrder: blocks add to a Q tile in order. Otherwise (deterministic=False) they add in any order,
// and concurrent additions to the same addresses wait for each other.
template <int HeadDim, bool InOrder>
struct Fused : Hopper<HeadDim, false> {
  static constexpr Sm90Tile bwd_dkdv_tile = sm90_fused_tile(HeadDim);
  static constexpr bool in_order = InOrder;
  static constexpr int spread = InOrder ? 1 : 16;
};
// With boolean masks, segments and dropout as bits. In order only.
template <int HeadDim>
struct FusedBits : Fused<HeadDim, true> {
  static constexpr bool pair_bits = true;
};
constexpr uint32_t kSm90Notes = 256 * 48;  // of the consumers' threads
constexpr uint32_t kSm90TicketBytes = 16;
// A tile's visible mask or keep mask.
constexpr uint32_t sm90_pair_bits_bytes(const Sm90Tile& t) {
  return uint32_t(t.rows() * t.streamed / 8);
}
// Like bwd_dkdv, and: dS twice; 64 x 64 float32 values per consumer; notes; the block's number;
// bits of both kinds.
constexpr uint32_t sm90_fused_smem(const Sm90Tile& t, bool pair_bits) {
  const uint32_t part = 64 * 64 * 4 + kSm90BarrierBytes;
  return sm90_bwd_dkdv_smem(t) + kSm90Notes + kSm90TicketBytes +
         uint32_t(2 * t.rows() * t.streamed * 2) + uint32_t(t.consumers) * part +
         (pair_bits ? uint32_t(2 * t.stages) * sm90_pair_bits_bytes(t) : 0);
}
// Live: dK, dV; S or dP; P and its copy, which becomes dS; d_query's part.
constexpr bool sm90_fused_fits(const Sm90Tile& t) {
  return sm90_fits(t, sm90_fused_smem(t, true), t.head_dim + t.streamed + 64 * 64 / 128) &&
         t.streamed * t.head_dim == t.consumers * 64 * 64;
}
static_assert(sm90_fused_fits(sm90_fused_tile(64)) && sm90_fused_fits(sm90_fused_tile(128)));

}  // namespace pt::cuda
