// SPDX-License-Identifier: Apache-2.0
// Backward of attention: dq, dk, dv, and the gradients of dense masks and biases, ALiBi slopes, the
// T5 table and sinks.
//
// A phase is three parallel loops: pack its query rows, run its tasks, reduce the partials of dQ.
//
//   BackwardPlan       the division into items, phases, runs, splits and classes
//   Item, QueryRows    an item's query rows, packed for its tasks, and their dQ
//   AttentionBackward  the loops
//
// bwd_tile.h has the arithmetic of a task. The partition:
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

#include "cpu/attention/bwd_tile.h"
#include "cpu/attention/softmax.h"
#include "cpu/core/pack.h"
#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"

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

INLINE bool sums_rows(const DenseGrad& d) { return d.data && d.stride.d == 0; }

// Packed operands, row stats and partial sums of an item. Arrays by row start at its row q0.
template <class T>
struct Item : ItemId {
  using acc = typename T::acc;
  using packed = typename T::packed;
  int64_t rows, parts;  // parts: splits that have keys
  const Sequence* sequence;
  packed *Q, *G, *Qs, *Gs;
  Range* seen;
  acc *m, *l, *delta;
  // live [row]: sees a key. extreme [block]. touched [part][block]: this partial dQ was stored.
  uint8_t *live, *extreme, *touched;
  acc* dQ;                // [part][rows][dw]
  acc* row_sums[2];       // [part][rows], of mask and bias
  double *slope, *table;  // [part], [part][buckets]
  double* sink;           // [block]

  Item() = default;
  Item(const ItemId& id, const BackwardPlan& plan)
      : ItemId(id), rows(plan.rows(id)), parts(plan.parts(id.b)) {}

  int64_t blocks(const BackwardSizes& z) const { return ceil_div(rows, z.BQ); }
  int64_t block_rows(const BackwardSizes& z, int64_t i) const { return min(z.BQ, rows - i * z.BQ); }

  // Call take(pointer, count) for every array.
  template <class Take>
  void layout(const BackwardSizes& z, const AttentionGrads& g, int64_t buckets, const Take& take) {
    const int64_t units = BackwardTile<T>::padded(rows) / T::pack, n = blocks(z);
    take(Q, rows * z.du), take(G, z.ds ? rows * z.dvu : 0), take(Qs, z.dk ? units * z.dw : 0),
        take(Gs, z.dv ? units * z.dvw : 0);
    take(seen, rows), take(m, rows), take(l, rows), take(delta, rows), take(live, rows),
        take(extreme, n);
    take(touched, parts * n), take(dQ, z.dq ? parts * rows * z.dw : 0);
    take(row_sums[0], sums_rows(g.d_mask) ? parts * rows : 0),
        take(row_sums[1], sums_rows(g.d_bias) ? parts * rows : 0);
    take(slope, g.d_slopes ? parts : 0), take(table, g.d_table ? parts * buckets : 0);
    take(sink, g.d_sinks ? n : 0);
  }

  // Return block i without the rows past the query length.
  QueryBlock<T> block(const BackwardSizes& z, int64_t i) const {
    const int64_t r = i * z.BQ, units = r / T::pack;
    return {q0 + r,
            clamp<int64_t>(sequence->rows - q0 - r, 0, block_rows(z, i)),
            seen + r,
            Q + r * z.du,
            G + r * z.dvu,
            Qs + units * z.dw,
            Gs + units * z.dvw,
            m + r,
            l + r,
            delta + r,
            extreme[i] != 0};
  }
};

template <class T>
class QueryRows {
 public:
  using elem = typename T::elem;
  using acc = typename T::acc;
  using packed = typename T::packed;
  using vec = typename T::vec;
  // Max |lse| that holds the log of the sum to 2^-14.
  static constexpr double kTrusted = 1024;

  QueryRows(const AttentionProblem& p, const AttentionGrads& g, const BackwardSizes& z,
            const Item<T>& it, int64_t i)
      : p(p), g(g), z(z), it(it), sequence(*it.sequence), i(i), row0(i * z.BQ),
        base(sequence.q_first + it.q0 + row0) {}

