// A list of commands stays C++ on its way from the engine to whoever runs it: it is no Python list.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "ebbtide/command.h"
#include "ebbtide/storage_ref.h"
#include "ebbtide/view_meta.h"

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

// (offset, itemsize, kind, sizes, strides, ...), as ebbtide.framework has it.
inline ViewMeta view_meta(const nanobind::tuple& view) {
  const auto integer = [](nanobind::handle number) { return nanobind::cast<std::int64_t>(number); };
  const auto integers = [&](nanobind::handle tuple) {
    std::vector<std::int64_t> all;
    all.reserve(nanobind::len(tuple));
    for (const nanobind::handle number : nanobind::borrow<nanobind::tuple>(tuple)) all.push_back(integer(number));
    return all;
  };
  return {integer(view[0]), integer(view[1]), integer(view[2]), integers(view[3]), integers(view[4])};
}

}  // namespace ebbtide::bindings
