// SPDX-License-Identifier: Apache-2.0
// Attention forward. A task owns a block of query rows (RowBlock of row_block.h) and loops over KV
// tiles.
//
// A Unit is the query heads that share a KV head. Its packed K and V are
//   shared    with long queries: all threads pack them once, then blocks of block_rows()
//             queries read them
//   streamed  if the queries of all its heads fit one block: a task packs each tile just
//             before use, over one split of the keys; the unit's splits are combined in a fixed
//             order
// The choice and the number of splits depend only on the sequence's lengths, so results do not
// depend on threads or on other sequences.
#pragma once

#include "cpu/attention/row_block.h"
#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"

namespace pt {
namespace PT_ISA {

constexpr int64_t kBlockRows = 128;   // max queries per block
constexpr int64_t kShortRows = 1024;  // max queries for small blocks
constexpr int64_t kDecodeRows = 16;   // max queries for small key splits: little else to share
// Bytes of packed operands at once, unless a few heads alone need more.
constexpr int64_t kPackBudget = int64_t(32) << 20;
constexpr int64_t kUnitsAtOnce = 4096;

template <class T>
class Forward {
 public:
  using A = typename T::acc;
  using vec = typename T::vec;
  using packed = typename T::packed;

  explicit Forward(const AttentionProblem& p) : p_(p), f_(p) {}

  void run() {
    set_up();
    while (plan()) {
      const Unit& end = units_[n_];
      shared_arena.reset(Arena::bytes_for<char>(end.memory));
      memory_ = shared_arena.take<char>(end.memory);
      for_each_task(end.packs, p_.threads, [&](int64_t t) { pack(t); });
      for_each_task(end.tasks, p_.threads, [&](int64_t t) { attend(t); });
      for_each_task(end.combines, p_.threads,
                    [&](int64_t t) { combine(find(t, &Unit::combines)); });
    }
  }

  // Return the scratch of run().
  Scratch scratch() {
    Scratch s;
    for (s.setup = set_up(); plan();
         s.shared = max(s.shared, Arena::bytes_for<char>(units_[n_].memory)))
      for (const Unit* u = units_; u < units_ + n_; u++)
        if (u->splits == 0 || u->s->rows > 0)
          s.local = max(s.local, max(task_bytes(*u), u->splits > 1 ? combine_bytes(*u) : 0));
    return s;
  }

 private:
  size_t set_up() {
    const size_t bytes =
        Arena::bytes_for<Sequence>(p_.B) + Arena::bytes_for<Unit>(kUnitsAtOnce + 1);
    setup_arena.reset(bytes);
    sequences_ = setup_arena.take<Sequence>(p_.B);
    units_ = setup_arena.take<Unit>(kUnitsAtOnce + 1);
    constexpr int64_t some = 64;
    for_each_task(ceil_div(p_.B, some), p_.threads, [&](int64_t t) {
      for (int64_t b = some * t; b < min(p_.B, some * t + some); b++)
        sequences_[b] = Sequence(p_, b);
    });
    return bytes;
  }

  // Query heads [h0, h0 + heads) of a sequence, which share their keys.
  struct Unit {
    const Sequence* s;
    int64_t h0, heads, splits, chunk;        // splits = 0: shared; else of `chunk` keys each
    int64_t packs, tasks, combines, memory;  // totals of the previous units; memory in bytes
  };
  static constexpr int64_t kPackKeys = 256;  // keys packed per task

