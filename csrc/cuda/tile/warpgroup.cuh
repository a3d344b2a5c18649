// SPDX-License-Identifier: Apache-2.0
// Shared parts of warpgroup kernels: the producer/consumer structure, and wgmma operands in shared
// memory.
#pragma once

#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/swizzle.cuh"

namespace pt::cuda {

// A consumer's warpgroup index, its warp's first row in the tile, and the lane's two rows.
PT_DEVICE int consumer() { return int(threadIdx.x) / 128 - 1; }
PT_DEVICE int warp_row() { return consumer() * 64 + int(threadIdx.x) % 128 / 32 * 16; }
PT_DEVICE int own_row(int r) { return warp_row() + lane_id() / 4 + 8 * r; }

// Run a block: one thread calls begin(), which initializes the barriers; the first warpgroup calls
// produce(), the rest consume().
template <class B>
PT_DEVICE void run_block(const B& block) {
  if (threadIdx.x == 0) {
    block.begin();
    ptx::fence_mbarrier_init();
  }
  ptx::syncthreads();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<B::kTile.producer_registers>();
    block.produce();
  } else {
    ptx::setmaxnreg_inc<B::kTile.consumer_registers>();
    block.consume();
  }
}

// Release with one thread per warpgroup, which has waited for its products; only products read the
// buffer.
template <class R>
PT_DEVICE void consumer_release_warpgroup(const R& ring, int n PT_SITE) {
  if (threadIdx.x % 128 == 0) ring.consumer_release(n PT_HERE);
}
// Release with one lane per warp, after all lanes' reads of the buffer or products with it.
template <class R>
PT_DEVICE void consumer_release_warp(const R& ring, int n PT_SITE) {
  ptx::syncwarp(PT_ONLY_HERE);
  if (lane_id() == 0) ring.consumer_release(n PT_HERE);
}

// Synchronize the threads of this consumer (at most two consumers). The ids are constants: see
// bar_sync.
PT_DEVICE void sync_consumer(PT_ONLY_SITE) {
  if (consumer() == 0) ptx::bar_sync(1, 128 PT_HERE);
  else ptx::bar_sync(2, 128 PT_HERE);
}

// Return a descriptor of 128-byte rows in consecutive groups of eight. N-major operands have panels
// of 64 columns.
PT_DEVICE uint64_t swizzled(uint32_t address, uint32_t panel_bytes = 16) {
  return ptx::smem_descriptor(address, panel_bytes, kSwizzleAtom, ptx::SmemLayout::Swizzle128);
}
// Return the descriptor moved by `bytes`, within the block's shared memory.
PT_DEVICE uint64_t further(uint64_t descriptor, uint32_t bytes) {
  return (descriptor >> 32 << 32) | (uint32_t(descriptor) + bytes / 16);
}

}  // namespace pt::cuda
