#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ebbtide::device {

// The host or a stream, numbered densely.
using Actor = std::size_t;
constexpr Actor kHost = 0;

// How far each actor had come, as far as the owner of the clock knows.
class VectorClock {
 public:
  [[nodiscard]] std::uint64_t at(Actor actor) const { return actor < ticks_.size() ? ticks_[actor] : 0; }
  std::uint64_t tick(Actor actor) {
    if (actor >= ticks_.size()) ticks_.resize(actor + 1);
    return ++ticks_[actor];
  }
  void join(const VectorClock& other) {
    if (other.ticks_.size() > ticks_.size()) ticks_.resize(other.ticks_.size());
    for (std::size_t i = 0; i < other.ticks_.size(); ++i) ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }

 private:
  std::vector<std::uint64_t> ticks_;
};

}  // namespace ebbtide::device
