// SPDX-License-Identifier: Apache-2.0
// Attention binding: convert tensors to an AttentionProblem. Check every input of an address
// computation, and the values of lengths.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "common/attention_arguments.h"
#include "cpu/attention/problem.h"
#include "cpu/core/binding.h"

PT_DECLARE_KERNELS(AttentionKernels, attention_kernels);

namespace {

using pt::MaybeTensor;
using pt::ScalarType;
using pt::Tensor;
using pt::binding::IndexCopies;

constexpr const char* kOp = "attention";

// Python raises ValueError for these messages.
#define CHECK_VALUE(condition, ...) STD_TORCH_CHECK(condition, "ValueError: ", __VA_ARGS__)

void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) {
  bool same = t.dim() == int64_t(shape.size());
  int64_t d = 0;
  for (int64_t size : shape) same = same && t.size(d++) == size;
  STD_TORCH_CHECK(same, name, " has the wrong shape");
}

const void* read(const Tensor& t, const char* name) { return pt::read_address(kOp, t, name); }
void* write(const Tensor& t, const char* name) { return pt::write_address(kOp, t, name); }

const int64_t* integers(const MaybeTensor& t, const char* name,
                        std::initializer_list<int64_t> shape) {
  if (!t) return nullptr;
  check_shape(*t, name, shape);
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Long && t->is_contiguous(), name,
                  " is not a contiguous int64 tensor");
  return static_cast<const int64_t*>(read(*t, name));
}
const int64_t* copied_integers(IndexCopies& copies, const MaybeTensor& t, const char* name,
                               std::initializer_list<int64_t> shape) {
  const int64_t* data = integers(t, name, shape);
  return t ? copies.copy<int64_t>(data, t->numel()) : nullptr;
}

void* statistics(const MaybeTensor& t, const char* name, ScalarType work,
                 std::initializer_list<int64_t> shape) {
  if (!t) return nullptr;
  check_shape(*t, name, shape);
  STD_TORCH_CHECK(t->scalar_type() == work && t->is_contiguous(), name,
                  " is not contiguous, or not of the dtype scores are computed in");
  return write(*t, name);
}

// Return the strides of (B, H, L, D), or of packed (total, H, D).
pt::Strides strides_of(const Tensor& t, const char* name, bool packed) {
  const int64_t n = t.dim();
  STD_TORCH_CHECK(n == (packed ? 3 : 4), name, " has ", n, " dimensions; expected ",
                  packed ? 3 : 4);
  // contiguous() of an empty tensor may return any strides.
  STD_TORCH_CHECK(t.size(n - 1) <= 1 || t.stride(n - 1) == 1 || t.numel() == 0, name,
                  " has a last stride of ", t.stride(n - 1), "; expected 1");
  return packed ? pt::Strides{0, t.stride(1), t.stride(0), 1}
                : pt::Strides{t.stride(0), t.stride(1), t.stride(2), 1};
}

pt::Dense dense(const MaybeTensor& t, const char* name, const pt::AttentionProblem& p,
                bool may_be_boolean) {
  pt::Dense d;
  if (!t) return d;
  STD_TORCH_CHECK(t->dim() == 4, name, " has ", t->dim(), " dimensions; expected 4");
  const int64_t full[4] = {p.B, p.Hq, p.Lq, p.Lk};
  int64_t stride[4];
  for (int i = 0; i < 4; i++) {
    STD_TORCH_CHECK(t->size(i) == full[i] || t->size(i) == 1, name, " has size ", t->size(i),
                    " in dimension ", i, "; expected ", full[i], " or 1");
    stride[i] = t->size(i) == 1 ? 0 : t->stride(i);
  }
  d.data = read(*t, name);
  d.stride = {stride[0], stride[1], stride[2], stride[3]};
  d.boolean = t->scalar_type() == ScalarType::Bool;
  STD_TORCH_CHECK(may_be_boolean || !d.boolean, name, " is boolean; expected a floating dtype");
  if (!d.boolean) d.dtype = dtype_of(*t, name, pt::Float64::taken);
  return d;
}

