// SPDX-License-Identifier: Apache-2.0
// pt.rotary and pt.append_kv: the lowering of ops/rotary.py, ops/append_kv.py and
// ops/_backends/cpu/rotary.py.
#include <ATen/ops/cos.h>
#include <ATen/ops/sin.h>

#include "reader.h"

namespace pt::fast_path {
namespace {

struct RotaryNumbers {
  bool interleaved = false;
  double eps = 0, weight_offset = 0;

  template <class F>
  void collect(const F& f) const {
    f(interleaved), f(eps), f(weight_offset);
  }
  py::tuple others() const {
    return py::make_tuple(interleaved, eps, weight_offset, py::none(), false);
  }
};

using RotaryForward = void(const Tensor& x, const Maybe& cos, const Maybe& sin, const Maybe& weight,
                           const Tensor& out, const Maybe& rstd, bool interleaved, double eps,
                           double weight_offset);
using RotaryBackward = void(const Tensor& d_out, const Tensor& x, const Maybe& cos,
                            const Maybe& sin, const Maybe& weight, const Maybe& rstd,
                            const Maybe& dx, const Maybe& dweight, bool interleaved,
                            double weight_offset);
using RawAppendKV = void(const Tensor& query, const Tensor& key, const Tensor& value,
                         const Tensor& key_cache, const Tensor& value_cache,
                         const Maybe& page_table, const Tensor& positions, const Maybe& cos,
                         const Maybe& sin, const Maybe& q_norm, const Maybe& k_norm,
                         const Tensor& out, bool interleaved, double eps, double weight_offset);

// Add a batch dimension to tables that all sequences share.
void complete_tables(Tensor& cos, Tensor& sin) {
  for (Tensor* t : {&cos, &sin})
    if (t->defined() && t->dim() == 2) *t = t->unsqueeze(0);
}

// Check the tables like check_tables of ops/rotary.py.
bool tables_fit(const Tensor& cos, const Tensor& sin, const Tensor& x) {
  if (!cos.defined() && !sin.defined()) return true;
  if (!cos.defined() || !sin.defined() || cos.dim() != 3 || cos.sizes() != sin.sizes() ||
      !floating(cos) || !floating(sin))
    return false;
  const int64_t turned = cos.size(2);
  return (cos.size(0) == 1 || cos.size(0) == x.size(0)) && cos.size(1) == x.size(2) && turned > 0 &&
         turned % 2 == 0 && turned <= x.size(3);
}

bool weight_fits(const Tensor& weight, const Tensor& x) {
  return !weight.defined() ||
         (weight.dim() == 1 && weight.size(0) == x.size(3) && floating(weight));
}

struct Rotary {
  static constexpr const char* kName = "rotary";
  enum { kX, kWeight, kCos, kSin, kInputs, kSeed = -1 };
  enum { kOut, kRstd, kOutputs };
  static constexpr size_t kDifferentiable = 2, kSaved = 1, kGrads = 1;
  using Inputs = std::array<Tensor, kInputs>;
  using Outputs = std::array<Tensor, kOutputs>;
  using Saved = std::array<Tensor, kSaved>;
  using Numbers = RotaryNumbers;

  static bool complete(Inputs& t, Numbers&) {
    complete_tables(t[kCos], t[kSin]);
    return t[kX].dim() == 4;
  }

  static bool fits(const Inputs& t, const Numbers&) {
    const Tensor& x = t[kX];
    return x.numel() > 0 && floating(x) && tables_fit(t[kCos], t[kSin], x) &&
           weight_fits(t[kWeight], x);
  }

  static Outputs forward(const Inputs& t, const Numbers& n, bool needs_gradient) {
    static const auto raw = raw_op<RotaryForward>("pytransformer_C::rotary_fwd");
    const Tensor &x = t[kX], &weight = t[kWeight];
    const auto work = work_dtype(x);
    Outputs results{empty_in_order(x)};
    if (needs_gradient && weight.defined())
      results[kRstd] = empty(x.sizes().slice(0, 3), x.options().dtype(work));
    raw.call(last_contiguous(x), vector(t[kCos], work), vector(t[kSin], work), vector(weight, work),
             results[kOut], maybe(results[kRstd]), n.interleaved, n.eps, n.weight_offset);
    return results;
  }

