// SPDX-License-Identifier: Apache-2.0
// A block of query rows that loops over KV tiles with the online softmax:
//
//   S = Q K^T      P = exp(S - m)      alpha = exp(m_before - m)
//   l = alpha l + sum P                O = alpha O + drop(P) V
//
// A sink is one more term of l, added once at the end for any number of splits, so that l = 0 still
// marks a row without visible keys. m is the maximum of S, or near it: see first_maximum().
#pragma once

#include "cpu/attention/direct.h"
#include "cpu/attention/forward_shape.h"
#include "cpu/attention/softmax_row.h"
#include "cpu/core/arena.h"
#include "cpu/core/phases.h"
#include "cpu/core/philox.h"

namespace pt {
namespace PT_ISA {

template <class T>
class RowBlock {
 public:
  using A = typename T::acc;
  using vec = typename T::vec;
  using opnd = typename T::opnd;
  using packed = typename T::packed;

  // Queries [q0, q0 + nq) of heads [h0, h0 + heads), head by head. Memory comes from local_arena,
  // which the caller has reset.
  RowBlock(const ForwardShape<T>& shape, const Sequence& s, int64_t h0, int64_t heads, int64_t q0,
           int64_t nq, int64_t keys)
      : f_(shape), p_(shape.p), s_(s), scores_(shape.p, s), h0_(h0), q0_(q0), nq_(nq),
        rows_(heads * nq), keys_(keys), ld_(row_of_keys<T>(keys)), plain_(scores_.plain()) {
    c_ = A(plain_ ? p_.scale * kLog2e : kLog2e);
    const int64_t padded = round_up(rows_, T::width);
    Q_ = local_arena.take<packed>(rows_ * f_.du), S_ = local_arena.take<A>(rows_ * ld_);
    P_ = T::pack == 1 ? reinterpret_cast<opnd*>(S_) : local_arena.take<opnd>(rows_ * ld_);
    O_ = local_arena.take<A>(rows_ * f_.dv);
    m_ = local_arena.take<A>(padded), l_ = local_arena.take<A>(padded),
    alpha_ = local_arena.take<A>(padded);
    seen_ = local_arena.take<Range>(padded), reach_ = local_arena.take<Range>(padded);
    started_ = local_arena.take<uint8_t>(padded);
    if (p_.table) diagonals_ = local_arena.take<A>(Scores<T>::diagonal_size(nq, keys));
    if (dropping())
      keep_ = local_arena.take<uint32_t>(KeepBits::words(keys)),
      table_ = local_arena.take<char>(KeepBits::table_bytes(keys));
    if (skips(p_)) live_ = local_arena.take<uint8_t>(live_bytes(s.Lk));
    const int64_t valid = clamp<int64_t>(s.rows - q0, 0, nq);
    for (int64_t g = 0; g < heads; g++)
      copy_rows<T>(f_.at(p_.q, p_.qs, s.b, h0 + g, s.q_first + q0), p_.qs.l, valid, nq, p_.D,
                   Q_ + g * nq * f_.du, nullptr, f_.du);
    span_ = {s.Lk, 0};
    TileTrim trim(p_, s.b);
    for (int64_t r = 0; r < padded; r++) {
      m_[r] = -kInfinity<A>, l_[r] = 0, started_[r] = 0;
      seen_[r] = r < rows_ && r % nq < valid ? trim(h0 + r / nq, query(r), s.visible(query(r)))
                                             : Range{0, 0};
      if (seen_[r].size() > 0) span_ = {min(span_.lo, seen_[r].lo), max(span_.hi, seen_[r].hi)};
    }
    if (live_) mark_live_tiles();
  }
  static size_t bytes(const ForwardShape<T>& f, int64_t rows, int64_t keys) {
    const int64_t padded = round_up(rows, T::width);
    const int64_t scores = rows * row_of_keys<T>(keys);
    return Arena::bytes_for<packed>(rows * f.du) + Arena::bytes_for<A>(scores) +
           (T::pack == 1 ? 0 : Arena::bytes_for<opnd>(scores)) + Arena::bytes_for<A>(rows * f.dv) +
           3 * Arena::bytes_for<A>(padded) + 2 * Arena::bytes_for<Range>(padded) +
           Arena::bytes_for<uint8_t>(padded) +
           Arena::bytes_for<A>(Scores<T>::diagonal_size(rows, keys)) +
           Arena::bytes_for<uint32_t>(KeepBits::words(keys)) +
           Arena::bytes_for<char>(KeepBits::table_bytes(keys)) +
           (skips(f.p) ? Arena::bytes_for<uint8_t>(live_bytes(f.p.Lk)) : 0);
  }

