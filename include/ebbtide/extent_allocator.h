// ExtentAllocator: hands out exact-size, disjoint extents of one line of bytes [0, capacity). Best fit, free neighbours
// merge. The arithmetic beneath the host pool's slabs and the spill file; touches no memory itself.
//
// Not thread safe; O(log n) per call.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace ebbtide {

class ExtentAllocator {
 public:
  // Every extent starts at a multiple of `alignment` (a power of two), and extents are padded to it; `capacity` is a
  // multiple of it.
  explicit ExtentAllocator(std::uint64_t capacity, std::uint64_t alignment = 64);

  // Offset of an extent of `nbytes` (> 0), or nothing when no free extent is long enough.
  [[nodiscard]] std::optional<std::uint64_t> allocate(std::uint64_t nbytes);
  // Takes back an extent; `nbytes` as it was asked for. Throws Error(kUsage) where any of it is free already.
  void free(std::uint64_t offset, std::uint64_t nbytes);
  // Adds bytes at the end; `nbytes` is a multiple of the alignment.
  void grow(std::uint64_t nbytes);

  [[nodiscard]] std::uint64_t capacity() const { return capacity_; }
  [[nodiscard]] std::uint64_t used_bytes() const { return used_; }  // padding counted
  [[nodiscard]] std::uint64_t largest_free_bytes() const;
  // Free bytes at the very end: what a grow need not add.
  [[nodiscard]] std::uint64_t free_tail_bytes() const;
  [[nodiscard]] std::uint64_t padded(std::uint64_t nbytes) const;

 private:
  void insert_free(std::uint64_t offset, std::uint64_t nbytes);
  void erase_free(std::map<std::uint64_t, std::uint64_t>::iterator it);

  std::uint64_t capacity_;
  std::uint64_t alignment_;
  std::uint64_t used_ = 0;
  std::map<std::uint64_t, std::uint64_t> by_offset_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> by_nbytes_;  // (nbytes, offset)
};

}  // namespace ebbtide
