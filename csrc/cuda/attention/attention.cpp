// SPDX-License-Identifier: Apache-2.0
// Binding of attention on a GPU: builds the problem from the arguments that its raw ops share,
// plans it, allocates shared scratch and launches.
//
// Rows of query, key, value and grad_out start at multiples of 16 bytes and have a multiple of 16
// bytes, zero-padded by the caller if necessary; results have the original head sizes. Lq and Lk
// are not zero: see pytransformer/ops/_backends/cuda/attention.py.
#include <atomic>
#include <random>
#include <string>
#include <vector>

#include "common/attention_arguments.h"
#include "cuda/attention/kernels.h"
#include "cuda/binding.h"

namespace pt::cuda {

inline constexpr const char* kAttention = "attention";

struct AttentionArguments {
  PT_CUDA_ATTENTION_ARGUMENTS(PT_MEMBER)
};

// Builds a problem from tensors and owns its scratch. With Purpose::plan nothing is launched and
// results do not exist yet: placeholders replace tensors that the call would copy or create.
class AttentionBinding {
 public:
  enum class Purpose { call, plan };

  AttentionBinding(const Tensor& query, const Tensor& key, const Tensor& value,
                   const AttentionArguments& a, Purpose purpose = Purpose::call)
      : planning_(purpose == Purpose::plan) {
    packed_ = a.cu_seqlens_q.has_value(), packed_keys_ = packed_ && !a.page_table;
    STD_TORCH_CHECK(a.cu_seqlens_k.has_value() == packed_,
                    "attention: cu_seqlens_q and cu_seqlens_k come together");
    read_rows(query, key, value, a);
    read_bounds(a);
    read_score_mod(a);
    if (a.block_bits) read_blocks(a);
    lists_mask_ = a.list_mask && p.mask.data && p.mask.type == DenseType::boolean && !packed_ &&
                  p.key_start % 32 == 0;
  }

  // Return rows that kernels copy 16 bytes at a time.
  In rows_of(const Tensor& t, const char* name, bool whole = true) {
    check_dtype(t, name);
    STD_TORCH_CHECK(t.dim() == dims(), "attention: ", name, " must have ", dims(), " dimensions");
    return rows_in_pieces(t, name, whole);
  }

  Out result(const MaybeTensor& t, const char* name, int64_t heads, int64_t rows, int64_t columns) {
    Out out;
    if (!t) return out;
    check_dtype(*t, name);
    const int64_t last = dims() - 1;
    STD_TORCH_CHECK(t->dim() == dims() && t->size(1) == heads && t->size(packed_ ? 0 : 2) == rows &&
                        t->size(last) <= columns,
                    "attention: ", name, " has the wrong shape");
    out.data = write_to(kAttention, *t, name, reachable), out.stride = strides(*t, name),
    out.columns = int(t->size(last));
    const auto even = [](int64_t n) { return n % 2 == 0; };
    out.pairs = reinterpret_cast<uintptr_t>(out.data) % 4 == 0 && even(out.columns) &&
                even(out.stride.batch) && even(out.stride.head) && even(out.stride.row);
    return out;
  }

  // Return the address of contiguous values, one per query.
  template <class T>
  T* per_query(const Tensor& t, const char* name) {
    STD_TORCH_CHECK(t.dim() == dims() - 1, "attention: ", name, " must have ", dims() - 1,
                    " dimensions");
    return floats<T>(
        t, name,
        packed_ ? p.heads * p.total_queries : int64_t(p.sequences) * p.heads * p.num_queries);
  }
  PerQuery per_query_strides() const {
    if (packed_) return {0, p.total_queries, 1};
    return {int64_t(p.heads) * p.num_queries, p.num_queries, 1};
  }

  // Return the gradient of a mask or bias, without scratch; data is null if it is not requested.
  AttentionDbias dense_gradient(const MaybeTensor& t, const char* name, const MaybeTensor& of) {
    AttentionDbias f{};
    if (!t) return f;
    const Tensor& d = *t;
    f.data = write_to(kAttention, d, name, reachable), f.dtype = dtype_of(d, name);
    STD_TORCH_CHECK(of && d.dim() == 4, "attention: ", name,
                    " must have the shape of what it is the gradient of");
    for (int i = 0; i < 4; ++i) {
      STD_TORCH_CHECK(d.size(i) == of->size(i), "attention: ", name,
                      " must have the shape of what it is the gradient of");
      f.sizes[i] = int(d.size(i));
    }
    f.batch = d.stride(0), f.head = d.stride(1), f.query = d.stride(2), f.key = d.stride(3);
    const auto even = [](int64_t n) { return n % 2 == 0; };
    f.pairs = reinterpret_cast<uintptr_t>(f.data) % (2 * d.element_size()) == 0 && f.key == 1 &&
              even(f.batch) && even(f.head) && even(f.query) && even(p.num_keys) &&
              even(p.key_start);
    return f;
  }

  // Take key padding (a boolean mask that is equal for all queries and heads) out of the problem,
  // without its bitmap. Returns no masks if there is none.
  AttentionKeyPadding take_key_padding() {
    AttentionKeyPadding f{};
    if (!p.mask.data || packed_ || p.mask.type != DenseType::boolean || p.mask.head || p.mask.query)
      return f;
    f = {p.mask, p.mask.batch ? p.sequences : 1, p.num_keys, int(p.key_start % 32), nullptr};
    p.mask = {};
    const int words = KeyPadding::kHead + KeyPadding::words(f.num_keys, f.before);
    p.key_padding = {static_cast<const uint32_t*>(kPlanned), f.masks == 1 ? 0 : words};
    return f;
  }