  static variable_list backward(const Inputs& t, const Saved& saved, const Numbers& n,
                                const variable_list& grads, const std::vector<bool>& wanted) {
    static const auto raw = raw_op<RotaryBackward>("pytransformer_C::rotary_bwd");
    const Tensor &x = t[kX], &weight = t[kWeight];
    const auto work = work_dtype(x);
    variable_list results(kDifferentiable);
    if (wanted[kX]) results[kX] = empty_in_order(x);
    if (wanted[kWeight]) results[kWeight] = vector_target(weight, work);
    raw.call(last_contiguous(grads[0]), last_contiguous(x), vector(t[kCos], work),
             vector(t[kSin], work), vector(weight, work), maybe(saved[0]), maybe(results[kX]),
             maybe(results[kWeight]), n.interleaved, n.weight_offset);
    if (wanted[kWeight]) results[kWeight] = deliver(results[kWeight], weight);
    return results;
  }

  static variable_list tensors(const Inputs& t) { return {t[kX], t[kCos], t[kSin], t[kWeight]}; }
  static py::tuple others(const Numbers& n) { return n.others(); }
};

struct AppendKV {
  static constexpr const char* kName = "append_kv";
  enum {
    kQuery,
    kKey,
    kValue,
    kKeyCache,
    kValueCache,
    kPageTable,
    kPositions,
    kCos,
    kSin,
    kQNorm,
    kKNorm,
    kInputs,
    kSeed = -1
  };
  enum { kOut, kNothing, kOutputs };
  static constexpr size_t kDifferentiable = 0, kSaved = 0, kGrads = 0;
  using Inputs = std::array<Tensor, kInputs>;
  using Outputs = std::array<Tensor, kOutputs>;
  using Saved = std::array<Tensor, kSaved>;
  using Numbers = RotaryNumbers;

  static bool complete(Inputs& t, Numbers&) {
    complete_tables(t[kCos], t[kSin]);
    return std::all_of(t.begin(), t.begin() + kPageTable,
                       [](const Tensor& each) { return each.dim() == 4; });
  }

  // Return true if a cache's rows are writable and no two elements overlap.
  static bool writable(const Tensor& cache) {
    for (int64_t d = 0; d < 4; d++)
      if (cache.stride(d) == 0 && cache.size(d) > 1) return false;
    return cache.stride(3) == 1 || cache.size(3) <= 1;
  }

  static bool fits(const Inputs& t, const Numbers&) {
    const Tensor &query = t[kQuery], &key = t[kKey], &value = t[kValue], &keys = t[kKeyCache],
                 &values = t[kValueCache];
    const int64_t batch = query.size(0), length = query.size(2), dim = query.size(3),
                  heads = key.size(1);
    const int64_t first = t[kPageTable].defined() ? keys.size(0) : batch;
    if (!key.numel() || !floating(query) || keys.is_same(values) || !writable(keys) ||
        !writable(values))
      return false;
    for (const Tensor* same : {&key, &value, &keys, &values})
      if (same->scalar_type() != query.scalar_type()) return false;
    const int64_t width = value.size(3), rows = keys.size(2);
    const auto has = [](const Tensor& each, std::array<int64_t, 4> shape) {
      return each.sizes() == at::IntArrayRef(shape);
    };
    return has(key, {batch, heads, length, dim}) && has(value, {batch, heads, length, width}) &&
           has(keys, {first, heads, rows, dim}) && has(values, {first, heads, rows, width}) &&
           tables_fit(t[kCos], t[kSin], query) && weight_fits(t[kQNorm], query) &&
           weight_fits(t[kKNorm], query) && places_fit(t);
  }

