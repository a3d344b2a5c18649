// Feed-forward on the CPU, torch edge: checks what the kernels rely on and fills in the problem.
//
// Matrices arrive contiguous, of one dtype and not empty; biases and their gradients in float32 (float64 for float64): see
// pytransformer/ops/_cpu_feed_forward.py.
#include "feed_forward.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>

#include "isa.h"
#include "pages.h"
#include "parallel.h"

PT_DECLARE_KERNELS(FeedForwardKernels, feed_forward_kernels);

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

pt::DType dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Float: return pt::DType::f32;
    case ScalarType::BFloat16: return pt::DType::bf16;
    case ScalarType::Half: return pt::DType::f16;
    case ScalarType::Double: return pt::DType::f64;
    default: STD_TORCH_CHECK(false, "feed_forward: float32, bfloat16, float16 or float64 wanted");
  }
}

// A contiguous (rows, columns) matrix of x's dtype, or null.
void* matrix_of(const MaybeTensor& t, const char* name, int64_t rows, int64_t columns, const Tensor& x) {
  if (!t) return nullptr;
  STD_TORCH_CHECK(t->dim() == 2 && t->size(0) == rows && t->size(1) == columns && t->is_contiguous() && t->scalar_type() == x.scalar_type(),
                  "feed_forward: ", name, " must be a contiguous (", rows, ", ", columns, ") matrix of the dtype of x");
  return t->mutable_data_ptr();
}
// The same, to be written.
void* target_of(const MaybeTensor& t, const char* name, int64_t rows, int64_t columns, const Tensor& x) {
  void* data = matrix_of(t, name, rows, columns, x);
  if (data) pt::advise_huge_pages(data, t->numel() * t->element_size());
  return data;
}
// A contiguous vector of the work type, or null.
void* vector_of(const MaybeTensor& t, const char* name, int64_t n, const Tensor& x) {
  if (!t) return nullptr;
  const auto work = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  STD_TORCH_CHECK(t->numel() == n && t->is_contiguous() && t->scalar_type() == work, "feed_forward: ", name, " must be contiguous, of ", n,
                  " float32 numbers (float64 for float64)");
  return t->mutable_data_ptr();
}

pt::FeedForwardProblem problem_of(const Tensor& x, const Tensor& w1, const MaybeTensor& gate_weight, const Tensor& w2,
                                  const MaybeTensor& seed, int64_t activation, double dropout_p) {
  pt::FeedForwardProblem p{};
  STD_TORCH_CHECK(x.dim() == 2 && w1.dim() == 2 && w2.dim() == 2, "feed_forward: x, w1 and w2 must be matrices");
  p.dtype = dtype_of(x);
  p.rows = x.size(0), p.in = x.size(1), p.hidden = w1.size(0), p.out = w2.size(0);
  p.x = matrix_of(x, "x", p.rows, p.in, x);
  p.w1 = matrix_of(w1, "w1", p.hidden, p.in, x);
  p.gate_weight = matrix_of(gate_weight, "gate_weight", p.hidden, p.in, x);
  p.w2 = matrix_of(w2, "w2", p.out, p.hidden, x);
  STD_TORCH_CHECK(activation >= 0 && activation <= int64_t(pt::Activation::silu), "feed_forward: unknown activation ", activation);
  p.activation = pt::Activation(activation);
  p.drop_threshold = uint32_t(std::nearbyint(65536 * dropout_p));
  if (p.drop_threshold) {
    STD_TORCH_CHECK(seed && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long, "feed_forward: dropout needs an int64 seed");
    p.seed = *static_cast<const uint64_t*>(seed->const_data_ptr());
  }
  p.threads = pt::pool_threads();
  return p;
}

