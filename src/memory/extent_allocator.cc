#include "ebbtide/extent_allocator.h"

#include <cassert>
#include <iterator>
#include <limits>
#include <string>

#include "ebbtide/error.h"

namespace ebbtide {

ExtentAllocator::ExtentAllocator(std::uint64_t capacity, std::uint64_t alignment)
    : capacity_(capacity), alignment_(alignment) {
  assert(alignment > 0 && (alignment & (alignment - 1)) == 0);
  assert(capacity % alignment == 0);
  if (capacity > 0) insert_free(0, capacity);
}

std::optional<std::uint64_t> ExtentAllocator::allocate(std::uint64_t nbytes) {
  assert(nbytes > 0);
  const std::uint64_t need = padded(nbytes);
  const auto best = by_nbytes_.lower_bound({need, 0});
  if (best == by_nbytes_.end()) return std::nullopt;

  // The nodes are reused, so that nothing here allocates memory.
  auto sized = by_nbytes_.extract(best);
  auto& [free_nbytes, offset] = sized.value();
  const std::uint64_t result = offset;
  auto placed = by_offset_.extract(offset);
  used_ += need;
  free_nbytes -= need;
  if (free_nbytes > 0) {
    offset += need;
    placed.key() = offset;
    placed.mapped() = free_nbytes;
    by_offset_.insert(std::move(placed));
    by_nbytes_.insert(std::move(sized));
  }
  return result;
}

void ExtentAllocator::free(std::uint64_t offset, std::uint64_t nbytes) {
  const std::uint64_t length = padded(nbytes);
  const auto next = by_offset_.lower_bound(offset);
  const auto previous = next == by_offset_.begin() ? by_offset_.end() : std::prev(next);
  const std::uint64_t used_end = next == by_offset_.end() ? capacity_ : next->first;
  const std::uint64_t used_begin = previous == by_offset_.end() ? 0 : previous->first + previous->second;
  if (length == 0 || offset % alignment_ != 0 || offset < used_begin || offset > used_end ||
      length > used_end - offset) {
    throw Error(ErrorKind::kUsage, "[ExtentAllocator.free] " + std::to_string(nbytes) + " bytes at " +
                                       std::to_string(offset) + " are not in use: free each extent once, as allocated");
  }

  std::uint64_t begin = offset;
  std::uint64_t end = offset + length;
  if (next != by_offset_.end() && next->first == end) {
    end += next->second;
    erase_free(next);
  }
  if (previous != by_offset_.end() && used_begin == begin) {
    begin = previous->first;
    erase_free(previous);
  }
  insert_free(begin, end - begin);
  used_ -= length;
}

void ExtentAllocator::grow(std::uint64_t nbytes) {
  assert(nbytes % alignment_ == 0);
  if (nbytes == 0) return;
  const std::uint64_t tail = free_tail_bytes();
  if (tail > 0) erase_free(std::prev(by_offset_.end()));
  insert_free(capacity_ - tail, tail + nbytes);
  capacity_ += nbytes;
}

std::uint64_t ExtentAllocator::largest_free_bytes() const {
  return by_nbytes_.empty() ? 0 : by_nbytes_.rbegin()->first;
}

std::uint64_t ExtentAllocator::free_tail_bytes() const {
  if (by_offset_.empty()) return 0;
  const auto& [offset, nbytes] = *by_offset_.rbegin();
  return offset + nbytes == capacity_ ? nbytes : 0;
}

std::uint64_t ExtentAllocator::padded(std::uint64_t nbytes) const {
  const std::uint64_t mask = alignment_ - 1;
  // Near 2^64 the sum would wrap to a tiny extent; no capacity is as large as the answer given instead.
  if (nbytes > std::numeric_limits<std::uint64_t>::max() - mask) return ~mask;
  return (nbytes + mask) & ~mask;
}

void ExtentAllocator::insert_free(std::uint64_t offset, std::uint64_t nbytes) {
  by_offset_.emplace(offset, nbytes);
  by_nbytes_.emplace(nbytes, offset);
}

void ExtentAllocator::erase_free(std::map<std::uint64_t, std::uint64_t>::iterator it) {
  by_nbytes_.erase({it->second, it->first});
  by_offset_.erase(it);
}

}  // namespace ebbtide
