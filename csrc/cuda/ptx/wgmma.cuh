// SPDX-License-Identifier: Apache-2.0
// Matrix products of a warpgroup (128 threads): sm_90a only.
#pragma once

#include <type_traits>

#include "cuda/ptx/platform.cuh"

namespace pt::ptx {

enum class SmemLayout : uint64_t { None = 0, Swizzle128 = 1, Swizzle64 = 2, Swizzle32 = 3 };

// "Asynchronous Warpgroup Level Matrix Instructions: matrix descriptor format". In bytes:
//   K-major,  Swizzle128: sbo = distance between groups of 8 rows; lbo is unused.
//   MN-major, Swizzle128: sbo = distance between groups of 8 k; lbo = between 64-wide panels.
PT_DEVICE constexpr uint64_t smem_descriptor(uint32_t addr, uint32_t lbo, uint32_t sbo,
                                             SmemLayout layout) {
  return uint64_t((addr & 0x3ffff) >> 4) | uint64_t((lbo & 0x3ffff) >> 4) << 16 |
         uint64_t((sbo & 0x3ffff) >> 4) << 32 | uint64_t(layout) << 62;
}

// "Asynchronous Warpgroup Level Matrix Instructions: wgmma.fence". Required before the first wgmma
// and after other accesses to its registers.
PT_DEVICE void wgmma_fence(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::wgmma_fence(site);
#else
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// "Asynchronous Warpgroup Level Matrix Instructions: wgmma.commit_group".
PT_DEVICE void wgmma_commit(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::wgmma_commit(site);
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Give x a register of its own here. If the compiler shares an accumulator's initial value with
// another, or copies it late, it writes the register after wgmma.fence (ptxas: C7517).
PT_DEVICE void fence_operand([[maybe_unused]] float& x) {
#if !defined(PT_EMULATE)
  asm volatile("" : "+f"(x)::"memory");
#endif
}

// Like above, for an operand in registers: no other code may use them while the product runs.
PT_DEVICE void fence_operand([[maybe_unused]] uint32_t& x) {
#if !defined(PT_EMULATE)
  asm volatile("" : "+r"(x)::"memory");
#endif
}

// "Asynchronous Warpgroup Level Matrix Instructions: wgmma.wait_group". Waits until all but the
// last `Pending` groups are complete.
template <int Pending>
PT_DEVICE void wgmma_wait(PT_ONLY_SITE) {
#if defined(PT_EMULATE)
  emu::wgmma_wait(Pending, site);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
#endif
}

// "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async".
// d[64][N] (+)= A[64][16] B[16][N], operands of type T (bf16 or f16), f32 accumulators. A is in
// shared memory (SS), K-major or, with TransA, M-major, or in registers (RS). B is K-major or, with
// TransB, N-major. accumulate = false overwrites d.
// Register i of thread t is row 16 (t/32) + t%32/4 + 8 (i/2%2), column 8 (i/4) + 2 (t%4) + i%2.
#if defined(PT_EMULATE)

template <class T, int N, bool TransB, bool TransA = false>
inline void wgmma_ss(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, bool accumulate PT_SITE) {
  emu::wgmma(N, std::is_same_v<T, f16>, d, nullptr, desc_a, TransA, desc_b, TransB, accumulate,
             site);
}
template <class T, int N, bool TransB>
inline void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t desc_b,
                     bool accumulate PT_SITE) {
  emu::wgmma(N, std::is_same_v<T, f16>, d, a, 0, false, desc_b, TransB, accumulate, site);
}

#else

template <class T, int N, bool TransB, bool TransA = false>
PT_DEVICE void wgmma_ss(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b,
                        bool accumulate) = delete;
template <class T, int N, bool TransB>
PT_DEVICE void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t desc_b,
                        bool accumulate) = delete;

// clang-format off
#define PT_D8(i) "+f"(d[i]), "+f"(d[i+1]), "+f"(d[i+2]), "+f"(d[i+3]), \
                  "+f"(d[i+4]), "+f"(d[i+5]), "+f"(d[i+6]), "+f"(d[i+7])
#define PT_D16 PT_D8(0), PT_D8(8)
#define PT_D24 PT_D16, PT_D8(16)
#define PT_D32 PT_D24, PT_D8(24)
#define PT_D40 PT_D32, PT_D8(32)
#define PT_D48 PT_D40, PT_D8(40)
#define PT_D64 PT_D48, PT_D8(48), PT_D8(56)
#define PT_D80 PT_D64, PT_D8(64), PT_D8(72)
#define PT_D88 PT_D80, PT_D8(80)
#define PT_D96 PT_D88, PT_D8(88)
#define PT_D128 PT_D96, PT_D8(96), PT_D8(104), PT_D8(112), PT_D8(120)
#define PT_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define PT_R24 PT_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define PT_R32 PT_R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define PT_R40 PT_R32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define PT_R48 PT_R40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define PT_R64 PT_R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define PT_R80 PT_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define PT_R88 PT_R80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define PT_R96 PT_R88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define PT_R128 PT_R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
                ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// R is the number of accumulators; TA and TB are 0 or 1; P0... are the numbers of the operands
// after the accumulators.
#define PT_WGMMA_SS(T, N, TA, TB, R, P0, P1, P2)                                                                     \
  template <>                                                                                                         \
  PT_DEVICE void wgmma_ss<T, N, TB, TA>(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, bool accumulate) {         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2 ", 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T " {" PT_R##R "}, "                      \
                 "%" #P0 ", %" #P1 ", p, 1, 1, " #TA ", " #TB ";\n}"                                                  \
                 : PT_D##R : "l"(desc_a), "l"(desc_b), "r"(int(accumulate)));                                        \
  }
#define PT_WGMMA_RS(T, N, TB, R, P0, P1, P2, P3, P4, P5)                                                             \
  template <>                                                                                                         \
  PT_DEVICE void wgmma_rs<T, N, TB>(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t desc_b, bool accumulate) {    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5 ", 0;\n"                                                    \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T " {" PT_R##R "}, "                      \
                 "{%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1, " #TB ";\n}"                           \
                 : PT_D##R : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(desc_b),                                \
                         "r"(int(accumulate)));                                                                       \
  }
