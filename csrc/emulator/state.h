// SPDX-License-Identifier: Apache-2.0
// Shared state of the emulator's parts: a running block, and how a thread waits.
#pragma once

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "emulator/emulator.h"
#include "emulator/fiber.h"

namespace emu {

// Constants.

constexpr int kWarp = 32, kGroup = 128;
constexpr int kMaxThreads = 512, kMaxGroups = kMaxThreads / kGroup;
constexpr int kMaxBarriers = 56, kNamedBarriers = 16;
constexpr int kMaxResident = 4;          // concurrent blocks
constexpr uint32_t kArena = 256 * 1024;  // descriptors address 18 bits
constexpr uint32_t kGranule = 16;        // unit of the shadow state
constexpr uint16_t kPoison = 0x7fc5;     // a NaN in bf16 and, doubled, in f32
// Signaling NaN: arithmetic changes its bits, so that operations other than stores are detected
// too.
constexpr uint32_t kPoisonRegister = 0x7fa5a5c5;
constexpr uint64_t kBarrierMagic = 0xba55'1e55'0000'0000;

// State.

// Vector clock: the events that a thread or barrier knows of. Component g < kMaxGroups: number of
// completed wgmma operations of warpgroup g. Component kMaxGroups + b: 1 + number of completed
// phases of mbarrier b (0: its initialization is unknown). Component kThread + t: the time of
// thread t, which advances whenever the thread releases its earlier operations.
constexpr size_t kThread = kMaxGroups + kMaxBarriers;
struct Clock {
  std::array<int32_t, kThread + kMaxThreads> c{};
  void join(const Clock& other);
};

using Waiters = std::vector<int>;

struct Accumulator {  // in-flight accumulators, as the tensor core sees them
  int n = 0, holders = 0;
  std::vector<float> m;  // 64 x n
};

struct HeldAccumulator {  // one thread's share
  std::shared_ptr<Accumulator> acc;
  float* regs;
  uint64_t last_op;
};

struct HeldOperand {  // A registers that a wgmma may still read
  const uint32_t* regs;
  std::array<uint32_t, 4> value;
  uint64_t op;
};

struct BulkRange {  // shared memory that a bulk operation reads
  uint64_t number;
  uint32_t addr, bytes;
};

// Events of each block of the grid, as far as known: completed bulk reductions, and the times of
// its threads. A map, because few blocks communicate.
struct KnownBlock {
  uint64_t reductions = 0;
  std::vector<int32_t> times;
};
using GlobalClock = std::map<uint32_t, KnownBlock>;
void join(GlobalClock& into, const GlobalClock& other);

struct Acquired {  // from global memory, by a thread at a time
  int thread;
  int32_t time;
  GlobalClock clock;
};

struct ThreadCopy {  // cp.async: 16 bytes, `bytes` of them from src
  uint64_t number;
  uint32_t dst, bytes;
  const void* src;
};

struct Fiber {
  Context context{};
  bool done = false;
  std::function<std::string()> waits_for;
  Clock clock;
  std::vector<uint32_t> dirty;        // words stored since the last fence.proxy.async
  std::vector<int32_t> proxy_fences;  // the thread's time at each fence.proxy.async
  // wgmma.
  uint64_t issued = 0;
  bool fenced = false;
  std::vector<uint64_t> groups;  // operations issued at each commit
  std::vector<HeldAccumulator> accumulators;
  std::vector<HeldOperand> operands;
  uint64_t shuffles = 0;
  // Bulk operations tracked by bulk groups.
  uint64_t bulk_issued = 0;
  std::vector<uint64_t> bulk_groups;    // like `groups`
  std::vector<BulkRange> bulk_reading;  // reads this thread has not waited for
  // The number within the block of each issued operation.
  std::vector<uint64_t> bulk_in_block;
  GlobalClock global_clock;
  // cp.async.
  std::vector<ThreadCopy> thread_copies;
  uint64_t thread_copies_issued = 0;
  std::vector<uint64_t> thread_copy_groups;  // like `groups`
};

struct Barrier {
  uint32_t addr = 0;
  std::string name;
  uint32_t count = 0, pending = 0, phase = 0;
  int64_t tx = 0;
  int init_thread = 0;
  bool fenced = false;
  Clock arriving, completed;
  Waiters waiters;
};

// InFlight: a copy that completes on an mbarrier writes it. Pending: a cp.async writes it whose
// thread has not waited.
enum class State : uint8_t { Unwritten, InFlight, Pending, Copied, Stored, BarrierObject };

struct Word {  // four bytes of a Stored granule
  bool written = false;
  uint16_t writer = 0;
  int32_t time = 0;  // the writer's time of the store
  // The writer's time when it made the word visible to the async proxy; 0: not yet; -1: from a
  // copy.
  int32_t fenced = 0;
};

constexpr int32_t kByProxy = -1;
struct Load {  // a thread's last load of a granule
  int32_t time = 0;
  // Number of the thread's fence.proxy.async before the load; kByProxy: a read by the async proxy.
  int32_t fences = kByProxy;
};

struct Granule {
  State state = State::Unwritten;
  int16_t barrier = -1;  // Copied, InFlight: mbarrier and phase of the data
  int16_t copier = -1;   // Pending: the thread
  uint32_t phase = 0;
  // 1 + the last wgmma of each warpgroup that reads it.
  std::array<int32_t, kMaxGroups> read_by{};
  int16_t bulk_reader = -1;  // thread that has not waited for its bulk read
  std::array<Word, kGranule / 4> word;
  // Per thread since the last write; allocated on demand.
  std::unique_ptr<std::array<Load, kMaxThreads>> loaded;
};

struct Copy {
  TensorMap map;
  uint32_t dst, bytes;
  int barrier;
  int32_t coord[5];
  uint64_t due;
};

struct Reduction {  // shared to global memory, or a copy
  float* dst;
  uint32_t src, bytes;
  int thread;
  uint64_t number, due;
  bool adds, read = false;
  std::vector<float> value;  // values read
};

struct Wgmma {
  int n;
  bool f16, a_in_regs, trans_a, trans_b, scale_d;
  uint64_t desc_a, desc_b;
  std::shared_ptr<Accumulator> acc;
  int threads = 0;  // threads that have issued it
  std::vector<std::array<uint32_t, 4>> a;
  // (mbarrier, phase) pairs of its operands.
  std::vector<std::pair<int, uint32_t>> needs;
  std::vector<int32_t> needs_thread;  // required time per thread
};

struct Group {  // a warpgroup's queue
  std::deque<Wgmma> ops;
  // Number of ops[0]; number of executed operations.
  uint64_t first = 0, executed = 0;
  Waiters waiters;
};

using LaneValues = std::array<uint32_t, 6>;  // values a lane shares with its warp

struct Exchange {  // one warp's convergence point
  std::array<LaneValues, kWarp> value[2];
  uint32_t arrived[2] = {0, 0};
  uint64_t completed = 0;
  Clock clock[2];
  Waiters waiters;
};

struct NamedBarrier {
  int expected = 0, arrived = 0;
  uint64_t generation = 0;
  Clock arriving, completed;
  Waiters waiters;
};

struct Random {
  uint64_t s;
  uint64_t operator()() {
    s += 0x9e3779b97f4a7c15;
    uint64_t z = s;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  bool one_in(uint64_t n) { return (*this)() % n == 0; }
};

struct Block {
  const Options* options;
  const std::function<void()>* kernel;
  int threads;
  dim3 index;
  uint32_t number = 0;  // in starting order
  uint64_t bulk_issued = 0;
  std::vector<Acquired> acquired;
  int slot = 0;              // index of arena and stacks
  uint8_t* arena = nullptr;  // shared memory
  uint32_t smem_base, smem_end;
  Random random;
  uint64_t tick = 0;
  std::string error;