  // Return the boolean mask that gets block lists, without memory; no masks if there is none.
  AttentionMaskLists take_mask_lists() const {
    AttentionMaskLists f{};
    if (!lists_mask_ || !p.mask.data) return f;
    const int heads = p.mask.head ? p.heads : 1;
    f.mask = p.mask, f.masks = (p.mask.batch ? p.sequences : 1) * heads, f.heads = heads;
    f.num_queries = p.num_queries, f.num_keys = p.num_keys;
    STD_TORCH_CHECK(f.blocks() < 1 << 30, "attention: ", f.blocks(),
                    " blocks of a mask; fewer than 2^30 can be listed");
    return f;
  }
  // Allocate the lists of those blocks; f gets them too.
  BlockLists lists_like(const Tensor& like, AttentionMaskLists& f, bool by_keys) {
    f.by_keys = by_keys;
    const int64_t lists = int64_t(f.masks) * f.lists(),
                  of_sequence = 2 * int64_t(f.lists()) * f.heads;
    f.offsets = scratch<int32_t>(like, "block offsets", {lists, 2}, ScalarType::Int, false);
    f.entries =
        scratch<int32_t>(like, "block entries", {lists * f.room(), 2}, ScalarType::Int, false);
    BlockLists l;
    l.offsets = f.offsets, l.entries = f.entries, l.list = 2;
    l.batch = p.mask.batch ? of_sequence : 0, l.head = p.mask.head ? of_sequence / f.heads : 0;
    l.row_bits = l.column_bits = kListedBlockBits, l.columns = f.room(),
    l.num_entries = int(lists * f.room());
    return l;
  }

  // Allocate scratch: float32 values, zeros, or flags if there are any. Freed with this object;
  // torch's allocator gives the memory only to later work of the same stream.
  float* floats_like(const Tensor& like, const char* name, int64_t n) {
    return scratch<float>(like, name, {n}, ScalarType::Float, false);
  }
  float* zeros_like(const Tensor& like, const char* name, int64_t n) {
    return scratch<float>(like, name, {n}, ScalarType::Float, true);
  }
  uint32_t* zero_words_like(const Tensor& like, const char* name, int64_t n) {
    return scratch<uint32_t>(like, name, {n}, ScalarType::Int, true);
  }
  uint32_t* words_like(const Tensor& like, const char* name, int64_t n) {
    return scratch<uint32_t>(like, name, {n}, ScalarType::Int, false);
  }
  Recompute flags_like(const Tensor& like, Recompute wanted, int heads) {
    if (wanted.tiles)
      wanted.flags = scratch<int32_t>(like, "flags", {int64_t(p.sequences) * heads * wanted.tiles},
                                      ScalarType::Int, true);
    return wanted;
  }

  template <class T>
  T* floats(const MaybeTensor& t, const char* name, int64_t n) {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->numel() == n && t->is_contiguous() && t->scalar_type() == ScalarType::Float,
                    "attention: ", name, " must be contiguous, of ", n, " float32 numbers");
    if constexpr (std::is_const_v<T>)
      return static_cast<T*>(read_from(kAttention, *t, name, reachable));
    else return static_cast<T*>(write_to(kAttention, *t, name, reachable));
  }

  int64_t rows_q() const { return packed_ ? p.total_queries : p.num_queries; }
  int64_t rows_k() const { return packed_ ? p.total_keys : p.num_keys; }
  int64_t key_heads() const { return p.heads / p.group; }

  AttentionProblem p{};
  Reachable reachable;

 private:
  int64_t dims() const { return packed_ ? 3 : 4; }

  In rows_in_pieces(const Tensor& t, const char* name, bool whole) {
    const int64_t per = 16 / int64_t(t.element_size()), last = t.dim() - 1, width = t.size(last);
    const auto fits = [&](const HeadRows& s) {
      return s.batch % per == 0 && s.head % per == 0 && s.row % per == 0;
    };
    const bool aligned =
        reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && width % per == 0;
    if (planning_ && !(aligned && (width <= 1 || t.stride(last) == 1) && fits(strides(t, name))))
      return {kPlanned, kPlannedStrides};
    const In in{read_from(kAttention, t, name, reachable), strides(t, name)};
    STD_TORCH_CHECK(!whole || (aligned && fits(in.stride)), "attention: rows of ", name,
                    " are no multiples of 16 bytes");
    return in;
  }

  void read_rows(const Tensor& query, const Tensor& key, const Tensor& value,
                 const AttentionArguments& a) {
    const int64_t key_dims = packed_keys_ ? 3 : 4;
    STD_TORCH_CHECK(query.dim() == dims() && key.dim() == key_dims && value.dim() == key_dims,
                    "attention: query must have ", dims(), " dimensions, key and value ", key_dims);
    const int length = packed_keys_ ? 0 : 2, last = int(key_dims) - 1;
    p.dtype = dtype_of(query, "query");
    p.sequences = int(packed_ ? a.cu_seqlens_q->numel() - 1 : query.size(0));
    STD_TORCH_CHECK(key.size(1) > 0, "attention: key has no heads");
    for (const Tensor* t : {&query, &key, &value})
      for (int64_t d = 0; d < t->dim(); ++d)
        STD_TORCH_CHECK(t->size(d) < int64_t(1) << 31, "attention: sizes must be below 2^31, got ",
                        t->size(d));
    p.heads = int(query.size(1)), p.group = p.heads / int(key.size(1));
    STD_TORCH_CHECK(
        a.num_queries >= 0 && a.num_keys >= 0 && a.num_queries < 1 << 28 && a.num_keys < 1 << 28,
        "attention: num_queries and num_keys must be from 0 to 2^28 - 1");
    p.num_queries = int(packed_ ? a.num_queries : query.size(2)),
    p.num_keys = int(packed_ ? a.num_keys : key.size(2));
    p.head_dim = int(query.size(dims() - 1)), p.value_dim = int(value.size(last));
    p.total_queries = query.size(packed_ ? 0 : 2), p.total_keys = key.size(length);
    STD_TORCH_CHECK(p.head_dim >= 1 && p.value_dim >= 1 && p.head_dim <= 256 && p.value_dim <= 256,
                    "attention: head sizes from 1 to 256");
    const int64_t key_batch = a.page_table ? key.size(0) : p.sequences;
    STD_TORCH_CHECK(key.size(last) == p.head_dim && value.size(length) == p.total_keys &&
                        value.size(1) == key.size(1) &&
                        (packed_keys_ || (key.size(0) == key_batch && value.size(0) == key_batch)),
                    "attention: query, key and value do not go together");
    if (a.page_table) read_pages(*a.page_table, key, a);
    STD_TORCH_CHECK(p.num_queries > 0 && p.num_keys > 0 && p.group > 0 && p.heads % p.group == 0,
                    "attention: nothing to do, or no group");
    p.q = rows_of(query, "query");
    if (read_eight_bits(key, value, a)) return;
    check_dtype(key, "key"), check_dtype(value, "value");
    p.k = rows_in_pieces(key, "key", true), p.v = rows_in_pieces(value, "value", true);
  }

