// SPDX-License-Identifier: Apache-2.0
#include "emulator/sites.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <tuple>

namespace emu {
namespace {

constexpr const char* kNames[] = {"drop", "shift", "flip"};

struct Planted {
  Fault fault = kNone;
  std::string file;
  unsigned line = 0;

  Planted() {
    const char* text = std::getenv("PYTRANSFORMER_FAULT");
    const char* at = text ? std::strchr(text, '@') : nullptr;
    const char* colon = at ? std::strrchr(at, ':') : nullptr;
    if (!at) return;
    for (unsigned i = 0; i < 3; ++i)
      if (std::string(text, at) == kNames[i]) fault = Fault(1u << i);
    if (!colon || fault == kNone) {
      std::fprintf(
          stderr, "PYTRANSFORMER_FAULT=%s: expected drop, shift or flip, @, file, :, line\n", text);
      std::exit(2);
    }
    file = std::string(at + 1, colon);
    line = unsigned(std::atoi(colon + 1));
  }
};

const Planted planted;
const char* const record = std::getenv("PYTRANSFORMER_SITES");

// Return the path below csrc/; the file name may be relative.
const char* below_sources(const char* file) {
  for (const char* next = file; (next = std::strstr(next, "csrc/"));) file = next += 5;
  return file;
}

void note(const Site& site, const char* instruction, unsigned possible) {
  static std::set<std::tuple<const char*, unsigned, const char*>> noted;
  if (!noted.emplace(site.file_name(), site.line(), instruction).second) return;
  std::string faults;
  for (unsigned i = 0; i < 3; ++i)
    if (possible >> i & 1) faults += std::string(faults.empty() ? "" : ",") + kNames[i];
  // Close the file each time: a test process may end at any moment.
  if (std::FILE* out = std::fopen(record, "a")) {
    std::fprintf(out, "%s:%u %s %s\n", below_sources(site.file_name()), unsigned(site.line()),
                 instruction, faults.c_str());
    std::fclose(out);
  }
}

}  // namespace

bool sites_matter = planted.fault != kNone || record;

Fault fault_at_site(const Site& site, const char* instruction, unsigned possible) {
  if (!site.line()) return kNone;  // a call within the emulator
  if (record) note(site, instruction, possible);
  const bool here = planted.fault & possible && site.line() == planted.line &&
                    planted.file == below_sources(site.file_name());
  return here ? planted.fault : kNone;
}

}  // namespace emu
