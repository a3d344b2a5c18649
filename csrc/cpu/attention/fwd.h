// Attention forward. A task owns a block of query rows (RowBlock) and walks over tiles of keys with the online softmax:
//
//   S = Q K^T      P = exp(S - m)      l = alpha l + sum P      O = alpha O + drop(P) V      alpha = exp(m_before - m)
//
// Two ways to come by the packed K and V of a key/value head (a Unit):
//   shared    long queries: all threads pack them once, then blocks of block_rows() queries read them
//   streamed  the queries of all its heads fit one block: a task packs each tile just before it is used, over one split of the keys;
//             the splits of a unit are combined in a fixed order
// Which way, and how many splits, depends on the lengths of the sequence alone, so results do not depend on threads or neighbours.
#pragma once

#include "cpu/attention/direct.h"
#include "cpu/core/arena.h"
#include "cpu/core/pack.h"
#include "cpu/core/parallel.h"
#include "cpu/core/philox.h"

namespace pt {
namespace PT_ISA {

constexpr int64_t kBlockRows = 128;                 // queries that one block can hold
constexpr int64_t kShortRows = 1024;                // up to here queries are cut finely
constexpr int64_t kBlockKeys = 512;                 // keys of a tile: a multiple of every kPanel
constexpr int64_t kDirectRows = 4;                  // up to here K and V are not packed at all
constexpr int64_t kFewRows = 16;                    // up to here keys are split finely: there is little else to share out
constexpr int64_t kPackBudget = int64_t(32) << 20;  // bytes of packed operands at once, unless a few heads alone need more
constexpr int64_t kUnitsAtOnce = 4096;

// Packed K and V of keys first .. first + ld - 1: k[key panel][unit][key], v[column panel][key / pack][column]
template <class T>
struct PackedKeys {
  const typename T::unit *k, *v;
  int64_t first, ld;
};

template <class T>
struct ForwardShape {
  const AttentionProblem& p;
  int64_t du, dv, group;  // units of a row of K, padded; columns of V, padded; query heads of a key/value head
  explicit ForwardShape(const AttentionProblem& p)
      : p(p), du(round_units<T>(p.D)), dv(round_up(p.Dv, T::width)), group(p.Hkv > 0 ? p.Hq / p.Hkv : 1) {}

  const typename T::elem* at(const void* base, const Strides& s, int64_t b, int64_t h, int64_t row) const {
    return static_cast<const typename T::elem*>(base) + b * s.b + h * s.h + row * s.l;
  }
  int64_t k_units(int64_t ld) const { return ld * du; }
  int64_t v_units(int64_t ld) const { return ld / T::pack * dv; }

  // Packs keys [k0, k0 + n), both bounds on panels, into a buffer for keys first .. first + ld - 1.
  void pack(const Sequence& s, int64_t hkv, int64_t k0, int64_t n, int64_t first, int64_t ld, typename T::unit* k,
            typename T::unit* v) const {
    constexpr int64_t panel = kPanel<T>;
    uint8_t live[panel];
    for (int64_t j = k0; j < k0 + n; j += panel) {
      const int64_t rows = clamp<int64_t>(s.Lk - j, 0, panel), to = j - first;
      const uint8_t* keep = mark_live_keys<T>(p, s, hkv, j, rows, live) ? live : nullptr;
      pack_transposed<T>(at(p.k, p.ks, s.b, hkv, s.k_first + j), p.ks.l, rows, p.D, k + to * du, keep, panel, du);
      for (int64_t col = 0; col < dv; col += panel) {
        const int64_t w = least(panel, dv - col);
        pack_rows<T>(at(p.v, p.vs, s.b, hkv, s.k_first + j) + col, p.vs.l, rows, panel, least(w, p.Dv - col), 0,
                     v + (col * ld + to * w) / T::pack, keep);
      }
    }
  }
};

template <class T>
class RowBlock {
 public:
  using A = typename T::acc;
  using vec = typename T::vec;
  using opnd = typename T::opnd;
  using unit = typename T::unit;

