// EngineConfig: the numbers the engine decides by. Checked where users write them, in the Python package's config
// module.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>

namespace ebbtide {

struct EngineConfig {
  // Storages below this many bytes stay on the device.
  std::uint64_t min_bytes = 0;
  // The last so many bytes saved on a device are not copied yet.
  std::uint64_t keep_last_bytes = 0;
  // Once groups were begun, in place of that: the last so many groups are not copied yet. 0: a group is copied when it
  // has ended.
  std::optional<std::uint64_t> keep_last_groups = {};
  // While an epoch runs, the last so many storages saved on a device are not copied yet either; where a group begins or
  // ends, the last two. For frameworks where a storage is known by its identity only as long as the engine holds it: so
  // later views of it join.
  std::uint32_t keep_last_storages = 0;
  // Of which, beyond two, only as many as are no more bytes than this.
  std::uint64_t keep_last_storages_bytes = std::uint64_t{32} << 20;
  // Bound on bytes that are loading, or loaded and not asked for, because of a guess. A larger storage is loaded alone.
  std::uint64_t prefetch_bytes = 0;
  // In place of that, for storages of a group: the rest of the group asked for, so many groups before it, and more
  // while no more is held than was at the peak. For others: what keeps all that is held below the peak, or below
  // prefetch_bytes; one guess in any case.
  std::optional<std::uint64_t> prefetch_groups = {};
  // Without it: all storages are loaded ahead as those of no group are with it, rather than up to the bound.
  bool prefetch_to_peak = false;
  // Bound on bytes of storages held only because their copy is running, or was when the backward began that is about
  // to ask for them: beyond it the latter go, then the oldest copy is waited for. 0 with streams: nothing is held and
  // nothing waited for, memory goes back in stream order, and its reuse waits instead.
  std::uint64_t in_flight_bytes = 0;
  // Bounds on what the tier and the file behind it may reserve.
  std::uint64_t max_tier_bytes = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t max_backing_bytes = std::numeric_limits<std::uint64_t>::max();
  // Storages with less to copy cross in packs of at most pack_bytes. 0: none do.
  std::uint64_t pack_below_bytes = 0;
  std::uint64_t pack_bytes = std::uint64_t{8} << 20;
  // Storages held by others that are looked at again at each save.
  std::uint32_t probes_per_save = 2;
};

// Storages that are kept to recognise their later views by, where any are, however large they are.
inline constexpr std::uint32_t kAlwaysRecognised = 2;

// Kernels choose their code by alignment, and with it the last bits of their result: a restored storage starts at the
// same address modulo this.
inline constexpr std::uint64_t kAlignmentBytes = 512;

}  // namespace ebbtide
