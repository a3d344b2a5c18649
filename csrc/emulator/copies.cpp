// SPDX-License-Identifier: Apache-2.0
// Copies between global and shared memory: TMA, bulk operations, cp.async.
#include "emulator/state.h"

namespace emu {

// Call f(shared address, global address or nullptr if out of bounds, bytes) for each run of at most
// 16 bytes, in the tile mode of cp.async.bulk.tensor.
template <class F>
static void for_each_run(const Copy& copy, F f) {
  const TensorMap& m = copy.map;
  const uint32_t inner = m.box[0] * m.elem_bytes;
  uint32_t rows = 1;
  for (int i = 1; i < m.rank; ++i) rows *= m.box[i];
  for (uint32_t row = 0; row < rows; ++row) {
    uint32_t rest = row;
    const uint8_t* src = m.base;
    bool inside = true;
    for (int i = 1; i < m.rank; ++i) {
      const int64_t at = copy.coord[i] + int64_t(rest % m.box[i]);
      rest /= m.box[i];
      if (at < 0 || at >= int64_t(m.dim[i])) inside = false;
      else src += at * m.stride[i];
    }
    for (uint32_t x = 0; x < inner; x += kGranule) {
      const uint32_t dst = swizzle_address(copy.dst + row * inner + x, m.swizzle);
      for (uint32_t e = 0; e < kGranule && x + e < inner; e += m.elem_bytes) {
        const int64_t col = copy.coord[0] + int64_t((x + e) / m.elem_bytes);
        const bool in = inside && col >= 0 && col < int64_t(m.dim[0]);
        f(dst + e, in ? src + col * m.elem_bytes : nullptr, m.elem_bytes);
      }
    }
  }
}

void complete_copy(size_t index) {
  const Copy copy = block->copies[index];
  block->copies.erase(block->copies.begin() + index);
  Barrier& bar = block->barriers[copy.barrier];
  for_each_run(copy, [&](uint32_t dst, const uint8_t* src, int bytes) {
    if (src) std::memcpy(block->arena + dst, src, bytes);
    else std::memset(block->arena + dst, 0, bytes);
    Granule& g = block->granules[dst / kGranule];
    g.state = State::Copied;
    g.barrier = int16_t(copy.barrier);
    g.phase = bar.phase;
  });
  bar.tx -= copy.bytes;
  update_phase(bar);
}

// Advance a reduction by one step: read shared memory, or add to global memory.
void advance_reduction(size_t index) {
  Reduction& r = block->reductions[index];
  if (!r.read) {
    for (uint32_t at = r.src; at < r.src + r.bytes; at += kGranule)
      check_readable(at, "bulk reduction");
    r.value.resize(r.bytes / 4);
    std::memcpy(r.value.data(), block->arena + r.src, r.bytes);
    r.read = true;
    r.due = block->random.one_in(4) ? ~0ull : block->tick + block->random() % 2000;
  } else {
    for (size_t i = 0; i < r.value.size(); ++i)
      r.dst[i] = r.adds ? r.dst[i] + r.value[i] : r.value[i];
    block->reductions.erase(block->reductions.begin() + index);
  }
  wake(block->bulk_waiters);
}

static int usable_barrier(uint32_t addr, const char* what) {
  Barrier& bar = find_barrier(addr, what);
  if (!bar.fenced)
    fail(
        format("%s: mbarrier '%s' was not made visible to the async proxy after its "
               "initialisation",
               what, bar.name.c_str()));
  return int(&bar - block->barriers.data());
}

static void start_copy(Copy copy, const char* what) {
  for_each_run(copy, [&](uint32_t at, const uint8_t* src, int bytes) {
    if (src) check_global(src, bytes, what);
    if (at % kGranule) return;
    check_writable_by_proxy(at, what);
    Granule& g = block->granules[at / kGranule];
    g.state = State::InFlight;
    g.barrier = int16_t(copy.barrier);
    g.loaded.reset();
    std::fill_n(reinterpret_cast<uint16_t*>(block->arena + at), kGranule / 2, kPoison);
  });
  // Choose the latency: immediate, moderate, or "not before nothing else can run".
  const uint64_t dice = block->random() % 8;
  copy.due = dice < 2 ? block->tick + 1 : dice < 6 ? block->tick + block->random() % 4000 : ~0ull;
  block->copies.push_back(copy);
  ++report->copies;
}

void tma_load(uint32_t dst, const TensorMap& map, uint32_t addr, int rank, const int32_t* coord,
              const Site& site) {
  const Fault fault = fault_at(site, "TMA load", kDrop | kShift | kFlip);
  if (fault == kDrop) return;
  preempt();
  const int index = usable_barrier(addr, "TMA load");
  if (rank != map.rank) fail("TMA load: the tensor map has another rank");
  Copy copy{map, dst, uint32_t(map.elem_bytes), index, {}, 0};
  for (int i = 0; i < rank; ++i) {
    copy.coord[i] = coord[i] + (fault == kShift && i == 1) + 8 * (fault == kFlip && i == 0);
    copy.bytes *= map.box[i];
    // Out-of-bounds boxes read zeros. A kernel may rely on that for columns, if the tensor has
    // fewer panels than the kernel. In rows or heads it is a wrong coordinate.
    if (i > 0 && (coord[i] + int64_t(map.box[i]) <= 0 || coord[i] >= int64_t(map.dim[i])))
      fail(
          format("TMA load: the box lies wholly outside the tensor in dimension %d "
                 "(coordinate %d, size %llu)",
                 i, coord[i], (unsigned long long)map.dim[i]));
  }
  const uint32_t align = map.swizzle == Swizzle::B128 ? 1024 : 128;
  if (dst % align) fail(format("TMA load: destination %#x is not %u-byte aligned", dst, align));
  check_range(dst, copy.bytes, "TMA load");
  start_copy(std::move(copy), "TMA load");
}

void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t addr, const Site& site) {
  const Fault fault = fault_at(site, "bulk load", kDrop | kShift);
  if (fault == kDrop) return;
  if (fault == kShift) dst += 16;
  preempt();
  const int index = usable_barrier(addr, "bulk load");
  if (dst % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(src) % 16)
    fail("bulk load: addresses and size must be multiples of 16");
  check_range(dst, bytes, "bulk load");
  TensorMap map;  // one row
  map.base = static_cast<const uint8_t*>(src);
  map.elem_bytes = 4;
  map.rank = 1;
  map.box[0] = bytes / 4;
  map.dim[0] = bytes / 4;
  start_copy({map, dst, bytes, index, {}, 0}, "bulk load");
}

