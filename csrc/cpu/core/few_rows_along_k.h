// SPDX-License-Identifier: Apache-2.0
// Gemms with few rows of A and a B whose rows run along columns (y = x W, W of shape (k, n)). B,
// the weights, is read once.
//
// B is cut into equal runs of rows, the streams. A pass takes the next row of each stream (two in
// 16-bit dtypes), so that each stream is read in order. Each vector is multiplied by an element of
// every row of A and added to sums that remain in cache. Nothing is packed, transposed or added
// across lanes. The summation order depends only on K.
#pragma once

#include "cpu/core/few_rows.h"

namespace pt {
namespace PT_ISA {

template <class T>
class FewRowsAlongK {
  using acc = typename T::acc;
  using elem = typename T::elem;
  using packed = typename T::packed;
  using vec = typename T::vec;
  using uvec = typename T::uvec;
  using Dot = typename VectorDot<T>::Dot;
  static constexpr int kDeep = 8;                       // rows of B per pass
  static constexpr int kStreams = kDeep / T::pack;      // a pass takes a packed element of each
  static constexpr int64_t kStep = T::width * T::pack;  // columns per step: one vector of each row
  static constexpr int64_t kWide = kPanel<T>;           // columns per epilogue call
  // Max columns per task, times rows of A. The streams are read in runs of a task's columns; the
  // sums fit L2.
  static constexpr int64_t kTask = 32768;
  static constexpr int64_t kLine = 64 / int64_t(sizeof(acc));
  // Passes per partial sum: sums of kDeep terms, kPasses of those, then one per kPasses.
  static constexpr int64_t kPasses = 32;

 public:
  static bool pays(const Product<T>& p, int64_t M) {
    return p.b.along_k && !p.a.along_k && !p.b.live && M <= kFewRows;
  }
  FewRowsAlongK(const Product<T>& product, int64_t M, int64_t N, int64_t K, int threads)
      : a_(product.a), b_(product.b), M_(M), N_(N), K_(K), threads_(threads) {
    // equal tasks per thread
    const int64_t tasks = round_up(ceil_div(N, kTask / max<int64_t>(1, M)), threads);
    width_ = round_up(ceil_div(N, tasks), kWide);
    row_ = width_ / kLine % 2 ? width_ : width_ + kLine;  // rows in other sets of L1
  }

  // Same interface as Matmul::run.
  template <class Epilogue>
  void run(const Epilogue& epilogue) const {
    const int64_t units = ceil_div(K_, T::pack), size = M_ * row_;
    for_each_task(ceil_div(N_, width_), threads_, [&](int64_t task) {
      const FlushSubnormals flush;
      const int64_t n0 = task * width_, cols = min(width_, N_ - n0);
      local_arena.reset(2 * Arena::bytes_for<acc>(size) + 2 * Arena::bytes_for<packed>(M_ * units));
      epilogue_arena.reset(epilogue.scratch_bytes());
      packed *rows = local_arena.take<packed>(M_ * units),
             *a = local_arena.take<packed>(M_ * units);
      acc *sums = local_arena.take<acc>(size), *part = local_arena.take<acc>(size);
      copy_rows<T>(a_.data, a_.stride, M_, M_, K_, rows);
      multiply(b_.data + n0, cols, rows, units, a, sums, part);
      for (int64_t n = 0; n < cols; n += kWide) {
        acc* tile[1] = {sums + n};
        epilogue(tile, row_, 0, M_, n0 + n, min(kWide, cols - n), epilogue_arena);
      }
    });
  }

 private:
  // sums = A times `cols` columns of B. a and part: scratch.
  void multiply(const elem* b, int64_t cols, const packed* rows, int64_t units, packed* a,
                acc* sums, acc* part) const {
    for (int64_t j = 0; j < M_ * row_; j += T::width) store(sums + j, vec{});
    const auto include = [&] {
      for (int64_t m = 0; m < M_; m++)
        for (int64_t j = m * row_; j < m * row_ + cols; j += T::width)
          store(sums + j, load(sums + j) + load(part + j));
    };
    const int64_t run = units / kStreams, whole = K_ % T::pack ? max<int64_t>(0, run - 1) : run;
    // a pass reads its elements of A in order: at their places, they would share sets of L1
    for (int64_t u = 0; u < whole; u++)
      for (int64_t m = 0; m < M_; m++)
        for (int64_t s = 0; s < kStreams; s++)
          a[(u * M_ + m) * kStreams + s] = rows[m * units + s * run + u];
    for (int64_t u = 0; u < whole; u++) {
      add<kStreams>(b, u, run, cols, a + u * M_ * kStreams, kStreams, part, u % kPasses == 0);
      if (u % kPasses == kPasses - 1 || u + 1 == whole) include();
    }
    // the rows that are left of each stream, then those past the streams
    bool first = true;
    const auto one = [&](int64_t u) {
      add<1>(b, u, 0, cols, rows + u, units, part, first), first = false;
    };
    for (int64_t s = 0; s < kStreams; s++)
      for (int64_t u = whole; u < run; u++) one(s * run + u);
    for (int64_t u = kStreams * run; u < units; u++) one(u);
    if (!first) include();
  }

  // part = (first) or += the products of packed elements u, u + run, ... of k, in A a[m * a_row].
  template <int UNITS>
  INLINE void add(const elem* b, int64_t u, int64_t run, int64_t cols, const packed* a,
                  int64_t a_row, acc* part, bool first) const {
    constexpr int64_t kAhead = 512 / int64_t(sizeof(elem));
    const int64_t stream = run * T::pack * b_.stride;
    b += u * T::pack * b_.stride;
    const bool odd_row = T::pack == 1 || u * T::pack + 1 < K_;
    for (int64_t j = 0; j < cols; j += kStep) {
      // at the end of a row, prefetch the stream's next one
      const int64_t ahead = j + kAhead < cols ? kAhead : T::pack * b_.stride - cols + kAhead;
      uvec column[UNITS][T::pack];
      UNROLL for (int s = 0; s < UNITS; s++) {
        const elem* at = b + s * stream + j;
        column[s][0] = T::load_units(at, cols - j);
        if constexpr (T::pack == 2) {
          const uvec odd = odd_row ? T::load_units(at + b_.stride, cols - j) : uvec{};
          interleave(column[s][0], odd, &column[s][0], &column[s][1]);
        }
        UNROLL for (int i = 0; i < T::pack; i++)
            __builtin_prefetch(at + ahead + i * b_.stride, 0, 2);
      }
      for (int64_t m = 0; m < M_; m++) {
        acc* to = part + m * row_ + j;
        vec sum[T::pack] = {};
        UNROLL for (int s = 0; s < UNITS; s++) {
          const uvec row = Dot::broadcast(a + m * a_row + s);
          UNROLL for (int i = 0; i < T::pack; i++) sum[i] = Dot::dot(sum[i], row, column[s][i]);
        }
        UNROLL for (int i = 0; i < T::pack; i++)
            store(to + i * T::width, first ? sum[i] : load(to + i * T::width) + sum[i]);
      }
    }
  }

  Operand<T> a_, b_;
  int64_t M_, N_, K_, width_, row_;
  int threads_;
};

}  // namespace PT_ISA
}  // namespace pt
