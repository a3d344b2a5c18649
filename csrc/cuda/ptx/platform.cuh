// SPDX-License-Identifier: Apache-2.0
// Lets two compilers build the same kernel source:
//
//   nvcc                       inline PTX
//   g++ with -DPT_EMULATE      calls into csrc/emulator, where threads are fibers on the CPU
//
// The headers of this folder have one function per PTX instruction, each with its chapter and
// instruction in NVIDIA's "Parallel Thread Execution ISA" (version 9.0). Kernels access memory and
// synchronize only through these functions, because the emulator cannot check other accesses.
// Shared memory is addressed by its 32-bit address in the shared window.
#pragma once

#include <cstdint>

#if defined(PT_EMULATE)
#include <cmath>
#include <cstring>

#include "emulator/emulator.h"
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define PT_DEVICE inline
#define PT_HOST_DEVICE inline
#define PT_UNROLL
#define PT_UNROLL_BY_TWO
#define PT_NO_UNROLL
#define PT_SITE , const emu::Site& site = emu::Site::current()
#define PT_ONLY_SITE const emu::Site& site = emu::Site::current()
#define PT_HERE , site
#define PT_ONLY_HERE site
#else
#include <cuda.h>
#include <cuda_runtime.h>
#define PT_DEVICE __device__ __forceinline__
#define PT_HOST_DEVICE __host__ __device__ __forceinline__
#define PT_UNROLL _Pragma("unroll")
#define PT_UNROLL_BY_TWO _Pragma("unroll 2")
#define PT_NO_UNROLL _Pragma("unroll 1")
// The last parameter of a ptx function is its call site. Only the emulator has it, to plant faults
// by site.
#define PT_SITE
#define PT_ONLY_SITE
#define PT_HERE
#define PT_ONLY_HERE
#endif

// 1 if wgmma and setmaxnreg exist. For other targets a kernel that needs them has an empty body and
// is never launched.
#if defined(PT_EMULATE) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PT_SM90A 1
#else
#define PT_SM90A 0
#endif

namespace pt::ptx {

#if defined(PT_EMULATE)
using TensorMap = emu::TensorMap;
#else
using TensorMap = CUtensorMap;
#endif

// Storage only.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// The unit of a 16-byte access.
struct Words4 {
  uint32_t w[4];
};

// Return the start of the block's dynamic shared memory. CUDA aligns it to 16 bytes only.
PT_DEVICE uint32_t dynamic_smem() {
#if defined(PT_EMULATE)
  return emu::dynamic_smem();
#else
  extern __shared__ __align__(16) uint8_t pt_dynamic_smem[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(pt_dynamic_smem));
#endif
}

// Return x as a value unknown to the compiler, which then recomputes expressions of it instead of
// holding them in registers.
PT_DEVICE int opaque(int x) {
#if !defined(PT_EMULATE)
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// "Special Registers: %nctaid". The compiler would hold gridDim.x in a register, or spill it, for a
// block's lifetime.
PT_DEVICE int grid_size() {
#if defined(PT_EMULATE)
  return int(gridDim.x);
#else
  int n;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(n));
  return n;
#endif
}

PT_DEVICE uint32_t float_bits(float x) {
#if defined(PT_EMULATE)
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
#else
  return __float_as_uint(x);
#endif
}

PT_DEVICE float bits_float(uint32_t bits) {
#if defined(PT_EMULATE)
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#else
  return __uint_as_float(bits);
#endif
}

}  // namespace pt::ptx