void check_lengths(const int64_t* lengths, const char* name, int64_t n, int64_t most) {
  for (int64_t b = 0; lengths && b < n; b++)
    CHECK_VALUE(lengths[b] >= 0 && lengths[b] <= most, name, "[", b, "] is ", lengths[b],
                "; expected between 0 and ", most, " (start + length)");
}

void check_offsets(const int64_t* cu, const char* name, int64_t sequences, int64_t total,
                   int64_t longest) {
  CHECK_VALUE(cu[0] == 0, name, "[0] is ", cu[0], "; expected 0");
  for (int64_t b = 0; b < sequences; b++) {
    CHECK_VALUE(cu[b + 1] >= cu[b], name, " falls from ", cu[b], " to ", cu[b + 1], " at sequence ",
                b, "; expected non-decreasing offsets");
    CHECK_VALUE(cu[b + 1] - cu[b] <= longest, name, " gives sequence ", b, " ", cu[b + 1] - cu[b],
                " rows, but the longest was said to be ", longest);
  }
  CHECK_VALUE(cu[sequences] <= total, name, " ends at ", cu[sequences], ", but there are only ",
              total, " rows");
}

// Read a block mask: query block n has the entries offsets[n] .. offsets[n + 1]. Check every key
// block and bits index, because kernels compute addresses from them.
pt::BlockMask block_mask(IndexCopies& copies, const MaybeTensor& offsets,
                         const MaybeTensor& entries, const MaybeTensor& bits,
                         const pt::AttentionProblem& p) {
  pt::BlockMask m;
  if (!offsets) return m;
  STD_TORCH_CHECK(entries && bits, "block_offsets, block_entries and block_bits come together");
  for (const MaybeTensor* t : {&offsets, &entries, &bits})
    STD_TORCH_CHECK((*t)->scalar_type() == ScalarType::Int && (*t)->is_contiguous(),
                    "a tensor of the block mask is not contiguous int32");
  STD_TORCH_CHECK(offsets->dim() == 3 && bits->dim() == 3,
                  "block_offsets or block_bits has not 3 dimensions");
  const int64_t n = entries->size(0), places = bits->size(0), rows = bits->size(1),
                keys = 32 * bits->size(2);
  check_shape(*entries, "block_entries", {n, 2});
  const auto power_of_two = [](int64_t n) { return n >= 32 && n <= 1 << 20 && !(n & (n - 1)); };
  STD_TORCH_CHECK(power_of_two(rows) && power_of_two(keys), "blocks are of ", rows, " x ", keys,
                  " pairs; expected powers of two from 32 to 2^20");
  m.B = offsets->size(0), m.H = offsets->size(1), m.row_bits = __builtin_ctzll(rows),
  m.key_bits = __builtin_ctzll(keys);
  const int64_t down = (p.Lq + rows - 1) / rows, across = (p.Lk + keys - 1) / keys;
  STD_TORCH_CHECK((m.B == 1 || m.B == p.B) && (m.H == 1 || m.H == p.Hq), "the block mask is of ",
                  m.B, " x ", m.H, " batch elements and heads");
  check_shape(*offsets, "block_offsets", {m.B, m.H, down + 1});
  m.offsets = copies.copy<int32_t>(read(*offsets, "block_offsets"), offsets->numel());
  m.entries = copies.copy<int32_t>(read(*entries, "block_entries"), entries->numel());
  m.bits = static_cast<const uint32_t*>(read(*bits, "block_bits"));
  for (int64_t list = 0; list < m.B * m.H; list++)
    for (int64_t i = 0; i <= down; i++) {
      const int32_t at = m.offsets[list * (down + 1) + i],
                    before = i ? m.offsets[list * (down + 1) + i - 1] : 0;
      CHECK_VALUE(at >= before && at <= n, "block_offsets fall, or go beyond the ", n, " entries");
    }
  for (int64_t e = 0; e < n; e++) {
    CHECK_VALUE(m.entries[2 * e] >= 0 && m.entries[2 * e] < across, "block_entries names block ",
                m.entries[2 * e], " of keys; there are ", across);
    CHECK_VALUE(m.entries[2 * e + 1] >= -1 && m.entries[2 * e + 1] < places,
                "block_entries names bits ", m.entries[2 * e + 1], "; there are ", places,
                " partial blocks");
  }
  static const uint32_t none[1] = {};
  // An empty tensor has a null address, but kernels take non-null bits as a block mask.
  if (!m.bits) m.bits = none;
  return m;
}

