// SPDX-License-Identifier: Apache-2.0
// Gemms with few rows of A, as in decoding: reading B, the weights, takes all the time. B is read
// once, in place.
//
// matmul.h would pack or transpose A and B for 24 accumulators that few rows cannot fill. Here each
// element of C is a dot product along k of a contiguous row of A and a contiguous row of B: a
// vector of partial sums, reduced every kChunk elements. The summation order depends only on K.
#pragma once

#include <cstring>

#include "cpu/core/matmul.h"
#include "cpu/core/rows_in_lanes.h"

namespace pt {
namespace PT_ISA {

// Max rows of A for which this beats Matmul, measured from memory
// (docs/design/numerics.md#products-of-our-own-on-the-cpu).
constexpr int64_t kFewRows = 8;

// Dot product on vectors. AMX tiles only multiply matrices.
template <class T, class = void>
struct VectorDot {
  using Dot = typename T::Dot;
};
template <class T>
struct VectorDot<T, std::void_t<typename T::Pairs>> {
  using Dot = typename T::Pairs;
};

template <class T, int PRODUCTS>
class FewRows {
  using acc = typename T::acc;
  using elem = typename T::elem;
  using vec = typename T::vec;
  using Dot = typename VectorDot<T>::Dot;
  // kStep: elements of k per vector. kBlock: columns of C per task and stream.
  static constexpr int64_t kBlock = T::width, kStep = T::width * T::pack;
  // Rows of B per pass, from as many streams: B is cut into kStreams runs of rows, which are read
  // side by side, each in order. Four adjacent rows, each a short run, took 1.3 times as long from
  // memory (Zen 3). The rows remain in L1 while rows of A pass.
  static constexpr int kStreams = 4;
  // Rows of A per pass: as many sums as a vector has lanes.
  static constexpr int kGroup = max(1, T::width / kStreams);
  // 64 vectors: 4 rows of B take 16 KB, and no lane sums more than 64 numbers in a row.
  static constexpr int64_t kChunk = 64 * kStep;

 public:
  // Return true if the rows of A and B run along k and there are few rows.
  static bool pays(const Product<T> (&products)[PRODUCTS], int64_t M) {
    for (const Product<T>& p : products)
      if (p.a.along_k || p.b.along_k || p.b.live) return false;
    return M <= kFewRows;
  }
  FewRows(const Product<T> (&products)[PRODUCTS], int64_t M, int64_t N, int64_t K, int threads)
      : M_(M), N_(N), K_(K), threads_(threads) {
    for (int i = 0; i < PRODUCTS; i++) p_[i] = products[i];
  }

  // Same interface as Matmul::run.
  template <class Epilogue>
  void run(const Epilogue& epilogue) const {
    const int64_t run = round_up(ceil_div(N_, kStreams), kBlock);
    for_each_task(run / kBlock, threads_, [&](int64_t task) {
      const FlushSubnormals flush;
      const int64_t n0 = task * kBlock, count = min(kBlock, N_ - n0), size = M_ * kBlock;
      local_arena.reset(tile_bytes());
      epilogue_arena.reset(epilogue.scratch_bytes());
      elem* rows = local_arena.take<elem>(M_ * round_up(K_, kChunk));
      acc* tiles[PRODUCTS];  // of each stream: (M, kBlock)
      for (int i = 0; i < PRODUCTS; i++) {
        tiles[i] = local_arena.take<acc>(kStreams * size);
        for (int64_t j = 0; j < kStreams * size; j += T::width) store(tiles[i] + j, vec{});
        // constant row distance of A: one register for all rows
        for (int64_t k = 0; k < K_; k += kChunk)
          for (int64_t m = 0; m < M_; m++)
            memcpy(rows + k * M_ + m * kChunk, p_[i].a.data + m * p_[i].a.stride + k,
                   min(kChunk, K_ - k) * sizeof(elem));
        for (int64_t n = 0; n < count; n++)
          for (int64_t k = 0; k < K_; k += kChunk)
            columns(p_[i].b, n0 + n, run, k, min(kChunk, K_ - k), rows + k * M_, tiles[i] + n);
      }
      for (int64_t n = n0; n < N_; n += run) {
        epilogue(tiles, kBlock, 0, M_, n, min(kBlock, N_ - n), epilogue_arena);
        for (acc*& tile : tiles) tile += size;
      }
    });
  }
  template <class Epilogue>
  Scratch scratch(const Epilogue& epilogue) const {
    Scratch s;
    s.local = tile_bytes(), s.epilogue = epilogue.scratch_bytes();
    return s;
  }