  void pack() const {
    for (int t = 0; t < 2; t++)
      if (sums_rows(t ? g.d_bias : g.d_mask))
        for (int64_t s = 0; s < it.parts; s++)
          for (int64_t r = 0; r < it.block_rows(z, i); r++)
            it.row_sums[t][s * it.rows + row0 + r] = 0;
    it.extreme[i] = 0;
    const Scores<T> scores(p, sequence);
    const bool plain = scores.plain();
    const int64_t n = it.block(z, i).rows, ld = BackwardTile<T>::padded(n);
    const elem *q = at<elem>(p.q, p.qs), *d_out = at<elem>(g.d_out, g.dos),
               *out = at<elem>(p.out, p.os);
    const acc *lse = at<acc>(p.lse, p.lse_s),
              *d_lse = g.d_lse ? at<acc>(g.d_lse, g.d_lse_s) : nullptr;
    acc *m = it.m + row0, *l = it.l + row0, *delta = it.delta + row0;
    uint8_t* live = it.live + row0;
    const acc sink = sink_of<acc>(p, it.h);
    TileTrim trim(p, sequence.b);
    for (int64_t r = 0; r < n; r++) {
      const Range v = it.seen[row0 + r] =
          trim(it.h, it.q0 + row0 + r, sequence.visible(it.q0 + row0 + r));
      acc e = lse[r * p.lse_s.l];
      live[r] = !(e <= sink) || (plain && v.size() > 0 && sink == -kInfinity<acc>);
      // every product is -inf: NaN, as in forward
      if (live[r] && e == -kInfinity<acc>) e = acc(__builtin_nan(""));
      m[r] = e, l[r] = 0;
      it.extreme[i] |= huge(e);
      vec sum{};
      if (live[r] && (z.ds || g.d_sinks))
        for (int64_t c = 0; c < p.Dv; c += T::width)
          sum = fma(T::load(d_out + r * g.dos.l + c, p.Dv - c),
                    T::load(out + r * p.os.l + c, p.Dv - c), sum);
      delta[r] = reduce(sum, op_add) - (live[r] && d_lse ? d_lse[r * g.d_lse_s.l] : acc(0));
    }
    const int64_t units = row0 / T::pack;
    copy_rows<T>(q, p.qs.l, n, n, p.D, it.Q + row0 * z.du, live, z.du);
    if (z.ds) copy_rows<T>(d_out, g.dos.l, n, n, p.Dv, it.G + row0 * z.dvu, live, z.dvu);
    if (z.dk) pack_sum(q, p.qs.l, n, ld, p.D, it.Qs + units * z.dw, live);
    if (z.dv) pack_sum(d_out, g.dos.l, n, ld, p.Dv, it.Gs + units * z.dvw, live);
    if (it.extreme[i]) split_lse(sink);
    if (g.d_sinks) it.sink[i] = sink_gradient(n, sink, d_lse);
    if (it.extreme[i]) return;
    if (plain)
      for (int64_t r = 0; r < n; r++) m[r] = acc(m[r] * kLog2e);
  }

  // Return the max scratch of pack().
  static size_t bytes(const BackwardSizes& z) {
    constexpr int64_t panel = kPanel<T>;
    return Arena::bytes_for<packed>(panel * z.du) + Arena::bytes_for<acc>(kRows<T> * panel) +
           Arena::bytes_for<acc>(Scores<T>::diagonal_size(kRows<T>, panel)) +
           Arena::bytes_for<uint8_t>(z.BQ) + Arena::bytes_for<uint8_t>(panel);
  }

  // Reduce the partials of dQ in order.
  void write() const {
    const vec scale = set1<vec>(acc(p.scale));
    for (int64_t r = 0; r < it.block_rows(z, i); r++) {
      elem* out = const_cast<elem*>(at<elem>(g.dq, g.dqs)) + r * g.dqs.l;
      for (int64_t c = 0; c < p.D; c += T::width) {
        vec x{};
        for (int64_t s = 0; s < it.parts; s++)
          if (it.touched[s * it.blocks(z) + i])
            x = x + load(it.dQ + (s * it.rows + row0 + r) * z.dw + c);
        T::store(out + c, p.D - c, x * scale);
      }
    }
  }

