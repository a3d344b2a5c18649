// Every compile-time choice of the norm kernels.
#pragma once

namespace pt::cuda {

// Lanes: some lanes of a warp for each row. Block: a block for each row. Both keep the row in registers and want typed, aligned rows.
// Any: a block for each row, any dtypes, alignment and width; reads the row again from memory.
enum class NormKernel : int { Lanes, Block, Any };

constexpr int kVectorColumns = 8;

struct NormConfig {
  int vectors;      // of eight columns that a thread keeps in registers
  int max_threads;  // of a block
  int min_blocks;   // at once on a multiprocessor

  constexpr int max_columns(int threads) const { return threads * kVectorColumns * vectors; }
  constexpr int max_columns() const { return max_columns(max_threads > 128 ? max_threads : 32); }
  constexpr int registers() const { return 65536 / max_threads / min_blocks / 8 * 8; }  // that a thread may have
};

struct NormConfigs {
  NormConfig lanes, block, any;
};

// Forward: a row of h, as float, and x and residual as they come. Backward: the sums of dweight and dbias, and d_out and h as they come.
constexpr NormConfigs kNormForward{{4, 128, 4}, {4, 384, 1}, {1, 512, 2}};
constexpr NormConfigs kNormBackward{{4, 128, 2}, {2, 512, 1}, {1, 512, 1}};

constexpr int kSpare = 24;  // registers for addresses and counters
static_assert(kNormForward.lanes.registers() >= kNormForward.lanes.vectors * 24 + kSpare);
static_assert(kNormForward.block.registers() >= kNormForward.block.vectors * 24 + kSpare);
static_assert(kNormBackward.lanes.registers() >= kNormBackward.lanes.vectors * 40 + kSpare);
static_assert(kNormBackward.block.registers() >= kNormBackward.block.vectors * 40 + kSpare);
static_assert(kNormForward.lanes.max_columns() == 1024 && kNormBackward.lanes.max_columns() == 1024);
static_assert(kNormForward.block.max_columns() == 12288 && kNormBackward.block.max_columns() == 8192);

// Tags: what a kernel is instantiated with, and what its name shows.
struct Lanes {
  static constexpr NormKernel kernel = NormKernel::Lanes;
  static constexpr NormConfig forward = kNormForward.lanes, backward = kNormBackward.lanes;
};
struct Block {
  static constexpr NormKernel kernel = NormKernel::Block;
  static constexpr NormConfig forward = kNormForward.block, backward = kNormBackward.block;
};
struct Any {
  static constexpr NormKernel kernel = NormKernel::Any;
  static constexpr NormConfig forward = kNormForward.any, backward = kNormBackward.any;
};

}  // namespace pt::cuda
