// pytransformer._C: how this copy was built and what this CPU offers. The op libraries load and run without it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "build_info.h"  // written by the build: kBuildInfo, a JSON text
#include "cpu/core/isa.h"
#include "cuda/attention/kernels.h"
#include "cuda/attention/sm90/plan.h"
#include "cuda/cross_entropy/sm90/plan.h"
#include "cuda/layer_norm/plan.h"
#include "cuda/matmul/sm90/plan.h"

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

py::dict cuda_layer_norm_plan(int64_t rows, int columns, const std::string& x, const std::string& residual_out, bool aligned, bool backward,
                              int multiprocessors) {
  static const char* const kNames[] = {"lanes", "block", "any"};
  const pt::cuda::LayerNormShape shape{rows, columns, dtype_of(x), dtype_of(residual_out), aligned};
  const auto plan = backward ? pt::cuda::plan_backward(shape, multiprocessors) : pt::cuda::plan_forward(shape, multiprocessors);
  using namespace py::literals;
  return py::dict("kernel"_a = kNames[int(plan.kernel)], "lanes"_a = plan.lanes, "threads"_a = plan.threads, "blocks"_a = plan.blocks,
                  "smem_bytes"_a = plan.smem_bytes);
}

py::dict cuda_attention_plan(const std::string& pass, const std::string& dtype, int head_dim, int value_dim, bool bounds_only,
                             bool diagonals) {
  static const std::map<std::string, pt::cuda::Pass> kPasses = {{"forward", pt::cuda::Pass::Forward},
                                                                {"bwd_dq", pt::cuda::Pass::BwdDq},
                                                                {"bwd_dkdv", pt::cuda::Pass::BwdDkdv},
                                                                {"bwd_dbias", pt::cuda::Pass::BwdDbias}};
  const auto found = kPasses.find(pass);
  if (found == kPasses.end()) throw py::value_error("pass must be forward, bwd_dq, bwd_dkdv or bwd_dbias, got " + pass);
  const auto plan = pt::cuda::plan_attention(found->second, dtype_of(dtype), head_dim, value_dim, bounds_only, diagonals);
  using namespace py::literals;
  return py::dict("head_class"_a = plan.head_class, "has_score_mod"_a = plan.has_score_mod, "rows"_a = plan.tile.rows(),
                  "columns"_a = plan.tile.columns, "threads"_a = plan.tile.threads(), "smem_bytes"_a = plan.smem_bytes);
}

// Of tensors that are aligned and as large as the numbers say.
py::dict cuda_sm90_attention_plan(const std::string& direction, const std::string& dtype, int sequences, int heads, int key_heads,
                                  int num_queries, int num_keys, int head_dim, int value_dim, bool even, bool bounds_only,
                                  bool elementwise_mask, bool padded, bool left_window, const std::string& adds, bool summed,
                                  int multiprocessors) {
  using namespace pt::cuda;
  static const int64_t some = 0;
  static const uint32_t word = 0;
  alignas(16) static char somewhere[16];
  AttentionProblem p{};
  p.dtype = dtype_of(dtype), p.sequences = sequences, p.heads = heads, p.group = key_heads > 0 ? heads / key_heads : 0;
  if (p.group < 1 || heads % key_heads || sequences < 1 || num_queries < 1 || num_keys < 1)
    throw py::value_error("no such attention: sizes must be positive, and heads a multiple of key_heads");
  p.num_queries = num_queries, p.num_keys = num_keys, p.head_dim = head_dim, p.value_dim = value_dim;
  p.left = left_window ? 0 : kUnbounded, p.right = kUnbounded, p.causal = !even, p.scale = 1, p.softcap = bounds_only ? 0 : 1,
  p.query_segments = elementwise_mask ? &some : nullptr;
  p.key_padding.data = padded ? &word : nullptr;
  // A floating mask or bias whose rows can be copied, one whose keys are not contiguous, two.
  if (adds != "nothing" && adds != "rows" && adds != "elements" && adds != "two biases")
    throw py::value_error("adds must be nothing, rows, elements or two biases, got " + adds);
  if (adds != "nothing") p.bias = {somewhere, 0, 0, 0, adds == "elements" ? 2 : 1, DenseType::f32, 1};
  if (adds == "two biases") p.mask = p.bias;
  const auto rows = [&](int count, int width) { return HeadRows{int64_t(count) * 8 * heads, int64_t(count) * 8, (width + 7) / 8 * 8}; };
  p.q = {nullptr, rows(num_queries, head_dim)}, p.k = {nullptr, rows(num_keys, head_dim)}, p.v = {nullptr, rows(num_keys, value_dim)};
  const auto out = [&](int count, int width) { return Out{somewhere, rows(count, width), width, true}; };
  AttentionForward f{};
  f.p = p, f.out = out(num_queries, value_dim);
  AttentionBackward g{};
  g.p = p, g.d_out = {nullptr, f.out.stride};
  g.dq = out(num_queries, head_dim), g.dk = out(num_keys, head_dim), g.dv = out(num_keys, value_dim);
  AttentionDbias d{};
  d.b = g, d.sizes[0] = sequences, d.sizes[1] = heads, d.sizes[2] = summed ? 1 : num_queries, d.sizes[3] = num_keys, d.key = 1;
  const bool dkdv = direction == "bwd_dkdv", forward = direction == "forward", fused = direction == "bwd_fused",
             dbias = direction == "bwd_dbias";
  if (!dkdv && !forward && !fused && !dbias && direction != "bwd_dq")
    throw py::value_error("direction must be forward, bwd_dq, bwd_dkdv, bwd_fused or bwd_dbias, got " + direction);
  const Pass pass = dkdv ? Pass::BwdDkdv : Pass::BwdDq;
  const Sm90Plan plan = forward ? plan_sm90_forward(f, multiprocessors)
                        : fused ? plan_sm90_fused(g, multiprocessors)
                        : dbias ? plan_sm90_dbias(d, multiprocessors)
                                : plan_sm90_backward(g, pass, multiprocessors);
  using namespace py::literals;
  return py::dict("why_not"_a = plan.why_not ? py::object(py::str(plan.why_not)) : py::none(), "head_class"_a = plan.head_class,
                  "has_score_mod"_a = plan.has_score_mod, "elementwise_mask"_a = plan.elementwise_mask, "tiles"_a = plan.order.tiles,
                  "section"_a = plan.order.section, "blocks"_a = plan.blocks,
                  "dq_accum"_a = fused && !plan.why_not ? sm90_dq_accum_size(p, plan.head_class) : 0);
}

