// SPDX-License-Identifier: Apache-2.0
// Binding of fused linear + cross entropy on a GPU: checks the arguments, fills in the problems and
// launches. csrc/cuda/matmul/binding.h defines the matrices' format; see
// pytransformer/ops/_backends/cuda/cross_entropy.py.
#include "cuda/cross_entropy/kernels.h"
#include "cuda/matmul/binding.h"

namespace {

using namespace pt::cuda;

constexpr const char* kOp = "linear_cross_entropy";

// Return the gemm of the logits: x times weight transposed, (d, classes).
Product logits_of(const Tensor& x, const Tensor& weight, Reachable& reachable) {
  Product p{};
  p.dtype = dtype_of(x, "x"), p.rows = x.size(0), p.columns = weight.size(1);
  STD_TORCH_CHECK(dtype_of(weight, "weight") == p.dtype,
                  "cross entropy: weight must have the dtype of x");
  p.a[0] = matrix_of(x, "x", reachable), p.b[0] = matrix_of(weight, "weight", reachable);
  STD_TORCH_CHECK(!p.a[0].transposed && p.b[0].transposed,
                  "cross entropy: the rows of x and the columns of weight must be contiguous");
  return p;
}

void check_numbers(const Tensor& t, const char* name, ScalarType type, int64_t count) {
  STD_TORCH_CHECK(t.is_contiguous() && t.scalar_type() == type && t.numel() == count,
                  "cross entropy: ", name, " must be ", count,
                  " contiguous numbers, int64 if targets and else float32; got ", t.numel());
}
const float* floats_from(const Tensor& t, const char* name, int64_t count, Reachable& reachable) {
  check_numbers(t, name, ScalarType::Float, count);
  return static_cast<const float*>(read_from(kOp, t, name, reachable));
}
float* floats_to(const Tensor& t, const char* name, int64_t count, Reachable& reachable) {
  check_numbers(t, name, ScalarType::Float, count);
  return static_cast<float*>(write_to(kOp, t, name, reachable));
}

Labels labels_of(const Tensor& target, int64_t ignore_index, double smoothing, int64_t rows,
                 Reachable& reachable) {
  check_numbers(target, "target", ScalarType::Long, rows);
  return {static_cast<const int64_t*>(read_from(kOp, target, "target", reachable)), ignore_index,
          float(1 - smoothing), float(smoothing)};
}

float* bias_partials_of(const Tensor& t, const Product& p, Reachable& reachable) {
  return floats_to(t, "bias_partials", (p.rows + kRowsOfAPart - 1) / kRowsOfAPart * p.columns,
                   reachable);
}

// partials, picked: scratch for the tiles' results. exponentials: see LogitPartials.
void cross_entropy_fwd(Tensor x, Tensor weight, MaybeTensor bias, Tensor target, Tensor partials,
                       Tensor picked, Tensor loss, Tensor row_max, Tensor log_sum,
                       MaybeTensor exponentials, int64_t ignore_index, double label_smoothing,
                       double softcap, int64_t device, int64_t stream) {
  Reachable reachable;
  LogitPartials f{};
  f.softcap = float(softcap);
  f.product = logits_of(x, weight, reachable);
  const int64_t rows = f.product.rows, classes = f.product.columns;
  f.bias = bias_of(bias, "bias", classes, reachable);
  f.labels = labels_of(target, ignore_index, label_smoothing, rows, reachable);
  const CrossEntropyPlan plan = plan_cross_entropy(rows, classes, label_smoothing > 0);
  f.partials = floats_to(partials, "partials", plan.partials, reachable),
  f.picked = floats_to(picked, "picked", rows, reachable);
  STD_TORCH_CHECK(!exponentials || (f.product.dtype == DType::bf16 && softcap == 0),
                  "cross entropy: exponentials must be bfloat16, without a softcap");
  f.exponentials = result_of(exponentials, "exponentials", f.product, reachable);
  const LossProblem second{f.labels,
                           f.partials,
                           f.picked,
                           floats_to(loss, "loss", rows, reachable),
                           floats_to(row_max, "row_max", rows, reachable),
                           floats_to(log_sum, "log_sum", rows, reachable),
                           rows,
                           classes,
                           plan.tiles};
  const DeviceGuard guard(device);
  sm90_logit_partials(f, planned(f.product), reinterpret_cast<void*>(stream));
  sm90_loss(second, plan, reinterpret_cast<void*>(stream));
}

void cross_entropy_bwd(Tensor x, Tensor weight, MaybeTensor bias, Tensor target, Tensor row_max,
                       Tensor log_sum, Tensor g, MaybeTensor p_factor, MaybeTensor d_logits,
                       MaybeTensor bias_partials, int64_t ignore_index, double label_smoothing,
                       double softcap, int64_t device, int64_t stream) {
  Reachable reachable;
  DLogitsProblem f{};
  f.product = logits_of(x, weight, reachable);
  const int64_t rows = f.product.rows, classes = f.product.columns;
  f.bias = bias_of(bias, "bias", classes, reachable);
  f.labels = labels_of(target, ignore_index, label_smoothing, rows, reachable);
  f.row_max = floats_from(row_max, "row_max", rows, reachable);
  f.log_sum = floats_from(log_sum, "log_sum", rows, reachable);
  f.g = floats_from(g, "g", rows, reachable);
  if (p_factor) f.p_factor = floats_from(*p_factor, "p_factor", rows, reachable);
  STD_TORCH_CHECK(softcap == 0 || f.p_factor, "cross entropy: a softcap needs p_factor");
  f.softcap = float(softcap);
  f.d_logits = result_of(d_logits, "d_logits", f.product, reachable);
  if (bias_partials) f.bias_partials = bias_partials_of(*bias_partials, f.product, reachable);
  const DeviceGuard guard(device);
  sm90_d_logits(f, planned(f.product), reinterpret_cast<void*>(stream));
}

// d_logits: forward's exponentials, which their gradients replace. partials, picked: forward's.
void cross_entropy_d_logits(Tensor target, Tensor partials, Tensor picked, Tensor row_max,
                            Tensor log_sum, Tensor g, MaybeTensor p_factor, Tensor d_logits,
                            MaybeTensor bias_partials, int64_t classes, int64_t ignore_index,
                            double label_smoothing, int64_t device, int64_t stream) {
  Reachable reachable;
  ExponentialsProblem f{};
  Product p{};
  p.dtype = DType::bf16, p.rows = f.rows = target.numel(), p.columns = f.classes = classes;
  f.labels = labels_of(target, ignore_index, label_smoothing, f.rows, reachable);
  const CrossEntropyPlan plan = plan_cross_entropy(f.rows, classes, label_smoothing > 0);
  f.maxima = floats_from(partials, "partials", plan.partials, reachable);
  f.picked = floats_from(picked, "picked", f.rows, reachable);
  f.row_max = floats_from(row_max, "row_max", f.rows, reachable);
  f.log_sum = floats_from(log_sum, "log_sum", f.rows, reachable);
  f.g = floats_from(g, "g", f.rows, reachable);
  if (p_factor) f.p_factor = floats_from(*p_factor, "p_factor", f.rows, reachable);
  f.d_logits = result_of(d_logits, "d_logits", p, reachable);
  if (bias_partials) f.bias_partials = bias_partials_of(*bias_partials, p, reachable);
  const DeviceGuard guard(device);
  sm90_d_logits_in_place(f, reinterpret_cast<void*>(stream));
}

// out = g t, contiguous bfloat16; out may be t.
void cross_entropy_scale(Tensor t, Tensor g, Tensor out, int64_t device, int64_t stream) {
  Reachable reachable;
  for (const Tensor* p : {&t, &out})
    STD_TORCH_CHECK(p->is_contiguous() && p->scalar_type() == ScalarType::BFloat16 &&
                        p->numel() == t.numel() &&
                        reinterpret_cast<uintptr_t>(p->const_data_ptr()) % 16 == 0,
                    "cross entropy: a scaled gradient must be contiguous bfloat16 at a multiple of "
                    "16 bytes");
  const ScaleProblem f{read_from(kOp, t, "t", reachable), write_to(kOp, out, "out", reachable),
                       floats_from(g, "g", 1, reachable), t.numel()};
  const DeviceGuard guard(device);
  sm90_scale(f, reinterpret_cast<void*>(stream));
}

// Return the number of partial results per row in forward.
int64_t cross_entropy_partials(int64_t classes, bool smooth) {
  return plan_cross_entropy(1, classes, smooth).partials;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(PT_EDGE_OP(
      "cross_entropy_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, "
      "Tensor(a!) partials, Tensor(b!) picked, "
      "Tensor(c!) loss, Tensor(d!) row_max, Tensor(e!) log_sum, Tensor(f!)? exponentials, "
      "int ignore_index, float label_smoothing, float softcap, int device, int stream) "
      "-> ()"));
  m.def(PT_EDGE_OP(
      "cross_entropy_d_logits(Tensor target, Tensor partials, Tensor picked, Tensor row_max, "
      "Tensor log_sum, Tensor g, Tensor? p_factor, Tensor(a!) d_logits, "
      "Tensor(b!)? bias_partials, int classes, int ignore_index, float label_smoothing, "
      "int device, int stream) -> ()"));
  m.def(
      PT_EDGE_OP("cross_entropy_bwd(Tensor x, Tensor weight, Tensor? bias, Tensor target, Tensor "
                 "row_max, Tensor log_sum, "
                 "Tensor g, Tensor? p_factor, Tensor(a!)? d_logits, Tensor(b!)? bias_partials, "
                 "int ignore_index, float label_smoothing, float softcap, int device, int stream) "
                 "-> ()"));
  m.def(PT_EDGE_OP(
      "cross_entropy_scale(Tensor t, Tensor g, Tensor(a!) out, int device, int stream) -> ()"));
  m.def(PT_EDGE_OP("cross_entropy_partials(int classes, bool smooth) -> int"));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, PT_EDGE_KEY, m) {
  m.impl(PT_EDGE_OP("cross_entropy_fwd"), TORCH_BOX(&cross_entropy_fwd));
  m.impl(PT_EDGE_OP("cross_entropy_bwd"), TORCH_BOX(&cross_entropy_bwd));
  m.impl(PT_EDGE_OP("cross_entropy_d_logits"), TORCH_BOX(&cross_entropy_d_logits));
  m.impl(PT_EDGE_OP("cross_entropy_scale"), TORCH_BOX(&cross_entropy_scale));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CompositeExplicitAutograd, m) {
  m.impl(PT_EDGE_OP("cross_entropy_partials"), TORCH_BOX(&cross_entropy_partials));
}
