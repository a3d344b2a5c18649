// SPDX-License-Identifier: Apache-2.0
// Faults at call sites: the environment names a source line, and calls of ptx functions on that
// line fail.
//
//   PYTRANSFORMER_FAULT=drop@cuda/attention/sm90/fwd.cuh:243
//     the wait on this line returns at once
//   PYTRANSFORMER_SITES=FILE
//     append each reached site to FILE:
//     "cuda/attention/sm90/fwd.cuh:243 mbarrier.try_wait drop,flip"
#pragma once

#include <source_location>

namespace emu {

using Site = std::source_location;

enum Fault : unsigned {
  kNone = 0,
  kDrop = 1,  // omitted call: an access, an arrival, a wait, a fence
  // An address is one element off, a copy one row, and a wait leaves one more group pending.
  kShift = 2,
  kFlip = 4,  // inverted parity or predicate, swapped registers, another lane
};

// Read from the environment at load time.
extern bool sites_matter;
Fault fault_at_site(const Site& site, const char* instruction, unsigned possible);

// Return the fault planted at this site if it is one of the possible ones.
inline Fault fault_at(const Site& site, const char* instruction, unsigned possible) {
  return sites_matter ? fault_at_site(site, instruction, possible) : kNone;
}

}  // namespace emu
