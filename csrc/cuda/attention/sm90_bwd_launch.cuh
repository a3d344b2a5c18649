// The backward kernels for sm_90a of one dtype: included by the files that compile them, each those of one pass.
#pragma once

#include <type_traits>

#include "cuda/attention/sm90_bwd_queries.cuh"
#include "cuda/attention/sm90_bwd_wide_keys.cuh"
#include "cuda/attention/sm90_kernels.h"
#include "cuda/attention/sm90_launch.cuh"

namespace pt::cuda {

// Calls run(kind) for the plan's kernel.
template <class F>
void with_backward_kind(const Sm90Plan& plan, F run) {
  const auto of_class = [&](auto columns) {
    constexpr int D = decltype(columns)::value;
    if (plan.looks_up) plan.general ? run(Hopper<D, true, true>{}) : run(Hopper<D, false, true>{});
    else plan.general ? run(Hopper<D, true, false>{}) : run(Hopper<D, false, false>{});
  };
  if (plan.head_class == 64) of_class(std::integral_constant<int, 64>{});
  else if (plan.head_class == 128) of_class(std::integral_constant<int, 128>{});
  else if (plan.looks_up) run(Hopper<256, false, true>{});
  else plan.general ? run(Hopper<256, true, false>{}) : run(Hopper<256, false, false>{});
}

template <class T>
void sm90_attention_queries_as(const AttentionBackward& g, const Sm90Plan& plan, void* stream) {
  const Sm90Tile tile = sm90_queries_tile(plan.head_class, plan.general, plan.looks_up);
  const Sm90Backward args = {map_operands(g, tile.rows(), tile.streamed), g, plan.order};
  with_backward_kind(plan, [&](auto kind) {
    launch(sm90_attention_bwd_queries_kernel<T, decltype(kind)>, dim3(unsigned(plan.blocks)), tile.threads(),
           sm90_queries_smem(tile, plan.general, plan.looks_up), stream, args);
  });
}

template <class T>
void sm90_attention_keys_as(const AttentionBackward& g, const Sm90Plan& plan, void* stream) {
  const Sm90Tile tile = sm90_keys_tile(plan.head_class, plan.general, plan.looks_up);
  const Sm90Backward args = {map_operands(g, tile.streamed, tile.rows()), g, plan.order};
  with_backward_kind(plan, [&](auto kind) {
    launch(sm90_attention_bwd_keys_kernel<T, decltype(kind)>, dim3(unsigned(plan.blocks)), tile.threads(),
           sm90_keys_smem(tile, plan.general, plan.looks_up), stream, args);
  });
}

}  // namespace pt::cuda
