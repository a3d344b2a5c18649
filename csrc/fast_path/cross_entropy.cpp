// SPDX-License-Identifier: Apache-2.0
// pt.linear_cross_entropy without class weights, softcap and z-loss: the lowering of
// ops/cross_entropy.py and ops/_backends/cpu/cross_entropy.py.
#include <ATen/ops/sum_cpu_dispatch.h>

#include <algorithm>

#include "reader.h"

namespace pt::fast_path {
namespace {

struct CrossEntropy {
  static constexpr const char* kName = "linear_cross_entropy";
  enum { kX, kWeight, kBias, kTarget, kInputs, kSeed = -1 };
  enum Reduction { kMean, kSum, kNone };
  static constexpr size_t kDifferentiable = 3, kSaved = 5, kGrads = 1;
  using Inputs = std::array<Tensor, kInputs>;
  // loss, split lse, x weightᵀ if saved for backward, and the gradients of forward, which only
  // Python computes
  using Outputs = std::array<Tensor, 6>;
  using Saved = std::array<Tensor, kSaved>;

  struct Numbers {
    int64_t ignore_index = -100, reduction = kMean;
    double label_smoothing = 0;

    template <class F>
    void collect(const F& f) const {
      f(ignore_index), f(reduction), f(label_smoothing);
    }
  };

  using Forward = void(const Tensor& x, const Tensor& weight, const Tensor& target,
                       const Maybe& bias, const Maybe& class_weight, const Tensor& loss,
                       const Tensor& split_lse, const Maybe& product, const Maybe& correct,
                       int64_t ignore_index, double label_smoothing, double softcap);
  using Backward = void(const Tensor& g, const Maybe& p_factor, const Tensor& x,
                        const Tensor& weight, const Tensor& target, const Maybe& bias,
                        const Maybe& class_weight, const Tensor& split_lse, const Maybe& product,
                        const Maybe& dx, const Maybe& dweight, const Maybe& dbias,
                        int64_t ignore_index, double label_smoothing, double softcap);

  static bool complete(Inputs&, Numbers&) { return true; }
  static bool fits(const Inputs& t, const Numbers& n) {
    const Tensor &x = t[kX], &weight = t[kWeight], &bias = t[kBias], &target = t[kTarget];
    if (x.dim() == 0 || !x.numel() || !floating(x) || autocast_casts(x)) return false;
    if (weight.dim() != 2 || weight.scalar_type() != x.scalar_type() ||
        weight.size(1) != x.size(-1) || !weight.size(0))
      return false;
    if (bias.defined() && (!floating(bias) || bias.dim() != 1 || bias.size(0) != weight.size(0)))
      return false;
    if (!(n.label_smoothing >= 0 && n.label_smoothing <= 1)) return false;
    return target.scalar_type() == at::kLong && target.sizes() == x.sizes().slice(0, x.dim() - 1);
  }

  static double valid(const Tensor& target, int64_t ignore_index) {  // target must be contiguous
    const int64_t* first = target.const_data_ptr<int64_t>();
    return double(target.numel() - std::count(first, first + target.numel(), ignore_index));
  }

  static double value(const Tensor& number) {
    return number.scalar_type() == at::kDouble ? *number.const_data_ptr<double>()
                                               : *number.const_data_ptr<float>();
  }
  static void fill(const Tensor& t, double value) {
    if (t.scalar_type() == at::kDouble) std::fill_n(t.mutable_data_ptr<double>(), t.numel(), value);
    else std::fill_n(t.mutable_data_ptr<float>(), t.numel(), float(value));
  }

  // Return losses.double().sum() in ATen's order, with one ATen call instead of three.
  static double sum(const Tensor& losses) {
    Tensor wide = losses;
    if (losses.scalar_type() != at::kDouble) {
      wide = empty(losses.sizes(), losses.options().dtype(at::kDouble));
      std::copy_n(losses.const_data_ptr<float>(), losses.numel(), wide.mutable_data_ptr<double>());
    }
    return *at::cpu::sum(wide, at::IntArrayRef()).const_data_ptr<double>();
  }

