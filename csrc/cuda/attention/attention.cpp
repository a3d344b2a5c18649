// Attention on a GPU, torch edge: checks what the kernels rely on, fills in the problem, allocates what the passes of backward share,
// launches.
//
// query, key, value and grad_out arrive with rows that begin at multiples of 16 bytes and are whole multiples of 16 bytes long, widened
// by zeros if need be; results have their own head sizes. Lq and Lk are not zero: see pytransformer/ops/_backends/cuda/attention.py.
#include "cuda/attention/kernels.h"
#include "cuda/edge.h"

namespace {

using namespace pt::cuda;

// The arguments that forward and backward share.
#define ATTENTION_PARAMETERS                                                                                                         \
  MaybeTensor mask, MaybeTensor bias, MaybeTensor slopes, MaybeTensor diagonals, MaybeTensor query_lengths, MaybeTensor key_lengths, \
      MaybeTensor prefix_lengths, MaybeTensor query_segments, MaybeTensor key_segments, MaybeTensor cu_q, MaybeTensor cu_k,          \
      MaybeTensor dropout_seed, int64_t before, int64_t align, int64_t left, int64_t right, int64_t query_start, int64_t key_start,  \
      int64_t max_q, int64_t max_k, double scale, double softcap, double dropout_p
#define ATTENTION_ARGUMENTS                                                                                                          \
  mask, bias, slopes, diagonals, query_lengths, key_lengths, prefix_lengths, query_segments, key_segments, cu_q, cu_k, dropout_seed, \
      before, align, left, right, query_start, key_start, max_q, max_k, scale, softcap, dropout_p
#define ATTENTION_SCHEMA                                                                                                                \
  "Tensor? mask, Tensor? bias, Tensor? slopes, Tensor? diagonals, Tensor? query_lengths, Tensor? key_lengths, Tensor? prefix_lengths, " \
  "Tensor? query_segments, Tensor? key_segments, Tensor? cu_q, Tensor? cu_k, Tensor? dropout_seed, int before, int align, int left, "   \
  "int right, int query_start, int key_start, int max_q, int max_k, float scale, float softcap, float dropout_p"

class Builder {
 public:
  Builder(const Tensor& query, const Tensor& key, const Tensor& value, ATTENTION_PARAMETERS) {
    packed_ = cu_q.has_value();
    STD_TORCH_CHECK(cu_k.has_value() == packed_, "attention: cu_q and cu_k come together");
    STD_TORCH_CHECK(query.dim() == dims() && key.dim() == dims() && value.dim() == dims(), "attention: query, key and value must have ",
                    dims(), " dimensions");
    const int length = packed_ ? 0 : 2, last = int(dims()) - 1;
    p.dtype = dtype_of(query, "query");
    p.sequences = int(packed_ ? cu_q->numel() - 1 : query.size(0));
    p.heads = int(query.size(1)), p.group = p.heads / int(key.size(1));
    p.num_queries = int(packed_ ? max_q : query.size(2)), p.num_keys = int(packed_ ? max_k : key.size(2));
    p.head_dim = int(query.size(last)), p.value_dim = int(value.size(last));
    p.total_queries = query.size(length), p.total_keys = key.size(length);
    STD_TORCH_CHECK(p.num_queries > 0 && p.num_keys > 0 && p.group > 0 && p.heads % p.group == 0, "attention: nothing to do, or no group");
    STD_TORCH_CHECK(p.head_dim <= 256 && p.value_dim <= 256, "attention: head sizes up to 256");
    STD_TORCH_CHECK(key.size(last) == p.head_dim && value.size(length) == p.total_keys && value.size(1) == key.size(1) &&
                        (packed_ || (key.size(0) == p.sequences && value.size(0) == p.sequences)),
                    "attention: query, key and value do not go together");
    p.q = rows_of(query, "query"), p.k = rows_of(key, "key"), p.v = rows_of(value, "value");

    p.query_start = query_start, p.key_start = key_start;
    STD_TORCH_CHECK(query_start >= 0 && key_start >= 0 && max(p.num_queries, p.num_keys) + max(query_start, key_start) < 1 << 28,
                    "attention: positions must be below 2^28");
    STD_TORCH_CHECK(align >= 0 && align <= 2, "attention: align is ", align, "; wanted 0, 1 or 2");
    p.causal = align != 0, p.bottom_right = align == 2;
    p.left = int(left < 0 || left > kUnbounded ? kUnbounded : left), p.right = int(right < 0 || right > kUnbounded ? kUnbounded : right);
    const int64_t n = p.sequences;
    p.query_lengths = integers(query_lengths, "query_lengths", n), p.key_lengths = integers(key_lengths, "key_lengths", n);
    p.prefix_lengths = integers(prefix_lengths, "prefix_lengths", n);
    p.query_segments = integers(query_segments, "query_segments", n * p.num_queries);
    p.key_segments = integers(key_segments, "key_segments", n * p.num_keys);
    STD_TORCH_CHECK(!p.query_segments == !p.key_segments, "attention: query_segments and key_segments come together");
    p.cu_queries = integers(cu_q, "cu_seqlens_q", n + 1), p.cu_keys = integers(cu_k, "cu_seqlens_k", n + 1);
    p.mask = dense(mask, "mask"), p.bias = dense(bias, "bias");
    p.slopes = floats<const float>(slopes, "slopes", p.heads);
    if (diagonals) {
      const int64_t width = diagonals->numel() / p.heads;
      STD_TORCH_CHECK(before >= 0 && before < width, "attention: before is ", before, " of ", width, " diagonals");
      p.before = int(before), p.after = int(width - 1 - before);
      p.diagonals = floats<const float>(diagonals, "diagonals", p.heads * width);
    }
    p.scale = float(scale), p.softcap = float(softcap);
    p.drop_threshold = drop_threshold_of(dropout_p);
    p.keep_scale = p.drop_threshold < 65536 ? 65536.0f / (65536.0f - float(p.drop_threshold)) : 0.0f;
    if (p.drop_threshold) {
      STD_TORCH_CHECK(dropout_seed && dropout_seed->numel() == 1 && dropout_seed->scalar_type() == ScalarType::Long,
                      "attention: dropout needs an int64 seed");
      p.seed = static_cast<const uint64_t*>(read_from(*dropout_seed, "dropout_seed", reachable));
    }
  }

