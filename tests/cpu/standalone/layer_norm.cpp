// SPDX-License-Identifier: Apache-2.0
// Layer norm's kernel layer, without torch, against double loops: test_standalone.py builds and
// runs it for this machine and for aarch64.
#include "standalone.h"

#include "cpu/layer_norm/problem.h"

namespace pt {
namespace PT_ISA {
extern const NormKernels layer_norm_kernels;
}
}  // namespace pt

namespace {

using pt::DType;

struct Case {
  const char* name;
  DType x, residual;
  int64_t rows, columns;
  bool rms, add, parameters;
  uint32_t drop_threshold;
};

struct Solution {
  Numbers h, out, mean, rstd, dx, dresidual, dweight, dbias;
};

// Take h as the kernel stored it, and compute the rest from it.
Solution solve(const Case& c, const Numbers& h, const Tensor& weight, const Tensor& bias,
               const Tensor& d_out, const Tensor& d_h,
               const std::function<double(int64_t, int64_t)>& keep, double eps) {
  const int64_t n = c.columns;
  Solution s{h, h, Numbers(c.rows), Numbers(c.rows), h, h, Numbers(n), Numbers(n)};
  for (int64_t i = 0; i < c.rows; i++) {
    const double* row = h.data() + i * n;
    double mean = 0, square = 0, mean_g = 0, mean_gx = 0;
    for (int64_t j = 0; j < n && !c.rms; j++) mean += row[j] / n;
    for (int64_t j = 0; j < n; j++) square += (row[j] - mean) * (row[j] - mean) / n;
    const double rstd = 1 / std::sqrt(square + eps);
    s.mean[i] = mean, s.rstd[i] = rstd;
    const auto w = [&](int64_t j) { return c.parameters ? weight[j] : 1; };
    for (int64_t j = 0; j < n; j++) {
      const double x = (row[j] - mean) * rstd, dy = d_out[i * n + j];
      s.out[i * n + j] = x * w(j) + (c.parameters ? bias[j] : 0);
      s.dweight[j] += dy * x, s.dbias[j] += dy;
      mean_g += c.rms ? 0 : dy * w(j) / n, mean_gx += dy * w(j) * x / n;
    }
    for (int64_t j = 0; j < n; j++) {
      const double x = (row[j] - mean) * rstd;
      const double dh =
          rstd * (d_out[i * n + j] * w(j) - mean_g - x * mean_gx) + (c.add ? d_h[i * n + j] : 0);
      s.dresidual[i * n + j] = dh, s.dx[i * n + j] = dh * keep(i, j);
    }
  }
  return s;
}

void run(const Case& c, Judge& judge) {
  Normal normal;
  const int64_t n = c.columns, all = c.rows * n;
  const DType work = work_type(c.x);
  Tensor x = normal(c.x, all, 3), residual = normal(c.residual, all), weight = normal(work, n, 1),
         bias = normal(work, n);
  Tensor d_out = normal(c.x, all), d_h = normal(c.residual, all);
  Tensor out(c.x, all), h(c.residual, all), mean(work, c.rows), rstd(work, c.rows), dx(c.x, all),
      dresidual(c.residual, all);
  Tensor dweight(work, n), dbias(work, n);

  pt::NormProblem p{};
  p.outer = 1, p.inner = c.rows, p.columns = n, p.rms = c.rms, p.eps = 1e-5,
  p.seed = 0x123456789abcdef0, p.row_start = 5;
  p.drop_threshold = c.drop_threshold, p.threads = 3;
  if (c.parameters) p.weight = weight.data(), p.bias = bias.data();
  const auto rows = [&](auto form, Tensor& t) {
    form.data = t.data(), form.outer = all, form.inner = n, form.dtype = t.dtype();
    return form;
  };
  pt::NormForward f{};
  f.x = rows(pt::Rows{}, x), f.out = rows(pt::RowsOut{}, out),
  f.mean = c.rms ? nullptr : mean.data(), f.rstd = rstd.data();
  if (c.add) f.residual = rows(pt::Rows{}, residual), f.residual_out = rows(pt::RowsOut{}, h);
  pt::PT_ISA::layer_norm_kernels.forward(p, f);
  pt::NormBackward b{};
  b.d_out = rows(pt::Rows{}, d_out), b.h = rows(pt::Rows{}, c.add ? h : x), b.mean = f.mean,
  b.rstd = f.rstd;
  b.dx = rows(pt::RowsOut{}, dx);
  if (c.add) b.d_residual_out = rows(pt::Rows{}, d_h), b.dresidual = rows(pt::RowsOut{}, dresidual);
  b.dweight = dweight.data(), b.dbias = dbias.data();
  pt::PT_ISA::layer_norm_kernels.backward(p, b);

  const auto keep = [&](int64_t i, int64_t j) {
    return dropout_scale(p.seed, c.drop_threshold, j, uint32_t(i + 5), 0, 0x80000001);
  };
  if (c.add) {
    Numbers sum(all);
    for (int64_t i = 0; i < all; i++) sum[i] = residual[i] + x[i] * keep(i / n, i % n);
    judge.output("residual_out", h, sum);
  }
  const Solution s = solve(c, c.add ? h.values : x.values, weight, bias, d_out, d_h, keep, p.eps);
  judge.output("out", out, s.out), judge.output("rstd", rstd, s.rstd);
  if (!c.rms) judge.output("mean", mean, s.mean);
  judge.gradient("dx", dx, s.dx, c.x), judge.gradient("dweight", dweight, s.dweight, c.x),
      judge.gradient("dbias", dbias, s.dbias, c.x);
  if (c.add) judge.gradient("dresidual", dresidual, s.dresidual, c.x);
}

}  // namespace

int main() {
  const Case cases[] = {
      {"layer norm, float32", DType::f32, DType::f32, 70, 203, false, false, true, 0},
      {"layer norm, float64, no parameters", DType::f64, DType::f64, 9, 67, false, false, false, 0},
      {"RMS norm, float16", DType::f16, DType::f16, 40, 130, true, false, true, 0},
      {"add, dropout and norm, bfloat16 to a float32 stream", DType::bf16, DType::f32, 50, 300,
       false, true, true, 20000},
      {"add and RMS norm, bfloat16", DType::bf16, DType::bf16, 33, 96, true, true, true, 0},
  };
  Judge judge;
  for (const Case& c : cases) judge.start(c.name), run(c, judge), judge.finish();
  return judge.exit_code();
}