void feed_forward_fwd(Tensor x, Tensor w1, MaybeTensor b1, MaybeTensor gate_weight, MaybeTensor gate_bias, Tensor w2, MaybeTensor b2,
                      MaybeTensor dropout_seed, MaybeTensor pre, MaybeTensor gate, MaybeTensor out, int64_t hidden_rows, int64_t activation,
                      double dropout_p) {
  pt::FeedForwardProblem p = problem_of(x, w1, gate_weight, w2, dropout_seed, activation, dropout_p);
  p.b1 = vector_of(b1, "b1", p.hidden, x);
  p.gate_bias = vector_of(gate_bias, "gate_bias", p.hidden, x);
  p.b2 = vector_of(b2, "b2", p.out, x);
  pt::FeedForwardForward f;
  f.pre = target_of(pre, "pre", p.rows, p.hidden, x);
  f.gate = target_of(gate, "gate", p.rows, p.hidden, x);
  f.h_rows = hidden_rows;
  f.y = target_of(out, "out", p.rows, p.out, x);
  STD_TORCH_CHECK(f.h_rows > 0, "feed_forward: hidden_rows must be positive, got ", f.h_rows);
  PT_SELECT(feed_forward_kernels).forward(p, f);
}

void feed_forward_bwd(Tensor d_out, Tensor x, Tensor w1, MaybeTensor gate_weight, Tensor w2, Tensor pre, MaybeTensor gate,
                      MaybeTensor dropout_seed, Tensor hidden, Tensor d_pre, MaybeTensor d_gate, MaybeTensor dx, MaybeTensor dw1,
                      MaybeTensor db1, MaybeTensor dgate_weight, MaybeTensor dgate_bias, MaybeTensor dw2, MaybeTensor db2,
                      int64_t activation, double dropout_p) {
  const pt::FeedForwardProblem p = problem_of(x, w1, gate_weight, w2, dropout_seed, activation, dropout_p);
  pt::FeedForwardBackward f;
  f.dy = matrix_of(d_out, "d_out", p.rows, p.out, x);
  f.pre = matrix_of(pre, "pre", p.rows, p.hidden, x);
  f.gate = matrix_of(gate, "gate", p.rows, p.hidden, x);
  f.h = target_of(hidden, "hidden", p.rows, p.hidden, x);
  f.dpre = target_of(d_pre, "d_pre", p.rows, p.hidden, x);
  f.dgate = target_of(d_gate, "d_gate", p.rows, p.hidden, x);
  STD_TORCH_CHECK(!gate_weight || (f.gate && f.dgate), "feed_forward: gate and d_gate are missing");
  f.dx = target_of(dx, "dx", p.rows, p.in, x);
  f.dw1 = target_of(dw1, "dw1", p.hidden, p.in, x);
  f.dgate_weight = target_of(dgate_weight, "dgate_weight", p.hidden, p.in, x);
  f.dw2 = target_of(dw2, "dw2", p.out, p.hidden, x);
  f.db1 = vector_of(db1, "db1", p.hidden, x);
  f.dgate_bias = vector_of(dgate_bias, "dgate_bias", p.hidden, x);
  f.db2 = vector_of(db2, "db2", p.out, x);
  PT_SELECT(feed_forward_kernels).backward(p, f);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(
      "feed_forward_fwd(Tensor x, Tensor w1, Tensor? b1, Tensor? gate_weight, Tensor? gate_bias, Tensor w2, Tensor? b2, "
      "Tensor? dropout_seed, Tensor(a!)? pre, Tensor(b!)? gate, Tensor(c!)? out, int hidden_rows, int activation, "
      "float dropout_p) -> ()");
  m.def(
      "feed_forward_bwd(Tensor d_out, Tensor x, Tensor w1, Tensor? gate_weight, Tensor w2, Tensor pre, Tensor? gate, "
      "Tensor? dropout_seed, Tensor(a!) hidden, Tensor(b!) d_pre, Tensor(c!)? d_gate, Tensor(d!)? dx, Tensor(e!)? dw1, "
      "Tensor(f!)? db1, Tensor(g!)? dgate_weight, Tensor(h!)? dgate_bias, Tensor(i!)? dw2, Tensor(j!)? db2, int activation, "
      "float dropout_p) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CPU, m) {
  m.impl("feed_forward_fwd", TORCH_BOX(&feed_forward_fwd));
  m.impl("feed_forward_bwd", TORCH_BOX(&feed_forward_bwd));
}