  // Return the rows per block of queries: small blocks let threads finish together, large blocks
  // amortize loads of K and V.
  static int64_t block_rows(const Sequence& s) { return s.rows <= kShortRows ? 64 : 96; }
  int64_t blocks(const Sequence& s) const { return ceil_div(s.Lq, block_rows(s)); }
  static int64_t padded_keys(const Sequence& s) { return round_up(s.Lk, kPanel<T>); }
  static int64_t tile_keys(const Sequence& s) { return min(kBlockKeys, padded_keys(s)); }
  // Return the scratch of the unit's task, and of the task that combines its splits.
  size_t task_bytes(const Unit& u) const {
    const int64_t ld = tile_keys(*u.s);
    if (u.splits == 0) return RowBlock<T>::bytes(f_, min(block_rows(*u.s), u.s->Lq), ld);
    return RowBlock<T>::bytes(f_, u.heads * u.s->rows, ld) +
           Arena::bytes_for<packed>(f_.k_units(ld)) + Arena::bytes_for<packed>(f_.v_units(ld)) +
           Arena::bytes_for<float>(f_.scale_floats(ld));
  }
  size_t combine_bytes(const Unit& u) const {
    return RowBlock<T>::bytes(f_, u.heads * u.s->rows, kPanel<T>);
  }
  int64_t partial_bytes(const Unit& u) const {
    return RowBlock<T>::partial_size(f_, u.heads * u.s->rows) * int64_t(sizeof(A));
  }

  // Plan the next units in units_[0, n_), with totals in units_[n_]: as many as fit the budget of
  // packed memory, but enough tasks for every thread. Only valid rows and keys decide the packing
  // and the splits, so that padding a sequence does not change a bit.
  bool plan() {
    Unit u{};
    for (n_ = 0; n_ < kUnitsAtOnce && b_ < p_.B && p_.Hq > 0; n_++) {
      if (u.memory > kPackBudget && u.tasks >= p_.threads) break;
      const Sequence& s = sequences_[b_];
      const int64_t stacked =
          clamp<int64_t>(s.rows > 0 ? kBlockRows / s.rows : f_.group, 1, f_.group);
      u.s = &s, u.h0 = h_;
      const bool shared = stacked < f_.group && s.rows > kDecodeRows,
                 one_head = f_.group == 1 && s.rows > kBlockRows;
      if (shared || one_head) {
        u.heads = f_.group, u.splits = u.chunk = 0;
      } else {
        u.heads = min(ceil_div(f_.group, ceil_div(f_.group, stacked)), f_.group - h_ % f_.group);
        u.chunk = (u.heads * s.rows <= kDecodeRows ? 1 : 4) * kBlockKeys *
                  ceil_div(s.cols, 64 * kBlockKeys);
        u.splits = s.rows > 0 && s.cols > 0 ? ceil_div(s.cols, u.chunk) : 1;
      }
      units_[n_] = u;
      if (u.splits == 0) {
        const int64_t ld = padded_keys(s);
        u.memory += (f_.k_units(ld) + f_.v_units(ld)) * int64_t(sizeof(packed)) +
                    f_.scale_floats(ld) * int64_t(sizeof(float));
        u.packs += ceil_div(ld, kPackKeys), u.tasks += u.heads * blocks(s);
      } else if (s.Lq > 0) {
        u.tasks += u.splits;
        if (u.splits > 1) u.memory += u.splits * partial_bytes(u), u.combines++;
      }
      u.memory = round_up(u.memory, 64);
      h_ += u.heads;
      if (h_ == p_.Hq) h_ = 0, b_++;
    }
    units_[n_] = u;
    return n_ > 0;
  }

  // Return the unit of task t of a kind.
  const Unit& find(int64_t t, int64_t Unit::* count) const {
    int64_t lo = 0, hi = n_;
    while (hi - lo > 1) {
      const int64_t mid = lo + (hi - lo) / 2;
      if (units_[mid].*count <= t) lo = mid;
      else hi = mid;
    }
    return units_[lo];
  }
  packed* packed_k(const Unit& u) const { return reinterpret_cast<packed*>(memory_ + u.memory); }
  packed* packed_v(const Unit& u) const { return packed_k(u) + f_.k_units(padded_keys(*u.s)); }
  float* scales(const Unit& u) const {
    return reinterpret_cast<float*>(packed_v(u) + f_.v_units(padded_keys(*u.s)));
  }
  PackedKeys<T> keys_of(const packed* k, const packed* v, int64_t first, int64_t ld,
                        const float* scales) const {
    const bool eight = f_.scale_floats(ld) > 0;
    return {k, v, first, ld, eight ? scales : nullptr, eight ? scales + ld : nullptr};
  }

