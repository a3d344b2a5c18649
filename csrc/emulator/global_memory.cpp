// SPDX-License-Identifier: Apache-2.0
// Global memory: accessible ranges, and communication between blocks.
#include <unordered_map>

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
std::map<const void*, GlobalClock> counters;

struct Writer {  // of two bytes, because blocks may share a word of 16-bit results
  uint32_t block;
  int thread;
  int32_t time;  // 0: this launch has not stored there
};
// 16 bytes each, the largest access.
std::unordered_map<uintptr_t, std::array<Writer, 8>> stores;

// Return true if the current thread knows of another block's operations up to `time`.
bool knows_block(uint32_t number, int thread, int32_t time) {
  return std::ranges::any_of(block->acquired, [&](const Acquired& a) {
    const auto known = a.clock.find(number);
    return known != a.clock.end() && known->second.times.size() > size_t(thread) &&
           known->second.times[thread] >= time && knows_thread(a.thread, a.time);
  });
}

// Call f with the writer of each two bytes of an access.
template <class F>
void each_writer(std::array<Writer, 8>& all, const void* p, int bytes, F f) {
  const int first = int(reinterpret_cast<uintptr_t>(p) % 16 / 2);
  for (int i = first; i < first + (bytes + 1) / 2; ++i) f(all[i]);
}

void note_store(void* p, int bytes) {
  const Writer me{block->number, block->current, now()};
  each_writer(stores[reinterpret_cast<uintptr_t>(p) / 16], p, bytes, [&](Writer& w) { w = me; });
}

// Check that an earlier store is ordered before the load.
void check_ordered(const void* p, int bytes) {
  if (!block->options->race_check) return;
  const auto found = stores.find(reinterpret_cast<uintptr_t>(p) / 16);
  if (found == stores.end()) return;
  each_writer(found->second, p, bytes, [&](const Writer& w) {
    if (!w.time) return;
    const bool here = w.block == block->number;
    if (here ? !knows_thread(w.thread, w.time) : !knows_block(w.block, w.thread, w.time))
      fail(format("ld.global is not ordered after the store by thread %d of %s block", w.thread,
                  here ? "the same" : "another"));
  });
}

// Publish what the current thread knows.
void publish(GlobalClock& into) {
  Fiber& me = block->self();
  join(into, me.global_clock);
  for (const Acquired& a : block->acquired)
    if (knows_thread(a.thread, a.time)) join(into, a.clock);
  const auto first = me.clock.c.begin() + kThread;
  join(into, {{block->number, {0, {first, first + block->threads}}}});
  ++me.clock.c[kThread + block->current];
}

void acquire(const GlobalClock& from) {
  join(block->self().global_clock, from);
  block->acquired.push_back({block->current, now(), from});
}

}  // namespace

void join(GlobalClock& into, const GlobalClock& other) {
  for (const auto& [number, from] : other) {
    KnownBlock& to = into[number];
    to.reductions = std::max(to.reductions, from.reductions);
    to.times.resize(std::max(to.times.size(), from.times.size()));
    for (size_t i = 0; i < from.times.size(); ++i)
      to.times[i] = std::max(to.times[i], from.times[i]);
  }
}

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

void forget_global() {
  global_waiters.clear();
  counters.clear();
  stores.clear();
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
  check_ordered(p, bytes);
  std::memcpy(value, p, bytes);
}

void st_global(void* p, const void* value, int bytes, const Site& site) {
  const Fault fault = fault_at(site, "st.global", kDrop | kShift);
  if (fault == kDrop) return;
  if (fault == kShift) p = static_cast<uint8_t*>(p) + bytes;
  preempt();
  check_access(p, bytes, "st.global");
  note_store(p, bytes);
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
  if (release) publish(counters[p]);
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
  acquire(counters[p]);
}

uint64_t acq_rel_add(uint64_t* p, uint64_t value, const Site& site) {
  const Fault fault = fault_at(site, "atomic add", kDrop | kShift | kFlip);
  if (fault == kDrop) return *p;
  if (fault == kShift) ++value;
  preempt();
  check_access(p, 8, "atomic add");
  if (fault != kFlip) {
    acquire(counters[p]);
    publish(counters[p]);
  }
  const uint64_t old = *p;
  *p += value;
  return old;
}

uint64_t atomic_cas(uint64_t* p, uint64_t expected, uint64_t value, const Site& site) {
  const Fault fault = fault_at(site, "compare and swap", kDrop);
  if (fault == kDrop) return *p;
  preempt();
  check_access(p, 8, "compare and swap");
  const uint64_t old = *p;
  if (old == expected) *p = value;
  return old;
}

}  // namespace emu
