// StorageRef: how the framework names one of its storages. Owns nothing.
#pragma once

#include <cstdint>

#include "ebbtide/types.h"

namespace ebbtide {

struct StorageRef {
  DeviceId device{};
  // Number of the framework's storage object. The session keeps it from being issued again for as long as the engine
  // has not sent Forget for the entry.
  std::uint64_t identity = 0;
  std::uint64_t address = 0;  // first byte
  std::uint64_t nbytes = 0;

  friend constexpr auto operator<=>(const StorageRef&, const StorageRef&) = default;
};

}  // namespace ebbtide
