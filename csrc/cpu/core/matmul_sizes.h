// SPDX-License-Identifier: Apache-2.0
// What a product of whole matrices is given (matmul.h), and the sizes by which it is cut.
#pragma once

#include "cpu/core/gemm.h"

namespace pt {
namespace PT_ISA {

// One operand. A: element (m, k) at data[m * stride + k], along_k: data[k * stride + m].
//              B: element (k, n) at data[n * stride + k], along_k: data[k * stride + n].
template <class T>
struct Operand {
  const typename T::elem* data;
  int64_t stride;
  bool along_k;                   // rows of the matrix run along k
  const uint8_t* live = nullptr;  // of B along_k: rows to be read; the others count as zeros. Null: all
};
template <class T>
struct Product {
  Operand<T> a, b;
};

// Rows of a call of the epilogue: they and their results stay in L1. Tiles multiply 32 rows at once: 48 were 2 to 4 % slower.
template <class T>
constexpr int64_t kPart = kUnitStep<T> > 1 ? 64 : 48;
// Rows of a tile that accumulates while k passes. Sums that stay in L1 are loaded and stored in half the cycles, which counts on tiles.
template <class T>
constexpr int64_t kTileRows = kUnitStep<T> > 1 ? kPart<T> : 192;
// Units of a panel that pass the tile's rows together. Tiles take 32 KB, which stay in L1; vectors take so much time that L2 serves them,
// and gain by visiting their sums less often. (512 would be another 1 to 2 % of a product in float32, but sums of 512 in a row leave 4 eps,
// and of 256 one in 6,000 random feed_forwards left the 2 eps of a gradient.)
template <class T>
constexpr int64_t kDepth = kUnitStep<T> > 1 ? 128 : 192;
constexpr int64_t kCachedBytes = int64_t(5) << 18;  // of A, in a core's L2 while panels pass
constexpr int64_t kPackedUnits = int64_t(4) << 20;  // of B packed at a time, about: 16 MB of floats or pairs
// Units of k at a time. Vectors take whole pieces of a panel: 240 rows of A and a panel of 288 KB stay in L2, where 144 and 512 KB were
// slower (measured; 1024 deep one piece in six is short). Tiles: 144 rows. Up to a third more stays in one slice: a
// short one visits all sums for little.
template <class T>
constexpr int64_t kSliceUnits = kUnitStep<T> > 1 ? 2048 : 6 * kDepth<T>;
template <class T>
constexpr int64_t kUncutUnits = kUnitStep<T> > 1 ? 2048 : 8 * kDepth<T>;
constexpr int64_t kSums = int64_t(4) << 20;  // sums kept between slices, about: A is packed anew for every so many columns
constexpr int64_t kPackedDepth = 512;        // packed elements along k of a task that packs

}  // namespace PT_ISA
}  // namespace pt
