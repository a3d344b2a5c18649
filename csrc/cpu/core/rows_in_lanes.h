// SPDX-License-Identifier: Apache-2.0
// float32 gemms with 9 to 40 rows of A on 256-bit vectors, as for a search query. B, the weights,
// is read once from memory, in place.
//
// Matmul puts rows of A into the lanes of panels: 12 rows fill 12 of 16 lanes, 20 rows 20 of 32.
// Here a vector holds two neighbors along k of four rows, and B is broadcast in pairs, so that a
// group of 12 rows fills three vectors. Nothing of B is packed. The summation order depends only on
// K.
#pragma once

#include "cpu/core/matmul.h"

namespace pt {
namespace PT_ISA {

template <class T, int PRODUCTS>
class RowsInLanes {
  using acc = typename T::acc;
  using vec = typename T::vec;
  static constexpr bool kSupported = std::is_same_v<typename T::elem, float> && kVecBytes == 32;
  static constexpr int kRowsPerVec = T::width / 2;
  // Columns of C per task and stream. Streams as in FewRows.
  static constexpr int kBlock = T::width, kStreams = 4;
  // Vectors of a group of rows: kStreams * kGroup sums + kGroup of A + 1 of B.
  static constexpr int kGroup = 3;
  // Pairs per partial sum, as in matmul_sizes.h.
  static constexpr int64_t kPairs = 192;

 public:
  static bool pays(const Product<T> (&products)[PRODUCTS], int64_t M, int64_t K) {
    // Above 12 rows in its last panel, Matmul fills its lanes, and above 40 rows the last panel
    // hardly counts (Zen 3). A must remain in L2, because all of it is read per column.
    const int64_t last = M % kPanel<T>;
    const bool faster =
        M <= 40 && last >= 1 && last <= 12 && M * K * int64_t(sizeof(acc)) <= cached_bytes();
    if (!kSupported || !faster || K % 2) return false;
    for (const Product<T>& p : products)
      if (p.a.along_k || p.b.along_k || p.b.live || p.a.stride % 2) return false;
    return true;
  }
  RowsInLanes(const Product<T> (&products)[PRODUCTS], int64_t M, int64_t N, int64_t K, int threads)
      : M_(M), N_(N), pairs_(K / 2), vecs_(ceil_div(M, kRowsPerVec)), threads_(threads) {
    for (int i = 0; i < PRODUCTS; i++) p_[i] = products[i];
  }

  // Same interface as Matmul::run.
  template <class Epilogue>
  void run(const Epilogue& epilogue) const {
    packed_arena.reset(packed_bytes());
    const double* rows[PRODUCTS];
    for (int i = 0; i < PRODUCTS; i++) {
      double* const to = packed_arena.take<double>(pairs_ * vecs_ * kRowsPerVec);
      for (int64_t v = 0; v < vecs_; v += kGroup)
        pack_transposed<Double>(
            reinterpret_cast<const double*>(p_[i].a.data + v * kRowsPerVec * p_[i].a.stride),
            p_[i].a.stride / 2, M_ - v * kRowsPerVec, pairs_, to + v * kRowsPerVec * pairs_,
            nullptr, min<int64_t>(kGroup, vecs_ - v) * kRowsPerVec);
      rows[i] = to;
    }
    const int64_t run = round_up(ceil_div(N_, kStreams), kBlock);
    for_each_task(run / kBlock, threads_, [&](int64_t task) {
      const FlushSubnormals flush;
      const int64_t n0 = task * kBlock;
      local_arena.reset(tile_bytes());
      epilogue_arena.reset(epilogue.scratch_bytes());
      acc* sums = local_arena.take<acc>(sums_size());
      acc* tiles[PRODUCTS];  // of each stream: rows of kBlock columns
      for (int i = 0; i < PRODUCTS; i++) {
        tiles[i] = local_arena.take<acc>(tile_size() * kStreams);
        for (int64_t n = 0; n < kBlock; n++) columns(p_[i].b, n0 + n, run, rows[i], sums, n);
        for (int64_t v = 0; v < kStreams * vecs_; v++)
          add_pairs(sums + v * kBlock * T::width, tiles[i] + v * kRowsPerVec * kBlock);
      }
      for (int64_t n = n0; n < N_; n += run) {
        epilogue(tiles, kBlock, 0, M_, n, min<int64_t>(kBlock, N_ - n), epilogue_arena);
        for (acc*& tile : tiles) tile += tile_size();
      }
    });
  }
  template <class Epilogue>
  Scratch scratch(const Epilogue& epilogue) const {
    Scratch s;
    s.packed_for_all = packed_bytes(), s.local = tile_bytes();
    s.epilogue = epilogue.scratch_bytes();
    return s;
  }

