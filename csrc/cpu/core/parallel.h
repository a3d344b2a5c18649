// SPDX-License-Identifier: Apache-2.0
// Tasks on torch's thread pool, without a torch header.
#pragma once

#include <cstdint>

#include "cpu/core/gemm.h"
#include "cpu/core/stream.h"

namespace pt {

// Call fn(ctx) `workers` times, on as many threads as the pool provides. Nested regions may run
// serially, so no call may wait for another. Exceptions of fn reach the caller. See parallel.cpp.
void run_workers(int64_t workers, void (*fn)(void*), void* ctx);
int pool_threads();

namespace PT_ISA {

// Run f(task) for task in [0, n), claimed in rising order by up to `threads` threads. Streaming
// stores are visible to all threads on return.
template <class F>
void for_each_task(int64_t n, int threads, const F& f) {
  if (n <= 0) return;
  if (n == 1 || threads <= 1) {
    const WorkerState state;
    for (int64_t i = 0; i < n; i++) f(i);
    return stream_fence();
  }
  struct Queue {
    const F& f;
    int64_t n, next;
  } queue{f, n, 0};
  run_workers(
      min<int64_t>(n, threads),
      [](void* p) {
        const WorkerState state;
        Queue& q = *static_cast<Queue*>(p);
        for (int64_t i; (i = __atomic_fetch_add(&q.next, 1, __ATOMIC_RELAXED)) < q.n;) q.f(i);
        stream_fence();
      },
      &queue);
}

}  // namespace PT_ISA
}  // namespace pt
