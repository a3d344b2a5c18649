// SPDX-License-Identifier: Apache-2.0
// The feed-forward network's kernel layer, without torch, against double loops: see
// test_standalone.py.
#include "standalone.h"

#include "cpu/feed_forward/problem.h"

namespace pt {
namespace PT_ISA {
extern const FeedForwardKernels feed_forward_kernels;
}
}  // namespace pt

namespace {

using pt::Activation;
using pt::DType;

struct Case {
  const char* name;
  DType dtype;
  Activation activation;
  int64_t rows, in, hidden, out;
  bool gated;
  uint32_t drop_threshold;
};

struct ValueSlope {
  double value, slope;
};

ValueSlope activate(Activation a, double x) {
  const double pi = std::acos(-1.0);
  switch (a) {
    case Activation::relu: return {x > 0 ? x : 0, x > 0 ? 1.0 : 0.0};
    case Activation::gelu: {
      const double cdf = 0.5 * std::erfc(-x / std::sqrt(2.0));
      return {x * cdf, cdf + x * std::exp(-x * x / 2) / std::sqrt(2 * pi)};
    }
    case Activation::gelu_tanh: {
      const double k = std::sqrt(2 / pi), t = std::tanh(k * (x + 0.044715 * x * x * x));
      return {0.5 * x * (1 + t),
              0.5 * (1 + t) + 0.5 * x * (1 - t * t) * k * (1 + 3 * 0.044715 * x * x)};
    }
    default: {
      const double s = 1 / (1 + std::exp(-x));
      return {x * s, s * (1 + x * (1 - s))};
    }
  }
}

// (rows, n) = x (rows, k) times weight (n, k) transposed, plus a row
Numbers linear(const Numbers& x, const Numbers& weight, const Numbers& bias, int64_t rows,
               int64_t k, int64_t n) {
  Numbers y(rows * n);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < n; j++) {
      double sum = bias.empty() ? 0 : bias[j];
      for (int64_t u = 0; u < k; u++) sum += x[i * k + u] * weight[j * k + u];
      y[i * n + j] = sum;
    }
  return y;
}
// a (rows, m) transposed times b (rows, n)
Numbers outer(const Numbers& a, const Numbers& b, int64_t rows, int64_t m, int64_t n) {
  Numbers y(m * n);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t u = 0; u < m; u++)
      for (int64_t j = 0; j < n; j++) y[u * n + j] += a[i * m + u] * b[i * n + j];
  return y;
}
// a (rows, k) times b (k, n), added to y
void add_product(const Numbers& a, const Numbers& b, int64_t rows, int64_t k, int64_t n,
                 Numbers* y) {
  for (int64_t i = 0; i < rows; i++)
    for (int64_t u = 0; u < k; u++)
      for (int64_t j = 0; j < n; j++) (*y)[i * n + j] += a[i * k + u] * b[u * n + j];
}
Numbers column_sums(const Numbers& x, int64_t rows, int64_t n) {
  Numbers y(n);
  for (int64_t i = 0; i < rows * n; i++) y[i % n] += x[i];
  return y;
}