// Read paged keys and values, and check every table entry that kernels compute an address from.
pt::Pages pages_of(IndexCopies& copies, const MaybeTensor& table, const Tensor& key,
                   const pt::AttentionProblem& p, int64_t key_start) {
  pt::Pages pages;
  if (!table) return pages;
  const bool wide = table->scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK((wide || table->scalar_type() == ScalarType::Int) && table->is_contiguous(),
                  "page_table is not contiguous int32 or int64");
  STD_TORCH_CHECK(p.key_lengths || p.B == 0, "page_table needs key_lengths");
  const void* data = read(*table, "page_table");
  const void* entries = wide ? static_cast<const void*>(copies.copy<int64_t>(data, table->numel()))
                             : copies.copy<int32_t>(data, table->numel());
  pages = {entries, key.size(2), table->size(1), wide};
  for (int64_t b = 0; b < p.B; b++) {
    const int64_t keys = std::min(p.key_lengths[b] - key_start, p.Lk);
    for (int64_t n = 0; n * pages.size < keys; n++)
      CHECK_VALUE(pages.at(b, n) >= 0 && pages.at(b, n) < key.size(0), "page_table[", b, ", ", n,
                  "] is ", pages.at(b, n), "; expected a page from 0 to ", key.size(0) - 1);
  }
  return pages;
}

// Check that key and value have query's dtype, or both the same 8-bit dtype.
void check_dtypes(const Tensor& query, const Tensor& key, const Tensor& value,
                  pt::AttentionProblem& p) {
  const ScalarType found = key.scalar_type();
  if (found == ScalarType::Char) p.eight = pt::EightBits::int8;
  if (found == ScalarType::Float8_e4m3fn) p.eight = pt::EightBits::e4m3;
  const bool fits =
      p.eight == pt::EightBits::none ? found == query.scalar_type() : p.dtype != pt::DType::f64;
  STD_TORCH_CHECK(fits && value.scalar_type() == found, "query, key and value differ in dtype");
}

// Return the scales of 8-bit keys or values, one per row of `key`, with any strides.
pt::RowScales scales_of(const MaybeTensor& t, const char* name, const Tensor& key,
                        const pt::AttentionProblem& p) {
  STD_TORCH_CHECK(t.has_value() == (p.eight != pt::EightBits::none), name,
                  " comes with keys in eight bits, and with no others");
  if (!t) return {};
  STD_TORCH_CHECK(t->scalar_type() == ScalarType::Float && key.dim() == 4, name, " is not float32");
  check_shape(*t, name, {key.size(0), key.size(1), key.size(2)});
  return {static_cast<const float*>(read(*t, name)), {t->stride(0), t->stride(1), t->stride(2), 1}};
}

// The arguments that forward and backward share.
struct AttentionArguments {
  PT_CPU_ATTENTION_ARGUMENTS(PT_MEMBER)
};

ScalarType work_of(const pt::AttentionProblem& p) {
  return p.dtype == pt::DType::f64 ? ScalarType::Double : ScalarType::Float;
}

