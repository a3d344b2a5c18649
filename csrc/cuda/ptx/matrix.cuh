// SPDX-License-Identifier: Apache-2.0
// Warp-level matrices: loads and stores of 8 x 8 matrices, and mma.sync. Every lane takes part.
#pragma once

#include "cuda/ptx/platform.cuh"

namespace pt::ptx {

// "Warp Level Matrix Multiply-Accumulate Instructions: ldmatrix". Loads four 8 x 8 matrices of
// 16-bit elements. Lane l passes the address of row l % 8 of matrix l / 8 (16 bytes); its register
// m receives elements 2 (l % 4) + {0, 1} of row l / 4 of matrix m.
PT_DEVICE void ldmatrix_x4(uint32_t row_addr, uint32_t (&m)[4] PT_SITE) {
#if defined(PT_EMULATE)
  emu::ldmatrix_x4(row_addr, m, false, site);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row_addr)
               : "memory");
#endif
}
// With .trans: register m gets elements (2 (l % 4), l / 4) and (2 (l % 4) + 1, l / 4) of matrix m.
PT_DEVICE void ldmatrix_x4_trans(uint32_t row_addr, uint32_t (&m)[4] PT_SITE) {
#if defined(PT_EMULATE)
  emu::ldmatrix_x4(row_addr, m, true, site);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row_addr)
               : "memory");
#endif
}

// "Warp Level Matrix Multiply-Accumulate Instructions: stmatrix", sm_90 and later: the inverse of
// ldmatrix_x4.
PT_DEVICE void stmatrix_x4(uint32_t row_addr, const uint32_t (&m)[4] PT_SITE) {
#if defined(PT_EMULATE)
  emu::stmatrix_x4(row_addr, m, site);
#else
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_addr),
               "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
#endif
}

// "Warp Level Matrix Multiply-Accumulate Instructions: mma", m16n8k16.
// d[16][8] += A[16][16] B[16][8]; with g = lane / 4, q = lane % 4:
//
//   a[r]  A[g + 8 (r % 2)][2 q + 8 (r / 2) + {0, 1}]
//   b[r]  B[2 q + 8 r + {0, 1}][g]
//   d[i]  D[g + 8 (i / 2)][2 q + i % 2]
#if defined(PT_EMULATE)
PT_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                            bf16 PT_SITE) {
  emu::mma_m16n8k16(d, a, b, false, site);
}
PT_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                            f16 PT_SITE) {
  emu::mma_m16n8k16(d, a, b, true, site);
}
#else
#define PT_MMA_M16N8K16(type)                                                                \
  PT_DEVICE void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], \
                              type) {                                                        \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type                    \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "                       \
                 "{%0, %1, %2, %3};"                                                         \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));        \
  }
PT_MMA_M16N8K16(bf16)
PT_MMA_M16N8K16(f16)
#undef PT_MMA_M16N8K16
#endif

}  // namespace pt::ptx
