// SPDX-License-Identifier: Apache-2.0
// Dropout keep bits: Philox-4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
// Key words: low and high half of the seed.
//
//   attention: counter = (key group, query, query head, batch)
//   columns of a norm or FFN: counter = (column group, row low, row high, tag)
//
// All indices are absolute, mod 2^32. Slot r is the low (r even) or high half of output word r / 2.
// A key is dropped if its slot is below the threshold. Sixteen groups are 128 keys.
//
// Key j -> group 4 * (j / 32) + (j % 8) / 2, slot 2 * ((j % 32) / 8) + j % 2
//   j =  0 -> group 0, slot 0        j =  8 -> group 0, slot 2
//   j =  1 -> group 0, slot 1        j = 33 -> group 4, slot 1
#pragma once

#include <cstring>

#include "cpu/core/traits.h"

namespace pt {
namespace PT_ISA {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u, kPhiloxW0 = 0x9E3779B9u,
                   kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 7;

#if defined(__AVX512F__)
// Eight states in the low halves of 64-bit lanes: vpmuludq returns both halves of a product at
// once.
struct PhiloxState {
  __m512i c0, c1, c2, c3;
};
INLINE void philox_round(PhiloxState& s, uint32_t k0, uint32_t k1) {
  const __m512i a = _mm512_mul_epu32(s.c0, _mm512_set1_epi64(kPhiloxM0)),
                b = _mm512_mul_epu32(s.c2, _mm512_set1_epi64(kPhiloxM1));
  s.c0 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(b, 32), s.c1, _mm512_set1_epi64(k0), 0x96);
  s.c2 = _mm512_ternarylogic_epi64(_mm512_srli_epi64(a, 32), s.c3, _mm512_set1_epi64(k1), 0x96);
  s.c1 = b, s.c3 = a;
}
#endif

// Keep bits of many rows over one range of keys. The rows share counter words 2 and 3.
class KeepBits {
 public:
  // Words written by row() for n keys from any start, including a spare word for bits_at().
  static constexpr int64_t words(int64_t n) { return (n + 127 + 127) / 128 * 4 + 1; }
  static constexpr int64_t table_bytes(int64_t n) { return (n + 127 + 127) / 128 * 512; }

  // Prepare absolute keys [first, first + n), n >= 0. table: table_bytes(n) bytes, 64-byte aligned,
  // valid until the last row().
  void prepare(uint64_t seed, uint32_t threshold, uint32_t word2, uint32_t word3, int64_t first,
               int64_t n, void* table) {
    k0_ = uint32_t(seed), k1_ = uint32_t(seed >> 32), threshold_ = threshold, word2_ = word2,
    word3_ = word3;
    group_ = uint32_t(uint64_t(first) / 128 * 16);
    offset_ = int(first % 128);
    steps_ = (offset_ + n + 127) / 128;
#if defined(__AVX512F__)
    // Precompute the part of rounds 1 to 3 that depends only on the group. The row adds one scalar
    // product.
    table_ = static_cast<Group*>(table);
    const __m512i lanes = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7),
                  low = _mm512_set1_epi64(0xffffffff);
    const uint32_t b1 = kPhiloxM1 * word2_;
    const auto word = [](uint32_t x) { return _mm512_set1_epi64(x); };
    const auto high = [](__m512i x) { return _mm512_srli_epi64(x, 32); };
    for (int64_t i = 0; i < 2 * steps_; i++) {
      const __m512i g =
          _mm512_and_si512(_mm512_add_epi64(word(group_ + uint32_t(8 * i)), lanes), low);
      const __m512i a1 = _mm512_mul_epu32(g, word(kPhiloxM0));
      const __m512i b2 =
          _mm512_mul_epu32(_mm512_xor_si512(high(a1), word(word3_ ^ k1_)), word(kPhiloxM1));
      const __m512i a3 = _mm512_mul_epu32(_mm512_xor_si512(high(b2), word(b1 ^ (k0_ + kPhiloxW0))),
                                          word(kPhiloxM0));
      table_[i] = {_mm512_xor_si512(a1, word(k1_ + kPhiloxW1)),
                   _mm512_xor_si512(b2, word(k0_ + 2 * kPhiloxW0)), a3,
                   _mm512_xor_si512(high(a3), word(k1_ + 2 * kPhiloxW1))};
    }
#else
    (void)table;
#endif
  }

