// SPDX-License-Identifier: Apache-2.0
// States of the blocks of a dense boolean mask, and lists of its non-empty blocks, which kernels
// use like those of a block mask.
//
// The first pass reads the mask with its strides, a broadcast dimension once: one thread block
// reports if none, some or all of kListedBlock x kListedBlock pairs are visible. The second pass,
// on 1/16384 of the data, writes lists. Both use the mask alone; lengths and causality bound the
// lists later, as they bound ranges of tiles.
#pragma once

#include "cuda/attention/key_padding.cuh"
#include "cuda/attention/pair_bits.cuh"

namespace pt::cuda {

struct Visible {
  bool some = false, all = true;
  PT_DEVICE void take(bool theirs_some, bool theirs_all) { some |= theirs_some, all &= theirs_all; }
  PT_DEVICE void take(uint8_t pair) { take(pair != 0, pair != 0); }
  // all: no byte is zero
  PT_DEVICE void take(uint32_t four) {
    take(four != 0, ((four - 0x01010101u) & ~four & 0x80808080u) == 0);
  }
};

// Reduce this thread's share of the block of pairs from (i0, j0) on: 16 aligned keys of every 32nd
// query.
PT_DEVICE Visible visible_by_sixteens(const AttentionMaskLists& f, const uint8_t* mask, int i0,
                                      int j0) {
  constexpr int kChunks = kListedBlock / 16, kRows = kMaskThreads / kChunks;
  Visible found;
  const int x = int(threadIdx.x), j = j0 + 16 * (x % kChunks);
  if (j >= f.num_keys) return found;
  const int last = min(f.num_queries - i0, kListedBlock) - 1;
  ptx::Words4 keys[kListedBlock / kRows];
  PT_UNROLL
  // Load separately from the use, so all loads are in flight at once; past the last row, load it
  // again.
  for (int n = 0; n < kListedBlock / kRows; ++n)
    keys[n] =
        ptx::ld_global_v4(mask + (i0 + min(x / kChunks + n * kRows, last)) * f.mask.query + j);
  PT_UNROLL
  for (int n = 0; n < 4 * (kListedBlock / kRows); ++n) found.take(keys[n / 4].w[n % 4]);
  return found;
}

// Like above, pair by pair: threads run along keys, or along queries if these are contiguous.
PT_DEVICE Visible visible_by_pairs(const AttentionMaskLists& f, const uint8_t* mask, int i0,
                                   int j0) {
  constexpr int kAbreast = kMaskThreads / kListedBlock, kInFlight = 16;
  const bool by_queries = f.mask.query == 1 && f.mask.key != 1;
  const int across =
      by_queries ? min(f.num_queries - i0, kListedBlock) : min(f.num_keys - j0, kListedBlock);
  const int last =
      (by_queries ? min(f.num_keys - j0, kListedBlock) : min(f.num_queries - i0, kListedBlock)) - 1;
  const int64_t to_next = by_queries ? f.mask.query : f.mask.key,
                step = by_queries ? f.mask.key : f.mask.query;
  const int x = int(threadIdx.x) % kListedBlock;
  Visible found;
  if (x >= across) return found;
  const uint8_t* const first = mask + i0 * f.mask.query + j0 * f.mask.key + x * to_next;
  for (int y = int(threadIdx.x) / kListedBlock; y <= last; y += kAbreast * kInFlight) {
    uint8_t pairs[kInFlight];
    PT_UNROLL
    for (int n = 0; n < kInFlight; ++n)
      pairs[n] = ptx::ld_global_u8(first + min(y + n * kAbreast, last) * step);
    PT_UNROLL
    for (int n = 0; n < kInFlight; ++n) found.take(pairs[n]);
  }
  return found;
}

// Compute the state of block blockIdx.x of all masks.
PT_DEVICE void make_block_state(const AttentionMaskLists& f) {
  const int of_mask = f.down() * f.across(), n = int(blockIdx.x), m = n / of_mask,
            block = n % of_mask;
  const int i0 = block / f.across() * kListedBlock, j0 = block % f.across() * kListedBlock;
  const int64_t sequence = m / f.heads, head = m % f.heads;
  const uint8_t* const mask =
      static_cast<const uint8_t*>(f.mask.data) + sequence * f.mask.batch + head * f.mask.head;
  const bool wide = f.mask.vector_width == 16 && f.mask.key == 1;
  const Visible own =
      wide ? visible_by_sixteens(f, mask, i0, j0) : visible_by_pairs(f, mask, i0, j0);

  // bit 0: some are visible; bit 1: some are hidden
  uint32_t bits = uint32_t(own.some) | uint32_t(!own.all) << 1;
  PT_UNROLL
  for (int d = 1; d < 32; d *= 2) bits |= ptx::shfl_xor_u32(bits, d);
  const uint32_t found = ptx::dynamic_smem();  // one word per warp
  if (lane_id() == 0) ptx::st_shared_u32(found + int(threadIdx.x) / 32 * 4, bits);
  ptx::syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kMaskThreads / 32; ++warp) bits |= ptx::ld_shared_u32(found + warp * 4);
  ptx::st_global_u32(f.states + n, !(bits & 1) ? kNonePairs : bits & 2 ? kSomePairs : kAllPairs);
}

// Write this thread's list: its blocks in ascending order, its start and its end. It has space for
// all blocks.
PT_DEVICE void make_list(const AttentionMaskLists& f) {
  constexpr int kInFlight = 16;
  const int64_t n = int64_t(blockIdx.x) * kMaskThreads + threadIdx.x;
  if (n >= int64_t(f.masks) * f.lists()) return;
  const int list = int(n % f.lists()), room = f.room(), start = int(n * room);
  const bool transposed = f.by_keys;
  const int step = transposed ? f.across() : 1;
  const uint32_t* const states =
      f.states + n / f.lists() * f.down() * f.across() + list * (transposed ? 1 : room);
  int end = start;
  for (int first = 0; first < room; first += kInFlight) {
    uint32_t state[kInFlight];
    PT_UNROLL
    for (int i = 0; i < kInFlight; ++i)
      state[i] = first + i < room ? ptx::ld_global_u32(states + int64_t(first + i) * step)
                                  : uint32_t(kNonePairs);
    PT_UNROLL
    for (int i = 0; i < kInFlight; ++i) {
      if (state[i] == kNonePairs) continue;
      ptx::st_global_u32(f.entries + 2 * int64_t(end), uint32_t(first + i));
      ptx::st_global_u32(f.entries + 2 * int64_t(end) + 1,
                         state[i] == kAllPairs ? uint32_t(-1) : 0);
      ++end;
    }
  }
  ptx::st_global_u32(f.offsets + 2 * n, uint32_t(start));
  ptx::st_global_u32(f.offsets + 2 * n + 1, uint32_t(end));
}

// One kernel for all, because docs/design/cuda.md limits the number of kernels.
template <class K>
__global__ void __launch_bounds__(kMaskThreads)
    attention_mask_kernel(const __grid_constant__ AttentionMask f) {
  if (f.padding.mask.data) make_key_padding(f.padding);
  else if (f.bits.sequences) make_pair_bits(f.bits);
  else if (!f.lists.offsets) make_block_state(f.lists);
  else make_list(f.lists);
}

}  // namespace pt::cuda
