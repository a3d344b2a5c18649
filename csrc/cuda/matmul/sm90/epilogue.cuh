// SPDX-License-Identifier: Apache-2.0
// Shared parts of epilogues: bias columns, and 16-byte stores of results.
#pragma once

#include "cuda/matmul/sm90/matmul.cuh"

namespace pt::cuda {

// columns at a time: the four lanes of a row write 64 bytes of it
constexpr int kStripColumns = 32;

// Index of a lane's accumulator for column 8 (c / 2) + 2 (lane % 4) + c % 2 of a strip in its row
// r.
PT_HOST_DEVICE constexpr int sum_at(int strip, int r, int c) {
  return 16 * strip + c / 2 * 4 + 2 * r + c % 2;
}

// A tile's biases (or zeros) of each product, per half, in a consumer's scratch from the tile's
// first gemms on.
template <int Products>
class TileBias {
 public:
  static constexpr int kColumns = kHalfColumns / Products;  // columns of a product per half
  static constexpr uint32_t kBytes = 2 * kHalfColumns * sizeof(float);

  // Called by an epilogue's begin(), in every thread of the consumer.
  static PT_DEVICE void bring(const Bias (&biases)[Products], const MatmulPlace& place) {
    static_assert(kHalfColumns == 128);  // one column per half and thread
    const int mine = int(threadIdx.x) % 128;
    const Bias& bias = biases[mine / kColumns];
    float v[2] = {};
    if (bias.data)
      with_type(bias.dtype, [&](auto t) {
        const auto* p = static_cast<const decltype(t)*>(bias.data);
        PT_UNROLL
        for (int h = 0; h < 2; ++h)
          if (const int64_t column = place.column + h * kColumns + mine % kColumns;
              column < place.columns)
            v[h] = load_one(p + column);
      });
    sync_consumer();  // the previous tile's biases have been read
    PT_UNROLL
    for (int h = 0; h < 2; ++h)
      ptx::st_shared_f32(place.scratch + 4 * uint32_t(h * kHalfColumns + mine), v[h]);
  }

  // Every thread of the consumer calls this.
  PT_DEVICE explicit TileBias(const MatmulPlace& place) {
    const int half = place.half;
    at_ = place.scratch + 4 * uint32_t(half * kHalfColumns);
    sync_consumer();
  }

  // Load the lane's eight columns of a strip: v[2 c + e] is column first(4 strip + c) + e.
  PT_DEVICE void load(float (&v)[8], int product, int strip) const {
    const int column = product * kColumns + strip * kStripColumns + 2 * (lane_id() % 4);
    PT_UNROLL
    for (int c = 0; c < 4; ++c)
      ptx::ld_shared_v2_f32(at_ + 4 * uint32_t(column + 8 * c), v[2 * c], v[2 * c + 1]);
  }

 private:
  uint32_t at_;
};

// Addresses of a lane's stores. After an exchange in the quad, a lane has eight consecutive columns
// of each row of a strip. Computed once per half tile.
template <class T>
class StripRows {
 public:
  PT_DEVICE StripRows(const MatrixOut& out, const MatmulPlace& place) {
    const int64_t column = place.column + 8 * (lane_id() % 4), left = place.columns - column;
    PT_UNROLL
    for (int r = 0; r < 2; ++r) {
      at_[r] =
          reinterpret_cast<uintptr_t>(out.data) + (place.own(r) * out.stride + column) * sizeof(T);
      left_[r] = place.own(r) >= place.rows ? 0 : left < kHalfColumns ? int(left) : kHalfColumns;
    }
  }
  PT_DEVICE bool has(int strip, int r) const { return strip * kStripColumns < left_[r]; }
  PT_DEVICE T* at(int strip, int r) const {
    return reinterpret_cast<T*>(at_[r]) + strip * kStripColumns;
  }

  // Round and store the lane's eight columns of a strip in its row r. Every lane of the warp calls
  // it.
  PT_DEVICE void store(int strip, int r, const float (&v)[8]) const {
    uint32_t words[4];
    PT_UNROLL
    for (int c = 0; c < 4; ++c) words[c] = Element<T>::pack(v[2 * c], v[2 * c + 1]);
    transpose_quad(words);
    if (has(strip, r)) ptx::st_global_v4(at(strip, r), {{words[0], words[1], words[2], words[3]}});
  }

 private:
  uintptr_t at_[2];
  int left_[2];
};

// out = sums + bias.
struct Linear {
  static constexpr uint32_t kScratch = TileBias<1>::kBytes;
  static constexpr int kPanels = 0;
  Bias bias[1];
  MatrixOut out;

  PT_DEVICE void begin(const MatmulPlace& place) const { TileBias<1>::bring(bias, place); }

  template <class T, int R>
  PT_DEVICE void finish(const MatmulPlace& place, const float (&x)[R], const MatmulPanels&) const {
    const TileBias<1> biases(place);
    const StripRows<T> rows(out, place);
    PT_UNROLL
    for (int strip = 0; strip < R / 16; ++strip) {
      float b[8];
      biases.load(b, 0, strip);
      PT_UNROLL
      for (int r = 0; r < 2; ++r) {
        float v[8];
        PT_UNROLL
        for (int c = 0; c < 8; ++c) v[c] = x[sum_at(strip, r, c)] + b[c];
        rows.store(strip, r, v);
      }
    }
  }
};

// out (+)= sums, in float32.
struct Sums {
  static constexpr uint32_t kScratch = 0;
  static constexpr int kPanels = 0;
  MatrixOut out;
  bool add;

  PT_DEVICE void begin(const MatmulPlace&) const {}

  template <class T, int R>
  PT_DEVICE void finish(const MatmulPlace& place, const float (&x)[R], const MatmulPanels&) const {
    const StripRows<float> rows(out, place);
    PT_UNROLL
    for (int strip = 0; strip < R / 16; ++strip) {
      PT_UNROLL
      for (int r = 0; r < 2; ++r) store(rows, strip, r, x);
    }
  }

 private:
  template <int R>
  PT_DEVICE void store(const StripRows<float>& rows, int strip, int r, const float (&x)[R]) const {
    uint32_t even[4], odd[4];  // columns; the exchange makes them eight consecutive ones
    PT_UNROLL
    for (int c = 0; c < 4; ++c) {
      even[c] = ptx::float_bits(x[sum_at(strip, r, 2 * c)]);
      odd[c] = ptx::float_bits(x[sum_at(strip, r, 2 * c + 1)]);
    }
    transpose_quad(even);
    transpose_quad(odd);
    if (!rows.has(strip, r)) return;
    float* const to = rows.at(strip, r);
    PT_UNROLL
    for (int half = 0; half < 2; ++half) {
      ptx::Words4 v{{even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]}};
      if (add) {
        const ptx::Words4 before = ptx::ld_global_v4(to + 4 * half);
        PT_UNROLL
        for (int i = 0; i < 4; ++i)
          v.w[i] = ptx::float_bits(ptx::bits_float(before.w[i]) + ptx::bits_float(v.w[i]));
      }
      ptx::st_global_v4(to + 4 * half, v);
    }
  }
};

}  // namespace pt::cuda