  // Check positions like check_positions of ops/_problem/rotary.py: the kernel would skip positions
  // without a slot.
  static bool places_fit(const Inputs& t) {
    const Tensor &positions = t[kPositions], &table = t[kPageTable];
    const int64_t batch = t[kQuery].size(0), length = t[kQuery].size(2),
                  size = t[kKeyCache].size(2), pool = t[kKeyCache].size(0);
    if (positions.dim() != 2 || positions.size(0) != batch || positions.size(1) != length)
      return false;
    if (table.defined() && (table.dim() != 2 || table.size(0) != batch)) return false;
    const int64_t pages = table.defined() ? table.size(1) : 1;
    const int64_t* all = positions.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < batch * length; i++) {
      if (all[i] < 0) continue;
      if (all[i] >= pages * size) return false;
      if (!table.defined()) continue;
      const int64_t at = i / length * pages + all[i] / size;
      const int64_t page = table.scalar_type() == at::kInt ? table.const_data_ptr<int32_t>()[at]
                                                           : table.const_data_ptr<int64_t>()[at];
      if (page < 0 || page >= pool) return false;
    }
    return true;
  }

  static Outputs forward(const Inputs& t, const Numbers& n, bool) {
    static const auto raw = raw_op<RawAppendKV>("pytransformer_C::append_kv");
    const auto work = work_dtype(t[kQuery]);
    Outputs results{empty_in_order(t[kQuery])};
    raw.call(last_contiguous(t[kQuery]), last_contiguous(t[kKey]), last_contiguous(t[kValue]),
             t[kKeyCache], t[kValueCache], maybe(whole(t[kPageTable])), t[kPositions],
             vector(t[kCos], work), vector(t[kSin], work), vector(t[kQNorm], work),
             vector(t[kKNorm], work), results[kOut], n.interleaved, n.eps, n.weight_offset);
    return results;
  }

  // Return the page table in the kernel's int64, without the dispatcher, which takes ten times as
  // long for a few pages.
  static Tensor whole(const Tensor& table) {
    if (!table.defined() || table.scalar_type() == at::kLong) return table;
    const Tensor wide = empty(table.sizes(), table.options().dtype(at::kLong));
    std::copy_n(table.const_data_ptr<int32_t>(), table.numel(), wide.mutable_data_ptr<int64_t>());
    return wide;
  }

  static variable_list tensors(const Inputs& t) {
    variable_list all(t.begin(), t.end());
    // 8-bit scales: only Python calls have them.
    all.insert(all.begin() + kPositions, 2, Tensor());
    return all;
  }
  static py::tuple others(const Numbers& n) { return n.others(); }
};

// Compute cos and sin of each position times each frequency, like tables() of
// ops/rotary_positions.py: the angle is a float64 product.
constexpr int64_t kMostAngles = 1 << 14;  // use ATen's threads for more
template <class Work>
std::array<Tensor, 2> tables(const Tensor& positions, const Tensor& frequencies, double factor,
                             bool interleaved) {
  const int64_t rows = positions.numel(), half = frequencies.numel(), length = positions.size(-1);
  const Tensor angle = empty({rows, half}, frequencies.options());
  const double* frequency = frequencies.const_data_ptr<double>();
  const int64_t* position = positions.const_data_ptr<int64_t>();
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < half; i++)
      angle.mutable_data_ptr<double>()[r * half + i] = double(position[r]) * frequency[i];
  std::array<Tensor, 2> both;
  for (int which : {0, 1}) {
    const Tensor exact = which ? at::sin(angle) : at::cos(angle);
    both[which] = empty({positions.dim() == 1 ? 1 : positions.size(0), length, 2 * half},
                        frequencies.options().dtype(c10::CppTypeToScalarType<Work>::value));
    const double* from = exact.const_data_ptr<double>();
    Work* to = both[which].mutable_data_ptr<Work>();
    for (int64_t r = 0; r < rows; r++, from += half, to += 2 * half)
      for (int64_t i = 0; i < half; i++) {
        const Work value = Work(factor == 1 ? from[i] : from[i] * factor);
        to[interleaved ? 2 * i : i] = value, to[interleaved ? 2 * i + 1 : half + i] = value;
      }
  }
  return both;
}

