// SPDX-License-Identifier: Apache-2.0
// Shared code of the programs in this folder: tensors that kernels and double loops read, the
// random numbers of dropout according to the specification, and the comparison. No code comes from
// the kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "../thread_pool.h"
#include "common/dtype.h"

using Numbers = std::vector<double>;

// Significant bits, and the exponent of the least normal number.
struct Format {
  int bits, least;
};
inline Format format_of(pt::DType t) {
  switch (t) {
    case pt::DType::bf16: return {8, -126};
    case pt::DType::f16: return {11, -14};
    case pt::DType::f32: return {24, -126};
    default: return {53, -1022};
  }
}
inline double unit_roundoff(pt::DType t) { return std::ldexp(1, -format_of(t).bits); }
inline pt::DType work_type(pt::DType t) { return t == pt::DType::f64 ? t : pt::DType::f32; }

// Rounded to nearest, ties to even; no overflow.
inline double rounded(double x, pt::DType t) {
  if (x == 0) return x;
  const Format f = format_of(t);
  const int exponent = std::max(std::ilogb(x), f.least) - f.bits + 1;
  return std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
}

// The same numbers in the kernels' dtype and as doubles.
class Tensor {
 public:
  Tensor(pt::DType dtype, int64_t n) : values(n), dtype_(dtype), words_(n) {}
  Tensor(pt::DType dtype, Numbers x) : values(std::move(x)), dtype_(dtype), words_(values.size()) {
    for (size_t i = 0; i < values.size(); i++) write(i, values[i] = rounded(values[i], dtype));
  }
  void* data() { return words_.data(); }
  int64_t size() const { return int64_t(values.size()); }
  pt::DType dtype() const { return dtype_; }
  double operator[](int64_t i) const { return values[i]; }
  // Read back the values that a kernel wrote.
  const Numbers& read() {
    for (size_t i = 0; i < values.size(); i++) values[i] = number(i);
    return values;
  }
  Numbers values;

 private:
  void write(size_t i, double x) {
    char* at = reinterpret_cast<char*>(words_.data()) + i * pt::size_of(dtype_);
    const float f = float(x);
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    uint16_t half = uint16_t(bits >> 16);
    if (dtype_ == pt::DType::f16) {
      const double size = std::fabs(x);
      const int exponent = size < std::ldexp(1, -14) ? -15 : std::ilogb(size);
      const double unit = std::ldexp(1, std::max(exponent, -14) - 10);
      half = uint16_t(std::signbit(x) << 15 | (exponent + 15) << 10 | (int(size / unit) & 1023));
    }
    if (dtype_ == pt::DType::f64) std::memcpy(at, &x, 8);
    else if (dtype_ == pt::DType::f32) std::memcpy(at, &f, 4);
    else std::memcpy(at, &half, 2);
  }
  double number(size_t i) const {
    const char* at = reinterpret_cast<const char*>(words_.data()) + i * pt::size_of(dtype_);
    double x;
    float f;
    uint16_t half;
    if (dtype_ == pt::DType::f64) return std::memcpy(&x, at, 8), x;
    if (dtype_ == pt::DType::f32) return std::memcpy(&f, at, 4), f;
    std::memcpy(&half, at, 2);
    if (dtype_ == pt::DType::bf16) {
      const uint32_t bits = uint32_t(half) << 16;
      return std::memcpy(&f, &bits, 4), f;
    }
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return fraction ? NAN : (half >> 15 ? -INFINITY : INFINITY);
    const double size =
        exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return half >> 15 ? -size : size;
  }
  pt::DType dtype_;
  std::vector<uint64_t> words_;  // enough for any dtype
};

// Normal numbers of a dtype, the same in every run.
class Normal {
 public:
  Tensor operator()(pt::DType dtype, int64_t n, double mean = 0) {
    Numbers x(n);
    for (double& v : x) v = mean + normal_(engine_);
    return Tensor(dtype, std::move(x));
  }

 private:
  std::mt19937 engine_{11};
  std::normal_distribution<double> normal_;
};

// Return dropout's factor of column (or key) j: Philox-4x32-7 with the column's group as counter
// word 0.
inline double dropout_scale(uint64_t seed, uint32_t threshold, int64_t j, uint32_t word1,
                            uint32_t word2, uint32_t word3) {
  if (threshold == 0) return 1;
  const int64_t group = 4 * (j / 32) + j % 8 / 2, slot = 2 * (j % 32 / 8) + j % 2;
  uint32_t c[4] = {uint32_t(group), word1, word2, word3},
           k[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 7; round++) {
    const uint64_t a = uint64_t(0xD2511F53) * c[0], b = uint64_t(0xCD9E8D57) * c[2];
    const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b),
                              uint32_t(a >> 32) ^ c[3] ^ k[1], uint32_t(a)};
    std::memcpy(c, next, sizeof c);
    k[0] += 0x9E3779B9, k[1] += 0xBB67AE85;
  }
  const uint32_t bits = slot % 2 ? c[slot / 2] >> 16 : c[slot / 2] & 0xffff;
  return bits < threshold ? 0 : 65536.0 / (65536.0 - threshold);
}

// Compares tensors and prints one line per case. In the norm, an output may differ by one rounding
// of a 16-bit dtype, a gradient by two, and a float or double sum by 16 of its own; any element by
// eight times that.
class Judge {
 public:
  void start(const char* name) { name_ = name, share_ = 0, wrong_.clear(), compared_ = 0; }
  void output(const char* what, Tensor& got, const Numbers& want) {
    compare(what, got, want, got.dtype(), 1);
  }
  // Compare a gradient of a problem of this dtype. Gradients in float are sums of rounded values.
  void gradient(const char* what, Tensor& got, const Numbers& want, pt::DType dtype) {
    compare(what, got, want, dtype, 2);
  }
  void finish() {
    std::printf("%s: %s, %d tensors, %.2f of what is allowed%s\n", name_,
                wrong_.empty() ? "ok" : "WRONG:", compared_, share_, wrong_.c_str());
    failed_ |= !wrong_.empty() || compared_ == 0;
  }
  int exit_code() const { return failed_; }

 private:
  void compare(const char* what, Tensor& got, const Numbers& want, pt::DType precision,
               double roundings) {
    const Numbers& found = got.read();
    const double allowed =
        unit_roundoff(precision) * (pt::size_of(precision) == 2 ? roundings : 16);
    double error = 0, size = 0, worst = 0;
    for (size_t i = 0; i < want.size(); i++) {
      const bool same = found[i] == want[i];  // infinities
      error += same ? 0 : (found[i] - want[i]) * (found[i] - want[i]),
          size += same && std::isinf(want[i]) ? 0 : want[i] * want[i];
    }
    const double mean = std::sqrt(size / want.size());
    for (size_t i = 0; i < want.size(); i++)
      if (found[i] != want[i])
        worst = std::max(
            worst, std::fabs(found[i] - want[i]) / (8 * allowed * (std::fabs(want[i]) + mean)));
    const double share = std::max(worst, std::sqrt(error) / (allowed * std::sqrt(size)));
    compared_++;
    if (error > 0) share_ = std::max(share_, share);
    if (error > 0 && !(share <= 1)) wrong_ += std::string(" ") + what;
    if (std::isnan(error) || found.size() != want.size())
      wrong_ += std::string(" ") + what + " (not a number)";
  }
  const char* name_ = "";
  std::string wrong_;
  double share_ = 0;
  int compared_ = 0;
  bool failed_ = false;
};
