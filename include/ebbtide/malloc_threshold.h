// Makes glibc give freed activations of a CPU training run back to the system.
#pragma once

#include <cstdint>

namespace ebbtide {

// Fixes the size from which glibc's malloc maps memory of its own for an allocation (M_MMAP_THRESHOLD) and stops it
// from raising that size by itself; such an allocation leaves the process when it is freed. Holds for the whole process
// and for allocations made afterwards. Returns whether the C library took it; elsewhere does nothing.
// Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
bool fix_malloc_threshold(std::uint64_t nbytes);

}  // namespace ebbtide
