// SPDX-License-Identifier: Apache-2.0
// Compile-time choices of the norm kernels.
#pragma once

namespace pt::cuda {

// Lanes: part of a warp per row. Block: one block per row. Both hold the row in registers and
// require typed, aligned rows. Any: one block per row, any dtype, alignment and width; reads the
// row again from memory.
enum class LayerNormKernel : int { Lanes, Block, Any };

constexpr int kVectorColumns = 8;

struct LayerNormConfig {
  int vectors;      // vectors of eight columns that a thread holds in registers
  int max_threads;  // threads per block, at most
  int at_once;      // threads per SM: sets the registers per thread and limits the grid

  constexpr int max_columns(int threads) const { return threads * kVectorColumns * vectors; }
  constexpr int max_columns() const { return max_columns(max_threads > 128 ? max_threads : 32); }
  constexpr int registers() const { return 65536 / at_once / 8 * 8; }  // registers per thread
  // Vectors of a row that the block divides among its threads.
  constexpr int shared_vectors() const {
    return max_threads > 128 ? vectors : vectors * 32 / max_threads;
  }
};

struct LayerNormConfigs {
  LayerNormConfig lanes, block, any;
};

// Forward: a row of h as float, and x and residual as loaded. Backward: the dweight and dbias sums,
// and d_out and h as loaded.
constexpr LayerNormConfigs kLayerNormForward{{4, 128, 512}, {4, 384, 512}, {1, 512, 1024}};
constexpr LayerNormConfigs kLayerNormBackward{{4, 128, 256}, {2, 512, 512}, {1, 512, 512}};

constexpr int kSpare = 24;  // registers for addresses and counters
static_assert(kLayerNormForward.lanes.registers() >= kLayerNormForward.lanes.vectors * 24 + kSpare);
static_assert(kLayerNormForward.block.registers() >= kLayerNormForward.block.vectors * 24 + kSpare);
static_assert(kLayerNormBackward.lanes.registers() >=
              kLayerNormBackward.lanes.vectors * 48 + kSpare);
static_assert(kLayerNormBackward.block.registers() >=
              kLayerNormBackward.block.vectors * 40 + kSpare);
static_assert(kLayerNormForward.lanes.max_columns() == 1024 &&
              kLayerNormBackward.lanes.max_columns() == 1024);
static_assert(kLayerNormForward.block.max_columns() == 12288 &&
              kLayerNormBackward.block.max_columns() == 8192);

// Tags: template arguments of a kernel, which its name shows.
struct Lanes {
  static constexpr LayerNormKernel kernel = LayerNormKernel::Lanes;
  static constexpr LayerNormConfig forward = kLayerNormForward.lanes,
                                   backward = kLayerNormBackward.lanes;
};
struct Block {
  static constexpr LayerNormKernel kernel = LayerNormKernel::Block;
  static constexpr LayerNormConfig forward = kLayerNormForward.block,
                                   backward = kLayerNormBackward.block;
};
struct Any {
  static constexpr LayerNormKernel kernel = LayerNormKernel::Any;
  static constexpr LayerNormConfig forward = kLayerNormForward.any,
                                   backward = kLayerNormBackward.any;
};

}  // namespace pt::cuda
