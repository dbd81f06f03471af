#include "ebbtide/types.h"

#include <cinttypes>
#include <cstdio>

namespace ebbtide {

std::string to_string(Tier tier) {
  switch (tier) {
    case Tier::kDevice:
      return "device";
    case Tier::kHost:
      return "host";
    case Tier::kFile:
      return "file";
    case Tier::kStaging:
      return "staging";
  }
  return "unknown";
}

std::string to_string(const ByteRange& range) {
  return "[" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ")";
}

std::string to_string(const Place& place) {
  char base[2 + 16 + 1];
  std::snprintf(base, sizeof base, "%#" PRIx64, place.base);
  return to_string(place.tier) + ":" + base + "+" + std::to_string(place.byte_offset);
}

}  // namespace ebbtide
