// SPDX-License-Identifier: Apache-2.0
#include "cuda/cross_entropy/kernels.h"
#include "cuda/cross_entropy/sm90/in_place.cuh"
#include "cuda/launch.cuh"

namespace pt::cuda {

void sm90_d_logits_in_place(const ExponentialsProblem& f, void* stream) {
  constexpr int kColumns = kInPlaceThreads * kVector;
  const dim3 grid(unsigned((f.rows + kRowsOfAPart - 1) / kRowsOfAPart),
                  unsigned((f.classes + kColumns - 1) / kColumns));
  launch(cross_entropy_d_logits_kernel, grid, kInPlaceThreads, kRowsOfAPart * DLogitsRow::kBytes,
         stream, f);
}

void sm90_scale(const ScaleProblem& f, void* stream) {
  constexpr int kBlock = kScaledVectors * kInPlaceThreads * kVector;
  launch(cross_entropy_scale_kernel, dim3(unsigned((f.count + kBlock - 1) / kBlock)),
         kInPlaceThreads, 0, stream, f);
}

}  // namespace pt::cuda
