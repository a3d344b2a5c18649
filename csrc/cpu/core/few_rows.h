// SPDX-License-Identifier: Apache-2.0
// Products with few rows of A, as in a step of decoding: B, the weights, is all that takes time, and is read once, where it lies.
//
// The micro-kernel of matmul.h would pack or transpose A and B for 24 accumulators that few rows cannot fill. Here each element of C
// is a dot product along k of a row of A and a row of B, both contiguous: a vector of partial sums, added up every kChunk vectors. The
// order of a sum depends on K alone.
#pragma once

#include "cpu/core/matmul.h"

namespace pt {
namespace PT_ISA {

// Rows of A up to which this is faster than Matmul; measured from memory (docs/decisions/0137-few-rows.md).
constexpr int64_t kFewRows = 8;

// The products of vectors; those of tiles (AMX) are of matrices.
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
  static constexpr int64_t kWide = kPanel<T>, kStep = T::width * T::pack;  // elements of k in a vector
  static constexpr int kColumns = 4;                                       // rows of B at a time: they stay in L1 while rows of A pass
  static constexpr int kGroup = max(1, T::width / kColumns);               // rows of A at a time: as many sums as a vector has lanes
  static constexpr int64_t kChunk = 64 * kStep;  // 64 vectors: 4 rows of B take 16 KB, and no lane sums more than 64 numbers in a row

 public:
  // Whether it is for this product: A and B lie with k along their rows.
  static bool pays(const Product<T> (&products)[PRODUCTS], int64_t M) {
    for (const Product<T>& p : products)
      if (p.a.along_k || p.b.along_k || p.b.live) return false;
    return M <= kFewRows;
  }
  FewRows(const Product<T> (&products)[PRODUCTS], int64_t M, int64_t N, int64_t K, int threads) : M_(M), N_(N), K_(K), threads_(threads) {
    for (int i = 0; i < PRODUCTS; i++) p_[i] = products[i];
  }

  // As Matmul's.
  template <class Epilogue>
  void run(const Epilogue& epilogue) const {
    for_each_task(ceil_div(N_, kWide), threads_, [&](int64_t task) {
      const FlushSubnormals flush;
      const int64_t n0 = task * kWide, cols = min(kWide, N_ - n0);
      local_arena.reset(tile_bytes());
      epilogue_arena.reset(epilogue.scratch_bytes());
      acc* tiles[PRODUCTS];
      for (int i = 0; i < PRODUCTS; i++) {
        tiles[i] = local_arena.take<acc>(M_ * kWide);
        for (int64_t j = 0; j < M_ * kWide; j += T::width) store(tiles[i] + j, vec{});
        for (int64_t n = 0; n < cols; n += kColumns) columns(p_[i], n0 + n, tiles[i] + n);
      }
      epilogue(tiles, kWide, 0, M_, n0, cols, epilogue_arena);
    });
  }
  template <class Epilogue>
  Scratch scratch(const Epilogue& epilogue) const {
    Scratch s;
    s.local = tile_bytes(), s.epilogue = epilogue.scratch_bytes();
    return s;
  }

 private:
  size_t tile_bytes() const { return PRODUCTS * Arena::bytes_for<acc>(M_ * kWide); }

  // kColumns columns of C from n on, all rows. Past the last column the last one is computed again, into the tile's padding.
  INLINE void columns(const Product<T>& p, int64_t n, acc* tile) const {
    const elem* b[kColumns];
    UNROLL for (int c = 0; c < kColumns; c++) b[c] = p.b.data + min(n + c, N_ - 1) * p.b.stride;
    for (int64_t k = 0; k < K_; k += kChunk) {
      const int64_t depth = min(kChunk, K_ - k);
      int64_t m = 0;
      if (M_ >= kGroup) dots<kGroup, true>(p, b, k, depth, 0, tile), m = kGroup;
      else dots<1, true>(p, b, k, depth, 0, tile), m = 1;
      for (; m + kGroup <= M_; m += kGroup) dots<kGroup, false>(p, b, k, depth, m, tile);
      for (; m < M_; m++) dots<1, false>(p, b, k, depth, m, tile);
    }
  }

  // tile[m + r][c] += the product of `depth` elements from k on. FIRST: b comes from memory, so the next rows of it are asked for.
  template <int ROWS, bool FIRST>
  INLINE void dots(const Product<T>& p, const elem* const* b, int64_t k, int64_t depth, int64_t m, acc* tile) const {
    constexpr int kSums = ROWS * kColumns, kPadded = (kSums + T::width - 1) / T::width * T::width;
    vec sums[kPadded] = {};
    const elem* a = p.a.data + m * p.a.stride + k;
    const auto step = [&](int64_t j, int64_t n) __attribute__((always_inline)) {
      typename T::uvec row[ROWS];
      UNROLL for (int r = 0; r < ROWS; r++) row[r] = T::load_units(a + r * p.a.stride + j, n);
      UNROLL for (int c = 0; c < kColumns; c++) {
        if (FIRST) __builtin_prefetch(b[c] + k + j + kColumns * p.b.stride, 0, 2);
        const typename T::uvec column = T::load_units(b[c] + k + j, n);
        UNROLL for (int r = 0; r < ROWS; r++) sums[r * kColumns + c] = Dot::dot(sums[r * kColumns + c], row[r], column);
      }
    };
    int64_t j = 0;
    for (; j + kStep <= depth; j += kStep) step(j, kStep);
    if (j < depth) step(j, depth - j);
    alignas(kVecBytes) acc total[kPadded];
    for (int s = 0; s < kPadded; s += T::width) store(total + s, reduce_rows(sums + s, op_add));
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < kColumns; c++) tile[(m + r) * kWide + c] += total[r * kColumns + c];
  }

  Product<T> p_[PRODUCTS];
  int64_t M_, N_, K_;
  int threads_;
};

// visit(product, epilogue) with the product that is faster.
template <class T, int PRODUCTS, class Epilogue, class Visit>
void visit_product(const Product<T> (&products)[PRODUCTS], int64_t M, int64_t N, int64_t K, int threads, const Epilogue& epilogue,
                   const Visit& visit) {
  if (FewRows<T, PRODUCTS>::pays(products, M)) visit(FewRows<T, PRODUCTS>(products, M, N, K, threads), epilogue);
  else visit(Matmul<T, PRODUCTS, false>(products, M, N, K, threads), epilogue);
}

}  // namespace PT_ISA
}  // namespace pt
