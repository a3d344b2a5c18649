// SPDX-License-Identifier: Apache-2.0
// pt.feed_forward, and nn.linear without gradient: the lowering of nn/linear.py,
// ops/feed_forward.py and ops/_backends/cpu/feed_forward.py.
#include <ATen/EmptyTensor.h>

#include "../common/activation.h"
#include "reader.h"

namespace pt::fast_path {
namespace {

struct FeedForward {
  static constexpr const char* kName = "feed_forward";
  enum { kX, kW1, kB1, kW2, kB2, kGateWeight, kGateBias, kSeed, kInputs };
  static constexpr size_t kDifferentiable = 7, kSaved = 2, kGrads = 1;
  using Inputs = std::array<Tensor, kInputs>;
  using Outputs = std::array<Tensor, 3>;  // out, and the pre-activations pre and gate
  using Saved = std::array<Tensor, 2>;

  struct Numbers {
    int64_t activation = 0;
    double dropout_p = 0;
    bool save = true;

    template <class F>
    void collect(const F& f) const {
      f(activation), f(dropout_p), f(save);
    }
  };

  using Forward = void(const Tensor& x, const Tensor& w1, const Maybe& b1, const Maybe& gate_weight,
                       const Maybe& gate_bias, const Tensor& w2, const Maybe& b2, const Maybe& seed,
                       const Maybe& pre, const Maybe& gate, const Maybe& out, int64_t activation,
                       int64_t row_start, int64_t column_start, double dropout_p);
  using Backward = void(const Tensor& d_out, const Tensor& x, const Tensor& w1,
                        const Maybe& gate_weight, const Tensor& w2, const Tensor& pre,
                        const Maybe& gate, const Maybe& seed, const Tensor& hidden,
                        const Tensor& d_pre, const Maybe& d_gate, const Maybe& dx, const Maybe& dw1,
                        const Maybe& db1, const Maybe& dgate_weight, const Maybe& dgate_bias,
                        const Maybe& dw2, const Maybe& db2, int64_t activation, int64_t row_start,
                        int64_t column_start, double dropout_p);

  static bool is_bias(size_t i) { return i == kB1 || i == kB2 || i == kGateBias; }

  static bool complete(Inputs&, Numbers&) { return true; }
  static bool fits(const Inputs& t, const Numbers&) {
    const Tensor& x = t[kX];
    if (x.dim() == 0 || !floating(x) || autocast_casts(x) ||
        (t[kGateBias].defined() && !t[kGateWeight].defined()))
      return false;
    for (size_t i : {kX, kW1, kW2, kGateWeight}) {
      if (!t[i].defined()) continue;
      if (!t[i].numel() || t[i].scalar_type() != x.scalar_type() || (i != kX && t[i].dim() != 2))
        return false;
    }
    const int64_t hidden = t[kW1].size(0);
    if (t[kW1].size(1) != x.size(-1) || t[kW2].size(1) != hidden) return false;
    if (t[kGateWeight].defined() && t[kGateWeight].sizes() != t[kW1].sizes()) return false;
    for (size_t i : {kB1, kB2, kGateBias}) {
      const Tensor& b = t[i];
      if (b.defined() &&
          (!floating(b) || b.dim() != 1 || b.size(0) != (i == kB2 ? t[kW2].size(0) : hidden)))
        return false;
    }
    return true;
  }

  static void run_forward(const Inputs& t, const Numbers& n, const Maybe& pre, const Maybe& gate,
                          const Maybe& out) {
    static const auto raw = raw_op<Forward>("pytransformer_C::feed_forward_fwd");
    const Tensor x = matrix(t[kX]);
    const auto work = work_dtype(x);
    raw.call(x, matrix(t[kW1]), vector(t[kB1], work), maybe_matrix(t[kGateWeight]),
             vector(t[kGateBias], work), matrix(t[kW2]), vector(t[kB2], work), maybe(t[kSeed]), pre,
             gate, out, n.activation, 0, 0, n.dropout_p);
  }