// Of operands that are aligned and as large as the numbers say.
py::dict cuda_matmul_plan(int64_t rows, int64_t columns, int64_t depth, const std::string& dtype, const std::string& layout, bool gated,
                          bool ours, int multiprocessors) {
  using namespace pt::cuda;
  if (layout != "nt" && layout != "nn" && layout != "tn" && layout != "tt")
    throw py::value_error("layout must be nt, nn, tn or tt, got " + layout);
  alignas(16) static char somewhere[16];
  const auto matrix = [&](int64_t height, int64_t width, bool transposed) {
    const int64_t columns = transposed ? height : width;
    return Matrix{somewhere, transposed ? width : height, columns, (columns + 7) / 8 * 8, transposed};
  };
  Product p{dtype_of(dtype), rows, columns, {}, {}, gated};
  p.a[0] = matrix(rows, depth, layout[0] == 't'), p.b[0] = matrix(depth, columns, layout[1] == 't');
  if (gated) p.b[1] = p.b[0];
  const MatmulPlan plan = plan_matmul(p, multiprocessors);
  using namespace py::literals;
  return py::dict("why_not"_a = plan.why_not ? py::object(py::str(plan.why_not)) : py::none(), "down"_a = plan.grid.down,
                  "across"_a = plan.grid.across, "group"_a = plan.grid.group, "halves"_a = plan.halves, "blocks"_a = plan.blocks,
                  "use_cublas"_a = use_cublas(rows, columns, depth, ours));
}

py::dict cuda_cross_entropy_plan(int64_t rows, int64_t classes, bool smooth) {
  const pt::cuda::CrossEntropyPlan plan = pt::cuda::plan_cross_entropy(rows, classes, smooth);
  using namespace py::literals;
  return py::dict("tiles"_a = plan.tiles, "partials"_a = plan.partials, "blocks"_a = plan.blocks, "smem_bytes"_a = plan.smem_bytes);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "How this copy of pytransformer was built, and what this CPU offers.";
  m.def(
      "build_info", [] { return py::module_::import("json").attr("loads")(kBuildInfo); },
      "Version, compiler, flags, instruction sets built, and why CUDA is absent if it is; a dict.");
  m.def("cpu_features", &cpu_features, "Features that matter here -> whether the CPU and the operating system offer them.");
  m.def("built_isas", [] { return isas(false); }, "Instruction sets the CPU kernels were compiled for, best first.");
  m.def("usable_isas", [] { return isas(true); }, "Those of built_isas() that this CPU runs.");
  m.def("cuda_layer_norm_plan", &cuda_layer_norm_plan, py::arg("rows"), py::arg("columns"), py::arg("x"), py::arg("residual_out"),
        py::arg("aligned"), py::arg("backward"), py::arg("multiprocessors"),
        "Which CUDA kernel computes a norm of this shape, and its launch; a dict.");
  m.def("cuda_attention_plan", &cuda_attention_plan, py::arg("pass_"), py::arg("dtype"), py::arg("head_dim"), py::arg("value_dim"),
        py::arg("bounds_only"), py::arg("diagonals"), "Which CUDA kernel a pass of attention takes, and its tile; a dict.");
  m.def("cuda_sm90_attention_plan", &cuda_sm90_attention_plan, py::arg("direction"), py::kw_only(), py::arg("dtype"), py::arg("sequences"),
        py::arg("heads"), py::arg("key_heads"), py::arg("num_queries"), py::arg("num_keys"), py::arg("head_dim"), py::arg("value_dim"),
        py::arg("even") = true, py::arg("bounds_only") = true, py::arg("elementwise_mask") = false, py::arg("padded") = false,
        py::arg("left_window") = false, py::arg("adds") = "nothing", py::arg("summed") = false, py::arg("multiprocessors") = 132,
        "Whether the attention kernels for sm_90a take a problem, why not, and how their blocks share it; a dict.");
  m.def("cuda_matmul_plan", &cuda_matmul_plan, py::arg("rows"), py::arg("columns"), py::arg("depth"), py::kw_only(), py::arg("dtype"),
        py::arg("layout"), py::arg("gated") = false, py::arg("ours") = false, py::arg("multiprocessors") = 132,
        "Whether the products for sm_90a take a problem, why not, how their blocks share it, and whether cuBLAS does it where nothing "
        "is behind it; a dict.");
  m.def("cuda_cross_entropy_plan", &cuda_cross_entropy_plan, py::arg("rows"), py::arg("classes"), py::arg("smooth"),
        "What cross entropy's tiles of classes leave of each row, and how its second stage shares the rows; a dict.");
  m.def(
      "default_isa", [] { return std::string(pt::isa_name(pt::active_isa())); },
      "The set chosen for this CPU, or by PYTRANSFORMER_CPU_ISA; RuntimeError if that names one that is not usable.");
}