  // Queries [q0, q0 + nq) of heads [h0, h0 + heads), head by head. Memory comes from local_arena, whose reset() the caller has done.
  RowBlock(const ForwardShape<T>& shape, const Sequence& s, int64_t h0, int64_t heads, int64_t q0, int64_t nq, int64_t ld)
      : f_(shape), p_(shape.p), s_(s), scores_(shape.p, s), h0_(h0), q0_(q0), nq_(nq), rows_(heads * nq), ld_(ld), plain_(scores_.plain()) {
    c_ = A(plain_ ? p_.scale * kLog2e : kLog2e);
    const int64_t padded = round_up(rows_, T::width);
    Q_ = local_arena.take<unit>(rows_ * f_.du), S_ = local_arena.take<A>(rows_ * ld);
    P_ = T::pack == 1 ? reinterpret_cast<opnd*>(S_) : local_arena.take<opnd>(rows_ * ld);
    O_ = local_arena.take<A>(rows_ * f_.dv);
    m_ = local_arena.take<A>(padded), l_ = local_arena.take<A>(padded), alpha_ = local_arena.take<A>(padded);
    seen_ = local_arena.take<Range>(padded), reach_ = local_arena.take<Range>(padded);
    started_ = local_arena.take<uint8_t>(padded);
    if (p_.table) diagonals_ = local_arena.take<A>(Scores<T>::diagonal_size(nq, ld));
    if (dropping()) keep_ = local_arena.take<uint32_t>(KeepBits::words(ld)), table_ = local_arena.take<char>(KeepBits::table_bytes(ld));
    const int64_t valid = clamp<int64_t>(s.rows - q0, 0, nq);
    for (int64_t g = 0; g < heads; g++)
      copy_rows<T>(f_.at(p_.q, p_.qs, s.b, h0 + g, s.q_first + q0), p_.qs.l, valid, nq, p_.D, Q_ + g * nq * f_.du, nullptr, f_.du);
    keys_ = {s.Lk, 0};
    for (int64_t r = 0; r < padded; r++) {
      m_[r] = -kInfinity<A>, l_[r] = 0, started_[r] = 0;
      seen_[r] = r < rows_ && r % nq < valid ? s.visible(query(r)) : Range{0, 0};
      if (seen_[r].size() > 0) keys_ = {least(keys_.lo, seen_[r].lo), most(keys_.hi, seen_[r].hi)};
    }
  }
  static size_t bytes(const ForwardShape<T>& f, int64_t rows, int64_t ld) {
    const int64_t padded = round_up(rows, T::width);
    return Arena::bytes_for<unit>(rows * f.du) + 2 * Arena::bytes_for<A>(rows * ld) + Arena::bytes_for<A>(rows * f.dv) +
           3 * Arena::bytes_for<A>(padded) + 2 * Arena::bytes_for<Range>(padded) + Arena::bytes_for<uint8_t>(padded) +
           Arena::bytes_for<A>(Scores<T>::diagonal_size(rows, ld)) + Arena::bytes_for<uint32_t>(KeepBits::words(ld)) +
           Arena::bytes_for<char>(KeepBits::table_bytes(ld));
  }

  Range keys() const { return keys_; }  // that any row sees; empty if hi <= lo

  // Keys [k0, k0 + n), n <= ld, k0 on a panel.
  void tile(const PackedKeys<T>& packed, int64_t k0, int64_t n) {
    const auto scores = [&] {  // a panel of K stays in L1 over all rows
      for (int64_t j = 0; j < n; j += kPanel<T>)
        for (int64_t r = 0; r < rows_; r += kRows<T>) {
          if (reach_[r].lo >= j + kPanel<T> || reach_[r].hi <= j) continue;
          const int64_t rows = least<int64_t>(kRows<T>, rows_ - r);
          for (int64_t i = r; i < r + rows && !plain_; i++)
            scores_.fetch(h0_ + i / nq_, query(i), k0 + j, least<int64_t>(kPanel<T>, n - j));
          pick<T>(rows, kPanel<T>, kStore)(f_.du, Q_ + r * f_.du, f_.du, 1, packed.k + (k0 - packed.first + j) * f_.du, S_ + r * ld_ + j,
                                           ld_, nullptr);
        }
    };
    const auto output = [&] {
      for (int64_t col = 0; col < f_.dv; col += kPanel<T>) {
        const int64_t w = least<int64_t>(kPanel<T>, f_.dv - col);
        const unit* V = packed.v + (col * packed.ld + (k0 - packed.first) * w) / T::pack;
        for (int64_t r = 0; r < rows_; r += kRows<T>) {
          const Range k = reach_[r];
          if (k.size() > 0)
            pick<T>(least<int64_t>(kRows<T>, rows_ - r), w, started_[r] ? kScaleAdd : kStore)(
                round_units<T>(k.size()), reinterpret_cast<const unit*>(P_ + r * ld_ + k.lo), ld_ / T::pack, 1, V + k.lo / T::pack * w,
                O_ + r * f_.dv + col, f_.dv, alpha_ + r);
        }
      }
    };
    step(k0, n, scores, output);
  }

