// SPDX-License-Identifier: Apache-2.0
// Shared by the portable kernels: stores of results, KV tiles of forward in shared memory, and the
// choice of a backward kernel. KV tiles:
//
//   tiles.begin(first);
//   for each tile t:
//     tiles.await_keys(t, after);  x = q . k;  tiles.await_values(after);  o += weights . v
//
// after() returns the tile after t, or a tile past the range. When a call returns, its tile is
// visible to all threads and no thread reads the other tile. WarpKeyTiles have a separate loop,
// go_over_stream.
#pragma once

#include <type_traits>

#include "cuda/attention/score_mod.cuh"
#include "cuda/attention/sm80/config.h"
#include "cuda/tile/eight_bits.cuh"

namespace pt::cuda {

// Store two columns of a result's row, if they exist.
template <class T>
PT_DEVICE void store_two(const Out& out, T* row, int column, float x, float y) {
  if constexpr (sizeof(T) == 2) {
    if (out.pairs && column < out.columns)
      return ptx::st_global_u32(row + column, Element<T>::pack(x, y));
  }
  if (column < out.columns) store_one(row + column, x);
  if (column + 1 < out.columns) store_one(row + column + 1, y);
}

// Store the warp's 16 rows of a result times `factor[half]`, columns from 8 first on, to the
// tensor's rows row_index[half], if not negative.
template <class T, int DB>
PT_DEVICE void store_rows(const Out& out, int b, int h, const float (&acc)[DB][4],
                          const float (&factor)[2], const int64_t (&row_index)[2], int first) {
  PT_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (row_index[half] < 0) continue;
    T* row = static_cast<T*>(out.data) + b * out.stride.batch + h * out.stride.head +
             row_index[half] * out.stride.row;
    PT_UNROLL
    for (int d = 0; d < DB; ++d) {
      const int column = 8 * (first + d) + 2 * (lane_id() % 4);
      // A factor of 0 marks a row without visible keys; its sums are ignored.
      const float x = factor[half] == 0.0f ? 0.0f : acc[d][2 * half] * factor[half];
      const float y = factor[half] == 0.0f ? 0.0f : acc[d][2 * half + 1] * factor[half];
      store_two(out, row, column, x, y);
    }
  }
}

// Keys and values in the query's dtype, which gemms use without conversion.
template <class T, class K, class Work, int Columns>
struct TilesOfQuerysDtype {
  static constexpr int kRow = K::head_dim * int(sizeof(T)), kBytes = 2 * Columns * kRow;
  const AttentionForward& f;
  const Work& w;
  SmemTile<kRow> k, v;

  PT_DEVICE TilesOfQuerysDtype(const AttentionForward& f, const Work& w, uint32_t base)
      : f(f), w(w), k{base}, v{base + Columns * kRow} {}

  template <int NB>
  PT_DEVICE void scale_scores(float (&)[NB][4]) const {}
  template <int NB>
  PT_DEVICE void scale_weights(float (&)[NB][4], uint32_t) const {}

  template <int DB, int NB>
  PT_DEVICE void add_values(float (&o)[DB][4], const float (&x)[NB][4], int first,
                            uint32_t columns) const {
    const int all = f.p.value_dim;
    // One call without a check per 16 columns: 100 instructions instead of 190.
    if (K::forward == Pass::ForwardSplit && !K::has_score_mod && all == K::head_dim)
      return Products<T>::product(o, x, v, first, K::head_dim, columns);
    Products<T>::product(o, x, v, first, all, columns);
  }
};

// Tiles of a block: the copy of K or V overlaps the gemm with the other.
template <class T, class K, class Work, int Columns>
struct KeyTiles : TilesOfQuerysDtype<T, K, Work, Columns> {
  using Tiles = TilesOfQuerysDtype<T, K, Work, Columns>;
  using Tiles::f, Tiles::w, Tiles::k, Tiles::v, Tiles::TilesOfQuerysDtype;

  PT_DEVICE void begin(int first) const { copy_keys(first); }

