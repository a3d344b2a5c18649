// SPDX-License-Identifier: Apache-2.0
// Shared by the sm_90a kernels: the order of tiles, warpgroup gemms with TMA tiles in shared
// memory, operations on accumulators, TMA maps of the operands, and the choice of a backward
// kernel.
//
// A tile has panels of 64 columns, each with rows of 128 bytes, swizzled (ring.cuh). Accumulators
// x[N / 2] are 64 rows, 16 per warp, by N columns: element i is x[i / 4 * 4 + i % 4], laid out as
// in fragments.cuh.
#pragma once

#include <type_traits>

#include "cuda/attention/score_mod.cuh"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/tile/product_shapes.h"
#include "cuda/tile/quad.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/warpgroup.cuh"

namespace pt::cuda {

// Call f(n) with the number of each tile of block `block`, or of its only tile if blocks are not
// persistent.
template <bool Persists = true, class F>
PT_DEVICE void for_each_tile(const TileOrder& order, int block, F f) {
  if constexpr (Persists)
    for (int n = block; n < order.tiles * order.heads; n += ptx::grid_size()) f(n);
  else f(block);
}
template <bool Persists = true, class F>
PT_DEVICE void for_each_tile(const TileOrder& order, F f) {
  for_each_tile<Persists>(order, int(blockIdx.x), f);
}
// Like for_each_tile, for tiles of unequal duration: in snake order, or in pairs if the order has
// them.
template <bool MayPair, class F>
PT_DEVICE void for_each_uneven_tile(const TileOrder& order, F f) {
  if constexpr (!MayPair) {
    for (int i = int(blockIdx.x); i < order.tiles * order.heads;
         i = next_in_snake(i, ptx::grid_size()))
      f(number_in_snake(order, i));
    return;
  }
  const int step = order.paired ? 2 : 1;
  for (int i = int(blockIdx.x) * step; i < order.tiles * order.heads;) {
    f(order.paired ? number_in_pairs(order, i) : i);
    ++i;
    if (i % step == 0) i += (ptx::grid_size() - 1) * step;
  }
}

// Return the rows of a TMA load to keep. `visible` are the tensor's visible rows; past the tensor
// TMA writes zeros. `end`: visible.hi is the tensor's end.
PT_DEVICE Range range_to_keep(Range visible, bool end) {
  return {visible.lo == 0 ? -kUnbounded : visible.lo, end ? kUnbounded : visible.hi};
}
// Return the keys to keep: those that some query of the sequence sees.
PT_DEVICE Range keys_to_keep(const AttentionProblem& p, const Sequence& s) {
  const Range visible{s.keys_of(p, 0).lo, s.keys_of(p, s.num_q - 1).hi};
  return range_to_keep(visible,
                       p.cu_keys ? s.row_k + visible.hi == p.total_keys : visible.hi == p.num_keys);
}

// A Q tile from the consumers' view; KV tiles are visited from last to first.
template <int Rows, int Streamed>
struct QueryWork : QueryTile<Rows, Streamed> {
  using Base = QueryTile<Rows, Streamed>;
  using Base::i0, Base::s;