 private:
  size_t tile_bytes() const {
    return PRODUCTS * Arena::bytes_for<acc>(kStreams * M_ * kBlock) +
           Arena::bytes_for<elem>(M_ * round_up(K_, kChunk));
  }

  // Compute columns n, n + run, ... of C, all rows, over `depth` elements from k. A stream past the
  // last column recomputes that column into its tile's padding.
  INLINE void columns(const Operand<T>& b, int64_t n, int64_t run, int64_t k, int64_t depth,
                      const elem* a, acc* tile) const {
    const elem* from[kStreams];
    UNROLL for (int c = 0; c < kStreams; c++) from[c] =
        b.data + min(n + c * run, N_ - 1) * b.stride + k;
    int64_t m = 0;
    if (M_ >= kGroup) dots<kGroup, true>(a, from, depth, tile), m = kGroup;
    else dots<1, true>(a, from, depth, tile), m = 1;
    for (; m + kGroup <= M_; m += kGroup)
      dots<kGroup, false>(a + m * kChunk, from, depth, tile + m * kBlock);
    for (; m < M_; m++) dots<1, false>(a + m * kChunk, from, depth, tile + m * kBlock);
  }

  // tile[c][r] += dot products over `depth` elements. FIRST: b comes from memory, so prefetch.
  template <int ROWS, bool FIRST>
  INLINE void dots(const elem* a, const elem* const* b, int64_t depth, acc* tile) const {
    constexpr int kSums = ROWS * kStreams, kPadded = (kSums + T::width - 1) / T::width * T::width;
    constexpr int64_t kAhead = 512 / int64_t(sizeof(elem));
    vec sums[kSums] = {};
    static_assert(kStreams == 4,
                  "named one by one: of an array GCC 12 keeps neither pointers nor sums in "
                  "registers, 20 GB/s instead of 29");
    const elem *b0 = b[0], *b1 = b[1], *b2 = b[2], *b3 = b[3];
    const auto step = [&](int64_t j, int64_t n) __attribute__((always_inline)) {
      typename T::uvec column[kStreams] = {T::load_units(b0 + j, n), T::load_units(b1 + j, n),
                                           T::load_units(b2 + j, n), T::load_units(b3 + j, n)};
      if (FIRST) {
        __builtin_prefetch(b0 + kAhead + j, 0, 2), __builtin_prefetch(b1 + kAhead + j, 0, 2);
        __builtin_prefetch(b2 + kAhead + j, 0, 2), __builtin_prefetch(b3 + kAhead + j, 0, 2);
      }
      UNROLL for (int r = 0; r < ROWS; r++) {
        const typename T::uvec row = T::load_units(a + r * kChunk + j, n);
        UNROLL for (int c = 0; c < kStreams; c++) sums[r * kStreams + c] =
            Dot::dot(sums[r * kStreams + c], row, column[c]);
      }
    };
    int64_t j = 0;
    for (; j + kStep <= depth; j += kStep) step(j, kStep);
    if (j < depth) step(j, depth - j);
    vec rest[kPadded] = {};
    UNROLL for (int s = 0; s < kSums; s++) rest[s] = sums[s];
    alignas(kVecBytes) acc total[kPadded];
    UNROLL for (int s = 0; s < kPadded; s += T::width)
        store(total + s, reduce_rows(rest + s, op_add));
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < kStreams; c++) tile[(c * M_ + r) * kBlock] += total[r * kStreams + c];
  }

  Product<T> p_[PRODUCTS];
  int64_t M_, N_, K_;
  int threads_;
};

// Call visit(gemm, epilogue) with the faster gemm.
template <class T, int PRODUCTS, class Epilogue, class Visit>
void visit_product(const Product<T> (&products)[PRODUCTS], int64_t M, int64_t N, int64_t K,
                   int threads, const Epilogue& epilogue, const Visit& visit) {
  // Rows in lanes would take 0.7 of the time from 5 rows on, but up to 8 rows keep the bits that
  // they have alone, as in decoding.
  if (FewRows<T, PRODUCTS>::pays(products, M))
    return visit(FewRows<T, PRODUCTS>(products, M, N, K, threads), epilogue);
  if constexpr (RowsInLanes<T, PRODUCTS>::kSupported)
    if (RowsInLanes<T, PRODUCTS>::pays(products, M, K))
      return visit(RowsInLanes<T, PRODUCTS>(products, M, N, K, threads), epilogue);
  visit(Matmul<T, PRODUCTS, false>(products, M, N, K, threads), epilogue);
}

}  // namespace PT_ISA
}  // namespace pt
