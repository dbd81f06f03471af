// ViewMeta: how a view reads its storage, in elements; and its extent, in bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ebbtide/types.h"

namespace ebbtide {

struct ViewMeta {
  std::int64_t storage_offset = 0;  // elements
  std::int64_t itemsize = 1;        // bytes
  // Opaque to the core: what tells two views with equal geometry apart (dtype, conj and neg bits).
  std::int64_t kind = 0;
  std::vector<std::int64_t> sizes;    // elements
  std::vector<std::int64_t> strides;  // elements, as many as sizes; may be 0 or negative

  friend bool operator==(const ViewMeta&, const ViewMeta&) = default;
};

// Smallest byte range that the view can touch: from its first to its last reachable byte. Empty views have the extent
// {0, 0}. Throws Error(kUsage) where sizes and strides differ in length, a size or the itemsize is negative, the view
// starts before its storage, or the arithmetic overflows 63 bits.
ByteRange extent(const ViewMeta& view);

std::string to_string(const ViewMeta& view);

}  // namespace ebbtide