  // Call f(k0, n) for the keys of [from, end) that any row sees, in pieces of up to `keys` that
  // start on a panel. Tiles that the mask hides from every row are skipped.
  template <class F>
  INLINE void pieces(int64_t from, int64_t end, const F& f) const {
    from = max(from, span_.lo / kPanel<T> * kPanel<T>), end = min(end, span_.hi);
    while (from < end) {
      int64_t stop = min(end, from + keys_);
      if (live_) {
        if (!live_[from / kLiveKeys]) {
          from = (from / kLiveKeys + 1) * kLiveKeys;
          continue;
        }
        int64_t tile = from / kLiveKeys + 1;
        while (tile * kLiveKeys < stop && live_[tile]) tile++;
        stop = min(stop, tile * kLiveKeys);
      }
      f(from, stop - from);
      from = stop;
    }
  }

  // Process keys [k0, k0 + n), n <= keys, k0 on a panel.
  void tile(const PackedKeys<T>& kv, int64_t k0, int64_t n) {
    const auto scores = [&] {  // a panel of K remains in L1 for all rows
      for (int64_t j = 0; j < n; j += kPanel<T>)
        for (int64_t r = 0; r < rows_; r += kRows<T>) {
          if (reach_[r].lo >= j + kPanel<T> || reach_[r].hi <= j) continue;
          const int64_t rows = min<int64_t>(kRows<T>, rows_ - r);
          for (int64_t i = r; i < r + rows && !plain_; i++)
            scores_.fetch(h0_ + i / nq_, query(i), k0 + j, min<int64_t>(kPanel<T>, n - j));
          score_products<T>(rows, f_.du, Q_ + r * f_.du, kv.k + (k0 - kv.first + j) * f_.du,
                            S_ + r * ld_ + j, ld_);
        }
      v_scale_ = scale_rows<T>(S_, ld_, rows_, reach_, kv.k_scale, kv.v_scale, k0 - kv.first);
    };
    const auto output = [&] {
      for (int64_t col = 0; col < f_.dv; col += kPanel<T>) {
        const int64_t w = min<int64_t>(kPanel<T>, f_.dv - col);
        const packed* V = kv.v + (col * kv.ld + (k0 - kv.first) * w) / T::pack;
        for (int64_t r = 0; r < rows_; r += kRows<T>) {
          const Range k = reach_[r];
          if (k.size() > 0)
            pick<T>(min<int64_t>(kRows<T>, rows_ - r), w, started_[r] ? kScaleAdd : kStore)(
                round_units<T>(k.size()), reinterpret_cast<const packed*>(P_ + r * ld_ + k.lo),
                ld_ / T::pack, 1, V + k.lo / T::pack * w, O_ + r * f_.dv + col, f_.dv, alpha_ + r);
        }
      }
    };
    step(k0, n, scores, output);
  }

