// SPDX-License-Identifier: Apache-2.0
// Attention's kernels of one instruction set, compiled with PT_PHASES: see attention_phases.py,
// which builds and calls this.
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "cpu/attention/bwd.h"
#include "cpu/attention/fwd.h"

#if !defined(PT_PHASES)
#error "without PT_PHASES nothing is noted"
#endif

namespace pt {
PhaseVisits phase_visits[int(Phase::count)];
}

namespace {

using namespace pt;

double ticks_per_second() {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const uint64_t first = phase_clock();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const uint64_t ticks = phase_clock() - first;
  return double(ticks) / std::chrono::duration<double>(Clock::now() - start).count();
}

// The sum over a phase's visits. Where another process took the core, a visit counts as the median
// one: all but the last of a row are of one size.
double seconds_of(PhaseVisits& visits, double rate) {
  const int64_t n = std::min(visits.count, PhaseVisits::kMost);
  if (n == 0) return 0;
  std::vector<uint32_t> sorted(visits.ticks, visits.ticks + n);
  std::nth_element(sorted.begin(), sorted.begin() + n / 2, sorted.end());
  const double median = sorted[n / 2];
  double sum = 0;
  for (uint32_t ticks : sorted) sum += ticks > 4 * median ? median : ticks;
  return sum / double(n) * double(visits.count) / rate;
}

template <class T>
void run(const AttentionProblem& p, const AttentionGrads* g) {
  if (g) PT_ISA::bwd::AttentionBackward<T>(p, *g).run();
  else PT_ISA::Forward<T>(p).run();
}

}  // namespace

extern "C" {

// One head after the other in memory, all lengths alike. tensors: q, k, v, out, lse, d_out, dq, dk,
// dv, contiguous (heads, length, dim).
struct Call {
  void* tensors[9];
  int64_t heads, length, dim, threads, bf16, backward;
};

// The seconds of each phase, summed over threads.
__attribute__((visibility("default"))) void attention_phases(const Call* call, double* seconds) {
  static const double rate = ticks_per_second();
  const int64_t L = call->length, D = call->dim;
  const Strides rows{call->heads * L * D, L * D, D, 1};
  void* const* t = call->tensors;
  AttentionProblem p{};
  p.dtype = call->bf16 ? DType::bf16 : DType::f32;
  p.B = 1, p.Hq = p.Hkv = call->heads, p.Lq = p.Lk = L, p.D = p.Dv = D;
  p.q = t[0], p.k = t[1], p.v = t[2], p.out = t[3], p.lse = t[4];
  p.qs = p.ks = p.vs = p.os = rows, p.lse_s = {call->heads * L, L, 1, 1};
  p.left = p.right = -1, p.scale = 1 / __builtin_sqrt(double(D)), p.threads = int(call->threads);
  AttentionGrads g{};
  g.d_out = t[5], g.dq = t[6], g.dk = t[7], g.dv = t[8], g.dos = g.dqs = g.dks = g.dvs = rows;
  for (PhaseVisits& visits : phase_visits) visits.count = 0;
  const AttentionGrads* grads = call->backward ? &g : nullptr;
  if (call->bf16) run<PT_ISA::Bf16>(p, grads);
  else run<PT_ISA::Float<float>>(p, grads);
  for (int i = 0; i < int(Phase::count); i++) seconds[i] = seconds_of(phase_visits[i], rate);
}

}  // extern "C"
