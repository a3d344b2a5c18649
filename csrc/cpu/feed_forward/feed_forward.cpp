// SPDX-License-Identifier: Apache-2.0
// Feed-forward on the CPU, binding: check the kernels' requirements and fill in the problem.
//
// Matrices are contiguous, of one dtype and not empty; biases and their gradients are float32
// (float64 for float64): see pytransformer/ops/_backends/cpu/feed_forward.py.
#include "cpu/feed_forward/problem.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/core/binding.h"

PT_DECLARE_KERNELS(FeedForwardKernels, feed_forward_kernels);

namespace {

using pt::MaybeTensor;
using pt::ScalarType;
using pt::Tensor;

constexpr const char* kOp = "feed_forward";

pt::FeedForwardProblem problem_of(const Tensor& x, const Tensor& w1, const MaybeTensor& gate_weight,
                                  const Tensor& w2, const MaybeTensor& seed, int64_t activation,
                                  int64_t row_start, int64_t column_start, double dropout_p) {
  pt::FeedForwardProblem p{};
  STD_TORCH_CHECK(x.dim() == 2 && w1.dim() == 2 && w2.dim() == 2,
                  "feed_forward: x, w1 and w2 must be matrices");
  const pt::binding::Binding binding(kOp, x);
  p.dtype = pt::dtype_of(x, "feed_forward: x", pt::Float64::taken);
  p.rows = x.size(0), p.in = x.size(1), p.hidden = w1.size(0), p.out = w2.size(0);
  pt::check_sizes(kOp, {p.rows, p.in, p.hidden, p.out});
  p.x = binding.matrix(x, "x", p.rows, p.in);
  p.w1 = binding.matrix(w1, "w1", p.hidden, p.in);
  p.gate_weight = binding.matrix(gate_weight, "gate_weight", p.hidden, p.in);
  p.w2 = binding.matrix(w2, "w2", p.out, p.hidden);
  STD_TORCH_CHECK(activation >= 0 && activation < int64_t(pt::kActivationNames.size()),
                  "feed_forward: unknown activation ", activation);
  p.activation = pt::Activation(activation);
  p.row_start = row_start, p.column_start = column_start,
  p.drop_threshold = pt::drop_threshold_of(dropout_p);
  pt::check_start(kOp, row_start, "row_start"), pt::check_start(kOp, column_start, "column_start");
  if (p.drop_threshold) p.seed = pt::seed_of(kOp, seed);
  p.threads = pt::pool_threads();
  return p;
}

void feed_forward_fwd(Tensor x, Tensor w1, MaybeTensor b1, MaybeTensor gate_weight,
                      MaybeTensor gate_bias, Tensor w2, MaybeTensor b2, MaybeTensor dropout_seed,
                      MaybeTensor pre, MaybeTensor gate, MaybeTensor out, int64_t activation,
                      int64_t row_start, int64_t column_start, double dropout_p) {
  pt::FeedForwardProblem p = problem_of(x, w1, gate_weight, w2, dropout_seed, activation, row_start,
                                        column_start, dropout_p);
  const pt::binding::Binding binding(kOp, x);
  p.b1 = binding.vector(b1, "b1", p.hidden);
  p.gate_bias = binding.vector(gate_bias, "gate_bias", p.hidden);
  p.b2 = binding.vector(b2, "b2", p.out);
  pt::FeedForwardForward f;
  f.pre = binding.target(pre, "pre", p.rows, p.hidden);
  f.gate = binding.target(gate, "gate", p.rows, p.hidden);
  f.y = binding.target(out, "out", p.rows, p.out);
  STD_TORCH_CHECK(p.gate_weight || (!p.gate_bias && !f.gate), kOp,
                  ": gate and gate_bias need a gate_weight");
  PT_SELECT(feed_forward_kernels).forward(p, f);
}

// Linear, x weight^T + bias. weight or its transpose is contiguous.
struct Linear {
  pt::binding::Binding binding;
  pt::FeedForwardProblem p{};
  pt::LinearWeight weight{};