  // The same for few rows, from the keys of head hkv as they are.
  void direct_tile(int64_t hkv, int64_t k0, int64_t n) {
    uint8_t marks[kBlockKeys];
    const uint8_t* live = nullptr;
    const int64_t given = ceil_div(p_.D, T::pack), units = round_up(given, T::width);
    alignas(64) unit queries[kDirectRows * kMaxHead];
    for (int64_t r = 0; r < rows_; r++)
      for (int64_t u = 0; u < units; u++) queries[r * units + u] = u < given ? Q_[r * f_.du + u] : unit(0);
    const auto scores = [&] {
      live = mark_live_keys<T>(p_, s_, hkv, k0, n, marks) ? marks : nullptr;
      const DirectRows<T> x{f_.at(p_.k, p_.ks, s_.b, hkv, s_.k_first + k0), p_.ks.l, n, p_.D, live, queries, units, rows_};
      direct_scores<T>(x, S_, ld_);
    };
    const auto output = [&] {
      // one row: all keys at once; several: pieces that stay in the first cache
      const int64_t piece = rows_ > 1 ? 32 : kBlockKeys;
      for (int64_t j = 0; j < n; j += piece)
        for (int64_t r = 0; r < rows_; r++) {
          const Range k{most(reach_[r].lo, j), least(reach_[r].hi, j + piece)};
          if (k.size() <= 0) continue;
          const bool begins = k.lo == reach_[r].lo;
          const A alpha = !begins ? A(1) : started_[r / kRows<T> * kRows<T>] ? alpha_[r] : A(0);
          direct_output<T>(P_ + r * ld_, k, f_.at(p_.v, p_.vs, s_.b, hkv, s_.k_first + k0), p_.vs.l, p_.Dv, live, alpha, O_ + r * f_.dv);
        }
    };
    step(k0, n, scores, output);
  }

  // Unnormalised results for combine(): m and l of each row, then O.
  void partial(A* to) {
    clear_untouched();
    for (int64_t r = 0; r < rows_; r++) to[r] = m_[r], to[rows_ + r] = l_[r];
    A* o = to + partial_head(rows_);
    for (int64_t i = 0; i < rows_ * f_.dv; i += T::width) store(o + i, load(O_ + i));
  }
  static int64_t partial_head(int64_t rows) { return round_up(2 * rows, 64); }
  static int64_t partial_size(const ForwardShape<T>& f, int64_t rows) { return partial_head(rows) + rows * f.dv; }

  // Takes the place of tile() calls: the sum of the n partial results, in order.
  void combine(const A* parts, int64_t n) {
    const int64_t size = partial_size(f_, rows_);
    for (int64_t r = 0; r < rows_; r++) {
      for (int64_t i = 0; i < n; i++) m_[r] = most(m_[r], parts[i * size + r]);
      A* o = O_ + r * f_.dv;
      for (int64_t d = 0; d < f_.dv; d += T::width) store(o + d, vec{});
      for (int64_t i = 0; i < n; i++) {
        const A *part = parts + i * size, m = part[r];
        if (m == -kInfinity<A> && part[rows_ + r] == 0) continue;  // saw nothing
        const vec w = exp2v<5>(set1<vec>((m - m_[r]) * c_));
        l_[r] += part[rows_ + r] * w[0];
        for (int64_t d = 0; d < f_.dv; d += T::width) store(o + d, fma(w, load(part + partial_head(rows_) + r * f_.dv + d), load(o + d)));
      }
    }
    for (int64_t r = 0; r < rows_; r += kRows<T>) started_[r] = 1;
  }

