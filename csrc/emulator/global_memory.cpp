// SPDX-License-Identifier: Apache-2.0
// Global memory: accessible ranges, and communication between blocks.
#include "emulator/state.h"

namespace emu {
namespace {

struct Range {
  const uint8_t* base;
  size_t bytes;
  std::string name;
};
std::map<int, Range>& ranges() {
  static std::map<int, Range> all;
  return all;
}

struct GlobalWaiter {
  Block* block;
  int thread;
};
std::vector<GlobalWaiter> global_waiters;
std::map<const uint32_t*, GlobalClock> counters;

}  // namespace

GlobalMemory::GlobalMemory(const void* base, size_t bytes, std::string name) {
  static int next = 0;
  number_ = next++;
  ranges()[number_] = {static_cast<const uint8_t*>(base), bytes, std::move(name)};
}
GlobalMemory::~GlobalMemory() { ranges().erase(number_); }

void check_global(const void* p, size_t bytes, const char* what) {
  const auto* at = static_cast<const uint8_t*>(p);
  const Range* near = nullptr;
  // Distance to the nearest range: negative before its begin, positive past its end.
  int64_t beyond = 0;
  for (const auto& [number, r] : ranges()) {
    if (at >= r.base && at + bytes <= r.base + r.bytes) return;
    const int64_t miss = at < r.base ? at - r.base : at + bytes - (r.base + r.bytes);
    if (!near || std::abs(miss) < std::abs(beyond)) near = &r, beyond = miss;
  }
  if (!near) fail(format("%s: no global memory is registered", what));
  fail(format("%s of %zu bytes lies outside global memory: %lld bytes %s '%s' of %zu bytes", what,
              bytes, (long long)std::abs(beyond),
              beyond < 0 ? "before the begin of" : "past the end of", near->name.c_str(),
              near->bytes));
}

void forget_counters() {
  global_waiters.clear();
  counters.clear();
  reduced().clear();
}

std::map<const float*, std::pair<uint32_t, uint64_t>>& reduced() {
  static std::map<const float*, std::pair<uint32_t, uint64_t>> last;
  return last;
}

static void check_access(const void* p, int bytes, const char* what) {
  if (reinterpret_cast<uintptr_t>(p) % bytes)
    fail(format("%s: the address is not a multiple of %d", what, bytes));
  check_global(p, bytes, what);
}

void ld_global(const void* p, void* value, int bytes, const Site& site) {
  if (fault_at(site, "ld.global", kShift)) p = static_cast<const uint8_t*>(p) + bytes;
  preempt();
  check_access(p, bytes, "ld.global");
  std::memcpy(value, p, bytes);
}

void st_global(void* p, const void* value, int bytes, const Site& site) {
  const Fault fault = fault_at(site, "st.global", kDrop | kShift);
  if (fault == kDrop) return;
  if (fault == kShift) p = static_cast<uint8_t*>(p) + bytes;
  preempt();
  check_access(p, bytes, "st.global");
  std::memcpy(p, value, bytes);
}

void red_add_f32(float* dst, const float* value, int n, const Site& site) {
  const Fault fault = fault_at(site, "red.add", kDrop | kShift);
  if (fault == kDrop) return;
  if (fault == kShift) dst += n;
  preempt();
  if (reinterpret_cast<uintptr_t>(dst) % (n * 4)) fail("red.add: misaligned");
  check_global(dst, n * 4, "red.add");
  for (int i = 0; i < n; ++i) dst[i] += value[i];
}

uint32_t atomic_add(uint32_t* p, uint32_t value, bool release, const Site& site) {
  const Fault fault = fault_at(site, "atomic add", release ? kDrop | kFlip : kDrop);
  if (fault == kDrop) return *p;
  if (fault == kFlip) release = false;
  preempt();
  check_global(p, 4, "atomic add");
  if (release) join(counters[p], block->self().global_clock);
  const uint32_t old = *p;
  *p += value;
  for (const GlobalWaiter& w : global_waiters) wake(*w.block, w.thread);
  global_waiters.clear();
  return old;
}

void wait_equal(const uint32_t* p, uint32_t value, const Site& site) {
  if (fault_at(site, "wait for a counter", kDrop)) return;
  preempt();
  check_global(p, 4, "spin");
  while (*p != value) {
    global_waiters.push_back({block, block->current});
    Waiters none;
    wait_on(none,
            [p, value] { return format("a global counter to become %u (it is %u)", value, *p); });
  }
  join(block->self().global_clock, counters[p]);
}

}  // namespace emu