static void start_reduction(float* dst, uint32_t src, uint32_t bytes, bool adds, const Site& site) {
  const Fault fault = fault_at(site, "bulk reduction", kDrop | kShift);
  if (fault == kDrop) return;
  if (fault == kShift) dst += 4;
  preempt();
  if (src % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(dst) % 16)
    fail("bulk reduction: addresses and size must be multiples of 16");
  check_range(src, bytes, "bulk reduction");
  check_global(dst, bytes, "bulk reduction");
  Fiber& me = block->self();
  for (uint32_t at = src; at < src + bytes; at += kGranule) {
    check_readable(at, "bulk reduction");
    Granule& g = block->granules[at / kGranule];
    if (block->options->race_check) {
      if (g.state == State::Copied && !knows(me, g.barrier, g.phase))
        fail(format("bulk reduction of %#x without waiting for mbarrier '%s'", at,
                    barrier_name(g.barrier)));
      if (g.state == State::Stored)
        for (const Word& w : g.word)
          if (!knows_thread(w.writer, w.fenced))
            fail(
                format("bulk reduction of %#x is not ordered after the store and fence by thread "
                       "%d",
                       at, int(w.writer)));
    }
    g.bulk_reader = int16_t(block->current);
  }
  const uint64_t dice = block->random() % 4;
  block->reductions.push_back({dst,
                               src,
                               bytes,
                               block->current,
                               me.bulk_issued,
                               dice ? block->tick + block->random() % 2000 : ~0ull,
                               adds,
                               false,
                               {}});
  me.bulk_reading.push_back({me.bulk_issued++, src, bytes});
  const uint64_t number = ++block->bulk_issued;
  me.bulk_in_block.push_back(number);
  if (!block->options->ordered_reductions) return;
  auto [last, first] = reduced().try_emplace(dst, block->number, number);
  if (!first && me.global_clock[last->second.first].reductions < last->second.second)
    fail("bulk reduction is not ordered after one to the same place by another block");
  last->second = {block->number, number};
}