  // Read eight-bit keys and values and their scales. Rows have a multiple of 16 columns, so 16
  // bytes hold 16 of them.
  bool read_eight_bits(const Tensor& key, const Tensor& value, const AttentionArguments& a) {
    p.eight_bits = eight_bits_of(key);
    STD_TORCH_CHECK(
        bool(a.key_scale) == p.in_eight_bits() && bool(a.value_scale) == p.in_eight_bits(),
        "attention: key_scale and value_scale come with keys and values in eight bits");
    if (!p.in_eight_bits()) return false;
    STD_TORCH_CHECK(!packed_keys_ && value.scalar_type() == key.scalar_type(),
                    "attention: in eight bits value has the dtype of key, and no keys are packed");
    p.k = rows_in_pieces(key, "key", true), p.v = rows_in_pieces(value, "value", true);
    const auto scales = [&](const Tensor& t, const char* name) {
      STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.dim() == 3, "attention: ", name,
                      " must be float32 of 3 dimensions");
      for (int d = 0; d < 3; ++d)
        STD_TORCH_CHECK(t.size(d) == key.size(d), "attention: ", name,
                        " must have a number for each row of key, expanded or not");
      return In{read_from(kAttention, t, name, reachable), {t.stride(0), t.stride(1), t.stride(2)}};
    };
    p.key_scale = scales(*a.key_scale, "key_scale"),
    p.value_scale = scales(*a.value_scale, "value_scale");
    return true;
  }

  // Read pages: key and value are pools. Kernels clamp the table's entries. Packed queries have
  // offsets of num_keys keys per sequence in cu_seqlens_k, which key_lengths then shorten.
  void read_pages(const Tensor& table, const Tensor& key, const AttentionArguments& a) {
    const ScalarType type = table.scalar_type();
    STD_TORCH_CHECK(a.key_lengths, "attention: page_table needs key_lengths");
    STD_TORCH_CHECK(table.dim() == 2 && table.size(0) == p.sequences && table.is_contiguous() &&
                        (type == ScalarType::Int || type == ScalarType::Long),
                    "attention: page_table must be contiguous (B, pages), int32 or int64");
    const int64_t keys = table.size(1) * key.size(2);
    STD_TORCH_CHECK(keys < 1 << 28, "attention: positions must be below 2^28");
    p.pages.table = read_from(kAttention, table, "page_table", reachable),
    p.pages.width = table.size(1), p.pages.count = key.size(0);
    p.pages.size = int(key.size(2)), p.pages.wide = type == ScalarType::Long;
    p.pages.shift = p.pages.size & (p.pages.size - 1) ? -1 : log2_of(p.pages.size);
    p.num_keys = int(packed_ && a.num_keys < keys ? a.num_keys : keys);
    if (packed_) p.total_keys = int64_t(p.sequences) * p.num_keys;
  }

  void read_bounds(const AttentionArguments& a) {
    const int64_t longest = p.num_queries > p.num_keys ? p.num_queries : p.num_keys;
    const int64_t start = a.query_start > a.key_start ? a.query_start : a.key_start;
    p.query_start = a.query_start, p.key_start = a.key_start;
    p.batch_start = uint32_t(a.batch_start), p.head_start = uint32_t(a.head_start);
    STD_TORCH_CHECK(
        a.query_start >= 0 && a.key_start >= 0 && start < 1 << 28 && longest + start < 1 << 28,
        "attention: positions must be below 2^28");
    STD_TORCH_CHECK(a.align >= 0 && a.align <= 2, "attention: align is ", a.align,
                    "; expected 0, 1 or 2");
    p.causal = a.align != 0, p.bottom_right = a.align == 2;
    const auto side = [](int64_t width) {
      return int(width < 0 || width > kUnbounded ? kUnbounded : width);
    };
    p.left = side(a.left), p.right = side(a.right);
    STD_TORCH_CHECK(a.global_keys >= 0 && (!a.global_keys || a.left >= 0 || a.right >= 0),
                    "attention: global_keys is ", a.global_keys,
                    "; expected 0 or more, and 0 without a window");
    const int64_t global_keys = a.global_keys - p.key_start;
    p.global_keys = int(global_keys < 0 ? 0 : global_keys < p.num_keys ? global_keys : p.num_keys);
    const int64_t n = p.sequences;
    p.query_lengths = integers(a.query_lengths, "query_lengths", n),
    p.key_lengths = integers(a.key_lengths, "key_lengths", n);
    p.prefix_lengths = integers(a.prefix_lengths, "prefix_lengths", n);
    p.query_segments = integers(a.query_segments, "query_segments", n * p.num_queries);
    p.key_segments = integers(a.key_segments, "key_segments", n * p.num_keys);
    STD_TORCH_CHECK(!p.query_segments == !p.key_segments,
                    "attention: query_segments and key_segments come together");
    p.cu_queries = integers(a.cu_seqlens_q, "cu_seqlens_q", n + 1),
    p.cu_keys = integers(a.cu_seqlens_k, "cu_seqlens_k", n + 1);
  }

  void read_score_mod(const AttentionArguments& a) {
    p.mask = dense(a.mask, "mask"), p.bias = dense(a.bias, "bias");
    STD_TORCH_CHECK(!a.bias || a.bias->scalar_type() != ScalarType::Bool,
                    "attention: bias must be floating, got bool");
    p.slopes = floats<const float>(a.slopes, "slopes", p.heads);
    p.sinks = floats<const float>(a.sinks, "sinks", p.heads);
    if (a.diagonals) {
      const int64_t width = a.diagonals->numel() / p.heads;
      STD_TORCH_CHECK(a.before >= 0 && a.before < width, "attention: before is ", a.before, " of ",
                      width, " diagonals");
      p.before = int(a.before), p.after = int(width - 1 - a.before);
      p.diagonals = floats<const float>(a.diagonals, "diagonals", p.heads * width);
    }
    p.scale = float(a.scale), p.softcap = float(a.softcap);
    p.drop_threshold = drop_threshold_of(a.dropout_p);
    p.keep_scale =
        p.drop_threshold < 65536 ? 65536.0f / (65536.0f - float(p.drop_threshold)) : 0.0f;
    if (p.drop_threshold) {
      const MaybeTensor& seed = a.dropout_seed;
      STD_TORCH_CHECK(seed && seed->numel() == 1 && seed->scalar_type() == ScalarType::Long,
                      "attention: dropout needs an int64 seed");
      p.seed =
          static_cast<const uint64_t*>(read_from(kAttention, *seed, "dropout_seed", reachable));
    }
  }

  // Read a block mask. Checks shapes here; kernels clamp the lists' values.
  void read_blocks(const AttentionArguments& a) {
    const Tensor& bits = *a.block_bits;
    STD_TORCH_CHECK(a.block_offsets && a.block_entries && a.key_block_offsets &&
                        a.key_block_entries && bits.dim() == 3,
                    "attention: a block mask is four lists and bits");
    const int64_t queries = bits.size(1), keys = 32 * bits.size(2);
    const LeastBlock least = least_block(p.dtype, p.head_dim, p.value_dim);
    const auto power_of_two = [](int64_t n) { return n >= 32 && n <= 1 << 20 && !(n & (n - 1)); };
    STD_TORCH_CHECK(power_of_two(queries) && power_of_two(keys), "attention: blocks of ", queries,
                    " x ", keys, " pairs; expected powers of two from 32 on");
    STD_TORCH_CHECK(planning_ || (queries >= least.queries && keys >= least.keys),
                    "attention: blocks of ", queries, " x ", keys, " pairs; expected ",
                    least.queries, " x ", least.keys, " or more, as a block_size of 128");
    STD_TORCH_CHECK(!p.mask.data && !packed_ && p.key_start % 32 == 0,
                    "attention: a block mask goes with no other mask, no packed sequences, and a "
                    "key_start that is a multiple of 32");
    const auto integers_of = [&](const Tensor& t, const char* name) {
      STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous(), "attention: ", name,
                      " must be contiguous int32");
      return static_cast<const int32_t*>(read_from(kAttention, t, name, reachable));
    };
    const auto lists = [&](const Tensor& offsets, const Tensor& entries, int64_t rows,
                           int64_t of_rows, int64_t columns, int64_t of_columns) {
      const int64_t down = (rows + of_rows - 1) / of_rows;
      STD_TORCH_CHECK(
          offsets.dim() == 3 && (offsets.size(0) == 1 || offsets.size(0) == p.sequences) &&
              (offsets.size(1) == 1 || offsets.size(1) == p.heads) && offsets.size(2) == down + 1,
          "attention: offsets of a block mask must be (B or 1, Hq or 1, ", down + 1, ")");
      STD_TORCH_CHECK(entries.dim() == 2 && entries.size(1) == 2 && entries.size(0) < 1 << 30,
                      "attention: entries of a block mask must be (below 2^30, 2)");
      BlockLists l;
      l.offsets = integers_of(offsets, "block offsets"),
      l.entries = integers_of(entries, "block entries");
      l.batch = offsets.size(0) == 1 ? 0 : offsets.size(1) * (down + 1),
      l.head = offsets.size(1) == 1 ? 0 : down + 1;
      l.row_bits = log2_of(of_rows), l.column_bits = log2_of(of_columns);
      l.columns = int((columns + of_columns - 1) / of_columns),
      l.num_entries = int(entries.size(0));
      return l;
    };
    p.blocks.queries =
        lists(*a.block_offsets, *a.block_entries, p.num_queries, queries, p.num_keys, keys);
    p.blocks.keys =
        lists(*a.key_block_offsets, *a.key_block_entries, p.num_keys, keys, p.num_queries, queries);
    p.blocks.places = int(bits.size(0));
    const int32_t* words = integers_of(bits, "block bits");
    // without partial blocks no bits are read
    p.blocks.bits =
        static_cast<const uint32_t*>(bits.size(0) ? static_cast<const void*>(words) : kPlanned);
  }
  static int log2_of(int64_t n) { return __builtin_ctzll(uint64_t(n)); }

  void check_dtype(const Tensor& t, const char* name) const {
    STD_TORCH_CHECK(dtype_of(t, name) == p.dtype, "attention: ", name,
                    " must have the dtype of query");
  }
  HeadRows strides(const Tensor& t, const char* name) const {
    const int64_t last = t.dim() - 1;
    STD_TORCH_CHECK(t.size(last) <= 1 || t.stride(last) == 1, "attention: the columns of ", name,
                    " must be contiguous");
    const auto of = [&](int64_t i) { return t.size(i) == 1 ? 0 : t.stride(i); };
    return last == 2 ? HeadRows{0, of(1), of(0)} : HeadRows{of(0), of(1), of(2)};
  }
  const int64_t* integers(const MaybeTensor& t, const char* name, int64_t n) {
    if (!t) return nullptr;
    STD_TORCH_CHECK(t->numel() == n && t->is_contiguous() && t->scalar_type() == ScalarType::Long,
                    "attention: ", name, " must be contiguous, of ", n, " int64 numbers");
    return static_cast<const int64_t*>(read_from(kAttention, *t, name, reachable));
  }
  Dense dense(const MaybeTensor& t, const char* name) {
    Dense d;
    if (!t) return d;
    const int64_t full[4] = {p.sequences, p.heads, p.num_queries, p.num_keys};
    int64_t stride[4];
    STD_TORCH_CHECK(t->dim() == 4, "attention: ", name, " must have 4 dimensions");
    for (int i = 0; i < 4; ++i) {
      STD_TORCH_CHECK(t->size(i) == full[i] || t->size(i) == 1, "attention: ", name, " has size ",
                      t->size(i), " in dimension ", i);
      stride[i] = t->size(i) == 1 ? 0 : t->stride(i);
    }
    d = {read_from(kAttention, *t, name, reachable), stride[0], stride[1], stride[2], stride[3]};
    const int64_t size = t->element_size();
    const auto aligned = [&](int64_t n) {
      return reinterpret_cast<uintptr_t>(d.data) % (n * size) == 0 && stride[0] % n == 0 &&
             stride[1] % n == 0 && stride[2] % n == 0 && p.num_keys % n == 0 &&
             p.key_start % n == 0;
    };
    while (stride[3] == 1 && 2 * d.vector_width * size <= 16 && aligned(2 * d.vector_width))
      d.vector_width *= 2;
    switch (t->scalar_type()) {
      case ScalarType::Bool: d.type = DenseType::boolean; break;
      case ScalarType::Double: d.type = DenseType::f64; break;
      default: {
        const DType type = dtype_of(*t, name);
        d.type = type == DType::f32    ? DenseType::f32
                 : type == DType::bf16 ? DenseType::bf16
                                       : DenseType::f16;
      }
    }
    return d;
  }
  template <class T>
  T* scratch(const Tensor& like, const char* name, std::vector<int64_t> shape, ScalarType type,
             bool zeros) {
    scratch_.push_back(zeros ? torch::stable::new_zeros(like, shape, type)
                             : torch::stable::new_empty(like, shape, type));
    return static_cast<T*>(write_to(kAttention, scratch_.back(), name, reachable));
  }

  bool planning_, packed_, packed_keys_, lists_mask_;
  std::vector<Tensor> scratch_;
};

}  // namespace pt::cuda

