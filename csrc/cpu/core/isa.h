// SPDX-License-Identifier: Apache-2.0
// Choice of the CPU kernels' instruction set, and macros that select an op's kernel table for it.
//
// csrc/cpu/<op>/kernels.cpp is compiled once per instruction set, with PT_ISA defined as its name,
// and defines pt::PT_ISA::<op>_kernels. The binding is compiled once and uses
//     PT_DECLARE_KERNELS(AttentionKernels, attention_kernels);   // at global scope
//     PT_SELECT(attention_kernels).forward(problem);             // table of the active set
#pragma once

#include <cstdint>
#include <string>
#include <vector>

// Instruction sets of this build, best first. The build passes it:
//     -D"PT_FOR_EACH_ISA(X,A)=X(avx512_bf16,A) X(generic,A)"
#ifndef PT_FOR_EACH_ISA
#define PT_FOR_EACH_ISA(X, A) X(generic, A)
#endif

namespace pt {

#define PT_ISA_ENUMERATOR(isa, unused) isa,
enum class Isa : int { PT_FOR_EACH_ISA(PT_ISA_ENUMERATOR, ) };
#undef PT_ISA_ENUMERATOR

struct CpuFeature {
  const char* name;
  bool present;  // in the CPU, with registers saved by the OS
};
const std::vector<CpuFeature>& cpu_features();
std::string cpu_vendor();  // as CPUID reports it, such as "AuthenticAMD"; empty if not x86-64
int64_t l2_bytes();        // size of a core's L2 cache; 1 MB if the OS does not tell

const char* isa_name(Isa isa);
std::vector<Isa> built_isas();
bool runs_here(Isa isa);

// Return the active set: the best that was built and runs here, or PYTRANSFORMER_CPU_ISA. Throws
// std::runtime_error, which lists the usable sets, if that name is not one of them.
Isa active_isa();

// Change the active set for the whole process; an empty name restores the default. Throws like
// active_isa().
void set_active_isa(const std::string& name);

}  // namespace pt

#define PT_DECLARE_KERNELS_OF(isa, declaration) \
  namespace isa {                               \
  extern const declaration;                     \
  }
#define PT_DECLARE_KERNELS(Table, table)              \
  namespace pt {                                      \
  PT_FOR_EACH_ISA(PT_DECLARE_KERNELS_OF, Table table) \
  }                                                   \
  static_assert(true, "takes the semicolon")

#define PT_SELECT_CASE(isa, table) \
  case ::pt::Isa::isa: return ::pt::isa::table;
#define PT_SELECT(table)                                       \
  ([](::pt::Isa active) -> const auto& {                       \
    switch (active) { PT_FOR_EACH_ISA(PT_SELECT_CASE, table) } \
    return ::pt::generic::table;                               \
  }(::pt::active_isa()))