  // Rows that kernels copy 16 bytes at a time.
  In rows_of(const Tensor& t, const char* name, bool whole = true) {
    check_dtype(t, name);
    const In in{read_from(t, name, reachable), strides(t, name)};
    const int64_t per = 16 / size_of(p.dtype);
    STD_TORCH_CHECK(!whole || (reinterpret_cast<uintptr_t>(in.data) % 16 == 0 && in.stride.batch % per == 0 && in.stride.head % per == 0 &&
                               in.stride.row % per == 0 && t.size(dims() - 1) % per == 0),
                    "attention: rows of ", name, " are no multiples of 16 bytes");
    return in;
  }

  Out result(const MaybeTensor& t, const char* name, int64_t heads, int64_t rows, int64_t columns) {
    Out out;
    if (!t) return out;
    check_dtype(*t, name);
    const int64_t last = dims() - 1;
    STD_TORCH_CHECK(t->dim() == dims() && t->size(1) == heads && t->size(packed_ ? 0 : 2) == rows && t->size(last) <= columns,
                    "attention: ", name, " has the wrong shape");
    out.data = write_to(*t, name, reachable), out.stride = strides(*t, name), out.columns = int(t->size(last));
    const auto even = [](int64_t n) { return n % 2 == 0; };
    out.pairs = reinterpret_cast<uintptr_t>(out.data) % 4 == 0 && even(out.columns) && even(out.stride.batch) && even(out.stride.head) &&
                even(out.stride.row);
    return out;
  }

  // A number for each query: contiguous float32.
  template <class T>
  T* per_query(const Tensor& t, const char* name) {
    STD_TORCH_CHECK(t.dim() == dims() - 1, "attention: ", name, " must have ", dims() - 1, " dimensions");
    return floats<T>(t, name, packed_ ? p.heads * p.total_queries : int64_t(p.sequences) * p.heads * p.num_queries);
  }
  PerQuery per_query_strides() const {
    if (packed_) return {0, p.total_queries, 1};
    return {int64_t(p.heads) * p.num_queries, p.num_queries, 1};
  }

