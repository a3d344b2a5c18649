// SPDX-License-Identifier: Apache-2.0
// The 128-byte swizzle of TMA and wgmma. A tile has rows of 128 bytes in groups of eight rows (1024
// bytes) that start at multiples of 1024. The 16-byte chunk c of row r is stored at chunk c ^ (r %
// 8), so eight rows of one chunk use all banks.
#pragma once

#include "cuda/ptx/platform.cuh"

namespace pt::cuda {

constexpr int kSwizzleRow = 128, kSwizzleAtom = 8 * kSwizzleRow;  // bytes

// Return the byte offset of a row's 16-byte chunk `chunk` in a tile of 128-byte rows.
PT_HOST_DEVICE constexpr uint32_t swizzle128(uint32_t row, uint32_t chunk) {
  return row * kSwizzleRow + ((chunk ^ (row % 8)) << 4);
}

// Round `address` up to the next possible start of a swizzled tile.
PT_HOST_DEVICE constexpr uint32_t align_to_atom(uint32_t address) {
  return (address + kSwizzleAtom - 1) / kSwizzleAtom * kSwizzleAtom;
}

}  // namespace pt::cuda
