// SPDX-License-Identifier: Apache-2.0
// Attention forward: blocks of query rows loop over KV tiles with the online softmax,
//
//   S = Q K^T      P = exp(S - m)      alpha = exp(m_before - m)
//   l = alpha l + sum P                O = alpha O + drop(P) V
//
// Forward divides a call into tasks, RowBlock is the block of query rows that a task owns.
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

#include "cpu/attention/kv.h"
#include "cpu/attention/score_mod.h"
#include "cpu/attention/softmax.h"
#include "cpu/core/phases.h"
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
class RowBlock;

template <class T>
class Forward {
 public:
  using A = typename T::acc;
  using vec = typename T::vec;
  using packed = typename T::packed;

  explicit Forward(const AttentionProblem& p) : p_(p), kv_(p) {}

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
    if (u.splits == 0) return RowBlock<T>::bytes(kv_, min(block_rows(*u.s), u.s->Lq), ld);
    return RowBlock<T>::bytes(kv_, u.heads * u.s->rows, ld) +
           Arena::bytes_for<packed>(kv_.k_units(ld)) + Arena::bytes_for<packed>(kv_.v_units(ld)) +
           Arena::bytes_for<float>(kv_.scale_floats(ld));
  }
  size_t combine_bytes(const Unit& u) const {
    return RowBlock<T>::bytes(kv_, u.heads * u.s->rows, kPanel<T>);
  }
  int64_t partial_bytes(const Unit& u) const {
    return OnlineSoftmax<T>::partial_size(u.heads * u.s->rows, kv_.dv) * int64_t(sizeof(A));
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
          clamp<int64_t>(s.rows > 0 ? kBlockRows / s.rows : kv_.group, 1, kv_.group);
      u.s = &s, u.h0 = h_;
      const bool shared = stacked < kv_.group && s.rows > kDecodeRows,
                 one_head = kv_.group == 1 && s.rows > kBlockRows;
      if (shared || one_head) {
        u.heads = kv_.group, u.splits = u.chunk = 0;
      } else {
        u.heads =
            min(ceil_div(kv_.group, ceil_div(kv_.group, stacked)), kv_.group - h_ % kv_.group);
        u.chunk = (u.heads * s.rows <= kDecodeRows ? 1 : 4) * kBlockKeys *
                  ceil_div(s.cols, 64 * kBlockKeys);
        u.splits = s.rows > 0 && s.cols > 0 ? ceil_div(s.cols, u.chunk) : 1;
      }
      units_[n_] = u;
      if (u.splits == 0) {
        const int64_t ld = padded_keys(s);
        u.memory += (kv_.k_units(ld) + kv_.v_units(ld)) * int64_t(sizeof(packed)) +
                    kv_.scale_floats(ld) * int64_t(sizeof(float));
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
  packed* packed_v(const Unit& u) const { return packed_k(u) + kv_.k_units(padded_keys(*u.s)); }
  float* scales(const Unit& u) const {
    return reinterpret_cast<float*>(packed_v(u) + kv_.v_units(padded_keys(*u.s)));
  }
  A* partials(const Unit& u) const { return reinterpret_cast<A*>(memory_ + u.memory); }

  // Pack kPackKeys keys of a shared unit.
  void pack(int64_t t) const {
    const Unit& u = find(t, &Unit::packs);
    const int64_t k0 = (t - u.packs) * kPackKeys, ld = padded_keys(*u.s);
    const Range seen = u.s->keys();
    const int64_t lo = max(k0, seen.lo / kPanel<T> * kPanel<T>),
                  hi = min(min(k0 + kPackKeys, ld), round_up(seen.hi, kPanel<T>));
    if (lo < hi) PT_PHASE(pack)
    kv_.pack(*u.s, u.h0 / kv_.group, lo, hi - lo, 0, ld, packed_k(u), packed_v(u), scales(u));
  }

  // Compute one block of a shared unit, or one split of a streamed unit.
  void attend(int64_t t) const {
    const FlushSubnormals flush;
    const Unit& u = find(t, &Unit::tasks);
    if (u.splits == 0) return attend_shared(u, t - u.tasks);
    if (t == u.tasks) clear_padding(u);
    if (u.s->rows > 0) attend_streamed(u, t - u.tasks);
  }

  void attend_shared(const Unit& u, int64_t i) const {
    const Sequence& s = *u.s;
    // longest rows of a head first
    const int64_t q0 = (blocks(s) - 1 - i % blocks(s)) * block_rows(s),
                  nq = min(block_rows(s), s.Lq - q0);
    local_arena.reset(task_bytes(u));
    RowBlock<T> block(kv_, s, u.h0 + i / blocks(s), 1, q0, nq, tile_keys(s));
    const PackedKV<T> shared = kv_.packed(packed_k(u), packed_v(u), 0, padded_keys(s), scales(u));
    block.each_tile(0, s.Lk, [&](int64_t k0, int64_t n) { block.tile(shared, k0, n); });
    PT_PHASE(results) block.finish();
  }

  void attend_streamed(const Unit& u, int64_t split) const {
    const Sequence& s = *u.s;
    const int64_t ld = tile_keys(s), hkv = u.h0 / kv_.group, start = split * u.chunk;
    local_arena.reset(task_bytes(u));
    RowBlock<T> block(kv_, s, u.h0, u.heads, 0, s.rows, ld);
    if (u.heads * s.rows <= kDirectRows) {
      DirectKV<T> direct(hkv);
      block.each_tile(start, start + u.chunk,
                      [&](int64_t k0, int64_t n) { block.tile(direct, k0, n); });
    } else {
      packed *K = local_arena.take<packed>(kv_.k_units(ld)),
             *V = local_arena.take<packed>(kv_.v_units(ld));
      float* scales = local_arena.take<float>(kv_.scale_floats(ld));
      block.each_tile(start, start + u.chunk, [&](int64_t k0, int64_t n) {
        PT_PHASE(pack) kv_.pack(s, hkv, k0, round_up(n, kPanel<T>), k0, ld, K, V, scales);
        block.tile(kv_.packed(K, V, k0, ld, scales), k0, n);
      });
    }
    if (u.splits > 1)
      block.partial(partials(u) + split * OnlineSoftmax<T>::partial_size(u.heads * s.rows, kv_.dv));
    else PT_PHASE(results) block.finish();
  }

  // Combine the splits of a unit.
  void combine(const Unit& u) const {
    local_arena.reset(combine_bytes(u));
    RowBlock<T> block(kv_, *u.s, u.h0, u.heads, 0, u.s->rows, kPanel<T>);
    block.combine(partials(u), u.splits);
    block.finish();
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

  const AttentionProblem& p_;
  const KV<T> kv_;
  Sequence* sequences_ = nullptr;
  Unit* units_ = nullptr;
  char* memory_ = nullptr;
  int64_t n_ = 0, b_ = 0, h_ = 0;  // planned units; start of the next plan
};

// Query rows of a block, with their scores, weights and outputs.
template <class T>
class RowBlock {
 public:
  using A = typename T::acc;
  using E = typename T::elem;
  using vec = typename T::vec;
  using opnd = typename T::opnd;
  using packed = typename T::packed;

  // Copy the queries [q0, q0 + nq) of heads [h0, h0 + heads), and find the keys that each sees. A
  // tile has up to `keys` keys. Memory comes from local_arena, which the caller has reset.
  RowBlock(const KV<T>& kv, const Sequence& s, int64_t h0, int64_t heads, int64_t q0, int64_t nq,
           int64_t keys)
      : kv_(kv), p_(kv.p), s_(s), scores_(kv.p, s), at_{h0, q0, nq, heads * nq}, rows_(heads * nq),
        keys_(keys), ld_(row_of_keys<T>(keys)), raw_(scores_.plain()),
        softmax_(rows_, raw_, p_.scale) {
    const int64_t padded = round_up(rows_, T::width), valid = clamp<int64_t>(s.rows - q0, 0, nq);
    Q_ = local_arena.take<packed>(rows_ * kv_.du), S_ = local_arena.take<A>(rows_ * ld_);
    P_ = T::pack == 1 ? reinterpret_cast<opnd*>(S_) : local_arena.take<opnd>(rows_ * ld_);
    O_ = local_arena.take<A>(rows_ * kv_.dv);
    visible_ = local_arena.take<Range>(padded), reach_ = local_arena.take<Range>(padded);
    started_ = local_arena.take<uint8_t>(padded);
    if (p_.table) diagonals_ = local_arena.take<A>(Scores<T>::diagonal_size(nq, keys));
    if (dropping())
      keep_ = local_arena.take<uint32_t>(KeepBits::words(keys)),
      table_ = local_arena.take<char>(KeepBits::table_bytes(keys));
    if (LiveTiles::needed(p_)) tiles_.live = local_arena.take<uint8_t>(LiveTiles::bytes(s.Lk));
    for (int64_t g = 0; g < heads; g++)
      copy_rows<T>(kv_.at(p_.q, p_.qs, s.b, h0 + g, s.q_first + q0), p_.qs.l, valid, nq, p_.D,
                   Q_ + g * nq * kv_.du, nullptr, kv_.du);
    span_ = {s.Lk, 0};
    TileTrim trim(p_, s.b);
    for (int64_t r = 0; r < padded; r++) {
      const int64_t i = at_.query(r);
      started_[r] = 0;
      visible_[r] = r < rows_ && r % nq < valid ? trim(at_.head(r), i, s.visible(i)) : Range{0, 0};
      if (visible_[r].size() > 0)
        span_ = {min(span_.lo, visible_[r].lo), max(span_.hi, visible_[r].hi)};
    }
    if (tiles_.live) tiles_.mark(p_, s, at_, visible_);
  }
  static size_t bytes(const KV<T>& kv, int64_t rows, int64_t keys) {
    const int64_t padded = round_up(rows, T::width);
    const int64_t scores = rows * row_of_keys<T>(keys);
    return OnlineSoftmax<T>::bytes(rows) + Arena::bytes_for<packed>(rows * kv.du) +
           Arena::bytes_for<A>(scores) + (T::pack == 1 ? 0 : Arena::bytes_for<opnd>(scores)) +
           Arena::bytes_for<A>(rows * kv.dv) + 2 * Arena::bytes_for<Range>(padded) +
           Arena::bytes_for<uint8_t>(padded) +
           Arena::bytes_for<A>(Scores<T>::diagonal_size(rows, keys)) +
           Arena::bytes_for<uint32_t>(KeepBits::words(keys)) +
           Arena::bytes_for<char>(KeepBits::table_bytes(keys)) +
           (LiveTiles::needed(kv.p) ? Arena::bytes_for<uint8_t>(LiveTiles::bytes(kv.p.Lk)) : 0);
  }

  // Call f(k0, n) for the keys of [from, end) that any row sees, in tiles of up to `keys` keys that
  // start on a panel. Tiles that the mask hides from every row are skipped.
  template <class F>
  INLINE void each_tile(int64_t from, int64_t end, const F& f) const {
    static_assert(LiveTiles::kKeys % kPanel<T> == 0 && kBlockKeys % LiveTiles::kKeys == 0);
    from = max(from, span_.lo / kPanel<T> * kPanel<T>), end = min(end, span_.hi);
    while (from < end) {
      const Range tile = tiles_.next(from, end, keys_);
      if (tile.size() > 0) f(tile.lo, tile.size());
      from = tile.hi;
    }
  }

  // Attend to keys [k0, k0 + n), n <= keys, k0 on a panel: a PackedKV or a DirectKV.
  template <class Keys>
  INLINE void tile(Keys&& kv, int64_t k0, int64_t n) {
    if (!find_reach(&k0, &n)) return;
    PT_PHASE(scores) qk_gemm(kv, k0, n);  // S = Q K^T
    PT_PHASE(softmax) softmax(k0, n);     // P = exp(S - m), alpha, l = alpha l + sum P
    if (p_.drop_threshold == 65536) return;
    PT_PHASE(output) pv_gemm(kv, k0, n);  // O = alpha O + drop(P) V
    for (int64_t r = 0; r < rows_; r += kRows<T>) started_[r] |= reach_[r].size() > 0;
  }

  // Write unnormalized results for combine().
  void partial(A* to) {
    clear_untouched();
    softmax_.save(rows_, kv_.dv, O_, to);
  }
  // Reduce n partial results, instead of tile() calls.
  void combine(const A* partials, int64_t n) {
    softmax_.merge(partials, n, rows_, kv_.dv, O_);
    for (int64_t r = 0; r < rows_; r += kRows<T>) started_[r] = 1;
  }

  // Write O / l and lse.
  void finish() {
    clear_untouched();
    const double rescale = p_.drop_threshold < 65536 ? 65536. / (65536 - p_.drop_threshold) : 0;
    for (int64_t r = 0; r < rows_; r++) {
      const int64_t h = at_.head(r), i = s_.q_first + at_.query(r);
      // l = 0 with a non-empty interval: every score of a raw row is -inf, which softmax turns
      // into NaN.
      const A dead = raw_ && visible_[r].size() > 0 ? A(__builtin_nan("")) : A(0);
      const auto [inv, lse] =
          softmax_.result(r, sink_of<A>(p_, h), at_.query(r) >= s_.rows, rescale, dead);
      auto* out = static_cast<E*>(p_.out) + s_.b * p_.os.b + h * p_.os.h + i * p_.os.l;
      for (int64_t d = 0; d < p_.Dv; d += T::width)
        T::store(out + d, p_.Dv - d, load(O_ + r * kv_.dv + d) * inv);
      if (p_.lse)
        static_cast<A*>(p_.lse)[s_.b * p_.lse_s.b + h * p_.lse_s.h + i * p_.lse_s.l] = lse;
    }
  }

 private:
  bool dropping() const { return p_.drop_threshold > 0 && p_.drop_threshold < 65536; }

  // Trim the tile by segments, and find the keys of each group of kRows rows: from the first to the
  // last visible to one of them, with the start rounded down to vectors. Return false if all are
  // empty.
  bool find_reach(int64_t* first, int64_t* count) {
    if (s_.unsorted_segments()) {
      const Range met = s_.meeting({at_.q0, min(at_.q0 + at_.nq, s_.rows)},
                                   {*first, min(*first + *count, s_.Lk)}, kPanel<T>);
      *first = met.lo, *count = met.size();
    }
    const int64_t k0 = *first, n = *count;
    if (n <= 0) return false;
    bool any = false;
    const bool trims = scores_.visibility.trims();
    for (int64_t r = 0; r < rows_; r += kRows<T>) {
      Range g{n, 0};
      for (int64_t i = r; i < min<int64_t>(r + kRows<T>, rows_); i++) {
        Range s{max(visible_[i].lo, k0), min(visible_[i].hi, k0 + n)};
        if (trims && s.size() > 0) s = scores_.visibility.trim(at_.head(i), at_.query(i), s);
        s = {s.lo - k0, s.hi - k0};
        if (s.size() > 0) g = {min(g.lo, s.lo), max(g.hi, s.hi)};
      }
      g = g.size() > 0 ? Range{g.lo / (2 * T::width) * (2 * T::width), g.hi} : Range{0, 0};
      any |= g.size() > 0;
      for (int64_t i = r; i < min<int64_t>(r + kRows<T>, rows_); i++) reach_[i] = g;
    }
    return any;
  }

  void qk_gemm(const PackedKV<T>& kv, int64_t k0, int64_t n) {
    for (int64_t j = 0; j < n; j += kPanel<T>)  // a panel of K remains in L1 for all rows
      for (int64_t r = 0; r < rows_; r += kRows<T>) {
        if (reach_[r].lo >= j + kPanel<T> || reach_[r].hi <= j) continue;
        const int64_t rows = min<int64_t>(kRows<T>, rows_ - r);
        for (int64_t i = r; i < r + rows && !raw_; i++)
          scores_.fetch(at_.head(i), at_.query(i), k0 + j, min<int64_t>(kPanel<T>, n - j));
        score_products<T>(rows, kv_.du, Q_ + r * kv_.du, kv.k + (k0 - kv.first + j) * kv_.du,
                          S_ + r * ld_ + j, ld_);
      }
    v_scale_ = scale_rows<T>(S_, ld_, rows_, reach_, kv.k_scale, kv.v_scale, k0 - kv.first);
  }

  void pv_gemm(const PackedKV<T>& kv, int64_t k0, int64_t) {
    for (int64_t col = 0; col < kv_.dv; col += kPanel<T>) {
      const int64_t w = min<int64_t>(kPanel<T>, kv_.dv - col);
      const packed* V = kv.v + (col * kv.ld + (k0 - kv.first) * w) / T::pack;
      for (int64_t r = 0; r < rows_; r += kRows<T>) {
        const Range k = reach_[r];
        if (k.size() > 0)
          pick<T>(min<int64_t>(kRows<T>, rows_ - r), w, started_[r] ? kScaleAdd : kStore)(
              round_units<T>(k.size()), reinterpret_cast<const packed*>(P_ + r * ld_ + k.lo),
              ld_ / T::pack, 1, V + k.lo / T::pack * w, O_ + r * kv_.dv + col, kv_.dv,
              softmax_.alpha() + r);
      }
    }
  }

  // Call f(j, count, rows of K or of V) for the tile's keys [j, j + count): all of them, or as many
  // as are widened at once.
  template <class F>
  INLINE void each_stage(bool values, DirectKV<T>& kv, int64_t k0, int64_t n, const F& f) const {
    const bool eight = p_.eight != EightBits::none;
    const int64_t step = eight ? kStageKeys : n, ahead = eight ? 0 : kAheadRows;
    for (int64_t j = 0; j < n; j += step) {
      const int64_t some = min(step, n - j);
      kv_.with_rows(values, s_, kv.hkv, k0 + j, some + ahead, kv.list, kv.stage,
                    [&](const auto& rows) { f(j, some, rows); });
    }
  }

  void qk_gemm(DirectKV<T>& kv, int64_t k0, int64_t n) {
    const int64_t units = direct_queries<T>(Q_, kv_.du, rows_, p_.D, kv.queries);
    kv.live = mark_live_keys<T>(p_, s_, kv.hkv, k0, n, kv.marks) ? kv.marks : nullptr;
    each_stage(false, kv, k0, n, [&](int64_t j, int64_t some, const auto& K) {
      const Ahead ahead(K, p_.D * int64_t(sizeof(E)));
      const uint8_t* live = kv.live ? kv.live + j : nullptr;
      direct_scores<T>(DirectRows<T, std::decay_t<decltype(K)>>{ahead, some, p_.D, live, kv.queries,
                                                                units, rows_},
                       S_ + j, ld_);
    });
    if (p_.eight == EightBits::none) return;
    const int64_t padded = round_up(n, int64_t(2 * T::width));
    kv_.scales(p_.key_scale, s_, kv.hkv, k0, n, padded, kv.live, kv.k_scale),
        kv_.scales(p_.value_scale, s_, kv.hkv, k0, n, padded, kv.live, kv.v_scale);
    v_scale_ = scale_rows<T>(S_, ld_, rows_, reach_, kv.k_scale, kv.v_scale, 0);
  }

  void pv_gemm(DirectKV<T>& kv, int64_t k0, int64_t n) {
    each_stage(true, kv, k0, n, [&](int64_t j, int64_t some, const auto& V) {
      const Ahead ahead(V, p_.Dv * int64_t(sizeof(E)));
      const uint8_t* live = kv.live ? kv.live + j : nullptr;
      add_values(DirectValues<T, std::decay_t<decltype(V)>>{ahead, P_ + j, ld_, live, p_.Dv},
                 {j, j + some});
    });
  }

  // Add the values of the tile's keys `here`. x starts at the first of them.
  template <class Values>
  void add_values(const Values& x, Range here) {
    // Values read more than once remain in L1.
    const int64_t piece = rows_ > 1 ? 32 : here.size();
    for (int64_t j = here.lo; j < here.hi; j += piece)
      for (int64_t g = 0; g < rows_; g += kRows<T>) {  // rows of one reach
        const Range all = reach_[g], keys{max(all.lo, j), min(all.hi, min(j + piece, here.hi))};
        if (keys.size() <= 0) continue;
        A alpha[kRows<T>];
        const int64_t rows = min<int64_t>(kRows<T>, rows_ - g);
        for (int64_t r = 0; r < rows; r++)
          alpha[r] = keys.lo > all.lo ? A(1) : started_[g] ? softmax_.alpha()[g + r] : A(0);
        const Values group{x.V, x.p + g * x.ld, x.ld, x.live, x.d, g == 0};
        together(rows, [&](int64_t r, auto count) {
          direct_output<T, decltype(count)::value>(group, {keys.lo - here.lo, keys.hi - here.lo}, r,
                                                   alpha, O_ + g * kv_.dv, kv_.dv);
        });
      }
  }

  // Modify the scores, and convert them to weights.
  void softmax(int64_t k0, int64_t n) {
    for (int64_t r0 = 0; r0 < rows_; r0 += T::width) {
      Range valid[T::width];  // visible lanes; the rest of reach_ becomes 0 in P
      const auto maximum = [&](int64_t i) {
        const int64_t r = r0 + i;
        const Range g = reach_[r], seen = visible_[r];
        valid[i] = raw_ ? Range{max(seen.lo - k0, g.lo), min(seen.hi - k0, g.hi)} : g;
        if (g.size() == 0) return set1<vec>(-kInfinity<A>);
        return raw_ ? softmax_.first_maximum(r, S_ + r * ld_, valid[i]) : modify(r, k0, n, g);
      };
      const auto weights = [&](int64_t i, A m, vec* top) {
        const int64_t r = r0 + i;
        if (reach_[r].size() == 0) return vec{};
        WeightRow<T> row{S_ + r * ld_, P_ + r * ld_, reach_[r], valid[i],
                         softmax_.c(), nullptr,      0,         v_scale_};
        if (dropping()) {
          prepare_bits(r, k0, n);
          bits_.row(uint32_t(uint64_t(at_.query(r) + p_.query_start)), keep_);
          row.keep = keep_, row.first_bit = bits_.offset();
        }
        return row.weights(m, top);
      };
      softmax_.step(r0, min<int64_t>(T::width, rows_ - r0), maximum, weights);
    }
  }

  // Apply the score modification to the keys g of the tile. Return the maxima by lane.
  vec modify(int64_t r, int64_t k0, int64_t n, Range g) {
    const int64_t h = at_.head(r), i = at_.query(r);
    if (p_.table && (diagonals_head_ != h || diagonals_key_ != k0)) {
      scores_.diagonals(h, at_.q0, at_.nq, k0, n, diagonals_);
      diagonals_head_ = h, diagonals_key_ = k0;
    }
    const A* diagonal =
        p_.table ? Scores<T>::diagonal_of(diagonals_, i, at_.q0, at_.nq) + g.lo : nullptr;
    return scores_.row(h, i, k0 + g.lo, g.size(), visible_[r], diagonal, S_ + r * ld_ + g.lo);
  }

  void prepare_bits(int64_t r, int64_t k0, int64_t n) {
    const int64_t h = at_.head(r);
    if (bits_head_ == h && bits_key_ == k0) return;
    bits_.prepare(p_.seed, p_.drop_threshold, uint32_t(h + p_.head_start),
                  uint32_t(s_.b + p_.batch_start), k0 + p_.key_start, n, table_);
    bits_head_ = h, bits_key_ = k0;
  }

  void clear_untouched() {
    for (int64_t r = 0; r < rows_; r++)
      if (!started_[r / kRows<T> * kRows<T>])
        for (int64_t d = 0; d < kv_.dv; d += T::width) store(O_ + r * kv_.dv + d, vec{});
  }

  const KV<T>& kv_;
  const AttentionProblem& p_;
  const Sequence& s_;
  const Scores<T> scores_;
  const BlockRows at_;
  const int64_t rows_, keys_, ld_;
  const bool raw_;  // scores are raw products
  OnlineSoftmax<T> softmax_;
  packed* Q_;  // [rows][du]
  A *S_, *O_;  // [rows][ld], [rows][dv]
  A* diagonals_ = nullptr;
  opnd* P_;                         // [rows][ld], over S_ unless pairs
  Range *visible_, *reach_, span_;  // span_: keys that any row sees
  uint8_t* started_;                // per first row of a group: O is initialized
  LiveTiles tiles_;
  const float* v_scale_ = nullptr;  // for 8-bit keys of the tile
  KeepBits bits_;
  uint32_t* keep_ = nullptr;
  char* table_ = nullptr;
  int64_t bits_head_ = -1, bits_key_ = -1, diagonals_head_ = -1, diagonals_key_ = -1;
};

}  // namespace PT_ISA
}  // namespace pt
