#include "cuda/attention/sm90_fwd.cuh"
#include "cuda/attention/sm90_kernels.h"
#include "cuda/attention/sm90_launch.cuh"

namespace pt::cuda {
namespace {

template <class T, class K>
void forward_kind(const AttentionForward& f, const Sm90Plan& plan, void* stream) {
  constexpr Sm90Tile kTile = sm90_forward_tile(K::head_dim, K::general);
  const AttentionProblem& p = f.p;
  const Sm90Forward args{map_rows(p, p.q, false, p.head_dim, kTile.rows()), map_rows(p, p.k, true, p.head_dim, kTile.streamed),
                         map_rows(p, p.v, true, p.value_dim, kTile.streamed), f, plan.order};
  launch(sm90_attention_fwd_kernel<T, K>, dim3(unsigned(plan.blocks)), kTile.threads(), sm90_forward_smem(kTile), stream, args);
}

}  // namespace

void sm90_attention_forward(const AttentionForward& f, const Sm90Plan& plan, void* stream) {
  with_half(f.p, [&](auto t) {
    using T = decltype(t);
    const bool general = plan.general, narrow = plan.head_class == 64;
    if (plan.head_class == 256) forward_kind<T, Hopper<256, false>>(f, plan, stream);
    else if (narrow) (general ? forward_kind<T, Hopper<64, true>> : forward_kind<T, Hopper<64, false>>)(f, plan, stream);
    else (general ? forward_kind<T, Hopper<128, true>> : forward_kind<T, Hopper<128, false>>)(f, plan, stream);
  });
}

}  // namespace pt::cuda
