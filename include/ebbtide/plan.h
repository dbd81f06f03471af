// Plans: lists of copies as data. Pure functions; nothing here touches a device or a file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ebbtide/block_space.h"
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

// --- packed copies: small pieces of many storages cross the link as one, by way of staging memory

// Bytes of one storage that starts at `storage`.
struct PackPart {
  Place storage;
  ByteRanges ranges;
};

struct PackedRange {
  ByteRange range;                // of the storage
  std::uint64_t byte_offset = 0;  // in the pack

  friend constexpr auto operator<=>(const PackedRange&, const PackedRange&) = default;
};

struct PackLayout {
  std::uint64_t nbytes = 0;
  std::vector<std::vector<PackedRange>> parts;  // as the parts of the pack
};

// The widest word that gather and scatter move: ranges lie in a pack, without padding, at a multiple of the widest word
// that divides their address and their length.
inline constexpr std::uint64_t kPackAlignmentBytes = 16;

PackLayout pack_layout(const std::vector<PackPart>& parts);

// Gathers every range into staging at its offset, then copies all of it to `block`. Needs a block of layout.nbytes.
Plan plan_packed_offload(const std::vector<PackPart>& parts, const PackLayout& layout, const Place& block);

// What is read back into the storage that starts at `storage`.
struct LoadPart {
  Place storage;
  std::vector<CopiedSpan> spans;
};

// Copies neighbours in one slab as one piece into staging and scatters them; what has no neighbour goes straight to its
// storage. Of a block in `whole` (a file is verified piece by piece) all bytes are read, whatever is needed of it.
Plan plan_packed_restore(const std::vector<LoadPart>& parts, const std::vector<Block>& whole);

// The same bytes without staging, in as many copies as there are ranges: for when there is no memory to stage in. Bytes
// that no storage wants are left out.
Plan unstaged(const Plan& plan);

// Staging memory that the plan needs.
std::uint64_t staging_bytes(const Plan& plan);

// Copies that leave or reach a host block or a file.
std::uint64_t crossing_copies(const Plan& plan);

std::uint64_t plan_bytes(const Plan& plan);

// One line per copy: "device:0x1000+0 -> file:0+4096, 512 bytes".
std::string to_string(const CopySpan& span);
std::string to_string(const Plan& plan);

}  // namespace ebbtide
