// SPDX-License-Identifier: Apache-2.0
// Small kernels, each for a few PTX instructions. For equal inputs, the emulator and a GPU must
// write equal outputs: test_ptx_conformance.py. These instructions exist from sm_80 on;
// conformance_sm90.cuh has the others. tests/emulator/test_layouts.py derives the emulator's
// results by hand.
//
// Kernel arguments: `in` has random words, `out` the words to compare. Values that are compared bit
// for bit are computed by functions of csrc/cuda/ptx or with integers, because nvcc contracts a
// product and a sum in C++ to one instruction that rounds once, and g++ rounds twice.
#pragma once

#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/matrix.cuh"
#include "cuda/ptx/memory.cuh"
#include "cuda/tile/block_counter.cuh"

namespace conformance {

using namespace pt;

PT_DEVICE int thread() { return int(threadIdx.x); }

// Ten results for each of 256 threads, from three random floats each.
__global__ void arithmetic(const uint32_t* in, uint32_t* out) {
  const float a = ptx::bits_float(in[3 * thread()]), b = ptx::bits_float(in[3 * thread() + 1]),
              c = ptx::bits_float(in[3 * thread() + 2]);
  const uint16_t low = uint16_t(in[3 * thread()]);
  const uint32_t finite = ptx::pack_f16_finite(a, b);
  const uint32_t results[] = {ptx::float_bits(ptx::sqrt_rn(a)),
                              ptx::float_bits(ptx::div_rn(a, b)),
                              ptx::float_bits(ptx::fma_rn(a, b, c)),
                              ptx::pack_bf16(a, b),
                              ptx::pack_f16(a, b),
                              ptx::float_bits(ptx::widen(ptx::bf16{low})),
                              ptx::float_bits(ptx::widen(ptx::f16{low})),
                              ptx::float_bits(ptx::widen(ptx::f16{uint16_t(finite)})),
                              ptx::float_bits(ptx::widen(ptx::f16{uint16_t(finite >> 16)})),
                              ptx::prmt<0x81b2>(in[3 * thread()])};
  for (int i = 0; i < 10; ++i) out[10 * thread() + i] = results[i];
}

// ex2, lg2 and rcp are approximate: compared with a tolerance, for equal x. x in [-140, 140) from
// the random word.
__global__ void approximate(const uint32_t* in, float* out) {
  const float x = ptx::fma_rn(float(in[thread()] >> 8), 280.0f / float(1 << 24), -140.0f);
  out[3 * thread()] = ptx::exp2(x);
  out[3 * thread() + 1] = ptx::log2(x < 0 ? -x : x);
  out[3 * thread() + 2] = ptx::rcp(x);
}

// 128 threads: every width of load and store, global and shared, and the words travel through both.
__global__ void memory(const uint32_t* in, uint32_t* out) {
  const uint32_t shared = ptx::dynamic_smem();
  const int t = thread();
  ptx::Words4 v = ptx::ld_global_once(in + 4 * t);
  const ptx::Words4 w = ptx::ld_global_v4(in + 4 * (127 - t));
  for (int i = 0; i < 4; ++i) v.w[i] ^= w.w[i];
  ptx::st_global_v4(out + 4 * t, v);
  ptx::st_shared_v4_f32(shared + 16 * t, ptx::bits_float(v.w[0]), ptx::bits_float(v.w[1]),
                        ptx::bits_float(v.w[2]), ptx::bits_float(v.w[3]));
  ptx::st_shared_f32(shared + 2048 + 4 * t, ptx::bits_float(ptx::ld_global_u32(in + t)));
  ptx::st_shared_v2_f32(shared + 2560 + 8 * t, ptx::bits_float(v.w[1]), ptx::bits_float(v.w[2]));
  ptx::syncthreads();
  float a, b;
  ptx::ld_shared_v2_f32(shared + 16 * (127 - t) + 8, a, b);
  ptx::st_global_u64(out + 512 + 4 * t, uint64_t(ptx::float_bits(b)) << 32 | ptx::float_bits(a));
  ptx::st_global_u32(out + 512 + 4 * t + 2, ptx::ld_shared_u32(shared + 2048 + 4 * (t ^ 5)));
  const uint64_t pair = ptx::ld_global_u64(in + 2 * t);
  auto* halves = reinterpret_cast<uint16_t*>(out + 512 + 4 * t + 3);
  ptx::st_global_u16(halves, uint16_t(pair >> 32));
  ptx::st_global_u16(halves + 1, ptx::ld_global_u16(reinterpret_cast<const uint16_t*>(in) + t));
  ptx::st_global_v4(out + 1024 + 4 * t, ptx::ld_shared_v4(shared + 16 * (t ^ 1)));
  auto* bytes = reinterpret_cast<uint8_t*>(out + 1536 + t);
  for (int i = 0; i < 4; ++i)
    ptx::st_global_u8(bytes + i,
                      ptx::ld_global_u8(reinterpret_cast<const uint8_t*>(in) + (t ^ 37 * i)));
  for (int i = 0; i < 2; ++i)
    ptx::st_global_u32(out + 1664 + 2 * t + i,
                       ptx::float_bits(ptx::ld_shared_f32(shared + 2560 + 8 * (t ^ 3) + 4 * i)));
  ptx::st_global_v4_where(out + 1920 + 4 * t,
                          ptx::ld_global_once_where(in + 4 * (t ^ 9), t % 3 > 0), t % 5 > 0);
}

// 64 threads: shuffles at every distance, and accesses ordered by a warp and a named barrier.
__global__ void meetings(const uint32_t* in, uint32_t* out) {
  const uint32_t shared = ptx::dynamic_smem();
  const int t = thread();
  for (int d = 1, i = 0; d < 32; d *= 2, ++i)
    out[8 * t + i] = i % 2 ? ptx::shfl_xor_u32(in[t], d)
                           : ptx::float_bits(ptx::shfl_xor(ptx::bits_float(in[t]), d));
  ptx::st_shared_u32(shared + 4 * t, in[t]);
  ptx::syncwarp();
  out[8 * t + 5] = ptx::ld_shared_u32(shared + 4 * (t ^ 31));
  if (t < 32) {  // the second warp's words, which it announces without waiting
    ptx::bar_sync(1, 64);
    out[8 * t + 6] = ptx::ld_shared_u32(shared + 4 * (t + 32));
  } else {
    ptx::bar_arrive(1, 64);
    out[8 * t + 6] = 0;
  }
  out[8 * t + 7] = *ptx::shfl(in + t, 5 * t % 32) ^ ptx::shfl_u32(in[t], 7 * t % 32);
}

// 128 threads, two groups of copies each: 16 bytes, then t % 17 bytes and zeros.
__global__ void async_copies(const uint32_t* in, uint32_t* out) {
  const uint32_t shared = ptx::dynamic_smem();
  const int t = thread();
  ptx::cp_async_16(shared + 16 * t, in + 4 * (127 - t), 16);
  ptx::cp_async_commit();
  ptx::cp_async_16(shared + 2048 + 16 * t, in + 512 + 4 * t, t % 17);
  ptx::cp_async_commit();
  ptx::cp_async_wait<1>();
  for (int i = 0; i < 4; ++i) out[8 * t + i] = ptx::ld_shared_u32(shared + 16 * t + 4 * i);
  ptx::cp_async_wait<0>();
  ptx::syncthreads();
  for (int i = 0; i < 4; ++i)
    out[8 * t + 4 + i] = ptx::ld_shared_u32(shared + 2048 + 16 * (t ^ 1) + 4 * i);
}

// One warp. `in`: four 8 x 8 matrices of 16-bit elements, row by row. Registers by ldmatrix, plain
// and transposed.
__global__ void load_matrices(const uint32_t* in, uint32_t* out) {
  const uint32_t shared = ptx::dynamic_smem();
  const int lane = thread();
  for (int i = 0; i < 4; ++i) ptx::st_shared_u32(shared + 16 * lane + 4 * i, in[4 * lane + i]);
  ptx::syncwarp();
  uint32_t m[4], n[4];
  ptx::ldmatrix_x4(shared + 16 * lane, m);
  ptx::ldmatrix_x4_trans(shared + 16 * lane, n);
  for (int i = 0; i < 4; ++i) out[8 * lane + i] = m[i], out[8 * lane + 4 + i] = n[i];
}

// One warp: d = A B + C on raw registers; small integers, so that sums are exact.
template <class T>
__global__ void product(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  const int lane = thread();
  uint32_t ra[4], rb[2];
  float rd[4];
  for (int i = 0; i < 4; ++i) ra[i] = a[4 * lane + i], rd[i] = c[4 * lane + i];
  for (int i = 0; i < 2; ++i) rb[i] = b[2 * lane + i];
  ptx::mma_m16n8k16(rd, ra, rb, T{});
  for (int i = 0; i < 4; ++i) d[4 * lane + i] = rd[i];
}

// Increments in[0] from many blocks.
__global__ void count(uint32_t* out) {
  ptx::atomic_add_u32(out + thread() % 4, uint32_t(thread()));
}

// Each block stores four words; the last one adds up those of all blocks.
__global__ void complete(uint64_t* word, uint64_t first, uint32_t* parts, uint32_t* out) {
  const uint32_t last = ptx::dynamic_smem();
  const cuda::BlockCounter<64> counter{word, first};
  const int block = int(blockIdx.x);
  if (thread() < 4) ptx::st_global_u32(parts + 4 * block + thread(), uint32_t(block * block + 1));
  if (thread() == 0) counter.begin(ptx::grid_size());
  ptx::syncthreads();
  if (thread() == 0) ptx::st_shared_u32(last, counter.arrive());
  ptx::syncthreads();
  if (!ptx::ld_shared_u32(last) || thread() >= 4) return;
  uint32_t sum = 0;
  for (int i = 0; i < ptx::grid_size(); ++i) sum += ptx::ld_global_u32(parts + 4 * i + thread());
  ptx::st_global_u32(out + thread(), sum);
}

}  // namespace conformance
