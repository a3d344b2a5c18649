// SPDX-License-Identifier: Apache-2.0
// Whole layers of converted models without gradient and dropout: a post-norm layer, such as BERT's,
// in one call (PostNormLayer of integrations/convert/hugging_face_rules.py), and a pre-norm layer,
// such as GPT-2's, Llama's and ViT's, in two calls, between which
// integrations/convert/pre_norm_rules.py updates a decoder's cache.
#include <ATen/ops/addmm.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>

#include "attention.h"
#include "reader.h"

namespace pt::fast_path {
namespace {

// Return an entry of a dictionary in a module's dictionary, borrowed; None if it is absent. It runs
// no Python code, unlike the module's attribute, which takes 1.2 us.
PyObject* entry(PyObject* module, const char* dictionary, const char* name) {
  const auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
  if (!own) PyErr_Clear();
  PyObject* const all = own ? PyDict_GetItemString(own.ptr(), dictionary) : nullptr;
  PyObject* const found = all && PyDict_Check(all) ? PyDict_GetItemString(all, name) : nullptr;
  return found ? found : Py_None;
}
PyObject* parameter(PyObject* module, const char* name) {
  return entry(module, "_parameters", name);
}
// Return the module at a tuple of names, borrowed; None if it is absent.
PyObject* inner(PyObject* module, PyObject* path) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(path); i++) {
    const char* const name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(path, i));
    if (!name) PyErr_Clear();
    module = name ? entry(module, "_modules", name) : Py_None;
  }
  return module;
}

struct WeightAndBias {
  Tensor weight, bias;
};

WeightAndBias read_parameters(Reader& read, PyObject* module) {
  WeightAndBias p{read.tensor(parameter(module, "weight")),
                  read.tensor_or_none(parameter(module, "bias"))};
  read.require(read && !needs_gradient({p.weight, p.bias}));
  return p;
}

// Read the parameters of inner modules. paths: a tuple of one tuple of names per module, or None
// for an absent module, whose parameters are undefined.
template <size_t kModules>
std::array<WeightAndBias, kModules> read_modules(Reader& read, PyObject* layer, PyObject* paths) {
  std::array<WeightAndBias, kModules> all;
  read.require(PyTuple_Check(paths) && PyTuple_GET_SIZE(paths) == Py_ssize_t(kModules));
  for (size_t i = 0; read && i < kModules; i++) {
    PyObject* const path = PyTuple_GET_ITEM(paths, i);
    if (path == Py_None) continue;
    read.require(PyTuple_Check(path));
    if (read) all[i] = read_parameters(read, inner(layer, path));
  }
  return all;
}

// Return true if the weights of a layer's products, or of its norms, have the dtype of x and as
// many dimensions.
bool like(const Tensor& x, const WeightAndBias& p, int64_t dims) {
  return !p.weight.defined() ||
         (p.weight.dim() == dims && p.weight.scalar_type() == x.scalar_type());
}

// Return x W^T + b, or x W + b if the weight is (k, n) (`along_k`).
Tensor project(const Tensor& x, const WeightAndBias& p, int64_t max_rows, bool along_k = false) {
  const Tensor found =
      linear_forward(x, along_k ? transposed(p.weight) : p.weight, p.bias, {}, max_rows);
  if (found.defined()) return found;
  if (!along_k) return at::linear(x, p.weight, maybe(p.bias));
  c10::DimVector shape(x.sizes());
  shape.back() = p.weight.size(1);
  return at::addmm(p.bias, matrix(x), p.weight).view(shape);
}

// Run a norm over the last dimension; nothing if it refuses its arguments.
template <class Which>
std::optional<typename Norm<Which>::Outputs> run_norm(typename Norm<Which>::Inputs t, double eps,
                                                      bool rms = false) {
  NormNumbers n;
  n.eps = eps, n.rms = rms;
  if (!Norm<Which>::complete(t, n) || !Norm<Which>::fits(t, n)) return std::nullopt;
  return run<Norm<Which>>(t, n, 1);
}

// Likewise the network; an undefined gate is absent.
std::optional<Tensor> run_network(const Tensor& x, const WeightAndBias& first,
                                  const WeightAndBias& second, const WeightAndBias& gate,
                                  int64_t activation) {
  FeedForward::Inputs t{x,           first.weight, first.bias, second.weight,
                        second.bias, gate.weight,  gate.bias};
  FeedForward::Numbers n;
  n.activation = activation;
  if (!FeedForward::fits(t, n)) return std::nullopt;
  const auto found = run<FeedForward>(t, n, 1);
  return found ? std::optional((*found)[0]) : std::nullopt;
}