 private:
  template <class E>
  const E* at(const void* data, const Strides& s) const {
    return static_cast<const E*>(data) + it.b * s.b + it.h * s.h + base * s.l;
  }
  // Pack the operand of QueryBlock that is summed over queries.
  static void pack_sum(const elem* src, int64_t stride, int64_t n, int64_t ld, int64_t d,
                       packed* dst, const uint8_t* live) {
    if constexpr (T::pack == 1) {
      pack_rows<T>(src, stride, n, ld, d, ld, dst, live);
    } else {
      using uvec = typename T::uvec;
      constexpr int64_t w = T::width;
      const int64_t columns = round_up(d, w), pairs = ld / 2;
      for (int64_t u = 0; u < pairs; u += w)
        for (int64_t c = 0; c < columns; c += 2 * w) {
          vec a[w], b[w];
          const auto row = [&](int64_t r) {
            return r < n && live[r] ? T::load_units(src + r * stride + c, d - c) : uvec{};
          };
          for (int64_t i = 0; i < w; i++) {
            uvec lo, hi;
            interleave(row(2 * (u + i)), row(2 * (u + i) + 1), &lo, &hi);
            a[i] = (vec)lo, b[i] = (vec)hi;
          }
          transpose(a), transpose(b);
          for (int64_t i = 0; i < w; i++) {
            store(reinterpret_cast<acc*>(dst + (c + i) * pairs + u), a[i]);
            if (c + w < columns) store(reinterpret_cast<acc*>(dst + (c + w + i) * pairs + u), b[i]);
          }
        }
    }
  }
  static bool huge(acc lse) {
    return lse != -kInfinity<acc> && (lse > acc(kTrusted) || lse < acc(-kTrusted));
  }

  // Return the block's part of d_sink = -sum of P delta, with the sink's weight P = exp(sink - m) /
  // 2^l. P = 1 in a row without visible keys, where delta is -d_lse. m is in natural units.
  double sink_gradient(int64_t n, acc sink, const acc* d_lse) const {
    double sum = 0;
    if (sink == -kInfinity<acc>) return sum;
    for (int64_t r = row0; r < row0 + n; r++) {
      if (it.live[r])
        sum -= __builtin_exp(double(sink) - double(it.m[r])) * __builtin_exp2(-double(it.l[r])) *
               double(it.delta[r]);
      else if (d_lse) sum += double(d_lse[(r - row0) * g.d_lse_s.l]);
    }
    return sum;
  }

  // Recompute row stats if lse is too large to hold the log of the sum: m = row maximum, l = log2
  // of the sum of exp(s - m).
  void split_lse(acc sink) const {
    constexpr int64_t panel = kPanel<T>;
    const QueryBlock<T> x = it.block(z, i);
    const Scores<T> scores(p, sequence);
    acc *m = it.m + row0, *l = it.l + row0;
    Arena& arena = local_arena;
    arena.reset(bytes(z));
    packed* Kt = arena.take<packed>(panel * z.du);
    acc *S = arena.take<acc>(kRows<T> * panel),
        *diagonals = arena.take<acc>(Scores<T>::diagonal_size(kRows<T>, panel));
    uint8_t *extreme = arena.take<uint8_t>(z.BQ), *live = arena.take<uint8_t>(panel);
    for (int64_t r = 0; r < x.rows; r++)
      if ((extreme[r] = huge(m[r]))) m[r] = sink, l[r] = sink != -kInfinity<acc>;
    const Range keys = sequence.keys();
    const int64_t kv_head = it.h / (p.Hq / p.Hkv);
    const elem* k = static_cast<const elem*>(p.k) + it.b * p.ks.b + kv_head * p.ks.h +
                    sequence.k_first * p.ks.l;
    for (int64_t j = keys.lo / panel * panel; j < keys.hi; j += panel) {
      const int64_t n = min(panel, keys.hi - j);
      const bool all = !mark_live_keys<T>(p, sequence, kv_head, j, n, live);
      pack_transposed<T>(k + j * p.ks.l, p.ks.l, n, p.D, Kt, all ? nullptr : live, panel, z.du);
      for (int64_t r = 0; r < x.rows; r += kRows<T>) {
        const int64_t rows = min<int64_t>(kRows<T>, x.rows - r);
        score_products<T>(rows, z.du, x.Q + r * z.du, Kt, S, panel);
        if (z.table) scores.diagonals(it.h, x.q0 + r, rows, j, n, diagonals);
        for (int64_t e = 0; e < rows; e++) {
          if (!extreme[r + e]) continue;
          acc* s = S + e * panel;
          const vec top = scores.row(
              it.h, x.q0 + r + e, j, n, x.seen[r + e],
              z.table ? Scores<T>::diagonal_of(diagonals, x.q0 + r + e, x.q0 + r, rows) : nullptr,
              s);
          add_to_stats<T>(s, n, reduce(top, op_max), m + r + e, l + r + e);
        }
      }
    }
    for (int64_t r = 0; r < x.rows; r++)
      if (extreme[r]) l[r] = acc(__builtin_log2(double(l[r])));
  }

