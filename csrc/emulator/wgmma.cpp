// SPDX-License-Identifier: Apache-2.0
// wgmma: asynchronous warpgroup gemms with operands in shared memory; and setmaxnreg.
#include "emulator/state.h"

namespace emu {

// Decode a shared-memory matrix descriptor and call f(address, row, k) for each 16-byte run of the
// operand. row: index along M or N; k: index along K of the run's first element. The run continues
// along K if the operand is K-major and along M/N if it is MN-major.
template <class F>
static void for_each_operand_run(uint64_t desc, bool mn_major, int rows, F f) {
  static constexpr Swizzle kModes[4] = {Swizzle::None, Swizzle::B128, Swizzle::B64, Swizzle::B32};
  static constexpr uint32_t kWidth[4] = {16, 128, 64, 32};  // bytes per row of the atom
  const uint32_t start = uint32_t(desc & 0x3fff) << 4;
  const uint32_t lbo = uint32_t(desc >> 16 & 0x3fff) << 4;
  const uint32_t sbo = uint32_t(desc >> 32 & 0x3fff) << 4;
  const int layout = int(desc >> 62);
  const Swizzle mode = kModes[layout];
  const uint32_t width = kWidth[layout], runs = width / 16;
  if (desc >> 49 & 7) fail("wgmma: descriptors with a base offset are not emulated");
  // With base offset 0, the atom (8 rows) must start at a multiple of its size. Moving along K
  // inside the atom does not change the bits above the row width.
  if (layout && start % (8 * width) >= width)
    fail(format("wgmma: descriptor start %#x is not aligned to the swizzle pattern", start));
  auto visit = [&](uint32_t offset, int row, int k) {
    const uint32_t addr = swizzle_address(start + offset, mode);
    check_range(addr, 16, "wgmma");
    f(addr, row, k);
  };
  if (!mn_major) {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < 2; ++c)
        visit((r / 8) * sbo + (r % 8) * width + (layout ? c * 16 : c * lbo), r, c * 8);
  } else {
    for (int k = 0; k < 16; ++k)
      for (uint32_t c = 0; c < uint32_t(rows) / 8; ++c)
        visit(layout ? (c / runs) * lbo + (c % runs) * 16 + (k / 8) * sbo + (k % 8) * width
                     : c * sbo + (k / 8) * lbo + (k % 8) * 16,
              int(c) * 8, k);
  }
}

// Accumulator fragment of m64nNk16: register i of thread t is element (row, column).
static int fragment_row(int t, int i) {
  return 16 * (t / kWarp) + (t % kWarp) / 4 + 8 * (i / 2 % 2);
}
static int fragment_col(int t, int i) { return 8 * (i / 4) + 2 * (t % 4) + i % 2; }

static void execute(Wgmma& op) {
  static float a[64][16], b[16][256];
  auto widen = op.f16 ? from_f16 : from_bf16;
  auto load = [widen](uint64_t desc, bool mn_major, int rows, auto store) {
    for_each_operand_run(desc, mn_major, rows, [&](uint32_t addr, int row, int k) {
      check_readable(addr, "wgmma");
      uint16_t bits[8];
      std::memcpy(bits, block->arena + addr, 16);
      for (int e = 0; e < 8; ++e)
        store(mn_major ? row + e : row, mn_major ? k : k + e, widen(bits[e]));
    });
  };
  if (op.a_in_regs) {
    // A fragment: registers 0..3 hold (row, k), (row + 8, k), (row, k + 8), (row + 8, k + 8).
    for (int t = 0; t < kGroup; ++t)
      for (int r = 0; r < 4; ++r)
        for (int h = 0; h < 2; ++h)
          a[16 * (t / kWarp) + (t % kWarp) / 4 + 8 * (r % 2)][2 * (t % 4) + 8 * (r / 2) + h] =
              widen(uint16_t(op.a[t][r] >> (16 * h)));
  } else {
    load(op.desc_a, op.trans_a, 64, [&](int m, int k, float v) { a[m][k] = v; });
  }
  load(op.desc_b, op.trans_b, op.n, [&](int n, int k, float v) { b[k][n] = v; });
  for (int m = 0; m < 64; ++m) {
    float* row = op.acc->m.data() + m * op.n;
    if (!op.scale_d) std::fill(row, row + op.n, 0.0f);
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < op.n; ++n) row[n] += a[m][k] * b[k][n];
  }
  ++report->warpgroup_products;
}