  void finish() {
    clear_untouched();
    const double rescale = p_.drop_threshold < 65536 ? 65536. / (65536 - p_.drop_threshold) : 0;
    for (int64_t r = 0; r < rows_; r++) {
      const int64_t h = h0_ + r / nq_, i = s_.q_first + query(r);
      // l = 0 although the interval is not empty: every score of a plain row is -inf, which softmax takes for NaN
      const A dead = plain_ && seen_[r].size() > 0 ? A(__builtin_nan("")) : A(0), inv = l_[r] == 0 ? dead : A(rescale / l_[r]);
      auto* out = static_cast<typename T::elem*>(p_.out) + s_.b * p_.os.b + h * p_.os.h + i * p_.os.l;
      for (int64_t d = 0; d < p_.Dv; d += T::width) T::store(out + d, p_.Dv - d, load(O_ + r * f_.dv + d) * inv);
      if (!p_.lse) continue;
      const double m = plain_ ? m_[r] * p_.scale : double(m_[r]);
      static_cast<A*>(p_.lse)[s_.b * p_.lse_s.b + h * p_.lse_s.h + i * p_.lse_s.l] =
          l_[r] == 0 ? -kInfinity<A> : A(m + __builtin_log(double(l_[r])));
    }
  }

 private:
  bool dropping() const { return p_.drop_threshold > 0 && p_.drop_threshold < 65536; }
  int64_t query(int64_t r) const { return q0_ + r % nq_; }

  // One step of the online softmax. scores() writes S, output() adds P V to O; both see k0 and n as they are after trimming.
  template <class S, class O>
  INLINE void step(int64_t& k0, int64_t& n, const S& scores, const O& output) {
    if (s_.unsorted_segments() && !trim(&k0, &n)) return;
    if (!reach(k0, n)) return;
    scores();
    for (int64_t r = 0; r < rows_; r += T::width) softmax(r, k0, n);
    if (p_.drop_threshold == 65536) return;
    output();
    for (int64_t r = 0; r < rows_; r += kRows<T>) started_[r] |= reach_[r].size() > 0;
  }

  // Which keys of the tile each group of kRows rows works on: from the first to the last that one of its rows sees, widened to vectors at
  // the front. False: none at all.
  bool reach(int64_t k0, int64_t n) {
    bool any = false;
    for (int64_t r = 0; r < rows_; r += kRows<T>) {
      Range g{n, 0};
      for (int64_t i = r; i < least<int64_t>(r + kRows<T>, rows_); i++) {
        const Range s{most(seen_[i].lo - k0, int64_t(0)), least(seen_[i].hi - k0, n)};
        if (s.size() > 0) g = {least(g.lo, s.lo), most(g.hi, s.hi)};
      }
      g = g.size() > 0 ? Range{g.lo / (2 * T::width) * (2 * T::width), g.hi} : Range{0, 0};
      any |= g.size() > 0;
      for (int64_t i = r; i < least<int64_t>(r + kRows<T>, rows_); i++) reach_[i] = g;
    }
    return any;
  }

  // Unsorted segments: leaves away panels at either end of the tile in which no segment can match one of the queries'.
  bool trim(int64_t* k0, int64_t* n) const {
    const Range queries{q0_, least(q0_ + nq_, s_.rows)};
    const auto meets = [&](int64_t j) { return s_.may_meet(queries, {j, least<int64_t>(j + kPanel<T>, s_.Lk)}); };
    int64_t end = least(*k0 + *n, s_.Lk);
    while (*k0 < end && !meets(*k0)) *k0 += kPanel<T>;
    int64_t last = *k0;
    for (int64_t j = *k0; j < end; j += kPanel<T>)
      if (meets(j)) last = j + kPanel<T>;
    *n = least(last, end) - *k0;
    return *n > 0;
  }

  // T::width rows from r0: S -> P, and their m, l, alpha.
  void softmax(int64_t r0, int64_t k0, int64_t n) {
    const int64_t nr = least<int64_t>(T::width, rows_ - r0);
    Range valid[T::width];  // lanes of the tile that count; the rest of reach_ becomes 0 in P
    vec top[T::width];
    for (int64_t i = 0; i < T::width; i++) {
      top[i] = set1<vec>(-kInfinity<A>);
      if (i >= nr) continue;
      const int64_t r = r0 + i;
      const Range g = reach_[r];
      valid[i] = plain_ ? Range{most(seen_[r].lo - k0, g.lo), least(seen_[r].hi - k0, g.hi)} : g;
      if (g.size() == 0) continue;
      top[i] = plain_ ? maximum(S_ + r * ld_, valid[i]) : modify(r, k0, n, g);
    }
    const vec m_old = load(m_ + r0), m_new = vmax(m_old, reduce_rows(top, op_max));
    store(m_ + r0, m_new);
    const vec m = m_new == -kInfinity<A> ? vec{} : m_new;  // nothing seen yet: any number serves
    const vec alpha = exp2v<5>(vec((m_old - m) * c_));
    store(alpha_ + r0, alpha);
    vec sums[T::width];
    for (int64_t i = 0; i < T::width; i++) {
      sums[i] = vec{};
      if (i >= nr || reach_[r0 + i].size() == 0) continue;
      if (dropping()) {
        prepare_bits(r0 + i, k0, n);
        bits_.row(uint32_t(uint64_t(query(r0 + i) + p_.query_start)), keep_);
        sums[i] = exponentials<true>(r0 + i, valid[i], m[i]);
      } else {
        sums[i] = exponentials<false>(r0 + i, valid[i], m[i]);
      }
    }
    store(l_ + r0, fma(load(l_ + r0), alpha, reduce_rows(sums, op_add)));
  }