  explicit Linear(const Tensor& w) : binding("linear", w) {
    STD_TORCH_CHECK(w.dim() == 2, "linear: weight must be a matrix");
    pt::check_sizes("linear", {w.size(0), w.size(1)});
    p.dtype = pt::dtype_of(w, "linear: weight", pt::Float64::taken);
    p.rows = 1, p.hidden = w.size(1), p.out = w.size(0), p.threads = pt::pool_threads();
    weight.along_k = !w.is_contiguous();
    p.w2 = weight.along_k ? binding.transposed(w, "weight", p.out, p.hidden)
                          : binding.matrix(w, "weight", p.out, p.hidden);
  }
  Linear(const Tensor& x, const Tensor& w) : Linear(w) {
    STD_TORCH_CHECK(x.dim() == 2, "linear: x must be a matrix");
    pt::check_sizes("linear", {x.size(0)});
    p.rows = x.size(0), p.x = binding.matrix(x, "x", p.rows, p.hidden);
  }
  void* panels(const Tensor& t) const {
    const int64_t bytes = PT_SELECT(feed_forward_kernels).linear_panels_bytes(p);
    STD_TORCH_CHECK(t.dim() == 1 && t.is_contiguous() && t.scalar_type() == ScalarType::Byte &&
                        t.numel() == bytes,
                    "linear: panels must be ", bytes, " contiguous bytes");
    void* data = pt::write_address("linear", t, "panels");
    STD_TORCH_CHECK(reinterpret_cast<intptr_t>(data) % 64 == 0,
                    "linear: panels must be aligned to 64 bytes");
    return data;
  }
};

void feed_forward_linear(Tensor x, Tensor weight, MaybeTensor bias, MaybeTensor panels,
                         Tensor out) {
  Linear linear(x, weight);
  linear.p.b2 = linear.binding.vector(bias, "bias", linear.p.out);
  if (panels) linear.weight.panels = linear.panels(*panels);
  void* y = linear.binding.target(out, "out", linear.p.rows, linear.p.out);
  PT_SELECT(feed_forward_kernels).linear(linear.p, linear.weight, y);
}

void feed_forward_linear_bwd(Tensor d_out, Tensor x, Tensor weight, MaybeTensor dx, MaybeTensor dw,
                             MaybeTensor db) {
  const Linear linear(x, weight);
  const auto& [binding, p, w] = linear;
  pt::LinearBackward f;
  f.dy = binding.matrix(d_out, "d_out", p.rows, p.out);
  f.dx = binding.target(dx, "dx", p.rows, p.hidden);
  f.dw2 = !dw         ? nullptr
          : w.along_k ? binding.transposed(*dw, "dw", p.out, p.hidden)
                      : binding.matrix(*dw, "dw", p.out, p.hidden);
  f.db2 = binding.vector(db, "db", p.out);
  PT_SELECT(feed_forward_kernels).linear_backward(p, w, f);
}

// Pack a weight for feed_forward_linear. The layout depends on the active instruction set.
void feed_forward_linear_pack(Tensor weight, Tensor panels) {
  const Linear linear(weight);
  PT_SELECT(feed_forward_kernels).linear_pack(linear.p, linear.weight, linear.panels(panels));
}

int64_t feed_forward_linear_panels(Tensor weight) {
  return PT_SELECT(feed_forward_kernels).linear_panels_bytes(Linear(weight).p);
}

void feed_forward_bwd(Tensor d_out, Tensor x, Tensor w1, MaybeTensor gate_weight, Tensor w2,
                      Tensor pre, MaybeTensor gate, MaybeTensor dropout_seed, Tensor hidden,
                      Tensor d_pre, MaybeTensor d_gate, MaybeTensor dx, MaybeTensor dw1,
                      MaybeTensor db1, MaybeTensor dgate_weight, MaybeTensor dgate_bias,
                      MaybeTensor dw2, MaybeTensor db2, int64_t activation, int64_t row_start,
                      int64_t column_start, double dropout_p) {
  const pt::FeedForwardProblem p = problem_of(x, w1, gate_weight, w2, dropout_seed, activation,
                                              row_start, column_start, dropout_p);
  const pt::binding::Binding binding(kOp, x);
  pt::FeedForwardBackward f;
  f.dy = binding.matrix(d_out, "d_out", p.rows, p.out);
  f.pre = binding.matrix(pre, "pre", p.rows, p.hidden);
  f.gate = binding.matrix(gate, "gate", p.rows, p.hidden);
  f.h = binding.target(hidden, "hidden", p.rows, p.hidden);
  f.dpre = binding.target(d_pre, "d_pre", p.rows, p.hidden);
  f.dgate = binding.target(d_gate, "d_gate", p.rows, p.hidden);
  STD_TORCH_CHECK(!gate_weight || (f.gate && f.dgate), "feed_forward: gate and d_gate are missing");
  f.dx = binding.target(dx, "dx", p.rows, p.in);
  f.dw1 = binding.target(dw1, "dw1", p.hidden, p.in);
  f.dgate_weight = binding.target(dgate_weight, "dgate_weight", p.hidden, p.in);
  f.dw2 = binding.target(dw2, "dw2", p.out, p.hidden);
  f.db1 = binding.vector(db1, "db1", p.hidden);
  f.dgate_bias = binding.vector(dgate_bias, "dgate_bias", p.hidden);
  f.db2 = binding.vector(db2, "db2", p.out);
  STD_TORCH_CHECK(p.gate_weight || (!f.gate && !f.dgate && !f.dgate_weight && !f.dgate_bias), kOp,
                  ": gate, d_gate and the gradients of a gate need a gate_weight");
  PT_SELECT(feed_forward_kernels).backward(p, f);
}

// Return the scratch bytes of forward and backward. Only the dtype of x is read.
int64_t feed_forward_scratch(Tensor x, int64_t rows, int64_t in, int64_t hidden, int64_t out,
                             bool gated) {
  pt::check_sizes(kOp, {rows, in, hidden, out});
  pt::FeedForwardProblem p{};
  p.dtype = pt::dtype_of(x, "feed_forward: x", pt::Float64::taken);
  p.rows = rows, p.in = in, p.hidden = hidden, p.out = out, p.threads = pt::pool_threads();
  static const char any = 0;  // placeholder for each operand; never read
  p.x = p.w1 = p.w2 = &any, p.gate_weight = gated ? &any : nullptr;
  return PT_SELECT(feed_forward_kernels).scratch_bytes(p);
}

// Return a digest of one cache line of each of the weight's rows in memory, at changing columns.
int64_t feed_forward_linear_digest(Tensor weight) {
  constexpr int64_t kLine = 64, kWords = kLine / 8;
  constexpr int64_t kAhead = 24;  // rows: their misses overlap, else each costs its full latency
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15;
  const Linear linear(weight);
  const int64_t rows = weight.size(linear.weight.along_k ? 1 : 0),
                bytes = weight.numel() / rows * int64_t(weight.element_size()),
                lines = (bytes + kLine - 1) / kLine;
  const auto* data = static_cast<const char*>(linear.p.w2);
  uint64_t digest = 0;
  int64_t line = 0, ahead = kAhead % lines;
  const auto following = [&](int64_t l) { return l + 1 == lines ? 0 : l + 1; };
  for (int64_t r = 0; r < rows; r++, line = following(line), ahead = following(ahead)) {
    if (r + kAhead < rows) __builtin_prefetch(data + (r + kAhead) * bytes + ahead * kLine);
    const char* from = data + r * bytes + line * kLine;
    const int64_t left = bytes - line * kLine;
    uint64_t words[kWords] = {}, sum = uint64_t(r);
    if (left >= kLine) std::memcpy(words, from, kLine);
    else std::memcpy(words, from, left);
    for (int64_t i = 0; i < kWords; i++) sum += (words[i] ^ (words[i] >> 29)) * (kFactor + 2 * i);
    digest = (digest ^ (digest >> 31) ^ sum) * kFactor;
  }
  return int64_t(digest);
}

std::vector<std::string> feed_forward_activations() {
  return {pt::kActivationNames.begin(), pt::kActivationNames.end()};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(
      "feed_forward_fwd(Tensor x, Tensor w1, Tensor? b1, Tensor? gate_weight, Tensor? gate_bias, "
      "Tensor w2, Tensor? b2, "
      "Tensor? dropout_seed, Tensor(a!)? pre, Tensor(b!)? gate, Tensor(c!)? out, int activation, "
      "int row_start, "
      "int column_start, float dropout_p) -> ()");
  m.def(
      "feed_forward_bwd(Tensor d_out, Tensor x, Tensor w1, Tensor? gate_weight, Tensor w2, Tensor "
      "pre, Tensor? gate, "
      "Tensor? dropout_seed, Tensor(a!) hidden, Tensor(b!) d_pre, Tensor(c!)? d_gate, Tensor(d!)? "
      "dx, Tensor(e!)? dw1, "
      "Tensor(f!)? db1, Tensor(g!)? dgate_weight, Tensor(h!)? dgate_bias, Tensor(i!)? dw2, "
      "Tensor(j!)? db2, int activation, int row_start, "
      "int column_start, float dropout_p) -> ()");
  m.def(
      "feed_forward_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? panels, Tensor(a!) out) "
      "-> ()");
  m.def(
      "feed_forward_linear_bwd(Tensor d_out, Tensor x, Tensor weight, Tensor(a!)? dx, "
      "Tensor(b!)? dw, Tensor(c!)? db) -> ()");
  m.def("feed_forward_linear_pack(Tensor weight, Tensor(a!) panels) -> ()");
  m.def("feed_forward_linear_panels(Tensor weight) -> int");  // bytes
  m.def("feed_forward_linear_digest(Tensor weight) -> int");
  m.def("feed_forward_activations() -> str[]");  // in the order of their numbers
  m.def(
      "feed_forward_scratch(Tensor x, int rows, int width, int hidden, int columns, bool gated) -> "
      "int");
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CPU, m) {
  m.impl("feed_forward_fwd", TORCH_BOX(&feed_forward_fwd));
  m.impl("feed_forward_bwd", TORCH_BOX(&feed_forward_bwd));
  m.impl("feed_forward_linear", TORCH_BOX(&feed_forward_linear));
  m.impl("feed_forward_linear_bwd", TORCH_BOX(&feed_forward_linear_bwd));
  m.impl("feed_forward_linear_pack", TORCH_BOX(&feed_forward_linear_pack));
  m.impl("feed_forward_linear_panels", TORCH_BOX(&feed_forward_linear_panels));
  m.impl("feed_forward_linear_digest", TORCH_BOX(&feed_forward_linear_digest));
  m.impl("feed_forward_scratch", TORCH_BOX(&feed_forward_scratch));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CompositeExplicitAutograd, m) {
  m.impl("feed_forward_activations", TORCH_BOX(&feed_forward_activations));
}
