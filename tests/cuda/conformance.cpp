// SPDX-License-Identifier: Apache-2.0
// conformance SEED: runs the kernels of conformance.cuh and conformance_sm90.cuh on random inputs
// and prints a line for each: its name and the words it wrote. Built for the emulator by
// csrc/emulator/build.py, and for a GPU by nvcc -x cu.
#include "conformance_sm90.cuh"

#include "cuda/tensor_map.cuh"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

using namespace pt;

uint64_t state = 1;

uint64_t random_bits() {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

[[noreturn]] void die(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::exit(1);
}

std::vector<uint32_t> random_words(size_t n) {
  std::vector<uint32_t> words(n);
  for (auto& w : words) w = uint32_t(random_bits());
  return words;
}

// Floats over all exponents, zeros, infinities, NaNs and subnormal numbers among them.
std::vector<uint32_t> random_floats(size_t n) {
  const uint32_t special[] = {0, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u,
                              1, 0x807fffffu, 0x3f800000u, 0x477fe000u, 0x477ff000u};
  auto words = random_words(n);
  for (auto& w : words)
    if (random_bits() % 8 == 0) w = special[random_bits() % 10];
  return words;
}

// Pairs of 16-bit floats that are small integers.
std::vector<uint32_t> random_pairs(size_t n, bool f16) {
  std::vector<uint32_t> words(n);
  const auto one = [&] {
    const float x = float(int(random_bits() % 9) - 4);
    uint32_t u;
    std::memcpy(&u, &x, 4);
    const uint32_t half =
        x == 0 ? 0 : (u >> 16 & 0x8000) | (((u >> 13 & 0x3ffff) - (112 << 10)) & 0x7fff);
    return f16 ? half : u >> 16;
  };
  for (auto& w : words) w = one() | one() << 16;
  return words;
}

// Device memory.
class Buffer {
 public:
  explicit Buffer(std::vector<uint32_t> words) : words_(std::move(words)) {
#if defined(PT_EMULATE)
    memory_ = std::aligned_alloc(256, (words_.size() * 4 + 255) / 256 * 256);
    std::memcpy(memory_, words_.data(), words_.size() * 4);
    registered_ = std::make_unique<emu::GlobalMemory>(memory_, words_.size() * 4, "buffer");
#else
    if (cudaMalloc(&memory_, words_.size() * 4) != cudaSuccess) die("no device memory");
    cudaMemcpy(memory_, words_.data(), words_.size() * 4, cudaMemcpyHostToDevice);
#endif
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() {
#if defined(PT_EMULATE)
    std::free(memory_);
#else
    cudaFree(memory_);
#endif
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_);
  }
  void print(const char* name) {
#if defined(PT_EMULATE)
    std::memcpy(words_.data(), memory_, words_.size() * 4);
#else
    if (cudaMemcpy(words_.data(), memory_, words_.size() * 4, cudaMemcpyDeviceToHost) !=
        cudaSuccess)
      die(std::string(name) + " failed");
#endif
    std::printf("%s", name);
    for (uint32_t w : words_) std::printf(" %x", w);
    std::printf("\n");
  }

 private:
  std::vector<uint32_t> words_;
  void* memory_ = nullptr;
#if defined(PT_EMULATE)
  std::unique_ptr<emu::GlobalMemory> registered_;
#endif
};

Buffer zeros(size_t n) { return Buffer(std::vector<uint32_t>(n, 0)); }

template <class... P, class... A>
void run(void (*kernel)(P...), int blocks, int threads, size_t smem, const A&... arguments) {
#if defined(PT_EMULATE)
  emu::Options options;
  options.seed = random_bits();
  const auto report = emu::launch(
      {unsigned(blocks)}, {unsigned(threads)}, smem, [&] { kernel(arguments...); }, options);
  if (!report.error.empty()) die(report.error);
#else
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(smem));
  random_bits();
  const std::tuple<P...> converted(arguments...);  // what the kernel takes, and a pointer to each
  std::apply(
      [&](const P&... a) {
        void* pointers[] = {const_cast<void*>(static_cast<const void*>(&a))...};
        if (cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(blocks), dim3(threads),
                             pointers, smem, nullptr) != cudaSuccess)
          die("a kernel could not be launched");
      },
      converted);
  cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) die(cudaGetErrorString(error));
#endif
}

#if defined(PT_EMULATE) || defined(PT_HOPPER)
// A contiguous tensor, innermost dimension first; boxes of `columns` by `rows`.
ptx::TensorMap tensor_map(const void* base, std::initializer_list<uint64_t> dim, uint32_t rows,
                          bool f16 = false, uint32_t columns = 64) {
  cuda::MappedTensor t{base, f16 ? pt::DType::f16 : pt::DType::bf16, 0, {}, {}};
  uint64_t stride = 1;
  for (const uint64_t d : dim) t.dim[t.rank] = d, t.stride[t.rank++] = stride, stride *= d;
  return cuda::tensor_map(t, rows, columns);
}

