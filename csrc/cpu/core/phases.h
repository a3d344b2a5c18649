// SPDX-License-Identifier: Apache-2.0
// Profile of a call: PT_PHASE(softmax) before a statement records its time. A normal build has no
// phases; bench/tools/attention_phases.py compiles kernels with PT_PHASES and reads the records.
#pragma once

#if defined(PT_PHASES)

#include <chrono>
#include <cstdint>

namespace pt {

enum class Phase : int { pack, scores, softmax, output, dv, dk, dq, results, count };

// Ticks of every run of a phase on any thread, up to kMost; further runs are only counted.
struct PhaseVisits {
  static constexpr int64_t kMost = 1 << 16;
  int64_t count;
  uint32_t ticks[kMost];
};
extern PhaseVisits phase_visits[int(Phase::count)];

inline uint64_t phase_clock() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();  // about 10 ns; a phase takes microseconds
#else
  return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

class PhaseScope {
 public:
  explicit PhaseScope(Phase phase) : to_(phase_visits[int(phase)]), start_(phase_clock()) {}
  ~PhaseScope() {
    const uint64_t ticks = phase_clock() - start_;
    const int64_t at = __atomic_fetch_add(&to_.count, 1, __ATOMIC_RELAXED);
    if (at < PhaseVisits::kMost) to_.ticks[at] = ticks < UINT32_MAX ? uint32_t(ticks) : UINT32_MAX;
  }

 private:
  PhaseVisits& to_;
  const uint64_t start_;
};

}  // namespace pt

#define PT_PHASE(name) if (const ::pt::PhaseScope pt_phase(::pt::Phase::name); true)
#else
#define PT_PHASE(name)
#endif
