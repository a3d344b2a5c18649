// SPDX-License-Identifier: Apache-2.0
// Every shape of warpgroup gemm that a kernel uses. Kernels assert that this table contains their
// shapes, and tests/cuda/conformance.cpp runs the table, so conformance covers every shape.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pt::cuda {

// x[64][n] = A B. An operand is K-major or transposed (A M-major, B N-major). panel_bytes is the
// distance of panels of 64 columns in a transposed B.
struct ProductShape {
  int n;
  bool a_in_registers, trans_a, trans_b;
  uint32_t panel_bytes;  // 0: one panel, or B is K-major

  constexpr bool operator==(const ProductShape& o) const {
    return n == o.n && a_in_registers == o.a_in_registers && trans_a == o.trans_a &&
           trans_b == o.trans_b && panel_bytes == o.panel_bytes;
  }
  // rows of a panel, along k
  constexpr int depth() const { return panel_bytes ? int(panel_bytes) / 128 : 64; }
};

// Both operands in shared memory.
constexpr ProductShape product_of_tiles(int n, bool trans_a = false, bool trans_b = false,
                                        uint32_t panel_bytes = 0) {
  return {n, false, trans_a, trans_b, trans_b && n > 64 ? panel_bytes : 0};
}
// Weights in registers times a tile of 128-byte rows, N-major.
constexpr ProductShape product_of_weights(int n, uint32_t panel_bytes) {
  return {n, true, false, true, n > 64 ? panel_bytes : 0};
}

constexpr ProductShape kProductShapes[] = {
    // Scores, by number of keys or queries.
    product_of_tiles(32), product_of_tiles(48), product_of_tiles(64), product_of_tiles(80),
    product_of_tiles(96), product_of_tiles(128),
    // Weights times a tile of 64, 128 or 256 columns, by number of rows.
    product_of_weights(64, 0), product_of_weights(128, 48 * 128), product_of_weights(128, 64 * 128),
    product_of_weights(128, 96 * 128), product_of_weights(128, 128 * 128),
    product_of_weights(256, 32 * 128), product_of_weights(256, 48 * 128),
    product_of_weights(256, 64 * 128), product_of_weights(256, 80 * 128),
    // A part of dQ; matmul, narrow and wide.
    product_of_tiles(64, true, true), product_of_tiles(256),
    product_of_tiles(128, false, true, 64 * 128), product_of_tiles(256, false, true, 64 * 128),
    product_of_tiles(128, true, true, 64 * 128), product_of_tiles(256, true, true, 64 * 128)};
constexpr size_t kNumProductShapes = sizeof kProductShapes / sizeof *kProductShapes;

constexpr bool conforms(const ProductShape& shape) {
  for (const ProductShape& s : kProductShapes)
    if (s == shape) return true;
  return false;
}

}  // namespace pt::cuda