// "wgmma_rs_n128_tb_p8192_f16" and the like.
std::string name_of(const cuda::ProductShape& s, bool f16) {
  return "wgmma_" + std::string(s.a_in_registers ? "rs" : "ss") + "_n" + std::to_string(s.n) +
         (s.trans_a ? "_ta" : "") + (s.trans_b ? "_tb" : "") +
         (s.panel_bytes ? "_p" + std::to_string(s.panel_bytes) : "") + (f16 ? "_f16" : "");
}

template <class T, size_t Index>
void multiply() {
  constexpr bool f16 = std::is_same_v<T, ptx::f16>;
  constexpr cuda::ProductShape kShape = cuda::kProductShapes[Index];
  constexpr uint32_t n = kShape.n, depth = kShape.depth();
  const std::string name = name_of(kShape, f16);
  Buffer a(random_pairs(64 * depth / 2, f16)), b(random_pairs(n * depth / 2, f16));
  a.print(("a:" + name).c_str()), b.print(("b:" + name).c_str());
  Buffer out = zeros(64 * n);
  const auto map_a = tensor_map(a.as<void>(), {64, 64}, 64, f16);  // in shared memory only
  const auto map_b = tensor_map(b.as<void>(), {kShape.trans_b ? n : 64, kShape.trans_b ? depth : n},
                                kShape.trans_b ? depth : n, f16);
  run(conformance::multiply<T, Index>, 1, 128, 1024 + 64 * 128 + n * depth * 2 + 8, map_a, map_b,
      a.as<const uint16_t>(), out.as<float>());
  out.print(name.c_str());
}

// Each in both types.
template <size_t... I>
void multiply_all(std::index_sequence<I...>) {
  (multiply<ptx::bf16, I>(), ...);
  (multiply<ptx::f16, I>(), ...);
}

// Run the steps of kernels between the copy of a tile and its product.
void tiles() {
  constexpr size_t kColumns = conformance::kSteps * 64;
  Buffer a(random_pairs(64 * kColumns / 2, false)), b(random_pairs(64 * kColumns / 2, false));
  a.print("a:steps"), b.print("b:steps");
  const auto map_a = tensor_map(a.as<void>(), {kColumns, 64}, 64),
             map_b = tensor_map(b.as<void>(), {kColumns, 64}, 64);
  constexpr size_t kSmem =
      1024 + conformance::StepRing::kBufferBytes + conformance::StepRing::kBarrierBytes;
  Buffer sums = zeros(64 * 64), read = zeros(conformance::kSteps * 4 * 128 * 4),
         cleared = zeros(64 * 64);
  run(conformance::multiply_steps, 1, 256, kSmem, map_a, map_b, sums.as<float>());
  sums.print("multiply_steps");
  run(conformance::read_steps, 1, 256, kSmem, map_a, map_b, read.as<uint32_t>());
  read.print("read_steps");
  run(conformance::multiply_cleared, 1, 128, 1024 + 2 * 64 * 128 + 8, map_a, map_b,
      cleared.as<float>());
  cleared.print("multiply_cleared");
}

