// SPDX-License-Identifier: Apache-2.0
// What the emulator's parts share: the state of a running block, and how a thread waits for something.
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

// ---- constants

constexpr int kWarp = 32, kGroup = 128;
constexpr int kMaxThreads = 512, kMaxGroups = kMaxThreads / kGroup;
constexpr int kMaxBarriers = 56, kNamedBarriers = 16;
constexpr int kMaxResident = 4;          // blocks that run at the same time
constexpr uint32_t kArena = 256 * 1024;  // descriptors address 18 bits
constexpr uint32_t kGranule = 16;        // unit of the shadow state
constexpr uint16_t kPoison = 0x7fc5;     // a NaN in bf16 and, doubled, in f32
// A signalling NaN: arithmetic on it changes its bits, so that not only stores are noticed.
constexpr uint32_t kPoisonRegister = 0x7fa5a5c5;
constexpr uint64_t kBarrierMagic = 0xba55'1e55'0000'0000;

// ---- state

// What a thread (or a barrier) knows to have happened. Component g < kMaxGroups: number of wgmma
// operations of warpgroup g that are complete. Component kMaxGroups + b: 1 + number of completed
// phases of mbarrier b (0: not even its initialisation is known). Component kThread + t: the time
// of thread t, which advances whenever that thread releases what it did before.
constexpr size_t kThread = kMaxGroups + kMaxBarriers;
struct Clock {
  std::array<int32_t, kThread + kMaxThreads> c{};
  void join(const Clock& other);
};

using Waiters = std::vector<int>;

struct Accumulator {  // the tensor core's view of accumulator registers in flight
  int n = 0, holders = 0;
  std::vector<float> m;  // 64 x n
};

struct HeldAccumulator {  // one thread's share of it
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

// What is known of global memory: for each block of the grid, how many of its bulk reductions are
// complete. A map, since few blocks ever communicate.
using GlobalClock = std::map<uint32_t, uint64_t>;
inline void join(GlobalClock& into, const GlobalClock& other) {
  for (auto& [block, count] : other) into[block] = std::max(into[block], count);
}

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
  std::vector<uint32_t> dirty;        // words stored to since the last fence.proxy.async
  std::vector<int32_t> proxy_fences;  // the thread's time at each fence.proxy.async
  // wgmma
  uint64_t issued = 0;
  bool fenced = false;
  std::vector<uint64_t> groups;  // number of operations issued at each commit
  std::vector<HeldAccumulator> accumulators;
  std::vector<HeldOperand> operands;
  uint64_t shuffles = 0;
  // bulk operations tracked by bulk groups
  uint64_t bulk_issued = 0;
  std::vector<uint64_t> bulk_groups;    // as `groups`
  std::vector<BulkRange> bulk_reading;  // this thread has not waited for these reads
  std::vector<uint64_t> bulk_in_block;  // the number within the block of each operation issued
  GlobalClock global_clock;
  // cp.async
  std::vector<ThreadCopy> thread_copies;
  uint64_t thread_copies_issued = 0;
  std::vector<uint64_t> thread_copy_groups;  // as `groups`
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

// InFlight: a copy that completes on an mbarrier writes it; Pending: a cp.async whose thread has not waited for it does.
enum class State : uint8_t { Unwritten, InFlight, Pending, Copied, Stored, BarrierObject };

struct Word {  // four bytes of a Stored granule
  bool written = false;
  uint16_t writer = 0;
  int32_t time = 0;    // the writer's, when it stored
  int32_t fenced = 0;  // the writer's, when it made the word visible to the async proxy; 0: not
                       // yet; -1: the word is from a copy
};

constexpr int32_t kByProxy = -1;
struct Load {  // a thread's last of a granule
  int32_t time = 0;
  int32_t fences = kByProxy;  // how often the thread had executed fence.proxy.async by then; kByProxy: the async proxy read for it
};

struct Granule {
  State state = State::Unwritten;
  int16_t barrier = -1;  // Copied, InFlight: the mbarrier and phase that announce the data
  int16_t copier = -1;   // Pending: the thread
  uint32_t phase = 0;
  std::array<int32_t, kMaxGroups> read_by{};  // 1 + last wgmma of each warpgroup that reads it
  int16_t bulk_reader = -1;                   // thread that has not waited for its bulk read
  std::array<Word, kGranule / 4> word;
  std::unique_ptr<std::array<Load, kMaxThreads>> loaded;  // of each thread, since the last write; allocated when needed
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
  std::vector<float> value;  // what it has read
};

struct Wgmma {
  int n;
  bool f16, a_in_regs, trans_a, trans_b, scale_d;
  uint64_t desc_a, desc_b;
  std::shared_ptr<Accumulator> acc;
  int threads = 0;  // how many threads have issued it
  std::vector<std::array<uint32_t, 4>> a;
  std::vector<std::pair<int, uint32_t>> needs;  // (mbarrier, phase) that announce its operands
  std::vector<int32_t> needs_thread;            // for each thread, the time that must be known
};

struct Group {  // a warpgroup's queue
  std::deque<Wgmma> ops;
  uint64_t first = 0, executed = 0;  // number of ops[0]; number of executed operations
  Waiters waiters;
};

using LaneValues = std::array<uint32_t, 6>;  // what a lane shows the others

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
  uint32_t number = 0;  // in order of starting
  uint64_t bulk_issued = 0;
  int slot = 0;              // which arena and stacks
  uint8_t* arena = nullptr;  // shared memory
  uint32_t smem_base, smem_end;
  Random random;
  uint64_t tick = 0;
  std::string error;

