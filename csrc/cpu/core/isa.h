// SPDX-License-Identifier: Apache-2.0
// Which instruction set the CPU kernels use, and the macros that pick an op's kernel table for it.
//
// csrc/cpu/<op>/kernels.cpp is compiled once per instruction set, each time with PT_ISA defined as its name, and defines
// pt::PT_ISA::<op>_kernels. The binding, which is compiled once, says
//     PT_DECLARE_KERNELS(AttentionKernels, attention_kernels);   // at global scope
//     PT_SELECT(attention_kernels).forward(problem);             // the table of the instruction set in use
#pragma once

#include <string>
#include <vector>

// The sets this library was built for, best first. The build passes it: -D"PT_FOR_EACH_ISA(X,A)=X(avx512_bf16,A) X(generic,A)".
#ifndef PT_FOR_EACH_ISA
#define PT_FOR_EACH_ISA(X, A) X(generic, A)
#endif

namespace pt {

#define PT_ISA_ENUMERATOR(isa, unused) isa,
enum class Isa : int { PT_FOR_EACH_ISA(PT_ISA_ENUMERATOR, ) };
#undef PT_ISA_ENUMERATOR

struct CpuFeature {
  const char* name;
  bool present;  // by the CPU, and its registers saved by the operating system
};
const std::vector<CpuFeature>& cpu_features();

const char* isa_name(Isa isa);
std::vector<Isa> built_isas();
bool runs_here(Isa isa);

// The set in use: the best that was built and runs here, unless PYTRANSFORMER_CPU_ISA names another.
// Throws std::runtime_error if that name was not built or does not run here, naming those that do.
Isa active_isa();

// Changes the set in use for the whole process; an empty name means the default again. Throws as active_isa does.
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
