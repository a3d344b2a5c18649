// SPDX-License-Identifier: Apache-2.0
// Faults at call sites: what a call of a ptx function does wrong where the environment names its place in the sources.
//
//   PYTRANSFORMER_FAULT=drop@cuda/tile/ring.cuh:47    the calls on this line do nothing
//   PYTRANSFORMER_SITES=FILE                          appends a line "cuda/tile/ring.cuh:47 mbarrier.arrive drop,shift" for each site
//   reached
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

// Which of the possible faults is planted at this site.
inline Fault fault_at(const Site& site, const char* instruction, unsigned possible) {
  return sites_matter ? fault_at_site(site, instruction, possible) : kNone;
}

}  // namespace emu
