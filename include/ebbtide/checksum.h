// XXH64 (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), to find bytes that a disk changed.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ebbtide {

// Checksum of `nbytes` at `data`. Thread safe, allocates nothing.
std::uint64_t checksum(const void* data, std::size_t nbytes, std::uint64_t seed = 0);

}  // namespace ebbtide
