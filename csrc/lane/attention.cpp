// pt.attention: the lowering of ops/attention.py and ops/_backends/cpu/attention.py, for arguments that need none of their conversions.
#include "attention.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

namespace pt::lane {
namespace {

#define TERMS                                                                                                                           \
  const Maybe &mask, const Maybe &bias, const Maybe &slopes, const Maybe &table, const Maybe &starts, const Maybe &query_lengths,       \
      const Maybe &key_lengths, const Maybe &prefix_lengths, const Maybe &query_segments, const Maybe &key_segments, const Maybe &cu_q, \
      const Maybe &cu_k, const Maybe &seed, bool bidirectional, int64_t align, int64_t left, int64_t right, int64_t query_start,        \
      int64_t key_start, int64_t max_q, int64_t max_k, double scale, double softcap, double dropout_p
using Forward = void(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& out, const Tensor& lse, TERMS);
using Backward = void(const Tensor& grad_out, const Maybe& grad_lse, const Tensor& query, const Tensor& key, const Tensor& value,
                      const Tensor& out, const Tensor& lse, TERMS, const Maybe& dq, const Maybe& dk, const Maybe& dv, const Maybe& dmask,
                      const Maybe& dbias, const Maybe& dslopes, const Maybe& dtable);
#undef TERMS

// The arguments that forward and backward share.
template <class F>
void with_terms(const Attention::Inputs& t, const Attention::Numbers& n, const F& f) {
  using A = Attention;
  const Maybe none;
  f(maybe(t[A::kMask]), maybe(t[A::kBias]), none, none, none, maybe(t[A::kQueryLengths]), maybe(t[A::kKeyLengths]),
    maybe(t[A::kPrefixLengths]), maybe(t[A::kQuerySegments]), maybe(t[A::kKeySegments]), none, none, maybe(t[A::kSeed]), false, n.align,
    n.left, n.right, 0, 0, t[A::kQuery].size(2), t[A::kKey].size(2), n.scale, n.softcap, n.dropout_p);
}

}  // namespace

Attention::Outputs Attention::forward(const Inputs& t, const Numbers& n, bool) {
  static const auto raw = raw_op<Forward>("pytransformer_C::attention_fwd");
  const Tensor &query = t[kQuery], &value = t[kValue];
  const Tensor out = empty_in_order(query, {query.size(0), query.size(1), query.size(2), value.size(3)});
  const Tensor lse = empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(work_dtype(query)));
  const Tensor q = last_contiguous(query), k = last_contiguous(t[kKey]), v = last_contiguous(value);
  with_terms(t, n, [&](const auto&... terms) { raw.call(q, k, v, out, lse, terms...); });
  return {out, lse};
}

variable_list Attention::backward(const Inputs& t, const Saved& saved, const Numbers& n, const variable_list& grads,
                                  const std::vector<bool>& wanted) {
  static const auto raw = raw_op<Backward>("pytransformer_C::attention_bwd");
  const auto& [out, lse] = saved;
  const Tensor grad_out = grads[0].defined() ? last_contiguous(grads[0]) : at::zeros_like(out);
  const Tensor q = last_contiguous(t[kQuery]), k = last_contiguous(t[kKey]), v = last_contiguous(t[kValue]), o = last_contiguous(out);
  // Gradients of terms that are added to scores are summed in float32, whatever their dtype: the kernel adds into zeros.
  variable_list results(kDifferentiable), sums(kDifferentiable);
  for (size_t i = 0; i < kDifferentiable; i++) {
    if (!wanted[i]) continue;
    if (i < kMask) results[i] = empty_in_order(t[i]);
    else sums[i] = at::zeros(t[i].sizes(), t[i].options().dtype(lse.scalar_type()));
  }
  with_terms(t, n, [&](const auto&... terms) {
    raw.call(grad_out, maybe(grads[1]), q, k, v, o, lse, terms..., maybe(results[kQuery]), maybe(results[kKey]), maybe(results[kValue]),
             maybe(sums[kMask]), maybe(sums[kBias]), Maybe(), Maybe());
  });
  for (size_t i = kMask; i < kDifferentiable; i++) {
    if (!wanted[i]) continue;
    const bool ready = sums[i].scalar_type() == t[i].scalar_type() && t[i].is_contiguous();
    results[i] = ready ? sums[i] : empty_in_order(t[i]).copy_(sums[i]);
  }
  return results;
}