template <class F>
auto quietly(const F& compute) {
  const WithoutGil others_run;
  try {
    return compute();
  } catch (const std::exception&) { return decltype(compute())(); }  // Python raises the error
}

// Return a layer's output to Python, or NotImplemented if it is undefined.
template <class F>
PyObject* output(const Reader& read, const F& compute) {
  if (!read) Py_RETURN_NOTIMPLEMENTED;
  Tensor out = quietly(compute);
  if (!out.defined()) Py_RETURN_NOTIMPLEMENTED;
  return THPVariable_Wrap(std::move(out));
}

struct PostNormLayer {
  Tensor x, mask;
  enum { kQuery, kKey, kValue, kOut, kNorm, kFirst, kSecond, kLastNorm, kModules };
  std::array<WeightAndBias, kModules> parameters;
  double scale = 1, eps[2] = {};
  int64_t head_size = 0, max_rows = 0, activation = 0;

  bool fits() const {
    const Tensor& w = parameters[kQuery].weight;
    if (x.dim() != 3 || !x.is_contiguous() || !x.numel() || !floating(x) || autocast_casts(x))
      return false;
    for (int i = 0; i < kModules; i++)
      if (!like(x, parameters[i], i == kNorm || i == kLastNorm ? 1 : 2)) return false;
    return w.size(1) == x.size(2) && head_size > 0 && w.size(0) % head_size == 0 &&
           parameters[kKey].weight.sizes() == w.sizes() &&
           parameters[kValue].weight.sizes() == w.sizes();
  }

  std::optional<Tensor> attend() const {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto heads = [&](int which) {
      const Tensor t = project(x, parameters[which], max_rows);
      return t.view({x.size(0), x.size(1), -1, head_size}).transpose(1, 2);
    };
    Attention::Inputs t{heads(kQuery), heads(kKey), heads(kValue), mask};
    Attention::Numbers n;
    n.scale = scale;
    if (!Attention::complete(t, n) || !Attention::fits(t, n)) return std::nullopt;
    const auto found = run<Attention>(t, n, 1);
    if (!found) return std::nullopt;
    // in the memory order of the query
    return project((*found)[0].transpose(1, 2).reshape({x.size(0), x.size(1), -1}),
                   parameters[kOut], max_rows);
  }

  std::optional<Tensor> add_norm(const Tensor& sublayer, const Tensor& residual, int norm) const {
    const WeightAndBias& p = parameters[norm];
    const auto found =
        run_norm<AddNorm>({sublayer, residual, p.weight, p.bias}, eps[norm == kLastNorm]);
    return found ? std::optional((*found)[0]) : std::nullopt;
  }

  Tensor forward() const {
    if (!fits()) return {};
    const auto attended = attend();
    if (!attended) return {};
    const auto h = add_norm(*attended, x, kNorm);
    if (!h) return {};
    const auto out = run_network(*h, parameters[kFirst], parameters[kSecond], {}, activation);
    if (!out) return {};
    return add_norm(*out, *h, kLastNorm).value_or(Tensor());
  }
};

struct PreNormLayer {
  // One module may project queries, keys and values (kQuery; kKey and kValue are absent). Norms of
  // heads and the gate may be absent.
  enum {
    kFirstNorm,
    kQuery,
    kKey,
    kValue,
    kQueryNorm,
    kKeyNorm,
    kOut,
    kSecondNorm,
    kFirst,
    kSecond,
    kGate,
    kModules
  };
  Tensor x;  // (B, L, d), the residual stream
  std::array<WeightAndBias, kModules> parameters;
  bool along_k = false, rms = false;
  int64_t head_size = 0, max_rows = 0, activation = 0;
  double scale = 1, eps[2] = {}, head_eps = 0;