  std::vector<Fiber> fibers;
  std::vector<uint32_t> runnable;  // per warp, a bit per lane
  std::vector<uint64_t> weight;    // per warp: scheduling weight
  int alive = 0;
  int current = -1;
  Context scheduler{};

  std::vector<Granule> granules;  // up to smem_end
  std::vector<int16_t> barrier_at = std::vector<int16_t>(kArena / 8, -1);
  std::vector<Barrier> barriers;
  std::vector<Copy> copies;
  std::vector<Reduction> reductions;
  Waiters bulk_waiters;
  std::array<Group, kMaxGroups> groups;
  std::vector<Exchange> exchanges;
  std::array<NamedBarrier, kNamedBarriers> named;
  std::vector<int> registers;  // per warp
  int free_registers = 0;
  Waiters register_waiters;

  Fiber& self() { return fibers[current]; }
};

extern Block* block;  // block of the running thread
extern Report* report;

// Threads (scheduler.cpp).

template <class... A>
[[gnu::noinline]] std::string format(const char* text, A... args) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, text, args...);
  return buffer;
}

// Let other threads run. Every instruction calls it first.
void preempt();
// Put the current thread to sleep. `what` describes the condition in a deadlock message.
void wait_on(Waiters& list, std::function<std::string()> what);
void wake(Waiters& list);
void wake(Block& b, int thread);
// Join this thread's clock into `into`, and begin a new interval of its time.
void release(Clock& into);
// Return the current thread's time.
inline int32_t now() { return block->self().clock.c[kThread + block->current]; }
// Return true if the current thread knows of `thread`'s operations up to `time`.
inline bool knows_thread(int thread, int32_t time) {
  return block->self().clock.c[kThread + thread] >= time;
}

// Shared memory (shared_memory.cpp).

void check_range(uint32_t addr, uint32_t bytes, const char* what);
uint32_t swizzle_address(uint32_t addr, Swizzle mode);
// Check that the async proxy can read: the data is written and visible to it.
void check_readable(uint32_t addr, const char* what);
// Check that every access to [addr, addr + bytes) of one granule is complete, as far as the current
// thread knows, before it overwrites it.
void check_writable(uint32_t addr, uint32_t bytes, const char* what);
// Do the same for a write by the async proxy: threads must have fenced their stores and loads
// there.
void check_writable_by_proxy(uint32_t addr, const char* what);
// Record a granule's load by the current thread, with an instruction that needs no wait, or by the
// async proxy for it.
void note_load(Granule& g, bool by_proxy = false);
// Record a store of the current thread to one granule.
void note_store(uint32_t addr, int bytes);

// Barriers (barriers.cpp).

const char* barrier_name(int index);
// Return true if the thread knows of the phase that completes the copied data.
bool knows(const Fiber& fiber, int barrier, uint32_t phase);
Barrier& find_barrier(uint32_t addr, const char* what);
void update_phase(Barrier& bar);

// Engines: each call advances one operation by one step. The scheduler calls them (copies.cpp,
// wgmma.cpp).

void complete_copy(size_t index);
void advance_reduction(size_t index);
bool can_execute(const Group& group);
void execute_next(Group& group);

// Global memory (global_memory.cpp).

void check_global(const void* p, size_t bytes, const char* what);
// Forget the launch's counters and stores.
void forget_global();
// Block and number of the last reduction to a place.
std::map<const float*, std::pair<uint32_t, uint64_t>>& reduced();

// Warps (warp.cpp).

// Converge the lanes of a warp; return the slot of the warp's Exchange with their values. `sync`
// also orders memory.
int meet(const LaneValues& value, bool sync);

}  // namespace emu
