// SPDX-License-Identifier: Apache-2.0
// Loads and stores of global and shared memory, and atomics. An access is aligned to its size.
#pragma once

#include "cuda/ptx/platform.cuh"

namespace pt::ptx {

// Global memory.

// "Data Movement and Conversion Instructions: ld.global.nc", bypassing L1, for memory that is read
// once and not written while the kernel runs.
PT_DEVICE Words4 ld_global_once(const void* p PT_SITE) {
  Words4 v;
#if defined(PT_EMULATE)
  emu::ld_global(p, v.w, 16, site);
#else
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
      : "l"(p));
#endif
  return v;
}

// Like ld_global_once if `wanted`, else zeros. A predicate avoids a branch between loads. Volatile:
// the compiler would move a load past a row's reductions to its first use.
PT_DEVICE Words4 ld_global_once_where(const void* p, bool wanted PT_SITE) {
  Words4 v{};
#if defined(PT_EMULATE)
  if (wanted) emu::ld_global(p, v.w, 16, site);
#else
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted "
      "ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(v.w[0]), "+r"(v.w[1]), "+r"(v.w[2]), "+r"(v.w[3])
      : "l"(p), "r"(uint32_t(wanted)));
#endif
  return v;
}

// "Data Movement and Conversion Instructions: ld".
PT_DEVICE Words4 ld_global_v4(const void* p PT_SITE) {
  Words4 v;
#if defined(PT_EMULATE)
  emu::ld_global(p, v.w, 16, site);
#else
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
#endif
  return v;
}
PT_DEVICE uint32_t ld_global_u32(const void* p PT_SITE) {
  uint32_t v;
#if defined(PT_EMULATE)
  emu::ld_global(p, &v, 4, site);
#else
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
#endif
  return v;
}
PT_DEVICE uint16_t ld_global_u16(const void* p PT_SITE) {
  uint16_t v;
#if defined(PT_EMULATE)
  emu::ld_global(p, &v, 2, site);
#else
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
#endif
  return v;
}
PT_DEVICE uint8_t ld_global_u8(const void* p PT_SITE) {
#if defined(PT_EMULATE)
  uint8_t v;
  emu::ld_global(p, &v, 1, site);
  return v;
#else
  uint32_t v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return uint8_t(v);
#endif
}
PT_DEVICE uint64_t ld_global_u64(const void* p PT_SITE) {
  uint64_t v;
#if defined(PT_EMULATE)
  emu::ld_global(p, &v, 8, site);
#else
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
#endif
  return v;
}

// "Data Movement and Conversion Instructions: st".
PT_DEVICE void st_global_v4(void* p, const Words4& v PT_SITE) {
#if defined(PT_EMULATE)
  emu::st_global(p, v.w, 16, site);
#else
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.w[0]), "r"(v.w[1]),
               "r"(v.w[2]), "r"(v.w[3])
               : "memory");
#endif
}
// Like st_global_v4 if `wanted`, by a predicate.
PT_DEVICE void st_global_v4_where(void* p, const Words4& v, bool wanted PT_SITE) {
#if defined(PT_EMULATE)
  if (wanted) emu::st_global(p, v.w, 16, site);
#else
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted st.global.v4.u32 [%0], {%1, %2, "
      "%3, %4};\n}" ::"l"(p),
      "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3]), "r"(uint32_t(wanted))
      : "memory");
#endif
}
PT_DEVICE void st_global_u64(void* p, uint64_t v PT_SITE) {
#if defined(PT_EMULATE)
  emu::st_global(p, &v, 8, site);
#else
  asm volatile("st.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
#endif
}
PT_DEVICE void st_global_u32(void* p, uint32_t v PT_SITE) {
#if defined(PT_EMULATE)
  emu::st_global(p, &v, 4, site);
#else
  asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
#endif
}
PT_DEVICE void st_global_u16(void* p, uint16_t v PT_SITE) {
#if defined(PT_EMULATE)
  emu::st_global(p, &v, 2, site);
#else
  asm volatile("st.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
#endif
}
PT_DEVICE void st_global_u8(void* p, uint8_t v PT_SITE) {
#if defined(PT_EMULATE)
  emu::st_global(p, &v, 1, site);
#else
  asm volatile("st.global.u8 [%0], %1;" ::"l"(p), "r"(uint32_t(v)) : "memory");
#endif
}

// Global memory shared by blocks.

// "Parallel Synchronization and Communication Instructions: red", four additions, sm_90 and later.
PT_DEVICE void red_add_v4_f32(float* dst, float a, float b, float c, float d PT_SITE) {
#if defined(PT_EMULATE)
  const float value[] = {a, b, c, d};
  emu::red_add_f32(dst, value, 4, site);
#else
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "f"(a),
               "f"(b), "f"(c), "f"(d)
               : "memory");
#endif
}

// "Parallel Synchronization and Communication Instructions: atom"; returns the old value.
PT_DEVICE uint32_t atomic_add_u32(uint32_t* p, uint32_t value PT_SITE) {
#if defined(PT_EMULATE)
  return emu::atomic_add(p, value, false, site);
#else
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(value)
               : "memory");
  return old;
#endif
}

