// EngineConfig: the numbers the engine decides by. Checked where users write them, in the Python package's config
// module.
#pragma once

#include <cstdint>
#include <limits>

namespace ebbtide {

struct EngineConfig {
  // Storages below this many bytes stay on the device.
  std::uint64_t min_bytes = 0;
  // The last so many bytes saved on a device are not copied yet.
  std::uint64_t keep_last_bytes = 0;
  // Bound on bytes that are loading, or loaded and not asked for, because of a guess.
  std::uint64_t prefetch_bytes = 0;
  // Bound on bytes of storages held only because their copy is running. 0 waits for each copy.
  std::uint64_t in_flight_bytes = 0;
  // Bound on what the tier may reserve.
  std::uint64_t max_tier_bytes = std::numeric_limits<std::uint64_t>::max();
  // Storages held by others that are looked at again at each save.
  std::uint32_t probes_per_save = 2;
};

// Kernels choose their code by alignment, and with it the last bits of their result: a restored storage starts at the
// same address modulo this.
inline constexpr std::uint64_t kAlignmentBytes = 512;

}  // namespace ebbtide
