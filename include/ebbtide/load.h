// Load: storages that come back in one copy.
#pragma once

#include <cstdint>
#include <vector>

#include "ebbtide/parcel.h"
#include "ebbtide/types.h"

namespace ebbtide {

struct Load {
  CopyId copy{};
  DeviceId device{};
  std::vector<StorageId> members;
  std::uint32_t allocating = 0;   // members whose storage was asked for and is not there yet
  std::vector<ParcelId> reading;  // parcels it counts as a reader of
  bool started = false;
};

}  // namespace ebbtide