  const AttentionProblem& p;
  const AttentionGrads& g;
  const BackwardSizes& z;
  const Item<T>& it;
  const Sequence& sequence;
  int64_t i, row0, base;
};

template <class T>
class AttentionBackward {
 public:
  using elem = typename T::elem;
  using acc = typename T::acc;
  using packed = typename T::packed;
  using vec = typename T::vec;

  AttentionBackward(const AttentionProblem& problem, const AttentionGrads& grads)
      : p(problem), g(grads), z(sizes(problem, grads)), plan(problem, grads, z.BK, item_rows(z)) {}

  // Return the scratch of run().
  Scratch scratch() {
    measure();
    Scratch s;
    s.setup = setup_bytes(), s.shared = phase_bytes;
    s.local = max(task_bytes(), QueryRows<T>::bytes(z));
    return s;
  }

  void run() {
    measure();
    set_up();
    for (ItemId at; !plan.done(at); phase++) {
      shared_arena.reset(phase_bytes);
      at = take_items(at);
      const int64_t blocks = plan.item_rows / z.BQ;
      const auto each_block = [&](const auto& f) {
        for_each_task(items_count * blocks, p.threads, [&](int64_t t) {
          const Item<T>& it = items[t / blocks];
          if (t % blocks < it.blocks(z)) f(QueryRows<T>(p, g, z, it, t % blocks));
        });
      };
      each_block([](const QueryRows<T>& r) { PT_PHASE(pack) r.pack(); });
      for_each_task(class_count * plan.splits, p.threads,
                    [&](int64_t t) { task(first_run[t / plan.splits], t % plan.splits); });
      if (z.dq) each_block([](const QueryRows<T>& r) { PT_PHASE(results) r.write(); });
      for (int t = 0; t < 2; t++)
        if (sums_rows(dense(t))) add_row_sums(t);
      add_terms();
    }
    for (int64_t h = 0; g.d_slopes && h < p.Hq; h++)
      static_cast<acc*>(g.d_slopes)[h] = acc(slopes[h]);
    for (int64_t u = 0; g.d_table && u < p.buckets * p.Hq; u++)
      static_cast<acc*>(g.d_table)[u] = acc(table[u]);
    for (int64_t h = 0; g.d_sinks && h < p.Hq; h++) static_cast<acc*>(g.d_sinks)[h] = acc(sinks[h]);
  }

