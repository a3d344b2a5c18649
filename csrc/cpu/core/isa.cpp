// SPDX-License-Identifier: Apache-2.0
// CPU features and the choice of an instruction set. Compiled without instruction-set flags,
// because it must run on any CPU.
#include "cpu/core/isa.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pt {
namespace {

#if defined(__x86_64__)

struct Registers {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);  // zeros if the leaf is unknown
  return r;
}

bool bit(uint32_t word, int index) { return (word >> index) & 1; }

// Return the registers that the OS saves on a context switch (XCR0). Readable only with OSXSAVE.
uint64_t saved_registers(bool osxsave) {
  if (!osxsave) return 0;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

std::vector<CpuFeature> detect() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0), seven_one = cpuid(7, 1);
  const uint64_t saved = saved_registers(bit(one.ecx, 27));
  const bool ymm = (saved & 0x6) == 0x6, zmm = (saved & 0xe6) == 0xe6,
             tile = (saved & 0x60000) == 0x60000;
  return {
      {"avx2", ymm && bit(seven.ebx, 5)},
      {"fma", ymm && bit(one.ecx, 12)},
      {"f16c", ymm && bit(one.ecx, 29)},
      {"bmi2", bit(seven.ebx, 8)},
      {"avx512f", zmm && bit(seven.ebx, 16)},
      {"avx512dq", zmm && bit(seven.ebx, 17)},
      {"avx512bw", zmm && bit(seven.ebx, 30)},
      {"avx512vl", zmm && bit(seven.ebx, 31)},
      {"avx512_bf16", zmm && bit(seven_one.eax, 5)},
      {"avx512_fp16", zmm && bit(seven.edx, 23)},
      {"amx_tile", tile && bit(seven.edx, 24)},
      {"amx_bf16", tile && bit(seven.edx, 22)},
  };
}

#else

std::vector<CpuFeature> detect() { return {}; }

#endif

bool have(std::initializer_list<const char*> names) {
  for (const char* name : names) {
    bool present = false;
    for (const CpuFeature& feature : cpu_features())
      present = present || (feature.present && feature.name == std::string(name));
    if (!present) return false;
  }
  return true;
}

// Request AMX tile data from Linux, once for all threads of the process.
[[maybe_unused]] bool tiles_permitted() {
#if defined(__x86_64__) && defined(__linux__)
  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  static const bool permitted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return permitted;
#else
  return false;
#endif
}

// One function per set the build may name: the features that its compiler flags enable.
namespace requires_features {
[[maybe_unused]] bool avx512_bf16() {
  return have({"avx2", "fma", "f16c", "bmi2", "avx512f", "avx512dq", "avx512bw", "avx512vl",
               "avx512_bf16"});
}
[[maybe_unused]] bool amx_bf16() {
#if defined(PT_TILES_IN_SOFTWARE)
  return avx512_bf16();
#else
  return avx512_bf16() && have({"amx_tile", "amx_bf16"}) && tiles_permitted();
#endif
}
[[maybe_unused]] bool avx512() {
  return have({"avx2", "fma", "f16c", "bmi2", "avx512f", "avx512dq", "avx512bw", "avx512vl"});
}
[[maybe_unused]] bool avx2() { return have({"avx2", "fma", "f16c", "bmi2"}); }
[[maybe_unused]] bool generic() { return true; }
}  // namespace requires_features

std::string names(const std::vector<Isa>& isas) {
  std::string text;
  for (Isa isa : isas) text += (text.empty() ? "" : ", ") + std::string(isa_name(isa));
  return text;
}

// Throw unless `name`, given by `source`, was built and runs here.
Isa checked(const std::string& name, const std::string& source) {
  std::vector<Isa> available;
  for (Isa isa : built_isas()) {
    if (!runs_here(isa)) continue;
    if (name == isa_name(isa)) return isa;
    available.push_back(isa);
  }
  throw std::runtime_error(
      source + " is '" + name +
      "', an instruction set that this CPU lacks or that was not built; available: " +
      names(available));
}

Isa default_isa() {
  const char* wanted = std::getenv("PYTRANSFORMER_CPU_ISA");
  if (wanted && *wanted) return checked(wanted, "PYTRANSFORMER_CPU_ISA");
  for (Isa isa : built_isas())
    if (runs_here(isa)) return isa;
  return Isa::generic;
}

constexpr int kUndecided = -1;
std::atomic<int> g_active{kUndecided};

}  // namespace

const std::vector<CpuFeature>& cpu_features() {
  static const std::vector<CpuFeature> features = detect();
  return features;
}

std::string cpu_vendor() {
#if defined(__x86_64__)
  const Registers zero = cpuid(0, 0);
  std::string name;
  for (uint32_t word : {zero.ebx, zero.edx, zero.ecx})
    name.append(reinterpret_cast<const char*>(&word), sizeof(word));
  return name;
#else
  return "";
#endif
}

int64_t l2_bytes() {
  static const int64_t bytes = [] {
#if defined(_SC_LEVEL2_CACHE_SIZE)
    if (const int64_t found = sysconf(_SC_LEVEL2_CACHE_SIZE); found > 0) return found;
#endif
    return int64_t(1) << 20;
  }();
  return bytes;
}

const char* isa_name(Isa isa) {
#define PT_ISA_NAME(name, unused) \
  case Isa::name: return #name;
  switch (isa) { PT_FOR_EACH_ISA(PT_ISA_NAME, ) }
#undef PT_ISA_NAME
  return "?";
}

std::vector<Isa> built_isas() {
#define PT_ISA_VALUE(name, unused) Isa::name,
  return {PT_FOR_EACH_ISA(PT_ISA_VALUE, )};
#undef PT_ISA_VALUE
}

bool runs_here(Isa isa) {
#define PT_ISA_RUNS(name, unused) \
  case Isa::name: return requires_features::name();
  switch (isa) { PT_FOR_EACH_ISA(PT_ISA_RUNS, ) }
#undef PT_ISA_RUNS
  return false;
}

Isa active_isa() {
  int active = g_active.load(std::memory_order_relaxed);
  if (active == kUndecided) {
    active = int(default_isa());
    g_active.store(active, std::memory_order_relaxed);
  }
  return Isa(active);
}

void set_active_isa(const std::string& name) {
  g_active.store(int(name.empty() ? default_isa() : checked(name, "the instruction set asked for")),
                 std::memory_order_relaxed);
}

}  // namespace pt