// Read int32 or int64 positions.
Tensor read_places(Reader& read, PyObject* o) {
  const Tensor t = read.tensor(o);
  read.require(bool(read) && (t.scalar_type() == at::kInt || t.scalar_type() == at::kLong));
  return t;
}

// Compute the tables of x from positions, for `dims` columns by base and scaling. Fall back to
// Python if the frequencies depend on the sequence's length or there are many angles. The caller
// holds the GIL.
void read_angles(Reader& read, const Tensor& positions, const Tensor& x,
                 std::array<PyObject*, 3> dims_base_scaling, bool interleaved, Tensor& cos,
                 Tensor& sin) {
  const auto [dims, base, scaling] = dims_base_scaling;
  read.require(bool(read) && positions.is_cpu() && positions.dim() >= 1 && positions.dim() <= 2 &&
               x.dim() == 4 && floating(x));
  const int64_t turned = !read ? 0 : dims == Py_None ? x.size(3) : read.natural(dims);
  read.require(turned > 0 && turned % 2 == 0 && turned <= x.size(3) &&
               positions.numel() * turned <= 2 * kMostAngles && read.number(base) > 0);
  read.require(scaling == Py_None ||
               reinterpret_cast<PyObject*>(Py_TYPE(scaling)) == fact("RotaryScaling"));
  if (!read) return;
  const bool wide = x.scalar_type() == at::kDouble;
  try {
    const py::object known =
        py::handle(fact("rotary_frequencies"))(turned, py::handle(base), py::handle(scaling), wide);
    read.require(!known.is_none());
    if (!read) return;
    const Tensor frequencies = THPVariable_Unpack(PyTuple_GET_ITEM(known.ptr(), 0));
    const double factor = PyFloat_AsDouble(PyTuple_GET_ITEM(known.ptr(), 1));
    const at::AutoDispatchBelowADInplaceOrView below;
    const Tensor whole = positions.to(at::kLong).contiguous();
    const auto made = wide ? tables<double>(whole, frequencies, factor, interleaved)
                           : tables<float>(whole, frequencies, factor, interleaved);
    cos = made[0], sin = made[1];
  } catch (const std::exception&) { read.require(false); }
}

// Defaults of the public functions. An argument without effect that differs from its default is an
// error, which Python raises.
constexpr double kBase = 10000.0, kEps = 1e-6;

void require_norm_if_given(Reader& read, bool norm, const RotaryNumbers& n) {
  read.require(norm || (n.eps == kEps && n.weight_offset == 0));
}

// Require `dims` for tables narrower than x.
void require_width(Reader& read, PyObject* dims, const Tensor& cos, const Tensor& x) {
  if (!read || cos.dim() == 0 || x.dim() != 4) return read.require(false);
  read.require(cos.size(-1) == (dims == Py_None ? x.size(3) : read.natural(dims)));
}

// Refuse gradients of the angles and of a cache's contents.
void refuse_gradients(Reader& read, at::TensorList tensors) {
  read.require(!needs_gradient(tensors));
}

}  // namespace

FAST_PATH_ENTRY(rotary) {
  HANDLE_TH_ERRORS
  using R = Rotary;
  if (count != 14 || (a[1] == Py_None) == (a[2] == Py_None) || !unwatched())
    Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  R::Numbers n{read.boolean(a[8]), read.number(a[10]), read.number(a[11])};
  R::Inputs t{read.tensor(a[0]), read.tensor_or_none(a[9])};
  if (a[1] == Py_None) {
    t[R::kCos] = read.tensor(a[2]), t[R::kSin] = read.tensor(a[3]);
    read.require(read.number(a[4]) == kBase && a[5] == Py_None && a[6] == Py_None);
    require_width(read, a[7], t[R::kCos], t[R::kX]);
    refuse_gradients(read, {t[R::kCos], t[R::kSin]});
  } else {
    const Tensor &x = t[R::kX], positions = read_places(read, a[1]);
    read.require(a[5] == Py_None && a[3] == Py_None && read && x.dim() == 4 && positions.dim() > 0);
    read.require(
        read && (positions.dim() == 1 || positions.size(0) == 1 || positions.size(0) == x.size(0)));
    read_angles(read, positions, x, {a[7], a[4], a[6]}, n.interleaved, t[R::kCos], t[R::kSin]);
  }
  require_norm_if_given(read, t[R::kWeight].defined(), n);
  return finish<R>(read, t, n, 1, 1, read.route(a[12], a[13]),
                   [&] { return Given{a, count}.tuple(); });
  END_HANDLE_TH_ERRORS
}

