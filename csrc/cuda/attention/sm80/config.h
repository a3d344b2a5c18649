// SPDX-License-Identifier: Apache-2.0
// Compile-time choices of the portable attention kernels.
#pragma once

#include "cuda/attention/params.h"

namespace pt::cuda {

// A block holds `16 * row_warps` rows (queries; keys in bwd_dkdv) and streams tiles of `columns`.
// Warps that share rows divide the accumulators' columns (`splits`) or the tiles (`streams`).
struct AttentionTile {
  int head_dim;  // the class: D and Dv are at most this
  int row_warps, splits, columns, stages, streams = 1;

  constexpr int rows() const { return 16 * row_warps; }
  constexpr int threads() const { return 32 * row_warps * splits * streams; }
};

// bytes: of an element. Kernels with score_mod have fewer registers left, so they compute fewer
// scores at a time or fewer accumulator columns per warp. Eight-bit rows occupy shared memory
// twice, so wide float32 heads have fewer queries.
constexpr AttentionTile attention_tile(Pass pass, int head_dim, int bytes, bool has_score_mod,
                                       bool eight_bits = false) {
  switch (pass) {
    case Pass::Forward:
      if (bytes == 4 && eight_bits) return {head_dim, 1, 4, 32, 1};
      if (bytes == 4) return {head_dim, 2, head_dim == 64 ? 1 : 2, 32, 1};
      if (head_dim == 256) return {256, 4, has_score_mod ? 2 : 1, 32, 1};
      return {head_dim, 8, 1, has_score_mod ? 32 : 64, 1};
    case Pass::ForwardSplit:
      if (bytes == 4 || eight_bits || head_dim == 256) return {head_dim, 1, 4, 32, 1};
      return {head_dim, 1, 1, 32, 1, 4};
    case Pass::BwdDq:
      if (bytes == 4) return {head_dim, 1, head_dim == 64 ? 2 : 4, 32, 1};
      if (head_dim == 256) return {256, 2, 2, 32, 1};
      return {head_dim, 4, 1, head_dim == 64 && !has_score_mod ? 64 : 32, 2};
    case Pass::BwdDkdv:
      if (bytes == 4) return {head_dim, 1, head_dim == 64 ? 2 : 4, 16, 1};
      if (head_dim == 256) return {256, 4, 2, 16, 1};
      return {head_dim, 4, 1, head_dim == 64 && !has_score_mod ? 64 : 32, 2};
    default:
      if (bytes == 4) return {head_dim, 1, 1, 32, 1};
      return {head_dim, 2, 1, 32, 1};
  }
}

// Rows of shared memory have the class's number of columns.
constexpr int row_bytes(const AttentionTile& t, int bytes) { return t.head_dim * bytes; }
// Padding words after each row of a dS tile in shared memory, so rows start in different banks.
constexpr int kDiagonalPad = 4;
constexpr int kGroupStepsBytes = 64;  // of GroupSteps in bwd_dkdv.cuh
constexpr int gradient_tile_bytes(const AttentionTile& t) {
  return t.rows() * (t.columns + kDiagonalPad) * 4;
}

// eight-bit rows before widening, and scales
constexpr int staged_bytes(const AttentionTile& t) { return t.columns * (t.head_dim + 4); }

constexpr int attention_smem(Pass pass, const AttentionTile& t, int bytes, bool diagonals,
                             bool eight_bits = false) {
  const int stationary = t.rows() * row_bytes(t, bytes), streamed = t.columns * row_bytes(t, bytes);
  switch (pass) {
    case Pass::Forward:
    // Q; K, V
    case Pass::ForwardSplit:
      return stationary + 2 * t.streams * streamed + (eight_bits ? 2 * staged_bytes(t) : 0);
    // Q, dO; K, V; dS
    case Pass::BwdDq:
      return 2 * stationary + 2 * t.stages * streamed + (diagonals ? gradient_tile_bytes(t) : 0);
    // K, V; Q, dO, row stats
    case Pass::BwdDkdv:
      return 2 * stationary + t.stages * (2 * streamed + 3 * 4 * t.columns) + kGroupStepsBytes;
    default: return 2 * stationary + 2 * streamed;  // Q, dO; K, V: dS reuses their space
  }
}

// Template argument of a kernel, which its name shows. HasScoreMod: softcap, biases and dropout;
// else bounds only.
template <int HeadDim, bool HasScoreMod>
struct Kind {
  static constexpr int head_dim = HeadDim;
  static constexpr bool has_score_mod = HasScoreMod, has_blocks = true, eight_bits = false;
  static constexpr Pass forward = Pass::Forward;
};
// Like Kind, for the split KV forward, which supports everything but block masks.
template <int HeadDim, bool HasScoreMod>
struct SplitKind : Kind<HeadDim, HasScoreMod> {
  static constexpr bool has_blocks = false;
  static constexpr Pass forward = Pass::ForwardSplit;
};
// Both for eight-bit keys and values.
template <int HeadDim>
struct EightBitKind : Kind<HeadDim, true> {
  static constexpr bool eight_bits = true;
};
template <int HeadDim>
struct EightBitSplitKind : SplitKind<HeadDim, true> {
  static constexpr bool eight_bits = true;
};

constexpr int kSmemOfEveryGpu = 99 * 1024;  // shared memory per block on sm_86, sm_89 and sm_120
constexpr bool attention_fits(int head_dim, int bytes) {
  constexpr Pass kPasses[] = {Pass::Forward, Pass::ForwardSplit, Pass::BwdDq, Pass::BwdDkdv,
                              Pass::BwdDbias};
  for (Pass pass : kPasses) {
    const AttentionTile t = attention_tile(pass, head_dim, bytes, pass != Pass::Forward);
    if (attention_smem(pass, t, bytes, true) > kSmemOfEveryGpu) return false;
    // 32: dropout
    if (t.threads() < 32 || t.threads() > 256 || t.columns % 16 ||
        (pass != Pass::BwdDkdv && t.columns % 32))
      return false;
  }
  for (Pass pass : {Pass::Forward, Pass::ForwardSplit})
    if (attention_smem(pass, attention_tile(pass, head_dim, bytes, true, true), bytes, false,
                       true) > kSmemOfEveryGpu)
      return false;
  const AttentionTile dense = attention_tile(Pass::BwdDbias, head_dim, bytes, true);
  return gradient_tile_bytes(dense) <= 2 * dense.rows() * row_bytes(dense, bytes);
}
static_assert(attention_fits(64, 2) && attention_fits(128, 2) && attention_fits(256, 2) &&
              attention_fits(64, 4) && attention_fits(256, 4));

}  // namespace pt::cuda
