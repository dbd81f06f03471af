// Load: storages that come back in one copy.
#pragma once

#include <cstdint>
#include <vector>

#include "ebbtide/parcel.h"
#include "ebbtide/types.h"

namespace ebbtide {

// Why storages are loaded: somebody asked for one, it is expected to be asked for next, or the caller said so.
enum class LoadCause : std::uint8_t { kAsked, kGuess, kRun };

struct Load {
  CopyId copy{};
  DeviceId device{};
  std::vector<StorageId> members;
  std::uint32_t allocating = 0;   // members whose storage was asked for and is not there yet
  std::vector<ParcelId> reading;  // parcels it counts as a reader of
  bool started = false;
};

}  // namespace ebbtide