 private:
  static BackwardSizes sizes(const AttentionProblem& p, const AttentionGrads& g) {
    BackwardSizes z;
    // With AMX tiles, dQ passes through each core once per key block: in float, and from the
    // last-level cache for long sequences. 384 keys take 0.90 to 0.97 of the time of 192 at 1,024
    // tokens and 0.84 to 0.91 at 4,096; with 576 the scores get slower.
    z.BQ = 128, z.BK = kUnitStep<T> > 1 ? 384 : 192;
    z.du = round_units<T>(p.D), z.dvu = round_units<T>(p.Dv);
    z.dw = round_up(p.D, T::width), z.dvw = round_up(p.Dv, T::width);
    z.terms = g.d_mask.data || g.d_bias.data || g.d_slopes || g.d_table;
    z.dq = g.dq, z.dk = g.dk, z.dv = g.dv, z.ds = z.dq || z.dk || z.terms;
    z.dropout = p.drop_threshold > 0, z.softcap = p.softcap != 0, z.table = p.table;
    z.query_start = p.query_start;
    z.scale = p.scale,
    z.keep_scale = p.drop_threshold < 65536 ? 65536.0 / (65536 - p.drop_threshold) : 0.0;
    return z;
  }
  // Return the rows of an item: up to about 4 MB of operands, without the partials of dQ.
  static int64_t item_rows(const BackwardSizes& z) {
    const int64_t bytes = 2 * (z.dw + z.dvw) * int64_t(sizeof(acc)) / T::pack;
    return clamp<int64_t>((int64_t(4) << 20) / max<int64_t>(bytes, 1) / z.BQ, 4, 64) * z.BQ;
  }
  const DenseGrad& dense(int t) const { return t ? g.d_bias : g.d_mask; }

  size_t bytes_of(const ItemId& id) const {
    size_t bytes = 0;
    const auto add = [&](auto*& x, int64_t n) {
      bytes += Arena::bytes_for<std::remove_reference_t<decltype(*x)>>(n);
    };
    Item<T>(id, plan).layout(z, g, p.buckets, add);
    return bytes;
  }

  // Compute the max items, runs and bytes of a phase, and the blocks carried by runs that a phase
  // boundary splits.
  void measure() {
    for (ItemId at; !plan.done(at);) {
      int64_t n = 0, runs = 0;
      size_t bytes = 0;
      for (; !plan.done(at); at = plan.next(at), n++) {
        const size_t more = bytes_of(at);
        if (n && bytes + more > BackwardPlan::kBudget) break;
        bytes += more, runs += n == 0 || plan.starts_run(at);
      }
      most_items = max(most_items, n), most_runs = max(most_runs, runs),
      phase_bytes = max(phase_bytes, bytes);
      if (!plan.done(at) && !plan.starts_run(at))
        carried_blocks = max(carried_blocks, plan.key_blocks(at.b));
    }
  }

  // Scratch that outlives a phase.
  int64_t carry_size() const { return carried_blocks * z.BK * (z.dw + z.dvw); }
  size_t setup_bytes() const {
    return Arena::bytes_for<Sequence>(p.B) + Arena::bytes_for<Item<T>>(most_items) +
           Arena::bytes_for<Run>(most_runs) + 2 * Arena::bytes_for<int64_t>(plan.classes()) +
           2 * Arena::bytes_for<acc>(carry_size()) + 2 * Arena::bytes_for<double>(p.Hq) +
           Arena::bytes_for<double>(p.Hq * p.buckets);
  }
  void set_up() {
    const int64_t classes = plan.classes();
    Arena& a = setup_arena;
    a.reset(setup_bytes());
    sequences = a.take<Sequence>(p.B), items = a.take<Item<T>>(most_items),
    runs = a.take<Run>(most_runs);
    first_run = a.take<int64_t>(classes), last_run = a.take<int64_t>(classes);
    carry[0] = a.take<acc>(carry_size()), carry[1] = a.take<acc>(carry_size());
    slopes = a.take<double>(p.Hq), sinks = a.take<double>(p.Hq),
    table = a.take<double>(p.Hq * p.buckets);
    for_each_task(p.B, p.threads, [&](int64_t b) { sequences[b] = Sequence(p, b); });
    for (int64_t h = 0; h < p.Hq; h++) slopes[h] = sinks[h] = 0;
    for (int64_t u = 0; u < p.buckets * p.Hq; u++) table[u] = 0;
  }

