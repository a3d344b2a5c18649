// SPDX-License-Identifier: Apache-2.0
// Operands of a gemm (matmul.h) and its block sizes.
#pragma once

#include "cpu/core/gemm.h"
#include "cpu/core/isa.h"

namespace pt {
namespace PT_ISA {

// One operand. A: element (m, k) at data[m * stride + k]; along_k: data[k * stride + m].
//              B: element (k, n) at data[n * stride + k]; along_k: data[k * stride + n].
template <class T>
struct Operand {
  const typename T::elem* data;
  int64_t stride;
  bool along_k;                   // k is the row index in memory
  const uint8_t* live = nullptr;  // B along_k: rows to read, others count as zeros; null: all
  // B: panels that pack_panels (matmul.h) wrote, read in place of data; null: none
  const typename T::packed* panels = nullptr;
};
template <class T>
struct Product {
  Operand<T> a, b;
};

// Rows per epilogue call: they and their results remain in L1. AMX tiles multiply 32 rows at once;
// 48 were 2 to 4 % slower.
template <class T>
constexpr int64_t kPart = kUnitStep<T> > 1 ? 64 : 48;
// Rows of a tile that accumulates over k. Sums in L1 load and store in half the cycles, which is
// noticeable on AMX tiles.
template <class T>
constexpr int64_t kTileRows = kUnitStep<T> > 1 ? kPart<T> : 192;
// Packed elements of a panel per pass over the tile's rows. For AMX tiles they take 32 KB and
// remain in L1. Vectors are slow enough for L2 and gain by fewer passes over their sums. (512 would
// save another 1 to 2 % of a float32 gemm. But chains of 512 exceed 4 eps, and with 256, one in
// 6,000 random feed_forwards exceeded the 2 eps of a gradient.)
template <class T>
constexpr int64_t kDepth = kUnitStep<T> > 1 ? 128 : 192;
// Bytes of A in a core's L2 while panels pass. 1.25 MB, which fits an L2 of 2 MB, took 1.05 to 1.2
// times as long with 512 KB (Zen 3).
INLINE int64_t cached_bytes() { return l2_bytes() / 8 * 5; }
// packed elements of B at a time, about: 16 MB of floats or pairs
constexpr int64_t kPackedUnits = int64_t(4) << 20;
// Packed elements of k per slice. Vectors use full pieces of a panel: 240 rows of A and a 288 KB
// panel remain in L2; 144 and 512 KB were slower (at depth 1024 one piece in six is short). AMX
// tiles: 144 rows. Up to a third more fits into one slice, because a short slice would reload all
// sums for little work.
template <class T>
constexpr int64_t kSliceUnits = kUnitStep<T> > 1 ? 2048 : 6 * kDepth<T>;
template <class T>
constexpr int64_t kUncutUnits = kUnitStep<T> > 1 ? 2048 : 8 * kDepth<T>;
// Sums stored between slices, about. A is packed again per this many columns.
constexpr int64_t kSums = int64_t(4) << 20;
constexpr int64_t kPackedDepth = 512;  // packed elements of k per packing task

}  // namespace PT_ISA
}  // namespace pt