  std::vector<Fiber> fibers;
  std::vector<uint32_t> runnable;  // per warp, a bit per lane
  std::vector<uint64_t> weight;    // per warp: how often the scheduler favours it
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

extern Block* block;  // the one whose thread runs
extern Report* report;

// ---- how threads run (scheduler.cpp)

template <class... A>
[[gnu::noinline]] std::string format(const char* text, A... args) {
  char buffer[512];
  std::snprintf(buffer, sizeof buffer, text, args...);
  return buffer;
}

// Gives other threads a chance to run; called at the start of each instruction.
void preempt();
// Puts the current thread to sleep; `what` says, in a deadlock, what it waits for.
void wait_on(Waiters& list, std::function<std::string()> what);
void wake(Waiters& list);
void wake(Block& b, int thread);
// Joins this thread's clock into `into`, and begins a new interval of its time.
void release(Clock& into);
// The current thread's time.
inline int32_t now() { return block->self().clock.c[kThread + block->current]; }
// What a thread did up to some time of its own must be known to the current thread.
inline bool knows_thread(int thread, int32_t time) { return block->self().clock.c[kThread + thread] >= time; }

// ---- shared memory (shared_memory.cpp)

void check_range(uint32_t addr, uint32_t bytes, const char* what);
uint32_t swizzle_address(uint32_t addr, Swizzle mode);
// By the async proxy: written, and made visible to it.
void check_readable(uint32_t addr, const char* what);
// Everything that used [addr, addr + bytes) of one granule must be over, as far as the current thread knows, before it overwrites it.
void check_writable(uint32_t addr, uint32_t bytes, const char* what);
// The same, before the async proxy overwrites it: what threads stored or loaded there they must have fenced since.
void check_writable_by_proxy(uint32_t addr, const char* what);
// The current thread reads a granule, by an instruction that it need not wait for, or the async proxy has read it for the thread.
void note_load(Granule& g, bool by_proxy = false);
// The current thread's bytes are in one granule from now on.
void note_store(uint32_t addr, int bytes);

// ---- barriers (barriers.cpp)

const char* barrier_name(int index);
// The event that announces copied data must be known to the thread that uses the data.
bool knows(const Fiber& fiber, int barrier, uint32_t phase);
Barrier& find_barrier(uint32_t addr, const char* what);
void update_phase(Barrier& bar);

// ---- the engines: one step of one operation each; called by the scheduler (copies.cpp, wgmma.cpp)

void complete_copy(size_t index);
void advance_reduction(size_t index);
bool can_execute(const Group& group);
void execute_next(Group& group);

// ---- global memory (global_memory.cpp)

void check_global(const void* p, size_t bytes, const char* what);
void forget_counters();
std::map<const float*, std::pair<uint32_t, uint64_t>>& reduced();  // block and number of the last reduction to a place

// ---- warps (warp.cpp)

// Lanes of a warp meet; returns the slot of the warp's Exchange that holds their values. With `sync` it orders memory.
int meet(const LaneValues& value, bool sync);

}  // namespace emu