  // A boolean mask that is alike for all queries and heads becomes bits and bounds, in memory that `storage` holds.
  void pack_key_padding(const Tensor& like, std::optional<Tensor>& storage, void* stream) {
    if (!p.mask.data || packed_ || p.mask.type != DenseType::boolean || p.mask.head || p.mask.query) return;
    AttentionKeyPadding f{p.mask, p.mask.batch ? p.sequences : 1, p.num_keys, int(p.key_start % 32), nullptr};
    const int words = KeyPadding::kHead + KeyPadding::words(f.num_keys, f.before);
    storage = torch::stable::new_empty(like, {f.masks, words}, ScalarType::Int);
    f.bits = static_cast<uint32_t*>(write_to(*storage, "key_padding", reachable));
    attention_key_padding(f, stream);
    p.key_padding = {f.bits, f.masks == 1 ? 0 : words}, p.mask = {};
  }

  // Zeros of memory that `storage` holds, if flags are wanted.
  Recompute flags(Recompute wanted, int heads, const Tensor& like, std::optional<Tensor>& storage) {
    if (!wanted.tiles) return wanted;
    storage = torch::stable::new_zeros(like, {p.sequences, heads, wanted.tiles}, ScalarType::Int);
    wanted.flags = static_cast<int32_t*>(write_to(*storage, "flags", reachable));
    return wanted;
  }

  template <class T>
  T* floats(const MaybeTensor& t, const char* name, int64_t n) {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->numel() == n && t->is_contiguous() && t->scalar_type() == ScalarType::Float, "attention: ", name,
                    " must be contiguous, of ", n, " float32 numbers");
    if constexpr (std::is_const_v<T>) return static_cast<T*>(read_from(*t, name, reachable));
    else return static_cast<T*>(write_to(*t, name, reachable));
  }

  bool packed() const { return packed_; }
  int64_t rows_q() const { return packed_ ? p.total_queries : p.num_queries; }
  int64_t rows_k() const { return packed_ ? p.total_keys : p.num_keys; }

  AttentionProblem p{};
  Reachable reachable;

 private:
  static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
  int64_t dims() const { return packed_ ? 3 : 4; }

  void check_dtype(const Tensor& t, const char* name) const {
    STD_TORCH_CHECK(dtype_of(t, name) == p.dtype, "attention: ", name, " must have the dtype of query");
  }
  HeadRows strides(const Tensor& t, const char* name) const {
    const int64_t last = dims() - 1;
    STD_TORCH_CHECK(t.dim() == dims() && (t.size(last) <= 1 || t.stride(last) == 1), "attention: the columns of ", name,
                    " must be contiguous");
    const auto of = [&](int64_t i) { return t.size(i) == 1 ? 0 : t.stride(i); };
    return packed_ ? HeadRows{0, of(1), of(0)} : HeadRows{of(0), of(1), of(2)};
  }
  const int64_t* integers(const MaybeTensor& t, const char* name, int64_t n) {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->numel() == n && t->is_contiguous() && t->scalar_type() == ScalarType::Long, "attention: ", name,
                    " must be contiguous, of ", n, " int64 numbers");
    return static_cast<const int64_t*>(read_from(*t, name, reachable));
  }
  Dense dense(const MaybeTensor& t, const char* name) {
    Dense d;
    if (!t) return d;
    const int64_t full[4] = {p.sequences, p.heads, p.num_queries, p.num_keys};
    int64_t stride[4];
    STD_TORCH_CHECK(t->dim() == 4, "attention: ", name, " must have 4 dimensions");
    for (int i = 0; i < 4; ++i) {
      STD_TORCH_CHECK(t->size(i) == full[i] || t->size(i) == 1, "attention: ", name, " has size ", t->size(i), " in dimension ", i);
      stride[i] = t->size(i) == 1 ? 0 : t->stride(i);
    }
    d = {read_from(*t, name, reachable), stride[0], stride[1], stride[2], stride[3]};
    const int64_t size = t->element_size();
    const auto aligned = [&](int64_t n) {
      return reinterpret_cast<uintptr_t>(d.data) % (n * size) == 0 && stride[0] % n == 0 && stride[1] % n == 0 && stride[2] % n == 0 &&
             p.num_keys % n == 0 && p.key_start % n == 0;
    };
    while (stride[3] == 1 && 2 * d.vector_width * size <= 16 && aligned(2 * d.vector_width)) d.vector_width *= 2;
    switch (t->scalar_type()) {
      case ScalarType::Bool: d.type = DenseType::boolean; break;
      case ScalarType::Double: d.type = DenseType::f64; break;
      default: {
        const DType type = dtype_of(*t, name);
        d.type = type == DType::f32 ? DenseType::f32 : type == DType::bf16 ? DenseType::bf16 : DenseType::f16;
      }
    }
    return d;
  }

  bool packed_;
};

