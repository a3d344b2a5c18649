// SPDX-License-Identifier: Apache-2.0
// Gemms with few rows of A and a B whose rows run along columns (y = x W, W of shape (k, n)). B,
// the weights, is read once, in order.
//
// kDeep rows of B pass together. Each of their vectors is multiplied by an element of every row of
// A and added to sums that remain in L1. Nothing is packed, transposed or added across lanes. The
// summation order depends only on K.
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
  static constexpr int64_t kStep = T::width * T::pack;  // columns per step: one vector of each row
  static constexpr int64_t kWide = kPanel<T>;           // columns per epilogue call
  // max columns per task: runs of 4 KB were 10 to 20 % slower
  static constexpr int64_t kTask = 1024 / sizeof(elem);
  // Elements of k per chunk: sums of kDeep terms, kChunk / kDeep of those, then one per chunk.
  static constexpr int64_t kChunk = 256;
  static constexpr int64_t kUnits = kChunk / T::pack;  // packed elements per row of A and chunk

 public:
  static bool pays(const Product<T>& p, int64_t M) {
    return p.b.along_k && !p.a.along_k && !p.b.live && M <= kFewRows;
  }
  FewRowsAlongK(const Product<T>& product, int64_t M, int64_t N, int64_t K, int threads)
      : a_(product.a), b_(product.b), M_(M), N_(N), K_(K), threads_(threads) {
    const int64_t tasks = round_up(ceil_div(N, kTask), threads);  // equal tasks per thread
    width_ = round_up(ceil_div(N, tasks), kWide);
  }

  // Same interface as Matmul::run.
  template <class Epilogue>
  void run(const Epilogue& epilogue) const {
    for_each_task(ceil_div(N_, width_), threads_, [&](int64_t task) {
      const FlushSubnormals flush;
      const int64_t n0 = task * width_, cols = min(width_, N_ - n0);
      local_arena.reset(2 * Arena::bytes_for<acc>(M_ * width_) +
                        Arena::bytes_for<packed>(M_ * kUnits));
      epilogue_arena.reset(epilogue.scratch_bytes());
      packed* a = local_arena.take<packed>(M_ * kUnits);
      acc *sums = local_arena.take<acc>(M_ * width_), *part = local_arena.take<acc>(M_ * width_);
      for (int64_t j = 0; j < M_ * width_; j += T::width) store(sums + j, vec{});
      for (int64_t k = 0; k < K_; k += kChunk) {
        const int64_t depth = min(kChunk, K_ - k);
        copy_rows<T>(a_.data + k, a_.stride, M_, M_, depth, a, nullptr, kUnits);
        multiply(b_.data + k * b_.stride + n0, cols, depth, a, part);
        for (int64_t m = 0; m < M_; m++)
          for (int64_t j = m * width_; j < m * width_ + cols; j += T::width)
            store(sums + j, load(sums + j) + load(part + j));
      }
      for (int64_t n = 0; n < cols; n += kWide) {
        acc* tile[1] = {sums + n};
        epilogue(tile, width_, 0, M_, n0 + n, min(kWide, cols - n), epilogue_arena);
      }
    });
  }

 private:
  // part = gemm over `depth` elements of k.
  void multiply(const elem* b, int64_t cols, int64_t depth, const packed* a, acc* part) const {
    int64_t k = 0;
    for (; k + kDeep <= depth; k += kDeep)
      add<kDeep / T::pack>(b + k * b_.stride, kDeep, cols, a + k / T::pack, part, k == 0);
    for (; k < depth; k += T::pack)
      add<1>(b + k * b_.stride, depth - k, cols, a + k / T::pack, part, k == 0);
  }

  // part = (first) or += gemm over UNITS packed elements of k; b has `depth` of their rows.
  template <int UNITS>
  INLINE void add(const elem* b, int64_t depth, int64_t cols, const packed* a, acc* part,
                  bool first) const {
    for (int64_t j = 0; j < cols; j += kStep) {
      uvec column[UNITS][T::pack];
      UNROLL for (int u = 0; u < UNITS; u++) {
        const elem* at = b + u * T::pack * b_.stride + j;
        column[u][0] = T::load_units(at, cols - j);
        if constexpr (T::pack == 2) {
          const uvec odd = depth > 1 ? T::load_units(at + b_.stride, cols - j) : uvec{};
          interleave(column[u][0], odd, &column[u][0], &column[u][1]);
        }
        UNROLL for (int i = 0; i < T::pack; i++)
            // half the rate without it
            __builtin_prefetch(at + (UNITS * T::pack + i) * b_.stride, 0, 3);
      }
      for (int64_t m = 0; m < M_; m++) {
        acc* to = part + m * width_ + j;
        vec sum[T::pack] = {};
        UNROLL for (int u = 0; u < UNITS; u++) {
          const uvec row = Dot::broadcast(a + m * kUnits + u);
          UNROLL for (int i = 0; i < T::pack; i++) sum[i] = Dot::dot(sum[i], row, column[u][i]);
        }
        UNROLL for (int i = 0; i < T::pack; i++)
            store(to + i * T::width, first ? sum[i] : load(to + i * T::width) + sum[i]);
      }
    }
  }

  Operand<T> a_, b_;
  int64_t M_, N_, K_, width_;
  int threads_;
};

}  // namespace PT_ISA
}  // namespace pt
