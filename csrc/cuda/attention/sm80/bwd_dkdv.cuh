// SPDX-License-Identifier: Apache-2.0
// Attention backward, bwd_dkdv: d_key and d_value of a KV tile, summed in order over the query
// heads that share it.
//
// Rows are keys: scores are k.q, so weights and dX are already the next gemms' operands and bypass
// shared memory.
#pragma once

#include "cuda/attention/kernels.h"
#include "cuda/attention/sm80/tile.cuh"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace pt::cuda {

template <class T, class K>
constexpr AttentionTile kBwdDkdvTile =
    attention_tile(Pass::BwdDkdv, K::head_dim, sizeof(T), K::has_score_mod);

template <class T, class K>
using BwdDkdvWork =
    KeyTile<kBwdDkdvTile<T, K>.rows(), kBwdDkdvTile<T, K>.columns, K::has_score_mod>;

// Iterates over the Q tiles that see a KV tile, for each query head of the group in order. The
// current step, the next one and the range are in shared memory, because registers are short.
template <class Work, bool Listed, int Streamed>
class GroupSteps {
 public:
  struct Step {
    // head: in the group; entry, end: position in the tile's block list
    int head = -1, tile = kNoTile, entry = 0, end = 0;
  };
  using List = TileList<Listed, Streamed>;

  PT_DEVICE GroupSteps(const AttentionProblem& p, const Work& w, uint32_t at)
      : p_(p), w_(w), at_(at) {
    const Tiles& r = w.range;
    store(2, {r.first, r.whole, r.whole_end, r.last}), store(3, {r.start, r.end, 0, 0});
  }

  PT_DEVICE Tiles range() const {
    const ptx::Words4 tiles = ptx::ld_shared_v4(at_ + 32), rows = ptx::ld_shared_v4(at_ + 48);
    Tiles r;
    r.first = int(tiles.w[0]), r.whole = int(tiles.w[1]), r.whole_end = int(tiles.w[2]),
    r.last = int(tiles.w[3]);
    r.start = int(rows.w[0]), r.end = int(rows.w[1]);
    return r;
  }
  PT_DEVICE Step step(int n) const {
    const ptx::Words4 step = ptx::ld_shared_v4(at_ + n % 2 * 16);
    return {int(step.w[0]), int(step.w[1]), int(step.w[2]), int(step.w[3])};
  }
  PT_DEVICE bool none(const Step& s) const { return s.head >= p_.group; }

  static PT_DEVICE Step nothing() { return {}; }
  // Find step n, after step n - 1 or, for the first, after nothing().
  PT_DEVICE Step find(int n, const Tiles& range, Step s) const {
    if (s.head >= 0) {
      List list(lists(), s.entry, s.end);
      s.tile = list.leave(s.tile), s.entry = list.entry();
    }
    while (s.tile >= range.last && (++s.head, !none(s))) {
      List list(lists(), w_.b, w_.hk * p_.group + s.head, max(w_.j0, 0));
      s.tile = list.first(range), s.entry = list.entry(), s.end = list.end();
    }
    store(n % 2, {s.head, s.tile, s.entry, s.end});
    return s;
  }
  PT_DEVICE int place(const Step& s) const { return List(lists(), s.entry, s.end).place(p_); }

 private:
  struct Words {
    int w[4];
  };
  PT_DEVICE void store(int place, const Words& words) const {
    if (threadIdx.x != 0) return;
    PT_UNROLL
    for (int i = 0; i < 4; ++i) ptx::st_shared_u32(at_ + 16 * place + 4 * i, uint32_t(words.w[i]));
  }
  PT_DEVICE const BlockLists& lists() const { return p_.blocks.keys; }

  const AttentionProblem& p_;
  const Work& w_;
  uint32_t at_;
};