  // Process few rows with the unpacked keys of head hkv.
  void direct_tile(int64_t hkv, int64_t k0, int64_t n) {
    using E = typename T::elem;
    uint8_t marks[kBlockKeys];
    const uint8_t* live = nullptr;
    alignas(64) packed queries[kDirectRows * kMaxHead];
    const int64_t units = direct_queries<T>(Q_, f_.du, rows_, p_.D, queries);
    const bool eight = p_.eight != EightBits::none;
    const int64_t step_keys = eight ? kStageKeys : n, ahead_keys = eight ? 0 : kAheadRows;
    const E* list[kBlockKeys + kAheadRows];
    alignas(64) E stage[kStageKeys * kMaxHead];
    alignas(64) float k_scale[kBlockKeys + 2 * T::width], v_scale[kBlockKeys + 2 * T::width];
    const auto scores = [&] {
      live = mark_live_keys<T>(p_, s_, hkv, k0, n, marks) ? marks : nullptr;
      for (int64_t j = 0; j < n; j += step_keys) {
        const int64_t some = min(step_keys, n - j);
        f_.with_rows(false, s_, hkv, k0 + j, some + ahead_keys, list, stage, [&](const auto& K) {
          const Ahead ahead(K, p_.D * int64_t(sizeof(E)));
          const uint8_t* marked = live ? live + j : nullptr;
          direct_scores<T>(DirectRows<T, std::decay_t<decltype(K)>>{ahead, some, p_.D, marked,
                                                                    queries, units, rows_},
                           S_ + j, ld_);
        });
      }
      if (!eight) return;
      const int64_t whole = round_up(n, int64_t(2 * T::width));
      f_.scales(p_.key_scale, s_, hkv, k0, n, whole, live, k_scale),
          f_.scales(p_.value_scale, s_, hkv, k0, n, whole, live, v_scale);
      v_scale_ = scale_rows<T>(S_, ld_, rows_, reach_, k_scale, v_scale, 0);
    };
    const auto output = [&] {
      for (int64_t j = 0; j < n; j += step_keys) {
        const int64_t some = min(step_keys, n - j);
        f_.with_rows(true, s_, hkv, k0 + j, some + ahead_keys, list, stage, [&](const auto& V) {
          const Ahead ahead(V, p_.Dv * int64_t(sizeof(E)));
          const uint8_t* marked = live ? live + j : nullptr;
          add_values(DirectValues<T, std::decay_t<decltype(V)>>{ahead, P_ + j, ld_, marked, p_.Dv},
                     {j, j + some});
        });
      }
    };
    step(k0, n, scores, output);
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
          alpha[r] = keys.lo > all.lo ? A(1) : started_[g] ? alpha_[g + r] : A(0);
        const Values group{x.V, x.p + g * x.ld, x.ld, x.live, x.d, g == 0};
        together(rows, [&](int64_t r, auto count) {
          direct_output<T, decltype(count)::value>(group, {keys.lo - here.lo, keys.hi - here.lo}, r,
                                                   alpha, O_ + g * f_.dv, f_.dv);
        });
      }
  }

  // Write unnormalized results for combine(): m and l of each row, then O.
  void partial(A* to) {
    clear_untouched();
    for (int64_t r = 0; r < rows_; r++) to[r] = m_[r], to[rows_ + r] = l_[r];
    A* o = to + partial_head(rows_);
    for (int64_t i = 0; i < rows_ * f_.dv; i += T::width) store(o + i, load(O_ + i));
  }
  static int64_t partial_head(int64_t rows) { return round_up(2 * rows, 64); }
  static int64_t partial_size(const ForwardShape<T>& f, int64_t rows) {
    return partial_head(rows) + rows * f.dv;
  }

  // Reduce n partial results in order, instead of tile() calls.
  void combine(const A* partials, int64_t n) {
    const int64_t size = partial_size(f_, rows_);
    for (int64_t r = 0; r < rows_; r++) {
      for (int64_t i = 0; i < n; i++) m_[r] = max(m_[r], partials[i * size + r]);
      A* o = O_ + r * f_.dv;
      for (int64_t d = 0; d < f_.dv; d += T::width) store(o + d, vec{});
      for (int64_t i = 0; i < n; i++) {
        const A *part = partials + i * size, m = part[r];
        if (m == -kInfinity<A> && part[rows_ + r] == 0) continue;  // no visible key
        const vec w = exp2v<5>(set1<vec>((m - m_[r]) * c_));
        l_[r] += part[rows_ + r] * w[0];
        for (int64_t d = 0; d < f_.dv; d += T::width)
          store(o + d, fma(w, load(part + partial_head(rows_) + r * f_.dv + d), load(o + d)));
      }
    }
    for (int64_t r = 0; r < rows_; r += kRows<T>) started_[r] = 1;
  }