// "Parallel Synchronization and Communication Instructions: red", release. Publishes this thread's
// earlier writes. The proxy fence includes bulk operations that the thread waited for.
PT_DEVICE void release_add_u32(uint32_t* p, uint32_t value PT_SITE) {
#if defined(PT_EMULATE)
  emu::atomic_add(p, value, true, site);
#else
  asm volatile("fence.proxy.async.global;\nred.release.gpu.global.add.u32 [%0], %1;" ::"l"(p),
               "r"(value)
               : "memory");
#endif
}

// "Parallel Synchronization and Communication Instructions: atom", compare and swap: *p = value if
// *p == expected; returns the old value.
PT_DEVICE uint64_t atomic_cas_u64(uint64_t* p, uint64_t expected, uint64_t value PT_SITE) {
#if defined(PT_EMULATE)
  return emu::atomic_cas(p, expected, value, site);
#else
  uint64_t old;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(old)
               : "l"(p), "l"(expected), "l"(value)
               : "memory");
  return old;
#endif
}

// "Parallel Synchronization and Communication Instructions: atom", acquire and release; returns the
// old value. Publishes this thread's earlier writes, and shows those published by earlier calls.
PT_DEVICE uint64_t acq_rel_add_u64(uint64_t* p, uint64_t value PT_SITE) {
#if defined(PT_EMULATE)
  return emu::acq_rel_add(p, value, site);
#else
  uint64_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(old)
               : "l"(p), "l"(value)
               : "memory");
  return old;
#endif
}

// "Data Movement and Conversion Instructions: ld", acquire; loops until *p == value. A block may
// wait only for blocks that have certainly started.
PT_DEVICE void acquire_equal_u32(const uint32_t* p, uint32_t value PT_SITE) {
#if defined(PT_EMULATE)
  emu::wait_equal(p, value, site);
#else
  uint32_t now;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(p) : "memory");
  while (now != value);
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

// Shared memory.

// "Data Movement and Conversion Instructions: st".
PT_DEVICE void st_shared_u32(uint32_t addr, uint32_t value PT_SITE) {
#if defined(PT_EMULATE)
  emu::st_shared(addr, &value, 4, site);
#else
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(addr), "r"(value) : "memory");
#endif
}
PT_DEVICE void st_shared_v2_f32(uint32_t addr, float a, float b PT_SITE) {
#if defined(PT_EMULATE)
  const float value[] = {a, b};
  emu::st_shared(addr, value, 8, site);
#else
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(addr), "f"(a), "f"(b) : "memory");
#endif
}
PT_DEVICE void st_shared_v4_f32(uint32_t addr, float a, float b, float c, float d PT_SITE) {
#if defined(PT_EMULATE)
  const float value[] = {a, b, c, d};
  emu::st_shared(addr, value, 16, site);
#else
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
#endif
}

// "Data Movement and Conversion Instructions: ld".
PT_DEVICE uint32_t ld_shared_u32(uint32_t addr PT_SITE) {
  uint32_t value;
#if defined(PT_EMULATE)
  emu::ld_shared(addr, &value, 4, site);
#else
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(addr) : "memory");
#endif
  return value;
}
PT_DEVICE void ld_shared_v2_f32(uint32_t addr, float& a, float& b PT_SITE) {
#if defined(PT_EMULATE)
  float value[2];
  emu::ld_shared(addr, value, 8, site);
  a = value[0];
  b = value[1];
#else
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(a), "=f"(b) : "r"(addr) : "memory");
#endif
}
PT_DEVICE Words4 ld_shared_v4(uint32_t addr PT_SITE) {
  Words4 v;
#if defined(PT_EMULATE)
  emu::ld_shared(addr, v.w, 16, site);
#else
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "r"(addr)
               : "memory");
#endif
  return v;
}

PT_DEVICE void st_shared_f32(uint32_t addr, float value PT_SITE) {
  st_shared_u32(addr, float_bits(value) PT_HERE);
}
PT_DEVICE float ld_shared_f32(uint32_t addr PT_SITE) {
  return bits_float(ld_shared_u32(addr PT_HERE));
}

}  // namespace pt::ptx
