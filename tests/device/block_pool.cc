#include "block_pool.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ebbtide::device {

std::optional<Extent> BlockPool::take(std::uint64_t nbytes, std::uint64_t stream, Reuse reuse) {
  Extents& own = by_stream_[stream];
  const auto take_own = reuse == Reuse::kAtOnce ? take_last : take_first;
  if (reuse == Reuse::kDelayed) {
    if (auto extent = take_common(nbytes)) return extent;
  }
  if (auto extent = take_own(own, nbytes)) return extent;
  if (auto extent = take_common(nbytes)) return extent;
  merge(own);
  return take_own(own, nbytes);
}

void BlockPool::flush() {
  for (const auto& [stream, extents] : by_stream_) {
    for (const Extent& extent : extents) give_common(extent.begin, extent.nbytes);
  }
  by_stream_.clear();
}

std::optional<Extent> BlockPool::take_common(std::uint64_t nbytes) {
  const auto fits = [&](const auto& entry) { return entry.second >= nbytes; };
  const auto found = std::find_if(common_.begin(), common_.end(), fits);
  if (found == common_.end()) return std::nullopt;
  const auto [begin, have] = *found;
  common_.erase(found);
  if (have > nbytes) common_.emplace(begin + nbytes, have - nbytes);
  return Extent{begin, nbytes};
}

// The one of the same size that was freed last, else of the smallest size that fits.
std::optional<Extent> BlockPool::take_last(Extents& extents, std::uint64_t nbytes) {
  auto best = extents.end();
  for (auto it = extents.begin(); it != extents.end(); ++it) {
    if (it->nbytes >= nbytes && (best == extents.end() || it->nbytes <= best->nbytes)) best = it;
  }
  if (best == extents.end()) return std::nullopt;
  return carve(extents, best, nbytes);
}

std::optional<Extent> BlockPool::take_first(Extents& extents, std::uint64_t nbytes) {
  const auto fits = [&](const Extent& extent) { return extent.nbytes >= nbytes; };
  const auto first = std::find_if(extents.begin(), extents.end(), fits);
  if (first == extents.end()) return std::nullopt;
  return carve(extents, first, nbytes);
}

Extent BlockPool::carve(Extents& extents, Extents::iterator from, std::uint64_t nbytes) {
  Extent result = *from;
  if (from->nbytes == nbytes) {
    extents.erase(from);
  } else {
    from->begin += nbytes;
    from->nbytes -= nbytes;
    result.nbytes = nbytes;
  }
  return result;
}

void BlockPool::merge(Extents& extents) {
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  Extents merged;
  for (const Extent& extent : extents) {
    if (!merged.empty() && merged.back().begin + merged.back().nbytes == extent.begin) {
      merged.back().nbytes += extent.nbytes;
    } else {
      merged.push_back(extent);
    }
  }
  extents = std::move(merged);
}

void BlockPool::give_common(std::uint64_t begin, std::uint64_t nbytes) {
  auto next = common_.lower_bound(begin);
  if (next != common_.end() && begin + nbytes == next->first) {
    nbytes += next->second;
    next = common_.erase(next);
  }
  if (next != common_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      previous->second += nbytes;
      return;
    }
  }
  common_.emplace_hint(next, begin, nbytes);
}

}  // namespace ebbtide::device
