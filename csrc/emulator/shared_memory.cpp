// SPDX-License-Identifier: Apache-2.0
// Shared memory: contents, writer and pending readers of each 16-byte granule.
#include "emulator/state.h"

namespace emu {

uint32_t dynamic_smem() { return block->smem_base; }

void check_range(uint32_t addr, uint32_t bytes, const char* what) {
  if (addr < block->smem_base || addr + bytes > block->smem_end)
    fail(format("%s: shared memory [%#x, %#x) is outside the block's [%#x, %#x)", what, addr,
                addr + bytes, block->smem_base, block->smem_end));
}

uint32_t swizzle_address(uint32_t addr, Swizzle mode) {
  const uint32_t mask = mode == Swizzle::B128  ? 7
                        : mode == Swizzle::B64 ? 3
                        : mode == Swizzle::B32 ? 1
                                               : 0;
  return addr ^ (((addr >> 7) & mask) << 4);
}

void check_readable(uint32_t addr, const char* what) {
  const Granule& g = block->granules[addr / kGranule];
  switch (g.state) {
    case State::Copied: return;
    case State::Stored:
      for (const Word& w : g.word) {
        if (!w.written) fail(format("%s reads shared memory %#x, partly unwritten", what, addr));
        if (!w.fenced)
          fail(
              format("%s reads shared memory %#x, stored by thread %d without a later "
                     "fence.proxy.async",
                     what, addr, int(w.writer)));
      }
      return;
    case State::Unwritten: fail(format("%s reads shared memory %#x, never written", what, addr));
    case State::Pending:
      fail(format("%s reads shared memory %#x before thread %d has waited for its cp.async", what,
                  addr, int(g.copier)));
    case State::InFlight:
      fail(
          format("%s reads shared memory %#x while a copy announced by mbarrier '%s' is still "
                 "writing it",
                 what, addr, barrier_name(g.barrier)));
    case State::BarrierObject:
      fail(format("%s reads shared memory %#x, which holds an mbarrier", what, addr));
  }
}

// Other words of the granule may belong to other threads.
void check_writable(uint32_t addr, uint32_t bytes, const char* what) {
  Granule& g = block->granules[addr / kGranule];
  if (g.state == State::InFlight)
    fail(format("%s overwrites %#x, which a copy ('%s') is still writing", what, addr,
                barrier_name(g.barrier)));
  if (g.state == State::Pending)
    fail(format("%s overwrites %#x, which thread %d's cp.async is still writing", what, addr,
                int(g.copier)));
  if (g.state == State::BarrierObject) fail(format("%s overwrites an mbarrier", what));
  if (!block->options->race_check) return;
  const Fiber& me = block->self();
  for (int w = 0; w < kMaxGroups; ++w)
    if (g.read_by[w] > me.clock.c[w])
      fail(format("%s to %#x is not ordered after a wgmma of warpgroup %d that reads it", what,
                  addr, w));
  if (g.bulk_reader >= 0)
    fail(
        format("%s to %#x is not ordered after a bulk operation that reads it: thread %d has not "
               "waited for that",
               what, addr, int(g.bulk_reader)));
  if (g.state == State::Copied && !knows(me, g.barrier, g.phase))
    fail(format("%s to %#x is not ordered after the copy announced by '%s' phase %u", what, addr,
                barrier_name(g.barrier), g.phase));
  if (g.state == State::Stored)
    for (uint32_t i = addr % kGranule / 4; i < (addr % kGranule + bytes + 3) / 4; ++i)
      if (g.word[i].written && !knows_thread(g.word[i].writer, g.word[i].time))
        fail(format("%s to %#x is not ordered after the store by thread %d", what, addr,
                    int(g.word[i].writer)));
  if (!g.loaded) return;
  bool unknown = false;  // no branch in the loop, for speed
  for (int t = 0; t < block->threads; ++t) unknown |= me.clock.c[kThread + t] < (*g.loaded)[t].time;
  for (int t = 0; unknown && t < block->threads; ++t)
    if (!knows_thread(t, (*g.loaded)[t].time))
      fail(format("%s to %#x is not ordered after the load by thread %d", what, addr, t));
}

void check_writable_by_proxy(uint32_t addr, const char* what) {
  check_writable(addr, kGranule, what);
  if (!block->options->race_check) return;
  const Granule& g = block->granules[addr / kGranule];
  if (g.state == State::Stored)
    for (const Word& w : g.word)
      if (w.written && (!w.fenced || (w.fenced > 0 && !knows_thread(w.writer, w.fenced))))
        fail(format("%s to %#x, which thread %d stored to without a later fence.proxy.async", what,
                    addr, int(w.writer)));
  if (!g.loaded) return;
  for (int t = 0; t < block->threads; ++t) {
    const Load& load = (*g.loaded)[t];
    if (load.fences == kByProxy) continue;
    const std::vector<int32_t>& fences = block->fibers[t].proxy_fences;
    if (size_t(load.fences) >= fences.size() || !knows_thread(t, fences[load.fences]))
      fail(format("%s to %#x, which thread %d loaded without a later fence.proxy.async", what, addr,
                  t));
  }
}

void note_store(uint32_t addr, int bytes) {
  Granule& g = block->granules[addr / kGranule];
  if (g.state != State::Stored) {
    // The other words are from a copy known to this thread, or were never written.
    for (Word& w : g.word) w = {g.state == State::Copied, 0, 0, -1};
    g.state = State::Stored;
    g.barrier = -1;
  }
  if (g.loaded) g.loaded->fill({});
  for (int i = 0; i < bytes / 4; ++i) {
    g.word[addr % kGranule / 4 + i] = {true, uint16_t(block->current), now(), 0};
    block->self().dirty.push_back(addr / 4 + i);
  }
}

void st_shared(uint32_t addr, const void* value, int bytes, const Site& site) {
  const Fault fault = fault_at(site, "st.shared", kDrop | kShift);
  if (fault == kDrop) return;
  if (fault == kShift) addr += uint32_t(bytes);
  preempt();
  check_range(addr, bytes, "st.shared");
  if (addr % bytes) fail(format("st.shared: %#x is not a multiple of %d", addr, bytes));
  check_writable(addr, bytes, "st.shared");
  note_store(addr, bytes);
  std::memcpy(block->arena + addr, value, bytes);
}

void ld_shared(uint32_t addr, void* value, int bytes, const Site& site) {
  if (fault_at(site, "ld.shared", kShift)) addr += uint32_t(bytes);
  preempt();
  check_range(addr, bytes, "ld.shared");
  if (addr % bytes) fail(format("ld.shared: %#x is not a multiple of %d", addr, bytes));
  Granule& g = block->granules[addr / kGranule];
  if (g.state != State::Stored) check_readable(addr, "ld.shared");
  if (block->options->race_check && g.state == State::Copied &&
      !knows(block->self(), g.barrier, g.phase))
    fail(format("ld.shared of %#x without waiting for mbarrier '%s'", addr,
                barrier_name(g.barrier)));
  if (g.state == State::Stored)
    for (int i = 0; i < bytes / 4; ++i) {
      const Word& w = g.word[addr % kGranule / 4 + i];
      if (!w.written) fail(format("ld.shared reads shared memory %#x, never written", addr));
      if (block->options->race_check && !knows_thread(w.writer, w.time))
        fail(format("ld.shared of %#x is not ordered after the store by thread %d", addr,
                    int(w.writer)));
    }
  note_load(g);
  std::memcpy(value, block->arena + addr, bytes);
}

void fence_proxy_async(const Site& site) {
  if (fault_at(site, "fence.proxy.async", kDrop)) return;
  preempt();
  for (uint32_t i : block->self().dirty) {
    Granule& g = block->granules[i * 4 / kGranule];
    Word& w = g.word[i % (kGranule / 4)];
    if (g.state == State::Stored && w.writer == block->current) w.fenced = now();
  }
  block->self().dirty.clear();
  block->self().proxy_fences.push_back(now());
  fence_mbarrier_init({});
}

void note_load(Granule& g, bool by_proxy) {
  if (!block->options->race_check) return;
  if (!g.loaded) g.loaded = std::make_unique<std::array<Load, kMaxThreads>>();
  (*g.loaded)[block->current] = {now(),
                                 by_proxy ? kByProxy : int32_t(block->self().proxy_fences.size())};
}

}  // namespace emu
