// SPDX-License-Identifier: Apache-2.0
// Binding of the feed-forward gemms with fused epilogues: checks the arguments, fills in the
// problems and launches. csrc/cuda/matmul/binding.h defines the matrices' format; see
// pytransformer/ops/_backends/cuda/feed_forward.py.
#include <cmath>
#include <string>
#include <vector>

#include "cuda/feed_forward/kernels.h"
#include "cuda/matmul/binding.h"

namespace {

using namespace pt::cuda;

constexpr const char* kOp = "feed_forward";

Activation activation_of(int64_t number) {
  STD_TORCH_CHECK(number >= 0 && number < int64_t(pt::kActivationNames.size()),
                  "feed_forward: activation ", number);
  return Activation(number);
}

HiddenDropout dropout_of(const MaybeTensor& seed, int64_t row_start, int64_t column_start, double p,
                         Reachable& reachable) {
  STD_TORCH_CHECK(p >= 0 && p <= 1, "feed_forward: dropout_p is ", p);
  const uint32_t threshold = uint32_t(std::nearbyint(65536 * p));
  if (!threshold) return {};
  STD_TORCH_CHECK(seed && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long,
                  "feed_forward: dropout needs an int64 seed");
  pt::check_start(kOp, row_start, "row_start"), pt::check_start(kOp, column_start, "column_start");
  STD_TORCH_CHECK(column_start % 32 == 0, "feed_forward: column_start is ", column_start,
                  "; expected a multiple of 32");
  return {static_cast<const uint64_t*>(read_from(kOp, *seed, "dropout_seed", reachable)), threshold,
          uint32_t(column_start), row_start};
}

// Return an operand with the gemm's dtype.
Matrix operand(const Tensor& t, const char* name, const Product& p, Reachable& reachable) {
  STD_TORCH_CHECK(dtype_of(t, name) == p.dtype, "feed_forward: ", name,
                  " must have the dtype of x");
  return matrix_of(t, name, reachable);
}

// w1 and gate_weight are transposed: (d, hidden).
void hidden_fwd(Tensor x, Tensor w1, MaybeTensor gate_weight, MaybeTensor b1, MaybeTensor gate_bias,
                MaybeTensor dropout_seed, MaybeTensor hidden, MaybeTensor pre, MaybeTensor gate,
                int64_t activation, int64_t row_start, int64_t column_start, double dropout_p,
                int64_t device, int64_t stream) {
  Reachable reachable;
  HiddenProblem f{};
  Product& p = f.product;
  p.dtype = dtype_of(x, "x"), p.rows = x.size(0), p.columns = w1.size(1),
  p.gated = gate_weight.has_value();
  p.a[0] = operand(x, "x", p, reachable), p.b[0] = operand(w1, "w1", p, reachable);
  if (p.gated) p.b[1] = operand(*gate_weight, "gate_weight", p, reachable);
  STD_TORCH_CHECK(p.gated || (!gate && !gate_bias), "feed_forward: a gate without its weight");
  f.activation = activation_of(activation),
  f.dropout = dropout_of(dropout_seed, row_start, column_start, dropout_p, reachable);
  f.b1 = bias_of(b1, "b1", p.columns, reachable),
  f.gate_bias = bias_of(gate_bias, "gate_bias", p.columns, reachable);
  f.hidden = result_of(hidden, "hidden", p, reachable);
  f.pre = result_of(pre, "pre", p, reachable), f.gate = result_of(gate, "gate", p, reachable);
  const DeviceGuard guard(device);
  sm90_hidden(f, planned(p), reinterpret_cast<void*>(stream));
}

// Return the address of (ceil(rows / 64), columns) float32 partials, or null.
float* parts_of(const MaybeTensor& t, const char* name, const Product& p, Reachable& reachable) {
  if (!t) return nullptr;
  const int64_t rows = (p.rows + kRowsOfAPart - 1) / kRowsOfAPart;
  STD_TORCH_CHECK(t->dim() == 2 && t->size(0) == rows && t->size(1) == p.columns &&
                      t->is_contiguous() && t->scalar_type() == ScalarType::Float,
                  "feed_forward: ", name, " must be contiguous float32, (", rows, ", ", p.columns,
                  ")");
  return static_cast<float*>(write_to(kOp, *t, name, reachable));
}

void hidden_bwd(Tensor d_out, Tensor w2, Tensor pre, MaybeTensor gate, MaybeTensor dropout_seed,
                MaybeTensor d_pre, MaybeTensor d_gate, MaybeTensor hidden, MaybeTensor b1_partials,
                MaybeTensor gate_bias_partials, int64_t activation, int64_t row_start,
                int64_t column_start, double dropout_p, int64_t device, int64_t stream) {
  Reachable reachable;
  HiddenGradient f{};
  Product& p = f.product;
  p.dtype = dtype_of(d_out, "d_out"), p.rows = d_out.size(0), p.columns = w2.size(1);
  p.a[0] = operand(d_out, "d_out", p, reachable), p.b[0] = operand(w2, "w2", p, reachable);
  STD_TORCH_CHECK(!p.a[0].transposed && !p.b[0].transposed,
                  "feed_forward: the rows of d_out and w2 must be contiguous");
  const auto panel = [&](const Tensor& t, const char* name) {
    const Matrix m = operand(t, name, p, reachable);
    STD_TORCH_CHECK(!m.transposed && m.rows == p.rows && m.columns == p.columns,
                    "feed_forward: ", name, " must be (", p.rows, ", ", p.columns,
                    "), its rows contiguous");
    return m;
  };
  f.pre = panel(pre, "pre");
  if (gate) f.gate = panel(*gate, "gate");
  STD_TORCH_CHECK(gate || (!d_gate && !gate_bias_partials), "feed_forward: a gradient of no gate");
  f.activation = activation_of(activation),
  f.dropout = dropout_of(dropout_seed, row_start, column_start, dropout_p, reachable);
  f.d_pre = result_of(d_pre, "d_pre", p, reachable),
  f.d_gate = result_of(d_gate, "d_gate", p, reachable);
  f.hidden = result_of(hidden, "hidden", p, reachable);
  f.b1_partials = parts_of(b1_partials, "b1_partials", p, reachable);
  f.gate_bias_partials = parts_of(gate_bias_partials, "gate_bias_partials", p, reachable);
  const DeviceGuard guard(device);
  sm90_d_hidden(f, planned(p), reinterpret_cast<void*>(stream));
}

std::vector<std::string> feed_forward_activations() {
  return {pt::kActivationNames.begin(), pt::kActivationNames.end()};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(
      PT_EDGE_OP("hidden_fwd(Tensor x, Tensor w1, Tensor? gate_weight, Tensor? b1, Tensor? "
                 "gate_bias, Tensor? dropout_seed, "
                 "Tensor(a!)? hidden, Tensor(b!)? pre, Tensor(c!)? gate, int activation, int "
                 "row_start, int column_start, "
                 "float dropout_p, int device, int stream) -> ()"));
  m.def(
      PT_EDGE_OP("hidden_bwd(Tensor d_out, Tensor w2, Tensor pre, Tensor? gate, Tensor? "
                 "dropout_seed, Tensor(a!)? d_pre, "
                 "Tensor(b!)? d_gate, Tensor(c!)? hidden, Tensor(d!)? b1_partials, Tensor(e!)? "
                 "gate_bias_partials, int activation, int row_start, "
                 "int column_start, float dropout_p, int device, int stream) -> ()"));
  m.def(PT_EDGE_OP("feed_forward_activations() -> str[]"));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, PT_EDGE_KEY, m) {
  m.impl(PT_EDGE_OP("hidden_fwd"), TORCH_BOX(&hidden_fwd));
  m.impl(PT_EDGE_OP("hidden_bwd"), TORCH_BOX(&hidden_bwd));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CompositeExplicitAutograd, m) {
  m.impl(PT_EDGE_OP("feed_forward_activations"), TORCH_BOX(&feed_forward_activations));
}
