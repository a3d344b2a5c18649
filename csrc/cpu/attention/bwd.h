// SPDX-License-Identifier: Apache-2.0
// Backward of attention: dq, dk, dv, and the gradients of dense masks and biases, ALiBi slopes, the
// T5 table and sinks.
//
// A phase is three parallel loops: pack its query rows, run its tasks, reduce the partials of dQ.
// bwd_plan.h divides the work, bwd_rows.h packs the query rows, bwd_tile.h has the arithmetic.
#pragma once

#include "cpu/attention/bwd_rows.h"
#include "cpu/core/parallel.h"
#include "cpu/core/scratch.h"

namespace pt {
namespace PT_ISA {
namespace bwd {

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
           Arena::bytes_for<acc>(TileTerms<T>::workspace(z.BQ, z.BK)) +
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
                 a.take<acc>(TileTerms<T>::workspace(z.BQ, z.BK)),
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
    if (z.dk)
      PT_PHASE(results)
      write_keys(at(g.dk, g.dks, run, row), g.dks.l, k.dK, z.dw, size, live, p.D, p.scale);
    if (z.dv)
      PT_PHASE(results)
      write_keys(at(g.dv, g.dvs, run, row), g.dvs.l, k.dV, z.dvw, size, live, p.Dv, z.keep_scale);
  }

  void item_block(const Item<T>& it, const Scores<T>& scores, const KeyBlock<T>& k, int64_t split,
                  const Work& w) {
    KeepBits keep;
    const bool some_kept = z.dropout && p.drop_threshold < 65536;
    const uint32_t head = uint32_t(it.h + p.head_start), batch = uint32_t(it.b + p.batch_start);
    if (some_kept)
      keep.prepare(p.seed, p.drop_threshold, head, batch, k.k0 + p.key_start, k.n, w.keep_table);
    typename TileTerms<T>::Target target{};
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
    TileTerms<T> terms(p, *it.sequence, target, w.terms, z.BQ, z.BK);
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
