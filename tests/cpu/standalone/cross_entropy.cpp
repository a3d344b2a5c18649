// SPDX-License-Identifier: Apache-2.0
// Linear cross entropy's kernel layer, without torch, against double loops: see test_standalone.py.
#include "standalone.h"

#include "cpu/cross_entropy/problem.h"

namespace pt {
namespace PT_ISA {
extern const CrossEntropyKernels cross_entropy_kernels;
}
}  // namespace pt

namespace {

using pt::DType;

struct Case {
  const char* name;
  DType dtype;
  int64_t rows, depth, classes;
  double smoothing;
  bool bias, keeps_product;
  double softcap = 0;
  bool weights = false;
};

struct Solution {
  Numbers loss, split_lse, dx, dweight, dbias, correct;
};

// Return sum w_c q_c of a row, the factor of its softmax.
double total_weight(const Case& c, const Tensor& weights, int64_t target) {
  double mean = 0;
  for (int64_t k = 0; k < c.classes; k++) mean += (c.weights ? weights[k] : 1) / c.classes;
  return (1 - c.smoothing) * (c.weights ? weights[target] : 1) + c.smoothing * mean;
}

Solution solve(const Case& c, const Tensor& x, const Tensor& weight, const Tensor& bias,
               const Tensor& weights, const std::vector<int64_t>& target, const Tensor& upstream) {
  const int64_t d = c.depth;
  Solution s{Numbers(c.rows),        Numbers(2 * c.rows), Numbers(c.rows * d),
             Numbers(c.classes * d), Numbers(c.classes),  Numbers(c.rows)};
  Numbers z(c.classes);
  for (int64_t r = 0; r < c.rows; r++) {
    double most = -INFINITY, sum = 0;
    int64_t best = 0;
    for (int64_t k = 0; k < c.classes; k++) {
      z[k] = c.bias ? bias[k] : 0;
      for (int64_t u = 0; u < d; u++) z[k] += x[r * d + u] * weight[k * d + u];
      if (c.softcap > 0) z[k] = c.softcap * std::tanh(z[k] / c.softcap);
      if (z[k] > most) most = z[k], best = k;
    }
    for (double v : z) sum += std::exp(v - most);
    const double lse = most + std::log(sum);
    s.split_lse[r] = most, s.split_lse[c.rows + r] = std::log(sum);
    if (target[r] < 0) continue;
    s.correct[r] = best == target[r];
    const double total = total_weight(c, weights, target[r]);
    for (int64_t k = 0; k < c.classes; k++) {
      const double share = (1 - c.smoothing) * (k == target[r]) + c.smoothing / c.classes,
                   q = share * (c.weights ? weights[k] : 1),
                   slope = c.softcap > 0 ? 1 - std::pow(z[k] / c.softcap, 2) : 1,
                   dz = upstream[r] * (total * std::exp(z[k] - lse) - q) * slope;
      s.loss[r] += q * (lse - z[k]);
      s.dbias[k] += dz;
      for (int64_t u = 0; u < d; u++)
        s.dx[r * d + u] += dz * weight[k * d + u], s.dweight[k * d + u] += dz * x[r * d + u];
    }
  }
  return s;
}

void run(const Case& c, Judge& judge) {
  Normal normal;
  const DType work = work_type(c.dtype);
  Tensor x = normal(c.dtype, c.rows * c.depth), weight = normal(c.dtype, c.classes * c.depth),
         bias = normal(work, c.classes), upstream = normal(work, c.rows),
         weights = normal(work, c.classes);
  Tensor loss(work, c.rows), split_lse(work, 2 * c.rows), product(work, c.rows * c.classes),
      dx(c.dtype, c.rows * c.depth), dweight(c.dtype, c.classes * c.depth), dbias(work, c.classes);
  std::vector<int64_t> target(c.rows);
  for (int64_t r = 0; r < c.rows; r++) target[r] = r % 5 == 3 ? -100 : r * 37 % c.classes;
  pt::CrossEntropyProblem p{};
  p.dtype = c.dtype, p.rows = c.rows, p.depth = c.depth, p.classes = c.classes, p.x = x.data(),
  p.weight = weight.data();
  p.bias = c.bias ? bias.data() : nullptr, p.target = target.data(), p.ignore_index = -100,
  p.label_smoothing = c.smoothing, p.softcap = c.softcap, p.threads = 3;
  for (double& w : weights.values) w = std::abs(w);
  weights = Tensor(work, weights.values);
  if (c.weights) p.weights = weights.data();
  Numbers factors(c.rows);
  for (int64_t r = 0; r < c.rows; r++)
    if (target[r] >= 0) factors[r] = upstream[r] * total_weight(c, weights, target[r]);
  Tensor p_factor(work, factors), correct(work, c.rows);
  void* kept = c.keeps_product ? product.data() : nullptr;
  pt::PT_ISA::cross_entropy_kernels.forward(p,
                                            {loss.data(), split_lse.data(), kept, correct.data()});
  pt::PT_ISA::cross_entropy_kernels.backward(
      p, {split_lse.data(), upstream.data(), c.weights ? p_factor.data() : nullptr, kept, dx.data(),
          dweight.data(), c.bias ? dbias.data() : nullptr});
  const Solution s = solve(c, x, weight, bias, weights, target, upstream);
  judge.output("correct", correct, s.correct);
  judge.output("loss", loss, s.loss), judge.output("split_lse", split_lse, s.split_lse);
  judge.gradient("dx", dx, s.dx, c.dtype), judge.gradient("dweight", dweight, s.dweight, c.dtype);
  if (c.bias) judge.gradient("dbias", dbias, s.dbias, c.dtype);
}

}  // namespace

int main() {
  const Case cases[] = {
      {"float32, bias, smoothing", DType::f32, 70, 33, 210, 0.1, true, false},
      {"float32, product kept", DType::f32, 30, 20, 700, 0, false, true},
      {"bfloat16, many classes", DType::bf16, 21, 24, 1100, 0, true, false},
      {"bfloat16, smoothing, product kept", DType::bf16, 70, 72, 300, 0.1, true, true},
      {"float16, smoothing", DType::f16, 40, 17, 90, 0.2, false, false},
      {"float64", DType::f64, 9, 12, 65, 0.1, true, false},
      {"float32, softcap, weights", DType::f32, 40, 33, 210, 0.1, true, false, 3, true},
      {"bfloat16, softcap, product kept", DType::bf16, 21, 24, 1100, 0, true, true, 5, false},
      {"float64, softcap, weights", DType::f64, 9, 12, 65, 0, false, false, 2, true},
  };
  Judge judge;
  for (const Case& c : cases) judge.start(c.name), run(c, judge), judge.finish();
  return judge.exit_code();
}
