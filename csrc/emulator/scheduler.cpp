// SPDX-License-Identifier: Apache-2.0
// Threads as fibers, blocks, launches.
#include <mutex>
#include <stdexcept>

#include "emulator/state.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu {

Block* block = nullptr;
Report* report = nullptr;

namespace {
alignas(1024) uint8_t arenas[kMaxResident][kArena];
}

void Clock::join(const Clock& other) {
  const size_t n = kThread + (block->options->race_check ? block->threads : 0);
  for (size_t i = 0; i < n; ++i) c[i] = std::max(c[i], other.c[i]);
}

void release(Clock& into) {
  Fiber& me = block->self();
  into.join(me.clock);
  ++me.clock.c[kThread + block->current];
}

// Scheduling.

static void fiber_entry() {
  (*block->kernel)();
  Fiber& me = block->self();
  me.done = true;
  --block->alive;
  block->runnable[block->current / kWarp] &= ~(1u << (block->current % kWarp));
  switch_context(me.context, block->scheduler);
  std::abort();
}

static void to_scheduler() { switch_context(block->self().context, block->scheduler); }

void preempt() {
  if (block->random.one_in(24)) to_scheduler();
}

void wait_on(Waiters& list, std::function<std::string()> what) {
  list.push_back(block->current);
  block->runnable[block->current / kWarp] &= ~(1u << (block->current % kWarp));
  block->self().waits_for = std::move(what);
  to_scheduler();
}

void wake(Block& b, int thread) { b.runnable[thread / kWarp] |= 1u << (thread % kWarp); }

void wake(Waiters& list) {
  for (int t : list) wake(*block, t);
  list.clear();
}

static int pick_thread() {
  Block& b = *block;
  // Starve some warps and favor others for a while.
  if (b.random.one_in(200))
    for (auto& w : b.weight) w = uint64_t{1} << (b.random() % 11);
  uint64_t total = 0;
  for (size_t w = 0; w < b.runnable.size(); ++w)
    if (b.runnable[w]) total += b.weight[w];
  if (!total) return -1;
  uint64_t at = b.random() % total;
  size_t w = 0;
  for (;; ++w) {
    if (!b.runnable[w]) continue;
    if (at < b.weight[w]) break;
    at -= b.weight[w];
  }
  const unsigned rotate = b.random() % kWarp;
  const uint32_t mask = b.runnable[w];
  const uint32_t rotated = rotate ? (mask >> rotate) | (mask << (32 - rotate)) : mask;
  return int(w) * kWarp + (__builtin_ctz(rotated) + rotate) % kWarp;
}

static std::string deadlock_message() {
  // One line per distinct condition, with the threads that wait for it.
  std::map<std::string, std::vector<int>> by_reason;
  for (int t = 0; t < block->threads; ++t)
    if (!block->fibers[t].done) by_reason[block->fibers[t].waits_for()].push_back(t);
  std::string text = "deadlock: no thread of any running block can run and no copy is in flight";
  for (auto& [reason, list] : by_reason) {
    text += "\n    threads ";
    for (size_t i = 0; i < list.size();) {
      size_t j = i;
      while (j + 1 < list.size() && list[j + 1] == list[j] + 1) ++j;
      text += format(j > i ? "%s%d-%d" : "%s%d", i ? "," : "", list[i], list[j]);
      i = j + 1;
    }
    text += " wait for " + reason;
  }
  return text;
}

// Running blocks.

static void start_block(Block& b, size_t smem_bytes) {
  block = &b;
  b.arena = arenas[b.slot];
  // CUDA guarantees 16-byte alignment of dynamic shared memory, so do not always provide more.
  b.smem_base = 1024 + 16 * uint32_t(b.random() % 64);
  b.smem_end = b.smem_base + uint32_t(smem_bytes);
  b.granules.resize(b.smem_end / kGranule + 1);
  std::fill_n(reinterpret_cast<uint16_t*>(b.arena), kArena / 2, kPoison);
  b.fibers.resize(b.threads);
  b.runnable.assign(b.threads / kWarp, ~0u);
  b.weight.assign(b.threads / kWarp, 1);
  b.exchanges.resize(b.threads / kWarp);
  // Give each thread the registers of the launch bounds; the rest of the register file is free.
  const int per_thread = std::min(65536 / b.threads / 8 * 8, 248);
  b.registers.assign(b.threads / kWarp, per_thread);
  b.free_registers = 65536 - per_thread * b.threads;
  b.alive = b.threads;
  for (int t = 0; t < b.threads; ++t) {
    b.fibers[t].clock.c[kThread + t] = 1;
    prepare_context(b.fibers[t].context, fiber_stack(b.slot, t), kStack, fiber_entry);
  }
}