#define PT_WGMMA_OF(T, N, R, P0, P1, P2, P3, P4, P5)                                                                 \
  PT_WGMMA_SS(T, N, 0, 0, R, P0, P1, P2)                                                                             \
  PT_WGMMA_SS(T, N, 0, 1, R, P0, P1, P2)                                                                             \
  PT_WGMMA_SS(T, N, 1, 0, R, P0, P1, P2)                                                                             \
  PT_WGMMA_SS(T, N, 1, 1, R, P0, P1, P2)                                                                             \
  PT_WGMMA_RS(T, N, 0, R, P0, P1, P2, P3, P4, P5)                                                                    \
  PT_WGMMA_RS(T, N, 1, R, P0, P1, P2, P3, P4, P5)
#define PT_WGMMA(N, R, P0, P1, P2, P3, P4, P5)                                                                       \
  PT_WGMMA_OF(bf16, N, R, P0, P1, P2, P3, P4, P5)                                                                    \
  PT_WGMMA_OF(f16, N, R, P0, P1, P2, P3, P4, P5)
PT_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
PT_WGMMA(48, 24, 24, 25, 26, 27, 28, 29)
PT_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
PT_WGMMA(80, 40, 40, 41, 42, 43, 44, 45)
PT_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
PT_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
PT_WGMMA(160, 80, 80, 81, 82, 83, 84, 85)
PT_WGMMA(176, 88, 88, 89, 90, 91, 92, 93)
PT_WGMMA(192, 96, 96, 97, 98, 99, 100, 101)
PT_WGMMA(256, 128, 128, 129, 130, 131, 132, 133)
#undef PT_WGMMA_SS
#undef PT_WGMMA_RS
#undef PT_WGMMA_OF
#undef PT_WGMMA
#undef PT_R128
#undef PT_R96
#undef PT_R88
#undef PT_R80
#undef PT_R64
#undef PT_R48
#undef PT_R40
#undef PT_R32
#undef PT_R16
#undef PT_R24
#undef PT_D128
#undef PT_D96
#undef PT_D88
#undef PT_D80
#undef PT_D64
#undef PT_D48
#undef PT_D40
#undef PT_D32
#undef PT_D16
#undef PT_D24
#undef PT_D8
// clang-format on
#endif

}  // namespace pt::ptx
