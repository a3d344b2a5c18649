// SPDX-License-Identifier: Apache-2.0
// Faults at call sites: the environment names a line of the sources, and calls of ptx functions on this line go wrong.
//
//   PYTRANSFORMER_FAULT=drop@cuda/attention/sm90/fwd.cuh:243    the wait on this line returns at once
//   PYTRANSFORMER_SITES=FILE    for each site reached, appends "cuda/attention/sm90/fwd.cuh:243 mbarrier.try_wait drop,flip"
#pragma once

#include <source_location>

namespace emu {

using Site = std::source_location;

enum Fault : unsigned {
  kNone = 0,
  kDrop = 1,   // the call is left out: an access, an arrival, a wait, a fence
  kShift = 2,  // an address is one element further, a copy one row, a wait leaves one group more
  kFlip = 4,   // a parity, a predicate, the order of two registers, a lane
};

// Read from the environment when the library is loaded.
extern bool sites_matter;
Fault fault_at_site(const Site& site, const char* instruction, unsigned possible);

// Returns the fault that is planted at this site, if it is one of the possible ones.
inline Fault fault_at(const Site& site, const char* instruction, unsigned possible) {
  return sites_matter ? fault_at_site(site, instruction, possible) : kNone;
}

}  // namespace emu
