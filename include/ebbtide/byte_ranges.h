// ByteRanges: a set of bytes of one storage, kept as sorted, disjoint, non-touching ranges.
//
// Not thread safe. Costs: add and subtract are O(log n + merged), everything else O(n).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "ebbtide/types.h"

namespace ebbtide {

class ByteRanges {
 public:
  ByteRanges() = default;
  ByteRanges(std::initializer_list<ByteRange> ranges);

  // Empty ranges are ignored; ranges that overlap or touch are merged.
  void add(ByteRange range);
  void add(const ByteRanges& other);
  void subtract(ByteRange range);
  void clear() { ranges_.clear(); }

  // Bytes of this set that are not in `other`.
  [[nodiscard]] ByteRanges minus(const ByteRanges& other) const;
  [[nodiscard]] ByteRanges intersect(const ByteRanges& other) const;
  // Whether every byte of `range` is in the set; true for an empty range.
  [[nodiscard]] bool contains(ByteRange range) const;
  [[nodiscard]] bool contains(const ByteRanges& other) const;

  [[nodiscard]] bool empty() const { return ranges_.empty(); }
  [[nodiscard]] std::uint64_t nbytes() const;
  // Smallest range that holds the whole set; {0, 0} when empty.
  [[nodiscard]] ByteRange span() const;
  [[nodiscard]] const std::vector<ByteRange>& ranges() const { return ranges_; }

  friend bool operator==(const ByteRanges&, const ByteRanges&) = default;

 private:
  std::vector<ByteRange> ranges_;
};

// "{[0, 16), [32, 40)}"
std::string to_string(const ByteRanges& ranges);

}  // namespace ebbtide