  static INLINE vec maximum(const A* s, Range v) {
    vec x0 = set1<vec>(-kInfinity<A>), x1 = x0;
    int64_t j = v.lo / T::width * T::width;
    const auto masked = [&] { x0 = select(mask_range<vec>(v.lo - j, v.hi - j), vmax(x0, load(s + j)), x0), j += T::width; };
    if (j < v.lo) masked();
    for (; j + 2 * T::width <= v.hi; j += 2 * T::width) x0 = vmax(x0, load(s + j)), x1 = vmax(x1, load(s + j + T::width));
    while (j < v.hi) masked();
    return vmax(x0, x1);
  }

  // p = exp(s - m) of one row, its sum, and what dropout leaves of it in P. The sum makes lse, which is exact to float32 for any dtype:
  // hence the degree.
  template <bool Drop>
  INLINE vec exponentials(int64_t r, Range valid, A m) {
    const A* s = S_ + r * ld_;
    opnd* to = P_ + r * ld_;
    const Range g = reach_[r];
    const vec vm = set1<vec>(m), vc = set1<vec>(c_);
    vec s0{}, s1{};
    const auto two = [&](int64_t j, auto masked) {
      vec p[2];
      UNROLL for (int i = 0; i < 2; i++) {
        p[i] = exp2v<5>(vec((load(s + j + i * T::width) - vm) * vc));
        if constexpr (decltype(masked)::value)
          p[i] = select(mask_range<vec>(valid.lo - j - i * T::width, valid.hi - j - i * T::width), p[i], vec{});
      }
      s0 = s0 + p[0], s1 = s1 + p[1];
      if constexpr (Drop) UNROLL for (int i = 0; i < 2; i++) p[i] = select(bits_at(keep_, bits_.offset() + j + i * T::width), p[i], vec{});
      T::store_pair(to + j, p[0], p[1]);
    };
    constexpr auto yes = std::true_type();
    int64_t j = g.lo;
    for (; j < valid.lo && j < g.hi; j += 2 * T::width) two(j, yes);
    for (; j + 2 * T::width <= valid.hi; j += 2 * T::width) two(j, std::false_type());
    for (; j < g.hi; j += 2 * T::width) two(j, yes);
    return s0 + s1;
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
    bits_.prepare(p_.seed, p_.drop_threshold, uint32_t(uint64_t(h)), uint32_t(uint64_t(s_.b)), k0 + p_.key_start, n, table_);
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
  const int64_t h0_, q0_, nq_, rows_, ld_;
  const bool plain_;
  A c_;  // exponents are (s - m) * c: log2(e), times the scale where scores are raw products
  unit* Q_;
  A *S_, *O_, *m_, *l_, *alpha_, *diagonals_ = nullptr;
  opnd* P_;
  Range *seen_, *reach_, keys_;
  uint8_t* started_;  // per first row of a group: O holds something
  KeepBits bits_;
  uint32_t* keep_ = nullptr;
  char* table_ = nullptr;
  int64_t bits_head_ = -1, bits_key_ = -1, diagonals_head_ = -1, diagonals_key_ = -1;
};

template <class T>
class Forward {
 public:
  using A = typename T::acc;
  using vec = typename T::vec;
  using unit = typename T::unit;

  explicit Forward(const AttentionProblem& p) : p_(p), f_(p) {}