  using Base::Base;
  PT_DEVICE QueryWork(const AttentionProblem& p, const TileOrder& order, int n)
      : Base(p, place_of(order, n)) {}
  // own_bounds: the key range of the lane's row r. rows_to_keep: keys that some query of the
  // sequence sees, or that TMA loads as zeros. whole(): keys that all 64 rows of this consumer see.
  PT_DEVICE Range own_bounds(const AttentionProblem& p, int r) const {
    return Base::bounds(p, i0 + own_row(r));
  }
  PT_DEVICE Range rows_to_keep(const AttentionProblem& p) const { return keys_to_keep(p, s); }
  // Empty if keys in between are hidden, marked by a range that starts at kUnbounded.
  PT_DEVICE Range whole(const AttentionProblem& p) const {
    const int first = i0 + consumer() * 64;
    if (s.padding_gaps) return {kUnbounded, 0};
    return {s.keys_of(p, first + 63).lo, s.keys_of(p, first).hi};
  }
};

// Return true if `Count` segments from index `first` on (clamped to existing ones) are equal; `one`
// receives the segment. Documents are long, so most tiles have one. Every lane of the warp calls it
// with the same arguments.
template <int Count>
PT_DEVICE bool one_segment(const int64_t* segments, int first, int size, int64_t& one) {
  static_assert(Count % 32 == 0);
  const auto load = [&](int i) { return load_i64(segments + max(0, min(first + i, size - 1))); };
  one = load(0);
  uint32_t others = 0;
  PT_UNROLL
  for (int i = 0; i < Count; i += 32) {
    const int64_t differs = load(i + lane_id()) ^ one;
    others |= uint32_t(differs) | uint32_t(differs >> 32);
  }
  PT_UNROLL
  for (int d = 1; d < 32; d *= 2) others |= ptx::shfl_xor_u32(others, d);
  return others == 0;
}

// Return an operand's address as a warp-uniform value for products of `Columns`. Kernels of wide
// heads have no registers for it.
template <int Columns>
PT_DEVICE uint32_t uniform(uint32_t address) {
  return Columns > 128 ? address : ptx::uniform(address);
}

// x (+)= A B^T. A is this consumer's 64 rows of a tile, or a full tile of 64 rows; B is a tile of N
// rows. Both are K-major: a step of 16 columns is 32 bytes within the swizzle's rows.
template <class T, int D, class RingA, class RingB, int R>
PT_DEVICE void multiply_rows(float (&x)[R], const RingA& a_ring, int a_use, const RingB& b_ring,
                             int b_use, bool accumulate) {
  static_assert(conforms(product_of_tiles(2 * R)));
  const uint64_t a = swizzled(uniform<D>(a_ring.buffer(a_use) +
                                         (RingA::kRows > 64 ? consumer() * 64 * kSwizzleRow : 0))),
                 b = swizzled(uniform<D>(b_ring.buffer(b_use)));
  ptx::wgmma_fence();
  PT_UNROLL
  for (int i = 0; i < D / 16; ++i) {
    const uint32_t step = i % 4 * 32;
    ptx::wgmma_ss<T, 2 * R, false>(x, further(a, i / 4 * RingA::kPanelBytes + step),
                                   further(b, i / 4 * RingB::kPanelBytes + step),
                                   accumulate || i > 0);
  }
  ptx::wgmma_commit();
}

// x += W B; W is in registers, B is an N-major tile: a step of 16 rows is two groups of eight.
template <class T, class RingB, int R, int S>
PT_DEVICE void multiply_weights(float (&x)[R], const uint32_t (&weights)[S][4], const RingB& b_ring,
                                int b_use) {
  static_assert(conforms(product_of_weights(2 * R, RingB::kPanelBytes)));
  ptx::wgmma_fence();
  const uint64_t b = swizzled(uniform<2 * R>(b_ring.buffer(b_use)), RingB::kPanelBytes);
  PT_UNROLL
  for (int i = 0; i < S; ++i)
    ptx::wgmma_rs<T, 2 * R, true>(x, weights[i], further(b, i * 2 * kSwizzleAtom), true);
  ptx::wgmma_commit();
}

// Pack accumulators to A fragments: two neighboring n-blocks are one fragment of 16 columns.
template <class T, int R>
PT_DEVICE void pack_weights(uint32_t (&weights)[R / 8][4], const float (&x)[R]) {
  PT_UNROLL
  for (int i = 0; i < R / 2; ++i) weights[i / 4][i % 4] = Element<T>::pack(x[2 * i], x[2 * i + 1]);
}

// Call f(x, place, c) for pieces of 8 N columns, 8 c columns after `at`: x[n][r] is s[(c + n) * 4 +
// r].
template <int N, int R, class F>
PT_DEVICE void in_pieces(float (&s)[R], const Place& at, F f) {
  static_assert(R % (4 * N) == 0);
  PT_UNROLL
  for (int c = 0; c < R / 4; c += N) {
    float x[N][4];
    each<N>([&](int n, int r, uint32_t) { x[n][r] = s[(c + n) * 4 + r]; });
    f(x, at.after(8 * c), c);
    each<N>([&](int n, int r, uint32_t) { s[(c + n) * 4 + r] = x[n][r]; });
  }
}
template <int N, int R, class F>
PT_DEVICE void in_pieces(float (&s)[R], int row, int first, F f) {
  in_pieces<N>(s, Place(row, first), f);
}

// Call f(x[i], row, column) with the row (0 or 1) of the lane's two and the column, from `first`
// on.
template <int R, class F>
PT_DEVICE void each_element(float (&x)[R], int first, F f) {
  const int column = first + 2 * (lane_id() % 4);
  PT_UNROLL
  for (int i = 0; i < R; ++i) f(x[i], i / 2 % 2, column + i / 4 * 8 + i % 2);
}

// Set x to `hidden` in the columns of padding keys; `first` is the tile's first key.
template <int R>
PT_DEVICE void hide_keys(float (&x)[R], int first, const KeyPaddingBitmap& keys, float hidden) {
  PT_UNROLL
  for (int c = 0; c < R; c += 16) {  // 32 columns: one word if tiles are full words
    const int key = first + 2 * c + 2 * (lane_id() % 4);
    const uint32_t word = R % 16 == 0 ? keys.from(key) : keys.across(key);
    PT_UNROLL
    for (int i = 0; i < (R - c < 16 ? R - c : 16); ++i)
      x[c + i] = word >> (i / 4 * 8 + i % 2) & 1 ? x[c + i] : hidden;
  }
}

// Clear the rows of a tile (first row `first`) with keep(row) false, for all consumers, each of
// which calls this: a weight of zero would not hide NaN. Waits for the tile.
template <int Consumers, class R, class F>
PT_DEVICE void clear_rows_but(const R& ring, int use, int first, F keep) {
  constexpr int kClearBarrier = 3;  // 1 and 2 are the consumers' turns
  ring.consumer_wait(use);
  for (int x = int(threadIdx.x) - 128; x < int(R::kBytes / 16); x += 128 * Consumers)
    if (!keep(first + x / 8 % R::kRows))
      ptx::st_shared_v4_f32(ring.buffer(use) + x * 16, 0.0f, 0.0f, 0.0f, 0.0f);
  ptx::fence_proxy_async();
  ptx::bar_sync(kClearBarrier, 128 * Consumers);
}
// Clear rows outside `keep`.
template <int Consumers, class R>
PT_DEVICE void clear_rows(const R& ring, int use, int first, const Range& keep) {
  if (first >= keep.lo && first + R::kRows <= keep.hi) return;
  clear_rows_but<Consumers>(ring, use, first, [&](int row) { return keep.has(row); });
}
// Clear rows outside `keep`, and padding keys.
template <int Consumers, class R>
PT_DEVICE void clear_hidden_rows(const R& ring, int use, int first, const Range& keep,
                                 const KeyPaddingBitmap& keys) {
  clear_rows_but<Consumers>(ring, use, first,
                            [&](int row) { return keep.has(row) && keys.visible(row); });
}

// One bit per element of x[R].
template <int R>
struct Pairs {
  uint32_t words[(R + 31) / 32] = {};
  PT_DEVICE bool has(int i) const { return words[i / 32] >> i % 32 & 1; }
  PT_DEVICE const Pairs& opaque() const { return *this; }
  // Return the same bits, unpacked only after this point: unpacked bits use a register each.
  PT_DEVICE Pairs packed_until_here() const {
    Pairs same;
    PT_UNROLL
    for (int w = 0; w < (R + 31) / 32; ++w) same.words[w] = uint32_t(ptx::opaque(int(words[w])));
    return same;
  }