  // Write bit p for key first - offset() + p of the row with counter word 1: bits_at(out, offset()
  // + i) starts at key first + i.
  void row(uint32_t word1, uint32_t* out) const {
#if defined(__AVX512F__)
    const uint64_t a2 = uint64_t(kPhiloxM0) *
                        uint32_t(uint32_t((uint64_t(kPhiloxM1) * word2_) >> 32) ^ word1 ^ k0_);
    const __m512i low_words =
                      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                  th = _mm512_set1_epi16(int16_t(threshold_));
    for (int64_t i = 0; i < steps_; i++, out += 4) {
      const PhiloxState x = join(table_[2 * i], a2), y = join(table_[2 * i + 1], a2);
      const auto keep = [&](__m512i p, __m512i q) {
        return int(_mm512_cmpge_epu16_mask(_mm512_permutex2var_epi32(p, low_words, q), th));
      };
      const __m128i words =
          _mm_setr_epi32(keep(x.c0, y.c0), keep(x.c1, y.c1), keep(x.c2, y.c2), keep(x.c3, y.c3));
      // Transpose 4 x 4 bytes: byte b of word t holds keys 32 b + 8 t to 32 b + 8 t + 7.
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                       _mm_shuffle_epi8(words, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14,
                                                             3, 7, 11, 15)));
    }
#else
    for (int64_t i = 0; i < steps_; i++, out += 4) step128(uint32_t(group_ + 16 * i), word1, out);
#endif
  }

  int offset() const { return offset_; }

 private:
#if defined(__AVX512F__)
  struct Group {
    __m512i x, y, low, high;
  };
  INLINE PhiloxState join(const Group& g, uint64_t a2) const {
    const __m512i b = _mm512_mul_epu32(_mm512_xor_si512(g.x, _mm512_set1_epi64(a2 >> 32)),
                                       _mm512_set1_epi64(kPhiloxM1));
    PhiloxState s{_mm512_xor_si512(_mm512_srli_epi64(b, 32), g.y), b,
                  _mm512_xor_si512(g.high, _mm512_set1_epi64(uint32_t(a2))), g.low};
    UNROLL for (int r = 3; r < kPhiloxRounds; r++)
        philox_round(s, k0_ + r * kPhiloxW0, k1_ + r * kPhiloxW1);
    return s;
  }
  Group* table_ = nullptr;
#else
  void step128(uint32_t group, uint32_t word1, uint32_t* out) const {
    uint32_t c[4][16];
    for (int i = 0; i < 16; i++)
      c[0][i] = group + i, c[1][i] = word1, c[2][i] = word2_, c[3][i] = word3_;
    for (int r = 0; r < kPhiloxRounds; r++)
      for (int i = 0; i < 16; i++) {
        const uint64_t a = uint64_t(kPhiloxM0) * c[0][i], b = uint64_t(kPhiloxM1) * c[2][i];
        c[0][i] = uint32_t(b >> 32) ^ c[1][i] ^ (k0_ + r * kPhiloxW0),
        c[2][i] = uint32_t(a >> 32) ^ c[3][i] ^ (k1_ + r * kPhiloxW1);
        c[1][i] = uint32_t(b), c[3][i] = uint32_t(a);
      }
    for (int b = 0; b < 4; b++) {
      uint32_t bits = 0;
      for (int t = 0; t < 4; t++)
        for (int m = 0; m < 4; m++) {
          const uint32_t w = c[t][4 * b + m];
          bits |= uint32_t((w & 0xffff) >= threshold_) << (8 * t + 2 * m) |
                  uint32_t((w >> 16) >= threshold_) << (8 * t + 2 * m + 1);
        }
      out[b] = bits;
    }
  }
#endif
  uint32_t k0_ = 0, k1_ = 0, threshold_ = 0, word2_ = 0, word3_ = 0, group_ = 0;
  int offset_ = 0;
  int64_t steps_ = 0;
};

// Return 16 bits from position `at` of a bit row. The row ends with a spare word.
INLINE mask bits_at(const uint32_t* bits, int64_t at) {
  uint32_t x;
  std::memcpy(&x, reinterpret_cast<const char*>(bits) + (at >> 3), sizeof x);
  return mask(x >> (at & 7));
}

}  // namespace PT_ISA
}  // namespace pt