  static Outputs forward(const Inputs& t, const Numbers& n, bool needs_gradient) {
    static const auto raw = raw_op<Forward>("pytransformer_C::linear_cross_entropy_fwd");
    const Tensor &x = t[kX], &weight = t[kWeight], target = t[kTarget].contiguous();
    const auto options = x.options().dtype(work_dtype(x));
    const auto work = work_dtype(x);
    Outputs results;
    const Tensor losses = empty(target.sizes(), options);
    c10::DimVector halves{2};
    halves.append(target.sizes().begin(), target.sizes().end());
    results[1] = empty(halves, options);
    const int64_t size = target.numel() * weight.size(0),
                  least = limits.kept_depth * (x.scalar_type() == at::kBFloat16 ? 2 : 1);
    if (needs_gradient && weight.size(1) > least &&
        size * int64_t(options.dtype().itemsize()) <= limits.kept_bytes) {
      c10::DimVector shape(target.sizes());
      shape.push_back(weight.size(0));
      results[2] = empty(shape, options);
    }
    raw.call(matrix(x), matrix(weight), target, vector(t[kBias], work), std::nullopt, losses,
             results[1], maybe(results[2]), std::nullopt, n.ignore_index, n.label_smoothing, 0.0);
    if (n.reduction == kNone) {
      results[0] = losses;
      return results;
    }
    double total = sum(losses);
    if (n.reduction == kMean) total /= valid(target, n.ignore_index);
    results[0] = empty({}, options);
    fill(results[0], total);
    return results;
  }

  static variable_list backward(const Inputs& t, const Saved& saved, const Numbers& n,
                                const variable_list& grads, const std::vector<bool>& wanted) {
    static const auto raw = raw_op<Backward>("pytransformer_C::linear_cross_entropy_bwd");
    const Tensor x = matrix(t[kX]), weight = matrix(t[kWeight]), target = t[kTarget].contiguous(),
                 split_lse = saved[0].contiguous();
    const auto work = split_lse.scalar_type();
    Tensor upstream;
    if (n.reduction == kNone) {
      upstream = grads[0].contiguous();
    } else {
      double each = value(grads[0]);
      if (n.reduction == kMean) each /= valid(target, n.ignore_index);
      upstream = empty(target.sizes(), split_lse.options());
      fill(upstream, each);
    }
    variable_list results(kDifferentiable);
    std::array<Maybe, kDifferentiable> targets;
    for (size_t i = 0; i < kDifferentiable; i++) {
      if (!wanted[i]) continue;
      results[i] = i == kBias ? vector_target(t[i], work) : matrix_target(t[i]);
      targets[i] = i == kBias ? results[i] : matrix(results[i]);
    }
    const Maybe product =
        saved[1].defined() && saved[1].numel() ? Maybe(saved[1].contiguous()) : std::nullopt;
    raw.call(upstream, std::nullopt, x, weight, target, vector(t[kBias], work), std::nullopt,
             split_lse, product, targets[kX], targets[kWeight], targets[kBias], n.ignore_index,
             n.label_smoothing, 0.0);
    for (size_t i = 0; i < kDifferentiable; i++)
      if (wanted[i]) results[i] = deliver(results[i], t[i]);
    return results;
  }

  static variable_list tensors(const Inputs& t) {
    return {t[kX], t[kWeight], t[kTarget], t[kBias], Tensor()};
  }
  static constexpr std::initializer_list<const char*> kReductions = {"mean", "sum", "none"};
  static py::tuple others(const Numbers& n) {
    return py::make_tuple(n.ignore_index, n.label_smoothing, 0.0, 0.0,
                          kReductions.begin()[n.reduction], false, "logits", py::none(), false);
  }
};

}  // namespace

FAST_PATH_ENTRY(linear_cross_entropy) {
  HANDLE_TH_ERRORS
  using C = CrossEntropy;
  // Python handles class_weight, softcap, z_loss_weight, return_z_loss and return_accuracy.
  if (count != 14 || !unwatched() || a[4] != Py_None || a[7] != Py_None || a[10] != Py_False ||
      a[11] != Py_False)
    Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  C::Inputs t{read.tensor(a[0]), read.tensor(a[1]), read.tensor_or_none(a[3]), read.tensor(a[2])};
  C::Numbers n;
  n.ignore_index = read.integer(a[5]);
  n.label_smoothing = read.number(a[6]);
  read.require(read.number(a[8]) == 0);
  n.reduction = read.choice(a[9], C::kReductions);
  return finish<C>(read, t, n, 1, 1, read.route(a[12], a[13]),
                   [&] { return Given{a, count}.tuple(); });
  END_HANDLE_TH_ERRORS
}

}  // namespace pt::fast_path
