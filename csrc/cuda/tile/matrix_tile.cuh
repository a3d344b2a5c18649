// SPDX-License-Identifier: Apache-2.0
// Row tiles in shared memory, and a warp's gemms: 16 rows times rows, and 16 rows of weights times
// a tile.
//
// Every accumulator has the m16n8 layout (fragments.cuh). bf16 and f16 use mma.sync; f32 uses fused
// multiply-adds in true float32.
#pragma once

#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/vectors.cuh"

namespace pt::cuda {

// Rows of RowBytes. The 16-byte chunk c of row r is stored at chunk c ^ (r % 8), so eight rows of
// one chunk use all banks.
template <int RowBytes>
struct SmemTile {
  static_assert(RowBytes % 128 == 0);
  static constexpr int kChunks = RowBytes / 16;
  uint32_t base;
  PT_DEVICE uint32_t at(int row, int chunk) const {
    return base + uint32_t(row * RowBytes + ((chunk ^ (row & 7)) << 4));
  }
};

// Start copying rows [first, first + Rows) of `columns` elements (a multiple of 16 bytes); at(r) is
// the address of row r. Rows outside [lo, hi) and columns past `columns`, up to `used` chunks,
// become zeros and are not read; at() is not called for such rows. `some` is any valid address.
// Threads is the block's size, or 0 if unknown at compile time.
template <int Rows, int Threads = 0, int RowBytes, class T, class At>
PT_DEVICE void copy_rows_at(SmemTile<RowBytes> tile, const T* some, At at, int first, int lo,
                            int hi, int columns, int used) {
  constexpr int C = SmemTile<RowBytes>::kChunks, kPer = 16 / sizeof(T);
  const auto copy = [&](auto x) {
    const int row = int(x / C), chunk = int(x % C), r = first + row;
    if (chunk >= used) return;
    const bool there = r >= lo && r < hi &&  // otherwise zeros
                       chunk * kPer < columns;
    ptx::cp_async_16(tile.at(row, chunk), there ? at(r) + chunk * kPer : some, there ? 16 : 0);
  };
  if constexpr (Threads == 0) {
    for (int x = int(threadIdx.x); x < Rows * C; x += int(blockDim.x)) copy(x);
  } else {
    static_assert(Rows * C % Threads == 0);
    const int thread = ptx::opaque(int(threadIdx.x));  // prevents hoisting out of an enclosing loop
    PT_NO_UNROLL                                       // limits code size
    for (int x = 0; x < Rows * C; x += Threads) copy(uint32_t(x + thread));
  }
}
// Copy rows `stride` apart, the first at `head`.
template <int Rows, int RowBytes, class T>
PT_DEVICE void copy_rows(SmemTile<RowBytes> tile, const T* head, int64_t stride, int first, int lo,
                         int hi, int columns, int used) {
  copy_rows_at<Rows>(
      tile, head, [&](int r) { return head + r * stride; }, first, lo, hi, columns, used);
}

// Copy 32 rows at `head`, `stride` apart, with one warp. Rows outside [lo, hi), lo <= hi, become
// zeros and are not read.
template <int RowBytes, class T>
PT_DEVICE void copy_rows_by_warp(SmemTile<RowBytes> tile, const T* head, int64_t stride, int lo,
                                 int hi, int columns, int used) {
  constexpr int C = SmemTile<RowBytes>::kChunks, kPer = 16 / sizeof(T), kRows = 32 / C;
  const int chunk = int(threadIdx.x % C), own = int(threadIdx.x % 32 / C);
  if (chunk >= used) return;
  const T* from = head + own * stride + chunk * kPer;
  const auto there = uint32_t(chunk * kPer < columns ? hi - lo : 0);
  PT_NO_UNROLL  // limits code size
  for (int first = 0; first < 32; first += 8, from += 8 * stride) {
    PT_UNROLL
    for (int row = 0; row < 8; row += kRows) {
      ptx::cp_async_16(tile.at(own + row, chunk) + first * RowBytes, from + row * stride,
                       uint32_t(own + row + first - lo) < there ? 16 : 0);
    }
  }
}

// Like copy_rows_by_warp, for rows at any address: `mine` is the address of row lane_id() if it is
// in [lo, hi), else any valid address. So each row's address is computed once, not per 16 bytes.
template <int RowBytes, class T>
PT_DEVICE void copy_rows_of_lanes(SmemTile<RowBytes> tile, const T* mine, int lo, int hi,
                                  int columns, int used) {
  constexpr int C = SmemTile<RowBytes>::kChunks, kPer = 16 / sizeof(T), kRows = 32 / C, kAtOnce = 4;
  const int chunk = lane_id() % C;
  const bool there = chunk * kPer < columns;  // otherwise zeros
  PT_NO_UNROLL                                // full unrolling used registers that scores need
  for (int first = 0; first < 32; first += kAtOnce * kRows) {
    PT_UNROLL
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = first + i * kRows + lane_id() / C;
      const T* const from = ptx::shfl(mine, row) + (there ? chunk * kPer : 0);
      if (chunk < used)
        ptx::cp_async_16(tile.at(row, chunk), from, there && row >= lo && row < hi ? 16 : 0);
    }
  }
}

