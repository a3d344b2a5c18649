// SPDX-License-Identifier: Apache-2.0
// Errors that the emulator must report. Prints "ok" or "FAIL" and the name of each expectation.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "../cuda/conformance_sm90.cuh"

namespace {

using namespace pt::ptx;

constexpr size_t kSmem = 16384;
int failures = 0;
emu::Options options;

// The launch must fail with a message that contains all the given parts; with none, it must not
// fail.
void expect(const char* name, std::vector<const char*> parts, int threads,
            const std::function<void()>& kernel, dim3 grid = {}) {
  const auto error = emu::launch(grid, {unsigned(threads)}, kSmem, kernel, options).error;
  bool good = parts.empty() == error.empty();
  for (const char* part : parts) good &= error.find(part) != std::string::npos;
  failures += !good;
  std::printf("%s %s%s%s\n", good ? "ok  " : "FAIL", name, good ? "" : ": got ",
              good            ? ""
              : error.empty() ? "no error"
                              : error.c_str());
}

uint32_t shared() { return dynamic_smem(); }

uint32_t barrier(uint32_t count, bool fence = true) {
  if (threadIdx.x == 0) {
    mbarrier_init(shared(), count);
    mbarrier_name(shared(), "ready", 3);
    if (fence) fence_mbarrier_init();
  }
  syncthreads();
  return shared();
}

void deadlocks() {
  expect("a deadlock names waiters and what is missing",
         {"deadlock", "threads 0-31 wait", "'ready[3]'", "1 of 2"}, 64, [] {
           const uint32_t bar = barrier(2);
           if (threadIdx.x == 40) mbarrier_arrive(bar);
           if (threadIdx.x < 32) mbarrier_try_wait(bar, 0);
         });
  expect("a flipped phase waits for ever", {"deadlock", "'ready[3]', parity 1"}, 64, [] {
    const uint32_t bar = barrier(1);
    if (threadIdx.x == 40)
      mbarrier_arrive(bar), mbarrier_try_wait(bar, 0), mbarrier_try_wait(bar, 1);
  });
  expect("a named barrier with too few threads", {"deadlock", "barrier 5 (32 of 64"}, 64, [] {
    if (threadIdx.x < 32) bar_sync(5, 64);
  });
  expect("a named barrier with two counts", {"barrier 5 is used with"}, 64,
         [] { bar_sync(5, threadIdx.x < 32 ? 64 : 32); });
  expect("a barrier that one warp skips", {"deadlock", "barrier 0 (32 of 64"}, 64, [] {
    if (threadIdx.x < 32) syncthreads();
  });
  expect("a shuffle in divergent code", {"deadlock", "other lanes of warp 0"}, 32, [] {
    if (threadIdx.x < 16) shfl_xor(1.0f, 1);
  });
  expect("more arrivals than the count", {"'ready[3]'", "more arrivals"}, 64,
         [] { mbarrier_arrive_expect_tx(barrier(1), 16); });
}

void shared_memory() {
  expect("shared memory that nobody wrote", {"ld.shared", "never written"}, 32,
         [] { ld_shared_u32(shared()); });
  expect("a store past the end of shared memory", {"st.shared", "is outside"}, 32,
         [] { st_shared_u32(shared() + kSmem, 0); });
  expect("a load before its begin", {"ld.shared", "is outside"}, 32,
         [] { ld_shared_u32(shared() - 4); });
  expect("a misaligned store", {"st.shared", "is not a multiple of 16"}, 32,
         [] { st_shared_v4_f32(shared() + 4, 0, 0, 0, 0); });
  expect("an mbarrier overwritten", {"overwrites an mbarrier"}, 32,
         [] { st_shared_u32(barrier(1), 0); });
  // A shuffle makes lanes meet, but orders no memory accesses.
  expect("a load not ordered after a store", {"not ordered after the store by thread 0"}, 32, [] {
    if (threadIdx.x == 0) st_shared_u32(shared(), 0);
    shfl_xor(1.0f, 1);
    if (threadIdx.x == 1) ld_shared_u32(shared());
  });
  expect("a store not ordered after a load", {"not ordered after the load by thread 1"}, 32, [] {
    if (threadIdx.x == 0) st_shared_u32(shared(), 0);
    syncwarp();
    if (threadIdx.x == 1) ld_shared_u32(shared());
    shfl_xor(1.0f, 1);
    if (threadIdx.x == 0) st_shared_u32(shared(), 0);
  });
  expect("the same with a barrier between", {}, 32, [] {
    if (threadIdx.x == 0) st_shared_u32(shared(), 0);
    syncwarp();
    if (threadIdx.x == 1) ld_shared_u32(shared());
    syncwarp();
    if (threadIdx.x == 0) st_shared_u32(shared(), 0);
  });
  expect("ldmatrix of a row that is not aligned", {"ldmatrix", "not aligned"}, 32, [] {
    uint32_t m[4];
    ldmatrix_x4(shared() + 8, m);
  });
}

void global_memory() {
  static uint32_t words[8];
  const emu::GlobalMemory memory(words, sizeof words, "words");
  expect("a load past the end of a tensor",
         {"block (1,0,0): thread", "ld.global of 4 bytes", "4 bytes past the end of 'words' of 32"},
         32, [] { ld_global_u32(words + (blockIdx.x == 1 && threadIdx.x == 9 ? 8 : 0)); },
         {2, 1, 1});
  expect("a store before the begin of a tensor",
         {"thread 0: st.global", "2 bytes before the begin of 'words'"}, 32, [] {
           if (threadIdx.x == 0) st_global_u16(reinterpret_cast<uint16_t*>(words) - 1, 0);
         });
  expect("a vector that is not aligned", {"st.global", "not a multiple of 16"}, 32,
         [] { st_global_v4(words + 1, {}); });
  expect("memory that no longer is there", {"outside global memory"}, 32,
         [] { ld_global_u32(&failures); });
}

void copies() {
  alignas(16) static uint32_t words[64];
  const emu::GlobalMemory memory(words, sizeof words, "words");
  const auto copy = [](bool wait, bool meet) {
    if (threadIdx.x == 0) {
      cp_async_16(shared(), words, 16);
      cp_async_commit();
      if (wait) cp_async_wait<0>();
    }
    if (meet) syncthreads();
    else shfl_xor(1.0f, 1);
    ld_shared_u32(shared());
    syncthreads();
    cp_async_wait<0>();
  };
  expect("cp.async read by its thread before the wait",
         {"thread 0: ld.shared", "before thread 0 has waited for its cp.async"}, 32, [] {
           if (threadIdx.x == 0)
             cp_async_16(shared(), words, 16), cp_async_commit(), ld_shared_u32(shared()),
                 cp_async_wait<0>();
         });
  expect("cp.async without a wait", {"before thread 0 has waited for its cp.async"}, 32,
         [&] { copy(false, true); });
  expect("cp.async without a barrier", {"thread"}, 32, [&] { copy(true, false); });
  expect("cp.async with both", {}, 32, [&] { copy(true, true); });
  expect("cp.async that outlives its block", {"ended without waiting for its last cp.async"}, 32,
         [] {
           if (threadIdx.x == 7) cp_async_16(shared(), words, 16), cp_async_commit();
         });
  expect("cp.async past the end of a tensor", {"cp.async", "past the end of 'words'"}, 32,
         [] { cp_async_16(shared(), words + 64, 16); });
  expect("cp.async waited for in the wrong group", {"before thread 0 has waited"}, 32, [] {
    if (threadIdx.x) return;
    cp_async_16(shared(), words, 16), cp_async_commit();
    cp_async_wait<1>();
    ld_shared_u32(shared());
  });
  expect("an mbarrier not shown to the async proxy", {"'ready[3]' was not made visible"}, 32, [] {
    const uint32_t bar = barrier(1, false);
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(bar, 64), bulk_load(bar + 16, words, 64, bar);
  });
  expect("a copy read without waiting for its mbarrier", {"'ready[3]'"}, 32, [] {
    const uint32_t bar = barrier(1);
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(bar, 64), bulk_load(bar + 16, words, 64, bar);
    syncwarp();
    if (threadIdx.x == 1) ld_shared_u32(bar + 16);
    mbarrier_try_wait(bar, 0);
  });
  expect("fewer bytes than expected", {"deadlock", "64 bytes are missing"}, 32, [] {
    const uint32_t bar = barrier(1);
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(bar, 128), bulk_load(bar + 16, words, 64, bar);
    mbarrier_try_wait(bar, 0);
  });
}

void async_proxy() {
  alignas(16) static float out[4096];
  const emu::GlobalMemory memory(out, sizeof out, "out");
  expect("wgmma without fence.proxy.async", {"wgmma", "without a later fence.proxy.async"}, 128,
         [] { conformance::accumulators<false, true>(true, out); });
  // The schedule selects one of two messages: never written, or not ordered after the store.
  expect("wgmma without the barrier after the fence", {"wgmma"}, 128,
         [] { conformance::accumulators<true, false>(true, out); });
  const auto product = [](bool fence, bool wait, uint32_t shift, SmemLayout layout) {
    const uint32_t tile = pt::cuda::align_to_atom(shared());
    for (int i = threadIdx.x; i < 2048; i += 128) st_shared_u32(tile + 4 * i, 0);
    fence_proxy_async();
    syncthreads();
    float d[32];
    if (fence) wgmma_fence();
    wgmma_ss<bf16, 64, false>(d, smem_descriptor(tile + shift, 16, 1024, layout),
                              smem_descriptor(tile, 16, 1024, layout), false);
    wgmma_commit();
    if (wait) wgmma_wait<0>();
    out[threadIdx.x] = d[0] + 1.0f;
    d[0] = out[threadIdx.x];
    if (!wait) wgmma_wait<0>();
  };
  expect("a product as it should be", {}, 128,
         [&] { product(true, true, 0, SmemLayout::Swizzle128); });
  expect("wgmma without wgmma.fence", {"without a wgmma.fence"}, 128,
         [&] { product(false, true, 0, SmemLayout::Swizzle128); });
  expect("an accumulator touched before the wait", {"accumulator register 0 was touched"}, 128,
         [&] { product(true, false, 0, SmemLayout::Swizzle128); });
  expect("a tile that begins off its swizzle pattern",
         {"descriptor start", "not aligned to the swizzle pattern"}, 128,
         [&] { product(true, true, 256, SmemLayout::Swizzle128); });
  const auto refill = [](bool load,
                         bool fence) {  // thread 32 loads, or stores, what a copy then overwrites
    const uint32_t bar = barrier(1), at = bar + 16;
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(bar, 64), bulk_load(at, out, 64, bar);
    mbarrier_try_wait(bar, 0);
    if (threadIdx.x == 32) {
      if (load) ld_shared_u32(at);
      else st_shared_v4_f32(at, 0, 0, 0, 0);
      if (fence) fence_proxy_async();
    }
    syncthreads();
    if (threadIdx.x == 0) mbarrier_arrive_expect_tx(bar, 64), bulk_load(at, out, 64, bar);
    mbarrier_try_wait(bar, 1);
  };
  expect("a copy over what was loaded",
         {"bulk load", "thread 32 loaded without a later fence.proxy.async"}, 64,
         [&] { refill(true, false); });
  expect("a copy over what was stored",
         {"bulk load", "thread 32 stored to without a later fence.proxy.async"}, 64,
         [&] { refill(false, false); });
  expect("a copy over what was loaded and fenced", {}, 64, [&] { refill(true, true); });
  expect("a copy over what was stored and fenced", {}, 64, [&] { refill(false, true); });
  const auto add = [](bool fence, bool wait, bool again) {
    const uint32_t at = shared();
    if (threadIdx.x != 0) return;
    st_shared_v4_f32(at, 0, 0, 0, 0);
    if (fence) fence_proxy_async();
    bulk_reduce_add_f32(out, at, 16);
    bulk_commit();
    if (wait) bulk_wait_read<0>();
    if (again) st_shared_v4_f32(at, 0, 0, 0, 0);
  };
  expect("a bulk reduction without a fence",
         {"bulk reduction", "without a later fence.proxy.async"}, 32,
         [&] { add(false, true, false); });
  expect("the source of a bulk reduction reused", {"not ordered after a bulk operation"}, 32,
         [&] { add(true, false, true); });
  expect("a bulk reduction not waited for", {"thread 0 ended without waiting"}, 32,
         [&] { add(true, false, false); });
  expect("a bulk store not waited for", {"thread 0 ended without waiting"}, 32, [&] {
    if (threadIdx.x == 0)
      st_shared_v4_f32(shared(), 0, 0, 0, 0), fence_proxy_async(), bulk_store(out, shared(), 16),
          bulk_commit();
  });
  options.ordered_reductions = true;
  expect("reductions by several blocks in no order", {"not ordered after one to the same place"},
         32, [&] { add(true, true, false); }, {3, 1, 1});
  options.ordered_reductions = false;
}

void blocks() {
  static uint32_t counter = 0;
  const emu::GlobalMemory memory(&counter, 4, "counter");
  expect("spinning for ever", {"deadlock", "a global counter to become 1 (it is 0)"}, 32,
         [] { acquire_equal_u32(&counter, 1); });
  alignas(8) static uint32_t words[2];
  const emu::GlobalMemory words_memory(words, sizeof words, "words");
  // Thread 0 of a block stores a word, and after that thread `reader` of another loads it.
  const auto hand_over = [](bool publish, bool acquire, bool sync, unsigned reader) {
    if (blockIdx.x == 0) {
      if (threadIdx.x > 0) return;
      st_global_u32(words, 1);
      if (publish) release_add_u32(&counter, 1);
      else atomic_add_u32(&counter, 1);
      return;
    }
    if (threadIdx.x == 0 && acquire) acquire_equal_u32(&counter, 1);
    else if (threadIdx.x == 0)
      while (atomic_add_u32(&counter, 0) == 0) continue;
    if (sync) syncwarp();
    else shfl_xor(1.0f, 1);
    if (threadIdx.x == reader) ld_global_u32(words);
  };
  const auto expect_order = [&](const char* name, std::vector<const char*> parts, auto... how) {
    counter = 0;
    expect(name, parts, 32, [&] { hand_over(how...); }, {2, 1, 1});
  };
  const char* const unordered = "not ordered after the store by thread 0 of another block";
  expect_order("another block's store, acquired", {}, true, true, false, 0u);
  expect_order("the same by another thread", {}, true, true, true, 1u);
  expect_order("the same without a barrier", {unordered}, true, true, false, 1u);
  expect_order("another block's store, not acquired", {unordered}, true, false, true, 0u);
  expect_order("another block's store, not published", {unordered}, false, true, true, 0u);
  expect("a store of the same block", {"not ordered after the store by thread 0 of the same"}, 32,
         [] {
           if (threadIdx.x == 0) st_global_u32(words, 1);
           shfl_xor(1.0f, 1);
           if (threadIdx.x == 1) ld_global_u32(words);
         });
  expect("halves of a word by two blocks", {}, 32,
         [] {
           auto* const half = reinterpret_cast<uint16_t*>(words) + blockIdx.x;
           if (threadIdx.x == 0) st_global_u16(half, 1), ld_global_u16(half);
         },
         {2, 1, 1});
  static uint64_t arrived;
  const emu::GlobalMemory arrived_memory(&arrived, 8, "arrived");
  const auto complete = [](bool order) {
    if (threadIdx.x > 0) return;
    st_global_u32(words + blockIdx.x, 1);
    const bool last = order ? acq_rel_add_u64(&arrived, 1) == 1 : atomic_add_u32(&counter, 1) == 1;
    if (last) ld_global_u64(words);
  };
  counter = 0, arrived = 0;
  expect("the last of two blocks", {}, 32, [&] { complete(true); }, {2, 1, 1});
  expect("the same without an order", {unordered}, 32, [&] { complete(false); }, {2, 1, 1});
  alignas(128) static uint16_t small[64 * 32];
  const emu::GlobalMemory small_memory(small, sizeof small, "small");
  TensorMap map;  // claims twice the memory there is
  map.base = reinterpret_cast<const uint8_t*>(small), map.elem_bytes = 2, map.rank = 2,
  map.swizzle = emu::Swizzle::B128;
  map.dim[0] = map.dim[1] = 64, map.stride[0] = 2, map.stride[1] = 128,
  map.box[0] = map.box[1] = 64;
  expect("a tensor map beyond its memory", {"TMA load", "outside global memory"}, 32, [&] {
    const uint32_t tile = pt::cuda::align_to_atom(shared()) + 1024;
    if (threadIdx.x == 0) {
      mbarrier_init(tile - 8, 1);
      fence_mbarrier_init();
      tma_load_2d(tile, map, tile - 8, 0, 0);
    }
  });
  expect("more threads than a block may have", {"unsupported block size"}, 2048, [] {});
  expect("no blocks", {"unsupported grid of 0 x 1 x 1"}, 32, [] {}, {0, 1, 1});
}

}  // namespace

int main(int argc, char** argv) {
  options.seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  deadlocks();
  shared_memory();
  global_memory();
  copies();
  async_proxy();
  blocks();
  return failures != 0;
}
