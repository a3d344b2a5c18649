// SPDX-License-Identifier: Apache-2.0
// Numbers of eight bits, int8 and float8_e4m3fn: widened exactly, since bf16, f16 and f32 hold them all, and rounded to.
#pragma once

#include "common/dtype.h"
#include "cuda/tile/matrix_tile.cuh"
#include "cuda/tile/numbers.cuh"

namespace pt::cuda {

// The four int8 of a word. With its sign bit turned over a byte counts from -128: as the last bits of 2^23 it is a float.
PT_DEVICE void widen_int8(float (&v)[4], uint32_t word) {
  PT_UNROLL
  for (int i = 0; i < 4; ++i) v[i] = ptx::bits_float(0x4b000000u | ((word ^ 0x80808080u) >> 8 * i & 0xff)) - 8388736.0f;
}

// The four float8_e4m3fn of a word, by their bits, since sm_80 has no instruction for them: shifted to their places in a float32 they are
// 2^-120 of the number, subnormals too. 0x7f would be 480, and is NaN.
PT_DEVICE void widen_e4m3(float (&v)[4], uint32_t word) {
  PT_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = word >> 8 * i, size = bits & 0x7f;
    const float x = ptx::bits_float(size << 20 | (bits & 0x80) << 24) * 0x1p120f;
    v[i] = size == 0x7f ? ptx::bits_float(0x7fffffffu) : x;
  }
}

// The nearest of either dtype, ties to even, of a number whose size is at most its largest one's. Added to 1.5 * 2^23 a float32 is rounded
// to a whole number, and to 2^14 to a multiple of 2^-9, the least float8_e4m3fn.
PT_DEVICE uint32_t to_int8(float x) { return ptx::float_bits(x + 12582912.0f) & 0xff; }
PT_DEVICE uint32_t to_e4m3(float x) {
  const uint32_t bits = ptx::float_bits(x), size = bits & 0x7fffffffu;
  const uint32_t small = ptx::float_bits(ptx::bits_float(size) + 0x1p14f) & 0xff;
  const uint32_t ties = size >> 20 & 1;
  const uint32_t normal = ((size + 0x7ffffu + ties) >> 20) - (120u << 3);
  return (size < 0x3c800000u ? small : normal) | (bits >> 24 & 0x80);
}

// By what the numbers of a row are divided: its largest size, as the bits of a float32, over the dtype's largest number, and no subnormal
// one. NaN for a row that is not finite.
PT_DEVICE float scale_of_row(uint32_t largest, EightBits dtype) {
  if (largest >= 0x7f800000u) return ptx::bits_float(0x7fc00000u);
  return fmaxf(ptx::div_rn(ptx::bits_float(largest), dtype == EightBits::e4m3 ? 448.0f : 127.0f), 0x1p-126f);
}

// Rows of Bytes in shared memory, of numbers of eight bits, widened to rows of E. A thread widens the 16 bytes that it has copied there
// itself (copy_rows_at), and needs no barrier before.
template <class E, int Rows, int Bytes, int RowBytes>
PT_DEVICE void widen_rows(SmemTile<Bytes> from, SmemTile<RowBytes> to, int used, bool e4m3) {
  constexpr int C = SmemTile<Bytes>::kChunks, kPieces = int(sizeof(E)), kWords = 4 / kPieces;  // 16 bytes of E: of so many words
  for (int x = int(threadIdx.x); x < Rows * C; x += int(blockDim.x)) {
    const int row = x / C, chunk = x % C;
    if (chunk >= used) continue;
    const ptx::Words4 bits = ptx::ld_shared_v4(from.at(row, chunk));
    // Of 16 bits, threads of chunks 4 to 7 write their second piece first: eight threads then use all banks.
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
        ptx::st_shared_v4_f32(at, ptx::bits_float(Element<E>::pack(v[0][0], v[0][1])), ptx::bits_float(Element<E>::pack(v[0][2], v[0][3])),
                              ptx::bits_float(Element<E>::pack(v[1][0], v[1][1])), ptx::bits_float(Element<E>::pack(v[1][2], v[1][3])));
      }
    }
  }
}

}  // namespace pt::cuda
