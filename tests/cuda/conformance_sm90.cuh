// SPDX-License-Identifier: Apache-2.0
// The kernels of conformance.cuh for instructions that only sm_90a has: mbarriers, TMA, wgmma,
// setmaxnreg.
#pragma once

#include "conformance.cuh"

#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/product_shapes.h"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/warpgroup.cuh"

#if defined(PT_EMULATE) || defined(PT_HOPPER)

namespace conformance {

using cuda::swizzle128;

// One thread initialises an mbarrier for one arrival; all threads return its address.
PT_DEVICE uint32_t one_barrier(uint32_t at) {
  if (thread() == 0) {
    ptx::mbarrier_init(at, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::syncthreads();
  return at;
}

PT_DEVICE void wait(uint32_t bar, uint32_t parity) {
  while (!ptx::mbarrier_try_wait(bar, parity)) {}
}

// Loads one box of `bytes` by a map of rank 2 to 4, and copies shared memory to `out`.
template <int Rank>
__global__ void load_box(const __grid_constant__ ptx::TensorMap map, int bytes, int x, int y, int z,
                         int w, uint32_t* out) {
  const uint32_t tile = cuda::align_to_atom(ptx::dynamic_smem()), bar = one_barrier(tile + bytes);
  if (thread() == 0) {
    ptx::prefetch_tensor_map(map);
    ptx::mbarrier_arrive_expect_tx(bar, bytes);
    if (Rank == 2) ptx::tma_load_2d(tile, map, bar, x, y);
    else if (Rank == 3) ptx::tma_load_3d(tile, map, bar, x, y, z);
    else ptx::tma_load_4d(tile, map, bar, x, y, z, w);
  }
  wait(bar, 0);
  for (int i = thread(); i < bytes / 4; i += 128) out[i] = ptx::ld_shared_u32(tile + 4 * i);
}

// Fragment of A, [64][Columns] in global memory, for 16 columns from `column` on.
template <int Columns>
PT_DEVICE void load_fragment(uint32_t (&fragment)[4], const uint16_t* a, int column) {
  const int warp_row = thread() % 128 / 32 * 16, lane = thread() % 32;
  PT_UNROLL
  for (int r = 0; r < 4; ++r) {
    const uint16_t* at =
        a + (warp_row + lane / 4 + r % 2 * 8) * Columns + column + r / 2 * 8 + lane % 4 * 2;
    fragment[r] = at[0] | uint32_t(at[1]) << 16;
  }
}

// Registers of x[64][N] to `out`, row by row.
template <int N>
PT_DEVICE void store_sums(const float (&x)[N / 2], float* out) {
  const int warp_row = thread() % 128 / 32 * 16, lane = thread() % 32;
  PT_UNROLL
  for (int i = 0; i < N / 2; ++i)
    out[(warp_row + cuda::fragment_row(lane, i)) * N + cuda::fragment_column(lane, i)] = x[i];
}

// Compute out[64][n] = A[64][depth] B[depth][n] for shape number `Index`. A is [M][K] in memory, or
// [K][M] with trans_a; B is [N][K], or [K][N] with trans_b. A in registers is loaded from global
// memory.
template <class T, size_t Index>
__global__ void __launch_bounds__(128, 1)
    multiply(const __grid_constant__ ptx::TensorMap map_a,
             const __grid_constant__ ptx::TensorMap map_b, const uint16_t* a, float* out) {
  constexpr cuda::ProductShape kShape = cuda::kProductShapes[Index];
  constexpr int N = kShape.n, kDepth = kShape.depth();
  static_assert(kShape.a_in_registers || kDepth == 64);
  const uint32_t tile_a = cuda::align_to_atom(ptx::dynamic_smem()), tile_b = tile_a + 64 * 128;
  const uint32_t bar = one_barrier(tile_b + N * kDepth * 2);
  if (thread() == 0) {
    ptx::mbarrier_arrive_expect_tx(bar, (kShape.a_in_registers ? 0 : 64 * 128) + N * kDepth * 2);
    if (!kShape.a_in_registers) ptx::tma_load_2d(tile_a, map_a, bar, 0, 0);
    for (int p = 0; p < (kShape.trans_b ? N / 64 : 1); ++p)
      ptx::tma_load_2d(tile_b + p * kDepth * 128, map_b, bar, p * 64, 0);
  }
  wait(bar, 0);

  float x[N / 2];
  uint32_t fragment[kDepth / 16][4];
  if constexpr (kShape.a_in_registers) {
    PT_UNROLL
    for (int k = 0; k < kDepth / 16; ++k) load_fragment<kDepth>(fragment[k], a, k * 16);
  }
  ptx::wgmma_fence();
  PT_UNROLL
  for (int k = 0; k < kDepth / 16; ++k) {
    const uint64_t b = cuda::swizzled(tile_b + k * (kShape.trans_b ? 2048 : 32),
                                      kShape.panel_bytes ? kShape.panel_bytes : 16);
    if constexpr (kShape.a_in_registers)
      ptx::wgmma_rs<T, N, kShape.trans_b>(x, fragment[k], b, k > 0);
    else
      ptx::wgmma_ss<T, N, kShape.trans_b, kShape.trans_a>(
          x, cuda::swizzled(tile_a + k * (kShape.trans_a ? 2048 : 32)), b, k > 0);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  store_sums<N>(x, out);
}

// A stage of A, [64][64], and one of B, [64][64], both K-major.
using StepRing = cuda::Buffers<2, 2 * 64 * 128>;
constexpr int kSteps = 7;  // three phases and more of each of the ring's barriers

// One thread fills the ring with A's and B's steps of 64 columns.
PT_DEVICE void load_steps(const StepRing& ring, const ptx::TensorMap& a, const ptx::TensorMap& b) {
  for (int s = 0; s < kSteps; ++s) {
    ring.producer_acquire(s);
    ring.producer_commit(s, StepRing::kBytes);
    ptx::tma_load_2d(ring.buffer(s), a, ring.full(s), s * 64, 0);
    ptx::tma_load_2d(ring.buffer(s) + 64 * 128, b, ring.full(s), s * 64, 0);
  }
}
PT_DEVICE StepRing step_ring(int readers) {
  const uint32_t base = cuda::align_to_atom(ptx::dynamic_smem());
  const StepRing ring(base, base + StepRing::kBufferBytes);
  if (thread() == 0) {
    ring.init(1, readers, "full", "empty");
    ptx::fence_mbarrier_init();
  }
  ptx::syncthreads();
  return ring;
}

// out[64][64] = A[64][448] B[64][448]^T through the ring: a step's products in flight while the
// next step's begin.
__global__ void __launch_bounds__(256, 1)
    multiply_steps(const __grid_constant__ ptx::TensorMap a,
                   const __grid_constant__ ptx::TensorMap b, float* out) {
  const StepRing ring = step_ring(4);
  if (thread() < 128) {
    if (thread() == 0) load_steps(ring, a, b);
    return;
  }
  float x[32];
  for (int s = 0; s < kSteps; ++s) {
    ring.consumer_wait(s);
    ptx::wgmma_fence();
    PT_UNROLL
    for (int k = 0; k < 4; ++k)
      ptx::wgmma_ss<ptx::bf16, 64, false>(x, cuda::swizzled(ring.buffer(s) + k * 32),
                                          cuda::swizzled(ring.buffer(s) + 64 * 128 + k * 32),
                                          s > 0 || k > 0);
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();  // the step before
    if (s > 0) cuda::consumer_release_warp(ring, s - 1);
  }
  ptx::wgmma_wait<0>();
  store_sums<64>(x, out);
}

// Stages that ldmatrix reads, given back to TMA: out[step][matrix][warp][lane][8] as ldmatrix
// leaves rows 0 to 15 of the warp's 16.
__global__ void __launch_bounds__(256, 1)
    read_steps(const __grid_constant__ ptx::TensorMap a, const __grid_constant__ ptx::TensorMap b,
               uint32_t* out) {
  const StepRing ring = step_ring(4);
  if (thread() < 128) {
    if (thread() == 0) load_steps(ring, a, b);
    return;
  }
  const int row = thread() % 128 / 32 * 16 + thread() % 16, chunk = thread() % 32 / 16;
  for (int s = 0; s < kSteps; ++s) {
    ring.consumer_wait(s);
    PT_UNROLL
    for (int i = 0; i < 4; ++i) {  // two pieces of A, two of B
      uint32_t m[4];
      ptx::ldmatrix_x4(ring.buffer(s) + i / 2 * 64 * 128 +
                           swizzle128(uint32_t(row), uint32_t(i % 2 * 4 + chunk)),
                       m);
      for (int r = 0; r < 4; ++r) out[((s * 4 + i) * 128 + thread() % 128) * 4 + r] = m[r];
    }
    ptx::fence_proxy_async();
    cuda::consumer_release_warp(ring, s);
  }
}

// out[64][64] = A[64][64] B[64][64]^T where rows of B, as TMA left it, are cleared in shared memory
// first: those below 5 and from 50 on.
__global__ void __launch_bounds__(128, 1)
    multiply_cleared(const __grid_constant__ ptx::TensorMap a,
                     const __grid_constant__ ptx::TensorMap b, float* out) {
  const uint32_t tile_a = cuda::align_to_atom(ptx::dynamic_smem()), tile_b = tile_a + 64 * 128,
                 bar = one_barrier(tile_b + 64 * 128);
  if (thread() == 0) {
    ptx::mbarrier_arrive_expect_tx(bar, 2 * 64 * 128);
    ptx::tma_load_2d(tile_a, a, bar, 0, 0);
    ptx::tma_load_2d(tile_b, b, bar, 0, 0);
  }
  wait(bar, 0);
  for (int i = thread(); i < 64 * 8; i += 128)
    if (i / 8 < 5 || i / 8 >= 50) ptx::st_shared_v4_f32(tile_b + i * 16, 0.0f, 0.0f, 0.0f, 0.0f);
  ptx::fence_proxy_async();
  ptx::syncthreads();
  float x[32];
  ptx::wgmma_fence();
  PT_UNROLL
  for (int k = 0; k < 4; ++k)
    ptx::wgmma_ss<ptx::bf16, 64, false>(x, cuda::swizzled(tile_a + k * 32),
                                        cuda::swizzled(tile_b + k * 32), k > 0);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  store_sums<64>(x, out);
}

// Tiles written by st.shared in the core-matrix layout without swizzle, then read by wgmma: needs
// the fence and the barrier. D[m][n] is m, or n, by a product whose only term is k = 9. Leaves each
// thread's registers: out[128][32].
template <bool Fence, bool Barrier>
__global__ void __launch_bounds__(128, 1) accumulators(bool rows, float* out) {
  const uint32_t tile_a = cuda::align_to_atom(ptx::dynamic_smem()), tile_b = tile_a + 2048;
  // Core matrices are 8 rows x 16 bytes, contiguous. The two along K are adjacent (LBO 128), groups
  // of 8 rows 256 bytes apart (SBO).
  for (int i = thread(); i < 64 * 8; i += 128) {  // pairs of elements along K
    const int r = i / 8, k = i % 8 * 2;
    const uint32_t at = r / 8 * 256 + k / 8 * 128 + r % 8 * 16 + k % 8 * 2;
    ptx::st_shared_u32(tile_a + at, k == 8 ? ptx::pack_bf16(0.0f, rows ? float(r) : 1.0f) : 0);
    ptx::st_shared_u32(tile_b + at, k == 8 ? ptx::pack_bf16(0.0f, rows ? 1.0f : float(r)) : 0);
  }
  if (Fence) ptx::fence_proxy_async();
  if (Barrier) ptx::syncthreads();
  float d[32];
  ptx::wgmma_fence();
  ptx::wgmma_ss<ptx::bf16, 64, false>(
      d, ptx::smem_descriptor(tile_a, 128, 256, ptx::SmemLayout::None),
      ptx::smem_descriptor(tile_b, 128, 256, ptx::SmemLayout::None), false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  PT_UNROLL
  for (int i = 0; i < 32; ++i) out[thread() * 32 + i] = d[i];
}

// Descriptors as two words each: of the address, LBO, SBO and layout in `in`.
__global__ void descriptors(const uint32_t* in, uint32_t* out) {
  const uint32_t* d = in + 4 * thread();
  const uint64_t value = ptx::smem_descriptor(d[0], d[1], d[2], ptx::SmemLayout(d[3]));
  out[2 * thread()] = uint32_t(value), out[2 * thread() + 1] = uint32_t(value >> 32);
}

// A tile of 64 x 64 from A fragments by stmatrix, swizzled by hand; then shared memory as it is.
__global__ void __launch_bounds__(128, 1) store_matrices(const uint16_t* a, uint32_t* out) {
  const uint32_t tile = ptx::uniform(cuda::align_to_atom(ptx::dynamic_smem()));
  const int warp = thread() / 32, lane = thread() % 32;
  for (int k = 0; k < 4; ++k) {
    uint32_t fragment[4];
    PT_UNROLL
    for (int r = 0; r < 4; ++r) {
      const uint16_t* at =
          a + (warp * 16 + lane / 4 + r % 2 * 8) * 64 + k * 16 + r / 2 * 8 + lane % 4 * 2;
      fragment[r] = at[0] | uint32_t(at[1]) << 16;
    }
    ptx::stmatrix_x4(tile + swizzle128(warp * 16 + lane % 16, k * 2 + lane / 16), fragment);
  }
  ptx::syncthreads();
  for (int i = thread(); i < 64 * 32; i += 128) out[i] = ptx::ld_shared_u32(tile + 4 * i);
}

// Every block adds in[0..255] to out[0..255] by a bulk load and a bulk reduction, 1 to
// out[256..511] by a bulk reduction of what it stored, 1 to out[512..767] by vector reductions.
__global__ void __launch_bounds__(128, 1) add_up(const float* in, float* out) {
  const uint32_t tile = cuda::align_to_atom(ptx::dynamic_smem()), bar = one_barrier(tile + 3072);
  if (thread() == 0) {
    ptx::mbarrier_arrive_expect_tx(bar, 1024);
    ptx::bulk_load(tile, in, 1024, bar);
  }
  if (thread() < 64) {
    ptx::st_shared_v4_f32(tile + 1024 + thread() * 16, 1.0f, 1.0f, 1.0f, 1.0f);
    ptx::red_add_v4_f32(out + 512 + thread() * 4, 1.0f, 1.0f, 1.0f, 1.0f);
  }
  ptx::fence_proxy_async();
  ptx::syncthreads();
  if (thread() == 0) {
    ptx::bulk_reduce_add_f32(out + 256, tile + 1024, 1024);
    ptx::bulk_commit();
    wait(bar, 0);
    ptx::bulk_reduce_add_f32(out, tile, 1024);
    ptx::bulk_commit();
    ptx::bulk_wait_read<0>();
  }
}

// Blocks take turns in order of their tickets: out[i] = out[i] * 3 + ticket, half of it by a bulk
// reduction; the first stores out[i] * 2. state[0] hands out tickets, state[1] counts turns.
__global__ void __launch_bounds__(128, 1) take_turns(uint32_t* state, float* out) {
  const uint32_t tile = cuda::align_to_atom(ptx::dynamic_smem());
  if (thread() != 0) return;
  const uint32_t ticket = ptx::atomic_add_u32(state, 1);
  ptx::acquire_equal_u32(state + 1, ticket);
  for (int i = 0; i < 4; ++i)  // volatile: not from a cache that another block's additions bypass
    ptx::st_shared_u32(
        tile + 4 * i,
        ptx::float_bits(ptx::fma_rn(2.0f, static_cast<volatile float*>(out)[i], float(ticket))));
  ptx::fence_proxy_async();
  if (ticket == 0) ptx::bulk_store(out, tile, 16);
  else ptx::bulk_reduce_add_f32(out, tile, 16);
  ptx::bulk_commit();
  ptx::bulk_wait<0>();
  ptx::release_add_u32(state + 1, 1);
}

// Two threads hand a word to and fro over an mbarrier, without any copy.
__global__ void hand_over(const uint32_t* in, uint32_t* out) {
  const uint32_t word = ptx::dynamic_smem(), bar = one_barrier(word + 16);
  for (uint32_t round = 0; round < 6; ++round) {
    if (thread() == int(round % 2) * 32) {
      ptx::st_shared_u32(word, in[round] + (round ? ptx::ld_shared_u32(word) : 0));
      ptx::mbarrier_arrive(bar);
    }
    wait(bar, round % 2);
    if (thread() == 0) out[round] = ptx::ld_shared_u32(word);
    ptx::syncthreads();
  }
}

// Three warpgroups: the first gives registers away that the others take.
__global__ void __launch_bounds__(384, 1) registers(uint32_t* out) {
  if (thread() < 128) ptx::setmaxnreg_dec<24>();
  else ptx::setmaxnreg_inc<240>();
  out[thread()] = uint32_t(thread()) * 3;
}

}  // namespace conformance

#endif
