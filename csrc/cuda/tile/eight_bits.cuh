// SPDX-License-Identifier: Apache-2.0
// Eight-bit values, int8 and float8_e4m3fn: exact conversion to bf16, f16 and f32, and rounding.
#pragma once

#include "common/dtype.h"
#include "cuda/tile/matrix_tile.cuh"
#include "cuda/tile/numbers.cuh"

namespace pt::cuda {

// Widen the four int8 of a word. With its sign bit flipped, a byte is biased by 128; as the last
// bits of 2^23 it is a float.
PT_DEVICE void widen_int8(float (&v)[4], uint32_t word) {
  PT_UNROLL
  for (int i = 0; i < 4; ++i)
    v[i] = ptx::bits_float(0x4b000000u | ((word ^ 0x80808080u) >> 8 * i & 0xff)) - 8388736.0f;
}

// Widen the four float8_e4m3fn of a word with integer operations, because sm_80 has no instruction
// for it. Shifted to float32 positions, the bits are 2^-120 of the value, subnormals included. 0x7f
// would be 480 and is NaN.
PT_DEVICE void widen_e4m3(float (&v)[4], uint32_t word) {
  PT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = word >> 8 * i, size = bits & 0x7f;
    const float x = ptx::bits_float(size << 20 | (bits & 0x80) << 24) * 0x1p120f;
    v[i] = size == 0x7f ? ptx::bits_float(0x7fffffffu) : x;
  }
}

// Round to nearest even. |x| is at most the dtype's largest value. Adding 1.5 * 2^23 rounds a
// float32 to an integer; adding 2^14 rounds it to a multiple of 2^-9, the smallest float8_e4m3fn.
PT_DEVICE uint32_t to_int8(float x) { return ptx::float_bits(x + 12582912.0f) & 0xff; }
PT_DEVICE uint32_t to_e4m3(float x) {
  const uint32_t bits = ptx::float_bits(x), size = bits & 0x7fffffffu;
  const uint32_t small = ptx::float_bits(ptx::bits_float(size) + 0x1p14f) & 0xff;
  const uint32_t ties = size >> 20 & 1;
  const uint32_t normal = ((size + 0x7ffffu + ties) >> 20) - (120u << 3);
  return (size < 0x3c800000u ? small : normal) | (bits >> 24 & 0x80);
}

// Return a row's scale: its largest absolute value (as float32 bits) over the dtype's largest
// value, and at least the smallest normal number. NaN for a row that is not finite.
PT_DEVICE float scale_of_row(uint32_t largest, EightBits dtype) {
  if (largest >= 0x7f800000u) return ptx::bits_float(0x7fc00000u);
  return fmaxf(ptx::div_rn(ptx::bits_float(largest), dtype == EightBits::e4m3 ? 448.0f : 127.0f),
               0x1p-126f);
}

// Widen rows of Bytes eight-bit values in shared memory to rows of E. A thread widens the 16 bytes
// that it copied (copy_rows_at), so no barrier is needed before.
template <class E, int Rows, int Bytes, int RowBytes>
PT_DEVICE void widen_rows(SmemTile<Bytes> from, SmemTile<RowBytes> to, int used, bool e4m3) {
  // 16 bytes become kPieces pieces of kWords words
  constexpr int C = SmemTile<Bytes>::kChunks, kPieces = int(sizeof(E)), kWords = 4 / kPieces;
  for (int x = int(threadIdx.x); x < Rows * C; x += int(blockDim.x)) {
    const int row = x / C, chunk = x % C;
    if (chunk >= used) continue;
    const ptx::Words4 bits = ptx::ld_shared_v4(from.at(row, chunk));
    // With 16-bit E, threads of chunks 4 to 7 write their second piece first, so that eight threads
    // use all banks.
    const int turned = kPieces == 2 ? chunk >> 2 & 1 : 0;
    PT_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      float v[kWords][4];
      PT_UNROLL
      for (int k = 0; k < kWords; ++k) {
        const int other = (kPieces - 1 - i) * kWords + k;
        const uint32_t word = turned ? bits.w[other] : bits.w[i * kWords + k];
        if (e4m3) widen_e4m3(v[k], word);
        else widen_int8(v[k], word);
      }
      const uint32_t at = to.at(row, kPieces * chunk + (turned ? kPieces - 1 - i : i));
      if constexpr (kPieces == 4) {
        ptx::st_shared_v4_f32(at, v[0][0], v[0][1], v[0][2], v[0][3]);
      } else {
        ptx::st_shared_v4_f32(at, ptx::bits_float(Element<E>::pack(v[0][0], v[0][1])),
                              ptx::bits_float(Element<E>::pack(v[0][2], v[0][3])),
                              ptx::bits_float(Element<E>::pack(v[1][0], v[1][1])),
                              ptx::bits_float(Element<E>::pack(v[1][2], v[1][3])));
      }
    }
  }
}

}  // namespace pt::cuda
