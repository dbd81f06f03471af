// BlockSpace: room outside the device that the engine hands out in exact-size blocks. A host pool and a spill file are
// its two kinds; the engine knows only this interface, so it decides without doing I/O.
#pragma once

#include <cstdint>
#include <optional>

#include "ebbtide/types.h"

namespace ebbtide {

// An exact-size part of a slab or a file. Names memory, does not own it.
struct Block {
  Place place;
  std::uint64_t nbytes = 0;

  friend constexpr auto operator<=>(const Block&, const Block&) = default;
};

class BlockSpace {
 public:
  BlockSpace() = default;
  BlockSpace(const BlockSpace&) = delete;
  BlockSpace& operator=(const BlockSpace&) = delete;
  virtual ~BlockSpace() = default;

  [[nodiscard]] virtual Tier tier() const = 0;
  // A block of exactly `nbytes` (> 0), or nothing when that would take the whole space above `limit` bytes of
  // reserved memory. Thread safe; never blocks on I/O; throws only std::bad_alloc for its own bookkeeping.
  [[nodiscard]] virtual std::optional<Block> allocate(std::uint64_t nbytes, std::uint64_t limit) = 0;
  // Bytes of memory that its owner would have to add for `allocate` of `nbytes` to succeed within `limit`; 0 for a
  // space that grows by itself, or when no growth would help.
  [[nodiscard]] virtual std::uint64_t growth(std::uint64_t nbytes, std::uint64_t limit) const {
    static_cast<void>(nbytes), static_cast<void>(limit);
    return 0;
  }
  // Takes back a block that `allocate` gave. The caller has made sure that no copy still uses it. Thread safe.
  virtual void free(const Block& block) = 0;
  // Bytes in blocks now handed out, and bytes taken from the system.
  [[nodiscard]] virtual std::uint64_t used_bytes() const = 0;
  [[nodiscard]] virtual std::uint64_t reserved_bytes() const = 0;
};

}  // namespace ebbtide