FAST_PATH_ENTRY(append_kv) {
  HANDLE_TH_ERRORS
  using A = AppendKV;
  if (count != 14 || reinterpret_cast<PyObject*>(Py_TYPE(a[3])) != fact("KeyValues") ||
      !unwatched())
    Py_RETURN_NOTIMPLEMENTED;
  // Fall back for 8-bit scales.
  if (PyTuple_GET_ITEM(a[3], 3) != Py_None || PyTuple_GET_ITEM(a[3], 4) != Py_None)
    Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  A::Numbers n{read.boolean(a[6]), read.number(a[10]), read.number(a[11])};
  A::Inputs t{read.tensor(a[0]), read.tensor(a[1]), read.tensor(a[2])};
  t[A::kKeyCache] = read.tensor(PyTuple_GET_ITEM(a[3], 0)),
  t[A::kValueCache] = read.tensor(PyTuple_GET_ITEM(a[3], 1));
  for (int cache : {A::kKeyCache, A::kValueCache})  // Python raises
    if (read) read.require(!t[cache].is_inference() || c10::InferenceMode::is_enabled());
  if (PyObject* table = PyTuple_GET_ITEM(a[3], 2); table != Py_None)
    t[A::kPageTable] = read_places(read, table).contiguous();
  t[A::kQNorm] = read.tensor_or_none(a[8]), t[A::kKNorm] = read.tensor_or_none(a[9]);
  require_norm_if_given(read, t[A::kQNorm].defined() || t[A::kKNorm].defined(), n);
  const Tensor positions = read_places(read, a[4]);
  if (read) t[A::kPositions] = read.integers_or_none(a[4]);
  if (reinterpret_cast<PyObject*>(Py_TYPE(a[5])) == fact("RotaryPositions")) {
    const py::handle turning(a[5]);
    const py::object dims = turning.attr("dims"), base = turning.attr("base"),
                     scaling = turning.attr("scaling");
    const bool interleaved = read.boolean(py::object(turning.attr("interleaved")).ptr());
    read.require(a[7] == Py_None && (interleaved || !n.interleaved));
    n.interleaved = interleaved;
    read_angles(read, t[A::kPositions], t[A::kQuery], {dims.ptr(), base.ptr(), scaling.ptr()},
                n.interleaved, t[A::kCos], t[A::kSin]);
  } else if (a[5] != Py_None) {
    read.require(PyTuple_CheckExact(a[5]) && PyTuple_GET_SIZE(a[5]) == 2);
    if (read)
      t[A::kCos] = read.tensor(PyTuple_GET_ITEM(a[5], 0)),
      t[A::kSin] = read.tensor(PyTuple_GET_ITEM(a[5], 1));
    require_width(read, a[7], t[A::kCos], t[A::kQuery]);
  } else {
    read.require(!n.interleaved && a[7] == Py_None);
  }
  refuse_gradients(read, t);
  PyObject* found = finish<A>(read, t, n, 0, 1, read.route(a[12], a[13]),
                              [&] { return Given{a, count}.tuple(); });
  if (found == Py_NotImplemented) return found;
  // Bump the version so that autograd detects a change of a saved tensor.
  for (int cache : {A::kKeyCache, A::kValueCache})
    if (!t[cache].is_inference()) t[cache].unsafeGetTensorImpl()->bump_version();
  return found;
  END_HANDLE_TH_ERRORS
}

}  // namespace pt::fast_path
