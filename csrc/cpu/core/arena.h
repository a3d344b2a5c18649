// SPDX-License-Identifier: Apache-2.0
// Scratch memory: one grow-only buffer per thread, on huge pages (touching a fresh 4 KB page costs
// about as much as computing on it).
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "cpu/core/traits.h"

namespace pt {

extern int64_t arena_bytes;  // bytes held by all arenas (arena.cpp); updated atomically

namespace PT_ISA {

class Arena {
 public:
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena() { release(); }

  // Drop all allocations and reserve `bytes`: the sum of bytes_for() over the next calls of take().
  void reset(size_t bytes) {
    used_ = 0;
    if (bytes <= size_) return;
    release();
    const size_t size = held(bytes);
    base_ = static_cast<char*>(std::aligned_alloc(kHuge, size));
    if (!base_) throw std::bad_alloc();
    size_ = size;
    madvise(base_, size_, MADV_HUGEPAGE);
    __atomic_fetch_add(&arena_bytes, int64_t(size_), __ATOMIC_RELAXED);
  }
  template <class T>
  T* take(int64_t n) {
    char* p = base_ + used_;
    used_ += bytes_for<T>(n);
    // a wrong sum in reset() aborts instead of overrunning the buffer
    if (used_ > size_) std::abort();
    return reinterpret_cast<T*>(p);
  }
  // Return the bytes an arena holds after reset(bytes).
  static size_t held(size_t bytes) { return (bytes + kHuge - 1) / kHuge * kHuge; }
  // Round up to cache lines and add an odd number of lines, so that rows of different buffers fall
  // into different cache sets.
  template <class T>
  static size_t bytes_for(int64_t n) {
    return (n * sizeof(T) + 63) / 64 * 64 + 64 * 5;
  }

 private:
  static constexpr size_t kHuge = size_t(2) << 20;
  void release() {
    std::free(base_);
    __atomic_fetch_sub(&arena_bytes, int64_t(size_), __ATOMIC_RELAXED);
    base_ = nullptr, size_ = 0;
  }
  char* base_ = nullptr;
  size_t size_ = 0, used_ = 0;
};

inline thread_local Arena setup_arena;   // calling thread: description of a call
inline thread_local Arena shared_arena;  // calling thread: packed operands that all threads read
inline thread_local Arena local_arena;   // each worker: its current tile

}  // namespace PT_ISA
}  // namespace pt
