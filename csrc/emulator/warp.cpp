// SPDX-License-Identifier: Apache-2.0
// Warps: convergence of the lanes, and the instructions built on it.
#include "emulator/state.h"

namespace emu {

// Two slots suffice, because no lane can enter convergence n + 2 before all lanes have left n.
int meet(const LaneValues& value, bool sync) {
  preempt();
  Fiber& me = block->self();
  const int w = block->current / kWarp, lane = block->current % kWarp;
  Exchange& x = block->exchanges[w];
  const uint64_t number = me.shuffles++;
  const int slot = int(number & 1);
  x.value[slot][lane] = value;
  if (sync) release(x.clock[slot]);
  x.arrived[slot] |= 1u << lane;
  if (x.arrived[slot] == ~0u) {
    x.arrived[slot] = 0;
    x.completed = number + 1;
    wake(x.waiters);
  }
  while (x.completed <= number)
    wait_on(x.waiters, [w] { return format("the other lanes of warp %d", w); });
  return slot;
}

// Return the values of all lanes. A copy, because a later convergence may reuse the slot.
static std::array<LaneValues, kWarp> gather(const LaneValues& value) {
  const int slot = meet(value, false);
  return block->exchanges[block->current / kWarp].value[slot];
}

void syncwarp(const Site& site) {
  if (fault_at(site, "bar.warp.sync", kDrop)) return;
  const int slot = meet({}, true);
  block->self().clock.join(block->exchanges[block->current / kWarp].clock[slot]);
}

uint32_t shfl(uint32_t value, int lane, const Site& site) {
  const Fault fault = fault_at(site, "shfl", kDrop | kFlip);
  if (fault == kDrop) return value;
  if (fault == kFlip) lane ^= 1;
  const int slot = meet({value}, false);
  return block->exchanges[block->current / kWarp].value[slot][lane % kWarp][0];
}
uint32_t shfl_xor(uint32_t value, int lane_mask, const Site& site) {
  return shfl(value, (block->current % kWarp) ^ lane_mask, site);
}

void ldmatrix_x4(uint32_t row_addr, uint32_t* matrices, bool transposed, const Site& site) {
  const Fault fault = fault_at(site, "ldmatrix", kShift | kFlip);
  if (fault == kShift) row_addr += 16;
  if (row_addr % 16) fail("ldmatrix: a row is not aligned to 16 bytes");
  const auto rows = gather({row_addr});
  const int lane = block->current % kWarp;
  for (int m = 0; m < 4; ++m) {
    if (!transposed) {
      ld_shared(rows[8 * m + lane / 4][0] + lane % 4 * 4, &matrices[m], 4, {});
      continue;
    }
    matrices[m] = 0;
    // Load the word of element (2 (lane % 4) + e, lane / 4).
    for (int e = 0; e < 2; ++e) {
      uint32_t word;
      ld_shared(rows[8 * m + 2 * (lane % 4) + e][0] + lane / 8 * 4, &word, 4, {});
      matrices[m] |= (word >> (lane / 4 % 2 * 16) & 0xffff) << 16 * e;
    }
  }
  if (fault == kFlip) std::swap(matrices[1], matrices[2]);
}

void stmatrix_x4(uint32_t row_addr, const uint32_t* matrices, const Site& site) {
  const Fault fault = fault_at(site, "stmatrix", kDrop | kShift | kFlip);
  if (fault == kDrop) return;
  if (fault == kShift) row_addr += 16;
  static constexpr int kOrder[2][4] = {{0, 1, 2, 3}, {0, 2, 1, 3}};
  if (row_addr % 16) fail("stmatrix: a row is not aligned to 16 bytes");
  const auto rows = gather({row_addr});
  const int lane = block->current % kWarp;
  for (int m = 0; m < 4; ++m)
    st_shared(rows[8 * m + lane / 4][0] + lane % 4 * 4, &matrices[kOrder[fault == kFlip][m]], 4,
              {});
}

void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, bool f16, const Site& site) {
  const Fault fault = fault_at(site, "mma", kDrop | kFlip);
  if (fault == kDrop) return;
  const auto lanes = fault == kFlip ? gather({a[0], a[2], a[1], a[3], b[0], b[1]})
                                    : gather({a[0], a[1], a[2], a[3], b[0], b[1]});
  const int g = block->current % kWarp / 4, q = block->current % 4;
  const auto element = [&](int lane, int r, int half) {
    const uint16_t bits = uint16_t(lanes[lane][r] >> 16 * half);
    return f16 ? from_f16(bits) : from_bf16(bits);
  };
  for (int i = 0; i < 4; ++i) {
    const int column = 2 * q + i % 2;
    // A[row][k] is in lane 4 g + k / 2 % 4, B[k][column] in lane 4 column + k / 2 % 4.
    for (int k = 0; k < 16; ++k) {
      const int half = k / 8, pair = k / 2 % 4;
      d[i] += element(4 * g + pair, i / 2 + 2 * half, k % 2) *
              element(4 * column + pair, 4 + half, k % 2);
    }
  }
  ++report->products;
}

}  // namespace emu