// Fill in dtypes, sizes, and the addresses and strides of query, key and value.
void add_operands(pt::AttentionProblem& p, const Tensor& query, const Tensor& key,
                  const Tensor& value, const AttentionArguments& a) {
  const bool packed = a.cu_seqlens_q.has_value(), paged = a.page_table.has_value(),
             packed_keys = packed && !paged;
  STD_TORCH_CHECK(a.cu_seqlens_k.has_value() == packed_keys,
                  "cu_q and cu_k come together, or cu_q and page_table");
  p.qs = strides_of(query, "query", packed), p.ks = strides_of(key, "key", packed_keys),
  p.vs = strides_of(value, "value", packed_keys);
  p.dtype = dtype_of(query, "query", pt::Float64::taken);
  check_dtypes(query, key, value, p);
  p.B = packed ? a.cu_seqlens_q->numel() - 1 : query.size(0);
  p.Hq = query.size(1), p.Hkv = key.size(1);
  p.D = query.size(query.dim() - 1), p.Dv = value.size(value.dim() - 1);
  const int64_t q_rows = query.size(packed ? 0 : 2), k_rows = key.size(packed_keys ? 0 : 2);
  STD_TORCH_CHECK(!packed || (a.num_queries >= 0 && a.num_keys >= 0), "max_q and max_k are ",
                  a.num_queries, " and ", a.num_keys, "; expected at least 0");
  p.Lq = packed ? std::min(a.num_queries, q_rows) : q_rows, p.Lk = k_rows;
  if (paged) {
    STD_TORCH_CHECK(k_rows >= 1, "pages have no rows");
    STD_TORCH_CHECK(a.page_table->dim() == 2 && a.page_table->size(0) == p.B,
                    "page_table has the wrong shape");
    p.Lk *= a.page_table->size(1);
  }
  if (packed) p.Lk = std::min(a.num_keys, p.Lk);
  STD_TORCH_CHECK(p.D >= 1 && p.Dv >= 1 && p.D <= pt::kMaxHead && p.Dv <= pt::kMaxHead,
                  "head sizes are ", p.D, " and ", p.Dv, "; expected 1 to ", pt::kMaxHead);
  STD_TORCH_CHECK(p.Hkv > 0 ? p.Hq % p.Hkv == 0 : p.Hq == 0, "query has ", p.Hq,
                  " heads; expected a multiple of key's ", p.Hkv);
  STD_TORCH_CHECK(p.B >= 0, "cu_q is empty");
  if (packed_keys) {
    check_shape(key, "key", {k_rows, p.Hkv, p.D}),
        check_shape(value, "value", {k_rows, p.Hkv, p.Dv});
  } else {
    const int64_t sequences = paged ? key.size(0) : p.B;
    check_shape(key, "key", {sequences, p.Hkv, k_rows, p.D}),
        check_shape(value, "value", {sequences, p.Hkv, k_rows, p.Dv});
  }
  p.key_scale = scales_of(a.key_scale, "key_scale", key, p),
  p.value_scale = scales_of(a.value_scale, "value_scale", key, p);
  p.q = read(query, "query"), p.k = read(key, "key"), p.v = read(value, "value");
}

// Fill in what modifies scores: dense terms, a block mask, ALiBi, T5 and sinks.
void add_terms(pt::AttentionProblem& p, IndexCopies& copies, const AttentionArguments& a) {
  const ScalarType work = work_of(p);
  p.scale = a.scale, p.softcap = a.softcap, p.bidirectional = a.bidirectional;
  p.mask = dense(a.mask, "mask", p, true), p.bias = dense(a.bias, "bias", p, false);
  p.blocks = block_mask(copies, a.block_offsets, a.block_entries, a.block_bits, p);
  STD_TORCH_CHECK(!a.mask || !a.block_offsets, "mask and a block mask exclude each other");
  p.slopes = statistics(a.slopes, "slopes", work, {p.Hq}),
  p.sinks = statistics(a.sinks, "sinks", work, {p.Hq});
  if (!a.table) return;
  p.buckets = a.table->size(0);
  p.table = statistics(a.table, "table", work, {p.buckets, p.Hq});
  p.bucket_starts =
      integers(a.bucket_starts, "bucket_starts", {a.bidirectional ? p.buckets / 2 : p.buckets});
  STD_TORCH_CHECK(p.bucket_starts && p.buckets >= (a.bidirectional ? 2 : 1),
                  "table needs bucket_starts and at least one bucket a direction");
}