template <class T, class K>
PT_DEVICE void attention_bwd_dkdv_tile(const AttentionBackward& g, const BwdDkdvWork<T, K>& w) {
  constexpr AttentionTile kTile = kBwdDkdvTile<T, K>;
  constexpr int kRow = row_bytes(kTile, sizeof(T)), BM = kTile.rows(), BN = kTile.columns,
                NB = BN / 8;
  constexpr int DB = K::head_dim / 8 / kTile.splits, kStage = 2 * BN * kRow + 3 * 4 * BN;
  using M = Products<T>;
  const AttentionProblem& p = g.p;
  const Sequence& s = w.s;
  const SmemTile<kRow> k{ptx::dynamic_smem()}, v{k.base + BM * kRow};
  const uint32_t streamed = v.base + BM * kRow;
  const GroupSteps<BwdDkdvWork<T, K>, K::has_score_mod, BN> steps(p, w,
                                                                  streamed + kTile.stages * kStage);
  const auto q_tile = [&](int n) { return SmemTile<kRow>{streamed + (n % kTile.stages) * kStage}; };
  const auto do_tile = [&](int n) { return SmemTile<kRow>{q_tile(n).base + BN * kRow}; };
  // row_max, log2_sum, delta: BN words each
  const auto row_stats_of = [&](int n) { return q_tile(n).base + 2 * BN * kRow; };
  // Copy the tiles of the step after `before`; the first copy includes K and V.
  const auto copy_step = [&](int n, const Tiles& range, const auto& before) {
    const auto step = steps.find(n, range, before);
    if (steps.none(step)) return;
    if (n == 0) {
      w.template copy_keys<T>(k, p.k, p.head_dim);
      w.template copy_keys<T>(v, p.v, p.value_dim);
    }
    const int h = w.hk * p.group + step.head, t = step.tile;
    w.template copy_queries<T>(q_tile(n), p.q, p.head_dim, t, h, range);
    w.template copy_queries<T>(do_tile(n), g.d_out, p.value_dim, t, h, range);
    ptx::cp_async_commit();
    for (int c = int(threadIdx.x); c < BN; c += int(blockDim.x)) {
      const int i = t * BN + c;
      const RowStats row = read_row_stats(g, row_stat_at(g.at, w.b, h, s.row_q + i),
                                          i >= range.start && i < range.end);
      ptx::st_shared_f32(row_stats_of(n) + 4 * c, row.row_max);
      ptx::st_shared_f32(row_stats_of(n) + 4 * (BN + c), row.log2_sum);
      ptx::st_shared_f32(row_stats_of(n) + 4 * (2 * BN + c), row.delta);
    }
  };

  const int warp = int(threadIdx.x) / 32, own = 16 * (warp / kTile.splits),
            part = warp % kTile.splits * DB;
  const Place rows_at(w.j0 + own, 0);
  const Range bounds[2] = {w.bounds(p, rows_at.row_of(0)), w.bounds(p, rows_at.row_of(2))};
  float dk[DB][4], dv[DB][4];
  clear(dk), clear(dv);
  const auto copy_next = [&](int n) { copy_step(n + 1, steps.range(), steps.step(n)); };

  copy_step(0, w.range, steps.nothing());
  for (int n = 0;; ++n) {
    ptx::cp_async_wait<0>();
    ptx::syncthreads();  // this tile is complete, and all reads of the previous one are done
    if (steps.none(steps.step(n))) break;
    if (kTile.stages == 2) copy_next(n);

    float x[NB][4], dp[NB][4], weights[NB][4];
    M::scores(x, k, own, q_tile(n), p.head_dim);
    M::scores(dp, v, own, do_tile(n), p.value_dim);
    const auto step = steps.step(n);
    const Place at(w.j0 + own, step.tile * BN);
    const int place = steps.place(step);
    const bool elementwise = K::has_score_mod && (p.hides_pairs() || place >= 0 || s.padding_gaps);
    const bool cut = elementwise || steps.range().cut(step.tile);
    uint32_t visible = visible_in_tile<K, true, NB>(p, s, w.b, at, bounds, cut, place);
    const ScoreMod<true> score_mod(p, s, w.b, w.hk * p.group + step.head);
    const auto ask_mask = [&] { return steps.place(steps.step(n)) >= 0; };
    const uint32_t row_stats = row_stats_of(n) + 4 * 2 * (lane_id() % 4);
    visible = gradients<K, true>(
        p, score_mod, x, dp, weights, at, visible, cut, ask_mask, [&](int c, int r) {
          const uint32_t word = row_stats + 4 * (8 * c + r % 2);
          return RowStats{ptx::ld_shared_f32(word),
                          K::has_score_mod ? ptx::ld_shared_f32(word + 4 * BN) : 0.0f,
                          ptx::ld_shared_f32(word + 8 * BN)};
        });
    const uint32_t columns = elementwise ? columns_visible_to_warp<NB>(visible) : kAllColumns;
    M::product(dv, weights, do_tile(n), part, p.value_dim, columns);
    M::product(dk, x, q_tile(n), part, p.head_dim, columns);
    if (kTile.stages == 1) {
      ptx::syncthreads();
      copy_next(n);
    }
  }

  const int written = p.cu_keys ? s.num_k : p.num_keys;
  float dk_factor[2], dv_factor[2];
  int64_t index[2];
  PT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int j = rows_at.row_of(2 * half);
    const bool nobody = bounds[half].empty();
    dk_factor[half] = nobody ? 0.0f : p.scale, dv_factor[half] = nobody ? 0.0f : p.keep_scale;
    index[half] = j >= 0 && j < written ? s.row_k + j : -1;
  }
  if (g.dk.data) store_rows<T>(g.dk, w.b, w.hk, dk, dk_factor, index, ptx::opaque(part));
  if (g.dv.data) store_rows<T>(g.dv, w.b, w.hk, dv, dv_factor, index, part);
}

template <class T, class K>
__global__ void __launch_bounds__(kBwdDkdvTile<T, K>.threads(), 1)
    attention_bwd_dkdv_kernel(const __grid_constant__ AttentionBackward g) {
  recompute_tiles<BwdDkdvWork<T, K>, K>(
      g.p, g.recompute, [&](const auto& w) { attention_bwd_dkdv_tile<T, K>(g, w); });
}

template <class T>
void sm80_attention_bwd_dkdv_as(const AttentionBackward& g, const Sm80Plan& plan, void* stream) {
  const int64_t tiles = tiles_of(g.p.num_keys + g.p.key_start % 32, plan.tile);
  const dim3 grid(recompute_blocks(g.recompute,
                                   attention_blocks(g.p.sequences, g.p.heads / g.p.group, tiles),
                                   multiprocessors()));
  with_kind<T, Pass::BwdDkdv>(plan, [&](auto kind) {
    launch(attention_bwd_dkdv_kernel<T, decltype(kind)>, grid, plan.tile.threads(), plan.smem_bytes,
           stream, g);
  });
}

}  // namespace pt::cuda