  // Collect the bits that f(place) returns per 8 N columns.
  template <int N, class F>
  static PT_DEVICE Pairs of(const Place& at, F f) {
    static_assert(R % (4 * N) == 0);
    Pairs all;
    PT_UNROLL
    for (int w = 0; w < (R + 31) / 32; ++w) {
      PT_NO_UNROLL  // few registers are free during a gemm
      for (int n = 32 * w; n < min(32 * w + 32, R); n += 4 * N)
        all.words[w] |= f(at.after(2 * n)) << n % 32;
    }
    return all;
  }
};

// Read the precomputed keep mask of a tile with 2 R columns, from `at` on.
template <int R, class S>
PT_DEVICE Pairs<R> read_kept_pairs(const S& score_mod, const Place& at) {
  Pairs<R> kept;
  PT_UNROLL
  for (int c = 0; c < 2 * R; c += 32)
    kept.words[c / 64] |= score_mod.template keep_bits<2 * R % 32 == 0>(at, c) << c / 2 % 32;
  return kept;
}
// Like read_kept_pairs, or drawn 8 N columns at a time without precomputed bits.
template <int R, int N, class S>
PT_DEVICE Pairs<R> kept_pairs(const S& score_mod, const Place& at) {
  if (score_mod.has_keep_bits()) return read_kept_pairs<R>(score_mod, at);
  return Pairs<R>::template of<N>(
      at, [&](const Place& place) { return score_mod.template keep_mask<N>(place); });
}

// Set hidden elements to 0.
template <int R, class Visible>
PT_DEVICE void keep_visible(float (&x)[R], const Visible& visible) {
  PT_UNROLL
  for (int i = 0; i < R; ++i) x[i] = visible.has(i) ? x[i] : 0.0f;
}

// Store the lane's two rows of a result times `factor`, 16 bytes at a time, to the tensor's rows
// row_index, if not negative. Every lane of the warp calls it.
template <class T, int R>
PT_DEVICE void store_wide(const Out& out, int b, int h, const float (&x)[R],
                          const float (&factor)[2], const int64_t (&row_index)[2]) {
  PT_UNROLL
  for (int r = 0; r < 2; ++r) {
    T* row = static_cast<T*>(out.data) + b * out.stride.batch + h * out.stride.head +
             row_index[r] * out.stride.row;
    PT_UNROLL
    for (int d = 0; d < R / 4; d += 4) {
      uint32_t words[4];
      PT_UNROLL
      for (int c = 0; c < 4; ++c) {
        const float low = x[4 * (d + c) + 2 * r], high = x[4 * (d + c) + 2 * r + 1];
        // A factor of 0 marks a row without visible keys; its sums are ignored.
        words[c] = factor[r] == 0.0f ? 0u : Element<T>::pack(low * factor[r], high * factor[r]);
      }
      transpose_quad(words);
      const int column = 8 * (d + lane_id() % 4);
      if (row_index[r] >= 0 && column < out.columns)
        ptx::st_global_v4(row + column, {{words[0], words[1], words[2], words[3]}});
    }
  }
}

// TMA maps of the operands, in boxes of a tile's rows.
struct Sm90Operands {
  ptx::TensorMap q, k, v, d_out;  // (D, rows, heads, sequences)

