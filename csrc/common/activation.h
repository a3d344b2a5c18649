// SPDX-License-Identifier: Apache-2.0
// Activations of feed_forward for all backends. Kernels use the number, Python and the fast path
// the name.
#pragma once

#include <initializer_list>

namespace pt {

#define PT_FOR_EACH_ACTIVATION(X) X(relu) X(gelu) X(gelu_tanh) X(silu)

#define PT_ACTIVATION(name) name,
enum class Activation : int { PT_FOR_EACH_ACTIVATION(PT_ACTIVATION) };
#undef PT_ACTIVATION

#define PT_ACTIVATION(name) #name,
inline constexpr std::initializer_list<const char*> kActivationNames = {
    PT_FOR_EACH_ACTIVATION(PT_ACTIVATION)};
#undef PT_ACTIVATION

}  // namespace pt