void hopper() {
  {
    Buffer in(random_pairs(40 * 36, false));
    in.print("in:tma");
    const auto map2 = tensor_map(in.as<void>(), {72, 40}, 24),
               map3 = tensor_map(in.as<void>(), {72, 10, 4}, 8);
    const auto map4 = tensor_map(in.as<void>(), {72, 10, 2, 2}, 8);
    const int corners[][2] = {{0, 0}, {64, 0}, {0, 24}, {8, 30}, {-8, -3}, {128, 8}};
    for (auto [x, y] : corners) {
      Buffer out = zeros(24 * 32);
      run(conformance::load_box<2>, 1, 128, 1024 + 24 * 128 + 8, map2, 24 * 128, x, y, 0, 0,
          out.as<uint32_t>());
      out.print(("tma_2d(" + std::to_string(x) + "," + std::to_string(y) + ")").c_str());
    }
    Buffer out3 = zeros(8 * 32), out4 = zeros(8 * 32);
    run(conformance::load_box<3>, 1, 128, 1024 + 8 * 128 + 8, map3, 8 * 128, 8, 5, 2, 0,
        out3.as<uint32_t>());
    out3.print("tma_3d");
    run(conformance::load_box<4>, 1, 128, 1024 + 8 * 128 + 8, map4, 8 * 128, 8, -3, 1, 1,
        out4.as<uint32_t>());
    out4.print("tma_4d");
    // Narrow boxes are not swizzled, and start at any multiple of an element.
    const auto narrow = tensor_map(in.as<void>(), {72, 40}, 24, false, 8);
    Buffer out = zeros(24 * 4);
    run(conformance::load_box<2>, 1, 128, 1024 + 24 * 16 + 8, narrow, 24 * 16, 68, 20, 0, 0,
        out.as<uint32_t>());
    out.print("tma_narrow");
  }
  multiply_all(std::make_index_sequence<cuda::kNumProductShapes>());
  tiles();
  for (const bool rows : {false, true}) {
    Buffer out = zeros(128 * 32);
    run(conformance::accumulators<true, true>, 1, 128, 1024 + 4096, rows, out.as<float>());
    out.print(rows ? "wgmma_rows" : "wgmma_columns");
  }
  {
    std::vector<uint32_t> fields{0x400, 16, 1024, 1, 0x20010, 8192, 1024, 1, 0x3fff0, 128, 256, 0};
    fields.resize(128);
    const Buffer in(fields);
    Buffer out = zeros(64);
    run(conformance::descriptors, 1, 32, 0, in.as<const uint32_t>(), out.as<uint32_t>());
    out.print("descriptors");
  }
  {
    Buffer a(random_words(64 * 32)), out = zeros(64 * 32);
    a.print("in:stmatrix");
    run(conformance::store_matrices, 1, 128, 1024 + 8192, a.as<const uint16_t>(),
        out.as<uint32_t>());
    out.print("stmatrix");
  }
  {
    std::vector<uint32_t> values(256);
    for (size_t i = 0; i < 256; ++i) {
      const float x = float(random_bits() % 97);
      std::memcpy(&values[i], &x, 4);
    }
    Buffer in(values), out = zeros(768);
    in.print("in:reductions");
    run(conformance::add_up, 20, 128, 1024 + 3072 + 8, in.as<const float>(), out.as<float>());
    out.print("reductions");
  }
  {
    const Buffer turns = zeros(2);
    Buffer out = zeros(4);
    run(conformance::take_turns, 14, 128, 1024 + 16, turns.as<uint32_t>(), out.as<float>());
    out.print("tickets");
  }
  {
    Buffer in(random_words(6)), out = zeros(6);
    in.print("in:mbarrier");
    run(conformance::hand_over, 1, 64, 64, in.as<const uint32_t>(), out.as<uint32_t>());
    out.print("mbarrier");
  }
  {
    Buffer out = zeros(384);
    run(conformance::registers, 1, 384, 0, out.as<uint32_t>());
    out.print("setmaxnreg");
  }
}
#endif

}  // namespace

int main(int argc, char** argv) {
  state = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);  // what it had done is told even if it hangs
  const auto simple = [](const char* name, void (*kernel)(const uint32_t*, uint32_t*), int threads,
                         size_t smem, Buffer in, size_t words) {
    in.print((std::string("in:") + name).c_str());
    Buffer out = zeros(words);
    run(kernel, 1, threads, smem, in.as<const uint32_t>(), out.as<uint32_t>());
    out.print(name);
  };
  simple("arithmetic", conformance::arithmetic, 256, 0, Buffer(random_floats(768)), 10 * 256);
  simple("memory", conformance::memory, 128, 3584, Buffer(random_words(512)), 2432);
  simple("meetings", conformance::meetings, 64, 256, Buffer(random_words(64)), 512);
  simple("cp_async", conformance::async_copies, 128, 4096, Buffer(random_words(1024)), 1024);
  simple("ldmatrix", conformance::load_matrices, 32, 512, Buffer(random_words(128)), 256);
  {
    Buffer in(random_words(256)), out = zeros(768);
    in.print("in:approximate");
    run(conformance::approximate, 1, 256, 0, in.as<const uint32_t>(), out.as<float>());
    out.print("approximate");
  }
  for (const bool f16 : {false, true}) {
    Buffer a(random_pairs(128, f16)), b(random_pairs(64, f16));
    std::vector<uint32_t> c(128);
    for (auto& w : c) {
      const float x = float(random_bits() % 64);
      std::memcpy(&w, &x, 4);
    }
    Buffer rc(c), d = zeros(128);
    a.print(f16 ? "a:mma_f16" : "a:mma_bf16"), b.print(f16 ? "b:mma_f16" : "b:mma_bf16"),
        rc.print(f16 ? "c:mma_f16" : "c:mma_bf16");
    run(f16 ? conformance::product<ptx::f16> : conformance::product<ptx::bf16>, 1, 32, 0,
        a.as<const uint32_t>(), b.as<const uint32_t>(), rc.as<const float>(), d.as<float>());
    d.print(f16 ? "mma_f16" : "mma_bf16");
  }
  {
    Buffer out = zeros(4);
    run(conformance::count, 50, 64, 0, out.as<uint32_t>());
    out.print("atomics");
  }
  {
    // A word with any content, the same call again with another number of blocks, and the next
    // call.
    const Buffer word(random_words(2));
    const uint64_t first = random_bits();
    for (const auto [call, blocks] :
         {std::pair(first, 20), {first, 7}, {first, 64}, {first + 65, 9}}) {
      Buffer parts(random_words(4 * 64)), out = zeros(4);
      run(conformance::complete, blocks, 64, 16, word.as<uint64_t>(), call, parts.as<uint32_t>(),
          out.as<uint32_t>());
      out.print(("last_block_of_" + std::to_string(blocks)).c_str());
    }
  }
#if defined(PT_EMULATE) || defined(PT_HOPPER)
  hopper();
#endif
  return 0;
}