namespace {

using namespace pt::cuda;

// Return the properties of the current device.
Gpu current_gpu() { return {runs_sm90a(), multiprocessors()}; }

void pack_key_padding(AttentionBinding& e, const Tensor& like, void* stream) {
  AttentionKeyPadding f = e.take_key_padding();
  if (!f.masks) return;
  f.bits = e.words_like(
      like, "key_padding",
      int64_t(f.masks) * (KeyPadding::kHead + KeyPadding::words(f.num_keys, f.before)));
  attention_key_padding(f, stream);
  e.p.key_padding.data = f.bits;
}

// Build lists of the blocks of a dense boolean mask that have a visible pair, for kernels that
// iterate over KV tiles (of_queries) or Q tiles (of_keys).
void list_blocks(AttentionBinding& e, bool of_queries, bool of_keys, const Tensor& like,
                 void* stream) {
  AttentionMaskLists f = e.take_mask_lists();
  if (!f.masks || !(of_queries || of_keys)) return;
  f.states = e.words_like(like, "states of blocks", f.blocks());
  attention_mask_lists(f, stream);
  const auto make = [&](BlockLists& lists, bool by_keys) {
    lists = e.lists_like(like, f, by_keys);
    attention_mask_lists(f, stream);
  };
  if (of_queries) make(e.p.blocks.queries, false);
  if (of_keys) make(e.p.blocks.keys, true);
  e.p.blocks.places = 1;
}

// Pack bits per pair for the sm_90a kernels, by queries or by keys: of a dense boolean mask, and of
// dropout.
void pack_pair_bits(AttentionBinding& e, bool by_queries, bool by_keys, bool dropout,
                    const Tensor& like, void* stream) {
  AttentionProblem& p = e.p;
  if (!(by_queries || by_keys)) return;
  const auto make = [&](AttentionPairBits f, PairBits& bits, bool of_batch, bool of_head) {
    const auto room = [&](PairBits::Rows& rows, bool of_keys, const char* name) {
      const int64_t of_pairs = int64_t(f.rows(of_keys)) * f.words(of_keys);
      uint32_t* const words = e.words_like(like, name, f.size(of_keys));
      rows = {words, of_batch ? of_pairs * f.heads : 0, of_head ? of_pairs : 0,
              f.rows(of_keys) > 1 ? f.words(of_keys) : 0};
      return words;
    };
    if (by_queries) f.queries = room(bits.queries, false, "bits of queries");
    if (by_keys) f.keys = room(bits.keys, true, "bits of keys");
    attention_pair_bits(f, stream);
  };
  AttentionPairBits f{
      {},      {},     p.sequences, p.heads, p.num_queries, p.num_keys, int(p.key_start % 32),
      nullptr, nullptr};
  if (p.mask.data && p.mask.type == DenseType::boolean) {
    AttentionPairBits of_mask = f;
    of_mask.mask = p.mask, of_mask.sequences = p.mask.batch ? p.sequences : 1,
    of_mask.heads = p.mask.head ? p.heads : 1;
    make(of_mask, p.mask_bits, p.mask.batch, p.mask.head);
  }
  f.dropout = {p.seed,       p.drop_threshold,        p.batch_start,
               p.head_start, uint32_t(p.query_start), uint32_t(p.key_start / 32)};
  if (dropout && p.draws_once()) make(f, p.keep_bits, true, true);
}

// Pack the boolean mask, segments and dropout in lane order for the fused backward.
void pack_lane_bits(AttentionBinding& e, const Tensor& like, void* stream) {
  AttentionProblem& p = e.p;
  const auto make = [&](AttentionPairBits f, PairBits::Rows& rows, const char* name) {
    const int64_t of_head = PairBits::lane_words(p.num_queries, p.num_keys);
    f.num_queries = p.num_queries, f.num_keys = p.num_keys;
    f.lanes = e.words_like(like, name, f.sequences * f.heads * of_head);
    rows = {f.lanes, f.sequences > 1 ? f.heads * of_head : 0, f.heads > 1 ? of_head : 0,
            int64_t(PairBits::units(p.num_queries)) * PairBits::kUnitWords};
    attention_pair_bits(f, stream);
  };
  if (p.mask.data || p.query_segments) {
    AttentionPairBits f{};
    f.mask = p.mask, f.query_segments = p.query_segments, f.key_segments = p.key_segments;
    f.sequences = p.query_segments || p.mask.batch ? p.sequences : 1;
    f.heads = p.mask.head ? p.heads : 1;
    make(f, p.mask_bits.lanes, "visible pairs");
  }
  if (p.drop_threshold) {
    AttentionPairBits f{};
    f.dropout = {p.seed,       p.drop_threshold,        p.batch_start,
                 p.head_start, uint32_t(p.query_start), uint32_t(p.key_start / 32)};
    f.sequences = p.sequences, f.heads = p.heads;
    make(f, p.keep_bits.lanes, "kept pairs");
  }
}

// Return a call's first number for BlockCounter: kMostSplits + 1 numbers of its own, from a random
// start.
uint64_t next_ticket() {
  static std::atomic<uint64_t> next{[] {
    std::random_device random;
    return uint64_t(random()) << 32 | random();
  }()};
  return next.fetch_add(kMostSplits + 1, std::memory_order_relaxed);
}

void attention_fwd(Tensor query, Tensor key, Tensor value, Tensor out,
                   Tensor lse PT_CUDA_ATTENTION_ARGUMENTS(PT_PARAMETER), int64_t device,
                   int64_t stream_) {
  AttentionBinding e(query, key, value, {PT_CUDA_ATTENTION_ARGUMENTS(PT_VALUE)});
  void* const stream = reinterpret_cast<void*>(stream_);
  const DeviceGuard guard(device);
  pack_key_padding(e, lse, stream);
  list_blocks(e, !splits_keys(e.p), false, lse, stream);
  AttentionForward f{};
  f.p = e.p, f.out = e.result(out, "out", e.p.heads, e.rows_q(), e.p.value_dim);
  f.lse = e.per_query<float>(lse, "lse"), f.at = e.per_query_strides();
  const PassPlan plan = plan_attention_forward(f, current_gpu());
  // With score_mod, the forward kernel draws dropout itself.
  pack_pair_bits(e, plan.on_sm90(), false, !plan.sm90.has_score_mod, lse, stream);
  f.p = e.p;
  f.recompute = e.flags_like(lse, plan.recompute, e.p.heads);
  f.split.splits = plan.split.splits;
  if (plan.split.merges()) {
    float* const stats = e.floats_like(lse, "statistics of splits", plan.split.stats_floats());
    f.split = {plan.split.splits, stats,
               e.floats_like(lse, "values of splits", plan.split.values_floats(e.p.value_dim)),
               reinterpret_cast<uint64_t*>(stats) + plan.split.rows * plan.split.splits,
               next_ticket()};
  }
  attention_forward(f, plan, stream);
}

// Compute the row stats of backward: delta, and row_max from lse.
AttentionPreprocess preprocess(AttentionBinding& e, const Tensor& grad_out,
                               const MaybeTensor& grad_lse, const Tensor& out, const Tensor& lse,
                               void* stream) {
  AttentionPreprocess r{};
  r.p = e.p, r.at = e.per_query_strides();
  r.out = e.rows_of(out, "out", false), r.d_out = e.rows_of(grad_out, "grad_out"),
  r.columns = int(out.size(out.dim() - 1));
  r.lse = e.per_query<const float>(lse, "lse");
  r.d_lse = grad_lse ? e.per_query<const float>(*grad_lse, "grad_lse") : nullptr;
  r.delta = e.floats_like(lse, "delta", lse.numel()),
  r.row_max = e.floats_like(lse, "row_max", lse.numel());
  attention_backward_preprocess(r, stream);
  return r;
}

// Recompute log2 of each row's sum if lse lost it; row_max then holds the maximum alone.
const float* recompute_row_stats(AttentionBinding& e, const AttentionPreprocess& r,
                                 const Tensor& lse, void* stream) {
  AttentionForward f{};
  f.p = e.p, f.at = r.at, f.lse = const_cast<float*>(r.lse);
  f.row_max = r.row_max, f.log2_sum = e.floats_like(lse, "log2_sum", lse.numel());
  attention_forward(f, plan_attention_forward(f, current_gpu()), stream);
  return f.log2_sum;
}

// Compute the requested ones of d_query, d_key and d_value, and partial sums.
void run_passes(AttentionBinding& e, AttentionBackward& g, const BackwardPlan& plan,
                const Tensor& lse, void* stream) {
  if (plan.is_fused()) {
    g.recompute = e.flags_like(lse, plan.fused_dkdv, int(e.key_heads()));
    g.dq_recompute = e.flags_like(lse, plan.fused_dq, e.p.heads);
    g.dq_accum = plan.turns ? e.floats_like(lse, "dq_accum", plan.dq_accum)
                            : e.zeros_like(lse, "dq_accum", plan.dq_accum);
    attention_backward_fused(
        g, plan, plan.turns ? e.zero_words_like(lse, "turns", plan.turns) : nullptr, stream);
    return;
  }
  if (g.dq.data || g.slope_partials || g.diagonal_partials) {
    g.recompute = e.flags_like(lse, plan.dq.recompute, e.p.heads);
    attention_backward_dq(g, plan.dq, stream);
  }
  if (g.dk.data || g.dv.data) {
    g.recompute = e.flags_like(lse, plan.dkdv.recompute, int(e.key_heads()));
    attention_backward_dkdv(g, plan.dkdv, stream);
  }
}

// Reduce the Q tiles' partial sums to the gradients of slopes and T5's table.
void reduce_partials(AttentionBinding& e, const AttentionBackward& g, int tiles,
                     const MaybeTensor& dslopes, const MaybeTensor& dtable,
                     const MaybeTensor& bucket_ranges, void* stream) {
  AttentionReducePartials sums{nullptr, nullptr, nullptr, e.p.sequences, e.p.heads, tiles,
                               1,       1,       {}};
  if (dslopes) {
    sums.partials = g.slope_partials, sums.sums = e.floats<float>(dslopes, "dslopes", e.p.heads);
    attention_backward_reduce_partials(sums, stream);
  }
  if (dtable) {
    STD_TORCH_CHECK(bucket_ranges->scalar_type() == ScalarType::Int &&
                        bucket_ranges->is_contiguous() &&
                        bucket_ranges->numel() * e.p.heads == 2 * dtable->numel(),
                    "attention: bucket_ranges must be contiguous int32, (buckets, 2)");
    sums.ranges = static_cast<const int32_t*>(
        read_from(kAttention, *bucket_ranges, "bucket_ranges", e.reachable));
    sums.partials = g.diagonal_partials,
    sums.sums = e.floats<float>(dtable, "dtable", dtable->numel());
    sums.width = e.p.before + e.p.after + 1, sums.outputs = int(dtable->numel() / e.p.heads);
    attention_backward_reduce_partials(sums, stream);
  }
}

void attention_bwd(Tensor grad_out, MaybeTensor grad_lse, Tensor query, Tensor key, Tensor value,
                   Tensor out, Tensor lse PT_CUDA_ATTENTION_ARGUMENTS(PT_PARAMETER), MaybeTensor dq,
                   MaybeTensor dk, MaybeTensor dv, MaybeTensor dmask, MaybeTensor dbias,
                   MaybeTensor dslopes, MaybeTensor dtable, MaybeTensor dsinks,
                   MaybeTensor bucket_ranges, bool deterministic, int64_t device, int64_t stream_) {
  STD_TORCH_CHECK(!page_table && !key_scale,
                  "attention: page_table and keys in eight bits have no gradients");
  AttentionBinding e(query, key, value, {PT_CUDA_ATTENTION_ARGUMENTS(PT_VALUE)});
  void* const stream = reinterpret_cast<void*>(stream_);
  const DeviceGuard guard(device);
  pack_key_padding(e, lse, stream);
  const AttentionPreprocess r = preprocess(e, grad_out, grad_lse, out, lse, stream);

  BackwardRequest request{};
  AttentionBackward& g = request.g;
  g.p = e.p, g.at = r.at, g.d_out = r.d_out, g.delta = r.delta, g.row_max = r.row_max;
  g.dq = e.result(dq, "dq", e.p.heads, e.rows_q(), e.p.head_dim);
  g.dk = e.result(dk, "dk", e.key_heads(), e.rows_k(), e.p.head_dim);
  g.dv = e.result(dv, "dv", e.key_heads(), e.rows_k(), e.p.value_dim);
  STD_TORCH_CHECK((!dslopes || e.p.slopes) && (!dtable || (e.p.diagonals && bucket_ranges)),
                  "attention: a gradient of nothing");
  request.diagonals = dtable.has_value(), request.deterministic = deterministic;
  request.dbias[0] = e.dense_gradient(dmask, "dmask", mask),
  request.dbias[1] = e.dense_gradient(dbias, "dbias", bias);
  for (AttentionDbias& f : request.dbias) f.b = g;

  const BackwardPlan plan = plan_attention_backward(request, current_gpu());
  list_blocks(e, plan.walks_keys(request), plan.walks_queries(request), lse, stream);
  pack_pair_bits(e, plan.asks_queries(request), plan.asks_keys(request), true, lse, stream);
  if (plan.is_fused() && plan.fused.elementwise_mask) pack_lane_bits(e, lse, stream);
  g.p = e.p;
  if (e.p.split_lse()) g.log2_sum = recompute_row_stats(e, r, lse, stream);
  if (dsinks) {
    STD_TORCH_CHECK(e.p.sinks, "attention: a gradient of nothing");
    attention_backward_dsinks({e.p, r.at, r.lse, r.d_lse, r.delta, r.row_max, g.log2_sum,
                               e.floats<float>(dsinks, "dsinks", e.p.heads)},
                              stream);
  }
  const int64_t blocks = int64_t(e.p.sequences) * e.p.heads * plan.partial_tiles;
  if (dslopes) g.slope_partials = e.floats_like(lse, "partials of slopes", blocks);
  if (dtable)
    g.diagonal_partials =
        e.zeros_like(lse, "partials of diagonals", blocks * (e.p.before + e.p.after + 1));
  run_passes(e, g, plan, lse, stream);
  reduce_partials(e, g, plan.partial_tiles, dslopes, dtable, bucket_ranges, stream);
  for (int i = 0; i < 2; ++i) {
    AttentionDbias& f = request.dbias[i];
    f.b = g;
    if (f.data) attention_backward_dbias(f, plan.dbias[i], stream);
  }
}

// Return a call's plan with all gradients as JSON: per pass the reason why the sm_90a kernels do
// not run it, or null; the number of float32 values in dq_accum; the minimum queries and keys of a
// block of a block mask; and if a dense mask gets block lists.
std::string attention_plan(Tensor query, Tensor key,
                           Tensor value PT_CUDA_ATTENTION_ARGUMENTS(PT_PARAMETER),
                           bool deterministic, int64_t device, int64_t) {
  AttentionBinding e(query, key, value, {PT_CUDA_ATTENTION_ARGUMENTS(PT_VALUE)},
                     AttentionBinding::Purpose::plan);
  const DeviceGuard guard(device);
  e.take_key_padding();
  AttentionForward f{};
  f.p = e.p, f.out = planned_out(e.p.value_dim);
  BackwardRequest request{};
  AttentionBackward& g = request.g;
  g.p = e.p, g.d_out = {kPlanned, kPlannedStrides};
  g.dq = g.dk = planned_out(e.p.head_dim), g.dv = planned_out(e.p.value_dim);
  request.diagonals = e.p.diagonals, request.deterministic = deterministic;
  const MaybeTensor* const dense[] = {&mask, &bias};
  for (int i = 0; i < 2; ++i) {
    AttentionDbias& d = request.dbias[i];
    if (!*dense[i] || (*dense[i])->scalar_type() == ScalarType::Bool) continue;
    d.b = g, d.data = kPlanned, d.key = 1;
    for (int k = 0; k < 4; ++k) d.sizes[k] = int((*dense[i])->size(k));
  }
  const BackwardPlan plan = plan_attention_backward(request, current_gpu());
  std::string passes;
  const auto tell = [&](const char* pass, const Sm90Plan& sm90) {
    passes += std::string(passes.empty() ? "\"" : ", \"") + pass +
              "\": " + (sm90.why_not ? "\"" + std::string(sm90.why_not) + "\"" : "null");
  };
  const PassPlan forward = plan_attention_forward(f, current_gpu());
  tell("forward", forward.sm90);
  if (page_table || key_scale) {  // forward only
  } else if (plan.is_fused()) tell("bwd_fused", plan.fused);
  else tell("bwd_dq", plan.dq.sm90), tell("bwd_dkdv", plan.dkdv.sm90);
  for (int i = 0; i < 2; ++i)
    if (request.dbias[i].data) tell(i == 0 ? "d_mask" : "d_bias", plan.dbias[i].sm90);
  const LeastBlock least = least_block(e.p.dtype, e.p.head_dim, e.p.value_dim);
  return "{\"passes\": {" + passes + "}, \"dq_accum\": " + std::to_string(plan.dq_accum) +
         ", \"least_block\": [" + std::to_string(least.queries) + ", " +
         std::to_string(least.keys) + "], \"lists_mask\": " +
         (e.take_mask_lists().masks && !forward.split.splits ? "true" : "false") +
         ", \"splits\": " + std::to_string(forward.split.splits) + ", \"workspace\": " +
         std::to_string(forward.split.stats_floats() + forward.split.values_floats(e.p.value_dim)) +
         "}";
}

}  // namespace