// Fill in what bounds the keys of a query: causality, window, lengths, pages, segments and packed
// sequences.
void add_bounds(pt::AttentionProblem& p, IndexCopies& copies, const Tensor& query,
                const Tensor& key, const AttentionArguments& a) {
  // batch_start and head_start only enter dropout's counter words, modulo 2^32, so any value is
  // valid.
  const std::pair<int64_t, const char*> starts[] = {
      {a.query_start, "query_start"}, {a.key_start, "key_start"}, {a.global_keys, "global_keys"}};
  for (auto [start, name] : starts) pt::check_start(kOp, start, name);
  p.batch_start = a.batch_start, p.head_start = a.head_start, p.query_start = a.query_start,
  p.key_start = a.key_start;
  p.query_lengths = copied_integers(copies, a.query_lengths, "query_lengths", {p.B});
  p.key_lengths = copied_integers(copies, a.key_lengths, "key_lengths", {p.B});
  p.prefix_lengths = copied_integers(copies, a.prefix_lengths, "prefix_lengths", {p.B});
  check_lengths(p.query_lengths, "query_lengths", p.B, a.query_start + p.Lq),
      check_lengths(p.key_lengths, "key_lengths", p.B, a.key_start + p.Lk);
  check_lengths(p.prefix_lengths, "prefix_lengths", p.B, a.key_start + p.Lk);
  p.pages = pages_of(copies, a.page_table, key, p, a.key_start);
  p.query_segments = integers(a.query_segments, "query_segments", {p.B, p.Lq}),
  p.key_segments = integers(a.key_segments, "key_segments", {p.B, p.Lk});
  STD_TORCH_CHECK(a.query_segments.has_value() == a.key_segments.has_value(),
                  "query_segments and key_segments come together");
  p.cu_q = copied_integers(copies, a.cu_seqlens_q, "cu_seqlens_q", {p.B + 1});
  p.cu_k = copied_integers(copies, a.cu_seqlens_k, "cu_seqlens_k", {p.B + 1});
  if (p.cu_q) {
    check_offsets(p.cu_q, "cu_seqlens_q", p.B, query.size(0), p.Lq);
    if (p.cu_k) check_offsets(p.cu_k, "cu_seqlens_k", p.B, key.size(0), p.Lk);
    STD_TORCH_CHECK(!a.mask && !a.bias && !a.block_offsets && !a.query_segments,
                    "packed sequences take no dense mask or bias, no block mask and no segments");
  }
  STD_TORCH_CHECK(a.align >= 0 && a.align <= 2, "align is ", a.align, "; expected 0, 1 or 2");
  p.align = pt::Align(a.align), p.left = a.left, p.right = a.right, p.global_keys = a.global_keys;
}

// Build the problem. The tensors and the copies must outlive it.
pt::AttentionProblem problem(IndexCopies& copies, const Tensor& query, const Tensor& key,
                             const Tensor& value, const AttentionArguments& a) {
  pt::AttentionProblem p{};
  add_operands(p, query, key, value, a);
  add_terms(p, copies, a);
  add_bounds(p, copies, query, key, a);
  p.drop_threshold = pt::drop_threshold_of(a.dropout_p);
  if (p.drop_threshold > 0) p.seed = pt::seed_of(kOp, a.dropout_seed);
  p.threads = pt::pool_threads();
  return p;
}

// Add the outputs, which backward reads.
void add_outputs(pt::AttentionProblem& p, const Tensor& query, const Tensor& out,
                 const Tensor& lse) {
  const bool packed = p.cu_q;
  const int64_t rows = query.size(packed ? 0 : 2);
  p.os = strides_of(out, "out", packed);
  STD_TORCH_CHECK(out.scalar_type() == query.scalar_type(), "query and out differ in dtype");
  STD_TORCH_CHECK(lse.scalar_type() == work_of(p),
                  "lse is not of the dtype scores are computed in");
  if (packed) {
    check_shape(out, "out", {rows, p.Hq, p.Dv}), check_shape(lse, "lse", {p.Hq, rows});
    p.lse_s = {0, lse.stride(0), lse.stride(1), 1};
  } else {
    check_shape(out, "out", {p.B, p.Hq, rows, p.Dv}), check_shape(lse, "lse", {p.B, p.Hq, rows});
    p.lse_s = {lse.stride(0), lse.stride(1), lse.stride(2), 1};
  }
  p.out = write(out, "out"), p.lse = write(lse, "lse");
}

// Clear the rows of packed outputs after the last sequence.
template <class Lse>
void clear_rest(const pt::AttentionProblem& p, int64_t rows) {
  const int64_t element = size_of(p.dtype);
  for (int64_t i = p.cu_q[p.B]; i < rows; i++)
    for (int64_t h = 0; h < p.Hq; h++) {
      std::memset(static_cast<char*>(p.out) + (i * p.os.l + h * p.os.h) * element, 0,
                  p.Dv * element);
      static_cast<Lse*>(p.lse)[h * p.lse_s.h + i * p.lse_s.l] = -Lse(INFINITY);
    }
}

