// Statistics: totals since the engine was made or reset, and what is held now.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ebbtide {

// Why a saved tensor (kLast, kHostFull, kDiskFull: a storage) stayed on the device.
enum class KeepReason : std::uint8_t {
  kParameter,
  kParameterCast,
  kSmall,
  kPolicy,
  kLast,
  kUnsupported,
  kDevice,
  kBudget,
  kHostFull,
  kDiskFull,  // its limit, no space left, or it failed
  kCapture,
};
inline constexpr std::array<std::string_view, 11> kKeepReasonNames = {"parameter", "parameter_cast", "small",  "policy",
                                                                      "last",      "unsupported",    "device", "budget",
                                                                      "host_full", "disk_full",      "capture"};

struct Stats {
  std::uint64_t saved_tensors = 0;
  std::uint64_t saved_bytes = 0;  // elements times itemsize, duplicates counted
  std::uint64_t exact_duplicates = 0;
  std::uint64_t storages = 0;
  std::uint64_t unique_bytes = 0;  // union of extents
  std::array<std::uint64_t, kKeepReasonNames.size()> kept{};
  std::uint64_t d2h_copies = 0;
  std::uint64_t d2h_bytes = 0;
  std::uint64_t h2d_copies = 0;
  std::uint64_t h2d_bytes = 0;
  std::uint64_t spilled_bytes = 0;
  std::uint64_t freed_bytes = 0;
  std::uint64_t unfreed_bytes = 0;
  std::uint64_t live_hits = 0;
  std::uint64_t prefetch_hits = 0;
  std::uint64_t prefetch_misses = 0;
  // As of now.
  std::uint64_t parked = 0;
  std::uint64_t entries = 0;
  std::uint64_t device_bytes = 0;
  std::uint64_t tier_bytes = 0;
  std::uint64_t peak_tier_bytes = 0;
  std::uint64_t backing_bytes = 0;
  std::uint64_t peak_backing_bytes = 0;

  void keep(KeepReason reason) { ++kept[static_cast<std::size_t>(reason)]; }
  // Totals to zero; what is held now stays, and is the new peak.
  void reset();
};

// What of the totals belongs to the groups of one label. A storage counts for the first group it was saved in.
struct GroupStats {
  std::uint64_t runs = 0;
  std::uint64_t storages = 0;
  std::uint64_t unique_bytes = 0;
  std::uint64_t d2h_bytes = 0;
  std::uint64_t h2d_bytes = 0;
  std::uint64_t prefetch_misses = 0;
};

}  // namespace ebbtide