template <int N>
PT_DEVICE void clear(float (&sums)[N][4]) {
  PT_UNROLL
  for (int n = 0; n < N; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.0f;
}

// Bit 2 n + e is set if column e of a lane's columns of n-block n takes part.
constexpr uint32_t kAllColumns = 0xffffffffu;

template <class T>
struct Products {
  static constexpr int kStep = 16;  // columns per step of a gemm
  // Steps and chunks that cover `columns` columns.
  static PT_DEVICE int steps(int columns) { return (columns + 15) / 16; }
  static PT_DEVICE int chunks(int columns) { return 2 * steps(columns); }

  // Load the A fragment: rows [row, row + 16), columns of one step.
  template <int RowBytes>
  static PT_DEVICE void load_a(uint32_t (&a)[4], SmemTile<RowBytes> tile, int row, int step) {
    const int lane = lane_id();
    ptx::ldmatrix_x4(tile.at(row + lane % 16, 2 * step + lane / 16), a);
  }

  // acc += A times 8 NB rows of `b`, transposed, for one step.
  template <int NB, int RowBytes>
  static PT_DEVICE void step(float (&acc)[NB][4], const uint32_t (&a)[4], SmemTile<RowBytes> b,
                             int step) {
    const int lane = lane_id();
    PT_UNROLL
    for (int n = 0; n < NB; n += 2) {
      uint32_t m[4];
      ptx::ldmatrix_x4(b.at(8 * n + lane % 8 + 8 * (lane / 16), 2 * step + lane / 8 % 2), m);
      const uint32_t b0[2] = {m[0], m[1]}, b1[2] = {m[2], m[3]};
      ptx::mma_m16n8k16(acc[n], a, b0, T{});
      ptx::mma_m16n8k16(acc[n + 1], a, b1, T{});
    }
  }

  // acc = rows [row, row + 16) of `a` times 8 NB rows of `b`, transposed.
  template <int NB, int RowBytes>
  static PT_DEVICE void scores(float (&acc)[NB][4], SmemTile<RowBytes> a, int row,
                               SmemTile<RowBytes> b, int columns) {
    clear(acc);
    for (int s = 0; s < steps(columns); ++s) {
      uint32_t fragment[4];
      load_a(fragment, a, row, s);
      step(acc, fragment, b, s);
    }
  }

  // acc += P (16 x 8 NB, in accumulator layout, rounded to T) times `b`, from column 8 first on,
  // `columns` in all. Rows of b whose `visible` bit is 0 count as zero.
  template <int NB, int DB, int RowBytes>
  static PT_DEVICE void product(float (&acc)[DB][4], const float (&p)[NB][4], SmemTile<RowBytes> b,
                                int first, int columns, uint32_t visible) {
    static_assert(NB % 2 == 0 && DB % 2 == 0);
    const int lane = lane_id();
    PT_UNROLL
    for (int k = 0; k < NB; k += 2) {
      const uint32_t a[4] = {Element<T>::pack(p[k][0], p[k][1]), Element<T>::pack(p[k][2], p[k][3]),
                             Element<T>::pack(p[k + 1][0], p[k + 1][1]),
                             Element<T>::pack(p[k + 1][2], p[k + 1][3])};
      const uint32_t keep[2] = {half_words(visible >> 2 * k), half_words(visible >> (2 * k + 2))};
      PT_UNROLL
      for (int d = 0; d < DB; d += 2) {
        if (8 * (first + d) >= columns) continue;
        uint32_t m[4];
        ptx::ldmatrix_x4_trans(b.at(8 * k + lane % 16, first + d + lane / 16), m);
        const uint32_t b0[2] = {m[0] & keep[0], m[1] & keep[1]},
                       b1[2] = {m[2] & keep[0], m[3] & keep[1]};
        ptx::mma_m16n8k16(acc[d], a, b0, T{});
        ptx::mma_m16n8k16(acc[d + 1], a, b1, T{});
      }
    }
  }

 private:
  static PT_DEVICE uint32_t half_words(uint32_t bits) {
    return (bits & 1 ? 0xffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u);
  }
};

template <>
struct Products<float> {
  static constexpr int kStep = 4;
  static PT_DEVICE int steps(int columns) { return (columns + 3) / 4; }
  static PT_DEVICE int chunks(int columns) { return 2 * ((columns + 7) / 8); }

  template <int NB, int RowBytes>
  static PT_DEVICE void scores(float (&acc)[NB][4], SmemTile<RowBytes> a, int row,
                               SmemTile<RowBytes> b, int columns) {
    const int g = lane_id() / 4, q = lane_id() % 4;
    clear(acc);
    for (int s = 0; s < steps(columns); ++s) {
      const ptx::Words4 a0 = ptx::ld_shared_v4(a.at(row + g, s)),
                        a1 = ptx::ld_shared_v4(a.at(row + g + 8, s));
      PT_UNROLL
      for (int n = 0; n < NB; ++n) {
        PT_UNROLL
        for (int e = 0; e < 2; ++e) {
          const ptx::Words4 x = ptx::ld_shared_v4(b.at(8 * n + 2 * q + e, s));
          PT_UNROLL
          for (int i = 0; i < 4; ++i) {
            acc[n][e] += ptx::bits_float(a0.w[i]) * ptx::bits_float(x.w[i]);
            acc[n][2 + e] += ptx::bits_float(a1.w[i]) * ptx::bits_float(x.w[i]);
          }
        }
      }
    }
  }

  // A lane holds two of a row's eight weights; the row's four lanes exchange them.
  template <int NB, int DB, int RowBytes>
  static PT_DEVICE void product(float (&acc)[DB][4], const float (&p)[NB][4], SmemTile<RowBytes> b,
                                int first, int columns, uint32_t visible) {
    const int q = lane_id() % 4;
    PT_NO_UNROLL  // full unrolling needs too many registers
    for (int x = 0; x < 4; ++x) {
      const uint32_t theirs = ptx::shfl_xor_u32(visible, x);
      PT_UNROLL
      for (int n = 0; n < NB; ++n) {
        PT_UNROLL
        for (int e = 0; e < 2; ++e) {
          const float p0 = ptx::shfl_xor(p[n][e], x), p1 = ptx::shfl_xor(p[n][2 + e], x);
          const bool here = theirs >> (2 * n + e) & 1;
          PT_UNROLL
          for (int d = 0; d < DB; ++d) {
            const int column = 8 * (first + d) + 2 * q;
            if (8 * (first + d) >= columns || !here) continue;
            float v0, v1;
            ptx::ld_shared_v2_f32(b.at(8 * n + 2 * (q ^ x) + e, column / 4) + column % 4 * 4, v0,
                                  v1);
            acc[d][0] += p0 * v0, acc[d][1] += p0 * v1;
            acc[d][2] += p1 * v0, acc[d][3] += p1 * v1;
          }
        }
      }
    }
  }
};

// Eight-bit rows are not operands: kernels widen them first.
template <>
struct Products<uint8_t> {
  static PT_DEVICE int chunks(int columns) { return (columns + 15) / 16; }
};

// Reduce over the four lanes that share a row.
PT_DEVICE float max_of_quad(float x) {
  x = fmaxf(x, ptx::shfl_xor(x, 1));
  return fmaxf(x, ptx::shfl_xor(x, 2));
}
PT_DEVICE float sum_of_quad(float x) {
  x += ptx::shfl_xor(x, 1);
  return x + ptx::shfl_xor(x, 2);
}

}  // namespace pt::cuda