  // Settings: paths, along_k, rms, head size, scale, activation, three eps.
  void read(Reader& read, PyObject* stream, PyObject* layer, PyObject* settings, PyObject* rows) {
    read.require(PyTuple_Check(settings) && PyTuple_GET_SIZE(settings) == 9);
    x = read.tensor(stream);
    if (!read) return;
    const auto setting = [&](int i) { return PyTuple_GET_ITEM(settings, i); };
    along_k = read.boolean(setting(1)), rms = read.boolean(setting(2));
    head_size = read.natural(setting(3)), scale = read.number(setting(4));
    activation = read.choice(setting(5), kActivationNames);
    eps[0] = read.number(setting(6)), eps[1] = read.number(setting(7));
    head_eps = read.number(setting(8)), max_rows = read.natural(rows);
    parameters = read_modules<kModules>(read, layer, setting(0));
    read.require(read && x.is_cpu() && !needs_gradient({x}) && fits());
  }

  bool is_norm(int i) const {
    return i == kFirstNorm || i == kSecondNorm || i == kQueryNorm || i == kKeyNorm;
  }
  int64_t columns(int i) const { return parameters[i].weight.size(along_k ? 1 : 0); }
  int64_t depth(int i) const { return parameters[i].weight.size(along_k ? 0 : 1); }
  bool maps(int i, int64_t from, int64_t to) const {
    const Tensor& b = parameters[i].bias;
    return depth(i) == from && columns(i) == to &&
           (b.defined() ? b.dim() == 1 && b.size(0) == to && b.scalar_type() == x.scalar_type()
                        : !along_k);
  }

  bool fits() const {
    if (x.dim() != 3 || !x.is_contiguous() || !x.numel() || !floating(x) || autocast_casts(x) ||
        head_size <= 0)
      return false;
    for (int i = 0; i < kModules; i++)
      if (!like(x, parameters[i], is_norm(i) ? 1 : 2)) return false;
    const int64_t d = x.size(2), inner = depth(kOut), hidden = columns(kFirst);
    const bool separate = parameters[kKey].weight.defined();
    if (separate != parameters[kValue].weight.defined() || inner % head_size) return false;
    if (separate ? !maps(kQuery, d, inner) || !maps(kKey, d, columns(kKey)) ||
                       columns(kKey) % head_size || !maps(kValue, d, columns(kKey))
                 : !maps(kQuery, d, 3 * inner))
      return false;
    const bool gated = parameters[kGate].weight.defined();
    return maps(kOut, inner, d) && maps(kFirst, d, hidden) && maps(kSecond, hidden, d) &&
           (!gated || (!along_k && maps(kGate, d, hidden)));
  }

  Tensor projected(const Tensor& from, int which) const {
    return project(from, parameters[which], max_rows, along_k);
  }
  // Return queries, keys and values, (B, H, L, D), rotated by tables (B or 1, L, dims) if they are
  // given; nothing if an op refuses its arguments.
  variable_list heads(const Tensor& cos, const Tensor& sin) const {
    const WeightAndBias& p = parameters[kFirstNorm];
    const auto normed = [&]() -> Tensor {
      if (rms) {
        const auto found = run_norm<RmsNorm>({x, p.weight}, eps[0], rms);
        return found ? (*found)[0] : Tensor();
      }
      const auto found = run_norm<LayerNorm>({x, p.weight, p.bias}, eps[0]);
      return found ? (*found)[0] : Tensor();
    }();
    if (!normed.defined()) return {};
    variable_list found;
    if (parameters[kKey].weight.defined())
      for (int which : {kQuery, kKey, kValue}) found.push_back(projected(normed, which));
    else found = projected(normed, kQuery).chunk(3, -1);
    for (Tensor& t : found) t = t.view({x.size(0), x.size(1), -1, head_size}).transpose(1, 2);
    for (int i : {0, 1}) {
      const Tensor& weight = parameters[i ? kKeyNorm : kQueryNorm].weight;
      if (!weight.defined() && !cos.defined()) continue;
      Rotary::Inputs t{found[i], weight, cos, sin};
      RotaryNumbers n;
      n.eps = head_eps;
      if (!Rotary::complete(t, n) || !Rotary::fits(t, n)) return {};
      const auto turned = run<Rotary>(t, n, 1);
      if (!turned) return {};
      found[i] = (*turned)[0];
    }
    return found;
  }

  std::optional<Tensor> network(const Tensor& h) const {
    if (along_k) {
      Tensor hidden = projected(h, kFirst);
      switch (Activation(activation)) {
        case Activation::relu: at::relu_(hidden); break;
        case Activation::gelu: at::gelu_(hidden, "none"); break;
        case Activation::gelu_tanh: at::gelu_(hidden, "tanh"); break;
        case Activation::silu: at::silu_(hidden); break;
      }
      return projected(hidden, kSecond);
    }
    return run_network(h, parameters[kFirst], parameters[kSecond], parameters[kGate], activation);
  }