  void finish() {
    clear_untouched();
    const double rescale = p_.drop_threshold < 65536 ? 65536. / (65536 - p_.drop_threshold) : 0;
    for (int64_t r = 0; r < rows_; r++) {
      const int64_t h = h0_ + r / nq_, i = s_.q_first + query(r);
      // l = 0 with a non-empty interval: every score of a plain row is -inf, which softmax turns
      // into NaN.
      const A dead = plain_ && seen_[r].size() > 0 ? A(__builtin_nan("")) : A(0);
      const auto [inv, lse] = result(r, h, rescale, dead);
      auto* out =
          static_cast<typename T::elem*>(p_.out) + s_.b * p_.os.b + h * p_.os.h + i * p_.os.l;
      for (int64_t d = 0; d < p_.Dv; d += T::width)
        T::store(out + d, p_.Dv - d, load(O_ + r * f_.dv + d) * inv);
      if (p_.lse)
        static_cast<A*>(p_.lse)[s_.b * p_.lse_s.b + h * p_.lse_s.h + i * p_.lse_s.l] = lse;
    }
  }

 private:
  struct Result {
    A inv, lse;  // inv: factor of O
  };
  // Return the result of a row of head h. `dead`: inv of a row without visible keys.
  Result result(int64_t r, int64_t h, double rescale, A dead) const {
    const A sink = sink_of<A>(p_, h);
    const bool has_sink = sink != -kInfinity<A>;
    if (l_[r] == 0)
      return has_sink ? Result{A(0), query(r) < s_.rows ? sink : -kInfinity<A>}
                      : Result{dead, -kInfinity<A>};
    const double m = plain_ ? m_[r] * p_.scale : double(m_[r]), l = l_[r];
    if (!has_sink) return {A(rescale / l_[r]), A(m + __builtin_log(l))};
    const double top = max(m, double(sink)), alpha = __builtin_exp(m - top),
                 sum = l * alpha + __builtin_exp(sink - top);
    const A lse = A(top + __builtin_log(sum)), least = above_sink(sink);
    return {A(rescale * alpha / sum), lse < least ? least : lse};  // preserves NaN
  }

  bool dropping() const { return p_.drop_threshold > 0 && p_.drop_threshold < 65536; }
  int64_t query(int64_t r) const { return q0_ + r % nq_; }

  // Run one step of the online softmax. scores() writes S, output() adds P V to O; both read k0 and
  // n after trimming.
  template <class S, class O>
  INLINE void step(int64_t& k0, int64_t& n, const S& scores, const O& output) {
    if (s_.unsorted_segments()) {
      const Range met =
          s_.meeting({q0_, min(q0_ + nq_, s_.rows)}, {k0, min(k0 + n, s_.Lk)}, kPanel<T>);
      k0 = met.lo, n = met.size();
    }
    if (n <= 0 || !reach(k0, n)) return;
    PT_PHASE(scores) scores();
    PT_PHASE(softmax) for (int64_t r = 0; r < rows_; r += T::width) softmax(r, k0, n);
    if (p_.drop_threshold == 65536) return;
    PT_PHASE(output) output();
    for (int64_t r = 0; r < rows_; r += kRows<T>) started_[r] |= reach_[r].size() > 0;
  }

