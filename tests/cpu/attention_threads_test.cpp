// SPDX-License-Identifier: Apache-2.0
// Attention's kernel layer on a pool of std::thread, for the sanitizers: test_threads.py builds and
// runs it. It needs no torch, so that all code in the process is instrumented. Results with four
// threads must also equal those with one, bit by bit.
#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/attention/problem.h"
#include "thread_pool.h"

namespace pt {
namespace PT_ISA {
extern const AttentionKernels attention_kernels;
}
}  // namespace pt

namespace {

struct Case {
  const char* name;
  pt::DType dtype;
  int64_t B, Hq, Hkv, Lq, Lk, D, Dv;
  std::function<void(pt::AttentionProblem&)> change;
};

pt::Strides strides(int64_t heads, int64_t rows, int64_t d) {
  return {heads * rows * d, rows * d, d, 1};
}

// Return every output of a forward and a backward with this number of threads.
std::vector<Buffers> run(const Case& c, int threads) {
  Random random;
  const auto drawn = [&](int64_t n) { return random.numbers(n, c.dtype); };
  const auto floats = [&](int64_t n) { return random.numbers(n, pt::DType::f32); };
  Buffers q = drawn(c.B * c.Hq * c.Lq * c.D), k = drawn(c.B * c.Hkv * c.Lk * c.D),
          v = drawn(c.B * c.Hkv * c.Lk * c.Dv), d_out = drawn(c.B * c.Hq * c.Lq * c.Dv);
  Buffers bias = floats(c.Lq * c.Lk), slopes = floats(c.Hq), table = floats(8 * c.Hq);
  const int64_t starts[] = {0, 1, 2, 3, 5, 9, 16, 40};
  std::vector<Buffers> results;
  for (int64_t n :
       {c.B * c.Hq * c.Lq * c.Dv, c.B * c.Hq * c.Lq, c.B * c.Hq * c.Lq * c.D,
        c.B * c.Hkv * c.Lk * c.D, c.B * c.Hkv * c.Lk * c.Dv, c.Lq * c.Lk, c.Hq, 8 * c.Hq})
    results.emplace_back(n);

  pt::AttentionProblem p{};
  p.dtype = c.dtype, p.B = c.B, p.Hq = c.Hq, p.Hkv = c.Hkv, p.Lq = c.Lq, p.Lk = c.Lk, p.D = c.D,
  p.Dv = c.Dv;
  p.q = q.get(), p.k = k.get(), p.v = v.get(), p.out = results[0].get(), p.lse = results[1].get();
  p.qs = strides(c.Hq, c.Lq, c.D), p.ks = strides(c.Hkv, c.Lk, c.D),
  p.vs = strides(c.Hkv, c.Lk, c.Dv), p.os = strides(c.Hq, c.Lq, c.Dv);
  p.lse_s = {c.Hq * c.Lq, c.Lq, 1, 1};
  p.left = p.right = -1, p.scale = 0.2, p.threads = threads;
  p.bias.data = bias.get(),
  p.bias.stride = {0, 0, c.Lk, 1};  // one for all batch elements and heads
  p.slopes = slopes.get(), p.table = table.get(), p.bucket_starts = starts, p.buckets = 8;
  c.change(p);
  pt::AttentionGrads g{};
  g.d_out = d_out.get(), g.dos = p.os, g.dq = results[2].get(), g.dqs = p.qs,
  g.dk = results[3].get(), g.dks = p.ks;
  g.dv = results[4].get(), g.dvs = p.vs;
  if (p.bias.data) g.d_bias = {results[5].get(), p.bias.stride};
  if (p.slopes) g.d_slopes = results[6].get();
  if (p.table) g.d_table = results[7].get();
  pt::PT_ISA::attention_kernels.forward(p);
  pt::PT_ISA::attention_kernels.backward(p, g);
  return results;
}

void plain(pt::AttentionProblem& p) { p.bias.data = p.slopes = p.table = nullptr; }

}  // namespace

int main() {
  using pt::DType;
  const Case cases[] = {
      {"every term, shared over batch and heads", DType::f32, 2, 4, 2, 150, 210, 24, 24,
       [](pt::AttentionProblem&) {}},
      {"dropout, causal", DType::bf16, 2, 4, 4, 150, 210, 24, 40,
       [](pt::AttentionProblem& p) {
         plain(p), p.drop_threshold = 20000, p.seed = 5, p.align = pt::Align::bottom_right;
       }},
      {"shared keys", DType::f32, 1, 6, 3, 200, 300, 16, 16, plain},
      {"split keys", DType::bf16, 2, 2, 1, 1, 3000, 16, 16, plain},
      {"many small units", DType::f32, 70, 2, 1, 3, 5, 8, 8, plain},
  };
  return judge(cases, run);
}