  // Lay out the items from `at`, link their runs by class, and return the first item of the next
  // phase.
  ItemId take_items(ItemId at) {
    const int64_t classes = plan.classes();
    for (int64_t c = 0; c < classes; c++) last_run[c] = -1;
    items_count = class_count = 0;
    int64_t run_count = 0;
    for (size_t bytes = 0; !plan.done(at); at = plan.next(at)) {
      bytes += bytes_of(at);
      if (items_count && bytes > BackwardPlan::kBudget) break;
      Item<T>& it = items[items_count] = Item<T>(at, plan);
      it.layout(z, g, p.buckets, [&](auto*& x, int64_t n) {
        x = shared_arena.take<std::remove_reference_t<decltype(*x)>>(n);
      });
      it.sequence = sequences + it.b;
      for (int64_t i = 0; i < it.parts * it.blocks(z); i++) it.touched[i] = 0;
      for (int64_t i = 0; g.d_slopes && i < it.parts; i++) it.slope[i] = 0;
      for (int64_t i = 0; g.d_table && i < it.parts * p.buckets; i++) it.table[i] = 0;
      if (items_count == 0 || plan.starts_run(at)) {
        Run& r = runs[run_count] = {
            at.b, at.h / plan.group, items_count, items_count, plan.starts_run(at), false, -1};
        int64_t& last = last_run[plan.class_of(r)];
        (last < 0 ? first_run[class_count++] : runs[last].next) = run_count;
        last = run_count++;
      }
      runs[run_count - 1].end = ++items_count, runs[run_count - 1].ends = plan.ends_run(at);
    }
    return at;
  }

  struct Work {
    BackwardTile<T>* tile;
    packed *Kt, *Vt, *Kj;
    acc *dK, *dV, *terms;
    uint8_t* live;
    void* keep_table;
  };

  int64_t keep_bytes() const { return z.dropout ? KeepBits::table_bytes(z.BK) : 0; }
  size_t task_bytes() const {
    return BackwardTile<T>::bytes(z) + Arena::bytes_for<packed>(z.BK * z.du) +
           Arena::bytes_for<packed>(z.BK * z.dvu) +
           Arena::bytes_for<packed>(z.BK / T::pack * z.dw) + Arena::bytes_for<acc>(z.BK * z.dw) +
           Arena::bytes_for<acc>(z.BK * z.dvw) +
           Arena::bytes_for<acc>(TermGradients<T>::workspace(z.BQ, z.BK)) +
           Arena::bytes_for<uint8_t>(z.BK) + Arena::bytes_for<uint8_t>(keep_bytes());
  }
  void task(int64_t run, int64_t split) {
    Arena& a = local_arena;
    a.reset(task_bytes());
    BackwardTile<T> tile(z, a);
    const Work w{&tile,
                 a.take<packed>(z.BK * z.du),
                 a.take<packed>(z.BK * z.dvu),
                 a.take<packed>(z.BK / T::pack * z.dw),
                 a.take<acc>(z.BK * z.dw),
                 a.take<acc>(z.BK * z.dvw),
                 a.take<acc>(TermGradients<T>::workspace(z.BQ, z.BK)),
                 a.take<uint8_t>(z.BK),
                 a.take<uint8_t>(keep_bytes())};
    const FlushSubnormals flush;
    for (; run >= 0; run = runs[run].next)
      for (int64_t i = split, n = plan.key_blocks(runs[run].b); i < n; i += plan.splits)
        key_block(runs[run], i, split, w);
  }

