// SPDX-License-Identifier: Apache-2.0
// Named barriers and mbarriers.
#include "emulator/state.h"

namespace emu {

const char* barrier_name(int index) { return block->barriers[index].name.c_str(); }

bool knows(const Fiber& fiber, int barrier, uint32_t phase) {
  return uint32_t(fiber.clock.c[kMaxGroups + barrier]) > phase + 1;
}

Barrier& find_barrier(uint32_t addr, const char* what) {
  check_range(addr, 8, what);
  const int index = addr % 8 ? -1 : block->barrier_at[addr / 8];
  if (index < 0) fail(format("%s: no mbarrier was initialised at %#x", what, addr));
  Barrier& bar = block->barriers[index];
  uint64_t word;
  std::memcpy(&word, block->arena + addr, 8);
  if (word != (kBarrierMagic | uint64_t(index)))
    fail(format("%s: mbarrier '%s' was overwritten", what, bar.name.c_str()));
  if (!block->self().clock.c[kMaxGroups + index])
    fail(format("%s: nothing orders this thread after the initialisation of mbarrier '%s'", what,
                bar.name.c_str()));
  return bar;
}

void update_phase(Barrier& bar) {
  if (bar.pending || bar.tx) return;
  const int index = int(&bar - block->barriers.data());
  bar.pending = bar.count;
  ++bar.phase;
  bar.arriving.c[kMaxGroups + index] = 1 + bar.phase;
  bar.completed = bar.arriving;
  wake(bar.waiters);
}

static void arrive(Barrier& bar) {
  if (!bar.pending)
    fail(format("mbarrier '%s': more arrivals in one phase than its count of %u", bar.name.c_str(),
                bar.count));
  release(bar.arriving);
  --bar.pending;
}

void name_barrier(uint32_t bar, const char* name, int index) {
  find_barrier(bar, "name_barrier").name = format("%s[%d]", name, index);
}

void mbarrier_init(uint32_t addr, uint32_t count, const Site& site) {
  if (fault_at(site, "mbarrier.init", kFlip)) ++count;
  preempt();
  check_range(addr, 8, "mbarrier.init");
  if (addr % 8) fail("mbarrier.init: misaligned");
  if (block->barrier_at[addr / 8] >= 0) fail("mbarrier.init: already initialised");
  if (block->barriers.size() == kMaxBarriers) fail("mbarrier.init: too many mbarriers");
  const int index = int(block->barriers.size());
  Barrier& bar = block->barriers.emplace_back();
  bar.addr = addr;
  bar.name = format("%#x", addr);
  bar.count = bar.pending = count;
  bar.init_thread = block->current;
  block->barrier_at[addr / 8] = int16_t(index);
  block->granules[addr / kGranule].state = State::BarrierObject;
  block->self().clock.c[kMaxGroups + index] = 1;
  const uint64_t word = kBarrierMagic | uint64_t(index);
  std::memcpy(block->arena + addr, &word, 8);
}

void mbarrier_arrive(uint32_t addr, const Site& site) {
  if (fault_at(site, "mbarrier.arrive", kDrop)) return;
  preempt();
  Barrier& bar = find_barrier(addr, "mbarrier.arrive");
  arrive(bar);
  update_phase(bar);
}

void mbarrier_arrive_expect_tx(uint32_t addr, uint32_t bytes, const Site& site) {
  const Fault fault = fault_at(site, "mbarrier.arrive.expect_tx", kDrop | kShift);
  if (fault == kDrop) return;
  if (fault == kShift) bytes -= 16;
  preempt();
  Barrier& bar = find_barrier(addr, "mbarrier.arrive.expect_tx");
  if (bar.tx + bytes >= 1 << 20) fail("mbarrier.arrive.expect_tx: tx-count overflow");
  bar.tx += bytes;
  arrive(bar);
  update_phase(bar);
}

// Wait for a phase. A GPU may return false early, and callers loop. Here a waiting thread sleeps
// until the phase changes, so that the scheduler can detect deadlocks.
bool mbarrier_try_wait(uint32_t addr, uint32_t parity, const Site& site) {
  const Fault fault = fault_at(site, "mbarrier.try_wait", kDrop | kFlip);
  if (fault == kDrop) return true;
  if (fault == kFlip) parity ^= 1;
  preempt();
  Barrier& bar = find_barrier(addr, "mbarrier.try_wait");
  const int index = int(&bar - block->barriers.data());
  const uint32_t phase = bar.phase;
  if ((phase & 1) == parity) {
    wait_on(bar.waiters, [index, parity] {
      const Barrier& w = block->barriers[index];
      return format(
          "mbarrier '%s', parity %u (its phase is %u; %u of %u arrivals and %lld bytes "
          "are missing)",
          w.name.c_str(), parity, w.phase, w.pending, w.count, (long long)w.tx);
    });
    if (bar.phase - phase > 1)
      fail(format("mbarrier '%s' moved on by two phases before this thread saw the first",
                  bar.name.c_str()));
  }
  block->self().clock.join(bar.completed);
  return true;
}

static void bar_enter(NamedBarrier& bar, int id, int threads) {
  if (threads % kWarp || threads <= 0 || threads > block->threads)
    fail(format("barrier %d: bad thread count %d", id, threads));
  if (bar.expected && bar.expected != threads)
    fail(format("barrier %d is used with %d and with %d threads", id, bar.expected, threads));
  bar.expected = threads;
  release(bar.arriving);
  if (++bar.arrived < threads) return;
  bar.completed = bar.arriving;
  bar.arriving = {};
  bar.arrived = bar.expected = 0;
  ++bar.generation;
  wake(bar.waiters);
}

void bar_sync(int id, int threads, const Site& site) {
  if (fault_at(site, "bar.sync", kDrop)) return;
  preempt();
  NamedBarrier& bar = block->named[id];
  const uint64_t generation = bar.generation;
  bar_enter(bar, id, threads);
  while (bar.generation == generation)
    wait_on(bar.waiters, [id] {
      const NamedBarrier& w = block->named[id];
      return format("barrier %d (%d of %d threads have arrived)", id, w.arrived, w.expected);
    });
  block->self().clock.join(bar.completed);
}

void bar_arrive(int id, int threads, const Site& site) {
  if (fault_at(site, "bar.arrive", kDrop)) return;
  preempt();
  bar_enter(block->named[id], id, threads);
}

void fence_mbarrier_init(const Site& site) {
  if (fault_at(site, "fence.mbarrier_init", kDrop)) return;
  for (auto& bar : block->barriers)
    if (bar.init_thread == block->current) bar.fenced = true;
}

}  // namespace emu
