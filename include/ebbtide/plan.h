// Plans: lists of copies as data. Pure functions; nothing here touches a device or a file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ebbtide/byte_ranges.h"
#include "ebbtide/types.h"

namespace ebbtide {

struct CopySpan {
  Place src;
  Place dst;
  std::uint64_t nbytes = 0;

  friend constexpr auto operator<=>(const CopySpan&, const CopySpan&) = default;
};

using Plan = std::vector<CopySpan>;

// Bytes of a storage that have a copy outside the device, and where that copy starts.
struct CopiedSpan {
  ByteRange range;  // of the storage
  Place place;

  friend constexpr auto operator<=>(const CopiedSpan&, const CopiedSpan&) = default;
};

// Copies `missing` out of the storage that starts at `storage`, one range after the other, to `block`. Needs a block of
// missing.nbytes().
Plan plan_offload(const Place& storage, const ByteRanges& missing, const Place& block);

// Where plan_offload put each range, in the order of the ranges.
std::vector<CopiedSpan> copied_spans(const ByteRanges& missing, const Place& block);

// Copies every span back to where it was within the storage that starts at `storage`. Spans keep their number and
// length: what was written as one piece is read as one piece.
Plan plan_restore(const std::vector<CopiedSpan>& copied, const Place& storage);

std::uint64_t plan_bytes(const Plan& plan);

// One line per copy: "device:0x1000+0 -> file:0+4096, 512 bytes".
std::string to_string(const CopySpan& span);
std::string to_string(const Plan& plan);

}  // namespace ebbtide
