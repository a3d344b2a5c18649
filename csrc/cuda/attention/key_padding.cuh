// SPDX-License-Identifier: Apache-2.0
// Key padding, a boolean mask that is equal for all queries and heads, as a bitmap and bounds. See
// KeyPadding in problem.h.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/fragments.cuh"

namespace pt::cuda {

// Pack one mask with one block: a thread packs a word of 32 keys at a time.
PT_DEVICE void make_key_padding(const AttentionKeyPadding& f) {
  const int count = KeyPadding::words(f.num_keys, f.before);
  const uint8_t* const mask = static_cast<const uint8_t*>(f.mask.data) + blockIdx.x * f.mask.batch;
  uint32_t* const bits = f.bits + int64_t(blockIdx.x) * (KeyPadding::kHead + count);
  int first = f.num_keys, end = 0, visible = 0;
  for (int w = int(threadIdx.x); w < count; w += kMaskThreads) {
    uint8_t bytes[32];
    uint32_t word = 0;
    PT_UNROLL
    for (int i = 0; i < 32; ++i) {  // separate from their use, so all loads are in flight at once
      const int key = 32 * w + i - f.before;
      bytes[i] = key >= 0 && key < f.num_keys ? ptx::ld_global_u8(mask + key * f.mask.key) : 0;
    }
    PT_UNROLL
    for (int i = 0; i < 32; ++i) {
      if (!bytes[i]) continue;
      const int key = 32 * w + i - f.before;
      word |= 1u << i;
      first = min(first, key), end = key + 1, ++visible;
    }
    ptx::st_global_u32(bits + KeyPadding::kHead + w, word);
  }
  const auto take = [&](int theirs_first, int theirs_end, int theirs_visible) {
    first = min(first, theirs_first), end = max(end, theirs_end), visible += theirs_visible;
  };
  const auto across = [](int x, int d) { return int(ptx::shfl_xor_u32(uint32_t(x), d)); };
  for (int d = 1; d < 32; d *= 2) take(across(first, d), across(end, d), across(visible, d));

  const uint32_t found = ptx::dynamic_smem();  // 16 bytes per warp
  const auto word_of = [&](int warp, int i) { return found + warp * 16 + i * 4; };
  const int own = int(threadIdx.x) / 32;
  if (lane_id() == 0) {
    ptx::st_shared_u32(word_of(own, 0), uint32_t(first));
    ptx::st_shared_u32(word_of(own, 1), uint32_t(end));
    ptx::st_shared_u32(word_of(own, 2), uint32_t(visible));
  }
  ptx::syncthreads();
  if (threadIdx.x != 0) return;
  const auto of_warp = [&](int warp, int i) { return int(ptx::ld_shared_u32(word_of(warp, i))); };
  for (int warp = 1; warp < kMaskThreads / 32; ++warp)
    take(of_warp(warp, 0), of_warp(warp, 1), of_warp(warp, 2));
  const int padding_gaps = max(end - first, 0) - visible;
  ptx::st_global_v4(bits, {{uint32_t(first), uint32_t(end), uint32_t(padding_gaps), 0}});
}

}  // namespace pt::cuda
