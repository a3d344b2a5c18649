// SPDX-License-Identifier: Apache-2.0
// Shared code of the programs for the sanitizers: a pool of std::thread in place of torch's, random
// buffers, and the comparison of results.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "cpu/attention/problem.h"

namespace pt {

// Like torch's pool, start fewer threads than requested, and run the remaining workers on the
// calling thread.
void run_workers(int64_t workers, void (*fn)(void*), void* ctx) {
  constexpr int64_t kMost = 4;
  std::vector<std::thread> threads;
  for (int64_t i = 1; i < workers && i < kMost; i++) threads.emplace_back(fn, ctx);
  for (int64_t i = threads.size(); i < workers; i++) fn(ctx);
  for (std::thread& t : threads) t.join();
}
int pool_threads() { return 4; }

}  // namespace pt

struct Buffers {
  std::vector<uint64_t> data;  // enough for any dtype
  explicit Buffers(int64_t n) : data(n) {}
  void* get() { return data.data(); }
  bool operator==(const Buffers& o) const { return data == o.data; }
};

class Random {
 public:
  Buffers numbers(int64_t n, pt::DType dtype) {
    Buffers b(n);
    for (int64_t i = 0; i < n; i++) {
      const float x = normal_(engine_);
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      const uint16_t half = uint16_t(bits >> 16);
      if (dtype == pt::DType::f32) std::memcpy(static_cast<char*>(b.get()) + 4 * i, &x, 4);
      else std::memcpy(static_cast<char*>(b.get()) + 2 * i, &half, 2);
    }
    return b;
  }

 private:
  std::mt19937 engine_{7};
  std::normal_distribution<float> normal_;
};

// Return the program's exit code: 0 if run(case, threads) gives the same bits with one and four
// threads.
template <class Case, size_t N, class Run>
int judge(const Case (&cases)[N], const Run& run) {
  int wrong = 0;
  for (const Case& c : cases) {
    const bool same = run(c, 4) == run(c, 1);
    std::printf("%s: %s\n", c.name, same ? "ok" : "DIFFERS between four threads and one");
    wrong += !same;
  }
  return wrong ? 1 : 0;
}