bool can_execute(const Group& group) {
  return group.executed < group.first + group.ops.size() &&
         group.ops[group.executed - group.first].threads == kGroup;
}

void execute_next(Group& group) { execute(group.ops[group.executed++ - group.first]); }

// Check operands when the first thread issues an operation: they must be readable now, not only at
// execution.
static void check_operands(Wgmma& op, int group, uint64_t number) {
  auto visit = [&](uint32_t addr, int, int) {
    check_readable(addr, "wgmma");
    Granule& g = block->granules[addr / kGranule];
    g.read_by[group] = int32_t(number + 1);
    if (g.state == State::Stored) {
      if (op.needs_thread.empty()) op.needs_thread.resize(block->threads);
      for (const Word& w : g.word)
        op.needs_thread[w.writer] = std::max(op.needs_thread[w.writer], w.fenced);
      return;
    }
    const std::pair<int, uint32_t> need{g.barrier, g.phase};
    if (std::find(op.needs.begin(), op.needs.end(), need) == op.needs.end())
      op.needs.push_back(need);
  };
  if (!op.a_in_regs) for_each_operand_run(op.desc_a, op.trans_a, 64, visit);
  for_each_operand_run(op.desc_b, op.trans_b, op.n, visit);
}

// Copy finished accumulators back to the current thread's registers.
static void collect(uint64_t complete) {
  Fiber& me = block->self();
  const int t = block->current % kGroup;
  for (auto& held : me.operands)
    if (held.op < complete && std::memcmp(held.regs, held.value.data(), 16))
      fail("A registers were changed while a wgmma could still read them");
  std::erase_if(me.operands, [&](auto& held) { return held.op < complete; });
  for (auto& held : me.accumulators) {
    if (held.last_op >= complete) continue;
    const int n = held.acc->n;
    for (int i = 0; i < n / 2; ++i) {
      if (bits_of(held.regs[i]) != kPoisonRegister)
        fail(format("accumulator register %d was touched while a wgmma was in flight", i));
      held.regs[i] = held.acc->m[fragment_row(t, i) * n + fragment_col(t, i)];
    }
  }
  std::erase_if(me.accumulators, [&](auto& held) { return held.last_op < complete; });
}

void wgmma_fence(const Site& site) {
  if (fault_at(site, "wgmma.fence", kDrop)) return;
  preempt();
  block->self().fenced = true;
}

void wgmma(int n, bool f16, float* acc, const uint32_t* a_regs, uint64_t desc_a, bool trans_a,
           uint64_t desc_b, bool trans_b, bool scale_d, const Site& site) {
  const Fault fault = fault_at(site, "wgmma", kDrop | kShift | kFlip);
  if (fault == kDrop) return;
  if (fault == kShift) ++desc_b;
  if (fault == kFlip) scale_d = !scale_d;
  preempt();
  Fiber& me = block->self();
  const int g = block->current / kGroup, t = block->current % kGroup;
  Group& group = block->groups[g];
  const uint64_t number = me.issued++;
  if (!me.fenced) fail("wgmma without a wgmma.fence since its registers were last touched");

  auto held = std::find_if(me.accumulators.begin(), me.accumulators.end(),
                           [&](auto& h) { return h.regs == acc; });
  if (number == group.first + group.ops.size()) {  // first thread of the warpgroup
    Wgmma op{n,  f16, a_regs != nullptr, trans_a, trans_b, scale_d, desc_a, desc_b, {}, 0, {},
             {}, {}};
    if (op.a_in_regs) op.a.resize(kGroup);
    check_operands(op, g, number);
    if (held != me.accumulators.end()) {
      op.acc = held->acc;
    } else {
      op.acc = std::make_shared<Accumulator>();
      op.acc->n = n;
      op.acc->m.resize(64 * n);
    }
    group.ops.push_back(std::move(op));
  }
  Wgmma& op = group.ops[number - group.first];
  if (op.n != n || op.f16 != f16 || op.a_in_regs != (a_regs != nullptr) || op.desc_b != desc_b ||
      (!a_regs && op.desc_a != desc_a) || op.trans_a != trans_a || op.trans_b != trans_b ||
      op.scale_d != scale_d)
    fail("threads of a warpgroup disagree about a wgmma");
  if (block->options->race_check) {
    for (auto& [bar, phase] : op.needs)
      if (!knows(me, bar, phase))
        fail(
            format("wgmma reads data announced by mbarrier '%s' phase %u, which this thread has "
                   "not waited for",
                   barrier_name(bar), phase));
    int32_t missing = 0;  // no branch in the loop, for speed
    for (size_t i = 0; i < op.needs_thread.size(); ++i)
      missing |= me.clock.c[kThread + i] - op.needs_thread[i];
    if (missing < 0)
      for (size_t i = 0; i < op.needs_thread.size(); ++i)
        if (!knows_thread(int(i), op.needs_thread[i]))
          fail(
              format("wgmma is not ordered after the store and fence by thread %d of what it "
                     "reads",
                     int(i)));
  }
  if (a_regs) {
    std::memcpy(op.a[t].data(), a_regs, 16);
    me.operands.push_back({a_regs, op.a[t], number});
  }
  if (held == me.accumulators.end()) {
    for (int i = 0; i < n / 2; ++i) {
      op.acc->m[fragment_row(t, i) * n + fragment_col(t, i)] = acc[i];
      std::memcpy(&acc[i], &kPoisonRegister, 4);
    }
    me.accumulators.push_back({op.acc, acc, number});
  } else {
    if (held->acc != op.acc) fail("threads of a warpgroup disagree about an accumulator");
    if (op.acc->n != n) fail("chained wgmmas of different shapes");
    held->last_op = number;
  }
  if (++op.threads == kGroup) wake(group.waiters);
}

