// SPDX-License-Identifier: Apache-2.0
// Compile the whole module as one unit, because torch's headers take most of the time.
#include "attention.cpp"
#include "builder.cpp"
#include "cross_entropy.cpp"
#include "feed_forward.cpp"
#include "layer_norm.cpp"
#include "memory.cpp"
#include "module.cpp"
#include "modules.cpp"
#include "program.cpp"
#include "rotary.cpp"
#include "sdpa.cpp"
#include "watch.cpp"