  PT_DEVICE void prefetch() const {
    for (const ptx::TensorMap* map : {&q, &k, &v, &d_out}) ptx::prefetch_tensor_map(*map);
  }
};

struct Sm90Backward : Sm90Operands {
  AttentionBackward g;
  TileOrder order;
};

// Scale of weights. In float16 a weight below 2^-24 would become zero, although its product with a
// large dP is not; so weights are 2^14 P there. P is at most 1, or slightly more by lse's rounding.
template <class T>
constexpr int kWeightBits = std::is_same_v<T, ptx::f16> ? 14 : 0;
template <class T>
constexpr float kWeightUnit = 1.0f / (1 << kWeightBits<T>);  // inverse scale

// Return (dP - delta) / 2^kWeightBits; d_scaled is delta times the same factor.
template <class T>
PT_DEVICE float less_delta(float dp, float d_scaled) {
  return kWeightBits<T> ? ptx::fma_rn(dp, kWeightUnit<T>, -d_scaled) : dp - d_scaled;
}
// Return a row's maximum in base 2: a weight is exp2(score - maximum).
template <class T>
PT_DEVICE float in_base_2(float row_max) {
  return kWeightBits<T> ? ptx::fma_rn(row_max, kLog2e, -float(kWeightBits<T>)) : row_max * kLog2e;
}
// Apply dropout to dP.
template <int R>
PT_DEVICE void drop(float (&dp)[R], const Pairs<R>& given, float keep_scale) {
  const Pairs<R> keep_mask = given.packed_until_here();
  PT_UNROLL
  for (int i = 0; i < R; ++i) dp[i] = keep_mask.has(i) ? dp[i] * keep_scale : 0.0f;
}
// Return the weight of a score of a row with this maximum.
template <class T>
PT_DEVICE float weight_of(float score, float row_max) {
  return ptx::exp2(kWeightBits<T> ? ptx::fma_rn(score - row_max, kLog2e, float(kWeightBits<T>))
                                  : (score - row_max) * kLog2e);
}
// Like above, with log2 of the sum, minus kWeightBits.
PT_DEVICE float weight_of(float score, float row_max, float log2_sum) {
  return ptx::exp2(ptx::fma_rn(score - row_max, kLog2e, -log2_sum));
}

// Pack P of 64 rows, computed as exp2 of a difference from lse. For scores beyond 10^7 lse is so
// coarse that P may exceed 1; 2^14 P must not become an infinity in float16, because it would turn
// into NaN, also in the sums of other rows.
template <class T, int R>
PT_DEVICE void pack_recomputed(uint32_t (&weights)[R / 8][4], const float (&x)[R]) {
  if constexpr (kWeightBits<T> == 0) {
    pack_weights<T>(weights, x);
  } else {
    PT_UNROLL
    for (int i = 0; i < R / 2; ++i) {
      const float low = x[2 * i], high = x[2 * i + 1];
      weights[i / 4][i % 4] = ptx::pack_f16_finite(low, high);
    }
  }
}

// Pack dS = P * (dP - delta) of 64 rows; dp is dP - delta. P is the rounded operand: in float32 it
// would use as many more registers as S and dP do. ds may alias weights.
template <class T, int R>
PT_DEVICE void pack_gradients(uint32_t (&ds)[R / 8][4], const uint32_t (&weights)[R / 8][4],
                              const float (&dp)[R]) {
  PT_UNROLL
  for (int i = 0; i < R / 2; ++i) {
    const uint32_t w = weights[i / 4][i % 4];
    ds[i / 4][i % 4] = Element<T>::pack(ptx::widen(T{uint16_t(w)}) * dp[2 * i],
                                        ptx::widen(T{uint16_t(w >> 16)}) * dp[2 * i + 1]);
  }
}

// Kernels with score_mod process scores in pieces of 16 columns, an operand's step, so a piece's
// temporaries use few registers.
constexpr int kPiece = 2;

// Return the position of this warp's rows in a tile with first row `row`. Opaque, so the compiler
// does not hold it in registers.
PT_DEVICE Place place_again(int row, int column) {
  const int thread = ptx::opaque(int(threadIdx.x));
  return Place(row + thread / 32 * 16 - 64, column, thread % 32);
}

template <class T>
PT_DEVICE void pack_piece(uint32_t (&operand)[4], const float (&x)[kPiece][4]) {
  PT_UNROLL
  for (int i = 0; i < 4; ++i)
    operand[i] = Element<T>::pack(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
}

// Map boxes of `rows` rows of an operand with queries' or keys' rows.
inline ptx::TensorMap map_rows(const AttentionProblem& p, const In& t, bool keys, int columns,
                               int rows) {
  const bool packed = p.cu_queries;
  const int64_t length = packed ? (keys ? p.total_keys : p.total_queries)
                         : keys ? p.num_keys
                                : p.num_queries;
  const int heads = keys ? p.heads / p.group : p.heads;
  return tensor_map(
      {t.data,
       p.dtype,
       4,
       {uint64_t(columns), uint64_t(length), uint64_t(heads), uint64_t(packed ? 1 : p.sequences)},
       {1, uint64_t(t.stride.row), uint64_t(t.stride.head), uint64_t(t.stride.batch)}},
      uint32_t(rows));
}

// Map backward's operands in boxes of `queries` and `keys` rows.
inline Sm90Operands map_operands(const AttentionBackward& g, int queries, int keys) {
  const AttentionProblem& p = g.p;
  return {map_rows(p, p.q, false, p.head_dim, queries), map_rows(p, p.k, true, p.head_dim, keys),
          map_rows(p, p.v, true, p.value_dim, keys),
          map_rows(p, g.d_out, false, p.value_dim, queries)};
}

// Call run(kind) for the plan's kernel.
template <class F>
void with_backward_kind(const Sm90Plan& plan, F run) {
  const auto of_class = [&](auto columns) {
    constexpr int D = decltype(columns)::value;
    if (plan.elementwise_mask) run(Hopper<D, true, true>{});
    else plan.has_score_mod ? run(Hopper<D, true, false>{}) : run(Hopper<D, false, false>{});
  };
  if (plan.head_class == 64) of_class(std::integral_constant<int, 64>{});
  else if (plan.head_class == 128) of_class(std::integral_constant<int, 128>{});
  else if (plan.elementwise_mask) run(Hopper<256, false, true>{});
  else plan.has_score_mod ? run(Hopper<256, true, false>{}) : run(Hopper<256, false, false>{});
}

}  // namespace pt::cuda
