// SPDX-License-Identifier: Apache-2.0
// The 128-byte swizzle of TMA and wgmma: a tile is rows of 128 bytes in groups of eight rows, 1024 bytes, that begin at multiples of 1024;
// the 16-byte chunk c of row r lies at chunk c ^ (r % 8), so that eight rows of one chunk use all banks.
#pragma once

#include "cuda/ptx/platform.cuh"

namespace pt::cuda {

constexpr int kSwizzleRow = 128, kSwizzleAtom = 8 * kSwizzleRow;  // bytes

// Byte offset, in a tile of rows of 128 bytes, of the 16-byte chunk `chunk` of a row.
PT_HOST_DEVICE constexpr uint32_t swizzle128(uint32_t row, uint32_t chunk) { return row * kSwizzleRow + ((chunk ^ (row % 8)) << 4); }

// `address` rounded up to where a swizzled tile may begin.
PT_HOST_DEVICE constexpr uint32_t align_to_atom(uint32_t address) { return (address + kSwizzleAtom - 1) / kSwizzleAtom * kSwizzleAtom; }

}  // namespace pt::cuda
