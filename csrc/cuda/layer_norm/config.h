// SPDX-License-Identifier: Apache-2.0
// Every compile-time choice of the norm kernels.
#pragma once

namespace pt::cuda {

// Lanes: some lanes of a warp for each row. Block: a block for each row. Both keep the row in registers and want typed, aligned rows.
// Any: a block for each row, any dtypes, alignment and width; reads the row again from memory.
enum class LayerNormKernel : int { Lanes, Block, Any };

constexpr int kVectorColumns = 8;

struct LayerNormConfig {
  int vectors;      // of eight columns that a thread keeps in registers
  int max_threads;  // of a block
  int at_once;      // threads on a multiprocessor: the compiler gives each what registers that leaves, and a grid is no larger

  constexpr int max_columns(int threads) const { return threads * kVectorColumns * vectors; }
  constexpr int max_columns() const { return max_columns(max_threads > 128 ? max_threads : 32); }
  constexpr int registers() const { return 65536 / at_once / 8 * 8; }  // that a thread may have
  // Of a row, where a block divides it among its threads.
  constexpr int shared_vectors() const { return max_threads > 128 ? vectors : vectors * 32 / max_threads; }
};

struct LayerNormConfigs {
  LayerNormConfig lanes, block, any;
};

// Forward: a row of h, as float, and x and residual as they come. Backward: the sums of dweight and dbias, and d_out and h as they come.
constexpr LayerNormConfigs kLayerNormForward{{4, 128, 512}, {4, 384, 512}, {1, 512, 1024}};
constexpr LayerNormConfigs kLayerNormBackward{{4, 128, 256}, {2, 512, 512}, {1, 512, 512}};

constexpr int kSpare = 24;  // registers for addresses and counters
static_assert(kLayerNormForward.lanes.registers() >= kLayerNormForward.lanes.vectors * 24 + kSpare);
static_assert(kLayerNormForward.block.registers() >= kLayerNormForward.block.vectors * 24 + kSpare);
static_assert(kLayerNormBackward.lanes.registers() >= kLayerNormBackward.lanes.vectors * 48 + kSpare);
static_assert(kLayerNormBackward.block.registers() >= kLayerNormBackward.block.vectors * 40 + kSpare);
static_assert(kLayerNormForward.lanes.max_columns() == 1024 && kLayerNormBackward.lanes.max_columns() == 1024);
static_assert(kLayerNormForward.block.max_columns() == 12288 && kLayerNormBackward.block.max_columns() == 8192);

// Tags: what a kernel is instantiated with, and what its name shows.
struct Lanes {
  static constexpr LayerNormKernel kernel = LayerNormKernel::Lanes;
  static constexpr LayerNormConfig forward = kLayerNormForward.lanes, backward = kLayerNormBackward.lanes;
};
struct Block {
  static constexpr LayerNormKernel kernel = LayerNormKernel::Block;
  static constexpr LayerNormConfig forward = kLayerNormForward.block, backward = kLayerNormBackward.block;
};
struct Any {
  static constexpr LayerNormKernel kernel = LayerNormKernel::Any;
  static constexpr LayerNormConfig forward = kLayerNormForward.any, backward = kLayerNormBackward.any;
};

}  // namespace pt::cuda
