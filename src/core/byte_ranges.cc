#include "ebbtide/byte_ranges.h"

#include <algorithm>
#include <iterator>

namespace ebbtide {

ByteRanges::ByteRanges(std::initializer_list<ByteRange> ranges) {
  for (const ByteRange& range : ranges) add(range);
}

void ByteRanges::add(ByteRange range) {
  if (range.empty()) return;
  const auto first =
      std::partition_point(ranges_.begin(), ranges_.end(), [&](const ByteRange& r) { return r.end < range.begin; });
  const auto last =
      std::partition_point(first, ranges_.end(), [&](const ByteRange& r) { return r.begin <= range.end; });
  if (first == last) {
    ranges_.insert(first, range);
    return;
  }
  first->begin = std::min(first->begin, range.begin);
  first->end = std::max(std::prev(last)->end, range.end);
  ranges_.erase(std::next(first), last);
}

void ByteRanges::add(const ByteRanges& other) {
  if (&other == this) return;
  for (const ByteRange& range : other.ranges_) add(range);
}

void ByteRanges::subtract(ByteRange range) {
  if (range.empty()) return;
  const auto first =
      std::partition_point(ranges_.begin(), ranges_.end(), [&](const ByteRange& r) { return r.end <= range.begin; });
  const auto last = std::partition_point(first, ranges_.end(), [&](const ByteRange& r) { return r.begin < range.end; });
  if (first == last) return;
  const ByteRange left{first->begin, range.begin};
  const ByteRange right{range.end, std::prev(last)->end};
  auto at = ranges_.erase(first, last);
  if (!right.empty()) at = ranges_.insert(at, right);
  if (!left.empty()) ranges_.insert(at, left);
}

ByteRanges ByteRanges::minus(const ByteRanges& other) const {
  ByteRanges result;
  auto cut = other.ranges_.begin();
  const auto cuts_end = other.ranges_.end();
  for (const ByteRange& range : ranges_) {
    std::uint64_t begin = range.begin;
    while (cut != cuts_end && cut->end <= begin) ++cut;
    // `cut` stays: its last bytes may reach into the next range.
    for (auto it = cut; it != cuts_end && it->begin < range.end; ++it) {
      if (begin < it->begin) result.ranges_.push_back({begin, it->begin});
      begin = it->end;
    }
    if (begin < range.end) result.ranges_.push_back({begin, range.end});
  }
  return result;
}

ByteRanges ByteRanges::intersect(const ByteRanges& other) const {
  ByteRanges result;
  auto a = ranges_.begin();
  auto b = other.ranges_.begin();
  while (a != ranges_.end() && b != other.ranges_.end()) {
    const ByteRange common{std::max(a->begin, b->begin), std::min(a->end, b->end)};
    if (!common.empty()) result.ranges_.push_back(common);
    if (a->end < b->end) {
      ++a;
    } else {
      ++b;
    }
  }
  return result;
}

bool ByteRanges::contains(ByteRange range) const {
  if (range.empty()) return true;
  const auto it =
      std::partition_point(ranges_.begin(), ranges_.end(), [&](const ByteRange& r) { return r.end < range.end; });
  return it != ranges_.end() && it->begin <= range.begin;
}

bool ByteRanges::contains(const ByteRanges& other) const { return other.minus(*this).empty(); }

std::uint64_t ByteRanges::nbytes() const {
  std::uint64_t total = 0;
  for (const ByteRange& range : ranges_) total += range.nbytes();
  return total;
}

ByteRange ByteRanges::span() const {
  if (ranges_.empty()) return {};
  return {ranges_.front().begin, ranges_.back().end};
}

std::string to_string(const ByteRanges& ranges) {
  std::string text = "{";
  for (const ByteRange& range : ranges.ranges()) {
    if (text.size() > 1) text += ", ";
    text += to_string(range);
  }
  return text + "}";
}

}  // namespace ebbtide
