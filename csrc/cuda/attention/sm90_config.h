// Every compile-time choice of the attention kernels for sm_90a.
#pragma once

#include <cstdint>

namespace pt::cuda {

// A block is a producer warpgroup, one thread of which loads by TMA, and consumer warpgroups of 64 rows each: queries, or in the pass over
// keys of the backward, keys. Tiles of `streamed` rows of the other kind come in stages.
struct Sm90Tile {
  int head_dim;  // the class: D and Dv have as many panels of 64 columns
  int streamed, stages;
  bool ping_pong = false;  // the products of one consumer run while the other computes its weights
  int consumers = 2;
  int producer_registers = 24, consumer_registers = 240;
  int fewer = 0;       // stages of the second of the two streamed operands
  bool split = false;  // all consumers have the same 64 rows, and each one of the results

  constexpr int rows() const { return split ? 64 : 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  constexpr int panels() const { return head_dim / 64; }
  constexpr int second_stages() const { return stages - fewer; }
  constexpr uint32_t own_bytes() const { return uint32_t(rows() * head_dim * 2); }
  constexpr uint32_t streamed_bytes() const { return uint32_t((stages + second_stages()) * streamed * head_dim * 2); }  // of both
};

// Plain kernels could have other tiles than general ones, which go through a tile in pieces of 64 columns: FlashAttention-3 has three
// consumers for 64 columns, 176 keys for 128 and 80 for 256. bench/tools/cuda_variants.py is there to time them.
constexpr Sm90Tile sm90_forward_tile(int head_dim, [[maybe_unused]] bool general) {
  return head_dim == 64 ? Sm90Tile{64, 128, 2, true} : head_dim == 128 ? Sm90Tile{128, 128, 2} : Sm90Tile{256, 64, 2};
}
// More rows would need more registers than there are; with terms, which need some too, there are fewer.
// Producers that do more than load by TMA need more.
constexpr Sm90Tile sm90_queries_tile(int head_dim, bool general, bool looks_up = false) {
  if (head_dim == 256 && looks_up) return {256, 48, 2, false, 2, 40, 232, 1};
  if (head_dim == 256) return general ? Sm90Tile{256, 32, 2} : Sm90Tile{256, 64, 2, false, 2, 24, 240, 1};
  const Sm90Tile t = head_dim == 64 ? Sm90Tile{64, general ? (looks_up ? 64 : 96) : 128, 2} : Sm90Tile{128, general ? 64 : 96, 2};
  return looks_up ? Sm90Tile{t.head_dim, t.streamed, t.stages, false, 2, 40, 232} : t;
}
// Of 256 columns one consumer has no registers for both d_key and d_value.
constexpr Sm90Tile sm90_keys_tile(int head_dim, bool general, bool looks_up = false) {
  if (head_dim == 256) return general ? Sm90Tile{256, 48, 2, false, 2, 40, 232, 0, true} : Sm90Tile{256, 64, 2, false, 2, 56, 224, 0, true};
  if (looks_up) return {head_dim, head_dim == 64 ? 96 : general ? 48 : 64, 2, false, 2, 56, 224};
  return head_dim == 64 ? Sm90Tile{64, general ? 96 : 128, 2, false, 2, 40, 232} : Sm90Tile{128, general ? 48 : 64, 2, false, 2, 40, 232};
}

// Whether blocks of the backward go from tile to tile. With terms or lookups wide heads have no registers for what then lasts.
constexpr bool sm90_backward_persists(int head_dim, bool plain) { return head_dim < 256 || plain; }

constexpr uint32_t kSm90Slack = 1024;                                       // to begin at a multiple of 1024
constexpr uint32_t kSm90BarrierBytes = 16;                                  // of a buffer
constexpr int kSm90SumRows = 32;                                            // of dS in shared memory, for a consumer's sums by diagonals
constexpr int sm90_sum_pitch(const Sm90Tile& t) { return t.streamed + 8; }  // words: rows begin eight banks apart
constexpr uint32_t sm90_sums_bytes(const Sm90Tile& t) { return uint32_t(t.consumers * kSm90SumRows * sm90_sum_pitch(t) * 4); }
// What the backward looks up, of a stage: words of bits of a row, in pairs; with terms a floating one's tile, rows of at most 32 bits a key
// and 16 bytes more, so that lanes meet no bank twice and rows may be shifted, by as much as eight numbers behind the tile say.
constexpr int sm90_bit_words(const Sm90Tile& t) { return (t.streamed + 63) / 64 * 2; }
constexpr int sm90_term_pitch(const Sm90Tile& t, bool keys) { return 4 * (keys ? t.rows() : t.streamed) + 16; }
constexpr uint32_t sm90_lookup_bytes(const Sm90Tile& t, bool keys, bool general) {
  return uint32_t(t.rows() * sm90_bit_words(t) * 4 + (general ? (keys ? t.streamed : t.rows()) * sm90_term_pitch(t, keys) + 8 * 4 : 0));
}
constexpr uint32_t sm90_lookups_smem(const Sm90Tile& t, bool keys, bool general) {
  return uint32_t(t.stages) * sm90_lookup_bytes(t, keys, general);
}
constexpr int sm90_key_numbers(bool general, bool looks_up) { return general && looks_up ? 3 : 2; }  // of a query, over keys
// Forward: Q; K, V. Over queries: Q, dO; K, V; with terms, sums. Over keys: K, V; Q, dO, numbers of a query. Both: what is looked up.
constexpr uint32_t sm90_forward_smem(const Sm90Tile& t) {
  return kSm90Slack + t.own_bytes() + t.streamed_bytes() + kSm90BarrierBytes * uint32_t(1 + t.stages + t.second_stages());
}
constexpr uint32_t sm90_queries_smem(const Sm90Tile& t, bool general, bool looks_up = false) {
  return kSm90Slack + 2 * t.own_bytes() + t.streamed_bytes() + kSm90BarrierBytes * uint32_t(2 + t.stages + t.second_stages()) +
         (general ? sm90_sums_bytes(t) : 0) + (looks_up ? sm90_lookups_smem(t, false, general) : 0);
}
// Weights that one consumer leaves for the other.
constexpr uint32_t sm90_exchange_bytes(const Sm90Tile& t) {
  return t.split ? t.stages * (uint32_t(t.rows() * t.streamed * 2) + kSm90BarrierBytes) : 0;
}
constexpr uint32_t sm90_keys_smem(const Sm90Tile& t, bool general = false, bool looks_up = false) {
  return sm90_queries_smem(t, false) + uint32_t(t.stages * t.streamed * sm90_key_numbers(general, looks_up) * 4) + sm90_exchange_bytes(t) +
         (looks_up ? sm90_lookups_smem(t, true, general) : 0);
}

// sums: accumulators and fragments of a lane, all alive at once.
constexpr bool sm90_fits(const Sm90Tile& t, uint32_t smem, int sums) {
  constexpr uint32_t kMostSmem = 232448;  // of a block
  constexpr int kSpare = 8;               // registers for addresses, bounds and statistics
  // What setmaxnreg hands out is what the block was launched with.
  const int launched = 65536 / t.threads() / 8 * 8 * (t.consumers + 1);
  return smem <= kMostSmem && sums + kSpare <= t.consumer_registers && t.streamed % 16 == 0 &&
         t.producer_registers + t.consumers * t.consumer_registers <= launched;
}
// S, P, O.
constexpr bool sm90_forward_fits(const Sm90Tile& t) {
  return sm90_fits(t, sm90_forward_smem(t), t.streamed / 2 + t.streamed / 4 + t.head_dim / 2);
}
static_assert(sm90_forward_fits(sm90_forward_tile(64, false)) && sm90_forward_fits(sm90_forward_tile(64, true)));
static_assert(sm90_forward_fits(sm90_forward_tile(128, false)) && sm90_forward_fits(sm90_forward_tile(128, true)));
static_assert(sm90_forward_fits(sm90_forward_tile(256, false)));
constexpr int kSm90Terms = 16;  // registers for a piece's slopes, for bits of what is seen and kept
// S, or softcap's slopes; dP, P or dS, dQ.
constexpr bool sm90_queries_fit(int head_dim, bool general, bool looks_up = false) {
  const Sm90Tile t = sm90_queries_tile(head_dim, general, looks_up);
  return sm90_fits(t, sm90_queries_smem(t, general, looks_up), t.streamed + t.streamed / 4 + t.head_dim / 2 + (general ? kSm90Terms : 0)) &&
         (!general || t.streamed % 32 == 0);  // dropout's groups
}
static_assert(sm90_queries_fit(64, false) && sm90_queries_fit(64, true) && sm90_queries_fit(128, false) && sm90_queries_fit(128, true));
static_assert(sm90_queries_fit(256, false) && sm90_queries_fit(256, true));
static_assert(sm90_queries_fit(64, false, true) && sm90_queries_fit(64, true, true) && sm90_queries_fit(256, false, true));
static_assert(sm90_queries_fit(128, false, true) && sm90_queries_fit(128, true, true));
// S, dP, P, dK, dV. With terms S becomes two operands, as large as it is. Split: S or dP, of that an operand, dK or dV.
constexpr bool sm90_keys_fit(int head_dim, bool general, bool looks_up = false) {
  const Sm90Tile t = sm90_keys_tile(head_dim, general, looks_up);
  const uint32_t smem = sm90_keys_smem(t, general, looks_up);
  if (t.split) return sm90_fits(t, smem, t.streamed / 2 + t.streamed / 4 + t.head_dim / 2 + (general ? kSm90Terms : 0));
  return sm90_fits(t, smem, general ? t.streamed + t.head_dim + kSm90Terms : t.streamed + t.streamed / 4 + t.head_dim);
}
static_assert(sm90_keys_fit(64, false) && sm90_keys_fit(64, true) && sm90_keys_fit(128, false) && sm90_keys_fit(128, true));
static_assert(sm90_keys_fit(256, false) && sm90_keys_fit(256, true));
static_assert(sm90_keys_fit(64, false, true) && sm90_keys_fit(64, true, true) && sm90_keys_fit(256, false, true));
static_assert(sm90_keys_fit(128, false, true) && sm90_keys_fit(128, true, true));

// The gradient of a dense term: a block has the sums of its queries and of `kSm90DenseSpan` tiles of keys; Q and dO come in stages, too.
constexpr int kSm90DenseSpan = 2;
constexpr Sm90Tile sm90_dense_tile(int head_dim) {
  if (head_dim == 256) return {256, 64, 2, false, 2, 24, 240, 1};
  return {head_dim, 64, head_dim == 64 ? 4 : 3, false, 2, 40, 232};
}
constexpr int sm90_dense_own_stages(int head_dim) { return head_dim == 256 ? 1 : 2; }
constexpr uint32_t sm90_dense_smem(const Sm90Tile& t) {
  const int own = sm90_dense_own_stages(t.head_dim);
  return kSm90Slack + uint32_t(2 * own) * t.own_bytes() + t.streamed_bytes() +
         kSm90BarrierBytes * uint32_t(2 * own + t.stages + t.second_stages());
}
// S, dP, their sums; a tile of terms.
constexpr bool sm90_dense_fits(int head_dim) {
  const Sm90Tile t = sm90_dense_tile(head_dim);
  return sm90_fits(t, sm90_dense_smem(t), t.streamed + kSm90DenseSpan * t.streamed / 2 + 32 + kSm90Terms) && t.streamed % 32 == 0;
}
static_assert(sm90_dense_fits(64) && sm90_dense_fits(128) && sm90_dense_fits(256));

// What a kernel is instantiated with, and what its name shows. General: with softcap, ALiBi, T5 and dropout. LooksUp: with boolean masks
// and segments; both: floating masks and biases too. Neither: only bounds.
template <int HeadDim, bool IsGeneral, bool LooksUp = false>
struct Hopper {
  static constexpr int head_dim = HeadDim;
  static constexpr bool general = IsGeneral, looks_up = LooksUp, plain = !IsGeneral && !LooksUp;
  static constexpr Sm90Tile keys_tile = sm90_keys_tile(HeadDim, IsGeneral, LooksUp);
  // Over keys: buffers of queries beyond the tile's stages, and with how many different tiles of queries blocks begin.
  static constexpr int more_queries = 0, spread = 1;
};

// deterministic=False: five products, with d_query added across blocks. Only bounds.
constexpr Sm90Tile sm90_fused_tile(int head_dim) {
  Sm90Tile t = sm90_keys_tile(head_dim, false);
  t.stages = 2;  // dS has the place of a third
  return t;
}
template <int HeadDim>
struct Fused : Hopper<HeadDim, false> {
  static constexpr Sm90Tile keys_tile = sm90_fused_tile(HeadDim);
  static constexpr int spread = 16;  // blocks that add to the same places at the same time wait for each other
};
constexpr uint32_t kSm90Notes = 256 * 48;  // of consumers' threads
// As over keys, and: dS, twice; 64 x 64 float32 numbers a consumer; notes.
constexpr uint32_t sm90_fused_smem(const Sm90Tile& t) {
  const uint32_t part = 64 * 64 * 4 + kSm90BarrierBytes;
  return sm90_keys_smem(t) + kSm90Notes + uint32_t(2 * t.rows() * t.streamed * 2) + uint32_t(t.consumers) * part;
}
// dK, dV; S or dP; P and its copy, which becomes dS; d_query's part.
constexpr bool sm90_fused_fits(const Sm90Tile& t) {
  return sm90_fits(t, sm90_fused_smem(t), t.head_dim + t.streamed + 64 * 64 / 128) && t.streamed * t.head_dim == t.consumers * 64 * 64;
}
static_assert(sm90_fused_fits(sm90_fused_tile(64)) && sm90_fused_fits(sm90_fused_tile(128)));

}  // namespace pt::cuda