 private:
  int64_t tile_size() const { return vecs_ * kRowsPerVec * kBlock; }
  int64_t sums_size() const { return kStreams * vecs_ * kBlock * T::width; }
  size_t tile_bytes() const {
    return Arena::bytes_for<acc>(sums_size()) +
           PRODUCTS * Arena::bytes_for<acc>(tile_size() * kStreams);
  }
  size_t packed_bytes() const {
    return PRODUCTS * Arena::bytes_for<double>(pairs_ * vecs_ * kRowsPerVec);
  }

  // Compute column n of each stream, all rows: sums[stream][vector][column][lane]. A stream past
  // the last column recomputes that column.
  INLINE void columns(const Operand<T>& b, int64_t n, int64_t run, const double* a, acc* sums,
                      int64_t column) const {
    const double* from[kStreams];
    UNROLL for (int c = 0; c < kStreams; c++) from[c] =
        reinterpret_cast<const double*>(b.data + min(n + c * run, N_ - 1) * b.stride);
    for (int64_t v = 0; v < vecs_; v += kGroup, a += pairs_ * kGroup * kRowsPerVec) {
      acc* const to = sums + (v * kBlock + column) * T::width;
      const int64_t count = vecs_ - v;
      if (count >= 3) dots<3>(a, from, to);
      else if (count == 2) dots<2>(a, from, to);
      else dots<1>(a, from, to);
    }
  }

  template <int VECS>
  INLINE void dots(const double* a, const double* const* b, acc* to) const {
    constexpr int64_t kLine = 64 / int64_t(sizeof(double)), kAhead = 16 * kLine;
    typedef double pair __attribute__((may_alias));
    const pair *b0 = b[0], *b1 = b[1], *b2 = b[2], *b3 = b[3];  // in registers, as in FewRows
    for (int64_t u = 0; u < pairs_; u += kPairs) {
      vec sums[kStreams * VECS] = {};
      const auto step = [&](int64_t j) __attribute__((always_inline)) {
        vec rows[VECS];
        UNROLL for (int v = 0; v < VECS; v++) rows[v] = (vec)load(a + (j * VECS + v) * kRowsPerVec);
        const auto one = [&](const pair* at, int c) __attribute__((always_inline)) {
          const vec both = (vec)set1<vd>(at[j]);
          UNROLL for (int v = 0; v < VECS; v++) sums[c * VECS + v] =
              fma(rows[v], both, sums[c * VECS + v]);
        };
        one(b0, 0), one(b1, 1), one(b2, 2), one(b3, 3);
      };
      const int64_t end = min(pairs_, u + kPairs);
      int64_t j = u;
      for (; j + kLine <= end; j += kLine) {
        __builtin_prefetch(b0 + j + kAhead, 0, 2), __builtin_prefetch(b1 + j + kAhead, 0, 2);
        __builtin_prefetch(b2 + j + kAhead, 0, 2), __builtin_prefetch(b3 + j + kAhead, 0, 2);
        UNROLL for (int i = 0; i < kLine; i++) step(j + i);
      }
      for (; j < end; j++) step(j);
      UNROLL for (int c = 0; c < kStreams; c++) UNROLL for (int v = 0; v < VECS; v++) {
        acc* const at = to + (c * vecs_ + v) * kBlock * T::width;
        const vec sum = sums[c * VECS + v];
        store(at, u ? load(at) + sum : sum);
      }
    }
  }

  // Turn kBlock columns of one vector, pairs of four rows, into four rows of kBlock columns.
  static INLINE void add_pairs(const acc* sums, acc* rows) {
    vec lanes[T::width];
    UNROLL for (int n = 0; n < kBlock; n++) lanes[n] = load(sums + n * T::width);
    transpose(lanes);
    UNROLL for (int r = 0; r < kRowsPerVec; r++)
        store(rows + r * kBlock, lanes[2 * r] + lanes[2 * r + 1]);
  }

  Product<T> p_[PRODUCTS];
  int64_t M_, N_, pairs_, vecs_;
  int threads_;
};

}  // namespace PT_ISA
}  // namespace pt