  static Outputs forward(const Inputs& t, const Numbers& n, bool needs_gradient) {
    const Tensor& x = t[kX];
    c10::DimVector shape(x.sizes());
    shape.back() = t[kW2].size(0);
    Outputs results{empty_in_order(x, shape)};
    const Tensor &out = results[0], to = out.is_contiguous() ? out : empty(shape, x.options());
    shape.back() = t[kW1].size(0);
    if (needs_gradient && n.save) {
      results[1] = empty(shape, x.options());
      if (t[kGateWeight].defined()) results[2] = empty(shape, x.options());
    }
    run_forward(t, n, maybe_matrix(results[1]), maybe_matrix(results[2]), matrix(to));
    if (!to.is_same(out)) out.copy_(to);
    return results;
  }

  // Return uninitialized matrices that live until the thread's next call, like _scratch of the
  // Python backend.
  static std::array<Tensor, 3> scratch(size_t matrices, int64_t rows, int64_t columns,
                                       const at::TensorOptions& options) {
    static thread_local Tensor held;
    std::array<Tensor, 3> found;
    const int64_t size = (rows * columns * int64_t(options.dtype().itemsize()) + 63) / 64 * 64,
                  all = size * int64_t(matrices);
    if (all <= limits.held_bytes && (!held.defined() || held.numel() < all))
      held = at::detail::empty_cpu({all}, at::kByte);
    for (size_t i = 0; i < matrices; i++) {
      if (all > limits.held_bytes) {
        found[i] = empty({rows, columns}, options);
        continue;
      }
      const auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(held.storage()),
                                                             held.key_set(), options.dtype());
      impl->set_storage_offset(int64_t(i) * size / int64_t(options.dtype().itemsize()));
      impl->set_sizes_contiguous({rows, columns});
      found[i] = Tensor(impl);
    }
    return found;
  }

  static variable_list backward(const Inputs& t, const Saved& saved, const Numbers& n,
                                const variable_list& grads, const std::vector<bool>& wanted) {
    static const auto raw = raw_op<Backward>("pytransformer_C::feed_forward_bwd");
    const Tensor x = matrix(t[kX]);
    const bool gated = t[kGateWeight].defined();
    const auto [hidden, d_pre, d_gate] =
        scratch(gated ? 3 : 2, x.size(0), t[kW1].size(0), x.options());
    if (!n.save) run_forward(t, n, d_pre, maybe(d_gate), std::nullopt);
    const Tensor pre = n.save ? matrix(saved[0]) : d_pre;
    const Maybe gate = n.save ? maybe_matrix(saved[1]) : maybe(d_gate);
    const auto work = work_dtype(x);
    variable_list results(kDifferentiable);
    std::array<Maybe, kDifferentiable> targets;
    for (size_t i = 0; i < kDifferentiable; i++) {
      if (!wanted[i]) continue;
      results[i] = is_bias(i) ? vector_target(t[i], work) : matrix_target(t[i]);
      targets[i] = is_bias(i) ? results[i] : matrix(results[i]);
    }
    raw.call(matrix(grads[0]), x, matrix(t[kW1]), maybe_matrix(t[kGateWeight]), matrix(t[kW2]), pre,
             gate, maybe(t[kSeed]), hidden, d_pre, maybe(d_gate), targets[kX], targets[kW1],
             targets[kB1], targets[kGateWeight], targets[kGateBias], targets[kW2], targets[kB2],
             n.activation, 0, 0, n.dropout_p);
    for (size_t i = 0; i < kDifferentiable; i++)
      if (wanted[i]) results[i] = deliver(results[i], t[i]);
    return results;
  }