variable_list Attention::tensors(const Inputs& t) {
  variable_list all(t.begin(), t.end());
  all.insert(all.begin() + kBias + 1, 2, Tensor());  // slopes, table
  return all;
}

py::tuple Attention::others(const Numbers& n) {
  static constexpr const char* kCausal[] = {"none", "top_left", "bottom_right"};
  return py::make_tuple(false, 0, kCausal[n.align], n.left, n.right, 0, 0, n.scale, n.softcap, n.dropout_p, n.deterministic, py::none(),
                        false);
}

bool Attention::fits(Inputs& t, Numbers& n) {
  const Tensor &query = t[kQuery], &key = t[kKey], &value = t[kValue];
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4 || key.size(1) == 0) return false;
  constexpr int64_t kMaxHead = 512;  // of the kernels: found out here, before a seed is drawn
  for (int64_t size : {query.size(3), value.size(3)})
    if (size == 0 || size > kMaxHead) return false;
  if (t[kBias].defined() && t[kBias].scalar_type() == at::kBool) return false;
  if (!(n.dropout_p >= 0 && n.dropout_p <= 1) || (t[kPrefixLengths].defined() && !n.align)) return false;
  const auto dtype = query.scalar_type();
  if (at::autocast::is_autocast_enabled(at::kCPU) && dtype != at::kDouble && dtype != at::autocast::get_autocast_dtype(at::kCPU))
    return false;
  for (Tensor* term : {&t[kMask], &t[kBias]})
    while (term->defined() && term->dim() < 4) *term = term->unsqueeze(0);
  if (std::isnan(n.scale)) n.scale = std::pow(double(query.size(3)), -0.5);
  if (n.dropout_p > 0 && !t[kSeed].defined()) t[kSeed] = at::randint(INT64_MIN, INT64_MAX, {}, at::kLong);
  return true;
}

PyObject* attention_entry(PyObject*, PyObject* const* a, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  using A = Attention;
  if (count != 20 || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  A::Inputs t;
  A::Numbers n;
  t[A::kQuery] = read.tensor(a[0]), t[A::kKey] = read.tensor(a[1]), t[A::kValue] = read.tensor(a[2]);
  t[A::kMask] = read.tensor_or_none(a[3]);
  if (a[4] != Py_None) {
    n.align = PyUnicode_Check(a[4]) ? 1 + !PyUnicode_CompareWithASCIIString(a[4], "bottom_right") : 0;
    read.require(n.align == 2 || (n.align == 1 && !PyUnicode_CompareWithASCIIString(a[4], "top_left")));
  }
  if (a[5] != Py_None) {
    read.require(PyTuple_CheckExact(a[5]) && PyTuple_GET_SIZE(a[5]) == 2);
    for (int side : {0, 1}) {
      PyObject* given = read ? PyTuple_GET_ITEM(a[5], side) : Py_None;
      if (given != Py_None) (side ? n.right : n.left) = read.natural(given);
    }
  }
  for (int i = 0; i < 5; i++) t[A::kQueryLengths + i] = read.tensor_or_none(a[6 + i]);
  t[A::kBias] = read.tensor_or_none(a[11]);
  if (a[12] != Py_None) n.softcap = read.number(a[12]), read.require(n.softcap > 0);
  if (a[13] != Py_None) n.scale = read.number(a[13]);
  n.dropout_p = read.number(a[14]);
  if (n.dropout_p != 0) t[A::kSeed] = read.tensor_or_none(a[15]), read.require(!t[A::kSeed].defined() || t[A::kSeed].dim() == 0);
  const bool return_lse = read.boolean(a[16]);
  n.deterministic = read.boolean(a[17]);
  read.no_other_backend(a[18]);
  read.boolean(a[19]);  // strict: what runs here is no fallback
  if (!read) Py_RETURN_NOTIMPLEMENTED;
  std::optional<A::Outputs> outputs;
  {
    const WithoutGil others_run;
    if (A::fits(t, n)) outputs = run<A>(t, n, return_lse ? 2 : 1);
  }
  if (!outputs) Py_RETURN_NOTIMPLEMENTED;
  auto& [out, lse] = *outputs;
  if (!return_lse) return THPVariable_Wrap(std::move(out));
  return Py_BuildValue("(NN)", THPVariable_Wrap(std::move(out)), THPVariable_Wrap(std::move(lse)));
  END_HANDLE_TH_ERRORS
}

}  // namespace pt::lane
