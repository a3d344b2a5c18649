// SPDX-License-Identifier: Apache-2.0
// pt.attention and pt.attention_varlen: the lowering of ops/attention.py, ops/attention_varlen.py
// and ops/_backends/cpu/attention.py, for arguments that need no conversion.
#include "attention.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <type_traits>

#include "../common/attention_arguments.h"
#include "reader.h"

namespace pt::fast_path {
namespace {

using MaybeTensor = Maybe;
// The dispatcher takes optional tensors by reference.
template <class T>
using Passed = std::conditional_t<std::is_same_v<T, MaybeTensor>, const MaybeTensor&, T>;
#define PT_PASSED(type, name, schema) , Passed<type>
using AttentionForward = void(const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& out,
                              const Tensor& lse PT_CPU_ATTENTION_ARGUMENTS(PT_PASSED));
using AttentionBackward = void(const Tensor& grad_out, const Maybe& grad_lse, const Tensor& query,
                               const Tensor& key, const Tensor& value, const Tensor& out,
                               const Tensor& lse PT_CPU_ATTENTION_ARGUMENTS(PT_PASSED),
                               const Maybe& dq, const Maybe& dk, const Maybe& dv,
                               const Maybe& dmask, const Maybe& dbias, const Maybe& dslopes,
                               const Maybe& dtable, const Maybe& dsinks);
#undef PT_PASSED

struct AttentionArguments {
  PT_CPU_ATTENTION_ARGUMENTS(PT_MEMBER)
};

// Return the arguments that forward and backward share.
template <class A>
AttentionArguments arguments(const typename A::Inputs& t, const AttentionNumbers& n) {
  const auto work = work_dtype(t[A::kQuery]);
  constexpr bool packed = A::kDim == 3;
  const Tensor& pages = pick<A::kPageTable>(t);
  AttentionArguments a{};
  a.mask = maybe(pick<A::kMask>(t)), a.bias = maybe(pick<A::kBias>(t));
  a.slopes = vector(t[A::kSlopes], work), a.sinks = vector(t[A::kSinks], work);
  a.table = vector(t[A::kTable], work), a.bucket_starts = maybe(t[A::kStarts]);
  a.query_lengths = maybe(pick<A::kQueryLengths>(t));
  a.key_lengths = maybe(pick<A::kKeyLengths>(t));
  a.prefix_lengths = maybe(pick<A::kPrefixLengths>(t));
  a.query_segments = maybe(pick<A::kQuerySegments>(t));
  a.key_segments = maybe(pick<A::kKeySegments>(t));
  a.cu_seqlens_q = maybe(pick<A::kCuQ>(t)), a.cu_seqlens_k = maybe(pick<A::kCuK>(t));
  a.page_table = maybe(pages), a.dropout_seed = maybe(t[A::kSeed]);
  a.align = n.align, a.left = n.left, a.right = n.right, a.global_keys = n.global_keys;
  a.num_queries = packed ? n.max_q : t[A::kQuery].size(2);
  a.num_keys = packed ? n.max_k : t[A::kKey].size(2) * (pages.defined() ? pages.size(1) : 1);
  a.scale = n.scale, a.softcap = n.softcap, a.dropout_p = n.dropout_p;
  a.bidirectional = n.bidirectional;
  return a;
}
#define PT_FIELD(type, name, schema) , a.name

}  // namespace

template <class W>
typename AttentionOp<W>::Outputs AttentionOp<W>::forward(const Inputs& t, const Numbers& n, bool) {
  static const auto raw = raw_op<AttentionForward>("pytransformer_C::attention_fwd");
  const Tensor &query = t[W::kQuery], &value = t[W::kValue];
  c10::DimVector shape(query.sizes());
  shape.back() = value.size(-1);
  const Tensor out = empty_in_order(query, shape);
  shape.pop_back();
  if (W::kDim == 3) std::swap(shape[0], shape[1]);
  const Tensor lse = empty(shape, query.options().dtype(work_dtype(query)));
  const Tensor q = last_contiguous(query), k = last_contiguous(t[W::kKey]),
               v = last_contiguous(value);
  const AttentionArguments a = arguments<AttentionOp>(t, n);
  raw.call(q, k, v, out, lse PT_CPU_ATTENTION_ARGUMENTS(PT_FIELD));
  return {out, lse};
}

template <class W>
variable_list AttentionOp<W>::backward(const Inputs& t, const Saved& saved, const Numbers& n,
                                       const variable_list& grads,
                                       const std::vector<bool>& wanted) {
  static const auto raw = raw_op<AttentionBackward>("pytransformer_C::attention_bwd");
  const auto& [out, lse] = saved;
  const Tensor grad_out = grads[0].defined() ? last_contiguous(grads[0]) : at::zeros_like(out);
  const Tensor q = last_contiguous(t[W::kQuery]), k = last_contiguous(t[W::kKey]),
               v = last_contiguous(t[W::kValue]), o = last_contiguous(out);
  // Sum gradients of additive terms in float32 whatever their dtype: the kernel adds into zeros.
  variable_list results(W::kDifferentiable);
  for (size_t i = 0; i < W::kDifferentiable; i++) {
    if (!wanted[i]) continue;
    results[i] = i <= W::kValue ? empty_in_order(t[i])
                                : at::zeros(t[i].sizes(), t[i].options().dtype(lse.scalar_type()));
  }
  const AttentionArguments a = arguments<AttentionOp>(t, n);
  raw.call(grad_out, maybe(grads[1]), q, k, v, o, lse PT_CPU_ATTENTION_ARGUMENTS(PT_FIELD),
           maybe(results[W::kQuery]), maybe(results[W::kKey]), maybe(results[W::kValue]),
           maybe(pick<W::kMask>(results)), maybe(pick<W::kBias>(results)),
           maybe(results[W::kSlopes]), maybe(results[W::kTable]), maybe(results[W::kSinks]));
  for (size_t i = W::kValue + 1; i < W::kDifferentiable; i++)
    if (wanted[i]) results[i] = deliver(results[i], t[i]);
  return results;
}

template <class W>
variable_list AttentionOp<W>::tensors(const Inputs& t) {
  variable_list all(t.begin(), t.begin() + W::kSeed + 1);
  if constexpr (W::kDim == 3)
    all = {t[W::kQuery],  t[W::kKey],   t[W::kValue], t[W::kCuQ],  t[W::kCuK],
           t[W::kSlopes], t[W::kTable], t[W::kSinks], t[W::kSeed], t[W::kKeyLengths]};
  else all.resize(all.size() + kBlockMask);
  all.push_back(t[W::kPageTable]);
  all.resize(all.size() + kScales);
  return all;
}

template <class W>
py::tuple AttentionOp<W>::others(const Numbers& n) {
  static constexpr const char* kCausal[] = {"none", "top_left", "bottom_right"};
  const auto all = [&](auto... between) {
    return py::make_tuple(between..., n.scale, n.softcap, n.dropout_p, n.deterministic, py::none(),
                          false);
  };
  const char* causal = kCausal[n.align];
  if constexpr (W::kDim == 3)
    return all(n.max_q, n.max_k, n.bidirectional, n.max_distance, causal, n.left, n.right,
               n.global_keys, 0, 0);
  else
    return all(n.bidirectional, n.max_distance, causal, n.left, n.right, n.global_keys, 0, 0, 0, 0);
}

template <class W>
bool AttentionOp<W>::complete(Inputs& t, Numbers& n) {
  const Tensor& query = t[W::kQuery];
  const int64_t key_dim = t[W::kPageTable].defined() ? 4 : W::kDim;
  if (query.dim() != W::kDim || t[W::kKey].dim() != key_dim || t[W::kValue].dim() != key_dim ||
      query.size(-1) == 0)
    return false;
  if constexpr (W::kDim == 4)
    for (Tensor* term : {&t[W::kMask], &t[W::kBias]})
      while (term->defined() && term->dim() < 4) *term = term->unsqueeze(0);
  if (std::isnan(n.scale)) n.scale = std::pow(double(query.size(-1)), -0.5);
  return true;
}

template <class W>
bool AttentionOp<W>::fits(const Inputs& t, const Numbers& n) {
  const Tensor &query = t[W::kQuery], &prefix = pick<W::kPrefixLengths>(t);
  // Limit of the kernels, checked before a seed is drawn.
  constexpr int64_t kMaxHead = 512;
  for (int64_t size : {query.size(-1), t[W::kValue].size(-1)})
    if (size == 0 || size > kMaxHead) return false;
  if (t[W::kKey].size(1) == 0 || !(n.dropout_p >= 0 && n.dropout_p <= 1)) return false;
  if ((prefix.defined() && !n.align) || autocast_casts(query)) return false;
  if constexpr (W::kDim == 4)
    if (t[W::kBias].defined() && t[W::kBias].scalar_type() == at::kBool) return false;
  return floating(t[W::kSlopes]) && floating(t[W::kTable]) && floating(t[W::kSinks]);
}

template struct AttentionOp<Padded>;
template struct AttentionOp<Packed>;

namespace {

// Return the bucket starts of ops/masks.py for a table's rows, direction and distance. The caller
// holds the GIL.
Tensor bucket_starts(int64_t buckets, bool bidirectional, int64_t max_distance) {
  static std::map<std::tuple<int64_t, bool, int64_t>, Tensor> known;
  const auto key = std::make_tuple(buckets, bidirectional, max_distance);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  if (known.size() >= 64) known.clear();
  const auto starts = py::cast<std::vector<int64_t>>(py::handle(fact("bucket_starts"))(
      py::int_(buckets), py::bool_(bidirectional), py::int_(max_distance)));
  const c10::InferenceMode usual(false);
  return known[key] = at::tensor(starts, at::kLong);
}

constexpr int64_t kMaxBuckets = 1 << 16;  // MAX_BUCKETS of ops/masks.py

// Read an AlibiBias or a RelativePositionBias: a value that contains a tensor.
template <class A>
void read_bias(Reader& read, PyObject* o, typename A::Inputs& t, AttentionNumbers& n) {
  const py::handle bias(o), type(reinterpret_cast<PyObject*>(Py_TYPE(o)));
  if (!read || o == Py_None) return;
  if (type.ptr() == fact("AlibiBias")) {
    t[A::kSlopes] = read.tensor(py::object(bias.attr("slopes")).ptr());
    return;
  }
  read.require(type.ptr() == fact("RelativePositionBias"));
  if (!read) return;
  Tensor& table = t[A::kTable];
  table = read.tensor(py::object(bias.attr("table")).ptr());
  n.bidirectional = read.boolean(py::object(bias.attr("bidirectional")).ptr());
  n.max_distance = read.natural(py::object(bias.attr("max_distance")).ptr());
  read.require(read && table.dim() == 2 && table.size(0) >= (n.bidirectional ? 4 : 2) &&
               table.size(0) <= kMaxBuckets && !(n.bidirectional && table.size(0) % 2));
  read.require(read && table.size(0) / (n.bidirectional ? 4 : 2) < n.max_distance &&
               n.max_distance < int64_t(1) << 31);
  if (read) t[A::kStarts] = bucket_starts(table.size(0), n.bidirectional, n.max_distance);
}

void read_positions(Reader& read, PyObject* const* a, AttentionNumbers& n) {
  PyObject *causal = a[0], *window = a[1];
  const int64_t global_keys = read.natural(a[2]);
  if (causal != Py_None) n.align = 1 + read.choice(causal, {"top_left", "bottom_right"});
  // Python raises the error for global keys without a window.
  read.require(window != Py_None || !global_keys);
  if (window == Py_None) return;
  read.require(PyTuple_CheckExact(window) && PyTuple_GET_SIZE(window) == 2);
  for (int side : {0, 1}) {
    PyObject* given = read ? PyTuple_GET_ITEM(window, side) : Py_None;
    if (given != Py_None) (side == 1 ? n.right : n.left) = read.natural(given);
  }
  read.require(n.left >= 0 || n.right >= 0 || !global_keys);
  n.global_keys = global_keys;
}

// Read a page table, like check_pages of ops/_attention_arguments.py, which refuses a call with
// gradients.
template <class A>
void read_pages(Reader& read, PyObject* o, typename A::Inputs& t) {
  if (o == Py_None) return;
  Tensor& table = t[A::kPageTable] = read.tensor(o);
  read.require(read && (table.scalar_type() == at::kInt || table.scalar_type() == at::kLong) &&
               table.dim() == 2 && t[A::kQuery].dim() == A::kDim && t[A::kKey].dim() == 4);
  if (!read) return;
  const Tensor& cu_q = pick<A::kCuQ>(t);
  const int64_t batch = cu_q.defined() ? cu_q.numel() - 1 : t[A::kQuery].size(0);
  read.require(table.size(0) == batch && t[A::kKeyLengths].defined());
  read.require(read && t[A::kKey].size(2) > 0 && !needs_gradient({t.data(), A::kDifferentiable}));
  if (read) table = table.contiguous();
}

// Read max_seqlen_k: with pages at most, and by default, the keys of a row of the table.
int64_t max_keys(Reader& read, PyObject* o, const AttentionVarlen::Inputs& t) {
  using A = AttentionVarlen;
  const bool paged = t[A::kPageTable].defined();
  const int64_t given =
      paged && o == Py_None ? std::numeric_limits<int64_t>::max() : read.natural(o);
  if (!read || !paged) return given;
  return std::min(given, t[A::kPageTable].size(1) * t[A::kKey].size(2));
}

// Read the last eight arguments of both ops, from softcap to strict.
template <class A>
PyObject* finish_attention(Reader& read, const Given& given, typename A::Inputs& t,
                           AttentionNumbers& n) {
  PyObject* const* a = given.first + given.count - 8;
  if (a[0] != Py_None) n.softcap = read.number(a[0]), read.require(n.softcap > 0);
  if (a[1] != Py_None) n.scale = read.number(a[1]);
  n.dropout_p = read.number(a[2]);
  t[A::kSeed] = read.seed(a[3], n.dropout_p);
  const size_t outputs = read.boolean(a[4]) ? 2 : 1;
  n.deterministic = read.boolean(a[5]);
  return finish<A>(read, t, n, outputs, outputs, read.route(a[6], a[7]),
                   [&] { return given.tuple(); });
}

}  // namespace

FAST_PATH_ENTRY(attention) {
  HANDLE_TH_ERRORS
  using A = Attention;
  const bool eight_bits = count == 25 && (a[13] != Py_None || a[14] != Py_None);
  if (count != 25 || eight_bits || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  AttentionNumbers n;
  A::Inputs t{read.tensor(a[0]), read.tensor(a[1]), read.tensor(a[2]), read.tensor_or_none(a[3])};
  read_positions(read, a + 4, n);
  for (int i = 0; i < 5; i++) t[A::kQueryLengths + i] = read.integers_or_none(a[7 + i]);
  if (THPVariable_Check(a[15])) t[A::kBias] = read.tensor(a[15]);
  else read_bias<A>(read, a[15], t, n);
  t[A::kSinks] = read.tensor_or_none(a[16]);
  read_pages<A>(read, a[12], t);
  return finish_attention<A>(read, {a, count}, t, n);
  END_HANDLE_TH_ERRORS
}

FAST_PATH_ENTRY(attention_varlen) {
  HANDLE_TH_ERRORS
  using A = AttentionVarlen;
  const bool eight_bits = count == 24 && (a[12] != Py_None || a[13] != Py_None);
  if (count != 24 || eight_bits || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  AttentionNumbers n;
  A::Inputs t{read.tensor(a[0]), read.tensor(a[1]), read.tensor(a[2])};
  t[A::kCuQ] = read.integers_or_none(a[3]), t[A::kCuK] = read.integers_or_none(a[4]);
  t[A::kKeyLengths] = read.integers_or_none(a[10]);
  const bool paged = a[11] != Py_None;  // key lengths then stand in for offsets
  read.require(a[3] != Py_None && (a[4] == Py_None) == paged && (a[10] != Py_None) == paged);
  read_positions(read, a + 7, n);
  read_bias<A>(read, a[14], t, n);
  t[A::kSinks] = read.tensor_or_none(a[15]);
  read_pages<A>(read, a[11], t);
  n.max_q = read.natural(a[5]), n.max_k = max_keys(read, a[6], t);
  return finish_attention<A>(read, {a, count}, t, n);
  END_HANDLE_TH_ERRORS
}

}  // namespace pt::fast_path