void attention_fwd(Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, ATTENTION_PARAMETERS, int64_t device, int64_t stream) {
  Builder b(query, key, value, ATTENTION_ARGUMENTS);
  const DeviceGuard guard(device);
  std::optional<Tensor> key_padding, flags;
  b.pack_key_padding(lse, key_padding, reinterpret_cast<void*>(stream));
  AttentionForward f{};
  f.p = b.p;
  f.out = b.result(out, "out", b.p.heads, b.rows_q(), b.p.value_dim);
  f.lse = b.per_query<float>(lse, "lse");
  f.at = b.per_query_strides();
  f.recompute = b.flags(attention_forward_recompute(f), b.p.heads, lse, flags);
  attention_forward(f, reinterpret_cast<void*>(stream));
}

void attention_bwd(Tensor grad_out, MaybeTensor grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse,
                   ATTENTION_PARAMETERS, MaybeTensor dq, MaybeTensor dk, MaybeTensor dv, MaybeTensor dmask, MaybeTensor dbias,
                   MaybeTensor dslopes, MaybeTensor dtable, MaybeTensor bucket_ranges, bool deterministic, int64_t device,
                   int64_t stream_) {
  Builder b(query, key, value, ATTENTION_ARGUMENTS);
  void* const stream = reinterpret_cast<void*>(stream_);
  const DeviceGuard guard(device);
  // Dropped when this returns; torch's allocator gives the memory to later work of the same stream only.
  const auto new_row_stat = [&](const char* name, std::optional<Tensor>& storage) {
    storage = torch::stable::new_empty(lse, {lse.numel()}, ScalarType::Float);
    return b.floats<float>(storage, name, lse.numel());
  };
  std::optional<Tensor> key_padding, delta, row_max, log2_sum, dq_accum, slope_partials, diagonal_partials, query_flags, key_flags;
  b.pack_key_padding(lse, key_padding, stream);

  AttentionPreprocess r{};
  r.p = b.p, r.at = b.per_query_strides();
  r.out = b.rows_of(out, "out", false), r.d_out = b.rows_of(grad_out, "grad_out"), r.columns = int(out.size(out.dim() - 1));
  r.lse = b.per_query<const float>(lse, "lse");
  r.d_lse = grad_lse ? b.per_query<const float>(*grad_lse, "grad_lse") : nullptr;
  r.delta = new_row_stat("delta", delta), r.row_max = new_row_stat("row_max", row_max);
  attention_backward_preprocess(r, stream);

  AttentionBackward g{};
  g.p = b.p, g.at = r.at, g.d_out = r.d_out, g.delta = r.delta, g.row_max = r.row_max;
  if (b.p.split_lse()) {
    AttentionForward f{};
    f.p = b.p, f.at = r.at, f.lse = const_cast<float*>(r.lse);
    f.row_max = r.row_max, f.log2_sum = new_row_stat("log2_sum", log2_sum);
    g.log2_sum = f.log2_sum;
    attention_forward(f, stream);
  }
  g.dq = b.result(dq, "dq", b.p.heads, b.rows_q(), b.p.head_dim);
  const int64_t key_heads = b.p.heads / b.p.group;
  g.dk = b.result(dk, "dk", key_heads, b.rows_k(), b.p.head_dim), g.dv = b.result(dv, "dv", key_heads, b.rows_k(), b.p.value_dim);
  STD_TORCH_CHECK((!dslopes || b.p.slopes) && (!dtable || (b.p.diagonals && bucket_ranges)), "attention: a gradient of nothing");
  const AttentionPlan plan = plan_attention(Pass::BwdDq, b.p, dtable.has_value());
  AttentionReducePartials sums{nullptr, nullptr, nullptr, b.p.sequences, b.p.heads, int(tiles_of(b.p.num_queries, plan.tile)), 1, 1};
  const int64_t blocks = int64_t(sums.sequences) * sums.heads * sums.tiles, width = b.p.before + b.p.after + 1;
  if (dslopes) {
    slope_partials = torch::stable::new_empty(lse, {blocks}, ScalarType::Float);
    g.slope_partials = b.floats<float>(slope_partials, "partials of slopes", blocks);
  }
  if (dtable) {
    diagonal_partials = torch::stable::new_zeros(lse, {blocks, width}, ScalarType::Float);
    g.diagonal_partials = b.floats<float>(diagonal_partials, "partials of diagonals", blocks * width);
  }
  const int64_t sums_wanted = deterministic ? 0 : attention_dq_accum_size(g);
  if (sums_wanted) {
    dq_accum = torch::stable::new_zeros(lse, {sums_wanted}, ScalarType::Float);
    g.dq_accum = b.floats<float>(dq_accum, "dq_accum", sums_wanted);
    attention_backward_fused(g, stream);
  } else if (dq || dslopes || dtable) {
    g.recompute = b.flags(attention_backward_recompute(g, Pass::BwdDq), b.p.heads, lse, query_flags);
    attention_backward_dq(g, stream);
  }
  if (dslopes) {
    sums.partials = g.slope_partials, sums.sums = b.floats<float>(dslopes, "dslopes", b.p.heads);
    attention_backward_reduce_partials(sums, stream);
  }
  if (dtable) {
    STD_TORCH_CHECK(bucket_ranges->scalar_type() == ScalarType::Int && bucket_ranges->is_contiguous() &&
                        bucket_ranges->numel() * b.p.heads == 2 * dtable->numel(),
                    "attention: bucket_ranges must be contiguous int32, (buckets, 2)");
    sums.ranges = static_cast<const int32_t*>(read_from(*bucket_ranges, "bucket_ranges", b.reachable));
    sums.partials = g.diagonal_partials, sums.sums = b.floats<float>(dtable, "dtable", dtable->numel());
    sums.width = int(width), sums.outputs = int(dtable->numel() / b.p.heads);
    attention_backward_reduce_partials(sums, stream);
  }
  if (!sums_wanted && (dk || dv)) {
    g.recompute = b.flags(attention_backward_recompute(g, Pass::BwdDkdv), int(key_heads), lse, key_flags);
    attention_backward_dkdv(g, stream);
  }

  const MaybeTensor* dense[] = {&dmask, &dbias};
  for (const MaybeTensor* t : dense) {
    if (!*t) continue;
    const char* name = t == dense[0] ? "dmask" : "dbias";
    const Tensor& d = **t;
    const MaybeTensor& of = t == dense[0] ? mask : bias;
    AttentionDbias f{};
    f.b = g, f.data = write_to(d, name, b.reachable), f.dtype = dtype_of(d, name);
    STD_TORCH_CHECK(of && d.dim() == 4, "attention: ", name, " must have the shape of what it is the gradient of");
    for (int i = 0; i < 4; ++i) {
      STD_TORCH_CHECK(d.size(i) == of->size(i), "attention: ", name, " must have the shape of what it is the gradient of");
      f.sizes[i] = int(d.size(i));
    }
    f.batch = d.stride(0), f.head = d.stride(1), f.query = d.stride(2), f.key = d.stride(3);
    const auto even = [](int64_t n) { return n % 2 == 0; };
    f.pairs = reinterpret_cast<uintptr_t>(f.data) % (2 * d.element_size()) == 0 && f.key == 1 && even(f.batch) && even(f.head) &&
              even(f.query) && even(b.p.num_keys) && even(b.p.key_start);
    attention_backward_dbias(f, stream);
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(PT_EDGE_OP("attention_fwd(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor(b!) lse, " ATTENTION_SCHEMA
                   ", int device, int stream) -> ()"));
  m.def(PT_EDGE_OP(
      "attention_bwd(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, " ATTENTION_SCHEMA
      ", Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dmask, Tensor(e!)? dbias, Tensor(f!)? dslopes, "
      "Tensor(g!)? dtable, Tensor? bucket_ranges, bool deterministic, int device, int stream) -> ()"));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, PT_EDGE_KEY, m) {
  m.impl(PT_EDGE_OP("attention_fwd"), TORCH_BOX(&attention_fwd));
  m.impl(PT_EDGE_OP("attention_bwd"), TORCH_BOX(&attention_bwd));
}