  // live_ has one mark per kLiveKeys keys, set if a row may see one of them.
  static constexpr int64_t kLiveKeys = 64;
  static_assert(kLiveKeys % kPanel<T> == 0 && kBlockKeys % kLiveKeys == 0);
  static int64_t live_bytes(int64_t keys) { return ceil_div(keys, kLiveKeys) + 1; }
  static bool skips(const AttentionProblem& p) { return p.tiles.data || p.global_keys; }
  void mark_live_tiles() {
    for (int64_t c = 0; c < live_bytes(s_.Lk); c++) live_[c] = !p_.tiles.data;
    if (p_.tiles.data) mark_tiles_of_mask();
    Range gap{0, s_.Lk};  // common to all rows
    for (int64_t r = 0; r < rows_; r++)
      if (seen_[r].size() > 0)
        gap = {max(gap.lo, s_.gap(query(r)).lo), min(gap.hi, s_.gap(query(r)).hi)};
    for (int64_t c = ceil_div(gap.lo, kLiveKeys); (c + 1) * kLiveKeys <= gap.hi; c++) live_[c] = 0;
  }
  void mark_tiles_of_mask() {
    for (int64_t r = 0; r < rows_;) {  // rows with the same tiles at once
      const TileRow row(p_.tiles, s_.b, h0_ + r / nq_, query(r));
      Range seen{s_.Lk, 0};
      for (const int32_t* tiles = row.tiles();
           r < rows_ && p_.tiles.at(s_.b, h0_ + r / nq_, query(r)) == tiles; r++)
        if (seen_[r].size() > 0) seen = {min(seen.lo, seen_[r].lo), max(seen.hi, seen_[r].hi)};
      for (int64_t j = seen.lo; j < seen.hi; j = row.tile_end(j)) {
        if (row.tile(j) == TileMap::kNone) continue;
        for (int64_t c = j / kLiveKeys; c * kLiveKeys < min(seen.hi, row.tile_end(j)); c++)
          live_[c] = 1;
      }
    }
  }

  // Compute the key range of each group of kRows rows: from the first to the last visible to one of
  // them, with the start rounded down to vectors. Return false if all are empty.
  bool reach(int64_t k0, int64_t n) {
    bool any = false;
    const bool trims = scores_.trims();
    for (int64_t r = 0; r < rows_; r += kRows<T>) {
      Range g{n, 0};
      for (int64_t i = r; i < min<int64_t>(r + kRows<T>, rows_); i++) {
        Range s{max(seen_[i].lo, k0), min(seen_[i].hi, k0 + n)};
        if (trims && s.size() > 0) s = scores_.trim(h0_ + i / nq_, query(i), s);
        s = {s.lo - k0, s.hi - k0};
        if (s.size() > 0) g = {min(g.lo, s.lo), max(g.hi, s.hi)};
      }
      g = g.size() > 0 ? Range{g.lo / (2 * T::width) * (2 * T::width), g.hi} : Range{0, 0};
      any |= g.size() > 0;
      for (int64_t i = r; i < min<int64_t>(r + kRows<T>, rows_); i++) reach_[i] = g;
    }
    return any;
  }

  // Convert S to P in T::width rows, and update m, l, alpha.
  void softmax(int64_t r0, int64_t k0, int64_t n) {
    const int64_t nr = min<int64_t>(T::width, rows_ - r0);
    Range valid[T::width];  // visible lanes; the rest of reach_ becomes 0 in P
    vec row_max[T::width];
    for (int64_t i = 0; i < T::width; i++) {
      row_max[i] = set1<vec>(-kInfinity<A>);
      if (i >= nr) continue;
      const int64_t r = r0 + i;
      const Range g = reach_[r];
      valid[i] = plain_ ? Range{max(seen_[r].lo - k0, g.lo), min(seen_[r].hi - k0, g.hi)} : g;
      if (g.size() == 0) continue;
      row_max[i] = plain_ ? first_maximum(r, valid[i]) : modify(r, k0, n, g);
    }
    const vec m_old = load(m_ + r0);
    vec m_new = vmax(m_old, reduce_rows(row_max, op_max));
    vec m = m_new == -kInfinity<A> ? vec{} : m_new;  // no visible key yet: any number works
    vec sums[T::width], tops[T::width];
    const auto weigh = [&](int64_t i) {
      WeightRow<T> row{S_ + (r0 + i) * ld_,
                       P_ + (r0 + i) * ld_,
                       reach_[r0 + i],
                       valid[i],
                       c_,
                       nullptr,
                       0,
                       v_scale_};
      if (dropping()) {
        prepare_bits(r0 + i, k0, n);
        bits_.row(uint32_t(uint64_t(query(r0 + i) + p_.query_start)), keep_);
        row.keep = keep_, row.first_bit = bits_.offset();
      }
      sums[i] = row.weights(m[i], &tops[i]);
    };
    for (int64_t i = 0; i < T::width; i++) {
      sums[i] = vec{}, tops[i] = set1<vec>(-kInfinity<A>);
      if (i < nr && reach_[r0 + i].size() > 0) weigh(i);
    }
    if constexpr (kLags) {
      const vec top = reduce_rows(tops, op_max);
      for (mask grown = plain_ ? to_mask((top - m) * c_ > A(kMostAbove)) : mask(0); grown;
           grown &= grown - 1) {
        const int i = __builtin_ctz(grown);
        m[i] = m_new[i] = top[i];
        weigh(i);
      }
    }
    store(m_ + r0, m_new);
    const vec alpha = exp2v<5>(vec((m_old - m) * c_));
    store(alpha_ + r0, alpha);
    store(l_ + r0, fma(load(l_ + r0), alpha, reduce_rows(sums, op_add)));
  }

