// SPDX-License-Identifier: Apache-2.0
// Gemms with few rows of A, from 9 on, and vectors of 256 or 512 bits, as for a search query. B,
// the weights, is read once from memory, in place: float32, or bfloat16 where vectors multiply its
// pairs.
//
// Matmul puts rows of A into the lanes of panels: on 256 bits 12 rows fill 12 of 16 lanes, 20 rows
// 20 of 32; on 512 bits narrow panels also use a kernel without prefetch. Here a vector holds a
// unit of each of four rows: 2 or 4 packed elements along k. Units of B are broadcast, so that a
// group of 12 rows fills three vectors. Nothing of B is packed. The summation order depends only on
// K.
#pragma once

#include <cstring>

#include "cpu/core/matmul.h"

namespace pt {
namespace PT_ISA {

template <class T, int PRODUCTS>
class RowsInLanes {
  using acc = typename T::acc;
  using elem = typename T::elem;
  using packed = typename T::packed;
  using vec = typename T::vec;
  using uvec = typename T::uvec;
  using Dot = typename T::Dot;
  // kUnit in packed elements, kNumbers in numbers along k.
  static constexpr int kRowsPerVec = 4, kUnit = T::width / kRowsPerVec, kNumbers = kUnit * T::pack;
#if defined(__AVX512F__)
  typedef float Unit __attribute__((vector_size(16), may_alias, aligned(4)));
#else
  typedef double Unit __attribute__((may_alias, aligned(4)));
#endif
  // Columns of C per task and stream. Streams as in FewRows.
  static constexpr int kBlock = T::width, kStreams = 4;
  // Vectors of a group of rows: kStreams * kGroup sums + kGroup of A + 1 of B.
  static constexpr int kGroup = 3;
  // Above, Matmul's last panel hardly counts (Zen 3, Zen 4).
  static constexpr int64_t kMostRows = kVecBytes == 64 ? 80 : 40;
  // Units per partial sum, as in matmul_sizes.h.
  static constexpr int64_t kUnits = 192;

 public:
  static constexpr bool kSupported = kVecBytes >= 32 && kUnitStep<T> == 1 && sizeof(packed) == 4 &&
                                     std::is_same_v<elem, typename T::opnd>;

  static bool pays(const Product<T> (&products)[PRODUCTS], int64_t M, int64_t K) {
    // Matmul fills the lanes of a last panel of more rows. A must remain in L2, because all of it
    // is read per column.
    const int64_t last = M % kPanel<T>;
    if (M > kMostRows || !last || last > kPanel<T> / 4 * 3 || K % kNumbers ||
        M * K * int64_t(sizeof(elem)) > cached_bytes())
      return false;
    for (const Product<T>& p : products)
      if (p.a.along_k || p.b.along_k || p.b.live) return false;
    return true;
  }
  RowsInLanes(const Product<T> (&products)[PRODUCTS], int64_t M, int64_t N, int64_t K, int threads)
      : M_(M), N_(N), units_(K / kNumbers), vecs_(ceil_div(M, kRowsPerVec)), threads_(threads) {
    for (int i = 0; i < PRODUCTS; i++) p_[i] = products[i];
  }

