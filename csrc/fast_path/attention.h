// SPDX-License-Identifier: Apache-2.0
// Attention on the fast path, padded and packed; see fast_path.h.
#pragma once

#include <limits>

#include "fast_path.h"

namespace pt::fast_path {

// Indices of each op's inputs. kStarts: the bucket starts of kTable.
struct Padded {
  static constexpr const char* kName = "attention";
  enum {
    kQuery,
    kKey,
    kValue,
    kMask,
    kBias,
    kSlopes,
    kTable,
    kSinks,
    kQueryLengths,
    kKeyLengths,
    kPrefixLengths,
    kQuerySegments,
    kKeySegments,
    kSeed,
    kPageTable,
    kStarts,
    kInputs,
    kCuQ = -1,
    kCuK = -1
  };
  static constexpr size_t kDifferentiable = 8;
  static constexpr int64_t kDim = 4;
};
// Tensors that only Python calls have: a block mask's between the seed and the page table, and
// 8-bit scales after the page table.
constexpr size_t kBlockMask = 5, kScales = 2;
struct Packed {
  static constexpr const char* kName = "attention_varlen";
  enum {
    kQuery,
    kKey,
    kValue,
    kSlopes,
    kTable,
    kSinks,
    kCuQ,
    kCuK,
    kSeed,
    kKeyLengths,
    kPageTable,
    kStarts,
    kInputs,
    kMask = -1,
    kBias = -1,
    kQueryLengths = -1,
    kPrefixLengths = -1,
    kQuerySegments = -1,
    kKeySegments = -1
  };
  static constexpr size_t kDifferentiable = 6;
  static constexpr int64_t kDim = 3;
};

struct AttentionNumbers {
  // max_q and max_k: packed only.
  int64_t align = 0, left = -1, right = -1, global_keys = 0, max_distance = 0, max_q = 0, max_k = 0;
  // NaN scale: 1 / sqrt(D).
  double scale = std::numeric_limits<double>::quiet_NaN(), softcap = 0, dropout_p = 0;
  bool bidirectional = false, deterministic = true;

  template <class F>
  void collect(const F& f) const {
    f(align), f(left), f(right), f(global_keys), f(max_distance), f(max_q), f(max_k), f(scale),
        f(softcap), f(dropout_p), f(bidirectional), f(deterministic);
  }
};

template <class Which>
struct AttentionOp : Which {
  static constexpr size_t kSaved = 2, kGrads = 2;
  using Inputs = std::array<Tensor, Which::kInputs>;
  using Outputs = std::array<Tensor, 2>;  // out, lse
  using Saved = Outputs;
  using Numbers = AttentionNumbers;

  // Fill in defaults: leading dimensions of mask and bias, and the scale.
  static bool complete(Inputs& t, Numbers& n);
  static bool fits(const Inputs& t, const Numbers& n);
  static Outputs forward(const Inputs& t, const Numbers& n, bool needs_gradient);
  static variable_list backward(const Inputs& t, const Saved& saved, const Numbers& n,
                                const variable_list& grads, const std::vector<bool>& wanted);
  static variable_list tensors(const Inputs& t);
  static py::tuple others(const Numbers& n);
};
using Attention = AttentionOp<Padded>;
using AttentionVarlen = AttentionOp<Packed>;

}  // namespace pt::fast_path