  // Return the layer's output from the heads and the mask; undefined if an op refuses.
  Tensor rest(Attention::Inputs t, AttentionNumbers n) const {
    n.scale = scale;
    if (!Attention::complete(t, n) || !Attention::fits(t, n)) return {};
    const auto attended = run<Attention>(t, n, 1);
    if (!attended) return {};
    const Tensor out = (*attended)[0].transpose(1, 2).reshape({x.size(0), x.size(1), -1});
    const WeightAndBias& p = parameters[kSecondNorm];
    const auto sums = run_norm<AddNorm>({projected(out, kOut), x, p.weight, p.bias}, eps[1], rms);
    if (!sums) return {};
    const auto networked = network((*sums)[AddNorm::kOut]);
    return networked ? (*sums)[AddNorm::kStream] + *networked : Tensor();
  }
};

}  // namespace

// Arguments: x (B, L, d); a mask or None; the layer; a tuple of the paths of its modules, the
// scale, the head size, the activation and both eps; the max number of rows of our product.
FAST_PATH_ENTRY(post_norm_layer) {
  HANDLE_TH_ERRORS
  if (count != 5 || !unwatched() || !PyTuple_Check(a[3]) || PyTuple_GET_SIZE(a[3]) != 6)
    Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  PostNormLayer layer;
  layer.x = read.tensor(a[0]), layer.mask = read.tensor_or_none(a[1]);
  const auto setting = [&](int i) { return PyTuple_GET_ITEM(a[3], i); };
  layer.scale = read.number(setting(1)), layer.head_size = read.natural(setting(2));
  layer.activation = read.choice(setting(3), kActivationNames);
  layer.eps[0] = read.number(setting(4)), layer.eps[1] = read.number(setting(5));
  layer.max_rows = read.natural(a[4]);
  layer.parameters = read_modules<PostNormLayer::kModules>(read, a[2], setting(0));
  read.require(read && layer.x.is_cpu() && !needs_gradient({layer.x, layer.mask}));
  return output(read, [&] { return layer.forward(); });
  END_HANDLE_TH_ERRORS
}

// Arguments: x (B, L, d); cos and sin, or None; the layer; its settings (PreNormLayer::read); the
// max number of rows of our product. Return queries, keys and values.
FAST_PATH_ENTRY(pre_norm_heads) {
  HANDLE_TH_ERRORS
  if (count != 6 || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  PreNormLayer layer;
  layer.read(read, a[0], a[3], a[4], a[5]);
  const Tensor cos = read.tensor_or_none(a[1]), sin = read.tensor_or_none(a[2]);
  read.require(read && !needs_gradient({cos, sin}));
  if (!read) Py_RETURN_NOTIMPLEMENTED;
  variable_list found = quietly([&] { return layer.heads(cos, sin); });
  if (found.size() != 3) Py_RETURN_NOTIMPLEMENTED;
  return Py_BuildValue("(NNN)", THPVariable_Wrap(std::move(found[0])),
                       THPVariable_Wrap(std::move(found[1])),
                       THPVariable_Wrap(std::move(found[2])));
  END_HANDLE_TH_ERRORS
}

// Arguments: queries, keys and values, (B, H, L, D); a mask or None; "top_left", "bottom_right" or
// "none"; the number of keys before its own that a query sees, or -1; then x and the last three of
// pre_norm_heads. Return the layer's output.
FAST_PATH_ENTRY(pre_norm_rest) {
  HANDLE_TH_ERRORS
  if (count != 10 || !unwatched()) Py_RETURN_NOTIMPLEMENTED;
  Reader read;
  PreNormLayer layer;
  layer.read(read, a[6], a[7], a[8], a[9]);
  Attention::Inputs t{read.tensor(a[0]), read.tensor(a[1]), read.tensor(a[2]),
                      read.tensor_or_none(a[3])};
  AttentionNumbers n;
  n.align = read.choice(a[4], {"none", "top_left", "bottom_right"}), n.left = read.integer(a[5]);
  read.require(read && !needs_gradient({t.data(), t.size()}));
  return output(read, [&] { return layer.rest(t, n); });
  END_HANDLE_TH_ERRORS
}

}  // namespace pt::fast_path