void run(const Case& c, Judge& judge) {
  Normal normal;
  const DType work = work_type(c.dtype);
  const int64_t units = c.rows * c.hidden;
  Tensor x = normal(c.dtype, c.rows * c.in), w1 = normal(c.dtype, c.hidden * c.in),
         gate_weight = normal(c.dtype, c.hidden * c.in), w2 = normal(c.dtype, c.out * c.hidden),
         b1 = normal(work, c.hidden), b2 = normal(work, c.out),
         dy = normal(c.dtype, c.rows * c.out);
  Tensor pre(c.dtype, units), gate(c.dtype, units), y(c.dtype, c.rows * c.out), h(c.dtype, units),
      dpre(c.dtype, units), dgate(c.dtype, units), dx(c.dtype, c.rows * c.in),
      dw1(c.dtype, c.hidden * c.in), dgate_weight(c.dtype, c.hidden * c.in),
      dw2(c.dtype, c.out * c.hidden), db1(work, c.hidden), db2(work, c.out);
  pt::FeedForwardProblem p{};
  p.dtype = c.dtype, p.rows = c.rows, p.in = c.in, p.hidden = c.hidden, p.out = c.out,
  p.activation = c.activation, p.threads = 3;
  p.x = x.data(), p.w1 = w1.data(), p.w2 = w2.data(), p.b1 = b1.data(), p.b2 = b2.data(),
  p.seed = 77, p.drop_threshold = c.drop_threshold;
  if (c.gated) p.gate_weight = gate_weight.data();
  pt::FeedForwardForward f{pre.data(), c.gated ? gate.data() : nullptr, y.data()};
  pt::PT_ISA::feed_forward_kernels.forward(p, f);
  pt::FeedForwardBackward b{};
  b.dy = dy.data(), b.pre = f.pre, b.gate = f.gate, b.h = h.data(), b.dpre = dpre.data(),
  b.dgate = c.gated ? dgate.data() : nullptr;
  b.dx = dx.data(), b.dw1 = dw1.data(), b.dgate_weight = c.gated ? dgate_weight.data() : nullptr,
  b.dw2 = dw2.data();
  b.db1 = db1.data(), b.db2 = db2.data();
  pt::PT_ISA::feed_forward_kernels.backward(p, b);

  judge.output("pre", pre, linear(x.values, w1.values, b1.values, c.rows, c.in, c.hidden));
  if (c.gated)
    judge.output("gate", gate, linear(x.values, gate_weight.values, {}, c.rows, c.in, c.hidden));
  Numbers hidden(units), d_hidden(units), d_pre(units),
      d_gate(units);  // from pre and gate as they are stored, which backward reads
  add_product(dy.values, w2.values, c.rows, c.out, c.hidden, &d_hidden);
  for (int64_t i = 0; i < units; i++) {
    const double keep = dropout_scale(p.seed, c.drop_threshold, i % c.hidden,
                                      uint32_t(i / c.hidden), 0, 0x80000002);
    const ValueSlope a = activate(c.activation, c.gated ? gate[i] : pre[i]);
    hidden[i] = keep * a.value * (c.gated ? pre[i] : 1);
    d_pre[i] = keep * d_hidden[i] * (c.gated ? a.value : a.slope),
    d_gate[i] = keep * d_hidden[i] * a.slope * pre[i];
  }
  Numbers d_x(c.rows * c.in);
  add_product(d_pre, w1.values, c.rows, c.hidden, c.in, &d_x);
  if (c.gated) add_product(d_gate, gate_weight.values, c.rows, c.hidden, c.in, &d_x);
  judge.output("y", y, linear(hidden, w2.values, b2.values, c.rows, c.hidden, c.out));
  judge.gradient("dx", dx, d_x, c.dtype),
      judge.gradient("dw1", dw1, outer(d_pre, x.values, c.rows, c.hidden, c.in), c.dtype);
  judge.gradient("dw2", dw2, outer(dy.values, hidden, c.rows, c.out, c.hidden), c.dtype);
  if (c.gated)
    judge.gradient("dgate_weight", dgate_weight, outer(d_gate, x.values, c.rows, c.hidden, c.in),
                   c.dtype);
  judge.gradient("db1", db1, column_sums(d_pre, c.rows, c.hidden), c.dtype),
      judge.gradient("db2", db2, column_sums(dy.values, c.rows, c.out), c.dtype);
}

}  // namespace

int main() {
  const Case cases[] = {
      {"gelu, float32", DType::f32, Activation::gelu, 130, 40, 131, 50, false, 0},
      {"silu, gated, dropout, float32", DType::f32, Activation::silu, 60, 33, 90, 40, true, 20000},
      {"relu, few rows, wide, float32", DType::f32, Activation::relu, 5, 60, 700, 30, false, 0},
      {"gelu_tanh, gated, bfloat16", DType::bf16, Activation::gelu_tanh, 70, 24, 90, 40, true, 0},
      {"gelu, dropout, bfloat16", DType::bf16, Activation::gelu, 130, 72, 200, 48, false, 20000},
      {"gelu, float16", DType::f16, Activation::gelu, 40, 24, 70, 33, false, 0},
      {"gelu, float64", DType::f64, Activation::gelu, 20, 17, 30, 9, false, 9000},
  };
  Judge judge;
  for (const Case& c : cases) judge.start(c.name), run(c, judge), judge.finish();
  return judge.exit_code();
}