  void pack(int64_t t) const {
    const Unit& u = find(t, &Unit::packs);
    const int64_t k0 = (t - u.packs) * kPackKeys, ld = padded_keys(*u.s);
    const Range seen = u.s->keys();
    const int64_t lo = max(k0, seen.lo / kPanel<T> * kPanel<T>),
                  hi = min(min(k0 + kPackKeys, ld), round_up(seen.hi, kPanel<T>));
    if (lo < hi)
      PT_PHASE(pack)
      f_.pack(*u.s, u.h0 / f_.group, lo, hi - lo, 0, ld, packed_k(u), packed_v(u), scales(u));
  }

  void attend(int64_t t) const {
    const FlushSubnormals flush;
    const Unit& u = find(t, &Unit::tasks);
    const Sequence& s = *u.s;
    const int64_t i = t - u.tasks, ld = tile_keys(s);
    if (u.splits == 0) {  // longest rows of a head first
      const int64_t q0 = (blocks(s) - 1 - i % blocks(s)) * block_rows(s),
                    nq = min(block_rows(s), s.Lq - q0);
      local_arena.reset(task_bytes(u));
      RowBlock<T> block(f_, s, u.h0 + i / blocks(s), 1, q0, nq, ld);
      const PackedKeys<T> shared = keys_of(packed_k(u), packed_v(u), 0, padded_keys(s), scales(u));
      block.pieces(0, s.Lk, [&](int64_t k0, int64_t n) { block.tile(shared, k0, n); });
      PT_PHASE(results) block.finish();
      return;
    }
    if (i == 0) clear_padding(u);
    if (s.rows == 0) return;
    local_arena.reset(task_bytes(u));
    RowBlock<T> block(f_, s, u.h0, u.heads, 0, s.rows, ld);
    const int64_t hkv = u.h0 / f_.group;
    packed *K = local_arena.take<packed>(f_.k_units(ld)),
           *V = local_arena.take<packed>(f_.v_units(ld));
    float* scales = local_arena.take<float>(f_.scale_floats(ld));
    block.pieces(i * u.chunk, (i + 1) * u.chunk, [&](int64_t k0, int64_t n) {
      if (u.heads * s.rows <= kDirectRows) {
        block.direct_tile(hkv, k0, n);
      } else {
        PT_PHASE(pack) f_.pack(s, hkv, k0, round_up(n, kPanel<T>), k0, ld, K, V, scales);
        block.tile(keys_of(K, V, k0, ld, scales), k0, n);
      }
    });
    if (u.splits > 1)
      block.partial(partials(u) + i * RowBlock<T>::partial_size(f_, u.heads * s.rows));
    else PT_PHASE(results) block.finish();
  }

  // Write output 0 and lse -inf to the query rows past the last valid one.
  void clear_padding(const Unit& u) const {
    const Sequence& s = *u.s;
    for (int64_t h = u.h0; h < u.h0 + u.heads; h++)
      for (int64_t i = s.q_first + s.rows; i < s.q_first + s.Lq; i++) {
        auto* out =
            static_cast<typename T::elem*>(p_.out) + s.b * p_.os.b + h * p_.os.h + i * p_.os.l;
        for (int64_t d = 0; d < p_.Dv; d += T::width) T::store(out + d, p_.Dv - d, vec{});
        if (p_.lse)
          static_cast<A*>(p_.lse)[s.b * p_.lse_s.b + h * p_.lse_s.h + i * p_.lse_s.l] =
              -kInfinity<A>;
      }
  }

  A* partials(const Unit& u) const { return reinterpret_cast<A*>(memory_ + u.memory); }

  void combine(const Unit& u) const {
    local_arena.reset(combine_bytes(u));
    RowBlock<T> block(f_, *u.s, u.h0, u.heads, 0, u.s->rows, kPanel<T>);
    block.combine(partials(u), u.splits);
    block.finish();
  }

  const AttentionProblem& p_;
  const ForwardShape<T> f_;
  Sequence* sequences_ = nullptr;
  Unit* units_ = nullptr;
  char* memory_ = nullptr;
  int64_t n_ = 0, b_ = 0, h_ = 0;  // planned units; start of the next plan
};

}  // namespace PT_ISA
}  // namespace pt