  void run() {
    setup_arena.reset(Arena::bytes_for<Sequence>(p_.B) + Arena::bytes_for<Unit>(kUnitsAtOnce + 1));
    sequences_ = setup_arena.take<Sequence>(p_.B);
    units_ = setup_arena.take<Unit>(kUnitsAtOnce + 1);
    constexpr int64_t some = 64;
    for_each_task(ceil_div(p_.B, some), p_.threads, [&](int64_t t) {
      for (int64_t b = some * t; b < least(p_.B, some * t + some); b++) sequences_[b] = Sequence(p_, b);
    });
    while (plan()) {
      const Unit& end = units_[n_];
      shared_arena.reset(Arena::bytes_for<char>(end.memory));
      memory_ = shared_arena.take<char>(end.memory);
      for_each_task(end.packs, p_.threads, [&](int64_t t) { pack(t); });
      for_each_task(end.tasks, p_.threads, [&](int64_t t) { attend(t); });
      for_each_task(end.combines, p_.threads, [&](int64_t t) { combine(find(t, &Unit::combines)); });
    }
  }

 private:
  // Query heads [h0, h0 + heads) of a sequence, which share their keys.
  struct Unit {
    const Sequence* s;
    int64_t h0, heads, splits, chunk;        // splits = 0: shared; else of `chunk` keys each
    int64_t packs, tasks, combines, memory;  // of the units before it; memory in bytes
  };
  static constexpr int64_t kPackKeys = 256;  // keys packed by one task

  // Rows of a block of queries: so few where there are few that threads end together, more where that makes loading K and V cheap.
  static int64_t block_rows(const Sequence& s) { return s.rows <= kShortRows ? 64 : 96; }
  int64_t blocks(const Sequence& s) const { return ceil_div(s.Lq, block_rows(s)); }
  static int64_t padded_keys(const Sequence& s) { return round_up(s.Lk, kPanel<T>); }
  static int64_t tile_keys(const Sequence& s) { return least(kBlockKeys, padded_keys(s)); }
  int64_t partial_bytes(const Unit& u) const { return RowBlock<T>::partial_size(f_, u.heads * u.s->rows) * int64_t(sizeof(A)); }

