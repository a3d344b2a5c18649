// SPDX-License-Identifier: Apache-2.0
// Linear cross entropy on the CPU, binding: check the kernels' requirements and fill in the
// problem.
//
// x and weight are contiguous, of one dtype and not empty; vectors are float32 (float64 for
// float64): see pytransformer/ops/_backends/cpu/cross_entropy.py.
#include "cpu/cross_entropy/problem.h"

#include "cpu/core/binding.h"

PT_DECLARE_KERNELS(CrossEntropyKernels, cross_entropy_kernels);

namespace {

using pt::MaybeTensor;
using pt::Tensor;
using pt::binding::Binding;

constexpr const char* kOp = "linear_cross_entropy";

pt::CrossEntropyProblem problem_of(pt::binding::IndexCopies& copies, const Tensor& x,
                                   const Tensor& weight, const Tensor& target,
                                   const MaybeTensor& bias, const MaybeTensor& class_weight,
                                   int64_t ignore_index, double label_smoothing, double softcap) {
  pt::CrossEntropyProblem p{};
  const Binding binding(kOp, x);
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, kOp, ": x and weight must be matrices");
  p.dtype = pt::dtype_of(x, "linear_cross_entropy: x", pt::Float64::taken);
  p.rows = x.size(0), p.depth = x.size(1), p.classes = weight.size(0);
  pt::check_sizes(kOp, {p.rows, p.depth, p.classes});
  p.x = binding.matrix(x, "x", p.rows, p.depth);
  p.weight = binding.matrix(weight, "weight", p.classes, p.depth);
  p.bias = binding.vector(bias, "bias", p.classes);
  p.weights = binding.vector(class_weight, "class_weight", p.classes);
  p.target = copies.copy<int64_t>(binding.integers(target, "target", p.rows), p.rows);
  p.ignore_index = ignore_index, p.label_smoothing = label_smoothing, p.softcap = softcap;
  for (int64_t r = 0; r < p.rows; r++)
    STD_TORCH_CHECK(p.target[r] == ignore_index || (p.target[r] >= 0 && p.target[r] < p.classes),
                    kOp, ": target ", p.target[r], " is not between 0 and ", p.classes - 1);
  p.threads = pt::pool_threads();
  return p;
}

void linear_cross_entropy_fwd(Tensor x, Tensor weight, Tensor target, MaybeTensor bias,
                              MaybeTensor class_weight, Tensor loss, Tensor split_lse,
                              MaybeTensor product, MaybeTensor correct, int64_t ignore_index,
                              double label_smoothing, double softcap) {
  pt::binding::IndexCopies copies;
  const pt::CrossEntropyProblem p = problem_of(copies, x, weight, target, bias, class_weight,
                                               ignore_index, label_smoothing, softcap);
  const Binding binding(kOp, x);
  void* kept = binding.vector(product, "product", p.rows * p.classes);
  if (kept) pt::advise_huge_pages(kept, product->numel() * product->element_size());
  PT_SELECT(cross_entropy_kernels)
      .forward(p, {binding.vector(loss, "loss", p.rows),
                   binding.vector(split_lse, "split_lse", 2 * p.rows), kept,
                   binding.vector(correct, "correct", p.rows)});
}

void linear_cross_entropy_bwd(Tensor g, MaybeTensor p_factor, Tensor x, Tensor weight,
                              Tensor target, MaybeTensor bias, MaybeTensor class_weight,
                              Tensor split_lse, MaybeTensor product, MaybeTensor dx,
                              MaybeTensor dweight, MaybeTensor dbias, int64_t ignore_index,
                              double label_smoothing, double softcap) {
  pt::binding::IndexCopies copies;
  const pt::CrossEntropyProblem p = problem_of(copies, x, weight, target, bias, class_weight,
                                               ignore_index, label_smoothing, softcap);
  const Binding binding(kOp, x);
  pt::CrossEntropyBackward f;
  f.split_lse = binding.vector(split_lse, "split_lse", 2 * p.rows);
  f.product = binding.vector(product, "product", p.rows * p.classes);
  f.g = binding.vector(g, "g", p.rows);
  f.p_factor = binding.vector(p_factor, "p_factor", p.rows);
  f.dx = binding.target(dx, "dx", p.rows, p.depth);
  f.dweight = binding.target(dweight, "dweight", p.classes, p.depth);
  f.dbias = binding.vector(dbias, "dbias", p.classes);
  PT_SELECT(cross_entropy_kernels).backward(p, f);
}

// Return the scratch bytes of forward and backward. Only the dtype of x is read. kept: forward
// stores the logits for backward. correct: forward compares argmax and target.
int64_t linear_cross_entropy_scratch(Tensor x, int64_t rows, int64_t depth, int64_t classes,
                                     bool kept, bool correct) {
  pt::check_sizes(kOp, {rows, depth, classes});
  pt::CrossEntropyProblem p{};
  p.dtype = pt::dtype_of(x, "linear_cross_entropy: x", pt::Float64::taken);
  p.rows = rows, p.depth = depth, p.classes = classes, p.threads = pt::pool_threads();
  return PT_SELECT(cross_entropy_kernels).scratch_bytes(p, kept, correct);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(
      "linear_cross_entropy_fwd(Tensor x, Tensor weight, Tensor target, Tensor? bias, "
      "Tensor? class_weight, Tensor(a!) loss, Tensor(b!) split_lse, Tensor(c!)? product, "
      "Tensor(d!)? correct, int ignore_index, float label_smoothing, float softcap) -> ()");
  m.def(
      "linear_cross_entropy_bwd(Tensor g, Tensor? p_factor, Tensor x, Tensor weight, "
      "Tensor target, Tensor? bias, Tensor? class_weight, Tensor split_lse, Tensor? product, "
      "Tensor(a!)? dx, Tensor(b!)? dweight, Tensor(c!)? dbias, int ignore_index, "
      "float label_smoothing, float softcap) -> ()");
  m.def(
      "linear_cross_entropy_scratch(Tensor x, int rows, int depth, int classes, bool kept, "
      "bool correct) -> int");
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CPU, m) {
  m.impl("linear_cross_entropy_fwd", TORCH_BOX(&linear_cross_entropy_fwd));
  m.impl("linear_cross_entropy_bwd", TORCH_BOX(&linear_cross_entropy_bwd));
  m.impl("linear_cross_entropy_scratch", TORCH_BOX(&linear_cross_entropy_scratch));
}
