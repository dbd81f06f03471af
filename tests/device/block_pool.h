// Which addresses of a device go to whom: free extents of each stream, and those of nobody. Not thread safe.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "device.h"

namespace ebbtide::device {

struct Extent {
  std::uint64_t begin = 0;
  std::uint64_t nbytes = 0;
};

class BlockPool {
 public:
  BlockPool(std::uint64_t begin, std::uint64_t nbytes) { common_.emplace(begin, nbytes); }

  // Of exactly `nbytes`, whole pages. Empty when neither the stream's extents nor the common ones have room.
  [[nodiscard]] std::optional<Extent> take(std::uint64_t nbytes, std::uint64_t stream, Reuse reuse);
  void give(std::uint64_t stream, Extent extent) { by_stream_[stream].push_back(extent); }
  // Makes the extents of all streams common. Nothing queued may touch them any more.
  void flush();

 private:
  using Extents = std::vector<Extent>;  // in the order they were freed

  std::optional<Extent> take_common(std::uint64_t nbytes);
  static std::optional<Extent> take_last(Extents& extents, std::uint64_t nbytes);
  static std::optional<Extent> take_first(Extents& extents, std::uint64_t nbytes);
  static Extent carve(Extents& extents, Extents::iterator from, std::uint64_t nbytes);
  static void merge(Extents& extents);
  void give_common(std::uint64_t begin, std::uint64_t nbytes);

  std::map<std::uint64_t, std::uint64_t> common_;  // nbytes by begin, no two of them adjacent
  std::map<std::uint64_t, Extents> by_stream_;
};

}  // namespace ebbtide::device