void attention_fwd(Tensor query, Tensor key, Tensor value, Tensor out,
                   Tensor lse PT_CPU_ATTENTION_ARGUMENTS(PT_PARAMETER)) {
  IndexCopies copies;
  const AttentionArguments a{PT_CPU_ATTENTION_ARGUMENTS(PT_VALUE)};
  pt::AttentionProblem p = problem(copies, query, key, value, a);
  add_outputs(p, query, out, lse);
  if (p.cu_q && p.dtype == pt::DType::f64) clear_rest<double>(p, query.size(0));
  else if (p.cu_q) clear_rest<float>(p, query.size(0));
  PT_SELECT(attention_kernels).forward(p);
}

// Return the address and strides of the gradient `t` of `of`.
void* gradient(const MaybeTensor& t, const char* name, const Tensor& of, bool packed,
               pt::Strides* strides) {
  if (!t) return nullptr;
  *strides = strides_of(*t, name, packed);
  bool same = t->scalar_type() == of.scalar_type();
  for (int64_t i = 0; same && i < of.dim(); i++) same = t->size(i) == of.size(i);
  STD_TORCH_CHECK(same, name, " differs in shape or dtype from the tensor it is the gradient of");
  return write(*t, name);
}

pt::DenseGrad dense_gradient(const MaybeTensor& t, const char* name, const MaybeTensor& of,
                             ScalarType work) {
  pt::DenseGrad g;
  if (!t) return g;
  STD_TORCH_CHECK(of && of->scalar_type() != ScalarType::Bool, name,
                  " without a floating-point tensor that it is the gradient of");
  STD_TORCH_CHECK(t->scalar_type() == work && t->is_contiguous(), name,
                  " is not contiguous, or not of the dtype scores are computed in");
  check_shape(*t, name, {of->size(0), of->size(1), of->size(2), of->size(3)});
  int64_t stride[4];
  for (int i = 0; i < 4; i++) stride[i] = t->size(i) == 1 ? 0 : t->stride(i);
  g.data = write(*t, name), g.stride = {stride[0], stride[1], stride[2], stride[3]};
  return g;
}

// Clear the rows of a packed gradient after the last sequence.
void clear_rest(void* data, const pt::Strides& s, int64_t first, int64_t rows, int64_t heads,
                int64_t bytes, int64_t element) {
  for (int64_t i = first; data && i < rows; i++)
    for (int64_t h = 0; h < heads; h++)
      std::memset(static_cast<char*>(data) + (i * s.l + h * s.h) * element, 0, bytes);
}