  template <class After>
  PT_DEVICE void await_keys(int t, After) const {
    ptx::cp_async_wait<0>();
    ptx::syncthreads();  // K is complete, and all reads of V are done
    if (!K::has_score_mod || f.out.data) {
      w.template copy_any_keys<T>(f.p, v, f.p.v, f.p.value_dim, t);
      ptx::cp_async_commit();
    }
  }
  template <class After>
  PT_DEVICE void await_values(After after) const {
    ptx::cp_async_wait<0>();
    ptx::syncthreads();  // V is complete, and all reads of K are done
    if (const int next = after(); next < w.range.last) copy_keys(next);
  }

 private:
  PT_DEVICE void copy_keys(int t) const {
    w.template copy_any_keys<T>(f.p, k, f.p.k, f.p.head_dim, t);
    ptx::cp_async_commit();
  }
};

// Tiles of a warp, which streams independently of other warps: a tile's keys and values alternate,
// and each copy starts as soon as the previous content has been read, so one or two copies per warp
// are always in flight.
template <class T, class K, class Work, int Columns>
struct WarpKeyTiles : TilesOfQuerysDtype<T, K, Work, Columns> {
  using Tiles = TilesOfQuerysDtype<T, K, Work, Columns>;
  using Tiles::f, Tiles::w, Tiles::k, Tiles::v, Tiles::kRow;

  PT_DEVICE WarpKeyTiles(const AttentionForward& f, const Work& w, uint32_t base)
      : Tiles(f, w, base + int(threadIdx.x) / 32 * Tiles::kBytes) {}

  // Start the copy of tile t's keys or values, if the tile exists.
  PT_DEVICE void copy(bool values, int t) const {
    if (t >= w.range.last) return;
    const AttentionProblem& p = f.p;
    w.template copy_keys_by_warp<T>(p, values ? v : k, values ? p.v : p.k,
                                    values ? p.value_dim : p.head_dim, t);
  }
  // Wait for all copy groups but the last; with_queries: every warp has copied a part of them.
  PT_DEVICE void await(bool with_queries) const {
    ptx::cp_async_wait<1>();
    if (with_queries) ptx::syncthreads();
    else ptx::syncwarp();
  }
};

// Eight-bit keys and values: copied unchanged to a staging buffer, then widened to T in the tile,
// each 16 bytes by the thread that copied them. So a tile's copy overlaps all work on the previous
// tile. Scores are multiplied by the keys' scales (zeros without visible pairs), and weights,
// before rounding, by the values' scales. Such a weight may be too small for float16, so it is
// split into two bfloat16, which hold 16 of its bits.
template <class T, class K, class Work, int Columns>
struct EightBitKeyTiles {
  using V = std::conditional_t<std::is_same_v<T, ptx::f16>, ptx::bf16, T>;
  static constexpr int kRow = K::head_dim * int(sizeof(T));
  const AttentionForward& f;
  const Work& w;
  SmemTile<kRow> k, v;
  SmemTile<K::head_dim> staged_k, staged_v;
  uint32_t key_scales, value_scales;
  float key_scale = 0.0f, value_scale = 0.0f;  // in flight: scales of this thread's row

  PT_DEVICE EightBitKeyTiles(const AttentionForward& f, const Work& w, uint32_t base)
      : f(f), w(w), k{base}, v{k.base + Columns * kRow}, staged_k{v.base + Columns * kRow},
        staged_v{staged_k.base + Columns * K::head_dim},
        key_scales(staged_v.base + Columns * K::head_dim), value_scales(key_scales + 4 * Columns) {}

  PT_DEVICE void begin(int first) {
    copy(staged_k, key_scale, f.p.k, f.p.key_scale, f.p.head_dim, first);
    copy(staged_v, value_scale, f.p.v, f.p.value_scale, f.p.value_dim, first);
  }