// Return the errors to report after all threads have returned.
static std::string end_of_block() {
  Block& b = *block;
  std::string error;
  if (!b.copies.empty())
    error = format("the block ended while a copy to %#x was in flight", b.copies[0].dst);
  for (auto& bar : b.barriers)
    if (bar.tx)
      error = format("the block ended with mbarrier '%s' expecting %lld more bytes",
                     bar.name.c_str(), (long long)bar.tx);
  for (int t = 0; t < b.threads; ++t) {
    if (!b.fibers[t].accumulators.empty())
      error = format("thread %d ended without waiting for its last wgmma", t);
    if (!b.fibers[t].thread_copies.empty())
      error = format("thread %d ended without waiting for its last cp.async", t);
    if (!b.fibers[t].bulk_reading.empty())
      error = format("thread %d ended without waiting for its last bulk operation to read", t);
  }
  return error;
}

enum class Step { Ran, Stuck, Ended };

// Run one thread of the current block until it yields.
static Step step_block() {
  Block& b = *block;
  ++b.tick;
  b.current = -1;
  try {
    // Advance the engines: due copies, and occasionally a wgmma that no thread waits for yet.
    for (size_t i = b.copies.size(); i-- > 0;)
      if (b.copies[i].due <= b.tick) complete_copy(i);
    for (size_t i = b.reductions.size(); i-- > 0;)
      if (b.reductions[i].due <= b.tick) advance_reduction(i);
    if (b.random.one_in(64)) {
      Group& group = b.groups[b.random() % kMaxGroups];
      if (can_execute(group)) {
        execute_next(group);
        wake(group.waiters);
      }
    }
    if (!b.alive && b.reductions.empty()) {
      b.error = end_of_block();
      return Step::Ended;
    }
    const int t = pick_thread();
    if (t < 0) {
      if (!b.copies.empty()) complete_copy(b.random() % b.copies.size());
      else if (!b.reductions.empty()) advance_reduction(b.random() % b.reductions.size());
      else return Step::Stuck;
      return Step::Ran;
    }
    b.current = t;
    threadIdx = {unsigned(t), 0, 0};
  } catch (const std::runtime_error& e) {
    b.error = e.what();
    return Step::Ended;
  }
  blockIdx = b.index;
  ++report->switches;
  switch_context(b.scheduler, b.fibers[b.current].context);
  return b.error.empty() ? Step::Ran : Step::Ended;
}

// Host side.

Report launch(dim3 grid, dim3 threads, size_t smem_bytes, const std::function<void()>& kernel,
              const Options& options) {
  static std::mutex one_at_a_time;
  const std::lock_guard lock(one_at_a_time);
  Report result;
  report = &result;
  if (!fiber_stack(0, 0)) return result.error = "cannot map fiber stacks", result;
  if (threads.y != 1 || threads.z != 1 || threads.x % kWarp || threads.x > kMaxThreads)
    return result.error =
               format("unsupported block size %u x %u x %u", threads.x, threads.y, threads.z),
           result;
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    return result.error = format("unsupported grid of %u x %u x %u blocks", grid.x, grid.y, grid.z),
           result;
  if (smem_bytes > options.smem_limit)
    return result.error = format("%zu bytes of shared memory, at most %zu are there", smem_bytes,
                                 options.smem_limit),
           result;
  gridDim = grid;
  blockDim = threads;
  Random random{options.seed};
  std::vector<dim3> order;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) order.push_back({x, y, z});
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  // Up to `resident` blocks alternate; the next block starts when one ends.
  const int resident = std::clamp(options.resident, 1, kMaxResident);
  std::vector<std::unique_ptr<Block>> running;
  std::vector<int> slots;
  for (int i = 0; i < resident; ++i) slots.push_back(i);
  size_t started = 0, stuck = 0;
  while (started < order.size() || !running.empty()) {
    while (started < order.size() && !slots.empty() && (running.empty() || !random.one_in(8))) {
      auto& b = running.emplace_back(std::make_unique<Block>());
      b->options = &options;
      b->kernel = &kernel;
      b->threads = int(threads.x);
      b->number = uint32_t(started);
      b->index = order[started++];
      b->slot = slots.back();
      slots.pop_back();
      b->random.s = random();
      start_block(*b, smem_bytes);
      stuck = 0;
    }
    const size_t turn = running.size() > 1 ? random() % running.size() : 0;
    block = running[turn].get();
    Step step = Step::Ran;
    for (uint64_t i = 1 + random() % 256; i > 0 && step == Step::Ran; --i) step = step_block();
    if (step == Step::Ran) {
      stuck = 0;
    } else if (step == Step::Ended) {
      stuck = 0;
      result.error = block->error;
      slots.push_back(block->slot);
    } else if (++stuck > 64 * running.size()) {  // every block has probably run
      result.error = deadlock_message();
    }
    if (!result.error.empty()) {
      const dim3 at = block->index;
      result.error = format("block (%u,%u,%u): ", at.x, at.y, at.z) + result.error;
      break;
    }
    if (step == Step::Ended) running.erase(running.begin() + turn);
  }
  block = nullptr;
  forget_global();
  return result;
}

void fail(const std::string& message) {
  // An engine fails on the scheduler's stack.
  if (block->current < 0) throw std::runtime_error(message);
  block->error = format("thread %d: ", block->current) + message;
  to_scheduler();  // never resumed
  std::abort();
}

}  // namespace emu