  static variable_list tensors(const Inputs& t) { return {t.begin(), t.end()}; }
  static py::tuple others(const Numbers& n) {
    return py::make_tuple(kActivationNames.begin()[n.activation], 0, 0, n.dropout_p, n.save,
                          py::none(), false);
  }
};

// x weight^T + bias of up to max_rows rows, without gradient: infer of nn/linear.py. Undefined if
// the call does not qualify.
Tensor linear_forward(const Tensor& x, const Tensor& weight, const Tensor& bias,
                      const Tensor& panels, int64_t max_rows) {
  static const auto raw =
      raw_op<void(const Tensor& x, const Tensor& weight, const Maybe& bias, const Maybe& panels,
                  const Tensor& out)>("pytransformer_C::feed_forward_linear");
  if (!x.is_cpu() || !floating(x) || autocast_casts(x) || !x.numel()) return {};
  if (x.numel() > max_rows * weight.size(1)) return {};
  if (x.scalar_type() != weight.scalar_type() || x.size(-1) != weight.size(1) || !weight.size(0))
    return {};
  if (!weight.is_contiguous() && (weight.stride(0) != 1 || weight.stride(1) != weight.size(0)))
    return {};
  if (bias.defined() &&
      (bias.scalar_type() != x.scalar_type() || bias.sizes() != weight.sizes().slice(0, 1)))
    return {};
  const at::AutoDispatchBelowADInplaceOrView below;
  c10::DimVector shape(x.sizes());
  shape.back() = weight.size(0);
  const Tensor out = empty(shape, x.options());
  raw.call(matrix(x), weight, vector(bias, work_dtype(x)), maybe(panels), matrix(out));
  return out;
}

// Return a matrix's transpose without the dispatcher.
Tensor transposed(const Tensor& t) {
  const auto seen = t.unsafeGetTensorImpl()->shallow_copy_and_detach(
      c10::VariableVersion(), /*allow_tensor_metadata_change=*/true);
  seen->set_sizes_and_strides(at::IntArrayRef{t.size(1), t.size(0)},
                              at::IntArrayRef{t.stride(1), t.stride(0)});
  return Tensor(seen);
}

}  // namespace

// Arguments: x, weight, bias, panels, the max number of rows, and a flag for a (k, n) weight.
FAST_PATH_ENTRY(linear) {
  HANDLE_TH_ERRORS
  if (count != 6 || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  const Tensor x = read.tensor(a[0]), weight = read.tensor(a[1]), bias = read.tensor_or_none(a[2]),
               panels = read.tensor_or_none(a[3]);
  const int64_t max_rows = read.natural(a[4]);
  const bool along_k = read.boolean(a[5]);
  read.require(!needs_gradient({x, weight, bias}));
  if (!read || x.dim() == 0 || weight.dim() != 2) Py_RETURN_NOTIMPLEMENTED;
  Tensor out;
  {
    const WithoutGil others_run;
    out = linear_forward(x, along_k ? transposed(weight) : weight, bias, panels, max_rows);
  }
  if (!out.defined()) Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(std::move(out));
  END_HANDLE_TH_ERRORS
}

FAST_PATH_ENTRY(feed_forward) {
  HANDLE_TH_ERRORS
  using F = FeedForward;
  if (count != 13 || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  F::Inputs t{read.tensor(a[0]), read.tensor(a[1]), read.tensor_or_none(a[2]), read.tensor(a[3]),
              read.tensor_or_none(a[4])};
  F::Numbers n;
  n.activation = read.choice(a[5], kActivationNames);
  t[F::kGateWeight] = read.tensor_or_none(a[6]), t[F::kGateBias] = read.tensor_or_none(a[7]);
  n.dropout_p = read.number(a[8]);
  t[F::kSeed] = read.seed(a[9], n.dropout_p);
  n.save = !read.boolean(a[10]);
  return finish<F>(read, t, n, 1, 1, read.route(a[11], a[12]),
                   [&] { return Given{a, count}.tuple(); });
  END_HANDLE_TH_ERRORS
}

}  // namespace pt::fast_path