  // Use an approximate maximum if P does not overwrite S: any number near the row maximum works. m
  // is the maximum of the first keys until a score exceeds it by 8 powers of two. A separate pass
  // of maxima took a tenth of a softmax on AMX, and O then needs no multiplication by alpha = 1.
  static constexpr bool kLags = T::pack > 1;
  static constexpr int64_t kFirstKeys = 64, kMostAbove = 8;
  vec first_maximum(int64_t r, Range valid) const {
    const A* s = S_ + r * ld_;
    if constexpr (kLags) {
      if (m_[r] > -kInfinity<A>) return set1<vec>(-kInfinity<A>);
      const vec some = row_maximum<T>(s, {valid.lo, min(valid.hi, valid.lo + kFirstKeys)});
      if (to_mask(some != -kInfinity<A>)) return some;
    }
    return row_maximum<T>(s, valid);
  }

  vec modify(int64_t r, int64_t k0, int64_t n, Range g) {
    const int64_t h = h0_ + r / nq_, i = query(r);
    if (p_.table && (diagonals_head_ != h || diagonals_key_ != k0)) {
      scores_.diagonals(h, q0_, nq_, k0, n, diagonals_);
      diagonals_head_ = h, diagonals_key_ = k0;
    }
    const A* diagonal = p_.table ? Scores<T>::diagonal_of(diagonals_, i, q0_, nq_) + g.lo : nullptr;
    return scores_.row(h, i, k0 + g.lo, g.size(), seen_[r], diagonal, S_ + r * ld_ + g.lo);
  }

  void prepare_bits(int64_t r, int64_t k0, int64_t n) {
    const int64_t h = h0_ + r / nq_;
    if (bits_head_ == h && bits_key_ == k0) return;
    bits_.prepare(p_.seed, p_.drop_threshold, uint32_t(h + p_.head_start),
                  uint32_t(s_.b + p_.batch_start), k0 + p_.key_start, n, table_);
    bits_head_ = h, bits_key_ = k0;
  }

  void clear_untouched() {
    for (int64_t r = 0; r < rows_; r++)
      if (!started_[r / kRows<T> * kRows<T>])
        for (int64_t d = 0; d < f_.dv; d += T::width) store(O_ + r * f_.dv + d, vec{});
  }

  const ForwardShape<T>& f_;
  const AttentionProblem& p_;
  const Sequence& s_;
  const Scores<T> scores_;
  const int64_t h0_, q0_, nq_, rows_, keys_, ld_;
  const bool plain_;
  // Exponents are (s - m) * c: log2(e), times the scale if scores are raw products.
  A c_;
  packed* Q_;
  A *S_, *O_, *m_, *l_, *alpha_, *diagonals_ = nullptr;
  opnd* P_;
  Range *seen_, *reach_, span_;  // span_: keys that any row sees
  // started_, per first row of a group: O is initialized. live_: see mark_live_tiles().
  uint8_t *started_, *live_ = nullptr;
  const float* v_scale_ = nullptr;  // for 8-bit keys of the tile
  KeepBits bits_;
  uint32_t* keep_ = nullptr;
  char* table_ = nullptr;
  int64_t bits_head_ = -1, bits_key_ = -1, diagonals_head_ = -1, diagonals_key_ = -1;
};

}  // namespace PT_ISA
}  // namespace pt