  void key_block(const Run& run, int64_t block, int64_t split, const Work& w) {
    const Sequence& sequence = sequences[run.b];
    const Scores<T> scores(p, sequence);
    const int64_t keys = plan.block_keys(run.b), k0 = block * keys,
                  size = min(keys, sequence.Lk - k0), row = sequence.k_first + k0;
    KeyBlock<T> k{k0,  clamp<int64_t>(sequence.keys().hi - k0, 0, size), w.Kt, w.Vt, w.Kj, w.dK,
                  w.dV};
    if (sequence.keys().lo >= k0 + k.n) k.n = 0;
    const bool all = !mark_live_keys<T>(p, sequence, run.kv_head, k0, size, w.live);
    const uint8_t* live = all ? nullptr : w.live;
    PT_PHASE(pack) if (k.n > 0) {
      const elem *K = at(p.k, p.ks, run, row), *V = at(p.v, p.vs, run, row);
      for (int64_t j = 0; j < k.n; j += kPanel<T>) {
        pack_transposed<T>(K + j * p.ks.l, p.ks.l, k.n - j, p.D, w.Kt + j * z.du,
                           live ? live + j : nullptr, kPanel<T>, z.du);
        if (z.ds)
          pack_transposed<T>(V + j * p.vs.l, p.vs.l, k.n - j, p.Dv, w.Vt + j * z.dvu,
                             live ? live + j : nullptr, kPanel<T>, z.dvu);
      }
      if (z.dq)
        pack_rows<T>(K, p.ks.l, k.n, round_up(k.n, BackwardTile<T>::kStep), p.D, z.BK, w.Kj, live);
    }
    move_carry<false>(run, block, k);
    for (int64_t i = run.first; i < run.end && k.n > 0; i++)
      item_block(items[i], scores, k, split, w);
    if (!run.ends) return move_carry<true>(run, block, k);
    if (z.dk) PT_PHASE(results)
    write_keys(at(g.dk, g.dks, run, row), g.dks.l, k.dK, z.dw, size, live, p.D, p.scale);
    if (z.dv) PT_PHASE(results)
    write_keys(at(g.dv, g.dvs, run, row), g.dvs.l, k.dV, z.dvw, size, live, p.Dv, z.keep_scale);
  }

  void item_block(const Item<T>& it, const Scores<T>& scores, const KeyBlock<T>& k, int64_t split,
                  const Work& w) {
    KeepBits keep;
    const bool some_kept = z.dropout && p.drop_threshold < 65536;
    const uint32_t head = uint32_t(it.h + p.head_start), batch = uint32_t(it.b + p.batch_start);
    if (some_kept)
      keep.prepare(p.seed, p.drop_threshold, head, batch, k.k0 + p.key_start, k.n, w.keep_table);
    typename TermGradients<T>::Target target{};
    for (int t = 0; t < 2; t++) {
      target.dense[t] = dense(t);
      if (!dense(t).data) continue;
      target.dense[t].data =
          static_cast<acc*>(dense(t).data) + it.b * dense(t).stride.b + it.h * dense(t).stride.h;
      target.row_sums[t] = it.row_sums[t] + (sums_rows(dense(t)) ? split * it.rows : 0);
    }
    target.row0 = it.q0;
    target.slope = g.d_slopes ? it.slope + split : nullptr,
    target.table = g.d_table ? it.table + split * p.buckets : nullptr;
    TermGradients<T> terms(p, *it.sequence, target, w.terms, z.BQ, z.BK);
    for (int64_t i = 0; i < it.blocks(z); i++) {
      const QueryBlock<T> q = it.block(z, i);
      if (it.sequence->unsorted_segments() &&
          !it.sequence->may_meet({q.q0, q.q0 + q.rows}, {k.k0, k.k0 + k.n}))
        continue;
      uint8_t& touched = it.touched[split * it.blocks(z) + i];
      acc* dQ = z.dq ? it.dQ + (split * it.rows + i * z.BQ) * z.dw : nullptr;
      if (!w.tile->run(scores, it.h, q, k, some_kept ? &keep : nullptr, dQ, !touched,
                       z.terms ? &terms : nullptr) ||
          touched)
        continue;
      touched = 1;
      // Rows past the query length get zero.
      for (int64_t x = q.rows * z.dw; z.dq && x < it.block_rows(z, i) * z.dw; x++) dQ[x] = 0;
    }
  }