  template <class After>
  PT_DEVICE void await_keys(int, After after) {
    widen<T>(staged_k, k, key_scales, key_scale, f.p.head_dim);  // all reads of K are done
    copy(staged_k, key_scale, f.p.k, f.p.key_scale, f.p.head_dim, after());
    ptx::syncthreads();  // K is complete, and all reads of V are done
  }
  template <class After>
  PT_DEVICE void await_values(After after) {
    widen<V>(staged_v, v, value_scales, value_scale, f.p.value_dim);
    copy(staged_v, value_scale, f.p.v, f.p.value_scale, f.p.value_dim, after());
    ptx::syncthreads();  // V is complete, and all reads of K are done
  }

  template <int NB>
  PT_DEVICE void scale_scores(float (&x)[NB][4]) const {
    times_scales(x, key_scales, kAllBits);
  }
  // Scale weights; hidden pairs add nothing, whatever their scale.
  template <int NB>
  PT_DEVICE void scale_weights(float (&x)[NB][4], uint32_t visible) const {
    times_scales(x, value_scales, visible);
  }

  template <int DB, int NB>
  PT_DEVICE void add_values(float (&o)[DB][4], float (&x)[NB][4], int first,
                            uint32_t columns) const {
    Products<V>::product(o, x, v, first, f.p.value_dim, columns);
    if (std::is_same_v<T, V>) return;
    each<NB>([&](int n, int r, uint32_t) {
      x[n][r] -= ptx::bits_float(ptx::pack_bf16(0.0f, x[n][r]) & 0xffff0000u);
    });
    Products<V>::product(o, x, v, first, f.p.value_dim, columns);
  }

 private:
  static constexpr uint32_t kAllBits = 0xffffffffu;

  // Start the copy of a tile's rows and load their scales; commits a copy group even without a
  // tile.
  PT_DEVICE void copy(SmemTile<K::head_dim> to, float& scale, const In& rows, const In& scales,
                      int columns, int t) const {
    if (t < w.range.last) {
      w.template copy_any_keys<uint8_t>(f.p, to, rows, columns, t);
      if (const int row = int(threadIdx.x); row < Columns)
        scale = w.scale_of(f.p, scales, w.origin + t * Columns + row);
    }
    ptx::cp_async_commit();
  }
  template <class E>
  PT_DEVICE void widen(SmemTile<K::head_dim> from, SmemTile<kRow> to, uint32_t scales, float scale,
                       int columns) const {
    ptx::cp_async_wait<1>();  // all but the other operand's, which started later
    widen_rows<E, Columns>(from, to, Products<uint8_t>::chunks(columns),
                           f.p.eight_bits == EightBits::e4m3);
    if (const int row = int(threadIdx.x); row < Columns)
      ptx::st_shared_f32(scales + 4 * row, scale);
  }
  template <int NB>
  PT_DEVICE static void times_scales(float (&x)[NB][4], uint32_t scales, uint32_t visible) {
    PT_UNROLL
    for (int n = 0; n < NB; ++n) {
      float two[2];
      ptx::ld_shared_v2_f32(scales + 4 * (8 * n + 2 * (lane_id() % 4)), two[0], two[1]);
      PT_UNROLL
      for (int r = 0; r < 4; ++r)
        x[n][r] = visible >> (4 * n + r) & 1 ? x[n][r] * two[r % 2] : 0.0f;
    }
  }
};

// Call run(kind) for the plan's kernel; see plan_sm80.
template <class T, Pass pass, class F>
void with_kind(const Sm80Plan& plan, F run) {
  if constexpr (std::is_same_v<T, ptx::bf16>) {
    if (!plan.has_score_mod && plan.head_class == 64) return run(Kind<64, false>{});
    if constexpr (pass == Pass::BwdDq) {
      if (!plan.has_score_mod) return run(Kind<128, false>{});
    }
  }
  if (plan.head_class == 64) return run(Kind<64, true>{});
  if constexpr (sizeof(T) == 2) {
    if (plan.head_class == 128) return run(Kind<128, true>{});
  }
  run(Kind<256, true>{});
}

}  // namespace pt::cuda
