// What the files of CommandRunner share.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>

#include "ebbtide/engine.h"

namespace ebbtide::bindings {

// A probe of a storage that another thread is just saving: look again later. More holders than there can be leases.
inline constexpr ProbeAnswer kHeld{.holders = std::uint64_t{1} << 32};
// The storage could not be looked at: it stays on the device.
inline constexpr ProbeAnswer kUnknown{.holders = 1, .same = false};

// One that may be caught with `except Exception`, in Python's words.
bool is_ordinary(const std::exception_ptr& error);

}  // namespace ebbtide::bindings
