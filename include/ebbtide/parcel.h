// Parcel: bytes of one or more storages that left the device in one copy, and where they are now.
//
// It owns its blocks by their lifetime: they are given back when no storage has bytes in it and no copy uses it.
#pragma once

#include <cstdint>
#include <vector>

#include "ebbtide/block_space.h"
#include "ebbtide/types.h"

namespace ebbtide {

enum class ParcelId : std::uint64_t {};

// Bytes of a storage within a parcel.
struct StoredRange {
  ByteRange range;
  ParcelId parcel{};
  std::uint64_t byte_offset = 0;  // in the parcel
};

struct Parcel {
  ParcelId id{};
  std::uint64_t nbytes = 0;
  bool packed = false;  // written as one piece, whatever it holds
  Block block;          // in the space; of no bytes while only the backing has them
  Block backing;        // in the file behind the space; of no bytes when they are not there
  std::vector<StorageId> members;
  CopyId filling{};           // the offload that writes `block`
  CopyId moving{};            // a spill or a fetch between the two
  std::uint32_t readers = 0;  // loads that read `block`, queued or running

  [[nodiscard]] bool in_space() const { return block.nbytes > 0 && !fetching; }
  [[nodiscard]] bool idle() const { return value(filling) == 0 && value(moving) == 0 && readers == 0; }
  // Has bytes in the space that may be moved on.
  [[nodiscard]] bool spillable() const { return block.nbytes > 0 && backing.nbytes == 0 && idle(); }
  bool fetching = false;  // `moving` goes from the backing to `block`
};

}  // namespace ebbtide