void bulk_store(void* dst, uint32_t src, uint32_t bytes, const Site& site) {
  start_reduction(static_cast<float*>(dst), src, bytes, false, site);
}
void bulk_reduce_add_f32(float* dst, uint32_t src, uint32_t bytes, const Site& site) {
  start_reduction(dst, src, bytes, true, site);
}

void bulk_commit(const Site& site) {
  if (fault_at(site, "bulk commit", kDrop)) return;
  preempt();
  Fiber& me = block->self();
  me.bulk_groups.push_back(me.bulk_issued);
}

void bulk_wait(int pending, bool only_read, const Site& site) {
  const Fault fault = fault_at(site, "bulk wait", kDrop | kShift | (only_read ? 0 : kFlip));
  if (fault == kDrop) return;
  if (fault == kShift) ++pending;
  if (fault == kFlip) only_read = true;
  preempt();
  Fiber& me = block->self();
  if (me.bulk_groups.size() <= size_t(pending)) return;
  const uint64_t target = me.bulk_groups[me.bulk_groups.size() - 1 - pending];
  const int thread = block->current;
  auto busy = [&] {
    for (const Reduction& r : block->reductions)
      if (r.thread == thread && r.number < target && !(only_read && r.read)) return true;
    return false;
  };
  while (busy()) wait_on(block->bulk_waiters, [] { return std::string("its bulk operations"); });
  for (const BulkRange& range : me.bulk_reading) {
    if (range.number >= target) continue;
    for (uint32_t at = range.addr; at < range.addr + range.bytes; at += kGranule) {
      Granule& g = block->granules[at / kGranule];
      g.bulk_reader = -1;
      note_load(g, true);
    }
  }
  std::erase_if(me.bulk_reading, [&](auto& range) { return range.number < target; });
  if (!only_read && target)
    me.global_clock[block->number].reductions = me.bulk_in_block[target - 1];
}

// cp.async: a thread's copies, complete for the thread at its wait.

void cp_async(uint32_t dst, const void* src, uint32_t bytes, const Site& site) {
  const Fault fault = fault_at(site, "cp.async", kDrop | kShift | kFlip);
  if (fault == kDrop) return;
  if (fault == kShift) dst += 16;
  if (fault == kFlip) bytes = bytes ? 0 : 16;
  preempt();
  if (dst % 16 || reinterpret_cast<uintptr_t>(src) % 16)
    fail("cp.async: addresses must be multiples of 16");
  if (bytes > 16) fail(format("cp.async: %u bytes of 16", bytes));
  check_range(dst, 16, "cp.async");
  if (bytes) check_global(src, bytes, "cp.async");
  check_writable(dst, 16, "cp.async");
  Granule& g = block->granules[dst / kGranule];
  g.state = State::Pending;
  g.copier = int16_t(block->current);
  g.loaded.reset();
  std::fill_n(reinterpret_cast<uint16_t*>(block->arena + dst), kGranule / 2, kPoison);
  Fiber& me = block->self();
  me.thread_copies.push_back({me.thread_copies_issued++, dst, bytes, src});
  ++report->copies;
}

void cp_async_commit(const Site& site) {
  if (fault_at(site, "cp.async commit", kDrop)) return;
  preempt();
  Fiber& me = block->self();
  me.thread_copy_groups.push_back(me.thread_copies_issued);
}

void cp_async_wait(int pending, const Site& site) {
  const Fault fault = fault_at(site, "cp.async wait", kDrop | kShift);
  if (fault == kDrop) return;
  if (fault == kShift) ++pending;
  preempt();
  Fiber& me = block->self();
  if (me.thread_copy_groups.size() <= size_t(pending)) return;
  const uint64_t target = me.thread_copy_groups[me.thread_copy_groups.size() - 1 - pending];
  for (const ThreadCopy& copy : me.thread_copies) {
    if (copy.number >= target) continue;
    std::memset(block->arena + copy.dst, 0, 16);
    std::memcpy(block->arena + copy.dst, copy.src, copy.bytes);
    block->granules[copy.dst / kGranule].state = State::Unwritten;
    note_store(copy.dst, 16);
  }
  std::erase_if(me.thread_copies, [&](auto& copy) { return copy.number < target; });
}

}  // namespace emu