void wgmma_commit(const Site& site) {
  if (fault_at(site, "wgmma.commit", kDrop)) return;
  preempt();
  Fiber& me = block->self();
  me.groups.push_back(me.issued);
  me.fenced = false;  // stricter than PTX, but ptxas adds a fence to a group without one
}

void wgmma_wait(int pending, const Site& site) {
  const Fault fault = fault_at(site, "wgmma.wait", kDrop | kShift);
  if (fault == kDrop) return;
  if (fault == kShift) ++pending;
  preempt();
  Fiber& me = block->self();
  const int g = block->current / kGroup;
  Group& group = block->groups[g];
  if (me.groups.size() > size_t(pending)) {
    const uint64_t target = me.groups[me.groups.size() - 1 - pending];
    while (group.executed < target) {
      if (can_execute(group)) {
        execute_next(group);
        wake(group.waiters);
      } else {
        wait_on(group.waiters, [g] {
          const Group& w = block->groups[g];
          return format("wgmma %llu of warpgroup %d, issued by %d of 128 threads",
                        (unsigned long long)w.executed, g, w.ops[w.executed - w.first].threads);
        });
      }
    }
    collect(target);
    me.clock.c[g] = std::max(me.clock.c[g], int32_t(target));
    // Forget operations that every thread of the warpgroup knows to be complete.
    uint64_t seen = target;
    for (int i = 0; i < kGroup; ++i)
      seen = std::min<uint64_t>(seen, block->fibers[g * kGroup + i].clock.c[g]);
    while (group.first < seen) {
      group.ops.pop_front();
      ++group.first;
    }
  }
  me.fenced = false;
}

void setmaxnreg(bool increase, int registers, const Site& site) {
  if (fault_at(site, "setmaxnreg", kDrop)) return;
  preempt();
  const int w = block->current / kWarp;
  if (registers % 8 || registers < 24 || registers > 256) fail("setmaxnreg: bad register count");
  if (block->threads % kGroup) fail("setmaxnreg: partial warpgroup");
  int& have = block->registers[w];
  if (have == registers) return;  // another lane of this warp did it
  if (increase != (registers > have))
    fail(format("setmaxnreg.%s to %d from %d", increase ? "inc" : "dec", registers, have));
  while (increase && have != registers && block->free_registers < (registers - have) * kWarp)
    wait_on(block->register_waiters, [registers] {
      return format("setmaxnreg.inc to %d: %d registers are free", registers,
                    block->free_registers);
    });
  if (have == registers) return;
  block->free_registers -= (registers - have) * kWarp;
  have = registers;
  wake(block->register_waiters);
}

}  // namespace emu