void attention_bwd(Tensor grad_out, MaybeTensor grad_lse, Tensor query, Tensor key, Tensor value,
                   Tensor out, Tensor lse PT_CPU_ATTENTION_ARGUMENTS(PT_PARAMETER), MaybeTensor dq,
                   MaybeTensor dk, MaybeTensor dv, MaybeTensor dmask, MaybeTensor dbias,
                   MaybeTensor dslopes, MaybeTensor dtable, MaybeTensor dsinks) {
  STD_TORCH_CHECK(!page_table, "pages have no gradients");
  STD_TORCH_CHECK(!key_scale, "keys in eight bits have no gradients");
  IndexCopies copies;
  const AttentionArguments a{PT_CPU_ATTENTION_ARGUMENTS(PT_VALUE)};
  pt::AttentionProblem p = problem(copies, query, key, value, a);
  add_outputs(p, query, out, lse);
  const bool packed = p.cu_q;
  const ScalarType work = lse.scalar_type();
  pt::AttentionGrads g{};
  g.d_out = gradient(grad_out, "grad_out", out, packed, &g.dos);
  if (grad_lse) {
    bool same = grad_lse->scalar_type() == work && grad_lse->dim() == lse.dim();
    for (int64_t i = 0; same && i < lse.dim(); i++) same = grad_lse->size(i) == lse.size(i);
    STD_TORCH_CHECK(same, "grad_lse differs in shape or dtype from lse");
    g.d_lse = read(*grad_lse, "grad_lse");
    g.d_lse_s = packed
                    ? pt::Strides{0, grad_lse->stride(0), grad_lse->stride(1), 1}
                    : pt::Strides{grad_lse->stride(0), grad_lse->stride(1), grad_lse->stride(2), 1};
  }
  g.dq = gradient(dq, "dq", query, packed, &g.dqs), g.dk = gradient(dk, "dk", key, packed, &g.dks),
  g.dv = gradient(dv, "dv", value, packed, &g.dvs);
  g.d_mask = dense_gradient(dmask, "dmask", a.mask, work),
  g.d_bias = dense_gradient(dbias, "dbias", a.bias, work);
  STD_TORCH_CHECK((!dslopes || p.slopes) && (!dtable || p.table) && (!dsinks || p.sinks),
                  "dslopes, dtable or dsinks without slopes, table or sinks");
  g.d_slopes = statistics(dslopes, "dslopes", work, {p.Hq});
  g.d_table = statistics(dtable, "dtable", work, {p.buckets, p.Hq});
  g.d_sinks = statistics(dsinks, "dsinks", work, {p.Hq});
  if (packed) {
    const int64_t element = query.element_size();
    clear_rest(g.dq, g.dqs, p.cu_q[p.B], query.size(0), p.Hq, p.D * element, element);
    clear_rest(g.dk, g.dks, p.cu_k[p.B], key.size(0), p.Hkv, p.D * element, element);
    clear_rest(g.dv, g.dvs, p.cu_k[p.B], key.size(0), p.Hkv, p.Dv * element, element);
  }
  PT_SELECT(attention_kernels).backward(p, g);
}

// Describe the gradient that dense_gradient() would return for a floating-point term.
pt::DenseGrad planned_gradient(const pt::Dense& term, const MaybeTensor& of, void* data) {
  pt::DenseGrad g;
  if (!of || term.boolean) return g;
  g.data = data;
  int64_t stride[4], step = 1;
  for (int i = 3; i >= 0; step *= of->size(i--)) stride[i] = of->size(i) == 1 ? 0 : step;
  g.stride = {stride[0], stride[1], stride[2], stride[3]};
  return g;
}

// Return the scratch bytes of forward, and of backward with all gradients if requested.
int64_t attention_scratch(Tensor query, Tensor key,
                          Tensor value PT_CPU_ATTENTION_ARGUMENTS(PT_PARAMETER), bool backward) {
  IndexCopies copies;
  const AttentionArguments a{PT_CPU_ATTENTION_ARGUMENTS(PT_VALUE)};
  const pt::AttentionProblem p = problem(copies, query, key, value, a);
  void* any = const_cast<void*>(p.q);  // placeholder for every gradient; never written
  pt::AttentionGrads g{};
  g.dq = g.dk = g.dv = any;
  g.d_mask = planned_gradient(p.mask, a.mask, any),
  g.d_bias = planned_gradient(p.bias, a.bias, any);
  g.d_slopes = p.slopes ? any : nullptr, g.d_table = p.table ? any : nullptr,
  g.d_sinks = p.sinks ? any : nullptr;
  return PT_SELECT(attention_kernels).scratch_bytes(p, backward ? &g : nullptr);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(
      "attention_fwd(Tensor query, Tensor key, Tensor value, Tensor(a!) out, Tensor(b!) "
      "lse" PT_CPU_ATTENTION_ARGUMENTS(PT_SCHEMA) ") -> ()");
  m.def(
      "attention_bwd(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
      "Tensor out, Tensor lse" PT_CPU_ATTENTION_ARGUMENTS(PT_SCHEMA)
      ", Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dmask, Tensor(e!)? dbias, "
      "Tensor(f!)? dslopes, Tensor(g!)? dtable, "
      "Tensor(h!)? dsinks) -> ()");
  m.def("attention_scratch(Tensor query, Tensor key, Tensor value" PT_CPU_ATTENTION_ARGUMENTS(
      PT_SCHEMA) ", bool backward) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, CPU, m) {
  m.impl("attention_fwd", TORCH_BOX(&attention_fwd));
  m.impl("attention_bwd", TORCH_BOX(&attention_bwd));
  m.impl("attention_scratch", TORCH_BOX(&attention_scratch));
}