#define PT_QUERY_KEY_VALUE "Tensor query, Tensor key, Tensor value"
#define PT_SHARED PT_CUDA_ATTENTION_ARGUMENTS(PT_SCHEMA)
STABLE_TORCH_LIBRARY_FRAGMENT(pytransformer_C, m) {
  m.def(PT_EDGE_OP("attention_fwd(" PT_QUERY_KEY_VALUE ", Tensor(a!) out, Tensor(b!) lse" PT_SHARED
                   ", int device, int stream) -> ()"));
  m.def(PT_EDGE_OP("attention_bwd(Tensor grad_out, Tensor? grad_lse, " PT_QUERY_KEY_VALUE
                   ", Tensor out, Tensor lse" PT_SHARED
                   ", Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor(d!)? dmask, "
                   "Tensor(e!)? dbias, Tensor(f!)? dslopes, Tensor(g!)? dtable, "
                   "Tensor(h!)? dsinks, Tensor? bucket_ranges, bool deterministic, int device, "
                   "int stream) -> ()"));
  m.def(PT_EDGE_OP("attention_plan(" PT_QUERY_KEY_VALUE PT_SHARED
                   ", bool deterministic, int device, int stream) -> str"));
}
STABLE_TORCH_LIBRARY_IMPL(pytransformer_C, PT_EDGE_KEY, m) {
  m.impl(PT_EDGE_OP("attention_fwd"), TORCH_BOX(&attention_fwd));
  m.impl(PT_EDGE_OP("attention_bwd"), TORCH_BOX(&attention_bwd));
  m.impl(PT_EDGE_OP("attention_plan"), TORCH_BOX(&attention_plan));
}