  // The next units in units_[0, n_), units_[n_] holding the totals: as many as the budget of packed memory allows, but enough to give every
  // thread a task. The way and the splits are chosen by the valid rows and keys, so that padding a sequence changes no bit.
  bool plan() {
    Unit u{};
    for (n_ = 0; n_ < kUnitsAtOnce && b_ < p_.B && p_.Hq > 0; n_++) {
      if (u.memory > kPackBudget && u.tasks >= p_.threads) break;
      const Sequence& s = sequences_[b_];
      const int64_t stacked = clamp<int64_t>(s.rows > 0 ? kBlockRows / s.rows : f_.group, 1, f_.group);
      u.s = &s, u.h0 = h_;
      const bool shared = stacked < f_.group && s.rows > kFewRows, one_head = f_.group == 1 && s.rows > kBlockRows;
      if (shared || one_head) {
        u.heads = f_.group, u.splits = u.chunk = 0;
      } else {
        u.heads = least(ceil_div(f_.group, ceil_div(f_.group, stacked)), f_.group - h_ % f_.group);
        u.chunk = (u.heads * s.rows <= kFewRows ? 1 : 4) * kBlockKeys * ceil_div(s.cols, 64 * kBlockKeys);
        u.splits = s.rows > 0 && s.cols > 0 ? ceil_div(s.cols, u.chunk) : 1;
      }
      units_[n_] = u;
      if (u.splits == 0) {
        const int64_t ld = padded_keys(s);
        u.memory += (f_.k_units(ld) + f_.v_units(ld)) * int64_t(sizeof(unit));
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

  // The unit that task t of a kind belongs to.
  const Unit& find(int64_t t, int64_t Unit::* count) const {
    int64_t lo = 0, hi = n_;
    while (hi - lo > 1) {
      const int64_t mid = lo + (hi - lo) / 2;
      if (units_[mid].*count <= t) lo = mid;
      else hi = mid;
    }
    return units_[lo];
  }
  unit* packed_k(const Unit& u) const { return reinterpret_cast<unit*>(memory_ + u.memory); }
  unit* packed_v(const Unit& u) const { return packed_k(u) + f_.k_units(padded_keys(*u.s)); }

  void pack(int64_t t) const {
    const Unit& u = find(t, &Unit::packs);
    const int64_t k0 = (t - u.packs) * kPackKeys, ld = padded_keys(*u.s);
    const Range seen = u.s->keys();
    const int64_t lo = most(k0, seen.lo / kPanel<T> * kPanel<T>), hi = least(least(k0 + kPackKeys, ld), round_up(seen.hi, kPanel<T>));
    if (lo < hi) f_.pack(*u.s, u.h0 / f_.group, lo, hi - lo, 0, ld, packed_k(u), packed_v(u));
  }

  void attend(int64_t t) const {
    const FlushSubnormals flush;
    const Unit& u = find(t, &Unit::tasks);
    const Sequence& s = *u.s;
    const int64_t i = t - u.tasks, ld = tile_keys(s);
    if (u.splits == 0) {  // longest rows of a head first
      const int64_t q0 = (blocks(s) - 1 - i % blocks(s)) * block_rows(s), nq = least(block_rows(s), s.Lq - q0);
      local_arena.reset(RowBlock<T>::bytes(f_, nq, ld));
      RowBlock<T> block(f_, s, u.h0 + i / blocks(s), 1, q0, nq, ld);
      const Range keys = block.keys();
      for (int64_t k0 = keys.lo / kPanel<T> * kPanel<T>; k0 < keys.hi; k0 += ld)
        block.tile({packed_k(u), packed_v(u), 0, padded_keys(s)}, k0, least(ld, keys.hi - k0));
      block.finish();
      return;
    }
    if (i == 0) clear_padding(u);
    if (s.rows == 0) return;
    local_arena.reset(RowBlock<T>::bytes(f_, u.heads * s.rows, ld) + Arena::bytes_for<unit>(f_.k_units(ld)) +
                      Arena::bytes_for<unit>(f_.v_units(ld)));
    RowBlock<T> block(f_, s, u.h0, u.heads, 0, s.rows, ld);
    const int64_t hkv = u.h0 / f_.group;
    unit *K = local_arena.take<unit>(f_.k_units(ld)), *V = local_arena.take<unit>(f_.v_units(ld));
    const Range keys = block.keys();
    const int64_t end = least(keys.hi, (i + 1) * u.chunk);
    for (int64_t k0 = most(keys.lo / kPanel<T> * kPanel<T>, i * u.chunk); k0 < end; k0 += ld) {
      const int64_t n = least(ld, end - k0);
      if (u.heads * s.rows <= kDirectRows) {
        block.direct_tile(hkv, k0, n);
      } else {
        f_.pack(s, hkv, k0, round_up(n, kPanel<T>), k0, ld, K, V);
        block.tile({K, V, k0, ld}, k0, n);
      }
    }
    if (u.splits > 1) block.partial(part(u) + i * RowBlock<T>::partial_size(f_, u.heads * s.rows));
    else block.finish();
  }

  // Output 0 and lse -inf in the query rows behind the last valid one.
  void clear_padding(const Unit& u) const {
    const Sequence& s = *u.s;
    for (int64_t h = u.h0; h < u.h0 + u.heads; h++)
      for (int64_t i = s.q_first + s.rows; i < s.q_first + s.Lq; i++) {
        auto* out = static_cast<typename T::elem*>(p_.out) + s.b * p_.os.b + h * p_.os.h + i * p_.os.l;
        for (int64_t d = 0; d < p_.Dv; d += T::width) T::store(out + d, p_.Dv - d, vec{});
        if (p_.lse) static_cast<A*>(p_.lse)[s.b * p_.lse_s.b + h * p_.lse_s.h + i * p_.lse_s.l] = -kInfinity<A>;
      }
  }

  A* part(const Unit& u) const { return reinterpret_cast<A*>(memory_ + u.memory); }

  void combine(const Unit& u) const {
    const int64_t ld = kPanel<T>;
    local_arena.reset(RowBlock<T>::bytes(f_, u.heads * u.s->rows, ld));
    RowBlock<T> block(f_, *u.s, u.h0, u.heads, 0, u.s->rows, ld);
    block.combine(part(u), u.splits);
    block.finish();
  }

  const AttentionProblem& p_;
  const ForwardShape<T> f_;
  Sequence* sequences_ = nullptr;
  Unit* units_ = nullptr;
  char* memory_ = nullptr;
  int64_t n_ = 0, b_ = 0, h_ = 0;  // units planned; where the next plan starts
};

}  // namespace PT_ISA
}  // namespace pt