  // Save or restore dK and dV of a run that spans phases. A run that starts in this phase starts at
  // zero.
  template <bool SAVE>
  void move_carry(const Run& run, int64_t block, const KeyBlock<T>& k) const {
    acc *held_k = carry[(phase + !SAVE) % 2] + block * z.BK * (z.dw + z.dvw),
        *held_v = held_k + z.BK * z.dw;
    const auto move = [&](acc* sum, acc* held, int64_t n) {
      if (SAVE) __builtin_memcpy(held, sum, n * sizeof(acc));
      else if (run.starts) __builtin_memset(sum, 0, n * sizeof(acc));
      else __builtin_memcpy(sum, held, n * sizeof(acc));
    };
    if (z.dk) move(k.dK, held_k, z.BK * z.dw);
    if (z.dv) move(k.dV, held_v, z.BK * z.dvw);
  }

  elem* at(const void* data, const Strides& s, const Run& run, int64_t row) const {
    return const_cast<elem*>(static_cast<const elem*>(data)) + run.b * s.b + run.kv_head * s.h +
           row * s.l;
  }
  void write_keys(elem* out, int64_t stride, const acc* sum, int64_t columns, int64_t rows,
                  const uint8_t* live, int64_t d, double scale) const {
    const vec factor = set1<vec>(acc(scale));
    const auto put = [&](int64_t r, int64_t c, vec x) {
      T::store(out + r * stride + c, d - c, live && !live[r] ? vec{} : x * factor);
    };
    if constexpr (T::pack == 1) {  // row by row: often the first touch of fresh pages
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < d; c += T::width) put(r, c, load(sum + r * columns + c));
    } else {
      for (int64_t r = 0; r < rows; r += T::width)
        for (int64_t c = 0; c < d; c += T::width) {
          vec x[T::width];
          for (int64_t i = 0; i < T::width; i++) x[i] = load(sum + (c + i) * z.BK + r);
          transpose(x);
          for (int64_t i = 0; i < min<int64_t>(T::width, rows - r); i++) put(r + i, c, x[i]);
        }
    }
  }

  // Reductions over items, in item order.
  void add_row_sums(int t) {
    const DenseGrad& d = dense(t);
    const int64_t blocks = ceil_div(p.Lq, z.BQ);
    // Give rows that share an element to one task.
    for_each_task(d.stride.l ? blocks : 1, p.threads, [&](int64_t task) {
      for (int64_t i = 0; i < items_count; i++) {
        const Item<T>& it = items[i];
        const int64_t first = d.stride.l ? max(task * z.BQ - it.q0, int64_t(0)) : 0;
        const int64_t end = d.stride.l ? min((task + 1) * z.BQ - it.q0, it.rows) : it.rows;
        acc* out =
            static_cast<acc*>(d.data) + it.b * d.stride.b + it.h * d.stride.h + it.q0 * d.stride.l;
        double total = 0;
        for (int64_t r = first; r < end; r++) {
          double sum = 0;
          for (int64_t s = 0; s < it.parts; s++) sum += double(it.row_sums[t][s * it.rows + r]);
          if (d.stride.l) out[r * d.stride.l] += acc(sum);
          else total += sum;
        }
        if (!d.stride.l) *out += acc(total);
      }
    });
  }
  void add_terms() {
    for (int64_t i = 0; i < items_count; i++) {
      for (int64_t k = 0; g.d_sinks && k < items[i].blocks(z); k++)
        sinks[items[i].h] += items[i].sink[k];
      for (int64_t s = 0; s < items[i].parts; s++) {
        if (g.d_slopes) slopes[items[i].h] += items[i].slope[s];
        for (int64_t u = 0; g.d_table && u < p.buckets; u++)
          table[u * p.Hq + items[i].h] += items[i].table[s * p.buckets + u];
      }
    }
  }

  const AttentionProblem& p;
  const AttentionGrads& g;
  BackwardSizes z;
  BackwardPlan plan;
  int64_t most_items = 0, most_runs = 0, carried_blocks = 0, items_count = 0, class_count = 0,
          phase = 0;
  size_t phase_bytes = 0;
  Sequence* sequences = nullptr;
  Item<T>* items = nullptr;
  Run* runs = nullptr;
  int64_t *first_run = nullptr, *last_run = nullptr;  // per class
  acc* carry[2] = {};
  double *slopes = nullptr, *table = nullptr, *sinks = nullptr;
};

}  // namespace bwd
}  // namespace PT_ISA
}  // namespace pt
