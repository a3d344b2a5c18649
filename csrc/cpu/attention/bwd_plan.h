// SPDX-License-Identifier: Apache-2.0
// Work partition of the backward.
//
//   item   up to `item_rows` query rows of one query head
//   phase  consecutive items whose packed operands and partials of dQ fit the scratch budget
//   run    the items of one KV head in a phase: one task sums their dK and dV, in order
//   split  s of `splits`: the key blocks s, s + splits, ...; each split has a partial dQ
//   class  a run, or all runs of a phase that add to the same elements of a dense gradient
//          broadcast over heads or batch
//
// A task is (class, split). A sequence's summation order depends only on its lengths and on the
// number of heads, never on other sequences or on threads. Phase and run boundaries do not change
// it, because a run that continues in the next phase carries its dK and dV in full precision.
#pragma once

#include <cstddef>

#include "cpu/attention/problem.h"
#include "cpu/core/traits.h"

namespace pt {
namespace PT_ISA {
namespace bwd {

struct ItemId {
  int64_t b = 0, h = 0, q0 = 0;  // batch element or sequence, query head, first local row
};

struct Run {
  int64_t b, kv_head, first, end;  // items of the phase
  bool starts, ends;               // contains the first, the last items of its KV head
  int64_t next;                    // run of the same class, or -1
};

struct BackwardPlan {
  static constexpr size_t kBudget = size_t(64) << 20;
  static constexpr int64_t kTasks = 16;  // per sequence

  const AttentionProblem& p;
  int64_t most_keys, item_rows, group, splits;  // most_keys: per block
  bool share_batch, share_heads;

  BackwardPlan(const AttentionProblem& p, const AttentionGrads& g, int64_t most_keys,
               int64_t item_rows)
      : p(p), most_keys(most_keys), item_rows(item_rows), group(p.Hkv ? p.Hq / p.Hkv : 1) {
    const auto shared = [](const DenseGrad& d, int64_t stride, int64_t size) {
      return d.data && d.stride.d != 0 && stride == 0 && size > 1;
    };
    share_batch =
        shared(g.d_mask, g.d_mask.stride.b, p.B) || shared(g.d_bias, g.d_bias.stride.b, p.B);
    share_heads =
        shared(g.d_mask, g.d_mask.stride.h, p.Hq) || shared(g.d_bias, g.d_bias.stride.h, p.Hq);
    splits =
        share_heads ? kTasks : clamp<int64_t>(ceil_div(kTasks, max<int64_t>(p.Hkv, 1)), 1, kTasks);
  }

  int64_t queries(int64_t b) const { return p.cu_q ? p.cu_q[b + 1] - p.cu_q[b] : p.Lq; }
  int64_t keys(int64_t b) const { return p.cu_k ? p.cu_k[b + 1] - p.cu_k[b] : p.Lk; }
  // Return the keys per block: small blocks for short sequences, so that threads finish together.
  int64_t block_keys(int64_t b) const {
    return keys(b) > 2 * most_keys ? most_keys : min<int64_t>(most_keys, 192);
  }
  int64_t key_blocks(int64_t b) const { return ceil_div(keys(b), block_keys(b)); }
  int64_t parts(int64_t b) const { return clamp<int64_t>(key_blocks(b), 1, splits); }

  // Give a head without queries one empty item, so that its dK and dV are written.
  bool done(const ItemId& i) const { return i.b >= p.B || p.Hq == 0; }
  int64_t rows(const ItemId& i) const { return min(item_rows, queries(i.b) - i.q0); }
  bool last_rows(const ItemId& i) const { return i.q0 + item_rows >= queries(i.b); }
  bool starts_run(const ItemId& i) const { return i.q0 == 0 && i.h % group == 0; }
  bool ends_run(const ItemId& i) const { return last_rows(i) && (i.h + 1) % group == 0; }
  ItemId next(const ItemId& i) const {
    if (!last_rows(i)) return {i.b, i.h, i.q0 + item_rows};
    return i.h + 1 < p.Hq ? ItemId{i.b, i.h + 1, 0} : ItemId{i.b + 1, 0, 0};
  }

  int64_t classes() const { return (share_batch ? 1 : p.B) * (share_heads ? 1 : p.Hkv); }
  int64_t class_of(const Run& r) const {
    return (share_batch ? 0 : r.b) * (share_heads ? 1 : p.Hkv) + (share_heads ? 0 : r.kv_head);
  }
};

}  // namespace bwd
}  // namespace PT_ISA
}  // namespace pt
