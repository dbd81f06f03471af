// A list of commands stays C++ on its way from the engine to whoever runs it: it is no Python list.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "ebbtide/command.h"
#include "ebbtide/storage_ref.h"

NB_MAKE_OPAQUE(ebbtide::Commands)

namespace ebbtide::bindings {

template <class Id>
std::vector<std::uint64_t> numbers(const std::vector<Id>& ids) {
  std::vector<std::uint64_t> all;
  for (const Id id : ids) all.push_back(value(id));
  return all;
}

// (device, identity, address, bytes), as ebbtide.framework has it.
inline StorageRef storage_ref(const nanobind::tuple& ref) {
  return {DeviceId{nanobind::cast<std::int64_t>(ref[0])}, nanobind::cast<std::uint64_t>(ref[1]),
          nanobind::cast<std::uint64_t>(ref[2]), nanobind::cast<std::uint64_t>(ref[3])};
}

}  // namespace ebbtide::bindings
