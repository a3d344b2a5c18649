// SPDX-License-Identifier: Apache-2.0
// pytransformer._C: build information and CPU features. The op libraries load and run without it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "build_info.h"  // written by the build: kBuildInfo, JSON text
#include "cpu/core/isa.h"
#include "cuda/attention/plan.h"
#include "cuda/cross_entropy/sm90/plan.h"
#include "cuda/layer_norm/plan.h"
#include "cuda/matmul/sm90/plan.h"
#include "cuda/rotary/plan.h"

namespace py = pybind11;

namespace {

std::map<std::string, bool> cpu_features() {
  std::map<std::string, bool> features;
  for (const pt::CpuFeature& feature : pt::cpu_features()) features[feature.name] = feature.present;
  return features;
}

std::vector<std::string> isas(bool only_usable) {
  std::vector<std::string> names;
  for (pt::Isa isa : pt::built_isas())
    if (!only_usable || pt::runs_here(isa)) names.push_back(pt::isa_name(isa));
  return names;
}

pt::DType dtype_of(const std::string& name) {
  if (name == "float32") return pt::DType::f32;
  if (name == "bfloat16") return pt::DType::bf16;
  if (name == "float16") return pt::DType::f16;
  throw py::value_error("dtype must be float32, bfloat16 or float16, got " + name);
}

py::dict cuda_layer_norm_plan(int64_t rows, int columns, const std::string& x,
                              const std::string& residual_out, bool aligned, bool backward,
                              int multiprocessors) {
  static const char* const kNames[] = {"lanes", "block", "any"};
  const pt::cuda::LayerNormShape shape{rows, columns, dtype_of(x), dtype_of(residual_out), aligned};
  const auto plan = backward ? pt::cuda::plan_backward(shape, multiprocessors)
                             : pt::cuda::plan_forward(shape, multiprocessors);
  using namespace py::literals;
  return py::dict("kernel"_a = kNames[int(plan.kernel)], "lanes"_a = plan.lanes,
                  "threads"_a = plan.threads, "blocks"_a = plan.blocks,
                  "smem_bytes"_a = plan.smem_bytes);
}

py::dict cuda_sm80_attention_plan(const std::string& pass, const std::string& dtype, int head_dim,
                                  int value_dim, bool bounds_only, bool diagonals) {
  static const std::map<std::string, pt::cuda::Pass> kPasses = {
      {"forward", pt::cuda::Pass::Forward},
      {"bwd_dq", pt::cuda::Pass::BwdDq},
      {"bwd_dkdv", pt::cuda::Pass::BwdDkdv},
      {"bwd_dbias", pt::cuda::Pass::BwdDbias}};
  const auto found = kPasses.find(pass);
  if (found == kPasses.end())
    throw py::value_error("pass must be forward, bwd_dq, bwd_dkdv or bwd_dbias, got " + pass);
  const auto plan = pt::cuda::plan_sm80(found->second, dtype_of(dtype), head_dim, value_dim,
                                        bounds_only, diagonals);
  using namespace py::literals;
  return py::dict("head_class"_a = plan.head_class, "has_score_mod"_a = plan.has_score_mod,
                  "rows"_a = plan.tile.rows(), "columns"_a = plan.tile.columns,
                  "threads"_a = plan.tile.threads(), "smem_bytes"_a = plan.smem_bytes);
}

// Pop a named fact from the caller's dict. The caller raises on any fact left over.
template <class T>
T take(py::dict& facts, const char* name, std::optional<T> otherwise = std::nullopt) {
  if (!facts.contains(name)) {
    if (!otherwise) throw py::type_error(std::string("missing: ") + name);
    return *otherwise;
  }
  const T value = py::cast<T>(facts[name]);
  facts.attr("pop")(name);
  return value;
}

// Build a backward request with aligned tensors of the sizes in the facts. kPlanned replaces the
// address of each tensor that is present.
pt::cuda::BackwardRequest attention_request(py::dict facts) {
  using namespace pt::cuda;
  BackwardRequest request{};
  AttentionProblem& p = request.g.p;
  p.dtype = dtype_of(take<std::string>(facts, "dtype"));
  p.sequences = take<int>(facts, "sequences"), p.heads = take<int>(facts, "heads");
  const int key_heads = take<int>(facts, "key_heads");
  p.group = key_heads > 0 ? p.heads / key_heads : 0;
  p.num_queries = take<int>(facts, "num_queries"), p.num_keys = take<int>(facts, "num_keys");
  p.head_dim = take<int>(facts, "head_dim"), p.value_dim = take<int>(facts, "value_dim");
  if (p.group < 1 || p.heads % key_heads || p.sequences < 1 || p.num_queries < 1 || p.num_keys < 1)
    throw py::value_error(
        "no such attention: sizes must be positive, and heads a multiple of key_heads");
  p.left = take<bool>(facts, "left_window", false) ? 0 : kUnbounded, p.right = kUnbounded;
  p.causal = !take<bool>(facts, "even", true), p.scale = 1,
  p.softcap = take<bool>(facts, "bounds_only", true) ? 0 : 1;
  p.query_segments = take<bool>(facts, "elementwise_mask", false)
                         ? static_cast<const int64_t*>(kPlanned)
                         : nullptr;
  p.key_padding.data =
      take<bool>(facts, "padded", false) ? static_cast<const uint32_t*>(kPlanned) : nullptr;
  // adds: a float mask or bias with copyable rows, a float mask or bias with strided keys, or two
  // biases.
  const std::string adds = take<std::string>(facts, "adds", "nothing");
  if (adds != "nothing" && adds != "rows" && adds != "elements" && adds != "two biases")
    throw py::value_error("adds must be nothing, rows, elements or two biases, got " + adds);
  if (adds != "nothing")
    p.bias = {kPlanned, 0, 0, 0, adds == "elements" ? 2 : 1, DenseType::f32, 1};
  if (adds == "two biases") p.mask = p.bias;
  p.q = p.k = p.v = request.g.d_out = {kPlanned, kPlannedStrides};
  request.g.dq = request.g.dk = planned_out(p.head_dim), request.g.dv = planned_out(p.value_dim);
  AttentionDbias& d = request.dbias[1];
  d.b = request.g, d.data = kPlanned, d.key = 1;
  const int sizes[4] = {p.sequences, p.heads,
                        take<bool>(facts, "summed", false) ? 1 : p.num_queries, p.num_keys};
  for (int i = 0; i < 4; ++i) d.sizes[i] = sizes[i];
  request.deterministic = take<bool>(facts, "deterministic", false);
  if (facts.size()) throw py::type_error("unknown: " + py::cast<std::string>(py::str(facts)));
  return request;
}

py::dict cuda_sm90_attention_plan(const std::string& direction, py::kwargs given) {
  using namespace pt::cuda;
  py::dict facts(given);
  const Gpu gpu{true, take<int>(facts, "multiprocessors", 132)};
  const BackwardRequest request = attention_request(facts);
  AttentionForward f{};
  f.p = request.g.p, f.out = request.g.dv;
  const BackwardPlan backward = plan_attention_backward(request, gpu);
  const std::map<std::string, Sm90Plan> plans = {{"forward", plan_attention_forward(f, gpu).sm90},
                                                 {"bwd_dq", backward.dq.sm90},
                                                 {"bwd_dkdv", backward.dkdv.sm90},
                                                 {"bwd_fused", backward.fused},
                                                 {"bwd_dbias", backward.dbias[1].sm90}};
  const auto found = plans.find(direction);
  if (found == plans.end())
    throw py::value_error(
        "direction must be forward, bwd_dq, bwd_dkdv, bwd_fused or bwd_dbias, got " + direction);
  const Sm90Plan& plan = found->second;
  using namespace py::literals;
  return py::dict("why_not"_a = plan.why_not ? py::object(py::str(plan.why_not)) : py::none(),
                  "head_class"_a = plan.head_class, "has_score_mod"_a = plan.has_score_mod,
                  "elementwise_mask"_a = plan.elementwise_mask, "consumers"_a = plan.tile.consumers,
                  "streamed"_a = plan.tile.streamed, "tiles"_a = plan.order.tiles,
                  "section"_a = plan.order.section, "paired"_a = plan.order.paired,
                  "blocks"_a = plan.blocks,
                  "dq_accum"_a = direction == "bwd_fused" ? backward.dq_accum : 0);
}

// Plan a matmul of aligned operands of these sizes.
py::dict cuda_matmul_plan(int64_t rows, int64_t columns, int64_t depth, const std::string& dtype,
                          const std::string& layout, bool gated, bool ours, int multiprocessors) {
  using namespace pt::cuda;
  if (layout != "nt" && layout != "nn" && layout != "tn" && layout != "tt")
    throw py::value_error("layout must be nt, nn, tn or tt, got " + layout);
  const auto matrix = [&](int64_t height, int64_t width, bool transposed) {
    const int64_t columns = transposed ? height : width;
    return Matrix{kPlanned, transposed ? width : height, columns, (columns + 7) / 8 * 8,
                  transposed};
  };
  Product p{dtype_of(dtype), rows, columns, {}, {}, gated};
  p.a[0] = matrix(rows, depth, layout[0] == 't'), p.b[0] = matrix(depth, columns, layout[1] == 't');
  if (gated) p.b[1] = p.b[0];
  const MatmulPlan plan = plan_matmul(p, multiprocessors);
  using namespace py::literals;
  return py::dict("why_not"_a = plan.why_not ? py::object(py::str(plan.why_not)) : py::none(),
                  "down"_a = plan.grid.down, "across"_a = plan.grid.across,
                  "group"_a = plan.grid.group, "halves"_a = plan.halves, "blocks"_a = plan.blocks,
                  "use_cublas"_a = use_cublas(rows, columns, depth, ours));
}

py::dict cuda_cross_entropy_plan(int64_t rows, int64_t classes, bool smooth) {
  const pt::cuda::CrossEntropyPlan plan = pt::cuda::plan_cross_entropy(rows, classes, smooth);
  using namespace py::literals;
  return py::dict("tiles"_a = plan.tiles, "partials"_a = plan.partials, "blocks"_a = plan.blocks,
                  "smem_bytes"_a = plan.smem_bytes);
}

py::dict cuda_rotary_plan(int64_t rows, int dim, int turned, bool interleaved, bool aligned,
                          bool sums, int multiprocessors) {
  const pt::cuda::RotaryPlan plan =
      pt::cuda::plan_rotary({rows, dim, turned, interleaved, aligned}, sums, multiprocessors);
  using namespace py::literals;
  return py::dict("whole"_a = plan.whole, "pair_chunks"_a = plan.pair_chunks,
                  "chunks"_a = plan.chunks, "lanes"_a = plan.lanes, "blocks"_a = plan.blocks,
                  "smem_bytes"_a = plan.smem_bytes);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "How this copy of pytransformer was built, and what this CPU offers.";
  m.def(
      "build_info", [] { return py::module_::import("json").attr("loads")(kBuildInfo); },
      "Version, compiler, flags, instruction sets built, and why CUDA is absent if it is; a dict.");
  m.def("cpu_features", &cpu_features,
        "Features that matter here -> whether the CPU and the operating system offer them.");
  m.def(
      "built_isas", [] { return isas(false); },
      "Instruction sets the CPU kernels were compiled for, best first.");
  m.def("usable_isas", [] { return isas(true); }, "Those of built_isas() that this CPU runs.");
  m.def("cuda_layer_norm_plan", &cuda_layer_norm_plan, py::arg("rows"), py::arg("columns"),
        py::arg("x"), py::arg("residual_out"), py::arg("aligned"), py::arg("backward"),
        py::arg("multiprocessors"),
        "Which CUDA kernel computes a norm of this shape, and its launch; a dict.");
  m.def("cuda_sm80_attention_plan", &cuda_sm80_attention_plan, py::arg("pass_"), py::arg("dtype"),
        py::arg("head_dim"), py::arg("value_dim"), py::arg("bounds_only"), py::arg("diagonals"),
        "Which CUDA kernel a pass of attention takes, and its tile; a dict.");
  m.def("cuda_sm90_attention_plan", &cuda_sm90_attention_plan,
        "Whether the attention kernels for sm_90a take a problem, why not, and how their blocks "
        "share it; a dict. Facts by name: dtype, "
        "sequences, heads, key_heads, num_queries, num_keys, head_dim, value_dim; and, if not as "
        "in a plain call, even, bounds_only, "
        "elementwise_mask, padded, left_window, adds, summed, multiprocessors.");
  m.def("cuda_matmul_plan", &cuda_matmul_plan, py::arg("rows"), py::arg("columns"),
        py::arg("depth"), py::kw_only(), py::arg("dtype"), py::arg("layout"),
        py::arg("gated") = false, py::arg("ours") = false, py::arg("multiprocessors") = 132,
        "Whether the products for sm_90a take a problem, why not, how their blocks share it, and "
        "whether cuBLAS does it where nothing "
        "is behind it; a dict.");
  m.def("cuda_cross_entropy_plan", &cuda_cross_entropy_plan, py::arg("rows"), py::arg("classes"),
        py::arg("smooth"),
        "What cross entropy's tiles of classes leave of each row, and how its second stage shares "
        "the rows; a dict.");
  m.def("cuda_rotary_plan", &cuda_rotary_plan, py::arg("rows"), py::arg("dim"), py::arg("turned"),
        py::kw_only(), py::arg("interleaved") = false, py::arg("aligned") = true,
        py::arg("sums") = false, py::arg("multiprocessors") = 132,
        "Which CUDA kernel turns rows, how many of its lanes share one, and its launch; a dict.");
  m.def(
      "default_isa", [] { return std::string(pt::isa_name(pt::active_isa())); },
      "The set chosen for this CPU, or by PYTRANSFORMER_CPU_ISA; RuntimeError if that names one "
      "that is not usable.");
}