  // Same interface as Matmul::run.
  template <class Epilogue>
  void run(const Epilogue& epilogue) const {
    packed_arena.reset(packed_bytes());
    const packed* rows[PRODUCTS];
    for (int i = 0; i < PRODUCTS; i++) {
      packed* const to = packed_arena.take<packed>(packed_size());
      for (int64_t v = 0; v < vecs_; v += kGroup) pack_group(p_[i].a, v, to);
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
          add_units(sums + v * kBlock * T::width, tiles[i] + v * kRowsPerVec * kBlock);
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
  int64_t packed_size() const { return units_ * vecs_ * T::width; }
  size_t packed_bytes() const { return PRODUCTS * Arena::bytes_for<packed>(packed_size()); }

  // Pack the group of vectors from v: per unit of k, a unit of each row; zeros past the last row.
  void pack_group(const Operand<T>& a, int64_t v, packed* to) const {
    const int64_t rows = min<int64_t>(kGroup, vecs_ - v) * kRowsPerVec;
    to += v * units_ * T::width;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t m = v * kRowsPerVec + r;
      for (int64_t u = 0; u < units_; u++) {
        packed* const unit = to + (u * rows + r) * kUnit;
        if (m < M_) memcpy(unit, a.data + m * a.stride + u * kNumbers, sizeof(Unit));
        else memset(unit, 0, sizeof(Unit));
      }
    }
  }

  // Compute column n of each stream, all rows: sums[stream][vector][column][lane]. A stream past
  // the last column recomputes that column.
  INLINE void columns(const Operand<T>& b, int64_t n, int64_t run, const packed* a, acc* sums,
                      int64_t column) const {
    const elem* from[kStreams];
    UNROLL for (int c = 0; c < kStreams; c++) from[c] =
        b.data + min(n + c * run, N_ - 1) * b.stride;
    for (int64_t v = 0; v < vecs_; v += kGroup, a += units_ * kGroup * T::width) {
      acc* const to = sums + (v * kBlock + column) * T::width;
      const int64_t count = vecs_ - v;
      if (count >= 3) dots<3>(a, from, to);
      else if (count == 2) dots<2>(a, from, to);
      else dots<1>(a, from, to);
    }
  }

  template <int VECS>
  INLINE void dots(const packed* a, const elem* const* b, acc* to) const {
    constexpr int64_t kTurn = 64 / sizeof(Unit), kAhead = 16 * kTurn;  // kTurn: of a cache line
    const elem *b0 = b[0], *b1 = b[1], *b2 = b[2], *b3 = b[3];  // in registers, as in FewRows
    for (int64_t u = 0; u < units_; u += kUnits) {
      vec sums[kStreams * VECS] = {};
      const auto step = [&](int64_t j) __attribute__((always_inline)) {
        uvec rows[VECS];
        UNROLL for (int v = 0; v < VECS; v++) rows[v] =
            *reinterpret_cast<const uvec*>(a + (j * VECS + v) * T::width);
        const auto one = [&](const elem* at, int c) __attribute__((always_inline)) {
          const uvec unit = broadcast(at + j * kNumbers);
          UNROLL for (int v = 0; v < VECS; v++) sums[c * VECS + v] =
              Dot::dot(sums[c * VECS + v], rows[v], unit);
        };
        one(b0, 0), one(b1, 1), one(b2, 2), one(b3, 3);
      };
      const int64_t end = min(units_, u + kUnits);
      int64_t j = u;
      for (; j + kTurn <= end; j += kTurn) {
        const int64_t ahead = (j + kAhead) * kNumbers;
        __builtin_prefetch(b0 + ahead, 0, 2), __builtin_prefetch(b1 + ahead, 0, 2);
        __builtin_prefetch(b2 + ahead, 0, 2), __builtin_prefetch(b3 + ahead, 0, 2);
        UNROLL for (int i = 0; i < kTurn; i++) step(j + i);
      }
      for (; j < end; j++) step(j);
      UNROLL for (int c = 0; c < kStreams; c++) UNROLL for (int v = 0; v < VECS; v++) {
        acc* const at = to + (c * vecs_ + v) * kBlock * T::width;
        const vec sum = sums[c * VECS + v];
        store(at, u ? load(at) + sum : sum);
      }
    }
  }

  static INLINE uvec broadcast(const elem* p) {
#if defined(__AVX512F__)
    return (uvec)_mm512_broadcast_f32x4(*reinterpret_cast<const Unit*>(p));
#else
    return (uvec)set1<vd>(*reinterpret_cast<const Unit*>(p));
#endif
  }

  // Turn kBlock columns of one vector, units of four rows, into four rows of kBlock columns.
  static INLINE void add_units(const acc* sums, acc* rows) {
    vec lanes[T::width];
    UNROLL for (int n = 0; n < kBlock; n++) lanes[n] = load(sums + n * T::width);
    transpose(lanes);
    UNROLL for (int r = 0; r < kRowsPerVec; r++) {
      vec sum = lanes[kUnit * r] + lanes[kUnit * r + 1];
      UNROLL for (int i = 2; i < kUnit; i += 2) sum +=
          lanes[kUnit * r + i] + lanes[kUnit * r + i + 1];
      store(rows + r * kBlock, sum);
    }
  }

  Product<T> p_[PRODUCTS];
  int64_t M_, N_, units_, vecs_;
  int threads_;
};

}  // namespace PT_ISA
}  // namespace pt
