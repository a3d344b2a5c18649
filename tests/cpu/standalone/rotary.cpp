// SPDX-License-Identifier: Apache-2.0
// The kernel layer of rotary positions and append_kv, without torch, against double loops: see
// test_standalone.py.
#include "standalone.h"

#include "cpu/rotary/problem.h"

namespace pt {
namespace PT_ISA {
extern const RotaryKernels rotary_kernels;
}
}  // namespace pt

namespace {

using pt::DType;

struct Case {
  const char* name;
  DType dtype;
  int64_t batch, heads, length, dim, turned;
  bool interleaved, norm;
};

constexpr double kEps = 1e-6, kOffset = 1;

// Return the other column of a pair, and the sign of its term in the rotated column j.
struct Partner {
  int64_t column;
  double sign;
};
Partner partner(const Case& c, int64_t j) {
  const int64_t half = c.turned / 2;
  if (c.interleaved) return {j ^ 1, j % 2 ? 1.0 : -1.0};
  return {j < half ? j + half : j - half, j < half ? -1.0 : 1.0};
}

struct Solution {
  Numbers out, rstd, dx, dweight;
};

Solution solve(const Case& c, const Tensor& x, const Tensor& weight, const Tensor& cos,
               const Tensor& sin, const Tensor& d_out) {
  const int64_t rows = c.batch * c.heads * c.length, d = c.dim;
  Solution s{Numbers(rows * d), Numbers(rows), Numbers(rows * d), Numbers(d)};
  Numbers y(d), dy(d);
  for (int64_t r = 0; r < rows; r++) {
    const int64_t at = (r / (c.heads * c.length) * c.length + r % c.length) * c.turned;
    double square = 0, mean = 0;
    for (int64_t j = 0; j < d; j++) square += x[r * d + j] * x[r * d + j] / d;
    s.rstd[r] = c.norm ? 1 / std::sqrt(square + kEps) : 1;
    const auto w = [&](int64_t j) { return c.norm ? weight[j] + kOffset : 1; };
    for (int64_t j = 0; j < d; j++)
      y[j] = x[r * d + j] * s.rstd[r] * w(j), dy[j] = j < c.turned ? 0 : d_out[r * d + j];
    for (int64_t j = 0; j < d; j++) s.out[r * d + j] = y[j];
    for (int64_t j = 0; j < c.turned; j++) {
      const Partner other = partner(c, j);
      s.out[r * d + j] = y[j] * cos[at + j] + other.sign * y[other.column] * sin[at + j];
      dy[j] += d_out[r * d + j] * cos[at + j],
          dy[other.column] += other.sign * d_out[r * d + j] * sin[at + j];
    }
    for (int64_t j = 0; j < d; j++) mean += dy[j] * w(j) * x[r * d + j] * s.rstd[r] / d;
    for (int64_t j = 0; j < d; j++) {
      const double xhat = x[r * d + j] * s.rstd[r];
      s.dx[r * d + j] = c.norm ? s.rstd[r] * (dy[j] * w(j) - xhat * mean) : dy[j],
                   s.dweight[j] += dy[j] * xhat;
    }
  }
  return s;
}

void run(const Case& c, Judge& judge) {
  Normal normal;
  const DType work = work_type(c.dtype);
  const int64_t rows = c.batch * c.heads * c.length, n = rows * c.dim,
                tables = c.batch * c.length * c.turned;
  Tensor x = normal(c.dtype, n), value = normal(c.dtype, n), weight = normal(work, c.dim),
         cos = normal(work, tables), sin = normal(work, tables), d_out = normal(c.dtype, n);
  Tensor out(c.dtype, n), rstd(work, rows), dx(c.dtype, n), dweight(work, c.dim), keys(c.dtype, n),
      values(c.dtype, n);
  const auto heads = [&](auto form, Tensor& t) {
    form.data = t.data(), form.strides = {c.heads * c.length * c.dim, c.length * c.dim, c.dim, 1},
    form.heads = c.heads;
    return form;
  };
  pt::RotaryProblem p{};
  p.batch = c.batch, p.length = c.length, p.dim = c.dim, p.turned = c.turned, p.dtype = c.dtype,
  p.interleaved = c.interleaved;
  p.eps = kEps, p.weight_offset = kOffset, p.cos = cos.data(), p.sin = sin.data(),
  p.table_batch = c.length * c.turned, p.threads = 3;
  pt::RotaryForward f{heads(pt::Heads{}, x), heads(pt::HeadsOut{}, out),
                      c.norm ? weight.data() : nullptr, rstd.data()};
  pt::PT_ISA::rotary_kernels.forward(p, f);
  pt::RotaryBackward b{
      heads(pt::Heads{}, d_out),        f.x, f.weight, rstd.data(), heads(pt::HeadsOut{}, dx),
      c.norm ? dweight.data() : nullptr};
  pt::PT_ISA::rotary_kernels.backward(p, b);
  const Solution s = solve(c, x, weight, cos, sin, d_out);
  judge.output("out", out, s.out), judge.gradient("dx", dx, s.dx, c.dtype);
  if (c.norm)
    judge.output("rstd", rstd, s.rstd), judge.gradient("dweight", dweight, s.dweight, c.dtype);

  // Append the last position first, and one that no slot receives.
  std::vector<int64_t> positions(c.batch * c.length);
  Numbers want_keys(n), want_values(n);
  for (int64_t i = 0; i < c.batch * c.length; i++) {
    const int64_t b = i / c.length, l = i % c.length,
                  to = positions[i] = l == 1 ? -1 : c.length - 1 - l;
    for (int64_t h = 0; h < c.heads && to >= 0; h++)
      for (int64_t j = 0; j < c.dim; j++) {
        const int64_t head = (b * c.heads + h) * c.length;
        want_keys[(head + to) * c.dim + j] = s.out[(head + l) * c.dim + j];
        want_values[(head + to) * c.dim + j] = value[(head + l) * c.dim + j];
      }
  }
  pt::AppendKV a{};
  a.query = f, a.query.rstd = nullptr, a.key = a.query, a.key.out = {},
  a.value = heads(pt::Heads{}, value), a.value_dim = c.dim;
  a.positions = positions.data(), a.key_cache = heads(pt::HeadsOut{}, keys),
  a.value_cache = heads(pt::HeadsOut{}, values);
  a.page_size = c.length;
  pt::PT_ISA::rotary_kernels.append(p, a);
  judge.output("key_cache", keys, want_keys), judge.output("value_cache", values, want_values);
}

}  // namespace

int main() {
  const Case cases[] = {
      {"halves, float32", DType::f32, 2, 3, 9, 64, 64, false, false},
      {"pairs, part of the columns, norm, float32", DType::f32, 2, 2, 7, 50, 22, true, true},
      {"halves, part of the columns, norm, bfloat16", DType::bf16, 1, 4, 11, 72, 36, false, true},
      {"pairs, float16", DType::f16, 1, 2, 5, 40, 40, true, false},
      {"halves, norm, float64", DType::f64, 1, 2, 6, 26, 26, false, true},
  };
  Judge judge;
  for (const Case& c : cases) judge.start(c.name), run(c, judge), judge.finish();
  return judge.exit_code();
}
