// SPDX-License-Identifier: Apache-2.0
// The products of feed_forward's kernel layer on a pool of std::thread, for the sanitizers:
// test_threads.py builds and runs it. Threads share packed weights, pack separate rows, and
// take panels of slower threads.
#include <cstdint>
#include <vector>

#include "cpu/feed_forward/problem.h"
#include "thread_pool.h"

namespace pt {
namespace PT_ISA {
extern const FeedForwardKernels feed_forward_kernels;
}
}  // namespace pt

namespace {

struct Case {
  const char* name;
  pt::DType dtype;
  int64_t rows, in, hidden, out;
  bool gated;
  uint32_t drop_threshold;
};

// Return every output of a forward and a backward with this number of threads.
std::vector<Buffers> run(const Case& c, int threads) {
  Random random;
  const auto drawn = [&](int64_t n) { return random.numbers(n, c.dtype); };
  const auto floats = [&](int64_t n) { return random.numbers(n, pt::DType::f32); };
  Buffers x = drawn(c.rows * c.in), w1 = drawn(c.hidden * c.in),
          gate_weight = drawn(c.hidden * c.in), w2 = drawn(c.out * c.hidden),
          dy = drawn(c.rows * c.out), b1 = floats(c.hidden), b2 = floats(c.out),
          h(c.rows * c.hidden), dpre(c.rows * c.hidden), dgate(c.rows * c.hidden);
  std::vector<Buffers> results;
  for (int64_t n : {c.rows * c.hidden, c.rows * c.hidden, c.rows * c.out, c.rows * c.in,
                    c.hidden * c.in, c.hidden * c.in, c.out * c.hidden, c.hidden, c.out})
    results.emplace_back(n);
  const auto at = [&](int i) { return results[i].get(); };

  pt::FeedForwardProblem p{};
  p.dtype = c.dtype, p.rows = c.rows, p.in = c.in, p.hidden = c.hidden, p.out = c.out,
  p.threads = threads;
  p.x = x.get(), p.w1 = w1.get(), p.w2 = w2.get(), p.b1 = b1.get(), p.b2 = b2.get(),
  p.activation = pt::Activation::gelu;
  p.seed = 3, p.drop_threshold = c.drop_threshold;
  if (c.gated) p.gate_weight = gate_weight.get();
  pt::FeedForwardForward f{};
  f.pre = at(0), f.gate = c.gated ? at(1) : nullptr, f.y = at(2);
  pt::FeedForwardBackward b{};
  b.dy = dy.get(), b.pre = f.pre, b.gate = f.gate, b.h = h.get(), b.dpre = dpre.get(),
  b.dgate = c.gated ? dgate.get() : nullptr;
  b.dx = at(3), b.dw1 = at(4), b.dgate_weight = c.gated ? at(5) : nullptr, b.dw2 = at(6),
  b.db1 = at(7), b.db2 = at(8);
  pt::PT_ISA::feed_forward_kernels.forward(p, f);
  pt::PT_ISA::feed_forward_kernels.backward(p, b);
  return results;
}

}  // namespace

int main() {
  using pt::DType;
  const Case cases[] = {
      {"many groups of rows", DType::f32, 700, 40, 130, 50, false, 0},
      {"gated, dropout", DType::bf16, 500, 24, 90, 40, true, 20000},
      {"few rows, wide", DType::f32, 5, 60, 700, 60, false, 0},
  };
  return judge(cases, run);
}
