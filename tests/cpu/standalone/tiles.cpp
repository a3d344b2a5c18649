// SPDX-License-Identifier: Apache-2.0
// The micro-kernel of bfloat16 on tiles, without torch: see test_standalone.py. On a processor
// without AMX it is built with the tiles of tiles_in_software.h, whose arithmetic is compared with
// scalars first, bit by bit.
#include <sys/wait.h>
#include <unistd.h>

#include "cpu/core/gemm.h"
#include "standalone.h"

namespace pt {
namespace PT_ISA {
namespace {

using Words = std::vector<uint32_t>;

struct Random {
  std::mt19937 engine{5};
  uint32_t below(uint32_t n) { return engine() % n; }
  // A bfloat16 in the upper half, of exponents [least, least + span); now and then 0, a subnormal,
  // an infinity or a NaN.
  uint32_t extreme(uint32_t least, uint32_t span) {
    const uint32_t special[] = {0, 0x8000, 0x0001, 0x807f, 0x7f80, 0xff80, 0x7fc1, 0x0080};
    return (below(40) == 0 ? special[below(8)]
                           : below(2) << 15 | (least + below(span)) << 7 | below(128))
           << 16;
  }
  float tame() { return float(int(below(257)) - 128) / 64; }  // 0 included; a bfloat16
};

float as_float(uint32_t x) {
  float f;
  std::memcpy(&f, &x, 4);
  return f;
}
uint32_t as_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
// Subnormals count as zero of the same sign.
float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.f, x) : x; }
bool same(float a, float b) { return as_bits(a) == as_bits(b) || (std::isnan(a) && std::isnan(b)); }
uint32_t pair(float lower, float upper) { return as_bits(lower) >> 16 | as_bits(upper); }

// Compute C according to the manual; a [rows][units], b [units][columns], pairs.
void dot(int rows, int columns, int units, const Words& a, const Words& b, std::vector<float>& c) {
  const auto lower = [](uint32_t x) { return flushed(as_float(x << 16)); };
  const auto upper = [](uint32_t x) { return flushed(as_float(x & 0xffff0000)); };
  for (int m = 0; m < rows; m++)
    for (int n = 0; n < columns; n++) {
      float even = 0, odd = 0;
      for (int k = 0; k < units; k++) {
        even = flushed(std::fmaf(lower(a[m * units + k]), lower(b[k * columns + n]), even));
        odd = flushed(std::fmaf(upper(a[m * units + k]), upper(b[k * columns + n]), odd));
      }
      float& to = c[m * columns + n];
      to = flushed(flushed(to) + flushed(even + odd));
    }
}

#if defined(PT_TILES_IN_SOFTWARE)
TileConfig config_of(int rows, int columns, int units) {
  TileConfig config;
  for (int t = 0; t < 16; t++) config.rows[t] = 0, config.bytes_per_row[t] = 0;
  config.rows[0] = uint8_t(rows), config.bytes_per_row[0] = uint16_t(4 * columns);
  config.rows[1] = uint8_t(rows), config.bytes_per_row[1] = uint16_t(4 * units);
  config.rows[2] = uint8_t(units), config.bytes_per_row[2] = uint16_t(4 * columns);
  return config;
}

// One tdpbf16ps of every shape, with extreme numbers, whatever MXCSR says.
bool instructions() {
  Random random;
  int wrong = 0;
  for (int shape = 0; shape < 400; shape++) {
    const int rows = shape ? 1 + random.below(16) : 16, columns = shape ? 1 + random.below(16) : 16,
              units = shape ? 1 + random.below(16) : 16;
    Words a(rows * units), b(units * columns);
    std::vector<float> c(rows * columns);
    const bool tiny = shape % 3 == 0;  // products around the least normal number, else of any size
    const auto number = [&] { return tiny ? random.extreme(60, 6) : random.extreme(55, 140); };
    for (uint32_t& x : a) x = number() >> 16 | number();
    for (uint32_t& x : b) x = number() >> 16 | number();
    for (float& x : c)
      x = as_float(random.extreme(tiny ? 0 : 55, tiny ? 3 : 140) | random.below(1 << 16));
    std::vector<float> got = c;
    const unsigned saved = __builtin_ia32_stmxcsr(), up = saved | 0x4000;
    const TileConfig config = config_of(rows, columns, units);
    _tile_loadconfig(&config);
    _tile_loadd(0, got.data(), 4 * columns);
    _tile_loadd(1, a.data(), 4 * units);
    _tile_loadd(2, b.data(), 4 * columns);
    __builtin_ia32_ldmxcsr(up);
    _tile_dpbf16ps(0, 1, 2);
    wrong += __builtin_ia32_stmxcsr() != up;
    __builtin_ia32_ldmxcsr(saved);
    _tile_stored(0, got.data(), 4 * columns);
    dot(rows, columns, units, a, b, c);
    for (size_t i = 0; i < c.size(); i++) wrong += !same(got[i], c[i]);
  }
  std::printf("tdpbf16ps in software: %s, 400 shapes, %d numbers off\n", wrong ? "WRONG" : "ok",
              wrong);
  return wrong == 0;
}

// Return true if f ends its process; on a processor with AMX it would fault.
template <class F>
bool ends(const F& f) {
  const pid_t child = fork();
  if (child == 0) {
    if (!std::freopen("/dev/null", "w", stderr)) _exit(1);
    f();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}
bool faults() {
  alignas(64) static uint8_t memory[1024] = {};
  const auto with = [](const TileConfig& config, const auto& f) {
    return ends([&] { _tile_loadconfig(&config), f(); });
  };
  const auto multiply = [] { _tile_dpbf16ps(0, 1, 2); };
  TileConfig large, palette;
  large.rows[3] = 17, palette.palette = 2;
  TileConfig longer = config_of(16, 16, 16), narrow = config_of(16, 16, 16),
             high = config_of(16, 16, 16);
  longer.rows[2] = 15, narrow.bytes_per_row[0] = 60, high.rows[1] = 15;
  const bool found[] = {ends([] { _tile_release(), _tile_zero(0); }),
                        with(config_of(16, 16, 16), [] { _tile_loadd(3, memory, 64); }),
                        with(large, [] {}),
                        with(palette, [] {}),
                        with(longer, multiply),
                        with(narrow, multiply),
                        with(high, multiply),
                        with(config_of(16, 16, 16), [] { _tile_dpbf16ps(0, 0, 2); }),
                        !with(config_of(16, 16, 16), multiply)};
  int missed = 0;
  for (bool one : found) missed += !one;
  std::printf("faults of tiles in software: %s, %d cases, %d missed\n", missed ? "WRONG" : "ok",
              int(sizeof found), missed);
  return missed == 0;
}
#endif

// Compare the micro-kernel of `rows` x `columns` with sums in double. Inputs outside its range are
// NaN, and outputs outside it must keep their mark.
int micro_kernel(Random& random, int rows, int columns, int units, Mode mode, bool along_rows) {
  constexpr float kMark = 12345;
  const int64_t a_row = along_rows ? units + random.below(3) : 1, a_k = along_rows ? 1 : rows + 3,
                ldc = 64;
  Words a((along_rows ? rows : units) * (along_rows ? a_row : a_k) + 64, 0x7fc07fc0);
  for (int r = 0; r < rows; r++)
    for (int k = 0; k < units; k++) a[r * a_row + k * a_k] = pair(random.tame(), random.tame());
  const auto aligned = [](auto* p) {
    return p + (64 - reinterpret_cast<uintptr_t>(p) % 64) % 64 / 4;
  };
  Words b_memory(units * columns + 16);
  std::vector<float> c_memory((kRows<Bf16> + 1) * ldc + 16, kMark), alpha(kRows<Bf16>);
  uint32_t* const b = aligned(b_memory.data());
  float* const c = aligned(c_memory.data());
  for (int i = 0; i < units * columns; i++) b[i] = pair(random.tame(), random.tame());
  for (float& x : alpha) x = random.tame();
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < columns; j++) c[r * ldc + j] = mode == kStore ? NAN : random.tame();
  const std::vector<float> before(c, c + (kRows<Bf16> + 1) * ldc);
  pick<Bf16>(rows, columns, mode)(units, a.data(), a_row, a_k, b, c, ldc, alpha.data());
  int wrong = 0;
  for (int r = 0; r <= kRows<Bf16>; r++)
    for (int j = 0; j < 64; j++) {
      const float was = before[r * ldc + j], got = c[r * ldc + j];
      if (r >= rows || j >= columns) {
        wrong += got != kMark;
        continue;
      }
      double sum = mode == kStore ? 0
                   : mode == kAdd ? was
                                  : double(alpha[r]) * was,
             size = std::fabs(sum);
      for (int k = 0; k < units; k++)
        for (int half = 0; half < 2; half++) {
          const auto number = [&](uint32_t x) {
            return double(as_float(half ? x & 0xffff0000 : x << 16));
          };
          const double product = number(a[r * a_row + k * a_k]) * number(b[k * columns + j]);
          sum += product, size += std::fabs(product);
        }
      wrong += !(std::fabs(got - sum) <= std::ldexp(size, -22));
    }
  return wrong;
}

bool micro_kernels() {
  Random random;
  int wrong = 0, cases = 0;
  const WorkerState state;
  for (int rows = 1; rows <= kRows<Bf16>; rows++)
    for (int columns = 16; columns <= 64; columns += 16)
      for (int units : {1, 7, 15, 16, 17, 31, 32, 40, 64})
        for (Mode mode : {kStore, kAdd, kScaleAdd})
          for (bool along_rows : {true, false})
            wrong += micro_kernel(random, rows, columns, units, mode, along_rows), cases++;
  std::printf("micro-kernels of bfloat16: %s, %d cases, %d numbers off\n", wrong ? "WRONG" : "ok",
              cases, wrong);
  return wrong == 0;
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt

int main() {
  bool good = pt::PT_ISA::micro_kernels();
#if defined(PT_TILES_IN_SOFTWARE)
  good = pt::PT_ISA::instructions() && good;
  good = pt::PT_ISA::faults() && good;
#endif
  return good ? 0 : 1;
}
